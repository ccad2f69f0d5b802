"""Features of images as they are: those of a network that is no longer trained are computed once and kept."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from passlora.data.batches import Images, eval_plans
from passlora.display.progress import progress
from passlora.network.network import Network

Known = tuple[Tensor, np.ndarray]  # features (rows of the split, views, d), and which of the rows are there


class FeatureReader:
    """Reads rows of `Images` through the network, batch by batch."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.batch_size = accelerator, 1
        self._known: WeakKeyDictionary[Images, Known] = WeakKeyDictionary()

    def forget(self) -> None:
        """The network is about to change."""
        self._known.clear()

    def read(
        self, network: Network, images: Images, rows: np.ndarray, views: int, what: str, keep: bool = False
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Rows and their features (n, views, d) on the device; with `keep` what was read before is not read again."""
        if not keep:
            yield from self._compute(network, images, rows, views, what)
            return
        z, known = self._room(network, images, views)
        for part, features in self._compute(network, images, rows[~known[rows]], views, what):
            z[torch.from_numpy(part)], known[part] = features.cpu(), True
        for start in range(0, len(rows), self.batch_size):
            part = rows[start : start + self.batch_size]
            yield part, z[torch.from_numpy(part)].to(self.accelerator.device)

    def count(self, images: Images, views: int) -> int:
        """How many rows are known, in so many views."""
        there = self._known.get(images)
        return 0 if there is None or there[0].shape[1] < views else int(there[1].sum())

    def _compute(
        self, network: Network, images: Images, rows: np.ndarray, views: int, what: str
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        plans = eval_plans(rows, self.batch_size, 0, 1)
        for batch in progress(images.batches(plans), desc=what, unit="batch", total=len(plans)):
            pixels = batch.images.to(self.accelerator.device, non_blocking=True)
            yield batch.rows, network.features(pixels, views, self.accelerator.autocast())

    def _room(self, network: Network, images: Images, views: int) -> Known:
        there = self._known.get(images)
        if there is None or there[0].shape[1] < views:
            empty = torch.zeros(len(images), views, network.backbone.feature_dim)
            there = self._known[images] = (empty, np.zeros(len(images), dtype=bool))
        return there
