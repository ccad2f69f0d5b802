"""The paper's tables and figures: running what they need, and the page that compares with the paper.

An experiment is data: rows (methods) by columns (protocols). Each cell is an ordinary run a seed, in a folder that all
experiments share: what one of them has run, no other runs again, and each goes on where it stopped.
`--scale mini` runs every row on one small protocol instead of the paper's.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from passlora import files
from passlora.analysis.paper import COLUMNS, EXPERIMENTS, MINI, Experiment, Row
from passlora.config import FIELDS, PRESETS, Config, applicable, is_local
from passlora.environment import is_first_process
from passlora.errors import PassloraError, nearest

SEEDS = [0, 1, 2]
RUN_WITH = ("output_dir", "overwrite_output_dir", "dataloader_num_workers", "report_to", "save_steps", "save_epochs")
WITHOUT_RUNS = ("memory",)
log = logging.getLogger(__name__)


@dataclass
class Cell:
    """A method on a protocol: mean numbers over seeds, their deviation, the paper's, and what a picture needs."""

    row: str
    column: str
    values: dict[str, float] = field(default_factory=dict)
    deviations: dict[str, float] = field(default_factory=dict)
    paper: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)  # means over seeds, a value a task
    sizes: list[int] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)  # of the first seed: a picture's panels
    seeds: int = 1


def find(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise PassloraError(f"no experiment {name!r}{nearest(name, EXPERIMENTS)}; passlora reproduce alone lists them")
    return EXPERIMENTS[name]


def configurations(
    name: str, scale: str, overrides: Mapping[str, Any], folder: Path, columns: tuple[str, ...] = ()
) -> dict[tuple[str, str], dict[int, Config]]:
    """For every cell the configuration of each seed; all checked before the first one is run."""
    experiment, changes = find(name), dict(overrides)
    seeds = Config.make(num_tasks=1, seeds=changes.pop("seeds", SEEDS)).training.seeds or [0]
    protocols = {"mini": {**MINI, **experiment.mini}}
    if scale == "full":
        for column in columns:
            if column not in experiment.columns:
                raise PassloraError(f"{name} has no column {column!r}{nearest(column, experiment.columns)}")
        protocols = {column: COLUMNS[column] for column in columns or experiment.columns}
    elif columns:
        raise PassloraError("--columns goes with --scale full: mini has one column")
    if "dataset_name" in changes and len({settings["dataset_name"] for settings in protocols.values()}) > 1:
        raise PassloraError(f"{name} has columns of several datasets: say with --columns which --dataset_name is for")
    cells: dict[tuple[str, str], dict[int, Config]] = {}
    for column, base in protocols.items():
        for row in experiment.rows:
            own = {**PRESETS[row.settings.get("preset", "pass++")], **row.settings}
            common = Config.make(**applicable({**base, **changes, **own}))  # what makes the row stays the row's
            if common.method.classifier == "head":  # all ways to read a run at once, so that experiments can share it
                common = common.replace(
                    extra_inference=["single", *(["vanilla"] if common.method.sst else []), "nearest_prototype"]
                )
            cells[row.name, column] = {
                seed: common.replace(seed=seed, output_dir=str(run_folder(folder, common) / f"seed_{seed}"))
                for seed in seeds
            }
    return cells


def run_folder(folder: Path, config: Config) -> Path:
    """One a configuration, whatever experiment asks for it."""
    flat = {
        key: value for key, value in config.flat().items() if value != FIELDS[key].default
    }  # later knobs matter not
    flat = {key: value for key, value in flat.items() if key not in (*RUN_WITH, "seed")}
    if is_local(config.data.dataset_name):
        flat["dataset_name"] = str(Path(config.data.dataset_name).expanduser().resolve())
    digest = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:10]
    return folder / "runs" / f"{config.method.preset}-{digest}"


