"""Knobs of the optimizer, the seeds and the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from passlora.config.presets import Preset
from passlora.config.values import above, at_least, between, is_repo_id, knob
from passlora.errors import PassloraError


@dataclass
class TrainingConfig:
    """The optimizer, the seeds and the output."""

    output_dir: str = knob("runs/passlora", "folder of the run: results, settings, pictures, an adapter a task")
    overwrite_output_dir: bool = knob(
        False, "start anew where output_dir holds a run (otherwise the same command continues it)"
    )
    num_train_epochs: int = knob(10, "epochs a task")
    per_device_train_batch_size: int = knob(64, "images a process and step (each in its four views)")
    per_device_eval_batch_size: int = knob(128, "images a process and step in evaluation")
    gradient_accumulation_steps: int = knob(1, "steps whose gradients are averaged into one update")
    learning_rate: float = knob(0.005, "Adam's learning rate, for adapter (or backbone) and head")
    lr_later_tasks: float = knob(1.0, "multiplies the learning rate after the first task (SLCA++: 0.1)")
    weight_decay: float = knob(0.0, "Adam's L2 term")
    lr_scheduler_type: Literal["multistep", "cosine"] = knob("multistep", "multistep, or cosine down to 0")
    lr_milestones: list[int] = knob([6], "multistep: epochs after which the learning rate is multiplied by lr_decay")
    lr_decay: float = knob(0.1, "multistep: the factor")
    mixed_precision: Literal["no", "fp16", "bf16"] | None = knob(
        None, "precision of the forward pass (none: as accelerate is configured)"
    )
    gradient_checkpointing: bool = knob(
        False, "keep no activations inside the backbone's blocks and compute them again: less memory, more time"
    )
    cache_teacher: bool = knob(
        False,
        "run the teacher once a task instead of once an epoch: needs an augmentation without chance, and keeps "
        "4 bytes for each feature of each view of the task's images",
    )
    save_epochs: int | None = knob(None, "also save inside a task, every so many epochs (none: after each task)")
    save_steps: int | None = knob(None, "also save inside a task, every so many steps")
    keep_tasks: Literal["all", "last", "recent"] = knob(
        "all",
        "weights to keep: of every task, so that each can be restored, of the last one alone, or of the recent ones: "
        "as many as 100 MB hold, and at least two",
    )
    seed: int = knob(0, "seeds everything: weights, batches, augmentation, draws")
    seeds: list[int] | None = knob(None, "run once a seed and report mean and standard deviation")
    class_order_seeds: list[int] | None = knob(None, "run once a class order and report mean and deviation")
    compare: list[Preset] = knob([], "presets to run beside, with the same data, seed and budget (none: no)")
    measure_drift: bool = knob(
        False, "after each task, hold the stored prototypes against their classes' true means (reads the old images)"
    )
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = knob("none", "experiment tracker")
    push_to_hub: bool = knob(False, "upload the model to the Hugging Face Hub after each task: a commit and a tag")
    hub_model_id: str | None = knob(None, "where to: user/name (made if it does not exist)")
    hub_private_repo: bool = knob(False, "make the repository private, if it is made")

    def __post_init__(self) -> None:
        for name in (
            "num_train_epochs",
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
        ):
            at_least(name, getattr(self, name), 1)
        for name in ("save_epochs", "save_steps"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        above("learning_rate", self.learning_rate, 0)
        at_least("weight_decay", self.weight_decay, 0)
        above("lr_decay", self.lr_decay, 0)
        above("lr_later_tasks", self.lr_later_tasks, 0)
        for seed in (self.seed, *(self.seeds or []), *(self.class_order_seeds or [])):
            between("seed", seed, 0, 2**32 - 1)
        for name in ("seeds", "class_order_seeds", "compare"):
            given = getattr(self, name)
            if given is not None and len(set(given)) != len(given):
                raise PassloraError(f"{name}: each one once, got {' '.join(map(str, given))}")
        if self.seeds and self.class_order_seeds:
            raise PassloraError("give either seeds or class_order_seeds, not both")
        if self.push_to_hub and self.hub_model_id is None:
            raise PassloraError("push_to_hub: where to? give --hub_model_id user/name")
        if self.hub_model_id is not None and not is_repo_id(self.hub_model_id):
            raise PassloraError(f"hub_model_id must be user/name, got {self.hub_model_id!r}")
        if self.push_to_hub and (self.seeds or self.class_order_seeds):
            raise PassloraError("push_to_hub goes with one run, not several: push the best one with passlora push")


class TrainingSettings(TypedDict, total=False):
    """The knobs above as keyword arguments that an editor can complete."""

    output_dir: str
    overwrite_output_dir: bool
    num_train_epochs: int
    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    gradient_accumulation_steps: int
    learning_rate: float
    lr_later_tasks: float
    weight_decay: float
    lr_scheduler_type: Literal["multistep", "cosine"]
    lr_milestones: list[int]
    lr_decay: float
    mixed_precision: Literal["no", "fp16", "bf16"] | None
    gradient_checkpointing: bool
    cache_teacher: bool
    save_epochs: int | None
    save_steps: int | None
    keep_tasks: Literal["all", "last", "recent"]
    seed: int
    seeds: list[int] | None
    class_order_seeds: list[int] | None
    compare: list[Preset]
    measure_drift: bool
    report_to: Literal["none", "tensorboard", "wandb", "trackio"]
    push_to_hub: bool
    hub_model_id: str | None
    hub_private_repo: bool
