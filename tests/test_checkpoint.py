"""The state inside a task, with the loss scaler of fp16 above all: a real one, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load, save

from passlora.data.batches import Images, TaskData
from passlora.data.dataset import load_dataset
from passlora.training.checkpoint import load_checkpoint, take_checkpoint
from passlora.training.learner import Learner
from passlora.training.steps import Hooks

HUGE = 2.0**127  # the first losses overflow at this scale: their updates are skipped


def with_scaler(**options):
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", **options)
    return accelerator


class Steps:
    """Updates of a small network by hand: scale, backward, step, update."""

    def __init__(self, config, fused, **scaler):
        self.accelerator = with_scaler(**scaler)
        self.network = Learner(config, self.accelerator).network
        self.network.classifier.grow(3)
        self.optimizer = torch.optim.Adam(self.network.trainable(), lr=1e-2, fused=fused)
        self.draws = torch.Generator().manual_seed(5)

    def step(self):
        x = torch.randn(2, 3, 32, 32, generator=self.draws)
        loss = self.network.classifier(self.network(x)).square().mean()
        scaler = self.accelerator.scaler
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()

    def take(self):
        """As it comes back from a file."""
        return load(save(take_checkpoint(3, self.network, self.optimizer, self.draws, self.accelerator, [])))

    def load(self, state):
        return load_checkpoint(state, self.network, self.optimizer, self.draws, self.accelerator)


def weights(network):
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def typed(state):
    return {name: (type(value), value) for name, value in state.items()}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("scale", "held"), [(2.0**10, True), (HUGE, False)], ids=["held", "none has held"])
def test_a_scaler_survives_a_round_trip(small, fused, scale, held):
    """The scaler grows after three updates that held: where it stands in them decides what comes next."""
    one = Steps(small(), fused, init_scale=scale, growth_interval=3)
    start = weights(one.network)
    for _ in range(2):
        one.step()
    moved = any(not torch.equal(tensor, start[name]) for name, tensor in weights(one.network).items())
    assert moved is held
    if not fused:
        assert bool(one.optimizer.state) is held
    other = Steps(small(seed=1), fused, growth_interval=3)
    assert other.load(one.take()) == []
    assert typed(other.accelerator.scaler.state_dict()) == typed(one.accelerator.scaler.state_dict())
    assert isinstance(other.accelerator.scaler.state_dict()["growth_interval"], int)
    other.network.load_state_dict({**weights(other.network), **frozen(one.network)})
    for _ in range(4):
        one.step()
        other.step()
    for name, tensor in weights(one.network).items():
        assert torch.equal(weights(other.network)[name], tensor), name
    assert other.accelerator.scaler.get_scale() == one.accelerator.scaler.get_scale()
    assert other.accelerator.scaler.get_scale() != scale


def frozen(network):
    """What a checkpoint leaves out: it is there anyway."""
    trained = {id(p) for p in network.trainable()}
    return {name: p for name, p in network.named_parameters() if id(p) not in trained}


@pytest.mark.parametrize("scale", [2.0**10, HUGE], ids=["held", "the first overflow"])
def test_a_task_in_fp16_s_way_goes_on_where_it_was_cut_off(small, scale):
    """The whole way through accelerate: a scaled backward pass, updates that may be skipped, checkpoints."""
    config = small(preset="finetune", save_steps=1)
    split = load_dataset(config.data, 0).train
    data = TaskData(Images(split, 32, config.data, "digits"), np.flatnonzero(split.labels < 6), split.labels)

    def learn(checkpoint=None):
        taken = {}
        keep = Hooks(on_checkpoint=lambda state: taken.update({int(state["step"]): load(save(state))}))
        learner = Learner(config, with_scaler(init_scale=scale, growth_interval=2))
        learner.learn(data, 6, keep, checkpoint)
        return weights(learner.network), taken

    whole, taken = learn()
    assert sorted(taken) == [1, 2, 3, 4]
    assert float(taken[1]["scaler/scale"]) == (scale if scale != HUGE else HUGE / 2)
    for step in (1, 3):
        rest, _ = learn(taken[step])
        assert all(torch.equal(rest[name], tensor) for name, tensor in whole.items()), step


def test_a_checkpoint_without_a_scaler_is_read_with_one_and_the_other_way_round(small):
    """The precision may be accelerate's to configure, and differ when the lesson goes on."""
    plain, scaled = Steps(small(), True), Steps(small(), True)
    plain.accelerator.scaler, made = None, plain.accelerator.scaler
    without = plain.take()
    assert not any(name.startswith("scaler/") for name in without)
    plain.load(scaled.take())
    plain.accelerator.scaler = made
    scaled.load(without)
    scaled.step()
    plain.step()


def test_the_losses_of_the_epoch_come_back(small):
    made = Steps(small(), True)
    history = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0, 7.0, 8.0])]
    state = take_checkpoint(3, made.network, made.optimizer, made.draws, made.accelerator, history)
    assert torch.equal(torch.stack(made.load(load(save(state)))), torch.stack(history))
    assert int(state["step"]) == 3
