"""f and the classifier together: features, and class scores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from passlora.method.classifiers import Classifier
from passlora.method.memory import Memory
from passlora.method.views import rotate
from passlora.network.backbone import Backbone


class Network(nn.Module):
    """`forward` gives features; the classifier is applied by whoever knows on what (see training/learner.py)."""

    def __init__(self, backbone: Backbone, classifier: Classifier) -> None:
        super().__init__()
        self.backbone, self.classifier = backbone, classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)

    @property
    def num_classes(self) -> int:
        return self.classifier.num_classes

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    def num_views(self, modes: list[str]) -> int:
        """How many rotations of an image these inference modes read."""
        return max(self.classifier.num_views(mode) for mode in modes)

    @torch.no_grad()
    def features(self, images: Tensor, views: int = 1, precision: AbstractContextManager[Any] | None = None) -> Tensor:
        """Pixels (n, 3, height, width) in 0..255 -> features (n, views, d) in float32.

        `precision` (an autocast) covers the backbone alone: logits are float32, so that near ties stay apart.
        """
        x = self.backbone.prepare(images)
        with precision or nullcontext():
            return in_pieces(self, rotate(x, views), len(x)).float().unflatten(0, (-1, views))

    @torch.no_grad()
    def scores(self, z: Tensor, modes: list[str], memory: Memory) -> dict[str, Tensor]:
        """Class scores of features (n, views, d) under each inference mode; higher is likelier."""
        return {mode: self._scores(z, mode, memory) for mode in modes}

    def _scores(self, z: Tensor, mode: str, memory: Memory) -> Tensor:
        if mode == "nearest_prototype":
            return -torch.cdist(z[:, 0], memory.class_means())
        return self.classifier.scores(z, mode)


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
