"""Data that a program holds: a dataset of `datasets` or torch, a DataLoader's, or pairs of image and label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from passlora.config import DataConfig
from passlora.data.pictures import as_picture
from passlora.data.rows import TEST_SPLITS, Split, Splits
from passlora.data.tables import from_table
from passlora.errors import PassloraError

IN_MEMORY = "images in memory"


@dataclass
class PairRows:
    """Pairs of image and label, by their position."""

    pairs: Any

    def image(self, row: int) -> Image.Image:
        return as_picture(self.pairs[row][0])

    def describe(self, row: int) -> str:
        return f"image {row} of the data given"


def from_object(config: DataConfig, data: Any, known: Sequence[str]) -> Splits:
    """Splits of whatever it is; a mapping has them by name, anything else is all to learn from."""
    parts = dict(data) if isinstance(data, Mapping) else {config.dataset_train_split: data}
    if not parts:
        raise PassloraError("the data given is empty")
    if all(hasattr(part, "features") and hasattr(part, "select_columns") for part in parts.values()):
        return from_table(config, parts, known)
    if config.dataset_train_split not in parts:
        raise PassloraError(
            f"the data given has no {config.dataset_train_split!r}; it has {', '.join(map(str, parts))}"
        )
    found = {name: read_pairs(part) for name, part in parts.items()}
    labels, own = found[config.dataset_train_split][1], class_names(parts[config.dataset_train_split])
    names = own or sorted({str(label) for label in labels}, key=as_number)
    names = [*names, *(name for name in known if name not in names)]

    def split(name: str) -> Split:
        pairs, values = found[name]
        numbers = [index_of(value, names, len(own), name) for value in values]
        return Split(PairRows(pairs), np.array(numbers, dtype=np.int64))

    wanted = [config.dataset_test_split] if config.dataset_test_split else list(TEST_SPLITS)
    test = next((name for name in wanted if name in parts), None)
    return split(config.dataset_train_split), None if test is None else split(test), names


def read_pairs(data: Any) -> tuple[Any, list[Any]]:
    """The pairs, and the label of each."""
    if hasattr(data, "batch_sampler"):
        data = data.dataset  # a DataLoader's: its batches are shuffled, and collated
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        try:
            data = list(data)
        except TypeError:
            raise PassloraError(
                f"cannot learn from a {type(data).__name__}: give a path, a dataset of `datasets` or torch, or a list "
                "of (image, label)"
            ) from None
    if len(data) == 0:
        raise PassloraError("the data given is empty")
    targets = getattr(data, "targets", None)  # as torchvision's datasets have them: no image is opened for its label
    if targets is not None and len(targets) == len(data):
        return data, [plain(value) for value in targets]
    labels = []
    for row in range(len(data)):
        pair = data[row]
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise PassloraError(f"item {row} of the data given is no pair of image and label")
        labels.append(plain(pair[1]))
    return data, labels


def plain(label: Any) -> str | int:
    """A label as text or a whole number."""
    value = label.item() if hasattr(label, "item") and getattr(label, "ndim", 0) == 0 else label
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise PassloraError(f"a label is a name or a whole number, not {str(value)[:40]!r}")
    return value


def class_names(data: Any) -> list[str]:
    """Those of torchvision's datasets, also of a part of one; none otherwise."""
    while not hasattr(data, "classes") and hasattr(data, "dataset"):
        data = data.dataset
    names = getattr(data, "classes", None)
    return list(names) if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names) else []


def index_of(label: str | int, names: list[str], own: int, split: str) -> int:
    """A number counts the data's `own` names, which come first; if it has none, the number is a name itself."""
    if isinstance(label, int) and own:
        if 0 <= label < own:
            return label
    elif str(label) in names:
        return names.index(str(label))
    raise PassloraError(f"{split}: the label {label!r} is none of the classes {', '.join(names[:10])}")


def as_number(name: str) -> tuple[int, str]:
    """Whole numbers in their order, before names in theirs."""
    return (int(name), "") if name.isdecimal() else (2**63, name)
