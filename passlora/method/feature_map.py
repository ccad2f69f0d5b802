"""What a fitted classifier reads: the features of one or four views side by side, as they are or lifted at random.

A lift's random numbers are made from its sizes by numpy's legacy generator, whose stream is frozen: they are never
stored, and a model reads the same for ever.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from passlora.config import MethodConfig

BANDWIDTH = 3.0  # of the Fourier lift, for features of unit length: docs/beyond.md tells where it was chosen


@functools.lru_cache(maxsize=8)
def gaussian(rows: int, columns: int) -> Tensor:
    """Independent standard normal numbers, the same for ever."""
    with torch.inference_mode(False):  # they are kept, also for whoever computes gradients later
        return torch.from_numpy(np.random.RandomState(0).standard_normal((rows, columns))).float()


@functools.lru_cache(maxsize=8)
def phases(count: int) -> Tensor:
    """Independent angles."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.random.RandomState(1).uniform(0, 2 * math.pi, count)).float()


def relu_lift(x: Tensor, width: int) -> Tensor:
    """RanPAC: max(0, x R)."""
    return F.relu(x @ gaussian(x.shape[1], width).to(x))


def gelu_lift(x: Tensor, width: int) -> Tensor:
    """AnaCP: GELU(x R), features of unit length."""
    return F.gelu(F.normalize(x, dim=1) @ gaussian(x.shape[1], width).to(x))


def fourier_lift(x: Tensor, width: int) -> Tensor:
    """Random Fourier features of a Gaussian kernel on x of unit length: sqrt(2 / M) cos(x R / sigma + u)."""
    x = F.normalize(x, dim=1)
    turned = x @ (gaussian(x.shape[1], width).to(x) / BANDWIDTH) + phases(width).to(x)
    return math.sqrt(2 / width) * torch.cos(turned)


LIFTS = {"relu": relu_lift, "gelu": gelu_lift, "fourier": fourier_lift}


class FeatureMap:
    """(n, views, d) -> (n, width)."""

    def __init__(self, feature_dim: int, views: int, lift: str = "none", width: int = 0) -> None:
        self.views, self.lift = views, lift
        self.width = views * feature_dim if lift == "none" else width

    @property
    def is_plain(self) -> bool:
        """Whether it gives the features of the upright image as they are."""
        return self.lift == "none" and self.views == 1

    def __call__(self, z: Tensor) -> Tensor:
        x = z[:, : self.views]
        if self.lift == "none":
            return x.flatten(1)
        # Each view counts alike, however long its features are.
        return LIFTS[self.lift](F.normalize(x, dim=2).flatten(1) if self.views > 1 else x[:, 0], self.width)


def make_map(feature_dim: int, method: MethodConfig) -> FeatureMap:
    """The map that the configuration names."""
    return FeatureMap(feature_dim, method.classifier_views, method.lift, method.lift_width)
