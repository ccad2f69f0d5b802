"""What stands in each section of the report: numbers as text, tables and charts; how it looks is the template's.

A section is a dictionary, or None where the run has nothing to tell.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from passlora import __version__
from passlora.analysis import charts
from passlora.analysis.run_folder import Run
from passlora.config import LOCAL_DATA
from passlora.data.corruptions import GROUPS
from passlora.display.tables import each_method
from passlora.folder import layout
from passlora.training.metrics import class_counts

MAX_CELLS = 24  # tasks or classes up to which a matrix is a table; a picture beyond
METRICS = ("last", "avg", "forgetting")
Section = dict[str, Any]


@dataclass
class Heat:
    """A cell coloured by a number from 0 to 100."""

    value: float
    text: str

    @property
    def share(self) -> str:
        return f"{min(max(self.value / 100, 0), 1):.3f}"


@dataclass
class Table:
    """The first cell of a row is its name."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Heat]]
    is_heat_map: bool = False


def heat(value: float | None) -> str | Heat:
    return "" if value is None else Heat(value, f"{value:.0f}")


def tasks(count: int) -> list[str]:
    return [f"task {i}" for i in range(count)]


def with_deviation(part: dict[str, Any], metric: str) -> str:
    spread = part.get("std", {}).get(metric)
    return f"{part[metric]:.1f}" + (f" ± {spread:.1f}" if spread is not None else "")


def about(run: Run) -> str:
    """The line under the title."""
    seeds = len(run.parts)
    words = (
        str(run.results["preset"]),
        f"{run.results['inference']} inference",
        str(run.settings.get("model_name_or_path", "")),
        str(run.settings.get("dataset_name", "")).split(":")[0],
        f"{seeds} seeds, mean ± deviation" if seeds > 1 else f"seed {run.results.get('seed', 0)}",
    )
    return " · ".join(filter(None, words))


def tiles(run: Run) -> dict[str, str]:
    results = run.results
    found = {
        "last accuracy (%)": with_deviation(results, "last"),
        "average over tasks (%)": with_deviation(results, "avg"),
        "forgetting (points)": with_deviation(results, "forgetting"),
    }
    if all("ece" in part for part in run.parts):
        found["calibration error (%)"] = f"{np.mean([part['ece'] for part in run.parts]):.1f}"
    found["classes in tasks"] = f"{sum(results['task_sizes'])} in {len(results['task_sizes'])}"
    if "prototype_entries" in run.parts[0]:
        found["numbers kept of old classes"] = f"{run.parts[0]['prototype_entries']:,}"
    found["seconds"] = f"{results['seconds']:,.0f}"
    return found


def methods(runs: list[Run]) -> dict[str, dict[str, Any]]:
    """Everything that has a curve: each run under each inference mode, and the presets compared within it."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        for name, part in each_method(run.results):
            named = name if len(runs) == 1 else f"{run.name}: {name}"
            found[named] = {"task_sizes": run.results["task_sizes"], **part}
    return found


def curves_of(runs: list[Run]) -> dict[str, Any]:
    """All methods in the form of one run's results, as figures draw them."""
    (first, results), *others = methods(runs).items()
    return {**results, "preset": first, "compare": dict(others)}


def comparison(runs: list[Run]) -> Section:
    rows = [[name, *(with_deviation(part, m) for m in METRICS)] for name, part in methods(runs).items()]
    return {"table": Table(["method", *METRICS], rows)}


def accuracy_curves(runs: list[Run]) -> Section:
    found = methods(runs)
    at = {n: dict(zip(accumulate(p["task_sizes"]), p["stage_accuracy"], strict=True)) for n, p in found.items()}
    seen = sorted({count for known in at.values() for count in known})
    rows = [[name, *(f"{known[n]:.1f}" if n in known else "" for n in seen)] for name, known in at.items()]
    ends = ((name, part["stage_accuracy"]) for name, part in found.items())
    words = "; ".join(f"{name} from {values[0]:.1f} to {values[-1]:.1f}" for name, values in ends)
    description = f"Accuracy over all classes seen, after each task: {words}."
    return {
        "chart": charts.accuracy(curves_of(runs), description),
        "table": Table(["method", *map(str, seen)], rows),
    }


def accuracy_matrix(run: Run) -> Section:
    matrix = run.results["accuracy_matrix"]
    if len(matrix) > MAX_CELLS:
        filled = np.array([[0.0 if value is None else value for value in row] for row in matrix])
        return {"picture": charts.matrix_png(filled / 100)}
    names = tasks(len(matrix))
    rows = [[name, *map(heat, row)] for name, row in zip(names, matrix, strict=True)]
    return {"table": Table(["after", *names], rows, is_heat_map=True)}


def biases(run: Run) -> Section | None:
    """Old for new and new for old; and how far the old classes' means have moved, where that was measured."""
    part = run.parts[0]
    known = [(task, pair) for task, pair in enumerate(part.get("bias", [])) if pair is not None]
    if not known:
        return None
    rows = [[f"task {task}", f"{old:.1f}", f"{new:.1f}"] for task, (old, new) in known]
    drift = part.get("drift") or []
    moved = [
        [f"task {i}", *(f"{d:.2f}" for d in row or ()), *[""] * (len(drift) - len(row or ()))]
        for i, row in enumerate(drift)
    ]
    return {
        "table": Table(["after", "old taken for new", "new taken for old"], rows),
        "drift": Table(["after", *tasks(len(drift))], moved) if drift else None,
    }


