"""What a program is told while a model learns, in the manner of transformers' TrainerCallback."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from passlora.training.steps import EpochLog, Hooks, State


class Callback:
    """Subclass it, write the methods you need, and hand it to `PassLora.learn` or `train` (`callbacks=[...]`).

    `model` is the PassLora; task 0 is the first. With several processes each of them calls its own.
    """

    def on_task_begin(self, model: Any, task: int) -> None:
        """The data is read and checked; nothing is learnt yet."""

    def on_epoch_end(self, model: Any, log: EpochLog) -> None:
        """After each epoch that trains the network (not of trials whether adapting pays)."""

    def on_task_end(self, model: Any, task: int, lesson: Any) -> None:
        """Learnt and tested (`lesson`, a Lesson), and part of the model; saved only if you, or a run, save it."""


def telling(hooks: Hooks, callbacks: Sequence[Callback], model: Any) -> Hooks:
    """The same hooks, which also tell `callbacks`."""
    task = len(model.tasks)

    def on_start(checkpoint: State | None) -> None:
        hooks.on_start(checkpoint)
        for callback in callbacks:
            callback.on_task_begin(model, task)

    def on_epoch(log: EpochLog) -> None:
        hooks.on_epoch(log)
        for callback in callbacks:
            callback.on_epoch_end(model, log)

    return dataclasses.replace(hooks, on_start=on_start, on_epoch=on_epoch) if callbacks else hooks
