"""AnaCP (Momeni and Liu, 2025): random features are projected, in closed form, to where classes lie further apart.

Only sums are kept. The projection is ridge regression of lifted features onto target prototypes: class means, pushed
apart in the coordinates in which classes are round. What reads the projected features is ridge regression once more, on
Gaussian samples of every class.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from passlora.config import MethodConfig
from passlora.method.classifiers.base import Linear, register
from passlora.method.classifiers.ncm import ClassMeans
from passlora.method.classifiers.slda import oas_shrinkage
from passlora.method.discriminant import is_nothing
from passlora.method.feature_map import FeatureMap
from passlora.method.features import TaskFeatures
from passlora.method.triangle import packed, size, unpacked

HEADS = 3  # projections side by side, each of its own random features
SAMPLES = 100  # of each class
STRENGTH = 0.01  # of both ridges, in units of the mean eigenvalue; docs/beyond.md tells where it was chosen


@register("anacp")
class AnaCP(ClassMeans):
    """Means and one scatter of features as they are; Gram matrices and class sums of lifted ones."""

    joins = True
    class_rows = (*ClassMeans.class_rows, "lifted")
    shared_sums = ("scatter", "grams")

    scatter: Tensor
    lifted: Tensor
    grams: Tensor

    def __init__(self, feature_dim: int, method: MethodConfig) -> None:
        super().__init__(feature_dim, method)
        self.width = -(-method.lift_width // HEADS)  # random features of each head
        self.map = FeatureMap(feature_dim, 1, "gelu", HEADS * self.width)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        self.register_buffer("scatter", zeros(size(feature_dim)))
        self.register_buffer("lifted", zeros(0, HEADS * self.width))  # sums over a class's images
        self.register_buffer("grams", zeros(HEADS, size(self.width)))

    def grow(self, new_classes: int) -> None:
        super().grow(new_classes)
        self.enlarge("lifted", new_classes)

    def heads(self, z: Tensor) -> Tensor:
        """(n, views, d) -> (heads, n, width)."""
        return self.map(z).unflatten(1, (HEADS, self.width)).transpose(0, 1)

    def fit_task(self, features: TaskFeatures) -> None:
        new, d = features.num_classes, self.feature_dim
        total, squares = torch.zeros(new, d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
        lifted = torch.zeros(new, HEADS * self.width, dtype=torch.float64)
        grams = torch.zeros(HEADS, self.width, self.width, dtype=torch.float64)
        for z, classes, _ in features:
            x, own = z[:, 0].cpu().double(), classes.cpu()
            h = self.heads(x[:, None])
            total.index_add_(0, own, x)
            squares.addmm_(x.T, x)
            lifted.index_add_(0, own, h.transpose(0, 1).flatten(1))
            grams.baddbmm_(h.transpose(1, 2), h)
        total, squares, lifted, grams = (features.reduce(part) for part in (total, squares, lifted, grams))
        self.set_means(total, features.class_counts)
        self.scatter += packed(squares - total.T @ (total / features.class_counts[:, None])).to(self.scatter)
        self.lifted[-new:] = lifted.to(self.lifted)
        self.grams += packed(grams).to(self.grams)
        self.forget_computed()

    def covariance(self) -> Tensor:
        """Within classes, regularised."""
        freedom = int(self.counts.sum()) - self.num_classes
        whole = unpacked(self.scatter.cpu(), self.feature_dim) / max(freedom, 1)
        identity = torch.eye(len(whole), dtype=whole.dtype)
        if freedom == 0 or is_nothing(whole, self.means.cpu()):  # one image a class, or equal ones
            return identity
        share = oas_shrinkage(whole, freedom)
        return (1 - share) * whole + share * whole.trace() / len(whole) * identity

    def as_linear(self) -> Linear:
        """Both ridges in one layer on the lifted features."""
        means, lower = self.means.cpu().double(), torch.linalg.cholesky(self.covariance())
        targets = pushed_apart(means, lower)
        grams = regularised(unpacked(self.grams.cpu(), self.width))
        sums = self.lifted.cpu().unflatten(1, (HEADS, self.width)).transpose(0, 1)  # (heads, classes, width)
        projections = torch.linalg.solve(grams, sums.transpose(1, 2) @ targets)  # (heads, width, d)
        weight, bias = self.read_samples(means, lower, projections)
        whole = (projections @ weight.unflatten(1, (HEADS, -1)).permute(1, 2, 0)).flatten(0, 1).T
        return Linear(whole.float(), bias.float(), map=self.map)

    def read_samples(self, means: Tensor, lower: Tensor, projections: Tensor) -> tuple[Tensor, Tensor]:
        """Ridge onto one-hot classes, from projected Gaussian samples: weights (classes, heads * d) and bias."""
        chance = np.random.RandomState(0)  # whose stream is frozen: a model answers the same for ever
        width = HEADS * self.feature_dim + 1
        gram, cross = torch.zeros(width, width, dtype=means.dtype), torch.zeros(width, len(means), dtype=means.dtype)
        for start in range(0, len(means), SAMPLES):
            own = torch.arange(start, min(start + SAMPLES, len(means))).repeat_interleave(SAMPLES)
            noise = torch.from_numpy(chance.standard_normal((len(own), self.feature_dim))) @ lower.T
            z = (means[own] + noise)[:, None]
            y = F.pad((self.heads(z) @ projections).transpose(0, 1).flatten(1), (0, 1), value=1.0)
            gram += y.T @ y
            cross += y.T @ F.one_hot(own, len(means)).to(y)
        solved = torch.linalg.solve(regularised(gram), cross).T
        return solved[:, :-1], solved[:, -1]


def pushed_apart(means: Tensor, lower: Tensor) -> Tensor:
    """Target prototypes of length 1: means in whitened coordinates, every singular value one larger, and back."""
    centre = means.mean(dim=0)
    white = torch.linalg.solve_triangular(lower, (means - centre).T, upper=False).T
    u, s, v = torch.linalg.svd(white, full_matrices=False)
    apart = (u * torch.where(s > 1e-6 * s.max(), s + 1, 0)) @ v  # centred means have a direction of nothing
    return F.normalize(apart @ lower.T + centre, dim=1)


def regularised(gram: Tensor) -> Tensor:
    level = gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp(min=1e-30)
    return gram + STRENGTH * level[..., None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype)
