"""The paper's tables and figures that are sets of runs: running them, and the page that compares with the paper.

An experiment is data: rows (methods) by columns (protocols). Each cell is an ordinary run in a folder of its own, so an
experiment goes on where it stopped. `--scale mini` runs every row on one small protocol instead of the paper's.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import store
from .config import Config
from .errors import PassloraError, nearest
from .paper import COLUMNS, EXPERIMENTS, MINI, Experiment, Row

SEEDS = {"full": [0, 1, 2], "mini": [0, 1, 2]}
Say = Callable[[str], None]


@dataclass
class Cell:
    """One run: its mean numbers over seeds, their deviation, and the paper's."""

    row: str
    column: str
    values: dict[str, float] = field(default_factory=dict)
    deviations: dict[str, float] = field(default_factory=dict)
    paper: dict[str, float] = field(default_factory=dict)
    stages: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def find(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise PassloraError(f"no experiment {name!r}{nearest(name, EXPERIMENTS)}; passlora reproduce alone lists them")
    return EXPERIMENTS[name]


def configurations(name: str, scale: str, overrides: Mapping[str, Any], folder: Path) -> dict[tuple[str, str], Config]:
    """The configuration of every cell, checked before the first one is run."""
    experiment = find(name)
    columns = {"mini": MINI} if scale == "mini" else {column: COLUMNS[column] for column in experiment.columns}
    return {
        (row.name, column): Config.make(
            **{
                **base,
                **row.settings,
                "seeds": SEEDS[scale],
                **overrides,
                "output_dir": str(folder / name / scale / column / row.folder),
            }
        )
        for column, base in columns.items()
        for row in experiment.rows
        if row.mode is None
    }


def reproduce(name: str, scale: str, overrides: Mapping[str, Any], folder: Path, say: Say = print) -> list[Cell]:
    """Run what is not done yet, and write the experiment's table and picture."""
    from .run import train

    experiment = find(name)
    configs = configurations(name, scale, overrides, folder)
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for i, (key, config) in enumerate(configs.items(), start=1):
        say(f"== {name}, run {i} of {len(configs)}: {', '.join(key)} ==")
        results[key] = train(config, say)
    cells = []
    for column in dict.fromkeys(column for _, column in configs):
        for row in experiment.rows:
            source = row.name if row.mode is None else row.source
            cells.append(cell(experiment, row, column, results[source, column], scale))
    write(experiment, name, cells, folder / name / scale, scale)
    say(f"\n{as_text(experiment, cells)}\n\nsaved in {folder / name / scale}: {name}.md, .csv, .png and .svg")
    return cells


def cell(experiment: Experiment, row: Row, column: str, results: dict[str, Any], scale: str) -> Cell:
    part = results if row.mode is None else results["inference_modes"][row.mode]
    spread = part.get("std", {})
    paper_column = experiment.mini_column if scale == "mini" else column
    return Cell(
        row.name,
        column,
        {metric: part[metric] for metric in experiment.metrics if metric in part},
        {metric: spread[metric] for metric in experiment.metrics if metric in spread},
        dict(row.paper.get(paper_column, {})),
        list(part["stage_accuracy"]),
        list(results["task_sizes"]),
    )


# --- writing -----------------------------------------------------------------------------------------------------


def write(experiment: Experiment, name: str, cells: list[Cell], folder: Path, scale: str) -> None:
    from . import figures

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "protocol", "metric", "measured", "deviation", "paper"])
    for part in cells:
        for metric, value in part.values.items():
            paper = part.paper.get(metric, "")
            writer.writerow(
                [part.row, part.column, metric, f"{value:.4f}", f"{part.deviations.get(metric, 0):.4f}", paper]
            )
    store.write_text(folder / f"{name}.csv", text.getvalue())
    store.write_text(folder / f"{name}.md", as_markdown(experiment, name, cells, scale))
    for suffix in ("png", "svg"):
        figures.experiment(experiment.title, experiment.plot, cells, folder / f"{name}.{suffix}")


def table_rows(experiment: Experiment, cells: list[Cell]) -> list[list[str]]:
    """A method a row, a metric a column, the paper's figure in brackets beside it."""
    columns = list(dict.fromkeys(part.column for part in cells))
    several = len(columns) > 1
    head = [f"{column} {metric}" if several else metric for column in columns for metric in experiment.metrics]
    rows = [["method", *head]]
    for row in experiment.rows:
        line = [row.name]
        for column in columns:
            part = next(c for c in cells if (c.row, c.column) == (row.name, column))
            line += [shown(part, metric) for metric in experiment.metrics]
        rows.append(line)
    return rows


def shown(part: Cell, metric: str) -> str:
    if metric not in part.values:
        return ""
    deviation = f" +- {part.deviations[metric]:.1f}" if metric in part.deviations else ""
    paper = f" ({part.paper[metric]:.1f})" if metric in part.paper else ""
    return f"{part.values[metric]:.1f}{deviation}{paper}"


def as_text(experiment: Experiment, cells: list[Cell]) -> str:
    from .report import table

    return f"{experiment.title}; the paper's figures in brackets\n{table(table_rows(experiment, cells))}"


def as_markdown(experiment: Experiment, name: str, cells: list[Cell], scale: str) -> str:
    head, *rows = table_rows(experiment, cells)
    lines = [f"# {experiment.title}", "", experiment.about, ""]
    if scale == "mini":
        lines += [
            "Measured at `--scale mini`: a small backbone, few images, short training. It shows how methods compare "
            "there; the paper's figures (in brackets) come from its own, full setting and are not to be met by these.",
            "",
        ]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += [
        "",
        f"![{experiment.title}]({name}.png)",
        "",
        "```sh",
        f"passlora reproduce {name} --scale {scale}",
        "```",
        "",
    ]
    return "\n".join(lines)
