"""Results as text: the tables at the end of a run, and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any


def table(rows: list[list[str]], text_columns: tuple[int, ...] = (0,)) -> str:
    """Columns aligned: text to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            c.ljust(w) if i in text_columns else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def final_table(results: Mapping[str, Any]) -> str:
    """Accuracy on each task after each task, then the headline numbers beside the compared presets."""
    matrix = results["accuracy_matrix"]
    head = ["accuracy % on", *(f"task {i}" for i in range(len(matrix))), "all seen"]
    rows = [head]
    for task, values in enumerate(matrix):
        cells = ["" if value is None else f"{value:.1f}" for value in values]
        rows.append([f"after task {task}", *cells, f"{results['stage_accuracy'][task]:.1f}"])
    return f"\n{results['preset']} ({results['inference']} inference)\n{table(rows)}\n\n{headline(results)}"


def headline(results: Mapping[str, Any]) -> str:
    rows = [["", "last", "avg", "forgetting", "seconds"]]
    for name, part in each_method(results):
        seconds = f"{part['seconds']:.0f}" if "seconds" in part else ""
        rows.append([name, *(f"{part[key]:.1f}" for key in ("last", "avg", "forgetting")), seconds])
    return table(rows)


def each_method(results: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The run under each of its inference modes, then the compared presets."""
    preset, main = results["preset"], results["inference"]
    rows = [(preset, results)]
    rows += [(f"{preset}, {mode}", part) for mode, part in results["inference_modes"].items() if mode != main]
    for name, other in results["compare"].items():
        rows.append((name, other))
    return rows


def seeds_table(results: Mapping[str, Any]) -> str:
    rows = [[f"{len(results['runs'])} runs, mean +- deviation", "last", "avg", "forgetting"]]
    for name, part in each_method(results):
        rows.append([name, *(f"{part[k]:.2f} +- {part['std'][k]:.2f}" for k in ("last", "avg", "forgetting"))])
    return "\n" + table(rows)


def matrix_csv(results: Mapping[str, Any]) -> str:
    tasks = len(results["accuracy_matrix"])
    lines = [",".join(["after_task", *(f"task_{i}" for i in range(tasks)), "all_seen"])]
    for task, values in enumerate(results["accuracy_matrix"]):
        cells = ["" if value is None else f"{value:.4f}" for value in values]
        lines.append(",".join([str(task), *cells, f"{results['stage_accuracy'][task]:.4f}"]))
    return "\n".join(lines) + "\n"


def confusion_csv(classes: list[str], confusion: Any) -> str:
    """Rows are true classes, columns predicted ones."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["true \\ predicted", *classes])
    writer.writerows([name, *row] for name, row in zip(classes, confusion.tolist(), strict=True))
    return text.getvalue()


def mistakes(classes: Sequence[str], confusion: Any, most: int = 5) -> str:
    """The weakest classes, and the pairs that are confused most often; empty if every image is told right."""
    totals, right = confusion.sum(axis=1), confusion.diagonal()
    tested = sorted((right[i] / totals[i], i) for i in totals.nonzero()[0])
    weak = [f"{classes[i]} {100 * share:.0f}% of {totals[i]}" for share, i in tested if share < 1]
    pairs = [(confusion[i, j], i, j) for i, j in zip(*confusion.nonzero(), strict=True) if i != j]
    often = [f"{classes[i]} as {classes[j]} ({count})" for count, i, j in sorted(pairs, key=lambda pair: -pair[0])]
    return f"weakest: {', '.join(weak[:most])}\nconfused: {', '.join(often[:most])}" if weak else ""
