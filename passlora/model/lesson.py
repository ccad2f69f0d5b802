"""What one call of `learn` reads, and what it did."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from passlora.config import FIELDS, Config, DataConfig, is_local, without_data_path
from passlora.data.batches import Images, TaskData, select
from passlora.data.dataset import read_splits
from passlora.data.objects import IN_MEMORY
from passlora.data.rows import Split, at_most, first_classes
from passlora.errors import PassloraError
from passlora.training import metrics
from passlora.training.evaluation import Evaluation

# Of a whole configuration, what says nothing of one lesson: the other tasks, and comparisons of runs.
NO_PART_OF_A_LESSON = (
    *(name for name, knob in FIELDS.items() if knob.group == "scenario"),
    *("seeds", "class_order_seeds", "compare", "measure_drift"),
    *("test_fraction", "max_classes", "max_train_per_class", "max_test_per_class"),
)


# Settings that speak of whole runs, and mean nothing to one lesson.
NOT_OF_A_LESSON = (
    *NO_PART_OF_A_LESSON,
    *("output_dir", "overwrite_output_dir", "report_to", "push_to_hub", "hub_model_id", "hub_private_repo"),
)
LIMITS = ("max_classes", "max_train_per_class", "max_test_per_class")


def lesson_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that a lesson, or a test, was given, as checked values."""
    for name in settings:
        if name in NOT_OF_A_LESSON and name not in LIMITS:
            raise PassloraError(f"{name} is no setting of a lesson")
    flat = Config.make(num_tasks=1, **settings).flat()
    return {name: flat[name] for name in settings}


