"""passlora.json: what a model folder says of itself. Read with suspicion, since it may come from a stranger."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from passlora import __version__
from passlora.config import FIELDS, Config
from passlora.data.class_names import check_class_name
from passlora.errors import PassloraError, nearest
from passlora.files import write_json
from passlora.folder.layout import IN_A_TASK, MANIFEST

LOCAL_DIR = "local-dir:"
FORMAT_VERSION = 2
MAX_BYTES = 64 * 2**20
# What rebuilds the network, and what the next task is learnt with; where data lay and went is nobody's business.
AUGMENTATION = ("crop_padding", "horizontal_flip", "brightness", "rrc_min_scale")
BUDGET = (
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_later_tasks",
    "weight_decay",
    "lr_scheduler_type",
    "lr_milestones",
    "lr_decay",
    "keep_tasks",
    "seed",
)
SETTINGS = tuple(name for name, knob in FIELDS.items() if knob.group in ("model", "method")) + AUGMENTATION + BUDGET
CHANGES: dict[str, type] = {"extended": list, "forgotten": list, "renamed": dict}  # of a task, beside its new classes
RENAMED = {"inference": {"ncm": "nearest_prototype"}}  # values of format 1 that have another name now


@dataclass
class TaskEntry:
    """One task learnt, or one change of what is known. Names are those of its time."""

    classes: list[str]  # new ones
    learnt: str  # date and time, UTC
    accuracy: float | None = None  # in percent, over the classes known then that had test images
    tested: int | None = None  # how many of them had; None: all
    forgetting: float | None = None  # mean over the tasks before, in percent
    dataset: str | None = None  # what it was learnt from; of local data nothing is kept
    files: dict[str, str] = field(default_factory=dict)  # of its folder, with their SHA-256; none if it was not kept
    extended: list[str] = field(default_factory=list)  # known classes that it brought more images of
    forgotten: list[str] = field(default_factory=list)  # known classes that it removed
    renamed: dict[str, str] = field(default_factory=dict)  # known classes: the name before, the name since
    # In percent on the classes of each task so far; None where some of them had no test images.
    by_task: list[float | None] = field(default_factory=list)

    @property
    def change(self) -> str:
        """What it did beside learning new classes, in words; empty if nothing."""
        parts = [f"{old} is {new} now" for old, new in self.renamed.items()]
        parts += [f"forgot {len(self.forgotten)}"] if self.forgotten else []
        if self.extended:
            parts.append("more of " + ", ".join(self.extended[:6]) + (", ..." if len(self.extended) > 6 else ""))
        return "; ".join(parts)

    @property
    def key(self) -> tuple[str, ...]:
        """What tells one task from another: when it was learnt. (Its classes may be forgotten, names and all.)"""
        return (self.learnt,) if self.learnt else tuple(self.classes)

    @property
    def accuracy_over_all(self) -> float | None:
        """None if some of the classes could not be tested."""
        return self.accuracy if self.tested is None else None


@dataclass
class Manifest:
    settings: dict[str, Any]  # every one of SETTINGS, as the last task was learnt with
    tasks: list[TaskEntry] = field(default_factory=list)
    format_version: int = FORMAT_VERSION

    @property
    def classes(self) -> list[str]:
        """In the order of learning: a class's position is its index."""
        return [name for names in self.classes_by_task for name in names]

    @property
    def classes_by_task(self) -> list[list[str]]:
        """Those that each task brought and that are known today, by today's names."""
        origin: dict[str, int] = {}
        for number, task in enumerate(self.tasks):
            if task.forgotten or task.renamed:
                gone = set(task.forgotten)
                origin = {task.renamed.get(name, name): i for name, i in origin.items() if name not in gone}
            origin |= dict.fromkeys(task.classes, number)
        groups: list[list[str]] = [[] for _ in self.tasks]
        for name, number in origin.items():
            groups[number].append(name)
        return groups

    def after(self, tasks: int) -> Manifest:
        """As it was after so many tasks, with today's settings."""
        return Manifest(self.settings, self.tasks[:tasks], self.format_version)

    @property
    def results(self) -> dict[str, float]:
        """last, avg and forgetting, as far as each task was tested, on every class known then."""
        known = [task.accuracy_over_all for task in self.tasks]
        found: dict[str, float] = {}
        if not known or known[-1] is None:
            return found
        found["last"] = known[-1]
        if None not in known:
            found["avg"] = fmean(value for value in known if value is not None)
        if self.tasks[-1].forgetting is not None:
            found["forgetting"] = self.tasks[-1].forgetting
        return found

    def config(self, **changes: Any) -> Config:
        sizes = [len(names) for names in self.classes_by_task if names]
        config = Config.from_settings({**self.settings, "task_sizes": sizes})
        return config.replace(**changes) if changes else config

    def starts_with(self, other: Manifest) -> bool:
        """Whether `other` is this model, at an earlier time or now."""
        return [task.key for task in self.tasks[: len(other.tasks)]] == [task.key for task in other.tasks]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def settings_of(config: Config) -> dict[str, Any]:
    """The settings a model keeps; of a local weights file only the file's name."""
    flat = config.flat()
    kept = {name: flat[name] for name in SETTINGS}
    kind, path = split_local(config.model.model_name_or_path, config.model.model_architecture)
    if path is not None:
        kept["model_name_or_path"] = kind + Path(path).name
    return kept


def differing(settings: dict[str, Any]) -> dict[str, Any]:
    """What is written of settings: those that are not the knob's default, so that a knob of a later version does not
    trouble an earlier one; and the preset, as a label."""
    return {name: value for name, value in settings.items() if name == "preset" or value != FIELDS[name].default}


