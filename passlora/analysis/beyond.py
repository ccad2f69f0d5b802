"""Beyond the paper: the preset passlora against every rival, on the same data and class orders.

Columns are settings, rows are methods. Class order i also draws the images and seeds the training: a run of one method
is paired with those of all others. Methods that never train the network read features that are computed once.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from passlora import files
from passlora.analysis.paper import Row
from passlora.analysis.reproduce import as_flag, run_folder
from passlora.analysis.rivals import BOUNDS, COLUMNS, ROWS, Column
from passlora.config import NUM_ROTATIONS, PRESETS, ROTATED_INFERENCE, Config, applicable
from passlora.display.tables import table
from passlora.environment import is_first_process
from passlora.errors import PassloraError, nearest
from passlora.folder.layout import task_folder

if TYPE_CHECKING:
    from passlora.analysis.on_features import Sources

METRICS = ("last", "avg", "newest", "ece", "stored", "seconds", "passes")
SET_BY_ORDERS = ("class_order", "class_order_seed")
log = logging.getLogger(__name__)


def chosen_columns(scale: str, names: Sequence[str], rows: Sequence[str] = ()) -> dict[str, Column]:
    """With those of their rows that are asked for, or all."""
    known = COLUMNS[scale]
    for name in names:
        if name not in known:
            raise PassloraError(f"beyond has no column {name!r}{nearest(name, known)}; it has {', '.join(known)}")
    for name in rows:
        if name not in ROWS:
            raise PassloraError(f"beyond has no row {name!r}{nearest(name, ROWS)}; it has {', '.join(ROWS)}")
    chosen = {name: known[name] for name in names or known}
    if not rows:
        return chosen
    for name, column in chosen.items():
        own = tuple(row for row in column.rows if row in rows)
        if not own:
            raise PassloraError(f"the column {name} has none of these rows; it has {', '.join(column.rows)}")
        chosen[name] = replace(column, rows=own)
    return chosen


def configuration(column: Column, row: Row, order: int, overrides: Mapping[str, Any], folder: Path) -> Config:
    """Of one run: checked, and in a folder of its own."""
    own = {**PRESETS[row.settings["preset"]], **row.settings}
    given = {**column.settings, **overrides, **own, "seed": order, "class_order_seed": order}
    config = Config.make(**applicable(given))
    base = config.replace(class_order_seed=None, seed=0)
    return config.replace(output_dir=str(run_folder(folder, base) / f"order_{order}"))


def check(
    scale: str, overrides: Mapping[str, Any], folder: Path, names: Sequence[str], rows: Sequence[str] = ()
) -> None:
    """Every run of every column can be made; before the first one is."""
    columns = chosen_columns(scale, names, rows).values()
    for name in ("dataset_name", "model_name_or_path"):
        if name in overrides and len({column.settings[name] for column in columns}) > 1:
            raise PassloraError(f"these columns differ in {name}: say with --columns which one yours is for")
    for name in SET_BY_ORDERS:
        if name in overrides:
            raise PassloraError(f"{name}: the comparison chooses its class orders itself, one a seed (--seeds)")
    for column in columns:
        for name in column.rows:
            configuration(column, ROWS[name], 0, overrides, folder)


def run(scale: str, overrides: Mapping[str, Any], folder: Path, names: Sequence[str], rows: Sequence[str] = ()) -> None:
    """What is not done yet, column by column and order by order; each column ends in its table."""
    from passlora.analysis.on_features import Sources

    orders = overrides.get("seeds")
    overrides = {name: value for name, value in overrides.items() if name != "seeds"}
    for name, column in chosen_columns(scale, names, rows).items():
        place = folder / "beyond" / scale / name
        sources = Sources()
        found: dict[str, list[dict[str, float]]] = {row: [] for row in column.rows}
        for order in map(int, orders or column.orders):
            for row in (ROWS[row_name] for row_name in column.rows):
                config = configuration(column, row, order, overrides, folder)
                log.info(f"== {name}: {row.name}, order {order} ==")
                found[row.name].append(measured(config, place / row.folder / f"order_{order}.json", sources))
        flags = {
            **overrides,
            "columns": [name],
            **({"rows": rows} if rows else {}),
            **({"seeds": orders} if orders else {}),
        }
        command = " ".join(["passlora reproduce beyond", "--scale", scale, *map(as_flag, flags, flags.values())])
        if is_first_process():
            files.write_text(place / "beyond.md", as_markdown(column, found, command))
        log.info(f"\n{column.about}\n{table(table_rows(column, found))}\n\nsaved in {place}: beyond.md")


def measured(config: Config, kept: Path, sources: Sources) -> dict[str, float]:
    """The numbers of one run; read back where it was made before with the same settings."""
    stamp = Path(config.training.output_dir).parent.name
    if kept.is_file():
        known = json.loads(kept.read_text(encoding="utf-8"))
        if known.pop("of", None) == stamp:
            return known
    results: dict[str, Any] = {}
    if config.method.adapt_tasks == "all":
        from passlora.runs.run import train

        results |= train(config)
        results["stored"] = numbers_stored(Path(config.training.output_dir), len(results["task_sizes"]) - 1)
        results["seconds"] = sum(value for value in results["train_seconds"] if value)
    else:
        decided, seconds = sources.settled(config)
        results |= sources.learnt(decided)
        results["seconds"] += seconds
        results["adapted"] = decided.method.adapt_tasks
    numbers = {name: float(results[name]) for name in METRICS if name in results}
    numbers["passes"] = passes(config)
    if is_first_process():
        files.write_json(
            kept, {**numbers, "of": stamp, **({"adapted": results["adapted"]} if "adapted" in results else {})}
        )
    return numbers


def passes(config: Config) -> float:
    """Of the network, to answer for one image."""
    method = config.method
    rotated = method.inference in ROTATED_INFERENCE or (method.maps_features and method.classifier_views > 1)
    return float(NUM_ROTATIONS if rotated else 1)


def numbers_stored(folder: Path, task: int) -> int:
    """In the files of the last task: all it takes to go on from there."""
    total = 0
    for path in (folder / task_folder(task)).glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


# --- the table -------------------------------------------------------------------------------------------------------


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean of paired differences, and half the width of its 95% interval (Student's t)."""
    from scipy.stats import t as student

    n = len(differences)
    if n < 2:
        return fmean(differences), math.nan
    return fmean(differences), float(student.ppf(0.975, n - 1)) * stdev(differences) / math.sqrt(n)


