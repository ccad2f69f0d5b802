"""Whether it pays to adapt the backbone to the first task: decided by classes that it is not adapted to.

Every other class of the first task is trained on, and the rest are asked: do their images, each left out once, lie
nearer to the mean of their own class among all of the task's classes, told by the cross entropy of nearest means? Then
the halves change places, so that every class is asked once. Nearest means, since a classifier that learns its own
metric from a handful of classes tells them apart with any features; cross entropy, since there are hardly any errors to
be had among a handful. Classes to come are other classes, so it is classes that are counted, however many images each
has: their mean gain must exceed its standard error.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from passlora.data.batches import TaskData
from passlora.errors import DivergedError
from passlora.method.classifiers.ncm import left_out_losses
from passlora.training.steps import Hooks, TaskTraining

if TYPE_CHECKING:
    from passlora.training.learner import Learner

ERRORS = 1.0  # standard errors that the mean gain must exceed
log = logging.getLogger(__name__)


@dataclass
class Answers:
    of_class: Tensor  # (n,), what the images show
    losses: Tensor  # (n,), cross entropy
    right: Tensor  # (n,), whether the likeliest class is theirs


def adapting_pays(learner: Learner, data: TaskData, classes: int, name: str) -> bool:
    """The backbone is what it was before when this is done."""
    data = numbered_from_0(data)
    sizes = np.bincount(data.classes[data.rows], minlength=classes)
    halves = [(np.arange(classes) % 2 != half) & (sizes > 1) for half in (0, 1)]  # one image is nothing without it
    if min(half.sum() for half in halves) < 2:
        log.info("the backbone stays as it is: whether adapting it pays takes four classes of two images to tell")
        return False
    before, told, gains = answers(learner, data, classes), np.zeros(2), torch.zeros(classes, dtype=torch.float64)
    asked = halves[0] | halves[1]
    for half, others in enumerate(halves):
        try:
            after = answers_of_a_trial(learner, data, classes, half, name)
        except DivergedError as error:
            log.info(f"adapting the backbone does not pay, it stays as it is: {error}")
            return False
        own = torch.from_numpy(others)[before.of_class]
        gains.index_add_(0, before.of_class[own], (before.losses - after.losses)[own].double())
        told += [int(learner.add_up(part.right[own].sum())) for part in (before, after)]
    means = learner.add_up(gains).numpy()[asked] / sizes[asked]
    found, shares = standard_errors(means), 100 * told / sizes[asked].sum()
    pays = found > ERRORS
    log.info(
        f"adapting the backbone {'pays' if pays else 'does not pay'}: images of classes it is not adapted to are told "
        f"{shares[0]:.1f}% right before and {shares[1]:.1f}% after, with a cross entropy that is lower by {found:.1f} "
        f"standard errors over classes (it takes {ERRORS:g}){'' if pays else '; it stays as it is'}"
    )
    return pays


def standard_errors(values: np.ndarray) -> float:
    """Their mean, in units of its standard error."""
    return float(values.mean() / max(values.std(ddof=1) / len(values) ** 0.5, 1e-15))


def answers_of_a_trial(learner: Learner, data: TaskData, classes: int, half: int, name: str) -> Answers:
    """`answers` of a backbone that was trained on every other class; it is then as it was before."""
    backbone = learner.network.backbone
    before = {name: tensor.detach().clone() for name, tensor in backbone.state().items()}
    plainly = learner.config.settle(sst=False)  # rotations take four times as long
    count = len(range(half, classes, 2))
    training: TaskTraining = learner.training_of(every_other(data, half), count, config=plainly)
    try:
        training.run(Hooks(name=f"{name}, trying to adapt"))
        return answers(learner, data, classes)
    finally:
        backbone.load_state(before)


def numbered_from_0(data: TaskData) -> TaskData:
    """The first task's classes as the model will number them."""
    return TaskData(data.images, data.rows, data.classes - int(data.classes[data.rows].min()))


def every_other(data: TaskData, half: int) -> TaskData:
    """The classes to train on: 0, 2, 4 ... (or 1, 3, 5 ...) as 0, 1, 2 ..."""
    own = data.classes % 2 == half
    return TaskData(data.images, data.rows[own[data.rows]], np.where(own, data.classes // 2, -1))


def answers(learner: Learner, data: TaskData, classes: int) -> Answers:
    """To the images of this process's share, among all classes of the task; each is left out of what answers it."""
    learner.network.eval()
    features = learner.task_features(data, classes, first=0, views=1)
    batches = [(z[:, 0].cpu(), own.cpu()) for z, own, _ in features]
    z = torch.cat([z for z, _ in batches]) if batches else torch.zeros(0, features.dim)
    own = torch.cat([own for _, own in batches]) if batches else torch.zeros(0, dtype=torch.long)
    return Answers(own, *left_out_losses(z, own, features.class_counts, features.reduce))
