"""The dataset that `dataset_name` names: of the Hub, parquet, arrow or idx files, an image folder, or the digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from passlora.config import LOCAL_DATA, DataConfig
from passlora.data.class_names import check_class_name
from passlora.data.idx import has_idx, idx_folder
from passlora.data.image_folder import image_folder
from passlora.data.objects import from_object
from passlora.data.rows import ArrayRows, Split, Splits, at_most, first_classes, hold_out, readable
from passlora.data.tables import TABLE_SUFFIXES, from_table, has_tables, read_hub, read_saved, read_tables
from passlora.errors import PassloraError


@dataclass
class Dataset:
    name: str
    train: Split
    test: Split
    class_names: list[str]


def load_dataset(config: DataConfig, seed: int) -> Dataset:
    """The dataset that `dataset_name` names, with a hold-out if it has no test split, its size limited as asked."""
    train, test, names = read_splits(config)
    if test is None:
        train, test = hold_out(train, config.test_fraction, seed)
    names = names[: config.max_classes]
    train, test = first_classes(train, len(names)), first_classes(test, len(names))
    train = at_most(train, config.max_train_per_class, seed)
    test = at_most(test, config.max_test_per_class, seed)
    if len(test) == 0:
        raise PassloraError(f"the test split of {config.dataset_name} has no images")
    return Dataset(config.dataset_name, train, test, names)


def read_splits(config: DataConfig, known: Sequence[str] = (), data: Any = None) -> Splits:
    """The splits as they are, of `data` if a program holds them. The test split may also have classes of `known`, which
    then join the names."""
    train, test, names = read_any(config, known) if data is None else from_object(config, data, known)
    train = readable(train, config.on_unreadable)
    test = None if test is None else readable(test, config.on_unreadable)
    for name in names:
        try:
            check_class_name(name)
        except PassloraError as error:
            raise PassloraError(f"{config.dataset_name}: {error}") from None
    return train, test, names


def read_any(config: DataConfig, known: Sequence[str]) -> Splits:
    """By the reader of its kind."""
    name, path = config.dataset_name, Path(config.dataset_name)
    if name == "digits":
        return digits()
    if name.startswith(LOCAL_DATA):
        raise PassloraError("these settings come from a run on local data: say where it lies, with --dataset_name")
    if (path.is_dir() and has_tables(path)) or path.suffix in TABLE_SUFFIXES:
        return from_table(config, read_tables(config, path), known)
    if path.is_dir() and (path / "dataset_dict.json").is_file():
        return from_table(config, read_saved(path), known)
    if path.is_dir() and has_idx(path):
        return idx_folder(path)
    if path.is_dir():
        return image_folder(config, path, known)
    is_path = name.startswith((".", "/", "~")) or name.endswith("/") or ("/" in name and Path(path.parts[0]).is_dir())
    if path.exists() or is_path:
        kind = "is not a folder, nor parquet or arrow" if path.exists() else "does not exist"
        raise PassloraError(f"dataset_name {name} {kind}")
    return from_table(config, read_hub(config), known)


def digits() -> Splits:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    source = load_digits()
    images = np.clip(np.rint(source.images * (255 / 16)), 0, 255).astype(np.uint8)
    whole = Split(ArrayRows(images, "digits"), source.target.astype(np.int64))
    return whole, None, [str(digit) for digit in range(10)]
