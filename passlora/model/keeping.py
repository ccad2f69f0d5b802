"""A model into a folder: its own, another one of the same model, or a new one."""

from __future__ import annotations

from pathlib import Path

from passlora.folder import format1, history, saving
from passlora.folder.layout import CONFIG, MANIFEST
from passlora.folder.lock import check_links
from passlora.folder.manifest import Manifest, read_manifest
from passlora.folder.tasks import check_state, copy_task
from passlora.hub.card import write_card
from passlora.hub.pull import Source
from passlora.training.learner import TaskState


def save(folder: Path, whole: Manifest, unsaved: dict[int, TaskState], source: Source | None) -> None:
    """Tasks first, then the card, the manifest last; tasks that were learnt elsewhere come from `source`."""
    history.check_no_rollback(folder)
    if not any((folder / name).is_file() for name in (MANIFEST, CONFIG)):
        saving.check_new_model(folder)
    saving.check_same_model(folder, [task for i, task in enumerate(whole.tasks) if i not in unsaved])
    for state in unsaved.values():
        check_state(state)
    if source is not None and folder.resolve() != source.folder.resolve():
        copy_earlier_tasks(source, folder, whole, unsaved)
    elif (folder / MANIFEST).is_file():
        format1.convert(folder)
        for task, there in zip(whole.tasks, read_manifest(folder).tasks, strict=False):
            task.files = there.files
    saving.write_tasks(folder, whole, unsaved)
    write_card(folder, whole)
    saving.commit(folder, whole)


def copy_earlier_tasks(source: Source, folder: Path, whole: Manifest, unsaved: dict[int, TaskState]) -> None:
    source.fetch()
    check_links(source.folder, source.root)
    before = read_manifest(source.folder)
    for task, entry in enumerate(whole.tasks):
        if task in unsaved:
            continue
        if before.format_version == 1:
            entry.files = format1.convert_task(source.folder, folder, before, task, source.root)
        else:
            copy_task(source.folder, folder, task, entry)
