"""passlora.json: what a model folder says of itself. Read with suspicion, since it may come from a stranger."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from passlora import __version__
from passlora.config import FIELDS, Config
from passlora.errors import PassloraError, nearest
from passlora.folder.layout import MANIFEST

LOCAL_DIR = "local-dir:"
FORMAT_VERSION = 1
MAX_BYTES = 64 * 2**20
# What rebuilds the network, and what the next task is learnt with; where data lay and went is nobody's business.
AUGMENTATION = ("crop_padding", "horizontal_flip", "brightness", "rrc_min_scale")
BUDGET = (
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "weight_decay",
    "lr_scheduler_type",
    "lr_milestones",
    "lr_decay",
    "keep_tasks",
)
# The budget of a new model's tasks: small batches, since steps count and folders of new classes are small.
LEARN_BUDGET = {"per_device_train_batch_size": 8, "num_train_epochs": 15, "lr_milestones": [10]}
SETTINGS = tuple(name for name, knob in FIELDS.items() if knob.group in ("model", "method")) + AUGMENTATION + BUDGET


@dataclass
class TaskEntry:
    """One task learnt."""

    classes: list[str]
    learnt: str  # date and time, UTC
    accuracy: float | None = None  # over all classes seen then, in percent
    forgetting: float | None = None  # mean over the tasks before, in percent
    dataset: str | None = None  # what it was learnt from; of local data nothing is kept


@dataclass
class Manifest:
    settings: dict[str, Any]
    tasks: list[TaskEntry] = field(default_factory=list)

    @property
    def classes(self) -> list[str]:
        """In the order of learning: a class's position is its index."""
        return [name for task in self.tasks for name in task.classes]

    @property
    def results(self) -> dict[str, float]:
        """last, avg and forgetting, as far as each task was tested when it was learnt."""
        known = [task.accuracy for task in self.tasks if task.accuracy is not None]
        found: dict[str, float] = {}
        if self.tasks and self.tasks[-1].accuracy is not None:
            found["last"] = self.tasks[-1].accuracy
        if known and len(known) == len(self.tasks):
            found["avg"] = fmean(known)
        if self.tasks and self.tasks[-1].forgetting is not None:
            found["forgetting"] = self.tasks[-1].forgetting
        return found

    def config(self, **changes: Any) -> Config:
        return Config.make(**{**self.settings, "task_sizes": [len(task.classes) for task in self.tasks], **changes})


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def settings_of(config: Config) -> dict[str, Any]:
    """The settings a model keeps; of a local checkpoint only the file's name."""
    flat = config.flat()
    kept = {name: flat[name] for name in SETTINGS}
    kind, path = split_local(config.model.model_name_or_path, config.model.model_architecture)
    if path is not None:
        kept["model_name_or_path"] = kind + Path(path).name
    return kept


def split_local(name: str, architecture: str | None) -> tuple[str, str | None]:
    """The path in a backbone's name, if it lies in a file or folder; with what stands before the path."""
    if name.startswith(LOCAL_DIR):
        return LOCAL_DIR, name[len(LOCAL_DIR) :]
    return "", name if architecture is not None else None


def versions() -> dict[str, str]:
    return {"passlora": __version__, **{name: metadata.version(name) for name in ("torch", "timm", "peft")}}


def to_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "versions": versions(),
        "settings": manifest.settings,
        "results": manifest.results,
        "tasks": [dataclasses.asdict(task) for task in manifest.tasks],
    }


def read_manifest(folder: Path, name: str = MANIFEST) -> Manifest:
    """The manifest of a model folder, checked; anything unexpected is one clear error."""
    path = folder / name
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PassloraError(f"{path} is larger than any manifest")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if folder.is_dir():
            raise PassloraError(f"{folder} has no {MANIFEST}: it is no model") from None
        beside = [str(path) for path in folder.parent.glob("*") if (path / MANIFEST).is_file()]
        raise PassloraError(f"{folder} does not exist{nearest(str(folder), beside)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PassloraError(f"{path} cannot be read ({type(error).__name__})") from None
    try:
        return check(content)
    except PassloraError as error:
        raise PassloraError(f"{path}: {error}") from None


def check(content: Any) -> Manifest:
    if not isinstance(content, dict):
        raise PassloraError("not a manifest")
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        newer = "; a newer passlora wrote it, update yours" if isinstance(version, int) and version > 1 else ""
        raise PassloraError(f"format_version is {version!r}, this passlora reads {FORMAT_VERSION}{newer}")
    settings, tasks = content.get("settings"), content.get("tasks")
    if not isinstance(settings, dict) or not isinstance(tasks, list) or not tasks:
        raise PassloraError("settings or tasks are missing")
    for name in settings:
        if name not in SETTINGS:
            raise PassloraError(f"unknown setting {str(name)[:80]!r}")
    name, architecture = settings.get("model_name_or_path"), settings.get("model_architecture")
    if isinstance(name, str):
        path = split_local(name, architecture)[1]
        if ".." in name or name.startswith(("/", "~")) or "\\" in name or "/" in (path or ""):
            raise PassloraError(f"model_name_or_path {name[:80]!r} leads out of the model's folder")
    manifest = Manifest(settings, [check_task(task) for task in tasks])
    names = manifest.classes
    if len(set(names)) != len(names):
        raise PassloraError("a class name appears twice")
    manifest.settings = settings_of(manifest.config())  # the settings' own checks; what is not named is the default
    return manifest


def check_task(task: Any) -> TaskEntry:
    classes = task.get("classes") if isinstance(task, dict) else None
    if not isinstance(classes, list) or not classes or not all(isinstance(name, str) and name for name in classes):
        raise PassloraError("a task without class names")
    learnt, dataset = task.get("learnt", ""), task.get("dataset")
    numbers = [task.get("accuracy"), task.get("forgetting")]
    fine = isinstance(learnt, str) and (dataset is None or isinstance(dataset, str))
    if not fine or not all(number is None or is_percentage(number) for number in numbers):
        raise PassloraError("a task whose date, dataset or accuracy is malformed")
    return TaskEntry(classes, learnt, numbers[0], numbers[1], dataset)


def is_percentage(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and -100 <= number <= 100
