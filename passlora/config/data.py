"""Knobs of the images, and of the tasks that their classes arrive in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from passlora.config.values import at_least, between, knob
from passlora.errors import PassloraError


@dataclass
class DataConfig:
    """Where the images come from, and how they are augmented."""

    dataset_name: str = knob(
        "digits",
        "a Hub dataset id, a folder of images (train/<class>/*.jpg, or <class>/*.jpg), a folder or file of "
        "parquet/arrow, or digits (embedded)",
    )
    dataset_config: str | None = knob(None, "configuration name of a Hub dataset")
    dataset_train_split: str = knob("train", "name of the training split")
    dataset_test_split: str | None = knob(
        None, "name of the test split (none: test, validation, valid, val or dev, else a hold-out)"
    )
    image_column: str | None = knob(None, "column of the images (none: found by type and name)")
    label_column: str | None = knob(None, "column of the labels (none: found by type and name)")
    test_fraction: float = knob(0.2, "share of each class held out for testing when there is no test split")
    max_classes: int | None = knob(None, "use only the first so many classes of the dataset")
    max_train_per_class: int | None = knob(None, "use at most this many training images a class")
    max_test_per_class: int | None = knob(None, "use at most this many test images a class")
    on_unreadable: Literal["error", "skip"] = knob(
        "error", "images that cannot be read: error, or skip (each is named, and left out)"
    )
    crop_padding: int = knob(4, "small images: random crop after zero-padding by this many pixels (0: off)")
    horizontal_flip: bool = knob(True, "mirror half of the training images")
    brightness: float = knob(63 / 255, "random brightness factor in 1 +- this (0: off)")
    rrc_min_scale: float = knob(
        0.08, "large images: smallest area share of a RandomResizedCrop (0: centre crop instead)"
    )
    dataloader_num_workers: int = knob(2, "processes that decode large images (small ones need none)")

    def __post_init__(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise PassloraError(f"test_fraction must be between 0 and 1, got {self.test_fraction}")
        for name in ("max_classes", "max_train_per_class", "max_test_per_class"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        at_least("crop_padding", self.crop_padding, 0)
        at_least("dataloader_num_workers", self.dataloader_num_workers, 0)
        between("brightness", self.brightness, 0, 1)
        between("rrc_min_scale", self.rrc_min_scale, 0, 1)


class ReadingSettings(TypedDict, total=False):
    """The knobs above as keyword arguments that an editor can complete; dataset_name is an argument of its own."""

    dataset_config: str | None
    dataset_train_split: str
    dataset_test_split: str | None
    image_column: str | None
    label_column: str | None
    test_fraction: float
    max_classes: int | None
    max_train_per_class: int | None
    max_test_per_class: int | None
    on_unreadable: Literal["error", "skip"]
    crop_padding: int
    horizontal_flip: bool
    brightness: float
    rrc_min_scale: float
    dataloader_num_workers: int


@dataclass
class ScenarioConfig:
    """Which classes arrive when."""

    protocol: Literal["equal", "half-base"] = knob(
        "equal", "equal: num_tasks equal tasks; half-base: half the classes first, then num_tasks equal tasks"
    )
    num_tasks: int | None = knob(
        None, "number of tasks (half-base: of tasks after the first); needed unless task_sizes is given"
    )
    base_classes: int | None = knob(None, "half-base: classes of the first task (none: half of all)")
    task_sizes: list[int] | None = knob(None, "classes of each task, in order, instead of a protocol")
    joint: bool = knob(False, "all classes in one task, whatever the tasks are: a bound that sees every image at once")
    class_order_seed: int | None = knob(
        None, "shuffle the classes by numpy's RandomState of this seed (none: natural order)"
    )
    class_order: list[int] | None = knob(None, "the class order itself, as a list of all labels")

    def __post_init__(self) -> None:
        for name in ("num_tasks", "base_classes"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.task_sizes is not None:
            if not self.task_sizes or min(self.task_sizes) < 1:
                raise PassloraError(f"task_sizes: each task needs at least one class, got {self.task_sizes}")
            if self.num_tasks is not None or self.base_classes is not None:
                raise PassloraError("task_sizes says it all: leave out num_tasks and base_classes")
        if self.base_classes is not None and self.protocol != "half-base":
            raise PassloraError("base_classes belongs to --protocol half-base")
        if self.class_order_seed is not None:
            between("class_order_seed", self.class_order_seed, 0, 2**32 - 1)
        if self.class_order is not None and self.class_order_seed is not None:
            raise PassloraError("give either class_order or class_order_seed, not both")
