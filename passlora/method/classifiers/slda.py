"""Streaming linear discriminant analysis (Hayes and Kanan, 2020): class means and one shared covariance."""

from __future__ import annotations

import torch
from torch import Tensor

from passlora.method.classifiers.ncm import class_means

SHRINKAGE = 1e-4


class SLDA:
    """Scores of Gaussian classes with equal priors; the covariance is pooled over all images seen so far."""

    def __init__(self) -> None:
        self.means = torch.empty(0)
        self.scatter: Tensor | None = None  # sum of (z - mu)(z - mu)^T
        self.count = 0

    def add(self, z: Tensor, classes: Tensor) -> None:
        z = z.double()
        new = class_means(z, classes)
        centred = z - new[classes - classes.min()]
        scatter = centred.T @ centred
        self.scatter = scatter if self.scatter is None else self.scatter + scatter
        self.means = new if len(self.means) == 0 else torch.cat([self.means, new])
        self.count += len(z)

    def scores(self, z: Tensor) -> Tensor:
        assert self.scatter is not None
        covariance = self.scatter / self.count
        d = len(covariance)
        level = covariance.trace() / d
        shrunk = (1 - SHRINKAGE) * covariance + SHRINKAGE * level * torch.eye(d, dtype=covariance.dtype)
        weight = torch.linalg.solve(shrunk, self.means.T)  # (d, classes)
        return z.double() @ weight - 0.5 * (self.means * weight.T).sum(dim=1)
