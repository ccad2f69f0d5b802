"""The features of one task's training images, as whatever is fitted after a task reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# features (n, views, d), classes (n,) counted from 0, positions in the task (n,)
FeatureBatch = tuple[Tensor, Tensor, Tensor]


def alone(tensor: Tensor) -> Tensor:
    """What `reduce` is with one process."""
    return tensor


@dataclass
class TaskFeatures:
    """Iterating gives this process's share, batch by batch, computed as it is asked for; each image once.

    `reduce` adds a tensor up over all processes. With `keep`, what was computed is kept for the next reader.
    """

    compute: Callable[[], Iterable[FeatureBatch]]
    num_classes: int  # of this task: they are 0 to num_classes - 1 here, whatever was learnt before
    class_counts: Tensor  # images of each of them, over all processes
    dim: int
    device: torch.device | str = "cpu"
    reduce: Callable[[Tensor], Tensor] = alone
    keep: bool = False
    rows: Tensor | None = None  # the classes that these are to the classifier; None: its newest ones
    _kept: list[FeatureBatch] | None = None

    @property
    def num_images(self) -> int:
        """Over all processes."""
        return int(self.class_counts.sum())

    def rows_of(self, known: int) -> Tensor:
        """The classes that these are to a classifier of so many."""
        return torch.arange(known - self.num_classes, known) if self.rows is None else self.rows

    def __iter__(self) -> Iterator[FeatureBatch]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[FeatureBatch] = []
        for batch in self.compute():
            if self.keep:
                kept.append(batch)
            yield batch
        self._kept = kept if self.keep else None

    def watched(self, look: Callable[[Tensor, Tensor, Tensor], None]) -> TaskFeatures:
        """The same features; `look` sees every batch that is read."""

        def compute() -> Iterator[FeatureBatch]:
            for batch in self:
                look(*batch)
                yield batch

        return replace(self, compute=compute, keep=False, _kept=None)

    def first_view(self) -> tuple[Tensor, Tensor]:
        """Upright features (n, d) of the whole task, on the CPU, and their classes: for what cannot be added up."""
        z, classes = torch.zeros(self.num_images, self.dim), torch.zeros(self.num_images, dtype=torch.long)
        for features, of_class, positions in self:
            place = positions.cpu()
            z[place], classes[place] = features[:, 0].float().cpu(), of_class.cpu()
        return self.reduce(z), self.reduce(classes)


def of_tensors(z: Tensor, classes: Tensor) -> TaskFeatures:
    """Features that are there already: (n, d) or (n, views, d), with classes counted from 0."""
    views = z[:, None] if z.dim() == 2 else z
    batch = (views, classes, torch.arange(len(z)))
    counts = torch.bincount(classes)
    return TaskFeatures(lambda: [batch], len(counts), counts, z.shape[-1])
