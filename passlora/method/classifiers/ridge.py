"""Ridge regression onto one-hot classes, from sums: ACIL and GACL (Zhuang et al., 2022 and 2024) without recursion,
RanPAC (McDonnell et al., 2023) with the lift relu.

Equal to ridge on all images at once, in any order and split of tasks. An image counts 1 / n, n the images of its class,
so that classes of unequal size weigh alike (AIR: Fang et al., 2025).
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from passlora.config import MethodConfig
from passlora.method.classifiers.base import register
from passlora.method.classifiers.moments import Moments, Sample
from passlora.method.discriminant import temperature_losses
from passlora.method.features import TaskFeatures

STRENGTHS = [10 ** (k / 2) for k in range(-10, 4)]  # of lambda, in units of the mean eigenvalue of the Gram matrix


@register("ridge")
class Ridge(Moments):
    """W = (G + lambda I)^-1 Q, Q the class means; lambda answers most images right, each by a fit without it."""

    shared_sums = (*Moments.shared_sums, "right")

    right: Tensor

    def __init__(self, feature_dim: int, method: MethodConfig) -> None:
        super().__init__(feature_dim, method)
        self.register_buffer("right", torch.zeros(len(STRENGTHS), dtype=torch.float64))  # over the tasks so far

    def weigh(self, x: Tensor, classes: Tensor, features: TaskFeatures) -> Tensor:
        return x / features.class_counts[classes].double().sqrt()[:, None]

    def within(self, squares: Tensor, total: Tensor, means: Tensor) -> Tensor:
        return squares  # the Gram matrix, the means in it

    def fit_task(self, features: TaskFeatures) -> None:
        sample = Sample(features)
        super().fit_task(sample.features)
        values, vectors = torch.linalg.eigh(self.whole())
        inverses = [1 / (values.clamp(min=0) + strength * values.mean()) for strength in STRENGTHS]
        means, counts = self.means.cpu() @ vectors, self.counts.cpu()
        parts = []
        for z, task_classes in sample.parts:
            classes = task_classes + self.num_classes - features.num_classes
            others = counts[classes] > 1  # of the same class: without them nothing would be left of it
            parts.append((self.map(z[others]).double() @ vectors, classes[others]))
        right, losses = torch.zeros_like(self.right), torch.zeros_like(self.temperature_losses)
        for x, classes in parts:
            for i, inverse in enumerate(inverses):
                scores = left_out_scores(x, classes, means, counts, inverse)
                right[i] += (scores.argmax(dim=1) == classes).sum()
        self.right += features.reduce(right)
        best = int(self.right.argmax())
        self.strength.fill_(STRENGTHS[best])
        for x, classes in parts:
            scores = left_out_scores(x, classes, means, counts, inverses[best])
            losses += temperature_losses(scores, classes, self.heavy_tails)
        self.add_losses(features.reduce(losses), features.num_classes)
        self.forget_computed()

    def weight_of_sums(self) -> float:
        return float(self.num_classes)  # each class counts 1

    def remains(self) -> str:
        return super().remains() + ", and in the choice of lambda"

    def join(self, other: Self, rows: Tensor) -> None:
        right = self.right + other.right
        super().join(other, rows)
        self.right.copy_(right)
        self.settle()

    def settle(self) -> None:
        self.strength.fill_(STRENGTHS[int(self.right.argmax())])

    def solved(self) -> tuple[Tensor, Tensor]:
        gram = self.whole()
        identity = gram.trace() / len(gram) * torch.eye(len(gram), dtype=gram.dtype)
        weight = torch.linalg.solve(gram + float(self.strength) * identity, self.means.cpu().T).T
        return weight, torch.zeros(self.num_classes, dtype=weight.dtype)


def left_out_scores(x: Tensor, classes: Tensor, means: Tensor, counts: Tensor, inverse: Tensor) -> Tensor:
    """Answers to images that were learnt from, each by the ridge that has not seen it: exact, without a new fit.

    An image of leverage h pulls the answer s for its own class to (s - h) / (1 - h), for every other to s / (1 - h).
    """
    leverage = (x.square() @ inverse) / counts[classes]
    scores = x @ (means * inverse).T
    scores[torch.arange(len(x)), classes] -= leverage
    return scores / (1 - leverage).clamp(min=1e-6)[:, None]
