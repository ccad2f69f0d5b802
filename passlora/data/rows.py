"""Where images come from, row by row, and which rows are taken."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image

from passlora.data.pictures import to_rgb
from passlora.display.progress import progress
from passlora.errors import PassloraError

log = logging.getLogger(__name__)
TEST_SPLITS = ("test", "validation", "valid", "val", "dev")  # names that a test split may have


class Rows(Protocol):
    """Where images come from."""

    def image(self, row: int) -> Image.Image: ...

    def describe(self, row: int) -> str:
        """How to find the row again: for error messages."""
        ...


@dataclass
class ArrayRows:
    """Images in memory."""

    images: np.ndarray
    name: str

    def image(self, row: int) -> Image.Image:
        return Image.fromarray(self.images[row])

    def describe(self, row: int) -> str:
        return f"row {row} of {self.name}"


@dataclass
class ChosenRows:
    """Some rows of another source."""

    source: Rows
    chosen: np.ndarray

    def image(self, row: int) -> Image.Image:
        return self.source.image(int(self.chosen[row]))

    def describe(self, row: int) -> str:
        return self.source.describe(int(self.chosen[row]))


@dataclass
class Split:
    rows: Rows
    labels: np.ndarray  # the dataset's labels, one a row

    def __len__(self) -> int:
        return len(self.labels)

    def rgb(self, row: int) -> Image.Image:
        """The image of a row, upright and in RGB."""
        try:
            return to_rgb(self.rows.image(row))
        except Exception as error:  # Pillow raises many types on damaged files
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PassloraError(f"cannot read {self.rows.describe(row)}: {reason}") from error


Splits = tuple[Split, Split | None, list[str]]  # training, test if there is one, class names


def choose(split: Split, rows: np.ndarray) -> Split:
    return Split(ChosenRows(split.rows, rows), split.labels[rows])


def readable(split: Split, on_unreadable: str) -> Split:
    """With `skip`, without the images that cannot be read, each of which is named: every one is opened to find out."""
    if on_unreadable == "error":
        return split
    kept = []
    for row in progress(range(len(split)), desc="looking for unreadable images"):
        try:
            split.rgb(row)
        except PassloraError as error:
            log.warning(f"skipped: {error}")
        else:
            kept.append(row)
    if not kept and len(split):
        raise PassloraError(f"none of {len(split)} images can be read")
    return split if len(kept) == len(split) else choose(split, np.array(kept))


def first_classes(split: Split, count: int) -> Split:
    rows = np.flatnonzero(split.labels < count)
    return split if len(rows) == len(split) else choose(split, rows)


def shuffled_by_class(split: Split, seed: int) -> Iterable[np.ndarray]:
    generator = np.random.default_rng([seed, 0xDA7A])
    for label in np.unique(split.labels):
        yield generator.permutation(np.flatnonzero(split.labels == label))


def hold_out(split: Split, fraction: float, seed: int) -> tuple[Split, Split]:
    """A seeded stratified hold-out: `fraction` of each class, at least one image, never the last one."""
    train, test = [], []
    for rows in shuffled_by_class(split, seed):
        count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
        test.append(rows[:count])
        train.append(rows[count:])
    if not train:
        raise PassloraError("the dataset has no images")
    return choose(split, np.sort(np.concatenate(train))), choose(split, np.sort(np.concatenate(test)))


def at_most(split: Split, per_class: int | None, seed: int) -> Split:
    """At most `per_class` rows of each class."""
    return split if per_class is None or len(split) == 0 else choose(split, kept_rows(split, per_class, seed))


def kept_rows(split: Split, per_class: int | None, seed: int) -> np.ndarray:
    """Which rows `at_most` leaves."""
    if per_class is None:
        return np.arange(len(split))
    return np.sort(np.concatenate([rows[:per_class] for rows in shuffled_by_class(split, seed)]))
