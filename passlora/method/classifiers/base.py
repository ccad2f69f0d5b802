"""What turns features into class scores: an object whose whole knowledge is in its parameters and buffers.

A classifier of one's own is a subclass under `@register("its-name")`; docs/extending.md shows one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passlora.config import MethodConfig, register_classifier_name
from passlora.errors import PassloraError, nearest
from passlora.method.discriminant import heavy_tailed
from passlora.method.drift import Drift
from passlora.method.feature_map import FeatureMap
from passlora.method.features import TaskFeatures

CANNOT_JOIN = "the classifier {} cannot join the images of one class from two models"


@dataclass
class Linear:
    """Scores as a plain linear layer gives them, of z, of z / |z| (`unit_length`), or of what a map makes of z."""

    weight: Tensor  # (nodes, d)
    bias: Tensor  # (nodes,)
    unit_length: bool = False
    map: FeatureMap | None = None
    heavy_tails: bool = False  # of the probabilities (passlora.method.discriminant.heavy_tailed)

    def __call__(self, z: Tensor) -> Tensor:
        weight, bias = self.weight.to(z), self.bias.to(z)
        scores = F.linear(F.normalize(z, dim=1) if self.unit_length else z, weight, bias)
        return heavy_tailed(scores) if self.heavy_tails else scores


class Classifier(nn.Module):
    """Classes are numbered in the order of learning. Subclasses say how they grow, are fitted, and score.

    What `state_dict` holds is what a model stores: keep statistics there, and compute the rest from them.
    """

    trained: ClassVar[bool] = False  # whether the steps of a task train it (the head), or `fit_task` makes it
    extends: ClassVar[bool] = False  # whether `fit_task` takes more images of known classes (`features.rows`)
    joins: ClassVar[bool] = False  # whether two that were taught apart become one (`join`)
    # Names of what is stored: a row a class, and sums over the images of all classes.
    class_rows: ClassVar[tuple[str, ...]] = ()
    shared_sums: ClassVar[tuple[str, ...]] = ()

    def __init__(self, feature_dim: int, method: MethodConfig) -> None:
        super().__init__()
        self.feature_dim, self.method = feature_dim, method
        self._linear: Linear | None = None
        self.register_load_state_dict_post_hook(lambda module, keys: module.forget_computed())

    @property
    def num_classes(self) -> int:
        raise NotImplementedError

    def grow(self, new_classes: int) -> None:
        """Make room for classes that are about to be learnt."""
        raise NotImplementedError

    def fit_task(self, features: TaskFeatures) -> None:
        """Learn the last `features.num_classes` classes from one pass over their features; the same on each process."""
        raise NotImplementedError

    def move(self, drift: Drift) -> None:
        """Bring what is known of the classes so far to the features of a network that was trained on others."""
        raise PassloraError(f"the classifier {self.method.classifier} cannot follow a network that is trained on")

    def keep(self, rows: Tensor) -> None:
        """Forget every class but these."""
        if not self.class_rows:
            raise PassloraError(f"the classifier {self.method.classifier} cannot forget a class")
        before = self.weight_of_sums()
        for name in self.class_rows:
            setattr(self, name, getattr(self, name)[rows])
        if before and "scatter" in self.shared_sums:  # what is left of it stands for fewer images
            self.get_buffer("scatter").mul_(self.weight_of_sums() / before)
        self.forget_computed()

    def weight_of_sums(self) -> float:
        """What the sums over all classes are divided by: the degrees of freedom."""
        counts = getattr(self, "counts", None)
        return 0.0 if counts is None else float(counts.sum() - len(counts))

    def remains(self) -> str:
        """What is left of a class that was forgotten, in words; empty if nothing is."""
        if self.joins:
            return "its part in sums over the images of all classes" if self.shared_sums else ""
        return "its part in the weights of other classes, which were fitted beside it"

    def join(self, other: Self, rows: Tensor) -> None:
        """Take in what another one of the same kind knows: its classes are these of ours, or new ones after ours."""
        if not self.joins:
            raise PassloraError(f"models of the classifier {self.method.classifier} cannot be combined")
        if int(rows.min()) < self.num_classes:
            raise PassloraError(CANNOT_JOIN.format(self.method.classifier))
        self.grow(len(rows))
        for name in self.class_rows:
            getattr(self, name)[rows] = getattr(other, name)
        for name in self.shared_sums:
            getattr(self, name).add_(getattr(other, name))
        self.forget_computed()

    def as_linear(self) -> Linear | None:
        """The scores as a linear layer, which can be merged into one network; None for what is not linear."""
        return None

    def num_views(self, mode: str) -> int:
        """How many rotations of an image `scores` reads."""
        return 1

    def scores(self, z: Tensor, mode: str) -> Tensor:
        """Features (n, views, d) -> (n, classes); higher is likelier. One that is not linear writes its own."""
        if self._linear is None:
            self._linear = self.as_linear()
        assert self._linear is not None
        return self._linear(z[:, 0] if self._linear.map is None else self._linear.map(z))

    def forget_computed(self) -> None:
        """Called when what is stored has changed."""
        self._linear = None

    def forms(self, classes: int) -> dict[str, Tensor]:
        """What a file of this classifier holds, as tensors without data: names, shapes and types."""
        with torch.device("meta"):
            empty = type(self)(self.feature_dim, self.method)
            empty.grow(classes)
        return empty.state_dict()

    def enlarge(self, buffer: str, rows: int) -> None:
        """Rows of zeros at the end of a buffer."""
        old: Tensor = getattr(self, buffer)
        setattr(self, buffer, torch.cat([old, old.new_zeros(rows, *old.shape[1:])]))
        self.forget_computed()


KINDS: dict[str, type[Classifier]] = {}


def register(name: str) -> Callable[[type[Classifier]], type[Classifier]]:
    """Make a classifier known as `--classifier NAME`."""

    def add(kind: type[Classifier]) -> type[Classifier]:
        if KINDS.get(name, kind) is not kind:
            raise PassloraError(f"a classifier {name!r} is registered already: choose another name")
        KINDS[name] = kind
        register_classifier_name(name)
        return kind

    return add


def make_classifier(feature_dim: int, method: MethodConfig) -> Classifier:
    """The classifier that the configuration names."""
    if method.classifier not in KINDS:
        raise PassloraError(f"no classifier {method.classifier!r}{nearest(method.classifier, KINDS)}")
    return KINDS[method.classifier](feature_dim, method)
