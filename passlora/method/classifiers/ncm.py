"""Nearest class mean: by cosine, as SimpleCIL and ADAM classify (Zhou et al., 2023), or by Euclidean distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from passlora.config import MethodConfig
from passlora.method.classifiers.base import Classifier, Linear, register
from passlora.method.discriminant import TEMPERATURES, temperature_losses
from passlora.method.drift import Drift
from passlora.method.features import TaskFeatures


class ClassMeans(Classifier):
    """Keeps one mean feature vector a class, and of how many images: what several classifiers begin with."""

    class_rows: ClassVar[tuple[str, ...]] = ("means", "counts")

    means: Tensor
    counts: Tensor

    def __init__(self, feature_dim: int, method: MethodConfig) -> None:
        super().__init__(feature_dim, method)
        self.register_buffer("means", torch.zeros(0, feature_dim))
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64))

    @property
    def num_classes(self) -> int:
        return len(self.means)

    def grow(self, new_classes: int) -> None:
        self.enlarge("means", new_classes)
        self.enlarge("counts", new_classes)

    def move(self, drift: Drift) -> None:
        self.means = drift.means(self.means)
        self.forget_computed()

    def set_means(self, total: Tensor, count: Tensor) -> None:
        """Of the newest classes, from sums over all processes."""
        self.means[-len(total) :] = (total / count[:, None]).to(self.means)
        self.counts[-len(total) :] = count.to(self.counts)
        self.forget_computed()


def class_sums(features: TaskFeatures) -> tuple[Tensor, Tensor]:
    """The sum of each class's features, in float64, and their number; over all processes."""
    total = torch.zeros(features.num_classes, features.dim, dtype=torch.float64)
    count = torch.zeros(features.num_classes, dtype=torch.float64)
    for z, classes, _ in features:
        total.index_add_(0, classes.cpu(), z[:, 0].cpu().double())
        count += torch.bincount(classes.cpu(), minlength=features.num_classes)
    return features.reduce(total), features.reduce(count)


@register("ncm")
class NearestMean(ClassMeans):
    """The class whose mean is nearest, by the metric that `ncm_metric` names."""

    extends = joins = True

    def fit_task(self, features: TaskFeatures) -> None:
        self.add(features.rows_of(self.num_classes), *class_sums(features))

    def add(self, rows: Tensor, total: Tensor, count: Tensor) -> None:
        """Sums of further images of the classes `rows`."""
        before = self.counts.cpu()[rows].double()
        joined = self.means.cpu()[rows].double() * before[:, None] + total
        self.means[rows] = (joined / (before + count)[:, None]).to(self.means)
        self.counts[rows] += count.to(self.counts)
        self.forget_computed()

    def join(self, other: Self, rows: Tensor) -> None:
        self.grow(int((rows >= self.num_classes).sum()))
        counts = other.counts.cpu().double()
        self.add(rows, other.means.cpu().double() * counts[:, None], counts)

    def as_linear(self) -> Linear:
        if self.method.ncm_metric == "cosine":
            return Linear(F.normalize(self.means, dim=1), self.means.new_zeros(self.num_classes), unit_length=True)
        # -|z - mu|^2 / 2 without -|z|^2 / 2, which is the same for all classes
        return Linear(self.means, -self.means.square().sum(dim=1) / 2)


def left_out_losses(
    z: Tensor, classes: Tensor, counts: Tensor, reduce: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """How well images (rows of z, a process's share) are told by the cosine to class means that each is left out of.

    The cross entropy of each at the best temperature of all, and which are answered right. A class of one image is
    nothing without it: its rows mean nothing.
    """
    z = F.normalize(z.double(), dim=1)
    total = reduce(torch.zeros(len(counts), z.shape[1], dtype=z.dtype).index_add_(0, classes, z))
    scores = z @ F.normalize(total, dim=1).T
    scores[torch.arange(len(z)), classes] = (z * F.normalize(total[classes] - z, dim=1)).sum(dim=1)
    several = counts[classes] > 1
    losses = reduce(temperature_losses(scores[several], classes[several]))
    best = TEMPERATURES[int(losses.argmin())]
    return F.cross_entropy(scores / best, classes, reduction="none"), scores.argmax(dim=1) == classes
