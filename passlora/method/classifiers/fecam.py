"""FeCAM (Goswami et al., 2023): each class a Gaussian of its own covariance, on features of unit length.

As its authors compute it for transformers: no Tukey transform, the covariance plus its mean variance times the
identity, brought to a correlation matrix, then the squared Mahalanobis distance.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from passlora.config import MethodConfig
from passlora.method.classifiers.base import Classifier, register
from passlora.method.features import FeatureBatch, TaskFeatures
from passlora.method.memory import collect
from passlora.method.triangle import packed, size, unpacked

ADDED = 1.0  # times the mean variance, on the diagonal


@register("fecam")
class FeCAM(Classifier):
    """Not linear: a matrix a class. A class of one image takes the identity."""

    joins = True
    class_rows = ("means", "covariances")

    means: Tensor
    covariances: Tensor

    def __init__(self, feature_dim: int, method: MethodConfig) -> None:
        super().__init__(feature_dim, method)
        self.register_buffer("means", torch.zeros(0, feature_dim))
        # The upper triangle of each class's covariance, row by row.
        self.register_buffer("covariances", torch.zeros(0, size(feature_dim)))
        self._inverses: Tensor | None = None

    @property
    def num_classes(self) -> int:
        return len(self.means)

    def grow(self, new_classes: int) -> None:
        self.enlarge("means", new_classes)
        self.enlarge("covariances", new_classes)

    def fit_task(self, features: TaskFeatures) -> None:
        statistics = collect(unit_length(features), views=1, full=True)
        d, new = self.feature_dim, features.num_classes
        covariances = statistics.covariances()
        covariances[statistics.count < 2] = torch.eye(d).to(covariances)
        self.means[-new:] = statistics.means().to(self.means)
        self.covariances[-new:] = packed(covariances).to(self.covariances)
        self.forget_computed()

    def forget_computed(self) -> None:
        super().forget_computed()
        self._inverses = None

    def inverses(self) -> Tensor:
        """Of the regularised correlation matrices, (classes, d, d)."""
        d = self.feature_dim
        whole = unpacked(self.covariances, d)
        variances = whole.diagonal(dim1=1, dim2=2)
        level = variances.mean(dim=1).clamp(min=1e-12)  # a class of equal images has none
        whole = whole + (ADDED * level)[:, None, None] * torch.eye(d).to(whole)
        deviations = whole.diagonal(dim1=1, dim2=2).sqrt()
        return torch.linalg.inv(whole / (deviations[:, :, None] * deviations[:, None, :]))

    def scores(self, z: Tensor, mode: str) -> Tensor:
        if self._inverses is None:
            self._inverses = self.inverses()
        away = F.normalize(z[:, 0], dim=1)[None] - self.means.to(z)[:, None]  # (classes, n, d)
        return -((away @ self._inverses.to(z)) * away).sum(dim=2).T


def unit_length(features: TaskFeatures) -> TaskFeatures:
    def brought(batch: FeatureBatch) -> FeatureBatch:
        z, classes, places = batch
        return F.normalize(z.double().cpu(), dim=2), classes.cpu(), places

    return dataclasses.replace(features, compute=lambda: map(brought, features), device="cpu", keep=False, _kept=None)
