"""results.json, the numbers of a run: what it holds, its one reader and its one writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

from passlora.display.tables import matrix_csv
from passlora.errors import PassloraError
from passlora.files import write_json, write_text
from passlora.folder.layout import CONFUSION, MATRIX, RESULTS
from passlora.training.metrics import Matrix, trim


class Summary(TypedDict):
    """Of one inference mode; in percent."""

    last: float
    avg: float
    forgetting: float
    newest: float
    stage_accuracy: list[float]  # over all classes seen, after each task
    accuracy_matrix: Matrix


class Results(Summary, total=False):
    """A run, under its main inference mode; with several seeds their means, and each of them under `runs`."""

    preset: str
    inference: str
    inference_modes: dict[str, Summary]
    compare: dict[str, Any]  # preset -> Results
    task_sizes: list[int]
    classes: list[str]  # in the order of learning
    seed: int
    seconds: float
    finished: bool
    version: str
    ece: float
    calibration: list[list[float]]
    bias: list[list[float] | None]  # these four, and drift, a value a task
    drift: list[list[float] | None]
    train_seconds: list[float | None]
    test_seconds: list[float | None]
    prototype_entries: int
    prototype_bytes: int
    peak_memory_bytes: int
    std: dict[str, Any]
    seeds: list[int]
    runs: dict[str, Any]  # folder -> Results


NEEDED = (
    *("preset", "inference", "inference_modes", "compare", "task_sizes", "seconds"),
    *("last", "avg", "forgetting", "stage_accuracy", "accuracy_matrix"),
)


def read_results(folder: Path) -> Results:
    """The results of a run's folder, with all that every run has."""
    try:
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        missing = [name for name in NEEDED if name not in results]
        if missing:
            raise KeyError(missing[0])
    except FileNotFoundError:
        raise PassloraError(f"{folder} holds no {RESULTS}: it is no run of passlora train") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PassloraError(f"{folder} holds a run that cannot be read ({type(error).__name__}: {error})") from None
    return results


def write_results(folder: Path, results: Results) -> None:
    write_json(folder / RESULTS, results)


def trim_results(folder: Path, tasks: int) -> None:
    """The numbers of a training, cut to its first tasks."""
    try:
        results = read_results(folder)
        if "runs" in results or len(results["stage_accuracy"]) <= tasks:
            return
        trimmed: Any = trim(dict(results), tasks)
        write_text(folder / MATRIX, matrix_csv(trimmed))
        (folder / CONFUSION).unlink(missing_ok=True)  # of the tasks that went
    except (PassloraError, KeyError, TypeError):  # no training's, or not readable: nothing that a model needs
        return
    write_results(folder, trimmed)
