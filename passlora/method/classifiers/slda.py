"""Linear discriminant analysis from sums (SLDA: Hayes and Kanan, 2020): class means and one covariance for all classes.

On lifted features it is a kernel discriminant (KLDA: Momeni et al., 2025).
"""

from __future__ import annotations

import torch
from torch import Tensor

from passlora.method.classifiers.base import register
from passlora.method.classifiers.moments import Moments, Sample
from passlora.method.discriminant import (
    Spectrum,
    best_strength,
    compared,
    left_out_scores,
    temperature_losses,
)
from passlora.method.features import TaskFeatures


@register("slda")
class SLDA(Moments):
    """Scores of Gaussian classes with equal priors, so that classes of unequal size do not matter."""

    extends = True

    def fit_task(self, features: TaskFeatures) -> None:
        if self.method.shrinkage == "oas":
            super().fit_task(features)
            return
        sample, own = Sample(features), features.rows_of(self.num_classes)
        new = int((self.counts.cpu()[own] == 0).sum())
        super().fit_task(sample.features)
        known = compared(self.means.cpu())
        rows = torch.cat([known, own[~torch.isin(own, known)]])
        spectrum = self.spectrum(rows)
        if spectrum is None:
            return
        strength = best_strength(spectrum)
        self.strength.fill_(strength)
        losses, place = torch.zeros_like(self.temperature_losses), torch.zeros(self.num_classes, dtype=torch.long)
        place[rows] = torch.arange(len(rows))
        for z, task_classes in sample.parts:
            classes = place[own[task_classes]]
            others = spectrum.counts[classes] > 1  # of the same class: without them nothing would be left of it
            if others.any():
                scores = left_out_scores(spectrum, strength, self.map(z[others]).double(), classes[others])
                losses += temperature_losses(scores, classes[others], self.heavy_tails)
        self.add_losses(features.reduce(losses), new)
        self.forget_computed()

    def spectrum(self, rows: Tensor) -> Spectrum | None:
        """Of the classes `rows`; None if nothing is known of the covariance."""
        covariance = self.covariance()
        if covariance is None:
            return None
        return Spectrum.of(covariance, self.means.cpu()[rows], self.counts.cpu()[rows], self.freedom)

    def settle(self) -> None:
        if self.method.shrinkage == "oas":
            return
        spectrum = self.spectrum(compared(self.means.cpu()))
        self.strength.fill_(0.0 if spectrum is None else best_strength(spectrum))
        self.forget_computed()

    def regularised(self) -> Tensor:
        """The covariance with a multiple of the identity in it, as much as the images are too few."""
        covariance, width = self.covariance(), self.map.width
        if covariance is None:
            return torch.eye(width, dtype=torch.float64)
        identity = covariance.trace() / width * torch.eye(width, dtype=torch.float64)
        if self.method.shrinkage == "error":
            return covariance + float(self.strength) * identity
        share = oas_shrinkage(covariance, self.freedom)
        return (1 - share) * covariance + share * identity

    def solved(self) -> tuple[Tensor, Tensor]:
        means = self.means.cpu()
        centre = means.mean(dim=0)  # what all classes share changes no difference between them
        weight = torch.linalg.solve(self.regularised(), (means - centre).T).T
        bias = -weight @ centre - 0.5 * ((means - centre) * weight).sum(dim=1)
        return weight, bias


def oas_shrinkage(covariance: Tensor, samples: int) -> float:
    """How much of the identity to mix in, from the covariance and the number of samples alone, so that it can be
    computed from sums (oracle approximating shrinkage, Chen et al., 2010; as scikit-learn computes it from samples)."""
    d = len(covariance)
    level, size = covariance.trace() / d, covariance.square().mean()
    denominator = (samples + 1) * (size - level**2 / d)
    return 1.0 if denominator == 0 else min(float((size + level**2) / denominator), 1.0)
