"""When weights are updated, at which learning rate, and when the state inside a task is saved."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from passlora.config import TrainingConfig
from passlora.data.batches import Images, TaskData
from passlora.data.dataset import load_dataset
from passlora.training.learner import Learner
from passlora.training.schedule import accumulation_groups, is_time_to_save, lr_scale
from passlora.training.steps import Hooks


def test_accumulation_groups_end_with_the_epoch():
    assert accumulation_groups(5, 2) == [(0, 2), (0, 2), (1, 2), (1, 2), (2, 1)]
    assert accumulation_groups(3, 1) == [(0, 1), (1, 1), (2, 1)]


def test_the_schedules():
    steps = TrainingConfig(num_train_epochs=10, lr_milestones=[6])
    assert [lr_scale(e, steps) for e in (0, 5.99, 6, 9)] == [1, 1, pytest.approx(0.1), pytest.approx(0.1)]
    two = TrainingConfig(num_train_epochs=100, lr_milestones=[45, 90])
    assert [lr_scale(e, two) for e in (44, 45, 90)] == [1, pytest.approx(0.1), pytest.approx(0.01)]
    cosine = TrainingConfig(num_train_epochs=10, lr_scheduler_type="cosine")
    assert [lr_scale(e, cosine) for e in (0, 5, 10)] == [1, pytest.approx(0.5), pytest.approx(0)]


def saves(epochs, steps_per_epoch, accumulation, **options):
    """The steps of a task after which its state is saved."""
    config = TrainingConfig(**options)
    groups = accumulation_groups(steps_per_epoch, accumulation)
    last = [i for i in range(steps_per_epoch) if i + 1 == steps_per_epoch or groups[i + 1][0] != groups[i][0]]
    updates = [epoch * steps_per_epoch + i + 1 for epoch in range(epochs) for i in last]
    before, found = 0, []
    for steps in updates:
        if is_time_to_save(before, steps, steps_per_epoch, config):
            found.append(steps)
        before = steps
    return found


def test_saves_come_at_the_first_update_after_each_multiple():
    assert saves(1, 60, 4, save_steps=7) == [8, 16, 24, 28, 36, 44, 52, 56]
    assert saves(1, 12, 1, save_steps=5) == [5, 10]
    assert saves(1, 12, 4, save_steps=1) == [4, 8, 12], "once an update, however many multiples it passes"
    assert saves(3, 5, 2, save_steps=7) == [7, 14], "an epoch ends in an update: 2, 4, 5, 7, 9, 10, 12, 14, 15"
    assert saves(3, 6, 4, save_steps=7) == [10, 16], "updates at 4, 6, 10, 12, 16, 18"


def test_saves_by_epochs():
    assert saves(5, 5, 2, save_epochs=2) == [10, 20]
    assert saves(2, 5, 2, save_epochs=1, save_steps=4) == [4, 5, 9, 10]
    assert saves(2, 5, 2) == []


def test_a_task_is_saved_at_those_steps_also_after_it_was_cut_off(small):
    """32 steps, an update every four: the state of the last one needs no saving, the task is done."""
    budget = {"max_train_per_class": 8, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    config = small(preset="finetune", task_sizes=[4, 6], save_steps=7, **budget)
    split = load_dataset(config.data, 0).train
    data = TaskData(Images(split, 32, config.data, "digits"), np.flatnonzero(split.labels < 4), split.labels)
    whole: list = []
    Learner(config, Accelerator(cpu=True)).learn(data, 4, Hooks(on_checkpoint=whole.append))
    assert [int(state["step"]) for state in whole] == [8, 16, 24, 28]
    rest: list = []
    Learner(config, Accelerator(cpu=True)).learn(data, 4, Hooks(on_checkpoint=rest.append), whole[1])
    assert [int(state["step"]) for state in rest] == [24, 28]
    different = [name for name in whole[-1] if not torch.equal(rest[-1][name], whole[-1][name])]
    assert different == [], "it goes on bit for bit"
