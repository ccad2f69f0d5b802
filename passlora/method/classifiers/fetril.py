"""FeTrIL (Petit et al., 2023): old classes are imitated by new images' features, moved to the old class's mean."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from passlora.method.classifiers.ncm import class_means


class FeTrIL:
    """A linear SVM, fitted anew with each task on the new features and the translated ones."""

    def __init__(self) -> None:
        self.means = torch.empty(0)
        self.weight, self.bias = torch.empty(0), torch.empty(0)

    def add(self, z: Tensor, classes: Tensor) -> None:
        z = z.double()
        new, first = class_means(z, classes), int(classes.min())
        features, labels = [z], [classes]
        for old, mean in enumerate(self.means):
            z_moved = translate(z, classes - first, new, mean)
            features.append(z_moved)
            labels.append(torch.full((len(z_moved),), old))
        self.means = new if first == 0 else torch.cat([self.means, new])
        self.weight, self.bias = fit(torch.cat(features), torch.cat(labels), len(self.means))

    def scores(self, z: Tensor) -> Tensor:
        return F.normalize(z.double(), dim=1) @ self.weight.T + self.bias


def translate(z: Tensor, index: Tensor, means: Tensor, target: Tensor) -> Tensor:
    """The features of the class whose mean is most similar to `target`, shifted so that their mean is `target`."""
    nearest = int(F.cosine_similarity(means, target[None], dim=1).argmax())
    return z[index == nearest] - means[nearest] + target


def fit(z: Tensor, classes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """One-against-all linear SVM on features of unit length."""
    from sklearn.svm import LinearSVC

    if count == 1:
        return torch.zeros(1, z.shape[1], dtype=z.dtype), torch.zeros(1, dtype=z.dtype)
    model = LinearSVC(dual=False).fit(F.normalize(z, dim=1).numpy(), classes.numpy())
    weight, bias = torch.from_numpy(model.coef_), torch.from_numpy(np.atleast_1d(model.intercept_))
    if count == 2:  # scikit-learn keeps one row for two classes
        weight, bias = torch.cat([-weight, weight]), torch.cat([-bias, bias])
    return weight, bias
