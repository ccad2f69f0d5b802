"""The steps of one task: batches, losses, updates, and the state in between.

Every process runs the backbone on its share of the batch; features are then gathered, so that each process computes
the loss of the *whole* batch with the same draws. The nearest new feature, the batch norm of the distillation and the
mean over an uneven last batch are therefore those of one big device, however many processes there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor
from torch.nn import functional as F

from passlora.config import Config
from passlora.data.batches import Batch, TaskData, TrainPlans, generator
from passlora.display.progress import is_seen, progress
from passlora.errors import DivergedError, PassloraError
from passlora.method.classifiers import Head
from passlora.method.memory import Memory
from passlora.method.objective import Losses, Teacher, objective
from passlora.method.views import nodes, rotate
from passlora.network.network import Network
from passlora.training.checkpoint import load_checkpoint, take_checkpoint
from passlora.training.schedule import accumulation_groups, is_time_to_save, lr_scale
from passlora.training.teacher import AskTeacher, make_teacher

FUSED_ADAM = ("cpu", "cuda", "mps", "xpu")
LOSS_NAMES = ("total", "new", "old", "kd")
State = dict[str, Tensor]


@dataclass
class EpochLog:
    """Mean losses of one epoch, and every step's total."""

    task: int
    epoch: int
    learning_rate: float
    losses: dict[str, float]
    steps: list[float] = field(repr=False)


@dataclass
class Hooks:
    """Who is told what happens inside a task."""

    on_epoch: Callable[[EpochLog], None] = lambda log: None
    on_checkpoint: Callable[[State], None] = lambda state: None
    on_start: Callable[[State | None], None] = lambda checkpoint: None  # with the one that it goes on from
    name: str = "training"  # of the progress bar


