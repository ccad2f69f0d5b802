"""When a step updates the weights, at which learning rate, and when its state is saved. No torch."""

from __future__ import annotations

import math

import numpy as np

from passlora.config import TrainingConfig


def accumulation_groups(steps: int, size: int) -> list[tuple[int, int]]:
    """For each step of an epoch, the update it belongs to and how many steps that update averages.

    An epoch ends in an update: its last group may be smaller.
    """
    return [(step // size, min(size, steps - step // size * size)) for step in range(steps)]


def is_time_to_save(before: int, steps: int, steps_per_epoch: int, config: TrainingConfig) -> bool:
    """Whether a save is due at an update after `steps` steps of a task, the last update having been after `before`.

    Only updates can be saved: with accumulation, a save that falls between two of them comes at the later one.
    """
    by_steps = config.save_steps is not None and steps // config.save_steps > before // config.save_steps
    return by_steps or (config.save_epochs is not None and steps % (config.save_epochs * steps_per_epoch) == 0)


def lr_scale(epoch: float, config: TrainingConfig) -> float:
    """Factor on the learning rate after `epoch` epochs (a fraction within one)."""
    if config.lr_scheduler_type == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(epoch / config.num_train_epochs, 1)))
    return config.lr_decay ** sum(epoch + 1e-9 >= milestone for milestone in config.lr_milestones)


def hash_seed(seed: int, task: int) -> int:
    """A seed a task, so that a task does not depend on how many random numbers the one before it took."""
    return int(np.random.SeedSequence([seed, task]).generate_state(1)[0])
