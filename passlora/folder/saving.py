"""A model into its folder: new tasks first, the manifest last. Until then the folder is the model it was before."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from passlora.errors import PassloraError
from passlora.files import TEMPORARY
from passlora.folder.format1 import are_prototypes
from passlora.folder.layout import (
    BACKUP,
    CARD,
    CHECKPOINT,
    CONFUSION,
    LOCK,
    LOG,
    MANIFEST,
    MATRIX,
    NOTES,
    PICTURE,
    PROTOTYPES,
    RESULTS,
    task_folder,
    task_number,
)
from passlora.folder.manifest import Manifest, TaskEntry, read_manifest, write_manifest
from passlora.folder.results import read_results
from passlora.folder.tasks import is_task, remove_task, write_task

if TYPE_CHECKING:
    from passlora.training.learner import TaskState


RECENT_BYTES = 100 * 10**6  # of all tasks' files together, with keep_tasks recent


def write_tasks(folder: Path, manifest: Manifest, states: dict[int, TaskState]) -> None:
    """The given tasks' folders; the manifest learns of their files."""
    folder.mkdir(parents=True, exist_ok=True)
    last = len(manifest.tasks) - 1
    keep = manifest.settings["keep_tasks"]
    for task, state in states.items():
        if task == last or keep != "last":
            manifest.tasks[task].files = write_task(folder, task, state, state.settings or manifest.settings)
    oldest = {"all": 0, "last": last, "recent": oldest_recent(folder, manifest)}[keep]
    for entry in manifest.tasks[:oldest]:
        entry.files = {}


def oldest_recent(folder: Path, manifest: Manifest) -> int:
    """The first of the latest tasks that fit into RECENT_BYTES; always the last two."""
    last, room = len(manifest.tasks) - 1, RECENT_BYTES
    for task in range(last, -1, -1):
        part = folder / task_folder(task)
        room -= sum((part / name).stat().st_size for name in manifest.tasks[task].files if (part / name).is_file())
        if room < 0 and task < last - 1:
            return task + 1
    return 0


def commit(folder: Path, manifest: Manifest) -> None:
    """The manifest makes the folder the new model; what it does not need goes after that."""
    write_manifest(folder, manifest)
    (folder / CHECKPOINT).unlink(missing_ok=True)
    for task, entry in enumerate(manifest.tasks):
        if not entry.files:
            remove_task(folder / task_folder(task))


def check_new_model(folder: Path) -> None:
    """Say why the folder cannot become a model, if so; what a first lesson left when it was cut off is no obstacle."""
    if folder.exists() and not folder.is_dir():
        raise PassloraError(f"{folder} is a file")
    if folder.is_dir() and not all(is_left_over(path) for path in folder.iterdir()):
        raise PassloraError(f"{folder} exists and is no model: choose another folder")


def is_left_over(path: Path) -> bool:
    """Whether a file or folder may be what a first lesson, or a download, left when it was cut off."""
    if path.name in (CHECKPOINT, LOCK) or path.name.startswith(TEMPORARY):
        return True
    if path.name == CARD:
        return is_our_card(path)
    if path.name == PROTOTYPES:
        return are_prototypes(path)
    if path.name in (RESULTS, MATRIX, CONFUSION, PICTURE, LOG):
        return is_our_card(path.parent / CARD) or holds_results(path.parent) or path.name == LOG
    return task_number(path.name) is not None and is_task(path)


def holds_results(folder: Path) -> bool:
    try:
        return bool(read_results(folder))
    except PassloraError:
        return False


def is_our_card(path: Path) -> bool:
    return path.is_file() and NOTES.encode() in path.read_bytes()


def check_same_model(folder: Path, tasks: list[TaskEntry]) -> None:
    """Whoever saves a model over another one, or over later tasks of its own, is told."""
    if (folder / MANIFEST).exists() and [t.key for t in read_manifest(folder).tasks] != [t.key for t in tasks]:
        raise PassloraError(f"{folder} holds another model, or other tasks of this one: choose another folder")


def describe(folder: Path) -> dict[str, Any]:
    """What the files say of a model: settings, classes, tasks with their bytes, and the bytes of all."""
    manifest = read_manifest(folder)

    def size(place: Path) -> int:
        return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())

    tasks = [
        {**dataclasses.asdict(task), "change": task.change, "bytes": size(folder / task_folder(i))}
        for i, task in enumerate(manifest.tasks)
    ]
    return {
        "format_version": manifest.format_version,
        "settings": manifest.settings,
        "classes": manifest.classes,
        "results": manifest.results,
        "tasks": tasks,
        "bytes": size(folder),
        "rolled_back": (folder / BACKUP).is_file(),
    }