def take_settings(config: Config, settings: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
    """The configuration with a lesson's settings of training, which stay with the model; and those of its data."""
    checked = lesson_settings(settings)
    settled = [name for name in settings if FIELDS[name].group in ("model", "method")]
    if settled:
        raise PassloraError(f"{settled[0]} was settled when the model was made: leave it out")
    check_seed(config, settings)
    training = {name: value for name, value in checked.items() if FIELDS[name].group == "training"}
    reading = {name: value for name, value in checked.items() if FIELDS[name].group == "data"}
    return (config.replace(**training) if training else config), reading


def check_seed(config: Config, settings: dict[str, Any]) -> None:
    """An adapter on random weights means nothing without them, and the seed is all that is kept of them."""
    is_random = not config.model.pretrained and config.model.lora_r > 0
    if is_random and int(settings.get("seed", config.training.seed)) != config.training.seed:
        raise PassloraError("seed was settled when the model was made: it tells the random weights of its backbone")


@dataclass
class LoadedData:
    """A dataset whose images are ready to be read, and may be read for several lessons."""

    name: str
    train: Images
    test: Images | None
    class_names: list[str]


def load_data(
    data: Any, reading: DataConfig, image_size: int, known: Sequence[str], plain: DataConfig, seed: int
) -> LoadedData:
    """The dataset that `reading` names, or `data` itself. Its test split may also have classes that are known."""
    train, test, names = read_splits(reading, known, held(data))
    train = first_classes(train, reading.max_classes) if reading.max_classes else train
    train = at_most(train, reading.max_train_per_class, seed)
    test = None if test is None else at_most(test, reading.max_test_per_class, seed)
    images = Images(train, image_size, reading, "training images")
    tests = None if test is None else Images(test, image_size, plain, "test images")
    return LoadedData(reading.dataset_name, images, tests, names)


@dataclass
class Lesson:
    """What one call of `learn` did; accuracies in percent, None where there was nothing to test on."""

    new_classes: list[str]
    skipped_classes: list[str]
    images: int
    extended_classes: list[str] = field(default_factory=list)  # known ones that more images were learnt from
    seconds: float = 0.0
    train_seconds: float = 0.0
    test_seconds: float = 0.0
    old_before: float | None = None
    old_after: float | None = None
    new_after: float | None = None
    all_after: float | None = None  # only if every class known now had test images
    tested_classes: int = 0  # of the classes known now, how many had
    continued_at: int | None = None  # the step of a lesson that had been cut off
    untested: str | None = None  # why accuracies could not be measured
    evaluations: dict[str, Evaluation] = field(default_factory=dict, repr=False)  # after it, by inference mode

    def take(self, evaluations: dict[str, Evaluation], mode: str, old: int, classes: int) -> None:
        """Accuracies from one pass over the test images of all classes known now."""
        self.evaluations = evaluations
        found = evaluations[mode]
        self.tested_classes = found.tested_classes
        self.old_after = share_right(found, range(old))
        self.new_after = share_right(found, range(old, classes))
        if self.tested_classes == classes:
            self.all_after = share_right(found, range(classes))


def share_right(evaluation: Evaluation, classes: range) -> float | None:
    """Accuracy on the images of these classes, among all classes known; None without such images."""
    part = slice(classes.start, classes.stop)
    return metrics.accuracy(evaluation.confusion, classes) if evaluation.confusion[part].sum() else None


ON_KNOWN = ("error", "skip", "extend")


def chosen_classes(
    data: LoadedData, known: Sequence[str], wanted: Sequence[str] | None, on_known: str
) -> tuple[list[str], list[str]]:
    """The new classes to learn, in order, and those of the data that are known already."""
    if on_known not in ON_KNOWN:
        raise PassloraError(f"on_known must be {', '.join(ON_KNOWN)}, got {on_known!r}")
    present = [data.class_names[label] for label in np.unique(data.train.split.labels)]
    if wanted is not None:
        missing = [name for name in wanted if name not in present]
        if missing:
            raise PassloraError(f"{data.name} has no training images of {missing[0]!r}")
        present = list(wanted)
    there = [name for name in present if name in known]
    if there and on_known == "error":
        raise PassloraError(
            f"the model knows already: {', '.join(there)} (--on_known skip leaves them out, extend learns from more "
            "images of them)"
        )
    new = [name for name in present if name not in there]
    if not new and (on_known != "extend" or not there):
        raise PassloraError(f"{data.name} has no class that the model does not know")
    return new, there


def rows_of(images: Images, class_names: list[str], index: dict[str, int]) -> TaskData:
    """The rows of the classes in `index`."""
    return select(images, images.split.labels, class_names, index)


def describe_lesson(
    config: Config, reading: dict[str, Any], data: LoadedData, lesson: Lesson, processes: int
) -> dict[str, Any]:
    """What a checkpoint keeps of the lesson it was taken in: only the same lesson goes on from there."""
    about = without_data_path({**config.flat(), **reading, "dataset_name": data.name})
    about |= {
        "classes": [*lesson.new_classes, *lesson.extended_classes],
        "images": lesson.images,
        "processes": processes,
    }
    return {name: value for name, value in about.items() if name not in NO_PART_OF_A_LESSON}


def held(data: Any) -> Any:
    """Data that a program holds; None for a name or a path."""
    return None if isinstance(data, (str, Path)) else data


def public_name(data: LoadedData) -> str | None:
    """Where the images came from, unless that is nobody's business."""
    return None if is_local(data.name) or data.name == IN_MEMORY else data.name


def data_config(config: Config, data: Any, settings: dict[str, Any]) -> DataConfig:
    """The model's augmentation with another dataset."""
    name = IN_MEMORY if held(data) is not None else str(data)
    return dataclasses.replace(config.data, dataset_name=name, **settings)


def read_test_split(
    config: Config, data: Any, settings: dict[str, Any], known: Sequence[str]
) -> tuple[Split, list[str]]:
    """A dataset's test split, or all of it if it has none, and its class names; every class must be known."""
    reading = data_config(config, data, lesson_settings(settings))
    train, test, names = read_splits(reading, known, held(data))
    split = at_most(train if test is None else test, reading.max_test_per_class, config.training.seed)
    unknown = [names[label] for label in np.unique(split.labels) if names[label] not in known]
    if unknown:
        raise PassloraError(f"the model does not know: {', '.join(unknown[:10])}")
    return split, names
