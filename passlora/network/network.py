"""f and g together: features, class scores, and growth."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from passlora.config import ROTATED_INFERENCE
from passlora.method.classifiers.head import Head
from passlora.method.memory import Memory
from passlora.method.views import class_scores, rotate
from passlora.network.backbone import Backbone


class Network(nn.Module):
    """`forward` gives features; the head is applied by whoever knows on what (see learner.py)."""

    def __init__(self, backbone: Backbone, num_views: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = Head(backbone.feature_dim)
        self.num_views = num_views

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)

    @property
    def num_classes(self) -> int:
        return self.head.num_nodes // self.num_views

    def grow(self, new_classes: int) -> None:
        self.head.grow(self.num_views * new_classes)

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    @torch.no_grad()
    def scores(
        self,
        images: Tensor,
        modes: list[str],
        memory: Memory | None = None,
        precision: AbstractContextManager[Any] | None = None,
    ) -> dict[str, Tensor]:
        """Class scores of uint8 images under each inference mode, from one pass; higher is likelier.

        `precision` (an autocast) covers the backbone alone: logits are float32, so that near ties stay apart.
        """
        x = self.backbone.prepare(images)
        views = self.num_views if any(mode in ROTATED_INFERENCE for mode in modes) else 1
        with precision or nullcontext():
            z = in_pieces(self, rotate(x, views), len(x)).float()
        logits = self.head(z)
        scores = {}
        for mode in modes:
            if mode == "nearest_prototype":
                if memory is None or memory.num_classes == 0:
                    raise ValueError("nearest_prototype needs the prototypes")
                scores[mode] = -torch.cdist(z[::views], memory.class_means())
            elif views == 1:  # the 0-degree view on its own nodes
                scores[mode] = logits[:, :: self.num_views]
            else:
                scores[mode] = class_scores(logits, views, mode)
        return scores


def in_pieces(run: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> Tensor:
    """Features of `x`, `rows` at a time, so that four views need no more memory than one; fewer where a GPU is full."""
    return torch.cat([in_halves(run, part) for part in x.split(rows)])


def in_halves(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    try:
        return run(x)
    except torch.OutOfMemoryError:
        if len(x) == 1:
            raise
    return torch.cat([in_halves(run, half) for half in x.chunk(2)])
