"""One lesson: what is new, train, test, and what is to be kept of it. Nothing of the model's folder changes here."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from passlora.data.batches import TaskData
from passlora.errors import PassloraError
from passlora.folder import manifest
from passlora.folder.checkpoints import read_checkpoint, write_checkpoint
from passlora.folder.manifest import Manifest, TaskEntry, now, settings_of
from passlora.folder.tasks import check_room, check_state
from passlora.model.lesson import Lesson, LoadedData, chosen_classes, describe_lesson, public_name, rows_of, share_right
from passlora.training import metrics
from passlora.training.evaluation import Evaluation
from passlora.training.learner import Learner, TaskState
from passlora.training.steps import Hooks, State

log = logging.getLogger(__name__)


@dataclass
class Request:
    """What `PassLora.learn` was asked for."""

    data: LoadedData
    classes: Sequence[str] | None
    on_known: str
    folder: Path | None
    reading: dict[str, Any]  # settings of the data, beside the model's own
    test_before: bool
    hooks: Hooks


def teach(learner: Learner, tasks: list[TaskEntry], request: Request) -> tuple[Lesson, TaskEntry, TaskState]:
    """Learn the request's classes as one more task."""
    began, data = time.perf_counter(), request.data
    known = Manifest({}, tasks).classes
    new, there = chosen_classes(data, known, request.classes, request.on_known)
    extended = there if request.on_known == "extend" else []
    if extended:
        check_can_extend(learner)
    entry = TaskEntry(new, now(), dataset=public_name(data), extended=extended)
    # By the reader's own check, before an hour of training.
    manifest.check(manifest.to_json(Manifest(settings_of(learner.config), [*tasks, entry])))
    index = {name: i for i, name in enumerate([*known, *new])}
    training = rows_of(data.train, data.class_names, {name: index[name] for name in (*new, *extended)})
    lesson = Lesson(new, [name for name in there if not extended], len(training.rows), extended)
    tell_of_single_images(training, [*known, *new], len(known))
    checkpoint, hooks = continuation(learner, len(tasks), request, lesson)
    if request.test_before:
        lesson.old_before = accuracy_before(learner, data, {name: i for i, name in enumerate(known)})
    hooks.on_start(checkpoint)
    learner.learn(training, len(new), hooks, checkpoint)
    state = learner.state()
    check_state(state)  # before anything is recorded of it
    state.settings = settings_of(learner.config)
    lesson.train_seconds = time.perf_counter() - began
    measure_after(learner, lesson, data, index)
    entry.accuracy = lesson.all_after
    if lesson.evaluations and lesson.tested_classes < len(index):
        entry.accuracy = lesson.evaluations[learner.config.method.inference].accuracy
        entry.tested = lesson.tested_classes
    if lesson.evaluations:
        record_by_task(entry, tasks, lesson.evaluations[learner.config.method.inference])
    lesson.seconds = time.perf_counter() - began
    lesson.test_seconds = lesson.seconds - lesson.train_seconds
    return lesson, entry, state


def record_by_task(entry: TaskEntry, before: list[TaskEntry], evaluation: Evaluation) -> None:
    """The accuracy on each task's classes, and what the earlier ones have lost since their best."""
    sizes = [len(names) for names in Manifest({}, [*before, entry]).classes_by_task]
    ends = np.cumsum(sizes)
    tested = evaluation.confusion.sum(axis=1) > 0
    entry.by_task = [
        metrics.accuracy(evaluation.confusion, range(end - size, end))
        if size and tested[end - size : end].all()
        else None
        for size, end in zip(sizes, ends, strict=True)
    ]
    drops = []
    first = max((i for i, task in enumerate(before) if task.forgotten), default=0)  # before, tasks had other classes
    for i in (i for i in range(len(before)) if sizes[i]):
        known = [value for task in before[first:] if i < len(task.by_task) and (value := task.by_task[i]) is not None]
        found = entry.by_task[i]
        if not known or found is None:
            return  # what was not tested cannot be said to be forgotten, or not
        drops.append(max(known) - found)
    entry.forgetting = fmean(drops) if drops else 0.0


def tell_of_single_images(training: TaskData, names: list[str], known: int) -> None:
    counts = np.bincount(training.classes[training.rows], minlength=len(names))
    single = [names[i] for i in np.flatnonzero(counts == 1) if i >= known]
    if single:
        which = ", ".join(single[:10]) + (", ..." if len(single) > 10 else "")
        log.warning(f"one image alone of {which}: how such a class's images differ cannot be learnt from it")


def check_can_extend(learner: Learner) -> None:
    """Only sums of features that do not change take in more images of a class as if they had been there before."""
    classifier, method = learner.network.classifier, learner.config.method
    if not classifier.extends or method.adapt_tasks == "all":
        what = (
            "whose network every task trains"
            if method.adapt_tasks == "all"
            else f"of the classifier {method.classifier}"
        )
        raise PassloraError(
            f"a model {what} cannot learn from more images of a class it knows: leave these out with --on_known "
            "skip, or forget the class and teach it anew"
        )


def accuracy_before(learner: Learner, data: LoadedData, index: dict[str, int]) -> float | None:
    """On the images of old classes in the test split."""
    tested = None if data.test is None else rows_of(data.test, data.class_names, index)
    if tested is None or len(tested.rows) == 0:
        return None
    mode = learner.config.method.inference
    return share_right(learner.evaluate(tested, [mode])[mode], range(len(index)))


def measure_after(learner: Learner, lesson: Lesson, data: LoadedData, index: dict[str, int]) -> None:
    """Once, on the test images of every class known now."""
    tested = None if data.test is None else rows_of(data.test, data.class_names, index)
    if tested is None or len(tested.rows) == 0:
        return
    try:
        evaluations = learner.evaluate(tested, learner.config.method.inference_modes)
    except PassloraError as error:  # an image that cannot be read: what was learnt is kept
        lesson.untested = str(error)
        return
    old = len(index) - len(lesson.new_classes)
    lesson.take(evaluations, learner.config.method.inference, old, len(index))


def continuation(learner: Learner, task: int, request: Request, lesson: Lesson) -> tuple[State | None, Hooks]:
    """The checkpoint of this lesson, if it was cut off; and hooks that write one."""
    folder, hooks = request.folder, request.hooks
    if folder is None:
        return None, hooks
    check_room(folder, task)
    processes = learner.accelerator.num_processes
    about = describe_lesson(learner.config, request.reading, request.data, lesson, processes)
    checkpoint = read_checkpoint(folder, task, about)
    lesson.continued_at = None if checkpoint is None else int(checkpoint["step"])

    def save(state: State) -> None:
        if learner.accelerator.is_main_process:
            write_checkpoint(folder, state, about)
        hooks.on_checkpoint(state)

    return checkpoint, dataclasses.replace(hooks, on_checkpoint=save)
