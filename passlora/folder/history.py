"""A model's tasks over time: restore one, go back to one, delete what is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from passlora.errors import PassloraError
from passlora.folder import format1, tasks
from passlora.folder.layout import BACKUP, CONFUSION, MATRIX, RESULTS, task_folder, task_number
from passlora.folder.manifest import Manifest, read_manifest, write_manifest
from passlora.folder.results import trim_results

if TYPE_CHECKING:
    from passlora.training.learner import Learner


# What a training, or a test, left in a model's folder, with the names of all classes.
WITH_NAMES = (RESULTS, MATRIX, CONFUSION, *(f"eval/{name}" for name in (CONFUSION, "confusion_matrix.png")))


def restore(folder: Path, learner: Learner, manifest: Manifest, tasks_learnt: int, root: Path | None = None) -> None:
    """Make a fresh learner what it was after the first `tasks_learnt` tasks.

    No file may lead out of `root`: the folder itself, or the cache that its links point into.
    """
    task, root = tasks_learnt - 1, root or folder
    check_kept(folder, task, manifest)
    seen = len(manifest.after(tasks_learnt).classes)
    forms = learner.forms(seen)
    if manifest.format_version == 1:
        state = format1.read_task(folder, manifest, task, forms, root)
    else:
        state = tasks.read_task(folder, task, manifest.tasks[task], forms, root)
    learner.restore(tasks_learnt, seen, state)


def check_kept(folder: Path, task: int, manifest: Manifest) -> None:
    last = len(manifest.tasks) - 1
    if manifest.format_version == 1:
        gone = manifest.settings["keep_tasks"] == "last" and not (folder / task_folder(task)).is_dir()
    else:
        gone = not manifest.tasks[task].files
    if task < last and gone:
        kept = [str(i) for i, entry in enumerate(manifest.tasks) if entry.files] or [str(last)]
        which = f"is only task {kept[0]}" if len(kept) == 1 else f"are tasks {kept[0]} to {kept[-1]}"
        keep = manifest.settings["keep_tasks"]
        raise PassloraError(f"the weights of task {task} were not kept (keep_tasks {keep}): there {which}")


def settings_after(folder: Path, manifest: Manifest, task: int, root: Path | None = None) -> dict:
    """The settings that `task` was learnt with."""
    if task == len(manifest.tasks) - 1 or manifest.format_version == 1 or not manifest.tasks[task].files:
        return manifest.settings
    return tasks.read_settings(folder, task, manifest.tasks[task], root or folder)


def rollback(folder: Path, to_task: int) -> Manifest:
    """Make the model what it was after `to_task`. Nothing is deleted: `prune` confirms, a later task undoes."""
    format1.convert(folder)
    current, backup = read_manifest(folder), folder / BACKUP
    whole = read_manifest(folder, BACKUP) if backup.is_file() else current
    if not 0 <= to_task < len(whole.tasks):
        raise PassloraError(f"{folder} has the tasks 0 to {len(whole.tasks) - 1}, not {to_task}")
    check_kept(folder, to_task, whole)
    is_undo = to_task == len(whole.tasks) - 1
    if not backup.is_file() and not is_undo:
        write_manifest(folder, current, BACKUP)
    back = Manifest(settings_after(folder, whole, to_task), whole.tasks[: to_task + 1])
    write_manifest(folder, back)
    if is_undo:
        backup.unlink(missing_ok=True)
    return back


def prune(folder: Path) -> list[str]:
    """Delete what a rollback left behind; returns the names of what went."""
    format1.convert(folder)
    manifest, gone = read_manifest(folder), []
    (folder / BACKUP).unlink(missing_ok=True)
    trim_results(folder, len(manifest.tasks))
    for path in sorted(folder.iterdir()):
        number = task_number(path.name)
        if number is not None and number >= len(manifest.tasks) and tasks.remove_task(path):
            gone.append(path.name)
    return gone


def forget_for_good(folder: Path) -> list[str]:
    """Delete what the tasks before still hold of forgotten classes, their names too; returns the names of what went."""
    check_no_rollback(folder)
    manifest = read_manifest(folder)
    last = max((i for i, task in enumerate(manifest.tasks) if task.forgotten), default=None)
    gone = []
    if last is not None:
        for name in WITH_NAMES:  # before the manifest, which says that there is something to do
            if (folder / name).is_file():
                (folder / name).unlink()
                gone.append(name)
        for task, names in zip(manifest.tasks, manifest.classes_by_task, strict=True):
            task.classes, task.extended, task.forgotten, task.renamed = names, [], [], {}
        for task in manifest.tasks[:last]:
            task.files = {}
        write_manifest(folder, manifest)  # from here on the folder speaks of none of them
    parts = [task_folder(i) for i, task in enumerate(manifest.tasks) if not task.files]
    return [*(name for name in parts if tasks.remove_task(folder / name)), *gone]


def check_no_rollback(folder: Path) -> None:
    if (folder / BACKUP).is_file():
        raise PassloraError(
            f"{folder} is rolled back and not confirmed: passlora rollback {folder} --prune confirms, "
            f"passlora rollback {folder} --to_task N goes elsewhere"
        )
