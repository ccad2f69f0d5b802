"""Pictures of a run, as files."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from . import store


def new_figure(width: float, height: float) -> Any:
    """A figure that needs no display and no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    store.write(path, lambda temporary: figure.savefig(temporary, dpi=150))


def accuracy_curves(results: dict[str, Any], path: Path) -> None:
    """Accuracy over all classes seen, after each task; a band of one deviation over several seeds."""
    figure = new_figure(6, 3.8)
    axes = figure.subplots()
    seen = list(accumulate(results["task_sizes"]))
    for name, part in {results["preset"]: results, **results["compare"]}.items():
        values = part["stage_accuracy"]
        axes.plot(seen, values, marker="o", label=f"{name} (last {part['last']:.1f}%)")
        if "std" in part:
            spread = part["std"]["stage_accuracy"]
            low = [v - s for v, s in zip(values, spread, strict=True)]
            high = [v + s for v, s in zip(values, spread, strict=True)]
            axes.fill_between(seen, low, high, alpha=0.2)
    axes.set(xlabel="classes seen", ylabel="accuracy over all of them (%)", ylim=(0, 102))
    axes.set_xticks(seen if len(seen) <= 12 else seen[:: len(seen) // 10])
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    save(figure, path)


def accuracy_matrix(results: dict[str, Any], path: Path) -> None:
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
        axes.set_xticks(range(count), classes, rotation=90, fontsize=7)
        axes.set_yticks(range(count), classes, fontsize=7)
    axes.set(xlabel="predicted", ylabel="true")
    figure.colorbar(shown, ax=axes, label="% of the true class")
    save(figure, path)


def experiment(title: str, plot: str, cells: list[Any], path: Path) -> None:
    """Cells of `passlora reproduce`: last accuracy as bars, the paper's beside it, or accuracy after each task."""
    columns = list(dict.fromkeys(cell.column for cell in cells))
    figure = new_figure(6 if len(columns) == 1 else 4 * min(len(columns), 3), 3.8 * -(-len(columns) // 3))
    grid = figure.subplots(-(-len(columns) // 3), min(len(columns), 3), squeeze=False).flatten()
    for axes, column in zip(grid, columns, strict=False):
        parts = [cell for cell in cells if cell.column == column]
        metric = "last" if "last" in parts[0].values else next(iter(parts[0].values))
        if plot == "curves":
            for cell in parts:
                axes.plot(list(accumulate(cell.sizes)), cell.stages, marker="o", label=cell.row)
            axes.set(xlabel="classes seen", ylabel="accuracy over all of them (%)")
            axes.legend()
        else:
            places = range(len(parts))
            errors = [cell.deviations.get(metric, 0) for cell in parts]
            axes.barh([p - 0.2 for p in places], [c.values[metric] for c in parts], 0.4, xerr=errors, label="measured")
            known = [(p + 0.2, c.paper[metric]) for p, c in zip(places, parts, strict=True) if metric in c.paper]
            if known:
                axes.barh(
                    [p for p, _ in known], [value for _, value in known], 0.4, label="paper, full setting", alpha=0.5
                )
                axes.legend()
            axes.set_yticks(places, [cell.row for cell in parts])
            axes.invert_yaxis()
            axes.set(xlabel=f"{metric} (%)")
        axes.set_title(column if len(columns) > 1 else title, fontsize=10)
        axes.grid(alpha=0.3)
    for axes in grid[len(columns) :]:
        axes.remove()
    save(figure, path)