def reproduce(
    name: str,
    scale: str,
    overrides: Mapping[str, Any],
    folder: Path,
    columns: tuple[str, ...] = (),
) -> list[Cell]:
    """Run what is not done yet, and write the experiment's table and picture."""
    from passlora.analysis import measures
    from passlora.runs.run import train

    experiment, cells = find(name), []
    configs = configurations(name, scale, overrides, folder, columns)
    total, done = sum(map(len, configs.values())), 0
    for (row_name, column), by_seed in configs.items():
        row = next(row for row in experiment.rows if row.name == row_name)
        parts = []
        for seed, config in by_seed.items():
            done, found = done + 1, {}
            if experiment.measure not in WITHOUT_RUNS:
                log.info(f"== {name}, run {done} of {total}: {row_name}, {column}, seed {seed} ==")
                found = dict(train(config))
            kept = folder / name / scale / column / row.folder / f"seed_{seed}.json"
            parts.append(measures.measure(experiment.measure, row, config, found, scale, kept))
        cells.append(cell(experiment, row, column, parts, scale))
    if is_first_process():
        flags = {**overrides, **({"columns": list(columns)} if columns else {})}
        command = " ".join(["passlora reproduce", name, "--scale", scale, *map(as_flag, flags, flags.values())])
        write(experiment, name, cells, folder / name / scale, scale, command)
    log.info(f"\n{as_text(experiment, cells)}\n\nsaved in {folder / name / scale}: {name}.md, .csv, .png and .svg")
    return cells


def cell(experiment: Experiment, row: Row, column: str, parts: list[dict[str, Any]], scale: str) -> Cell:
    """Means over seeds of what was measured."""
    paper_column = experiment.mini_column if scale == "mini" else column
    values = {metric: [part["values"][metric] for part in parts] for metric in experiment.metrics}
    curves = {
        name: [fmean(stage) for stage in zip(*(part["curves"][name] for part in parts), strict=True)]
        for name in parts[0].get("curves", {})
    }
    return Cell(
        row.name,
        column,
        {metric: fmean(numbers) for metric, numbers in values.items()},
        {metric: stdev(numbers) for metric, numbers in values.items() if len(numbers) > 1},
        dict(row.paper.get(paper_column, {})),
        curves,
        parts[0].get("sizes", []),
        parts[0].get("points", []),
        len(parts),
    )


# --- writing -----------------------------------------------------------------------------------------------------


def as_flag(name: str, value: Any) -> str:
    values = value if isinstance(value, (list, tuple)) else [value]
    return " ".join([f"--{name}", *(shlex.quote(str(part)) for part in values)])


def write(experiment: Experiment, name: str, cells: list[Cell], folder: Path, scale: str, command: str) -> None:
    from passlora.display import figures

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "protocol", "metric", "measured", "deviation", "paper"])
    for part in cells:
        for metric, value in part.values.items():
            deviation = f"{part.deviations[metric]:.4f}" if metric in part.deviations else ""
            writer.writerow([part.row, part.column, metric, f"{value:.4f}", deviation, part.paper.get(metric, "")])
    files.write_text(folder / f"{name}.csv", text.getvalue())
    files.write_text(folder / f"{name}.md", as_markdown(experiment, name, cells, scale, command))
    for suffix in ("png", "svg"):
        figures.experiment(experiment.title, experiment.plot, cells, folder / f"{name}.{suffix}")


def table_rows(experiment: Experiment, cells: list[Cell]) -> list[list[str]]:
    """A method a row, a metric a column, the paper's figure in brackets beside it; many metrics stand on end."""
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
    return [list(line) for line in zip(*rows, strict=True)] if len(experiment.metrics) > 8 else rows


def shown(part: Cell, metric: str) -> str:
    def number(value: float) -> str:
        return f"{value:,.0f}" if metric == "entries" else f"{value:.1f}"

    deviation = f" +- {part.deviations[metric]:.1f}" if part.deviations.get(metric) else ""
    paper = f" ({number(part.paper[metric])})" if metric in part.paper else ""
    return f"{number(part.values[metric])}{deviation}{paper}"


def as_text(experiment: Experiment, cells: list[Cell]) -> str:
    from passlora.display.tables import table

    return f"{experiment.title}; the paper's figures in brackets\n{table(table_rows(experiment, cells))}"


def as_markdown(experiment: Experiment, name: str, cells: list[Cell], scale: str, command: str) -> str:
    head, *rows = table_rows(experiment, cells)
    lines = [f"# {experiment.title}", "", experiment.about, ""]
    if scale == "mini":
        lines += [
            "Measured at `--scale mini`: a small backbone, few images, short training. It shows how methods compare "
            "there; the paper's figures (in brackets) come from its own, full setting and are not to be met by these.",
            "",
        ]
    if cells[0].seeds > 1:
        lines += [f"Mean and deviation over {cells[0].seeds} seeds.", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += [
        "",
        f"![{experiment.title}]({name}.png)",
        "",
        "```sh",
        command,
        "```",
        "",
    ]
    return "\n".join(lines)
