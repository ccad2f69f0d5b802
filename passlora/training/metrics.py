"""Accuracy matrix -> last, avg, forgetting. All in percent."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np

from passlora.data.scenario import Scenario

PER_TASK = ("bias", "drift", "train_seconds", "test_seconds")  # lists in results.json beside the accuracies

Matrix = list[list[float | None]]  # [task learnt][task tested]; None where the tested task is not learnt yet


def class_counts(confusion: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Correct and total predictions of each true class (rows of the confusion matrix)."""
    return np.diagonal(confusion), confusion.sum(axis=1)


def accuracy(confusion: np.ndarray, classes: range) -> float:
    """Share of the images of `classes` predicted right, among all seen classes."""
    correct, total = class_counts(confusion)
    part = slice(classes.start, classes.stop)
    return 100.0 * float(correct[part].sum()) / float(total[part].sum())


def matrix_row(confusion: np.ndarray, scenario: Scenario, task: int) -> list[float | None]:
    """a[task][i] for every task i; None for tasks still to come."""
    seen = [accuracy(confusion, scenario.classes(i)) for i in range(task + 1)]
    return [*seen, *[None] * (scenario.num_tasks - task - 1)]


def forgetting(matrix: Sequence[Sequence[float | None]], task: int | None = None) -> float:
    """Mean over earlier tasks i of max_{s<t} a[s][i] - a[t][i]; 0 after the first task."""
    t = len(matrix) - 1 if task is None else task
    drops = []
    for i in range(t):
        before = [value for s in range(i, t) if (value := matrix[s][i]) is not None]
        now = matrix[t][i]
        assert now is not None
        drops.append(max(before) - now)
    return fmean(drops) if drops else 0.0


def newest(matrix: Sequence[Sequence[float | None]]) -> float:
    """Accuracy on a task's classes right after it was learnt, mean over the tasks after the first."""
    own = [value for task, row in enumerate(matrix) if (value := row[task]) is not None]
    return fmean(own[1:] or own)


def bias(confusion: np.ndarray, scenario: Scenario, task: int) -> list[float] | None:
    """Share of old classes' images that are taken for a class of `task`, and the reverse; None if either has none."""
    new = scenario.classes(task).start
    if not confusion[:new].sum() or not confusion[new:].sum():
        return None
    old_as_new = confusion[:new, new:].sum() / confusion[:new].sum()
    new_as_old = confusion[new:, :new].sum() / confusion[new:].sum()
    return [100.0 * float(old_as_new), 100.0 * float(new_as_old)]


def summary(matrix: Matrix, stage_accuracy: Sequence[float]) -> dict[str, Any]:
    """The numbers of a run: `last`, `avg` over stages (the first included), `forgetting` at the end, `newest`."""
    return {
        "last": stage_accuracy[-1],
        "avg": fmean(stage_accuracy),
        "forgetting": forgetting(matrix),
        "newest": newest(matrix),
        "stage_accuracy": list(stage_accuracy),
        "accuracy_matrix": [list(row) for row in matrix],
    }


def trim(results: dict[str, Any], tasks: int) -> dict[str, Any]:
    """A run's results as they were after its first `tasks` tasks."""
    modes = {
        mode: summary([row[:] for row in part["accuracy_matrix"][:tasks]], part["stage_accuracy"][:tasks])
        for mode, part in results["inference_modes"].items()
    }
    known = {name: value for name, value in results.items() if name not in ("ece", "calibration")}
    for name in set(known) & set(PER_TASK):
        known[name] = known[name][:tasks]
    return {**known, **modes[results["inference"]], "inference_modes": modes, "finished": False, "compare": {}}


def over_runs(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean of several runs' numbers, with the standard deviation (n - 1) of each under `std`."""

    def both(values: Sequence[float]) -> tuple[float, float]:
        return fmean(values), stdev(values) if len(values) > 1 else 0.0

    result: dict[str, Any] = {"std": {}}
    for name in ("last", "avg", "forgetting"):
        result[name], result["std"][name] = both([run[name] for run in runs])
    result["newest"], result["std"]["newest"] = both([newest(run["accuracy_matrix"]) for run in runs])
    stages = [both(values) for values in zip(*(run["stage_accuracy"] for run in runs), strict=True)]
    result["stage_accuracy"] = [mean for mean, _ in stages]
    result["std"]["stage_accuracy"] = [deviation for _, deviation in stages]
    result["accuracy_matrix"] = [
        [None if cell[0] is None else fmean(cell) for cell in zip(*rows, strict=True)]
        for rows in zip(*(run["accuracy_matrix"] for run in runs), strict=True)
    ]
    return result
