"""MNIST's own format: train-images-idx3-ubyte.gz and its three companions, as MNIST and Fashion-MNIST come."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from passlora.data.rows import ArrayRows, Split, Splits
from passlora.errors import PassloraError

UNSIGNED_BYTES = 8  # the type of numbers, as the header names it
MAX_BYTES = 2**31  # of one file, unpacked


def has_idx(root: Path) -> bool:
    return find(root, "train", "images") is not None


def find(root: Path, split: str, what: str) -> Path | None:
    dimensions = 3 if what == "images" else 1
    names = (f"{split}-{what}-idx{dimensions}-ubyte{ending}" for ending in (".gz", ""))
    return next((root / name for name in names if (root / name).is_file()), None)


def idx_folder(root: Path) -> Splits:
    """Grey images and whole-number labels, of the splits train and t10k; classes are named by their number."""
    train, test = read_split(root, "train"), None
    if find(root, "t10k", "images") is not None:
        test = read_split(root, "t10k")
    classes = int(train.labels.max()) + 1 if len(train) else 0
    if test is not None and len(test) and int(test.labels.max()) >= classes:
        raise PassloraError(f"{root}: the test split has labels that the training split lacks")
    return train, test, [str(label) for label in range(classes)]


def read_split(root: Path, split: str) -> Split:
    paths = [find(root, split, what) for what in ("images", "labels")]
    if paths[0] is None or paths[1] is None:
        raise PassloraError(f"{root}: the split {split} needs both a file of images and a file of labels")
    images, labels = read_idx(paths[0], 3), read_idx(paths[1], 1)
    if len(images) != len(labels):
        raise PassloraError(f"{root}: {split} has {len(images)} images but {len(labels)} labels")
    return Split(ArrayRows(images, paths[0].name), labels.astype(np.int64))


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Magic number, sizes, then bytes; nothing is read beyond what the sizes say."""
    with path.open("rb") as plain, gzip.open(plain) if path.suffix == ".gz" else plain as file:
        try:
            magic = file.read(4)
            if magic != bytes([0, 0, UNSIGNED_BYTES, dimensions]):
                raise PassloraError(f"{path} is no idx file of bytes in {dimensions} dimensions")
            sizes = [int.from_bytes(file.read(4), "big") for _ in range(dimensions)]
            count = math.prod(sizes)
            if count > MAX_BYTES:
                raise PassloraError(f"{path} says that it holds {count:,} numbers: more than passlora reads at once")
            content = file.read(count + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise PassloraError(f"{path} cannot be read ({error})") from None
    if len(content) != count:
        raise PassloraError(f"{path} does not hold the {count:,} numbers that its first bytes say")
    return np.frombuffer(content, dtype=np.uint8).reshape(sizes)
