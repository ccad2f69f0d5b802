"""How cost grows: with the number of old classes, with the number of images remembered, with the number of tasks."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Iterator

import numpy as np
import torch
from accelerate import Accelerator

from passlora import Config
from passlora.data.batches import Images
from passlora.data.rows import ArrayRows, Split
from passlora.method.memory import Statistics
from passlora.training.learner import Learner, TaskData

from .scene import DEIT, LORA, RESNET, Scene
from .timing import Row, interleave, ratios

FORMS = {
    "explicit": {},
    "implicit, radius": {"proto_aug": "implicit"},
    "implicit, diag": {"proto_aug": "implicit", "covariance": "diag"},
}
OLD_CLASSES = (100, 1_000, 10_000)


def old_classes(rounds: int) -> Iterator[Row]:
    """Steps with 100 to 10,000 old classes, and what is kept of them."""
    for name, settings, batch in (("DeiT-S/16, d = 384, batch 2", DEIT, 2), ("ResNet-18, d = 512, batch 8", RESNET, 8)):
        for form, switches in FORMS.items():
            scenes = {old: Scene({**settings, **switches}, batch, 1, old=old, epochs=2) for old in OLD_CLASSES}
            seconds = interleave({str(old): scene.second_epoch for old, scene in scenes.items()}, rounds)
            for old in OLD_CLASSES[1:]:
                goal = "<= 1.5" if old == OLD_CLASSES[-1] else ""
                what = f"{name}, {form}: a step with {old:,} old classes, over 100"
                yield Row(what, ratios(seconds, str(old), "100"), "times", goal)
            for old, scene in scenes.items():
                head = 4 * sum(p.numel() for p in scene.learner.network.classifier.parameters())
                kept, trained = scene.learner.memory.num_bytes, 4 * head  # weight, gradient, Adam's two moments
                yield Row(f"{name}, {form}: prototypes of {old:,} classes", [kept / 2**20], "MB")
                if form == "explicit":
                    yield Row(f"{name}: head of {old:,} classes, with gradient and Adam", [trained / 2**20], "MB")


def collecting(rounds: int) -> Iterator[Row]:
    """The peak memory of a process that takes a million features of 384 dimensions into class means and variances."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        before, after, seconds = pool.apply(collect, (1_000_000, 384, 1_000))
    yield Row("1,000,000 features x 384 into 4,000 prototypes: added to the peak memory", [after - before], "MB")
    yield Row("1,000,000 features x 384 into 4,000 prototypes: time", [seconds], "s")


def collect(samples: int, dim: int, classes: int) -> tuple[float, float, float]:
    """Peak memory in MB before and after, and seconds."""
    statistics, batch = Statistics(4 * classes, dim, full=False), 4_096
    z, nodes = torch.randn(batch, dim), torch.randint(4 * classes, (batch,))
    statistics.add(z, nodes)
    before, began = peak_mb(), time.perf_counter()
    for _ in range(samples // batch):
        statistics.add(z, nodes)
    statistics.covariances()
    return before, peak_mb(), time.perf_counter() - began


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def many_tasks(rounds: int) -> Iterator[Row]:
    """A model that learns its last twenty of a hundred tasks of one class, against one that learns its first twenty."""
    tasks, images = 100, 16
    pixels = np.random.default_rng(0).integers(0, 256, (tasks * images, 32, 32, 3)).astype(np.uint8)
    labels = np.repeat(np.arange(tasks), images)
    config = Config.make(**LORA, num_tasks=tasks, num_train_epochs=2, lr_milestones=[1], per_device_train_batch_size=8)
    data = Images(Split(ArrayRows(pixels, "noise"), labels), 64, config.data, "noise")

    def lessons() -> Iterator[None]:
        learner = Learner(config, Accelerator())
        for task in range(tasks):
            learner.learn(TaskData(data, np.flatnonzero(labels == task), labels), 1)
            yield

    early, late = lessons(), lessons()
    next(early)  # the first task has no teacher
    for _ in range(80):
        next(late)
    seconds = interleave({"early": lambda: next(early), "late": lambda: next(late)}, 19)
    yield Row("100 tasks of one class: a task of four steps, tasks 3 to 21", seconds["early"], "s")
    yield Row("100 tasks of one class: a task of four steps, tasks 82 to 100", seconds["late"], "s")
    yield Row("100 tasks of one class: the late ones, over the early ones", ratios(seconds, "late", "early"), "times")