def confusions(run: Run) -> Section | None:
    if run.confusion is None:
        return None
    classes, confusion = run.classes, run.confusion
    mixed = confusion - np.diag(np.diagonal(confusion))
    worst = np.argsort(-mixed, axis=None, kind="stable")[:10]
    pairs = [divmod(int(at), len(classes)) for at in worst if mixed.flat[at]]
    share = 100 * confusion / confusion.sum(axis=1, keepdims=True).clip(min=1)
    found: Section = {
        "classes": len(classes),
        "right": f"{np.diagonal(share).mean():.0f}",
        "frequent": [
            f"{classes[a]} taken for {classes[b]}: {mixed[a, b]} of {confusion[a].sum()} images" for a, b in pairs
        ],
    }
    if len(classes) > MAX_CELLS:
        return {**found, "picture": charts.matrix_png(share / 100)}
    rows = [[name, *map(heat, row)] for name, row in zip(classes, share.tolist(), strict=True)]
    return {**found, "table": Table(["true, as %", *classes], rows, is_heat_map=True)}


def per_class(run: Run) -> Section | None:
    if run.confusion is None:
        return None
    right, total = class_counts(run.confusion)
    rows = []
    for i, (name, task) in enumerate(zip(run.classes, run.tasks, strict=True)):
        others = run.confusion[i].copy()
        others[i] = 0
        accuracy = 100 * right[i] / max(total[i], 1)
        rows.append(
            {
                "name": name,
                "task": task,
                "images": total[i],
                "accuracy": Heat(accuracy, f"{accuracy:.1f}"),
                "taken_for": run.classes[int(others.argmax())] if others.any() else "",
            }
        )
    return {"rows": rows}


def calibration(run: Run) -> Section | None:
    if run.bins is None:
        return None
    images, right, confidence = run.bins.T
    error = 100 * np.abs(right - confidence).sum() / images.sum()
    mean_confidence, mean_accuracy = 100 * confidence.sum() / images.sum(), 100 * right.sum() / images.sum()
    lean = "more sure than right" if mean_confidence > mean_accuracy else "less sure than it could be"
    sentence = (
        f"On average the model believes to be right in {mean_confidence:.1f}% of images, and it is in "
        f"{mean_accuracy:.1f}%: it is {lean}. Expected calibration error (15 bins): {error:.1f}%."
    )
    rows = [
        [f"up to {100 * (i + 1) / len(images):.0f}", f"{n:.0f}", f"{100 * r / n:.1f}", f"{100 * c / n:.1f}"]
        for i, (n, r, c) in enumerate(run.bins)
        if n
    ]
    return {
        "sentence": sentence,
        "chart": charts.reliability(run.bins, f"Reliability diagram. {sentence}"),
        "table": Table(["confidence (%)", "images", "accuracy (%)", "mean confidence (%)"], rows),
    }


def robustness(run: Run) -> Section | None:
    if run.robustness is None:
        if run.model_folder is None:
            return None
        return {"command": f"passlora robustness {shlex.quote(str(run.model_folder))} --data DATA"}
    accuracy, clean = run.robustness["accuracy"], run.robustness["clean"]
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    mean = float(np.mean(list(accuracy.values())))
    worst = min(accuracy, key=lambda name: accuracy[name])
    sentence = (
        f"Severity {run.robustness['severity']} of 5, {run.robustness['images']} images: {clean:.1f}% on clean images, "
        f"{mean:.1f}% on average over {len(accuracy)} corruptions, least under {worst.replace('_', ' ')} "
        f"({accuracy[worst]:.1f}%)."
    )
    rows = [
        [name.replace("_", " "), group_of.get(name, ""), f"{value:.1f}", f"{clean - value:.1f}"]
        for name, value in accuracy.items()
    ]
    return {
        "sentence": sentence,
        "chart": charts.robustness(run.robustness, f"Accuracy on damaged images. {sentence}"),
        "table": Table(["corruption", "kind", "accuracy (%)", "drop"], rows),
    }


def cost(run: Run) -> Section | None:
    part = run.parts[0]
    if "train_seconds" not in part:
        return None
    rows = [
        [f"task {task}", f"{train:.1f}", f"{test:.1f}"]
        for task, (train, test) in enumerate(zip(part["train_seconds"], part["test_seconds"], strict=True))
        if train is not None
    ]
    kept = None
    if "prototype_entries" in part:
        kept = {"numbers": f"{part['prototype_entries']:,}", "kilobytes": f"{part['prototype_bytes'] / 1024:.0f}"}
    return {
        "kept": kept,
        "peak": f"{part.get('peak_memory_bytes', 0) / 2**20:,.0f}",
        "table": Table(["", "learning (s)", "testing all classes seen (s)"], rows),
    }


def settings(run: Run) -> Section:
    paths = (run.folder / layout.CONFIG, f"{run.folder}-again", run.folder)
    config, again, folder = (shlex.quote(str(path)) for path in paths)
    lines = [f"passlora train --config {config} --output_dir {again}", f"passlora report {folder} --html report.html"]
    if str(run.settings.get("dataset_name", "")).startswith(LOCAL_DATA):
        lines[0] += " --dataset_name PATH   # the data lay on the machine of the run"
    if run.model_folder is not None:
        lines.append(f"passlora info {shlex.quote(str(run.model_folder))}")
    return {
        "commands": "\n".join(lines),
        "all": {name: str(value) for name, value in run.settings.items()},
        "version": str(run.results.get("version", __version__)),
    }