def table_rows(column: Column, found: Mapping[str, list[dict[str, float]]]) -> list[list[str]]:
    """A method a row; the best in bold. A bound has one stage, so no average over stages."""
    rows = [["method", *METRICS[:-3], "numbers stored", "seconds", "passes", f"last, less {column.reference}"]]
    ours = [part["last"] for part in found.get(column.reference, [])]
    best = max(
        (fmean(part["last"] for part in parts) for name, parts in found.items() if name not in bounds()), default=0
    )
    for name, parts in found.items():
        line = [name]
        for metric in METRICS:
            values = [part[metric] for part in parts]
            shown = f"{fmean(values):,.0f}" if metric in METRICS[-3:] else f"{fmean(values):.1f}"
            if metric == "last" and len(values) > 1:
                shown += f" ± {stdev(values):.1f}"
            line.append("" if metric in ("avg", "newest") and name in bounds() else shown)
        if name == column.reference or not ours:
            line.append("")
        else:
            mean, half = interval([part["last"] - own for part, own in zip(parts, ours, strict=True)])
            line.append(f"{mean:+.1f}" + ("" if math.isnan(half) else f" ± {half:.1f}"))
        if name not in bounds() and fmean(part["last"] for part in parts) >= best - 1e-9:
            line[0] = f"**{line[0]}**"
        rows.append(line)
    return rows


def bounds() -> set[str]:
    return {row.name for row in BOUNDS}


def as_markdown(column: Column, found: Mapping[str, list[dict[str, float]]], command: str) -> str:
    head, *rows = table_rows(column, found)
    count = len(next(iter(found.values())))
    lines = [
        f"{column.about}. Mean over {count} class order{'s' if count > 1 else ''} (± standard deviation); the last "
        "column is the mean paired difference with its 95% interval. Percent; the best method in bold, bounds aside.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        "```sh",
        command,
        "```",
        "",
    ]
    return "\n".join(lines)
