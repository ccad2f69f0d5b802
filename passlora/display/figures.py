"""Pictures of a run, as files; what is drawn onto axes is also what the report page shows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from passlora import files

COLOURS = ("#1769c4", "#b4530a", "#1d7d46", "#a3338f", "#6b6f00", "#0b7b8a", "#b3263a", "#5b4bc4")
LONGEST = 48  # characters of a name in a picture


def new_figure(width: float, height: float) -> Any:
    """A figure that needs no display and no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    files.write(path, lambda temporary: write(figure, temporary, dpi=150))


def write(figure: Any, target: Any, **options: Any) -> None:
    """To a file or a stream. A dollar sign in a name is a dollar sign, and a script the font lacks is no warning."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        figure.savefig(target, **options)


def label(name: str) -> str:
    """A name from anywhere as one short line that matplotlib shows: it hides a label that begins with an underscore."""
    name = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())
    name = name if len(name) <= LONGEST else name[: LONGEST - 3] + "..."
    return f" {name}" if name.startswith("_") else name


def method_styles() -> Any:
    """Colours, each with a marker so that it is not colour alone that tells methods apart; then dashed."""
    from cycler import cycler

    return cycler(linestyle=["-", "--"]) * (cycler(color=COLOURS) + cycler(marker="osD^osD^"))


def accuracy_curves(results: Mapping[str, Any], path: Path) -> None:
    figure = new_figure(6, 3.8)
    axes = figure.subplots()
    draw_accuracy(axes, results)
    axes.legend(loc="lower left")
    save(figure, path)


def draw_accuracy(axes: Any, results: Mapping[str, Any]) -> None:
    """Accuracy over all classes seen, after each task; a band of one deviation over several seeds."""
    axes.set_prop_cycle(method_styles())
    ticks = set()
    for name, part in {results["preset"]: results, **results["compare"]}.items():
        values, seen = part["stage_accuracy"], list(accumulate(part.get("task_sizes", results["task_sizes"])))
        ticks |= set(seen)
        (line,) = axes.plot(seen, values, label=f"{label(name)} (last {part['last']:.1f}%)", markersize=5)
        if "std" in part:
            spread = part["std"]["stage_accuracy"]
            low = [v - s for v, s in zip(values, spread, strict=True)]
            high = [v + s for v, s in zip(values, spread, strict=True)]
            axes.fill_between(seen, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="classes seen", ylabel="accuracy over all of them (%)", ylim=(0, 102))
    axes.set_xticks(sorted(ticks) if len(ticks) <= 12 else sorted(ticks)[:: len(ticks) // 10])
    axes.grid(alpha=0.3)


def accuracy_matrix(results: Mapping[str, Any], path: Path) -> None:
    """Accuracy on each task after each task, as a heat map."""
    matrix = results["accuracy_matrix"]
    tasks = len(matrix)
    figure = new_figure(1.6 + 0.5 * max(tasks, 5), 1.2 + 0.45 * max(tasks, 5))
    axes = figure.subplots()
    cells = [[float("nan") if value is None else value for value in row] for row in matrix]
    shown = axes.imshow(cells, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    if tasks <= 12:
        for t, row in enumerate(matrix):
            for i, value in enumerate(row):
                if value is not None:
                    colour = "white" if value < 60 else "black"
                    axes.text(i, t, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=9)
    ticks = range(tasks) if tasks <= 12 else range(0, tasks, tasks // 10)
    axes.set_xticks(ticks, [str(i) for i in ticks])
    axes.set_yticks(ticks, [str(i) for i in ticks])
    axes.set(xlabel="tested on task", ylabel="after learning task")
    figure.colorbar(shown, ax=axes, label="accuracy (%)")
    save(figure, path)


def confusion_matrix(classes: list[str], confusion: Any, path: Path) -> None:
    """Share of each true class (row) predicted as each class (column)."""
    count = len(classes)
    side = 2.5 + 0.28 * min(count, 40)
    figure = new_figure(side + 0.8, side)
    axes = figure.subplots()
    totals = confusion.sum(axis=1, keepdims=True).clip(min=1)
    shown = axes.imshow(100 * confusion / totals, vmin=0, vmax=100, cmap="viridis")
    if count <= 40:
        names = [label(name) for name in classes]
        axes.set_xticks(range(count), names, rotation=90, fontsize=7)
        axes.set_yticks(range(count), names, fontsize=7)
    axes.set(xlabel="predicted", ylabel="true")
    figure.colorbar(shown, ax=axes, label="% of the true class")
    save(figure, path)


def reliability(evaluation: Any, path: Path) -> None:
    figure = new_figure(4, 4)
    axes = figure.subplots()
    draw_reliability(axes, evaluation.bins)
    axes.set_title(f"ECE {evaluation.calibration_error:.1f}%")
    axes.legend()
    save(figure, path)


def draw_reliability(axes: Any, bins: Any) -> None:
    """Accuracy of the images of each confidence; on the diagonal, a model is as often right as it believes."""
    count = len(bins)
    images, right, _ = bins.T
    shares = 100 * right / images.clip(min=1)
    places = [100 * (i + 0.5) / count for i in range(count)]
    bars = axes.bar(places, shares, 92 / count, color=COLOURS[0], label="accuracy (fainter: of fewer images)")
    for bar, share in zip(bars, images / images.max(), strict=True):
        bar.set_alpha(0.35 + 0.65 * float(share) ** 0.5)
    axes.plot([0, 100], [0, 100], "k--", linewidth=1, label="right as often as believed")
    axes.set(xlabel="confidence (%)", ylabel="accuracy (%)", xlim=(0, 100), ylim=(0, 102))


def robustness(found: dict[str, Any], path: Path) -> None:
    figure = new_figure(6, 1 + 0.26 * len(found["accuracy"]))
    axes = figure.subplots()
    draw_robustness(axes, found)
    axes.set_title(f"corruptions of severity {found['severity']}")
    axes.legend()
    save(figure, path)


def draw_robustness(axes: Any, found: dict[str, Any]) -> None:
    """Accuracy under each corruption, as bars; the line is the clean accuracy."""
    places, values = range(len(found["accuracy"])), found["accuracy"].items()
    axes.barh(places, [value for _, value in values], color=COLOURS[0])
    axes.set_yticks(places, [f"{label(name.replace('_', ' '))}  {value:.1f}" for name, value in values])
    axes.axvline(found["clean"], color="black", linestyle="--", linewidth=1, label=f"clean, {found['clean']:.1f}%")
    axes.invert_yaxis()
    axes.set(xlabel="accuracy (%)", xlim=(0, 102))


def experiment(title: str, plot: str, cells: list[Any], path: Path) -> None:
    """Cells of `passlora reproduce` (reproduce.Cell): bars with the paper's beside, curves, or points on a plane."""
    if plot == "plane":
        plane(title, cells, path)
        return
    columns = list(dict.fromkeys(cell.column for cell in cells))
    across = min(len(columns), 3)
    figure = new_figure(
        6.5 if across == 1 else 4 * across, (5.2 if plot == "corruptions" else 3.8) * -(-len(columns) // 3)
    )
    grid = figure.subplots(-(-len(columns) // 3), across, squeeze=False).flatten()
    draw = {"curves": draw_curves, "bars": draw_bars, "corruptions": draw_corruptions}[plot]
    for axes, column in zip(grid, columns, strict=False):
        draw(axes, [cell for cell in cells if cell.column == column])
        axes.set_title(column if len(columns) > 1 else title, fontsize=10)
        axes.grid(alpha=0.3)
    for axes in grid[len(columns) :]:
        axes.remove()
    save(figure, path)


def draw_curves(axes: Any, cells: list[Any]) -> None:
    """Accuracy after each task, a line a method."""
    for cell in cells:
        axes.plot(list(accumulate(cell.sizes)), cell.curves["accuracy"], marker="o", label=cell.row)
    axes.set(xlabel="classes seen", ylabel="accuracy over all of them (%)")
    axes.legend()


def draw_bars(axes: Any, cells: list[Any]) -> None:
    """The first metric of each method, and the paper's."""
    metric = "last" if "last" in cells[0].values else next(iter(cells[0].values))
    places = range(len(cells))
    errors = [cell.deviations.get(metric, 0) for cell in cells]
    axes.barh([p - 0.2 for p in places], [c.values[metric] for c in cells], 0.4, xerr=errors, label="measured")
    known = [(p + 0.2, c.paper[metric]) for p, c in zip(places, cells, strict=True) if metric in c.paper]
    if known:
        axes.barh([p for p, _ in known], [value for _, value in known], 0.4, label="paper, full setting", alpha=0.5)
        axes.legend()
    axes.set_yticks(places, [cell.row for cell in cells])
    axes.invert_yaxis()
    if metric == "entries":
        axes.set_xscale("log")
    axes.set(xlabel=metric.replace("_", " ") if metric in UNITLESS else f"{metric.replace('_', ' ')} (%)")


UNITLESS = ("entries", "train_seconds", "test_seconds")


def draw_corruptions(axes: Any, cells: list[Any]) -> None:
    """One method: a curve a corruption; several: a bar a corruption and method."""
    if len(cells) == 1:
        (cell,) = cells
        colours = colour_map(len(cell.curves))
        for i, (name, stages) in enumerate(cell.curves.items()):
            style = {"color": "black", "linewidth": 2} if name == "clean" else {"color": colours(i), "linewidth": 1}
            axes.plot(list(accumulate(cell.sizes)), stages, marker=".", label=name.replace("_", " "), **style)
        axes.set(xlabel="classes seen", ylabel="accuracy over all of them (%)")
        axes.legend(fontsize=6, ncols=2)
        return
    names = list(cells[0].values)
    width = 0.8 / len(cells)
    for i, cell in enumerate(cells):
        places = [p + (i - (len(cells) - 1) / 2) * width for p in range(len(names))]
        errors = [cell.deviations.get(name, 0) for name in names]
        axes.barh(places, [cell.values[name] for name in names], width, xerr=errors, label=cell.row)
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.invert_yaxis()
    axes.set(xlabel="average accuracy (%)")
    axes.legend()


def colour_map(count: int) -> Any:
    from matplotlib import colormaps

    return colormaps["tab20" if count > 10 else "tab10"]


def plane(title: str, cells: list[Any], path: Path) -> None:
    """Points by class: a row of panels a method, or methods side by side if each has one; novel ones are crosses."""
    rows = [cell.points for cell in cells]
    if all(len(row) == 1 for row in rows):
        rows = [[row[0] for row in rows]]
    figure = new_figure(2.9 * len(rows[0]), 2.9 * len(rows) + 0.3)
    figure.suptitle(title, fontsize=10)
    grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for line, panels in zip(grid, rows, strict=True):
        for axes, panel in zip(line, panels, strict=True):
            present = sorted(set(panel["classes"]))
            colours = colour_map(len(present))
            for i, label in enumerate(present):
                places = [p for p, c in zip(panel["places"], panel["classes"], strict=True) if c == label]
                novel = label >= panel.get("novel_from", len(present) + label)
                style = {"marker": "x" if novel else "o", "s": 14 if novel else 8}
                axes.scatter(*zip(*places, strict=True), color=colours(i), label=str(label), linewidths=0.8, **style)
            axes.set_title(panel["title"], fontsize=8)
            axes.tick_params(labelsize=6)
    save(figure, path)
