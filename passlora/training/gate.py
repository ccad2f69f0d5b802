"""Whether it pays to adapt the backbone to the first task: decided by classes that it is not adapted to.

Every other class of the first task is trained on, as the task would be. The rest are asked: are their images, each left
out once, told better among all of the task's classes by the adapted features than by the pretrained ones? Classes to
come are such classes.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from passlora.data.batches import TaskData
from passlora.errors import DivergedError
from passlora.method.discriminant import left_out_right
from passlora.training.steps import Hooks, TaskTraining

if TYPE_CHECKING:
    from passlora.training.learner import Learner

DEVIATIONS = 2.0  # the gain must exceed so many standard deviations of it
log = logging.getLogger(__name__)


def adapting_pays(learner: Learner, data: TaskData, classes: int, name: str) -> bool:
    """The backbone is what it was before when this is done."""
    data = numbered_from_0(data)
    sizes = np.bincount(data.classes[data.rows], minlength=classes)
    asked = (np.arange(classes) % 2 == 1) & (sizes > 1)  # a class of one image is nothing without it
    if asked.sum() < 2:
        log.info("the backbone stays as it is: whether adapting it pays takes four classes of two images to tell")
        return False
    backbone = learner.network.backbone
    before = {name: tensor.detach().clone() for name, tensor in backbone.state().items()}
    frozen = right_answers(learner, data, classes, asked)
    plainly = learner.config.settle(sst=False)  # rotations take four times as long, and change no decision seen so far
    training: TaskTraining = learner.training_of(every_other(data), -(-classes // 2), config=plainly)
    try:
        training.run(Hooks(name=f"{name}, trying to adapt"))
        adapted = right_answers(learner, data, classes, asked)
    except DivergedError as error:
        log.info(f"adapting the backbone does not pay, it stays as it is: {error}")
        return False
    finally:
        backbone.load_state(before)
    gained, lost = (int(learner.add_up(part.sum())) for part in (adapted & ~frozen, frozen & ~adapted))
    pays = gained - lost > DEVIATIONS * math.sqrt(gained + lost)
    shares = [100 * int(learner.add_up(part.sum())) / sizes[asked].sum() for part in (frozen, adapted)]
    log.info(
        f"adapting the backbone {'pays' if pays else 'does not pay'}: images of classes it is not adapted to are told "
        f"{shares[0]:.1f}% right before and {shares[1]:.1f}% after{'' if pays else '; it stays as it is'}"
    )
    return pays


def numbered_from_0(data: TaskData) -> TaskData:
    """The first task's classes as the model will number them."""
    return TaskData(data.images, data.rows, data.classes - int(data.classes[data.rows].min()))


def every_other(data: TaskData) -> TaskData:
    """The classes to train on: 0, 2, 4 ... as 0, 1, 2 ..."""
    even = data.classes % 2 == 0
    return TaskData(data.images, data.rows[even[data.rows]], np.where(even, data.classes // 2, -1))


def right_answers(learner: Learner, data: TaskData, classes: int, asked: np.ndarray) -> Tensor:
    """Which of this process's share of the images of asked classes are told right, among all classes of the task.

    Each is left out of the sums that it is told by.
    """
    learner.network.eval()
    features = learner.task_features(data, classes, first=0, views=1)
    batches = [(z[:, 0].cpu(), own.cpu()) for z, own, _ in features]
    z = torch.cat([z for z, _ in batches]) if batches else torch.zeros(0, features.dim)
    own = torch.cat([own for _, own in batches]) if batches else torch.zeros(0, dtype=torch.long)
    return left_out_right(z, own, features.class_counts, features.reduce) & torch.from_numpy(asked)[own]
