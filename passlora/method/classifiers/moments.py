"""What several classifiers keep of mapped features: counts, means and one scatter for all classes, in float64.

Sums of images, so the same for any order and any split of classes into tasks, and over processes.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor

from passlora.config import MethodConfig
from passlora.errors import PassloraError
from passlora.method.classifiers.base import CANNOT_JOIN, Classifier, Linear
from passlora.method.discriminant import TEMPERATURES, is_nothing
from passlora.method.drift import Drift
from passlora.method.feature_map import make_map
from passlora.method.features import TaskFeatures
from passlora.method.triangle import packed, size, unpacked

FADING = 6  # docs/beyond.md tells where it was chosen


class Moments(Classifier):
    """Subclasses say what linear layer on mapped features the sums make (`solved`)."""

    joins = True
    class_rows = ("means", "counts")
    shared_sums: ClassVar[tuple[str, ...]] = ("scatter", "temperature_losses")

    means: Tensor
    counts: Tensor
    scatter: Tensor
    class_scatters: Tensor
    strength: Tensor
    temperature_losses: Tensor

    def __init__(self, feature_dim: int, method: MethodConfig) -> None:
        super().__init__(feature_dim, method)
        self.map = make_map(feature_dim, method)
        width = self.map.width
        self.register_buffer("means", torch.zeros(0, width, dtype=torch.float64))
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64))
        # Sum over all images of (x - mu)(x - mu)^T, mu the mean of the image's class: its upper triangle, row by row.
        self.register_buffer("scatter", torch.zeros(size(width), dtype=torch.float64))
        if method.exact_forgetting:  # the same for each class alone
            self.register_buffer("class_scatters", torch.zeros(0, size(width), dtype=torch.float64))
        # How much is regularised; and what each temperature would have cost, over the tasks so far, recent ones most.
        self.register_buffer("strength", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("temperature_losses", torch.zeros(len(TEMPERATURES), dtype=torch.float64))

    @property
    def num_classes(self) -> int:
        return len(self.means)

    def num_views(self, mode: str) -> int:
        return self.map.views

    def grow(self, new_classes: int) -> None:
        self.enlarge("means", new_classes)
        self.enlarge("counts", new_classes)
        if self.method.exact_forgetting:
            self.enlarge("class_scatters", new_classes)

    def fit_task(self, features: TaskFeatures) -> None:
        width, number = self.map.width, features.num_classes
        parts = number if self.method.exact_forgetting else 1  # a sum of squares a class, or one for all
        total = torch.zeros(number, width, dtype=torch.float64)
        squares = torch.zeros(parts, width, width, dtype=torch.float64)
        for z, batch_classes, _ in features:
            x, classes = self.map(z).cpu().double(), batch_classes.cpu()
            total.index_add_(0, classes, x)
            weighed = self.weigh(x, classes, features)
            for part, square in enumerate(squares):
                own = weighed if parts == 1 else weighed[classes == part]
                square.addmm_(own.T, own)
        total, squares = features.reduce(total), features.reduce(squares)
        means = total / features.class_counts[:, None]
        if self.method.exact_forgetting:
            within = torch.stack(
                [self.within(*part) for part in zip(squares, total[:, None], means[:, None], strict=True)]
            )
        else:
            within = self.within(squares[0], total, means)[None]
        self.add(features.rows_of(self.num_classes), means, features.class_counts, within)

    def add(self, rows: Tensor, means: Tensor, counts: Tensor, within: Tensor) -> None:
        """Sums of further images of the classes `rows`: their means, numbers, and scatter (a matrix each, or one)."""
        before, now = self.counts.cpu()[rows].double(), counts.cpu().double()
        away = means - self.means.cpu()[rows]
        apart = away * (before * now / (before + now)).sqrt()[:, None]  # none for a class that is new
        self.means[rows] += (away * (now / (before + now))[:, None]).to(self.means)
        self.counts[rows] += counts.to(self.counts)
        if self.method.exact_forgetting:
            own = packed(within + apart[:, :, None] * apart[:, None, :])
            self.class_scatters[rows] += own.to(self.class_scatters)
            self.scatter += own.sum(dim=0).to(self.scatter)
        else:
            self.scatter += packed(within.sum(dim=0) + apart.T @ apart).to(self.scatter)
        self.forget_computed()

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        if self.method.exact_forgetting:
            self.class_scatters = self.class_scatters[rows]
            self.scatter = self.class_scatters.sum(dim=0)
            self.forget_computed()
        self.settle()

    def remains(self) -> str:
        matrix = (
            [] if self.method.exact_forgetting else ["one matrix of products, summed over the images of all classes"]
        )
        number = ["one number, which says how sure to be"] if self.temperature_losses.any() else []
        return f"its part in {', and in '.join(matrix + number)}" if matrix + number else ""

    def join(self, other: Self, rows: Tensor) -> None:
        new = int((rows >= self.num_classes).sum())
        if new < len(rows) and not self.extends:
            raise PassloraError(CANNOT_JOIN.format(self.method.classifier))
        before = self.num_classes
        self.grow(new)
        within = unpacked(other.class_scatters, self.map.width) if self.method.exact_forgetting else other.whole()[None]
        self.add(rows, other.means.cpu(), other.counts, within)
        # Either's images were told among fewer classes.
        shares = [(count / self.num_classes) ** FADING for count in (before, other.num_classes)]
        self.temperature_losses = shares[0] * self.temperature_losses + shares[1] * other.temperature_losses
        self.settle()

    def settle(self) -> None:
        """Choose anew what follows from the sums alone."""

    def move(self, drift: Drift) -> None:
        """Means and scatter of features as they are; each view of an image moves alike. Lifted ones cannot be moved."""
        if self.map.lift != "none":
            super().move(drift)
        views, d = self.map.views, self.feature_dim
        self.means = drift.means(self.means.unflatten(1, (views, d))).flatten(1)
        blocks = self.whole().unflatten(0, (views, d)).unflatten(2, (views, d)).transpose(1, 2)  # (views, views, d, d)
        moved = drift.covariances(blocks).transpose(1, 2).reshape(views * d, views * d)
        self.scatter.copy_(packed(moved))
        self.forget_computed()

    def weigh(self, x: Tensor, classes: Tensor, features: TaskFeatures) -> Tensor:
        """Rows whose squares are added up."""
        return x

    def within(self, squares: Tensor, total: Tensor, means: Tensor) -> Tensor:
        """What is kept of the sum of squares: here that about the class means."""
        return squares - total.T @ means

    def whole(self) -> Tensor:
        """The sum of squares as a matrix."""
        return unpacked(self.scatter.cpu(), self.map.width)

    @property
    def freedom(self) -> int:
        """Images less classes: the degrees of freedom of the covariance."""
        return int(self.counts.sum()) - self.num_classes

    def covariance(self) -> Tensor | None:
        """Within classes, unbiased; None if nothing is known of it (one image a class, or equal ones)."""
        covariance = self.whole() / max(self.freedom, 1)
        return None if self.freedom == 0 or is_nothing(covariance, self.means.cpu()) else covariance

    def temperature(self) -> float:
        """Divides the scores, so that their softmax is as sure as it is right; 1 if nothing is known."""
        return TEMPERATURES[int(self.temperature_losses.argmin())] if self.temperature_losses.any() else 1.0

    def add_losses(self, losses: Tensor, new_classes: int) -> None:
        """What each temperature would have cost on a task's left-out images, summed over processes.

        Earlier tasks' images were told among fewer classes, which asks for another temperature: they count less.
        """
        share = (self.num_classes - new_classes) / self.num_classes
        self.temperature_losses.mul_(share**FADING).add_(losses.to(self.temperature_losses))

    @property
    def heavy_tails(self) -> bool:
        """Of the probabilities. What is linear in plain features stays linear: any head can hold it."""
        return not self.map.is_plain

    def solved(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the classes, in float64, before the temperature."""
        raise NotImplementedError

    def as_linear(self) -> Linear:
        weight, bias = self.solved()
        t, fitted = self.temperature(), bool(self.temperature_losses.any())
        mapped = None if self.map.is_plain else self.map
        return Linear((weight / t).float(), (bias / t).float(), map=mapped, heavy_tails=self.heavy_tails and fitted)


class Sample:
    """Some images of a task, as they go by: what is chosen by images that are left out is chosen on these."""

    MOST = 1000

    def __init__(self, features: TaskFeatures) -> None:
        count = features.num_images
        self.chosen = torch.zeros(count, dtype=torch.bool)
        self.chosen[torch.randperm(count, generator=torch.Generator().manual_seed(0))[: self.MOST]] = True
        self.features = features.watched(self._look)
        self.parts: list[tuple[Tensor, Tensor]] = []

    def _look(self, z: Tensor, classes: Tensor, places: Tensor) -> None:
        chosen = self.chosen[places.cpu()]
        self.parts.append((z.cpu()[chosen], classes.cpu()[chosen]))
