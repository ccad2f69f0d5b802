"""Classifiers on frozen features, to hold PASS++ against: no gradient, one pass over each task's images.

Each has `add`, which takes the features of one task's training images, and `scores`, over all classes seen so far.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from passlora.method.classifiers.fetril import FeTrIL
from passlora.method.classifiers.ncm import NearestMean
from passlora.method.classifiers.slda import SLDA


class Classifier(Protocol):
    def add(self, z: Tensor, classes: Tensor) -> None:
        """Learn from features (n, d) whose classes are all new; classes are numbered on from those seen before."""

    def scores(self, z: Tensor) -> Tensor:
        """(n, d) -> (n, classes seen); higher is likelier."""


def make_classifier(name: str) -> Classifier:
    kinds: dict[str, type[Classifier]] = {"ncm": NearestMean, "slda": SLDA, "fetril": FeTrIL}
    return kinds[name]()
