"""How features moved while the network was trained on new classes: told from the new images alone, for old classes.

The task's images are read before and after its training, each image as it is: pairs (z, z'). Old classes have no images
any more; their means and covariances are moved by what the pairs tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from passlora.method.features import alone

Pairs = Iterable[tuple[Tensor, Tensor, Tensor]]  # z and z' (n, views, d) of this process's share, positions (n,)
Reduce = Callable[[Tensor], Tensor]
FOLDS = 5
STRENGTHS = [10.0**k for k in range(-5, 3)]  # of the pull towards the identity, in units of a feature's mean square
SDC_VARIANCE = 0.05  # sigma^2, of the mean squared distance of features from their common mean


@dataclass
class LinearDrift:
    """z' = z A + b: the map of least squares, pulled towards the identity as much as held-out images ask for.

    With D = z' - z: W = (G + lambda I)^-1 sum z~' D, G = sum z~' z~, z~ = (z, c), and A = I + W without its last row.
    Everything is computed from sums over folds of the images, so it is the same over processes. Where no lambda lowers
    the residual on images that were left out, nothing is moved.
    """

    matrix: Tensor  # A, (d, d)
    shift: Tensor  # b, (d,)
    residual: float  # on held-out images, as a share of how far they moved; 1 if nothing is moved

    @classmethod
    def fit(cls, pairs: Pairs, d: int, reduce: Reduce = alone) -> LinearDrift:
        gram, cross, square = (reduce(part) for part in fold_sums(pairs, d))
        # The constant counts as much as all features together, so that a common shift costs little.
        scale = torch.ones(d + 1, dtype=gram.dtype)
        scale[-1] = (gram[:, :d, :d].diagonal(dim1=1, dim2=2).sum() / gram[:, d, d].sum().clamp(min=1)).sqrt()
        gram, cross = gram * scale[:, None] * scale, cross * scale[:, None]
        found = held_out_residuals(gram, cross, square)
        best, moved = int(found.argmin()), float(square.sum())
        weight, residual = torch.zeros(d + 1, d, dtype=gram.dtype), 1.0
        if float(found[best]) < moved:
            weight = ridge(gram.sum(dim=0), cross.sum(dim=0), STRENGTHS[best]) * scale[:, None]
            residual = float(found[best]) / moved
        return cls(torch.eye(d, dtype=gram.dtype) + weight[:d], weight[d], residual)

    def means(self, means: Tensor) -> Tensor:
        """(..., d), moved."""
        return (means.cpu().double() @ self.matrix + self.shift).to(means)

    def covariances(self, covariances: Tensor) -> Tensor:
        """(..., d, d), moved."""
        return (self.matrix.T @ covariances.cpu().double() @ self.matrix).to(covariances)


def fold_sums(pairs: Pairs, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each fold of the images: sum z~' z~, sum z~' D, sum |D|^2, in float64."""
    gram, cross, square = (torch.zeros(FOLDS, *size, dtype=torch.float64) for size in ((d + 1, d + 1), (d + 1, d), ()))
    for before, after, positions in pairs:
        z = before.cpu().double()
        moved = (after.cpu().double() - z).flatten(0, 1)
        fold = (positions.cpu() % FOLDS).repeat_interleave(z.shape[1])
        z = F.pad(z.flatten(0, 1), (0, 1), value=1.0)
        for k in range(FOLDS):
            own = fold == k
            gram[k] += z[own].T @ z[own]
            cross[k] += z[own].T @ moved[own]
            square[k] += moved[own].square().sum()
    return gram, cross, square


def ridge(gram: Tensor, cross: Tensor, strength: float) -> Tensor:
    level = gram.trace() / len(gram)
    return torch.linalg.solve(gram + strength * level * torch.eye(len(gram), dtype=gram.dtype), cross)


def held_out_residuals(gram: Tensor, cross: Tensor, square: Tensor) -> Tensor:
    """For each strength: sum of |D - z~ W|^2 over all images, each by the map that was fitted without its fold."""
    found = torch.zeros(len(STRENGTHS), dtype=gram.dtype)
    for k in range(FOLDS):
        values, vectors = torch.linalg.eigh(gram.sum(dim=0) - gram[k])
        fitted, asked = vectors.T @ (cross.sum(dim=0) - cross[k]), vectors.T @ cross[k]
        quadratic = vectors.T @ gram[k] @ vectors
        for i, strength in enumerate(STRENGTHS):
            weight = fitted / (values.clamp(min=0) + strength * values.mean()).clamp(min=1e-30)[:, None]
            found[i] += square[k] - 2 * (weight * asked).sum() + (weight * (quadratic @ weight)).sum()
    return found


@dataclass
class SDCDrift:
    """Semantic drift compensation (Yu et al., 2020): a mean moves as the new features around it did.

    Each pair weighs exp(-|z - mu|^2 / (2 sigma^2)). Covariances stay.
    """

    before: Tensor  # (n, d), this process's share
    moved: Tensor  # (n, d)
    variance: float  # sigma^2
    reduce: Reduce = alone

    @classmethod
    def fit(cls, pairs: Pairs, d: int, reduce: Reduce = alone) -> SDCDrift:
        nothing = torch.zeros(0, d, dtype=torch.float64)
        parts = [(nothing, nothing)]  # a process may have no image of a task
        parts += [(old.cpu().double().flatten(0, 1), new.cpu().double().flatten(0, 1)) for old, new, _ in pairs]
        before, after = (torch.cat(part) for part in zip(*parts, strict=True))
        count = reduce(torch.tensor(float(len(before)), dtype=torch.float64))
        centre = reduce(before.sum(dim=0)) / count
        spread = float(reduce((before - centre).square().sum()) / count)
        return cls(before, after - before, max(SDC_VARIANCE * spread, 1e-30), reduce)

    def means(self, means: Tensor) -> Tensor:
        mu = means.cpu().double().reshape(-1, means.shape[-1])
        weight = (-torch.cdist(mu, self.before).square() / (2 * self.variance)).exp()
        total, weights = self.reduce(weight @ self.moved), self.reduce(weight.sum(dim=1))
        return (mu + total / weights.clamp(min=1e-300)[:, None]).view(means.shape).to(means)

    def covariances(self, covariances: Tensor) -> Tensor:
        return covariances


Drift = LinearDrift | SDCDrift
KINDS: dict[str, type[LinearDrift] | type[SDCDrift]] = {"linear": LinearDrift, "sdc": SDCDrift}
