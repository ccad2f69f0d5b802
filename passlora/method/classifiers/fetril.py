"""FeTrIL (Petit et al., 2023): old classes are imitated by new images' features, moved to the old class's mean."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from passlora.config import MethodConfig
from passlora.method.classifiers.base import Linear, register
from passlora.method.classifiers.ncm import ClassMeans
from passlora.method.features import TaskFeatures


@register("fetril")
class FeTrIL(ClassMeans):
    """A linear SVM, fitted anew with each task on the new features and the translated ones."""

    class_rows = (*ClassMeans.class_rows, "weight", "bias")

    weight: Tensor
    bias: Tensor

    def __init__(self, feature_dim: int, method: MethodConfig) -> None:
        super().__init__(feature_dim, method)
        self.register_buffer("weight", torch.zeros(0, feature_dim))
        self.register_buffer("bias", torch.zeros(0))

    def grow(self, new_classes: int) -> None:
        super().grow(new_classes)
        self.enlarge("weight", new_classes)
        self.enlarge("bias", new_classes)

    def fit_task(self, features: TaskFeatures) -> None:
        z, index = features.first_view()
        z, old = z.double(), self.num_classes - features.num_classes
        count = torch.bincount(index, minlength=features.num_classes)
        total = torch.zeros(features.num_classes, features.dim, dtype=z.dtype).index_add_(0, index, z)
        self.set_means(total, count)
        new = total / count[:, None]
        parts, labels = [z], [index + old]
        for label, mean in enumerate(self.means[:old].double().cpu()):
            moved = translate(z, index, new, mean)
            parts.append(moved)
            labels.append(torch.full((len(moved),), label))
        weight, bias = fit(torch.cat(parts), torch.cat(labels), self.num_classes)
        self.weight.copy_(weight)
        self.bias.copy_(bias)
        self.forget_computed()

    def as_linear(self) -> Linear:
        return Linear(self.weight, self.bias, unit_length=True)


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
