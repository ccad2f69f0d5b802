"""g: the linear head, which is trained and grows with every task; four nodes a class with rotations."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passlora.config import ROTATED_INFERENCE, MethodConfig
from passlora.method.classifiers.base import Classifier, Linear, register
from passlora.method.views import class_scores
from passlora.method.views import nodes as nodes_of


@register("head")
class Head(Classifier):
    """Logits of all nodes seen so far."""

    trained: ClassVar[bool] = True

    def __init__(self, feature_dim: int, method: MethodConfig) -> None:
        super().__init__(feature_dim, method)
        self.weight = nn.Parameter(torch.empty(0, feature_dim))
        self.bias = nn.Parameter(torch.empty(0))

    @property
    def num_nodes(self) -> int:
        return self.weight.shape[0]

    @property
    def num_classes(self) -> int:
        return self.num_nodes // self.method.num_views

    def grow(self, new_classes: int) -> None:
        """Old rows bit for bit, new rows as nn.Linear initialises them (its bound depends on feature_dim only)."""
        new_nodes = self.method.num_views * new_classes
        fresh = nn.Linear(self.feature_dim, new_nodes, device=self.weight.device, dtype=self.weight.dtype)
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), fresh.weight.detach()]))
        self.bias = nn.Parameter(torch.cat([self.bias.detach(), fresh.bias.detach()]))

    def keep(self, rows: Tensor) -> None:
        nodes = nodes_of(rows, self.method.num_views).to(self.weight.device)
        self.weight = nn.Parameter(self.weight.detach()[nodes])
        self.bias = nn.Parameter(self.bias.detach()[nodes])

    def remains(self) -> str:
        return "what its images taught the network and the nodes of other classes"

    def forward(self, z: Tensor) -> Tensor:
        return F.linear(z, self.weight, self.bias)

    def as_linear(self) -> Linear:
        return Linear(self.weight.detach(), self.bias.detach())

    def num_views(self, mode: str) -> int:
        return self.method.num_views if mode in ROTATED_INFERENCE else 1

    def scores(self, z: Tensor, mode: str) -> Tensor:
        if mode not in ROTATED_INFERENCE:  # the upright view on its own nodes
            return self(z[:, 0])[:, :: self.method.num_views]
        return class_scores(self(z.flatten(0, 1)), self.method.num_views, mode)
