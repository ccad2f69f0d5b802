"""Where the time of a step goes, by Python's own profiler: the parts call few and large operations."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Iterator

from .scene import DEIT, LORA, RESNET, Scene
from .timing import Row

PARTS = {  # what is called once a step -> (file, function)
    "images: drawn, augmented, resized, rotated": [
        ("batches.py", "batches"),
        ("batches.py", "augment"),
        ("backbone.py", "prepare"),
        ("views.py", "rotate"),
    ],
    "teacher, forward": [("teacher.py", "ask")],
    "student, forward": [("steps.py", "run_student")],
    "prototypes and losses": [("memory.py", "draw"), ("objective.py", "objective")],
    "backward": [("accelerator.py", "backward")],
    "Adam": [("optimizer.py", "step"), ("optimizer.py", "zero_grad")],
}
WHOLE = [("steps.py", "run")]
ONCE_A_TASK = [("accelerator.py", "prepare"), ("accelerator.py", "free_memory")]
REST = "the rest of the loop"


def profile(rounds: int) -> Iterator[Row]:
    """The share of each part in the steps of an epoch."""
    for name, settings, batch, count in (
        ("vit-mini, 64 px, batch 16", LORA, 16, 16),
        ("DeiT-S/16, 224 px, batch 2", DEIT, 2, 3),
        ("ResNet-18, 32 px, batch 8", RESNET, 8, 4),
    ):
        scene = Scene(settings, batch, count)
        scene.train()
        profiler = cProfile.Profile()
        profiler.runcall(scene.train)
        calls = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
        seconds = {part: seconds_in(calls, functions) for part, functions in PARTS.items()}
        whole = seconds_in(calls, WHOLE) - seconds_in(calls, ONCE_A_TASK)
        seconds[REST] = whole - sum(seconds.values())
        for part, own in seconds.items():
            yield Row(f"{name}: {part}", [100 * own / whole], "% of a step")


def seconds_in(calls: dict, functions: list[tuple[str, str]]) -> float:
    """Seconds inside the functions; of several functions of one name in one file, the outermost."""
    total = 0.0
    for file, function in functions:
        own = [
            entry[3]
            for (path, _, name), entry in calls.items()
            if name == function and path.endswith(f"/{file}") and ("/passlora/" in path or "/accelerate/" in path)
        ]
        total += max(own, default=0.0)
    return total


def draw(rows: list[Row], path: str) -> None:
    """A bar a network, a colour a part."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shares: dict[str, dict[str, float]] = {}
    for row in rows:
        network, part = row.what.split(": ", 1)
        shares.setdefault(network, {})[part] = row.median
    networks = list(shares)[::-1]
    colours = ["#8c8c8c", "#2a78b5", "#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#000000"]
    figure, axes = pyplot.subplots(figsize=(9, 2.9), layout="constrained")
    left = [0.0] * len(networks)
    for colour, part in zip(colours, [*PARTS, REST], strict=True):
        widths = [shares[network][part] for network in networks]
        bars = axes.barh(networks, widths, left=left, color=colour, label=part, edgecolor="white")
        axes.bar_label(bars, [f"{w:.0f}%" if w >= 4 else "" for w in widths], label_type="center", color="white")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlim=(0, 100), xlabel="% of a step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)
