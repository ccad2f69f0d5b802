"""A dataset cut into tasks, and a method taught over it: a loop over `PassLora.learn`, with its numbers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from passlora.config import Config, ScenarioConfig
from passlora.data.batches import Images, TaskData
from passlora.data.dataset import Dataset
from passlora.data.scenario import Scenario, make_scenario
from passlora.errors import PassloraError
from passlora.folder.history import check_no_rollback
from passlora.folder.layout import MANIFEST
from passlora.folder.lock import lock
from passlora.folder.manifest import read_manifest
from passlora.folder.results import Results
from passlora.hub.push import Uploads
from passlora.method.classifiers.ncm import class_sums
from passlora.method.features import of_tensors
from passlora.model.lesson import Lesson, LoadedData
from passlora.model.passlora import PassLora
from passlora.runs.folder import check_still_there
from passlora.runs.log import TrainingLog
from passlora.runs.record import Record
from passlora.training.accelerator import agree
from passlora.training.callbacks import Callback
from passlora.training.learner import Learner
from passlora.training.steps import Hooks, State

log = logging.getLogger(__name__)


class Stream:
    """Methods are run over it one after another; `folder` is that of the whole run."""

    def __init__(
        self,
        folder: Path,
        dataset: Dataset,
        tasks: ScenarioConfig,
        accelerator: Accelerator,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.callbacks = callbacks
        self.folder, self.dataset, self.tasks, self.accelerator = folder, dataset, tasks, accelerator
        scenario = make_scenario(tasks, dataset.train.labels.tolist(), len(dataset.class_names))
        self.scenario: Scenario = scenario
        self.loaded: dict[Any, LoadedData] = {}
        for task in range(scenario.num_tasks):
            if not np.isin(dataset.test.labels, scenario.labels(task)).any():
                names = ", ".join(self.names(task)[:5])
                raise PassloraError(f"task {task} ({names}) has no test images: its accuracy is undefined")
        sizes = "+".join(map(str, scenario.task_sizes)) if scenario.num_tasks <= 12 else f"{scenario.task_sizes[0]}+..."
        log.info(
            f"{dataset.name}: {len(dataset.train)} training and {len(dataset.test)} test images, "
            f"{scenario.num_classes} classes in {scenario.num_tasks} tasks ({sizes})"
        )

    def of(self, tasks: ScenarioConfig) -> Stream:
        """The same images in other tasks: a bound sees all classes in one."""
        if tasks == self.tasks:
            return self
        other = Stream(self.folder, self.dataset, tasks, self.accelerator, self.callbacks)
        other.loaded = self.loaded
        return other

    def names(self, task: int) -> list[str]:
        """The classes of a task, in the order of learning."""
        return [self.dataset.class_names[label] for label in self.scenario.labels(task)]

    @property
    def classes(self) -> list[str]:
        return [name for task in range(self.scenario.num_tasks) for name in self.names(task)]

    def data(self, image_size: int, config: Config) -> LoadedData:
        """Decoded once for all tasks, and for every method that reads images of this size."""
        if image_size not in self.loaded:
            train = Images(self.dataset.train, image_size, config.data, "training images")
            test = Images(self.dataset.test, image_size, config.data, "test images")
            self.loaded[image_size] = LoadedData(self.dataset.name, train, test, self.dataset.class_names)
        return self.loaded[image_size]

    def run(self, config: Config, folder: Path, name: str, uploads: Uploads | None = None) -> Results:
        """Learn every task in turn, from where the folder's run was left; model and numbers are saved after each."""
        with lock(folder) if self.accelerator.is_main_process else nullcontext():
            check_no_rollback(folder)
            self.check_same_tasks(folder)
            record = Record.read(folder, config.method.inference_modes)
            if record.tasks_done >= self.scenario.num_tasks:  # more, if `passlora learn` went on from there
                log.info(f"\n{name}: finished already")
                return record.results
            return Method(self, config, folder, name, record).learn_all(uploads)

    def check_folder(self) -> None:
        """Every process stops if the folder of the run is gone: before a task is trained, and before it is written."""
        error = None
        try:
            if self.accelerator.is_main_process:
                check_still_there(self.folder)
        except PassloraError as gone:
            error = gone
        agree(self.accelerator, error)

    def check_same_tasks(self, folder: Path) -> None:
        """A folder may have been taught other classes than the run's, by `passlora learn`, before the run was done."""
        learnt = [task.classes for task in read_manifest(folder).tasks] if (folder / MANIFEST).is_file() else []
        own = [self.names(task) for task in range(self.scenario.num_tasks)]
        if learnt[: len(own)] != own[: len(learnt)]:
            raise PassloraError(
                f"{folder} has learnt other classes than this run's in the meantime: go on with passlora learn, or "
                "choose another --output_dir"
            )


