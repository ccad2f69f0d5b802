"""A task's folder: all it takes to go on from that task. The manifest names its files with their digests."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from passlora.errors import PassloraError
from passlora.files import (
    TEMPORARY,
    check_finite,
    check_inside,
    digest_of,
    read_tensors,
    write,
    write_json,
    write_tensors,
)
from passlora.folder.layout import (
    ADAPTER,
    ADAPTER_CONFIG,
    BACKBONE,
    CLASSIFIER,
    HEAD,
    IN_A_TASK,
    MEMORY,
    SETTINGS,
    task_folder,
)
from passlora.folder.manifest import Manifest, TaskEntry, check_settings, differing

if TYPE_CHECKING:
    from passlora.training.learner import TaskState

MAX_SETTINGS = 2**20  # bytes of a task's settings
MARKS = (CLASSIFIER, HEAD)  # every task has one of them, and nobody else's folder has


def check_state(state: TaskState) -> None:
    """Nothing that is not finite is ever written over something good."""
    for part in (state.backbone, state.classifier, state.memory):
        try:
            check_finite(part, "after this task the model's weights are no longer numbers")
        except PassloraError as error:
            raise PassloraError(f"{error}; nothing of it was saved: lower --learning_rate") from None


def write_task(folder: Path, task: int, state: TaskState, settings: dict[str, Any]) -> dict[str, str]:
    """The task's folder, which takes its name when it is whole; returns its files with their digests."""
    check_state(state)
    target = folder / task_folder(task)
    with tempfile.TemporaryDirectory(dir=folder, prefix=TEMPORARY) as name:
        new = Path(name) / "task"
        new.mkdir()
        if state.adapter_config is not None:
            write_tensors(new / ADAPTER, state.backbone)
            state.adapter_config.save_pretrained(str(new))
        elif state.backbone:
            write_tensors(new / BACKBONE, state.backbone)
        write_tensors(new / CLASSIFIER, state.classifier)
        if state.memory:
            write_tensors(new / MEMORY, state.memory)
        write_json(new / SETTINGS, differing(settings))
        files = {path.name: digest_of(path) for path in sorted(new.iterdir())}
        check_room(folder, task)
        remove_task(target)  # left by a save that was cut off
        if target.is_dir():
            target.rmdir()
        os.replace(new, target)
    return files


def remove_task(path: Path) -> bool:
    """Delete a task's folder, but nothing in it that passlora did not write; whether anything went."""
    if not is_task(path):
        return False
    for name in sorted((*IN_A_TASK, HEAD), key=lambda name: name in MARKS):  # the marks last: it may be cut off
        (path / name).unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()
    return True


def is_task(path: Path) -> bool:
    """Whether passlora wrote a task there."""
    return path.is_dir() and not path.is_symlink() and any((path / name).is_file() for name in MARKS)


def check_room(folder: Path, task: int) -> None:
    """Say so before an hour of training, if the task's folder cannot be written."""
    path = folder / task_folder(task)
    own = (*IN_A_TASK, HEAD) if is_task(path) else ()
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise PassloraError(f"{path} is in the way of the next task: move it elsewhere")
    if path.is_dir() and any(file.name not in own for file in path.iterdir()):
        raise PassloraError(f"{path} holds files that are not passlora's: move them elsewhere")


def read_task(folder: Path, task: int, entry: TaskEntry, forms: TaskState, root: Path) -> TaskState:
    """What `write_task` wrote; every tensor is checked before it is used. No file may lead out of `root`."""
    from passlora.training.learner import TaskState

    part = folder / task_folder(task)

    def read(name: str, expected: dict[str, Any]) -> dict[str, Any]:
        if name not in entry.files:
            raise PassloraError(f"{part / name} is not among the files of the model")
        return read_tensors(root, part / name, expected, entry.files[name])

    weights = ADAPTER if ADAPTER_CONFIG in entry.files else BACKBONE
    backbone = read(weights, forms.backbone) if forms.backbone else {}
    memory = read(MEMORY, forms.memory) if forms.memory else {}
    return TaskState(backbone, read(CLASSIFIER, forms.classifier), memory)


def read_settings(folder: Path, task: int, entry: TaskEntry, root: Path) -> dict[str, Any]:
    """The settings that a task was learnt with."""
    path = folder / task_folder(task) / SETTINGS
    check_inside(path, root)
    if path.stat().st_size > MAX_SETTINGS or digest_of(path) != entry.files.get(SETTINGS):
        raise PassloraError(f"{path} is not the file that was saved with the model: its SHA-256 differs")
    try:
        return check_settings(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError, AttributeError) as error:
        raise PassloraError(f"{path} cannot be read ({type(error).__name__})") from None


def copy_task(source: Path, folder: Path, task: int, entry: TaskEntry) -> None:
    """A task of a model that is saved to another folder: the very files that its manifest names."""
    for name, digest in sorted(entry.files.items(), key=lambda item: item[0] not in MARKS):
        path, target = source / task_folder(task) / name, folder / task_folder(task) / name
        if target.is_file() and digest_of(target) == digest:
            continue
        if not path.is_file() or digest_of(path) != digest:
            raise PassloraError(f"{path} is no longer the file that was saved with the model: load the model again")
        write(target, partial(shutil.copyfile, path))


def check_digests(folder: Path, manifest: Manifest) -> None:
    """Every file of every task is the one that was saved: before it is sent on, or taken over."""
    for task, entry in enumerate(manifest.tasks):
        for name, digest in entry.files.items():
            path = folder / task_folder(task) / name
            if not path.is_file():
                raise PassloraError(f"{path} is missing")
            if digest_of(path) != digest:
                raise PassloraError(f"{path} is not the file that was saved with the model: its SHA-256 differs")
