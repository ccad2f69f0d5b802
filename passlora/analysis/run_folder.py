"""What the folder of a run tells the report: read with suspicion, since it may come from a stranger."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from passlora.config import read_yaml
from passlora.data.corruptions import ROBUSTNESS
from passlora.errors import PassloraError
from passlora.folder import layout
from passlora.folder.manifest import read_manifest
from passlora.folder.results import read_results


@dataclass
class Run:
    """A finished run, of one seed or of several."""

    name: str
    folder: Path
    results: dict[str, Any]
    confusion: np.ndarray | None
    settings: dict[str, Any]
    robustness: dict[str, Any] | None

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The results of each seed."""
        return list(self.results["runs"].values()) if "runs" in self.results else [self.results]

    @property
    def classes(self) -> list[str]:
        """Names of the confusion matrix's rows."""
        count = 0 if self.confusion is None else len(self.confusion)
        return list(self.parts[0].get("classes", map(str, range(count))))

    @property
    def tasks(self) -> Iterator[int]:
        """The task of each class; no list, since a stranger's sizes may be of any size."""
        return (task for task, size in enumerate(self.results["task_sizes"]) for _ in range(size))

    @property
    def first_seed(self) -> str:
        """How to speak of the seed that stands for all where no mean is shown."""
        if "runs" not in self.results:
            return ""
        name = next(iter(self.results["runs"]))
        return f" ({name.replace('_', ' ')}, the first of {len(self.parts)})"

    @property
    def model_folder(self) -> Path | None:
        """Where the model of the first seed lies, if the run left one."""
        folder = self.folder / next(iter(self.results["runs"])) if "runs" in self.results else self.folder
        return folder if (folder / layout.MANIFEST).is_file() else None

    @property
    def bins(self) -> np.ndarray | None:
        """Images, right ones and summed confidence in bins of confidence, over all seeds."""
        found = [part["calibration"] for part in self.parts if "calibration" in part]
        return np.array(found).sum(axis=0) if found else None


def read_runs(folders: list[Path]) -> list[Run]:
    """With names that tell them apart: the folder's own, or as much of its path as it takes."""
    runs = [read_run(folder) for folder in folders]
    parts = [run.folder.resolve().parts for run in runs]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(set(parts)) and depth < max(map(len, parts)):
        depth += 1
    for run, part in zip(runs, parts, strict=True):
        run.name = "/".join(part[-depth:])
    return runs


def read_run(folder: Path) -> Run:
    """The run in `folder`; anything unexpected is one clear error."""
    results: Any = read_results(folder)
    if not results.get("finished"):
        raise PassloraError(f"{folder} is not finished: the same passlora train command goes on with it")
    try:
        seeds = results.get("runs", {})
        if not all(re.fullmatch(r"(seed|order)_\d+", name) for name in seeds):
            raise ValueError("a run's name")
        return Run(
            folder.resolve().name,
            folder,
            results,
            read_confusion(folder, seeds),
            read_yaml(str(folder / layout.CONFIG)) if (folder / layout.CONFIG).is_file() else {},
            read_robustness(folder),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PassloraError(f"{folder} holds a run that cannot be read ({type(error).__name__}: {error})") from None


def read_confusion(folder: Path, seeds: dict[str, Any]) -> np.ndarray | None:
    """Over all seeds; None where one has none, or they learnt the classes in different orders."""
    orders = [part.get("classes") for part in seeds.values()]
    paths = [folder / name / layout.CONFUSION for name in seeds] or [folder / layout.CONFUSION]
    if any(order != orders[0] for order in orders) or not all(path.is_file() for path in paths):
        return None
    return np.sum([read_matrix(path) for path in paths], axis=0)


def read_matrix(path: Path) -> np.ndarray:
    with open(path, newline="", encoding="utf-8") as file:
        return np.array([[int(cell) for cell in row[1:]] for row in list(csv.reader(file))[1:]])


def read_robustness(folder: Path) -> dict[str, Any] | None:
    """What `passlora robustness` left, if the model is still the one it looked at."""
    path = folder / "eval" / ROBUSTNESS
    if not path.is_file() or not (folder / layout.MANIFEST).is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["learnt"] != read_manifest(folder).tasks[-1].learnt:
        return None
    return {
        "images": int(found["images"]),
        "severity": int(found["severity"]),
        "clean": float(found["clean"]),
        "accuracy": {str(name): float(value) for name, value in found["accuracy"].items()},
    }
