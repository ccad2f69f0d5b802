"""A linear probe: logistic regression on the features of all classes at once. A bound, which learns one task alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from passlora.config import MethodConfig
from passlora.errors import PassloraError
from passlora.method.classifiers.base import Classifier, Linear, register
from passlora.method.features import TaskFeatures

PENALTIES = [0.001, 0.01, 0.1]  # scikit-learn's C, of features of variance 1: the best on a tenth that is left out
ROUNDS = 300


@register("probe")
class Probe(Classifier):
    class_rows = ("weight", "bias")

    weight: Tensor
    bias: Tensor

    def __init__(self, feature_dim: int, method: MethodConfig) -> None:
        super().__init__(feature_dim, method)
        self.register_buffer("weight", torch.zeros(0, feature_dim))
        self.register_buffer("bias", torch.zeros(0))

    @property
    def num_classes(self) -> int:
        return len(self.weight)

    def grow(self, new_classes: int) -> None:
        self.enlarge("weight", new_classes)
        self.enlarge("bias", new_classes)

    def fit_task(self, features: TaskFeatures) -> None:
        if self.num_classes > features.num_classes:
            raise PassloraError("the classifier probe learns all classes at once, as a bound: it cannot be taught more")
        z, classes = features.first_view()
        weight, bias = fit(z.double().numpy(), classes.numpy(), features.num_classes)
        self.weight.copy_(torch.from_numpy(weight))
        self.bias.copy_(torch.from_numpy(bias))
        self.forget_computed()

    def as_linear(self) -> Linear:
        return Linear(self.weight, self.bias)


def fit(z: np.ndarray, classes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Logistic regression on standardised features, written as a layer on plain ones."""
    from sklearn.linear_model import LogisticRegression

    if count == 1:
        return np.zeros((1, z.shape[1])), np.zeros(1)
    mean, deviation = z.mean(axis=0), np.maximum(z.std(axis=0), 1e-12)
    x = (z - mean) / deviation
    held = np.random.RandomState(0).permutation(len(x)) % 10 == 0
    penalty = PENALTIES[-1]
    if len(np.unique(classes[~held])) == count and held.any():
        right = [
            LogisticRegression(C=c, max_iter=ROUNDS).fit(x[~held], classes[~held]).score(x[held], classes[held])
            for c in PENALTIES
        ]
        penalty = PENALTIES[int(np.argmax(right))]
    model = LogisticRegression(C=penalty, max_iter=ROUNDS).fit(x, classes)
    weight, bias = model.coef_ / deviation, model.intercept_
    if count == 2:  # scikit-learn keeps one row for two classes
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    return weight, bias - weight @ mean
