"""Models of passlora 0.1 (format 1): a head a task, and the prototypes of all tasks in one file beside them.

Reading leaves them as they are. The first command that writes converts them: new files first, then the manifest, which
makes the folder format 2, then the old files go. Cut off at any moment, the folder is a model of one format.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from passlora.errors import PassloraError
from passlora.files import digest_of, read_tensors, write, write_json, write_tensors
from passlora.folder.layout import (
    ADAPTER,
    ADAPTER_CONFIG,
    BACKBONE,
    BACKUP,
    CLASSIFIER,
    HEAD,
    IN_A_TASK,
    MANIFEST,
    MEMORY,
    PROTOTYPES,
    SETTINGS,
    task_folder,
)
from passlora.folder.manifest import FORMAT_VERSION, Manifest, differing, read_manifest, write_manifest

if TYPE_CHECKING:
    from torch import Tensor

    from passlora.training.learner import TaskState


def read_task(folder: Path, manifest: Manifest, task: int, forms: TaskState, root: Path) -> TaskState:
    """The state after a task; every tensor is checked before it is used."""
    from passlora.training.learner import TaskState

    part = folder / task_folder(task)
    weights = part / (ADAPTER if manifest.settings["lora_r"] else BACKBONE)
    backbone = read_tensors(root, weights, forms.backbone)
    head = read_tensors(root, part / HEAD, forms.classifier)
    return TaskState(backbone, head, read_prototypes(folder, manifest, task, forms.memory, root))


def forms_of(folder: Path, manifest: Manifest, task: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of a task's head and of its prototypes: what the settings imply, the width of the features as the head has it."""
    import torch
    from safetensors import SafetensorError, safe_open

    from passlora.method.memory import Memory

    path = folder / task_folder(task) / HEAD
    try:
        with safe_open(path, framework="pt") as file:
            dim = int(file.get_slice("weight").get_shape()[1])
    except (SafetensorError, OSError, IndexError) as error:
        raise PassloraError(f"{path} is not a readable safetensors file ({error})") from None
    method, seen = manifest.config().method, sum(len(entry.classes) for entry in manifest.tasks[: task + 1])
    nodes = method.num_views * seen
    head = {"weight": torch.empty(nodes, dim, device="meta"), "bias": torch.empty(nodes, device="meta")}
    return head, Memory(dim, method).forms(seen)


def read_prototypes(
    folder: Path, manifest: Manifest, task: int, forms: dict[str, Tensor], root: Path
) -> dict[str, Tensor]:
    """The rows of the first tasks: later tasks' come after them."""
    import torch

    expected = [i for i, entry in enumerate(manifest.tasks[: task + 1]) for _ in entry.classes]
    old = {name: form for name, form in forms.items() if name != "radius"}
    old["radii"] = torch.empty(task + 1, dtype=torch.float64, device="meta")
    old["class_tasks"] = torch.empty(len(expected), dtype=torch.int64, device="meta")
    found = read_tensors(root, folder / PROTOTYPES, old, prefix=True)
    if found["class_tasks"].tolist() != expected:
        raise PassloraError(f"{folder / PROTOTYPES} and {MANIFEST} disagree on which task each class came with")
    return {"radius": found["radii"][-1:].clone(), **{name: found[name] for name in forms if name != "radius"}}


def convert(folder: Path) -> None:
    """Make the folder format 2, if it is not."""
    manifest = read_manifest(folder)
    whole = read_manifest(folder, BACKUP) if (folder / BACKUP).is_file() else manifest
    if manifest.format_version == FORMAT_VERSION:
        remove_old_files(folder, len(whole.tasks))  # of a conversion that was cut off
        return
    for task, entry in enumerate(whole.tasks):
        if whole.format_version == 1:
            entry.files = convert_task(folder, folder, whole, task, folder)
    for entry, same in zip(manifest.tasks, whole.tasks, strict=False):
        entry.files = same.files
    if whole is not manifest:
        write_manifest(folder, whole, BACKUP)
    write_manifest(folder, manifest)
    remove_old_files(folder, len(whole.tasks))


def convert_task(source: Path, folder: Path, manifest: Manifest, task: int, root: Path) -> dict[str, str]:
    """Write what format 2 has beside the adapter into a task's folder; returns its files with their digests."""
    old, part = source / task_folder(task), folder / task_folder(task)
    if not (old / HEAD).is_file():  # keep_tasks dropped it
        return {}
    head, memory = forms_of(source, manifest, task)
    if source != folder:
        for name in (ADAPTER, ADAPTER_CONFIG, BACKBONE):
            if (old / name).is_file():
                write(part / name, partial(shutil.copyfile, old / name))
    write_tensors(part / CLASSIFIER, read_tensors(root, old / HEAD, head))
    write_tensors(part / MEMORY, read_prototypes(source, manifest, task, memory, root))
    write_json(part / SETTINGS, differing(manifest.settings))
    return {name: digest_of(part / name) for name in IN_A_TASK if (part / name).is_file()}


def remove_old_files(folder: Path, tasks: int) -> None:
    """What a converted folder needs no more."""
    for part in (folder / task_folder(task) for task in range(tasks)):
        if (part / CLASSIFIER).is_file():
            (part / HEAD).unlink(missing_ok=True)
    if are_prototypes(folder / PROTOTYPES):
        (folder / PROTOTYPES).unlink()


def are_prototypes(path: Path) -> bool:
    """Whether passlora 0.1 wrote the file, rather than somebody who gave theirs the same name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {"means", "radii", "class_tasks"} <= set(file.keys())
    except (SafetensorError, OSError):
        return False