class Method:
    """One method on a stream: its model, its numbers, its log."""

    def __init__(self, stream: Stream, config: Config, folder: Path, name: str, record: Record) -> None:
        self.stream, self.config, self.folder, self.name, self.record = stream, config, folder, name, record
        self.began = time.perf_counter() - record.seconds
        self.scenario, self.accelerator = stream.scenario, stream.accelerator
        if record.tasks_done:
            backbone = config.model.model_name_or_path
            self.model = PassLora.from_pretrained(folder, accelerator=self.accelerator, model_name_or_path=backbone)
            settled = self.model.learner.config.method.adapt_tasks
            self.model.learner.config = config.settle(adapt_tasks=settled)  # the run's own: what a model keeps is less
        else:
            self.model = PassLora.from_config(config, self.accelerator)
        log.info(f"\n{name}: {what_is_trained(self.model.learner)}")

    def learn_all(self, uploads: Uploads | None) -> Results:
        tasks = self.scenario.num_tasks
        losses = TrainingLog(self.folder, f"seed_{self.config.training.seed}/{self.name}", self.accelerator)
        for task in range(self.record.tasks_done, tasks):
            label = f"{self.name} task {task} of 0-{tasks - 1}"
            lesson = self.learn(task, losses, label)
            log.info(f"{label}: {self.record.describe(self.scenario, task)}, {lesson.seconds:.0f} s")
            if uploads:
                uploads.push()
        memory = self.model.learner.memory
        if self.config.method.uses_prototypes:
            log.info(
                f"{self.name}: remembers {memory.num_classes} classes by {memory.num_entries:,} numbers "
                f"({memory.num_bytes / 1024:.0f} kB), radius {memory.radius:.3f}"
            )
        return self.record.results

    def learn(self, task: int, losses: TrainingLog, label: str) -> Lesson:
        """One task, tested and saved: numbers first, the manifest last, since it says which tasks are done."""
        model, record, scenario = self.model, self.record, self.scenario
        self.stream.check_folder()

        def start(checkpoint: State | None) -> None:
            losses.cut(task, 0 if checkpoint is None else int(checkpoint["epoch"]))
            if checkpoint is not None:
                log.info(f"{self.name}: continuing with task {task}, step {int(checkpoint['step'])}")
            elif task and task == record.tasks_done:
                log.info(f"{self.name}: continuing with task {task}")

        hooks = Hooks(losses, on_start=start, name=label)
        data = self.stream.data(model.learner.network.backbone.image_size, self.config)
        names = self.stream.names(task)
        told = self.stream.callbacks
        lesson = model.learn(data, classes=names, folder=self.folder, test_before=False, hooks=hooks, callbacks=told)
        if lesson.untested is not None:
            raise PassloraError(lesson.untested)
        record.add(lesson.evaluations, scenario, task)
        record.note(train_seconds=round(lesson.train_seconds, 2), test_seconds=round(lesson.test_seconds, 2))
        memory = model.learner.memory
        if self.config.training.measure_drift and memory.num_classes:
            record.note(drift=self.drift(task))
        record.about(self.config, self.name, scenario, self.stream.classes, time.perf_counter() - self.began)
        if memory.num_classes:
            record.results |= {"prototype_entries": memory.num_entries, "prototype_bytes": memory.num_bytes}
        self.stream.check_folder()
        if self.accelerator.is_main_process:
            record.write(self.folder, lesson.evaluations[self.config.method.inference].confusion)
        model.save_pretrained(self.folder)
        return lesson

    def drift(self, task: int) -> list[float]:
        """How far the true class means have moved from the stored ones, a mean a task, in units of a class's spread.

        For analysis alone: it reads the images of old classes, which learning never does.
        """
        learner, scenario = self.model.learner, self.scenario
        images = self.stream.data(learner.network.backbone.image_size, self.config).train
        classes = np.array(scenario.class_index)[images.split.labels]
        z, truth = learner.features(TaskData(images, np.flatnonzero(classes < scenario.seen(task)), classes))
        total, count = class_sums(of_tensors(z, truth))
        moved = (total / count[:, None] - learner.memory.class_means().cpu()).norm(dim=1)
        spread = learner.memory.radius * learner.memory.dim**0.5
        parts = [moved[part.start : part.stop] for part in map(scenario.classes, range(task + 1))]
        return [float(part.mean()) / spread if spread else 0.0 for part in parts]


def what_is_trained(learner: Learner) -> str:
    method, backbone = learner.config.method, learner.network.backbone
    if method.adapt_tasks == "auto":
        return f"{method.classifier} on features; held-out classes decide whether the first task adapts the backbone"
    if method.adapt_tasks == "none":
        return f"{method.classifier} on frozen features"
    trainable, total = backbone.parameter_counts()
    kind = "LoRA adapter" if backbone.has_lora else "whole backbone"
    per_class = method.num_views * (backbone.feature_dim + 1)
    when = "" if method.adapt_tasks == "all" else f" in the first task, then {method.classifier} on frozen features"
    return (
        f"training {trainable:,} of {total:,} backbone weights ({100 * trainable / total:.2f}%, {kind}) "
        f"and {per_class:,} head weights a class{when}"
    )