class TaskTraining:
    """Trains `network`, whose classifier is the head, already grown, on one task. `old_head` is the head before.

    The head's first class is the model's class `first`: 0, unless the head is this task's alone.
    """

    def __init__(
        self,
        config: Config,
        accelerator: Accelerator,
        network: Network,
        memory: Memory,
        task: int,
        data: TaskData,
        old_head: tuple[Tensor, Tensor],
        first: int = 0,
    ) -> None:
        self.config, self.accelerator, self.network, self.memory = config, accelerator, network, memory
        self.task, self.data, self.old_head, self.first = task, data, old_head, first
        assert isinstance(network.classifier, Head)
        self.head = network.classifier
        training = config.training
        self.batch_size = training.per_device_train_batch_size * accelerator.num_processes
        self.learning_rate = training.learning_rate * (training.lr_later_tasks if task else 1)
        self.draws = generator("draws", training.seed, task, device=accelerator.device)
        self.ask_teacher: AskTeacher | None = None
        if task and config.method.uses_teacher:
            self.ask_teacher = make_teacher(config, accelerator, network, data, self.whole_batch)

    def run(self, hooks: Hooks, checkpoint: State | None = None) -> None:
        """All steps, from where `checkpoint`, one of those that `hooks` were given, was taken."""
        training, accelerator = self.config.training, self.accelerator
        plans = TrainPlans(
            self.data.rows,
            self.batch_size,
            training.num_train_epochs,
            (training.seed, self.task),
            accelerator.process_index,
            accelerator.num_processes,
            start=0 if checkpoint is None else int(checkpoint["step"]),
        )
        optimizer = torch.optim.Adam(
            self.network.trainable(),
            lr=self.learning_rate,
            weight_decay=training.weight_decay,
            fused=accelerator.device.type in FUSED_ADAM,  # one pass over the weights, no waiting for a step's number
        )
        model, prepared = accelerator.prepare(self.network, optimizer)
        history = [] if checkpoint is None else self._continue(checkpoint, optimizer)
        model.train()
        self._steps(model, prepared, optimizer, plans, history, hooks)
        self.network = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
        for buffer in self.network.buffers():  # batch statistics are a process's own until its next forward
            buffer.copy_(broadcast(buffer))
        accelerator.free_memory()
        self.network.eval()

    def _steps(
        self, model: Any, prepared: Any, optimizer: Any, plans: TrainPlans, history: list[Tensor], hooks: Hooks
    ) -> None:
        training, accelerator = self.config.training, self.accelerator
        groups = accumulation_groups(plans.steps_per_epoch, training.gradient_accumulation_steps)
        updates_per_epoch, saved = groups[-1][0] + 1, plans.start
        bar = progress(total=len(plans), initial=plans.start, desc=hooks.name, unit="step")
        for step, batch in enumerate(self.data.images.batches(plans), start=plans.start):
            epoch, step_in_epoch = divmod(step, plans.steps_per_epoch)
            last = step_in_epoch == plans.steps_per_epoch - 1
            group, group_size = groups[step_in_epoch]
            update = last or groups[step_in_epoch + 1][0] != group
            with nullcontext() if update else accelerator.no_sync(model):
                losses = self.losses(model, batch)
                accelerator.backward(losses.total / group_size)
            learning_rate = self.learning_rate * lr_scale(epoch + group / updates_per_epoch, training)
            if update:
                optimizer.param_groups[0]["lr"] = learning_rate
                prepared.step()
                prepared.zero_grad()
            history.append(torch.stack([getattr(losses, term).detach() for term in LOSS_NAMES]))
            if is_seen(bar, last or step % 20 == 0):  # the loss leaves the device only to be looked at
                bar.set_postfix_str(f"epoch {epoch + 1}/{plans.epochs}, loss {losses.total.item():.3f}")
            bar.update()
            if last:
                hooks.on_epoch(epoch_log(self.task, epoch, learning_rate, history))
                history = []
            if update and step + 1 < len(plans):
                if is_time_to_save(saved, step + 1, plans.steps_per_epoch, training):
                    state = take_checkpoint(step + 1, self.network, optimizer, self.draws, accelerator, history)
                    done = torch.tensor((step + 1) // plans.steps_per_epoch)
                    hooks.on_checkpoint({"task": torch.tensor(self.task), "epoch": done, **state})
                saved = step + 1
        bar.close()

    def _continue(self, checkpoint: State, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        try:
            return load_checkpoint(checkpoint, self.network, optimizer, self.draws, self.accelerator)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise PassloraError("the state saved inside the task does not fit the model: delete it") from error

    def losses(self, model: Any, batch: Batch) -> Losses:
        """Eq. 12 on one batch."""
        method, device, backbone = self.config.method, self.accelerator.device, self.network.backbone
        images = batch.images.to(device, non_blocking=True)
        assert batch.uniforms is not None
        x = rotate(backbone.prepare(self.data.images.augment(images, batch.uniforms)), method.num_views)
        teacher = None
        if self.ask_teacher is not None:
            z_teacher = self.ask_teacher(x, batch)
            outputs = F.linear(z_teacher, *self.old_head) if method.kd_on == "logits" else None
            teacher = Teacher(z_teacher, outputs)
        draw = None
        if self.memory.num_classes and method.uses_prototypes:
            count = method.prototype_draws * self.batch_size
            draw = self.memory.draw(count, self.draws, with_noise=method.proto_aug == "explicit")
        z = self.whole_batch(run_student(model, x), len(batch.batch_rows))
        classes = torch.from_numpy(self.data.classes[batch.batch_rows] - self.first).to(device, non_blocking=True)
        known = len(self.old_head[1])
        return objective(self.head, z, nodes(classes, method.num_views), draw, teacher, method, known)

    def whole_batch(self, z: Tensor, count: int) -> Tensor:
        """Features of the whole batch, from every process's share; gradients flow into the own share only.

        All processes compute the same loss, and their gradients are averaged over processes: the own share counts
        `num_processes` times to make up for it.
        """
        world = self.accelerator.num_processes
        if world == 1:
            return z
        parts = list(self.accelerator.gather(z.detach()).chunk(world))
        parts[self.accelerator.process_index] = z * world - z.detach() * (world - 1)
        return torch.cat(parts)[: count * self.config.method.num_views]


def run_student(model: Any, x: Tensor) -> Tensor:
    try:
        return model(x).float()
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise PassloraError(
            "a batch of one image is too small for this backbone's batch normalisation: "
            "choose another --per_device_train_batch_size"
        ) from error


def epoch_log(task: int, epoch: int, learning_rate: float, history: list[Tensor]) -> EpochLog:
    """The one place in an epoch where losses leave the device."""
    table = torch.stack(history).cpu().double()
    means = dict(zip(LOSS_NAMES, table.mean(dim=0).tolist(), strict=True))
    if not all(map(math.isfinite, means.values())):
        raise DivergedError(f"the loss is no longer finite in task {task}, epoch {epoch + 1}: lower --learning_rate")
    return EpochLog(task, epoch, learning_rate, means, table[:, 0].tolist())
