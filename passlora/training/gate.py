"""Whether it pays to adapt the backbone to the first task: decided by classes that it is not adapted to.

Half of the first task's classes are trained on, as the task would be. The other half are asked: are their images, each
left out once, told apart better by the adapted features than by the pretrained ones? Classes to come are such classes.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from passlora.data.batches import TaskData
from passlora.method.discriminant import left_out_right
from passlora.training.steps import Hooks, TaskTraining

if TYPE_CHECKING:
    from passlora.training.learner import Learner

DEVIATIONS = 2.0  # the gain must exceed so many standard deviations of it
log = logging.getLogger(__name__)


def adapting_pays(learner: Learner, data: TaskData, classes: int, name: str) -> bool:
    """The backbone is what it was before when this is done."""
    tuned, asked = halves(data, classes)
    sizes = np.bincount(asked.classes[asked.rows]) if len(asked.rows) else np.zeros(0)
    if len(sizes) < 2 or classes - len(sizes) < 2 or sizes.min() < 2:
        log.info("the backbone stays as it is: whether adapting it pays takes four classes of two images to tell")
        return False
    backbone = learner.network.backbone
    before = {name: tensor.detach().clone() for name, tensor in backbone.state().items()}
    frozen = right_answers(learner, asked, len(sizes))
    training: TaskTraining = learner.training_of(tuned, classes - len(sizes))
    training.run(Hooks(name=f"{name}, trying to adapt"))
    adapted = right_answers(learner, asked, len(sizes))
    backbone.load_state(before)
    gained, lost = (int(learner.add_up(part.sum())) for part in (adapted & ~frozen, frozen & ~adapted))
    pays = gained - lost > DEVIATIONS * math.sqrt(gained + lost)
    shares = [100 * int(learner.add_up(part.sum())) / len(asked.rows) for part in (frozen, adapted)]
    log.info(
        f"adapting the backbone {'pays' if pays else 'does not pay'}: classes it is not adapted to are told apart "
        f"{shares[0]:.1f}% right before and {shares[1]:.1f}% after{'' if pays else '; it stays as it is'}"
    )
    return pays


def halves(data: TaskData, classes: int) -> tuple[TaskData, TaskData]:
    """The task's classes in turns: those to train on, and those to ask; each numbered from 0."""
    first = int(data.classes[data.rows].min())
    parts = []
    for half in (0, 1):
        mine = (data.classes >= first) & ((data.classes - first) % 2 == half)
        own = np.where(mine, (data.classes - first) // 2, -1)
        parts.append(TaskData(data.images, data.rows[mine[data.rows]], own))
    return parts[0], parts[1]


def right_answers(learner: Learner, data: TaskData, classes: int) -> Tensor:
    """Which of this process's share of the images are answered right without having been seen."""
    learner.network.eval()
    features = learner.task_features(data, classes, first=0, views=1)
    batches = [(z[:, 0].cpu(), own.cpu()) for z, own, _ in features]
    z = torch.cat([z for z, _ in batches]) if batches else torch.zeros(0, features.dim)
    own = torch.cat([own for _, own in batches]) if batches else torch.zeros(0, dtype=torch.long)
    return left_out_right(z, own, features.class_counts, features.reduce)
