"""One task: train, then remember. Knows accelerate, knows no files.

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

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed
from torch import Tensor
from torch.nn import functional as F

from passlora.config.knobs import Config, TrainingConfig
from passlora.data.batches import Batch, Images, TrainPlans, augmented_plans, eval_plans, generator
from passlora.display.progress import progress
from passlora.errors import PassloraError
from passlora.method.memory import Memory, Statistics
from passlora.method.objective import Losses, logit_losses, objective
from passlora.method.views import nodes, rotate
from passlora.network.factory import make_backbone
from passlora.network.network import Network, in_pieces
from passlora.training.checkpoint import load_checkpoint, take_checkpoint
from passlora.training.metrics import CALIBRATION_BINS, Evaluation

Teacher = Callable[[Tensor, Batch], Tensor]  # rotated rows of a process's share -> features of the whole batch
FUSED_ADAM = ("cpu", "cuda", "mps", "xpu")
LOSS_NAMES = ("total", "new", "old", "kd")


@dataclass
class TaskData:
    """The rows of one task in a split, and the model's class index of every row of that split."""

    images: Images
    rows: np.ndarray
    classes: np.ndarray


@dataclass
class EpochLog:
    """Mean losses of one epoch, and every step's total."""

    task: int
    epoch: int
    learning_rate: float
    losses: dict[str, float]
    steps: list[float] = field(repr=False)


