"""What makes training and inference faster or smaller gives the same numbers, and does save what it says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from test_reference_losses import RECORDED, losses_of
from torch.utils._python_dispatch import TorchDispatchMode

from passlora.data.batches import Images, TaskData
from passlora.data.dataset import load_dataset
from passlora.errors import PassloraError
from passlora.training.learner import Learner
from passlora.training.steps import Hooks

PLAIN = {"crop_padding": 0, "horizontal_flip": False, "brightness": 0}


def recorded(run):
    return json.loads(RECORDED.read_text(encoding="utf-8"))[run]


def ready(config):
    """A learner and the data of two tasks of digits."""
    learner = Learner(config, Accelerator(cpu=True))
    split = load_dataset(config.data, config.training.seed).train
    images = Images(split, learner.network.backbone.image_size, config.data, "test")
    first = config.scenario.task_sizes[0]
    tasks = [np.flatnonzero(split.labels < first), np.flatnonzero(split.labels >= first)]
    return learner, [TaskData(images, rows, split.labels) for rows in tasks]


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_recorded_loss():
    assert losses_of("lora", gradient_checkpointing=True) == pytest.approx(recorded("lora"), rel=1e-5)


def test_gradient_checkpointing_changes_no_loss(small):
    """The second task switches adapters between the student's forward passes."""
    curves = {}
    for on in (False, True):
        learner, tasks = ready(small(gradient_checkpointing=on, num_train_epochs=2))
        curves[on] = []
        for task, classes in zip(tasks, (6, 4), strict=True):
            learner.learn(task, classes, Hooks(lambda log, steps=curves[on]: steps.extend(log.steps)))
    assert len(curves[True]) == 16 and curves[True] == pytest.approx(curves[False], rel=1e-5)


def test_gradient_checkpointing_keeps_less(small):
    kept = {}
    for on in (False, True):
        learner, _ = ready(small())
        backbone = learner.network.backbone
        backbone.checkpoint_gradients(on)
        kept[on] = 0

        def keep(tensor, on=on):
            kept[on] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            backbone(torch.rand(8, 3, 32, 32))
    assert 0 < kept[True] < kept[False] / 5


def test_gradient_checkpointing_and_batch_statistics_do_not_mix(tiny):
    resnet = {"model_name_or_path": "passlora/resnet18", "pretrained": False, "lora_r": 0, "image_size": 8}
    learner, tasks = ready(tiny(**resnet, gradient_checkpointing=True))
    with pytest.raises(PassloraError, match="batch normalisation"):
        learner.learn(tasks[0], 6)


def test_a_cached_teacher_says_the_same_and_is_asked_once_an_image(small, monkeypatch):
    curves, rows = {}, {}
    for cached in (False, True):
        learner, tasks = ready(small(**PLAIN, cache_teacher=cached, num_train_epochs=3, per_device_train_batch_size=7))
        rows[cached], logs = 0, []

        def ask(x, teacher=learner.network.backbone.teacher, cached=cached):
            rows[cached] += len(x)
            return teacher(x)

        monkeypatch.setattr(learner.network.backbone, "teacher", ask)
        learner.learn(tasks[0], 6)
        learner.learn(tasks[1], 4, Hooks(logs.append))
        curves[cached] = [loss for log in logs for loss in log.steps]
    assert rows == {False: 3 * 24 * 4, True: 24 * 4}
    assert curves[True] == pytest.approx(curves[False], rel=1e-5)


@pytest.mark.parametrize("change", [{"crop_padding": 1}, {"horizontal_flip": True}, {"brightness": 0.1}])
def test_a_teacher_is_not_cached_for_images_that_change(small, change):
    learner, tasks = ready(small(**{**PLAIN, **change}, cache_teacher=True))
    with pytest.raises(PassloraError, match="look the same in every epoch"):
        learner.learn(tasks[0], 6)


class Syncs(TorchDispatchMode):
    """Counts operations whose result the host would have to fetch from its GPU."""

    NAMES = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "_unique2", "unique_dim", "equal")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in self.NAMES:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"proto_aug": "implicit", "covariance": "diag"}, {"preset": "lwf"}], ids=str)
def test_no_step_fetches_a_number_from_the_device(small, options):
    learner, tasks = ready(small(**options, horizontal_flip=True))
    learner.learn(tasks[0], 6)
    training = learner.training_of(tasks[1], 4)
    at_epoch_end = []
    with Syncs() as syncs:
        torch.ones(2).sum().item()
        assert syncs.seen == ["_local_scalar_dense"], "the counter counts"
        syncs.seen.clear()
        training.run(Hooks(lambda log: at_epoch_end.extend([len(log.steps), *syncs.seen])))
    assert at_epoch_end[0] == 3
    assert len(at_epoch_end) <= 2, "one number a task: the seed that torch's loader draws"


def multiview(learner, images):
    return learner.network.scores(learner.network.features(images, 4), ["multiview"], learner.memory)["multiview"]


def test_four_views_need_no_larger_batches_than_one(small, monkeypatch):
    learner, tasks = ready(small())
    learner.network.classifier.grow(6)
    images = tasks[0].images.cache[:5]
    whole = multiview(learner, images)
    rows, forward = [], learner.network.backbone.forward
    monkeypatch.setattr(learner.network.backbone, "forward", lambda x: (rows.append(len(x)), forward(x))[1])
    assert torch.equal(multiview(learner, images), whole)
    assert rows == [5] * 4


def test_inference_halves_what_does_not_fit(small, monkeypatch):
    learner, tasks = ready(small())
    learner.network.classifier.grow(6)
    images, forward = tasks[0].images.cache[:7], learner.network.backbone.forward
    whole = multiview(learner, images)

    def small_memory(limit):
        def run(x):
            if len(x) > limit:
                raise torch.OutOfMemoryError(f"{len(x)} rows do not fit")
            return forward(x)

        return run

    monkeypatch.setattr(learner.network.backbone, "forward", small_memory(2))
    torch.testing.assert_close(multiview(learner, images), whole, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(learner.network.backbone, "forward", small_memory(0))
    with pytest.raises(torch.OutOfMemoryError, match="1 rows"):
        multiview(learner, images)
