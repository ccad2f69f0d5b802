"""Streaming linear discriminant analysis (Hayes and Kanan, 2020): class means and one covariance for all classes."""

from __future__ import annotations

import torch
from torch import Tensor

from passlora.config import MethodConfig
from passlora.method.classifiers.base import Linear, register
from passlora.method.classifiers.ncm import ClassMeans
from passlora.method.features import TaskFeatures


@register("slda")
class SLDA(ClassMeans):
    """Scores of Gaussian classes with equal priors; what a task teaches is added to what was kept before."""

    scatter: Tensor

    def __init__(self, feature_dim: int, method: MethodConfig) -> None:
        super().__init__(feature_dim, method)
        # Sum over all images of (z - mu)(z - mu)^T, mu the mean of the image's class: its upper triangle, row by row.
        triangle = feature_dim * (feature_dim + 1) // 2
        self.register_buffer("scatter", torch.zeros(triangle, dtype=torch.float64))

    def fit_task(self, features: TaskFeatures) -> None:
        total = torch.zeros(features.num_classes, features.dim, dtype=torch.float64)
        count = torch.zeros(features.num_classes, dtype=torch.float64)
        squares = torch.zeros(features.dim, features.dim, dtype=torch.float64)
        for batch, classes, _ in features:
            z = batch[:, 0].cpu().double()
            total.index_add_(0, classes.cpu(), z)
            count += torch.bincount(classes.cpu(), minlength=len(count))
            squares.addmm_(z.T, z)
        total, count, squares = (features.reduce(part) for part in (total, count, squares))
        scatter = squares - total.T @ (total / count[:, None])
        rows, columns = torch.triu_indices(features.dim, features.dim)
        self.scatter += scatter[rows, columns].to(self.scatter.device)
        self.set_means(total, count)

    def covariance(self) -> Tensor:
        """Within classes, unbiased, shrunk towards a multiple of the identity as far as the images are too few."""
        d = self.feature_dim
        rows, columns = torch.triu_indices(d, d)
        whole = torch.zeros(d, d, dtype=torch.float64)
        whole[rows, columns] = self.scatter.cpu()
        whole = whole + whole.triu(1).T
        freedom = int(self.counts.sum()) - self.num_classes
        level = whole.trace() / d / max(freedom, 1)
        if freedom == 0 or level <= 1e-10 * self.means.double().square().mean():  # one image a class, or equal ones
            return torch.eye(d, dtype=whole.dtype)
        whole /= freedom
        share = oas_shrinkage(whole, freedom)
        return (1 - share) * whole + share * level * torch.eye(d, dtype=whole.dtype)

    def as_linear(self) -> Linear:
        means = self.means.double().cpu()
        centre = means.mean(dim=0)  # what all classes share changes no difference between them
        weight = torch.linalg.solve(self.covariance(), (means - centre).T).T
        bias = -weight @ centre - 0.5 * ((means - centre) * weight).sum(dim=1)
        return Linear(weight.float(), bias.float())


def oas_shrinkage(covariance: Tensor, samples: int) -> float:
    """How much of the identity to mix in, from the covariance and the number of samples alone, so that it can be
    computed from sums (oracle approximating shrinkage, Chen et al., 2010; as scikit-learn computes it from samples)."""
    d = len(covariance)
    level, size = covariance.trace() / d, covariance.square().mean()
    denominator = (samples + 1) * (size - level**2 / d)
    return 1.0 if denominator == 0 else min(float((size + level**2) / denominator), 1.0)
