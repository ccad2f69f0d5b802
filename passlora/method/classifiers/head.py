"""g: the linear head, which grows with every task."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Head(nn.Module):
    """Logits of all nodes seen so far."""

    def __init__(self, feature_dim: int) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.weight = nn.Parameter(torch.empty(0, feature_dim))
        self.bias = nn.Parameter(torch.empty(0))

    @property
    def num_nodes(self) -> int:
        return self.weight.shape[0]

    def grow(self, new_nodes: int) -> None:
        """Old rows bit for bit, new rows as nn.Linear initialises them (its bound depends on feature_dim only)."""
        fresh = nn.Linear(self.feature_dim, new_nodes, device=self.weight.device, dtype=self.weight.dtype)
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), fresh.weight.detach()]))
        self.bias = nn.Parameter(torch.cat([self.bias.detach(), fresh.bias.detach()]))

    def forward(self, z: Tensor) -> Tensor:
        return nn.functional.linear(z, self.weight, self.bias)
