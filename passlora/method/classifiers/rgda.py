"""Regularised discriminants with a low-rank part a class: quadratic discriminant analysis that few images can carry.

The covariance of class c is a S_c + b S + c tr(S)/d I: of its own covariance S_c the strongest directions alone, the
covariance S of all classes, and the identity. By Woodbury's formula nothing of size d x d is kept or solved a class.
"""

from __future__ import annotations

import torch
from torch import Tensor

from passlora.config import MethodConfig
from passlora.method.classifiers.base import register
from passlora.method.classifiers.ncm import ClassMeans
from passlora.method.discriminant import is_nothing
from passlora.method.features import TaskFeatures
from passlora.method.memory import collect
from passlora.method.triangle import packed, size, unpacked

RANK = 8
OWN, SHARED, IDENTITY = 0.1, 1.0, 0.3  # docs/beyond.md tells where they were chosen


@register("rgda")
class RGDA(ClassMeans):
    """Means, one scatter for all classes, and of each class the `RANK` strongest directions, scaled by its spread."""

    joins = True
    class_rows = (*ClassMeans.class_rows, "directions")
    shared_sums = ("scatter",)

    directions: Tensor
    scatter: Tensor

    def __init__(self, feature_dim: int, method: MethodConfig) -> None:
        super().__init__(feature_dim, method)
        self.register_buffer("directions", torch.zeros(0, min(RANK, feature_dim), feature_dim))
        self.register_buffer("scatter", torch.zeros(size(feature_dim), dtype=torch.float64))
        self._whitened: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def grow(self, new_classes: int) -> None:
        super().grow(new_classes)
        self.enlarge("directions", new_classes)

    def forget_computed(self) -> None:
        super().forget_computed()
        self._whitened = None

    def fit_task(self, features: TaskFeatures) -> None:
        statistics = collect(features, views=1, full=True)
        self.set_means(statistics.total, statistics.count)
        covariances = statistics.covariances().nan_to_num()  # a class of one image has none
        values, vectors = torch.linalg.eigh(covariances)
        rank = self.directions.shape[1]
        strongest = vectors[:, :, -rank:] * values[:, None, -rank:].clamp(min=0).sqrt()
        self.directions[-features.num_classes :] = strongest.transpose(1, 2).to(self.directions)
        within = (covariances * (statistics.count - 1)[:, None, None]).sum(dim=0)
        self.scatter += packed(within).to(self.scatter)
        self.forget_computed()

    def shared(self) -> Tensor:
        """What all classes' covariances have in common."""
        d, freedom = self.feature_dim, int(self.counts.sum()) - self.num_classes
        whole = unpacked(self.scatter.cpu(), d) / max(freedom, 1)
        if is_nothing(whole, self.means.cpu()):  # one image a class, or equal ones
            return torch.eye(d, dtype=torch.float64)
        level = whole.trace() / d
        return SHARED * whole + IDENTITY * level * torch.eye(d, dtype=torch.float64)

    def whitened(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """With L L' the inverse of what is shared: L, means L, directions scaled by their gains, log determinants.

        In these coordinates the covariance of a class is I + V'V, its inverse I less a share e / (1 + e) of each
        eigenvector of V'V, e its eigenvalue.
        """
        lower = torch.linalg.cholesky(torch.linalg.inv(self.shared()))
        own = (OWN**0.5 * self.directions.double().cpu()) @ lower
        _, singular, axes = torch.linalg.svd(own, full_matrices=False)
        gains = singular.square() / (1 + singular.square())
        parts = (lower, self.means.double().cpu() @ lower, axes * gains.sqrt()[:, :, None])
        return *(part.float() for part in parts), singular.square().log1p().sum(dim=1).float()

    def scores(self, z: Tensor, mode: str) -> Tensor:
        if self._whitened is None:
            self._whitened = self.whitened()
        lower, means, axes, determinants = (part.to(z) for part in self._whitened)
        x = z[:, 0] @ lower
        squares = x.square().sum(dim=1, keepdim=True) + means.square().sum(dim=1) - 2 * x @ means.T
        along = torch.einsum("nd,crd->ncr", x, axes) - torch.einsum("cd,crd->cr", means, axes)
        return -(squares - along.square().sum(dim=2) + determinants) / 2
