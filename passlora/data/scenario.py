"""Which classes arrive in which task: class order, task sizes, label maps. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passlora.config import ScenarioConfig
from passlora.errors import PassloraError


@dataclass(frozen=True)
class Scenario:
    """The dataset's labels in the order of learning, cut into tasks.

    The model's class index is the position in `class_order`, so classes learnt first come first.
    """

    class_order: tuple[int, ...]
    task_sizes: tuple[int, ...]

    @property
    def num_tasks(self) -> int:
        return len(self.task_sizes)

    @property
    def num_classes(self) -> int:
        return len(self.class_order)

    def seen(self, task: int) -> int:
        """Classes known after `task`."""
        return sum(self.task_sizes[: task + 1])

    def classes(self, task: int) -> range:
        """The model's class indices of `task`."""
        return range(self.seen(task) - self.task_sizes[task], self.seen(task))

    def labels(self, task: int) -> tuple[int, ...]:
        """The dataset's labels of `task`."""
        return self.class_order[self.classes(task).start : self.classes(task).stop]

    @property
    def class_index(self) -> list[int]:
        """Dataset label -> the model's class index."""
        index = [0] * self.num_classes
        for position, label in enumerate(self.class_order):
            index[label] = position
        return index


def make_scenario(config: ScenarioConfig, labels: Sequence[int], num_classes: int | None = None) -> Scenario:
    """The scenario of a dataset with these training labels."""
    total = count_classes(labels, num_classes)
    sizes = [total] if config.joint else task_sizes(config, total)
    return Scenario(tuple(class_order(config, total)), tuple(sizes))


def count_classes(labels: Sequence[int], num_classes: int | None = None) -> int:
    """Labels must be 0..n-1, each with at least one image."""
    present = {int(label) for label in labels}
    if not present:
        raise PassloraError("the training split has no images")
    if min(present) < 0:
        raise PassloraError(f"labels must be 0..n-1, found {min(present)} (is the split unlabelled?)")
    total = num_classes if num_classes is not None else max(present) + 1
    if max(present) >= total:
        raise PassloraError(f"labels must be 0..{total - 1} for {total} classes, found {max(present)}")
    missing = sorted(set(range(total)) - present)
    if missing:
        shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise PassloraError(
            f"labels must be 0..{total - 1} with at least one training image each; "
            f"{len(missing)} of {total} classes have none: {shown}"
        )
    return total


def class_order(config: ScenarioConfig, total: int) -> list[int]:
    if config.class_order is not None:
        if sorted(config.class_order) != list(range(total)):
            raise PassloraError(f"class_order must name each of the labels 0..{total - 1} once")
        return list(config.class_order)
    if config.class_order_seed is not None:
        import numpy as np

        return [int(label) for label in np.random.RandomState(config.class_order_seed).permutation(total)]
    return list(range(total))


def task_sizes(config: ScenarioConfig, total: int) -> list[int]:
    """Every class in exactly one task, or an error that says what would fit."""
    if config.task_sizes is not None:
        if sum(config.task_sizes) != total:
            raise PassloraError(
                f"task_sizes {config.task_sizes} add up to {sum(config.task_sizes)}, "
                f"but the dataset has {total} classes"
            )
        return list(config.task_sizes)
    assert config.num_tasks is not None  # Config.check
    tasks = config.num_tasks
    if config.protocol == "equal":
        if total % tasks:
            raise PassloraError(
                f"{total} classes do not divide into {tasks} equal tasks; "
                f"num_tasks could be {divisors(total)}, or give task_sizes"
            )
        return [total // tasks] * tasks
    base = config.base_classes if config.base_classes is not None else total // 2
    rest = total - base
    if rest < tasks or rest % tasks:
        message = f"{total} classes less {base} for the first task leave {rest}, which do not make {tasks} equal tasks"
        hints = [f"num_tasks could be {divisors(rest)}"] if rest > 0 else []
        fitting = (total - total // 2) // tasks * tasks
        if 0 < fitting < total:
            hints.append(f"base_classes {total - fitting} would fit {tasks} tasks of {fitting // tasks}")
            smaller = (total - total // 2) // tasks + 1
            if total - smaller * tasks > 0:
                hints.append(f"base_classes {total - smaller * tasks} {tasks} tasks of {smaller}")
        raise PassloraError("; ".join([message, *hints, "or give task_sizes"]))
    return [base] + [rest // tasks] * tasks


def divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