class Learner:
    """Network and memory, and how they take in one more task."""

    def __init__(self, config: Config, accelerator: Accelerator) -> None:
        self.config, self.accelerator = config, accelerator
        set_seed(config.training.seed)
        backbone = make_backbone(config.model)
        method = config.method
        self.network = Network(backbone, method.num_views).to(accelerator.device)
        self.memory = Memory(
            backbone.feature_dim, method.num_views, method.prototype_views, method.covariance, method.radius
        ).to(accelerator.device)
        self.task = 0  # tasks learnt so far

    def restore(
        self, tasks: int, backbone: dict[str, Tensor], head: dict[str, Tensor], memory: dict[str, Tensor]
    ) -> None:
        """Become what was saved after `tasks` tasks."""
        self.network.head.grow(len(head["bias"]))
        self.network.head.load_state_dict(head)
        self.network.backbone.load_state(backbone)
        self.memory.load_state_dict(memory)
        self.network.eval()
        if self.config.method.kd_weight > 0:
            self.network.backbone.become_teacher()
        self.task = tasks

    # --- learning ----------------------------------------------------------------------------------------------

    def learn(
        self,
        data: TaskData,
        new_classes: int,
        on_epoch: Callable[[EpochLog], None] = lambda log: None,
        on_checkpoint: Callable[[dict[str, Tensor]], None] = lambda state: None,
        checkpoint: dict[str, Tensor] | None = None,
        name: str = "training",
    ) -> None:
        """Grow the head, train on the new classes, remember them, and become the next task's teacher.

        `checkpoint`, one of those that `on_checkpoint` was given, continues where it was taken.
        """
        self.get_ready(data)
        set_seed(hash_seed(self.config.training.seed, self.task))
        self.old_head = (self.network.head.weight.detach().clone(), self.network.head.bias.detach().clone())
        self.network.grow(new_classes)
        self._train(data, on_epoch, on_checkpoint, checkpoint, name)
        self._remember(data, new_classes)
        if self.config.method.kd_weight > 0:
            self.network.backbone.become_teacher()
        self.task += 1

    def get_ready(self, data: TaskData) -> None:
        """Take up the options that save time or memory; what cannot work says so before anything has changed."""
        training, backbone = self.config.training, self.network.backbone
        if training.cache_teacher and data.images.is_random:
            raise PassloraError(
                "cache_teacher needs images that look the same in every epoch: set --horizontal_flip false "
                "--brightness 0 and --crop_padding 0 (large images: --rrc_min_scale 0)"
            )
        backbone.checkpoint_gradients(training.gradient_checkpointing)

    def _train(
        self,
        data: TaskData,
        on_epoch: Callable[[EpochLog], None],
        on_checkpoint: Callable[[dict[str, Tensor]], None],
        checkpoint: dict[str, Tensor] | None,
        name: str,
    ) -> None:
        training, accelerator = self.config.training, self.accelerator
        plans = TrainPlans(
            data.rows,
            training.per_device_train_batch_size * accelerator.num_processes,
            training.num_train_epochs,
            (training.seed, self.task),
            accelerator.process_index,
            accelerator.num_processes,
            start=0 if checkpoint is None else int(checkpoint["step"]),
        )
        teacher = self._teacher(data)
        optimizer = torch.optim.Adam(
            self.network.trainable(),
            lr=training.learning_rate,
            weight_decay=training.weight_decay,
            fused=accelerator.device.type in FUSED_ADAM,  # one pass over the weights, no waiting for a step's number
        )
        model, prepared = accelerator.prepare(self.network, optimizer)
        draws = generator("draws", training.seed, self.task, device=accelerator.device)
        history: list[Tensor] = []
        if checkpoint is not None:
            try:
                history = load_checkpoint(checkpoint, self.network, optimizer, draws, accelerator)
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise PassloraError("the state saved inside the task does not fit the model: delete it") from error
        groups = accumulation_groups(plans.steps_per_epoch, training.gradient_accumulation_steps)
        updates_per_epoch = groups[-1][0] + 1
        model.train()
        bar = progress(total=len(plans), initial=plans.start, desc=name, unit="step")
        for step, batch in enumerate(data.images.batches(plans), start=plans.start):
            epoch, step_in_epoch = divmod(step, plans.steps_per_epoch)
            last = step_in_epoch == plans.steps_per_epoch - 1
            group, group_size = groups[step_in_epoch]
            update = last or groups[step_in_epoch + 1][0] != group
            with nullcontext() if update else accelerator.no_sync(model):
                losses = self._losses(model, batch, data, plans.batch_size, draws, teacher)
                accelerator.backward(losses.total / group_size)
            learning_rate = training.learning_rate * lr_scale(epoch + group / updates_per_epoch, training)
            if update:
                optimizer.param_groups[0]["lr"] = learning_rate
                prepared.step()
                prepared.zero_grad()
            history.append(torch.stack([getattr(losses, term).detach() for term in LOSS_NAMES]))
            if not bar.disable and (last or step % 20 == 0):  # the loss leaves the device only to be looked at
                bar.set_postfix_str(f"epoch {epoch + 1}/{plans.epochs}, loss {losses.total.item():.3f}")
            bar.update()
            if last:
                on_epoch(epoch_log(self.task, epoch, learning_rate, history))
                history = []
            if update and is_time_to_save(step + 1, plans.steps_per_epoch, training) and step + 1 < len(plans):
                state = take_checkpoint(step + 1, self.network, optimizer, draws, accelerator, history)
                done = torch.tensor((step + 1) // plans.steps_per_epoch)
                on_checkpoint({"task": torch.tensor(self.task), "epoch": done, **state})
        bar.close()
        self.network = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
        for buffer in self.network.buffers():  # batch statistics are a process's own until its next forward
            buffer.copy_(broadcast(buffer))
        accelerator.free_memory()
        self.network.eval()

    def _losses(
        self,
        model: Any,
        batch: Batch,
        data: TaskData,
        draw_count: int,
        draws: torch.Generator,
        teacher: Teacher | None,
    ) -> Losses:
        """Eq. 12 on one batch."""
        method, device, backbone = self.config.method, self.accelerator.device, self.network.backbone
        images = batch.images.to(device, non_blocking=True)
        assert batch.uniforms is not None
        x = rotate(backbone.prepare(data.images.augment(images, batch.uniforms)), method.num_views)
        z_teacher = None if teacher is None else teacher(x, batch)
        draw = None
        if self.memory.num_classes and method.proto_aug != "none":
            draw = self.memory.draw(draw_count, draws, with_noise=method.proto_aug == "explicit")
        z = self._whole_batch(run_student(model, x), len(batch.batch_rows))
        classes = torch.from_numpy(data.classes[batch.batch_rows]).to(device, non_blocking=True)
        labels = nodes(classes, method.num_views)
        if method.kd_on == "logits":
            old_logits = None if z_teacher is None else F.linear(z_teacher, *self.old_head)
            return logit_losses(self.network.head, z, labels, old_logits, method)
        return objective(self.network.head, z, labels, draw, z_teacher, method)

    def _whole_batch(self, z: Tensor, count: int) -> Tensor:
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

    # --- the teacher -------------------------------------------------------------------------------------------

    def _teacher(self, data: TaskData) -> Teacher | None:
        """How the steps of a task come by the teacher's features: by running it, from a cache, or not at all."""
        if not self.network.backbone.has_teacher or self.config.method.kd_weight == 0:
            return None
        return self._cached_teacher(data) if self.config.training.cache_teacher else self._run_teacher

    def _run_teacher(self, x: Tensor, batch: Batch) -> Tensor:
        with self.accelerator.autocast():
            return self._whole_batch(self.network.backbone.teacher(x).float(), len(batch.batch_rows))

    @torch.no_grad()
    def _cached_teacher(self, data: TaskData) -> Teacher:
        """One pass over the task's images, before its first step: a resumed task finds the same features.

        Computed just as in a step, in batches of the same size: at first student and teacher are one, and a distance of
        rounding errors would pull the student in a random direction, with the whole weight of the distillation.
        """
        accelerator, backbone, views = self.accelerator, self.network.backbone, self.config.method.num_views
        device, size = accelerator.device, self.config.training.per_device_train_batch_size
        self.network.train()
        place = torch.zeros(len(data.classes), dtype=torch.long)
        place[torch.from_numpy(data.rows)] = torch.arange(len(data.rows))
        kept = torch.zeros(len(data.rows), views, backbone.feature_dim, device=device)
        plans = eval_plans(data.rows, size, accelerator.process_index, accelerator.num_processes)
        for batch in progress(data.images.batches(plans), desc="asking the teacher", unit="batch"):
            x = rotate(backbone.prepare(batch.images.to(device, non_blocking=True)), views)
            with accelerator.autocast():
                z = backbone.teacher(x).float()
            kept[place[batch.rows].to(device)] = z.unflatten(0, (-1, views))
        kept = accelerator.reduce(kept, reduction="sum")
        return lambda x, batch: kept[place[batch.batch_rows].to(device, non_blocking=True)].flatten(0, 1)

    # --- remembering -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _remember(self, data: TaskData, new_classes: int) -> None:
        """Eq. 4 to 7 over the task's training images, in eval mode."""
        method, training, accelerator = self.config.method, self.config.training, self.accelerator
        share = (training.per_device_eval_batch_size, accelerator.process_index, accelerator.num_processes)
        if method.prototype_augmented:
            key = (training.seed, self.task)
            plans = augmented_plans(data.rows, share[0], key, *share[1:])
        else:
            plans = eval_plans(data.rows, *share)
        views, first = method.prototype_views, self.network.num_classes - new_classes
        exact = "cpu" if accelerator.device.type == "mps" else accelerator.device  # mps has no float64
        statistics = Statistics(
            views * new_classes, self.network.backbone.feature_dim, method.covariance == "full", exact
        )
        for batch in progress(data.images.batches(plans), desc="remembering", unit="batch"):
            images = batch.images.to(accelerator.device, non_blocking=True)
            if batch.uniforms is not None:
                images = data.images.augment(images, batch.uniforms)
            with accelerator.autocast():
                z = in_pieces(self.network, rotate(self.network.backbone.prepare(images), views), len(images))
            classes = torch.from_numpy(data.classes[batch.rows]) - first
            statistics.add(z, nodes(classes, views))
        for name in ("count", "total", "squares"):
            setattr(statistics, name, accelerator.reduce(getattr(statistics, name), reduction="sum"))
        self.memory.remember(statistics)

    # --- asking ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, data: TaskData, modes: list[str]) -> dict[str, Evaluation]:
        """Counts over all seen classes, a mode each, from one pass over the rows."""
        accelerator, k = self.accelerator, self.network.num_classes
        plans = eval_plans(
            data.rows,
            self.config.training.per_device_eval_batch_size,
            accelerator.process_index,
            accelerator.num_processes,
        )
        counts = torch.zeros(len(modes), k, k, dtype=torch.int64, device=accelerator.device)
        bins = torch.zeros(len(modes), CALIBRATION_BINS, 3, device=accelerator.device)
        self.network.eval()
        for batch in progress(data.images.batches(plans), desc="testing", unit="batch"):
            images = batch.images.to(accelerator.device, non_blocking=True)
            truth = torch.from_numpy(data.classes[batch.rows]).to(accelerator.device, non_blocking=True)
            scores = self.network.scores(images, modes, self.memory, accelerator.autocast())
            for row, mode in enumerate(modes):
                tally(scores[mode], truth, counts[row], bins[row])
        counts, bins = accelerator.reduce(counts, reduction="sum"), accelerator.reduce(bins, reduction="sum")
        return {
            mode: Evaluation(counts[row].cpu().numpy(), bins[row].cpu().double().numpy())
            for row, mode in enumerate(modes)
        }

    @torch.no_grad()
    def features(self, data: TaskData) -> tuple[Tensor, Tensor]:
        """Features of the rows as they are, on the CPU, and their classes; every process computes all of them."""
        self.network.eval()
        parts, rows = [], []
        plans = eval_plans(data.rows, self.config.training.per_device_eval_batch_size, 0, 1)
        for batch in progress(data.images.batches(plans), desc="features", unit="batch"):
            images = batch.images.to(self.accelerator.device, non_blocking=True)
            with self.accelerator.autocast():
                parts.append(self.network(self.network.backbone.prepare(images)).float().cpu())
            rows.append(batch.rows)
        return torch.cat(parts), torch.from_numpy(data.classes[np.concatenate(rows)])


def tally(scores: Tensor, truth: Tensor, confusion: Tensor, bins: Tensor) -> None:
    """Add what a batch's scores say to the counts of an Evaluation, without leaving the device."""
    k = len(confusion)
    predicted = scores.argmax(dim=1)
    confusion += torch.bincount(truth * k + predicted, minlength=k * k).view(k, k)
    confidence = scores.softmax(dim=1).amax(dim=1)
    place = (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
    entry = torch.stack([torch.ones_like(confidence), (predicted == truth).to(confidence), confidence], dim=1)
    bins.index_add_(0, place, entry.to(bins.dtype))


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


def accumulation_groups(steps: int, size: int) -> list[tuple[int, int]]:
    """For each step of an epoch, the update it belongs to and how many steps that update averages.

    An epoch ends in an update: its last group may be smaller.
    """
    return [(step // size, min(size, steps - step // size * size)) for step in range(steps)]


def is_time_to_save(steps: int, steps_per_epoch: int, config: TrainingConfig) -> bool:
    """After `steps` steps of a task."""
    by_steps = config.save_steps is not None and steps % config.save_steps == 0
    return by_steps or (config.save_epochs is not None and steps % (config.save_epochs * steps_per_epoch) == 0)


def lr_scale(epoch: float, config: TrainingConfig) -> float:
    """Factor on the learning rate after `epoch` epochs (a fraction within one)."""
    if config.lr_scheduler_type == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(epoch / config.num_train_epochs, 1)))
    return config.lr_decay ** sum(epoch + 1e-9 >= milestone for milestone in config.lr_milestones)


def hash_seed(seed: int, task: int) -> int:
    """A seed a task, so that a task does not depend on how many random numbers the one before it took."""
    return int(np.random.SeedSequence([seed, task]).generate_state(1)[0])


def epoch_log(task: int, epoch: int, learning_rate: float, history: list[Tensor]) -> EpochLog:
    """The one place in an epoch where losses leave the device."""
    table = torch.stack(history).cpu().double()
    means = dict(zip(LOSS_NAMES, table.mean(dim=0).tolist(), strict=True))
    return EpochLog(task, epoch, learning_rate, means, table[:, 0].tolist())