def split_local(name: str, architecture: str | None) -> tuple[str, str | None]:
    """The path in a backbone's name, if it lies in a file or folder; with what stands before the path."""
    if name.startswith(LOCAL_DIR):
        return LOCAL_DIR, name[len(LOCAL_DIR) :]
    return "", name if architecture is not None else None


def versions() -> dict[str, str]:
    return {"passlora": __version__, **{name: metadata.version(name) for name in ("torch", "timm", "peft")}}


# --- writing -----------------------------------------------------------------------------------------------------


def to_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "versions": versions(),
        "settings": differing(manifest.settings),
        "results": manifest.results,
        "tasks": [dataclasses.asdict(task) for task in manifest.tasks],
    }


def write_manifest(folder: Path, manifest: Manifest, name: str = MANIFEST) -> None:
    """Checked as a reader does, before anything is replaced."""
    content = to_json(manifest)
    check(json.loads(json.dumps(content)))
    write_json(folder / name, content)


# --- reading -----------------------------------------------------------------------------------------------------


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
    if version not in (1, FORMAT_VERSION) or isinstance(version, bool):
        is_newer = isinstance(version, int) and version > FORMAT_VERSION
        newer = "; a newer passlora wrote it, update yours" if is_newer else ""
        raise PassloraError(f"format_version is {version!r}, this passlora reads 1 and {FORMAT_VERSION}{newer}")
    settings, tasks = content.get("settings"), content.get("tasks")
    if not isinstance(settings, dict) or not isinstance(tasks, list) or not tasks:
        raise PassloraError("settings or tasks are missing")
    settings = check_settings(settings, version)
    manifest = Manifest(settings, [check_task(task, version) for task in tasks], version)
    check_names(manifest.tasks)
    return manifest


def check_names(tasks: list[TaskEntry]) -> None:
    """Every change is one of a class that was known then, and no name stands for two classes."""
    known: set[str] = set()
    for task in tasks:
        for name in (*task.extended, *task.forgotten, *task.renamed):
            if name not in known:
                raise PassloraError(f"a task changes {name[:80]!r}, which was not known")
        known -= {*task.forgotten, *task.renamed}
        for name in (*task.renamed.values(), *task.classes):
            if name in known:
                raise PassloraError("a class name appears twice")
            known.add(name)
        if len(task.renamed.keys() & set(task.forgotten)):
            raise PassloraError("a task renames what it forgets")
    if not known:
        raise PassloraError("no class is left")


def check_settings(settings: dict[str, Any], version: int = FORMAT_VERSION) -> dict[str, Any]:
    """Every setting, what is not named being the default; by the settings' own checks."""
    for name in settings:
        if name not in SETTINGS:
            raise PassloraError(f"unknown setting {str(name)[:80]!r}")
    if version == 1:
        settings = renamed(settings)
    check_backbone_name(settings.get("model_name_or_path"), settings.get("model_architecture"))
    return settings_of(Config.from_settings({**settings, "num_tasks": 1}))


def renamed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of format 1 under the names of today."""
    names = RENAMED["inference"]
    found = dict(settings)
    if isinstance(found.get("inference"), str):
        found["inference"] = names.get(found["inference"], found["inference"])
    if isinstance(found.get("extra_inference"), list):
        found["extra_inference"] = [names.get(mode, mode) for mode in map(str, found["extra_inference"])]
    return found


def check_backbone_name(name: Any, architecture: Any) -> None:
    """A name that leads to no file but beside the model; what may stand in a manifest, so what may be trained with."""
    if not isinstance(name, str):
        return
    path = split_local(name, architecture)[1]
    parts = name.removeprefix(LOCAL_DIR).split("/")
    leads_out = ".." in re.split("[/:]", name) or "\\" in name or (path is not None and len(parts) > 1)
    if leads_out or name.startswith("/") or (path is None and name.startswith("~")):
        raise PassloraError(f"model_name_or_path {name[:80]!r} leads out of the model's folder")


def check_task(task: Any, version: int) -> TaskEntry:
    if not isinstance(task, dict):
        raise PassloraError("a task without class names")
    classes: Any = task.get("classes")
    extended, forgotten, renamed = (task.get(name, kind()) for name, kind in CHANGES.items())
    lists = (classes, extended, forgotten)
    if not all(isinstance(part, list) for part in lists) or not isinstance(renamed, dict):
        raise PassloraError("a task without class names")
    names = [name for part in (*lists, renamed, renamed.values()) for name in part]
    if not all(isinstance(name, str) and name for name in names):
        raise PassloraError("a task without class names")
    for name in names:
        check_class_name(name)
    learnt, dataset, tested = task.get("learnt", ""), task.get("dataset"), task.get("tested")
    numbers = [task.get("accuracy"), task.get("forgetting")]
    fine = isinstance(learnt, str) and (dataset is None or isinstance(dataset, str))
    fine = fine and (tested is None or (type(tested) is int and tested >= 0))
    if not fine or not all(number is None or is_percentage(number) for number in numbers):
        raise PassloraError("a task whose date, dataset or accuracy is malformed")
    files = {} if version == 1 else check_files(task.get("files"))
    by_task = task.get("by_task", [])
    if not isinstance(by_task, list) or not all(number is None or is_percentage(number) for number in by_task):
        raise PassloraError("a task whose date, dataset or accuracy is malformed")
    return TaskEntry(
        classes, learnt, numbers[0], tested, numbers[1], dataset, files, extended, forgotten, renamed, by_task
    )


def check_files(files: Any) -> dict[str, str]:
    if not isinstance(files, dict) or not all(name in IN_A_TASK for name in files):
        raise PassloraError("a task whose files are not those of a task")
    if not all(isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) for digest in files.values()):
        raise PassloraError("a task with a malformed digest")
    return files


def is_percentage(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and -100 <= number <= 100
