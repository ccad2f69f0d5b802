"""Tables of encoded images: parquet and arrow files, folders of `save_to_disk`, datasets of the Hub."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from passlora.config import DataConfig
from passlora.data.class_names import check_class_name
from passlora.data.rows import TEST_SPLITS, Split, Splits
from passlora.display.progress import silence
from passlora.errors import PassloraError, nearest, redact, redact_logs

TABLE_SUFFIXES = (".parquet", ".arrow")
IMAGE_COLUMNS = ("image", "img", "images", "pixel_values")
LABEL_COLUMNS = ("label", "labels", "fine_label", "target", "class", "category")


@dataclass
class TableRows:
    """A column of encoded images of a `datasets` table."""

    table: Any
    column: str
    name: str

    def image(self, row: int) -> Image.Image:
        cell = self.table[row][self.column]
        if cell is None:
            raise ValueError("the cell is empty")
        source = io.BytesIO(cell["bytes"]) if cell.get("bytes") is not None else cell["path"]
        with Image.open(source) as image:
            image.load()
            return image

    def describe(self, row: int) -> str:
        try:
            path = (self.table[row][self.column] or {}).get("path")
        except Exception:  # describing a damaged row must not hide the damage
            path = None
        return f"row {row} of {self.name}" + (f" ({path})" if path else "")


def has_tables(root: Path) -> bool:
    """Tables at the top, or one folder down; `save_to_disk` folders have a reader of their own."""
    if (root / "dataset_dict.json").is_file():
        return False
    return any(next(root.glob(f"{depth}*{suffix}"), None) for suffix in TABLE_SUFFIXES for depth in ("", "*/"))


def read_tables(config: DataConfig, path: Path) -> Any:
    """Parquet or arrow files; a file belongs to the split whose name its own name, or folder, begins with."""
    import datasets

    silence(datasets.disable_progress_bars)
    if path.is_dir():
        files = sorted(f for suffix in TABLE_SUFFIXES for f in path.rglob(f"*{suffix}"))
    elif path.is_file():
        files = [path]
    else:
        raise PassloraError(f"dataset_name {path} does not exist")
    kinds = {f.suffix for f in files}
    if len(kinds) > 1:
        raise PassloraError(f"{path} mixes parquet and arrow files: keep one kind")
    known = [config.dataset_train_split, config.dataset_test_split, *TEST_SPLITS]
    splits: dict[str, list[str]] = {}
    for file in files:
        parts = file.relative_to(path).parts if path.is_dir() else (file.name,)
        split = next((s for s in known for part in parts if s and part.startswith(s)), "")
        splits.setdefault(split, []).append(str(file))
    if list(splits) == [""]:  # no file says what it is for: all are for training
        splits = {config.dataset_train_split: splits[""]}
    splits.pop("", None)
    try:
        return datasets.load_dataset(kinds.pop()[1:], data_files=splits)
    except Exception as error:  # datasets raises many types of its own
        raise PassloraError(f"{path} cannot be read: {root_cause(error)}") from error


def read_saved(path: Path) -> Any:
    """A folder of `save_to_disk`."""
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except Exception as error:  # datasets raises many types of its own
        raise PassloraError(f"{path} cannot be read: {root_cause(error)}") from error


def read_hub(config: DataConfig) -> Any:
    import datasets

    silence(datasets.disable_progress_bars)
    redact_logs()
    try:
        return datasets.load_dataset(config.dataset_name, config.dataset_config)
    except Exception as error:  # datasets raises many types of its own
        raise PassloraError(
            f"dataset_name {config.dataset_name!r} is no local folder or file, and could not be loaded from the Hub: "
            f"{root_cause(error)}"
        ) from error


def root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return redact(str(error)) or type(error).__name__


def from_table(config: DataConfig, tables: Any, known: Sequence[str]) -> Splits:
    """Splits and columns of a DatasetDict."""
    import datasets

    if config.dataset_train_split not in tables:
        raise PassloraError(
            f"{config.dataset_name} has no split {config.dataset_train_split!r}; it has {', '.join(tables)}"
            f"{nearest(config.dataset_train_split, tables)}"
        )
    features = tables[config.dataset_train_split].features
    image = find_column(config.image_column, "image_column", features, IMAGE_COLUMNS, is_image_feature)
    label = find_column(config.label_column, "label_column", features, LABEL_COLUMNS, is_label_feature)
    names = label_names(tables[config.dataset_train_split], label)
    names = [*names, *(name for name in known if name not in names)]

    def split(name: str) -> Split:
        table = tables[name]
        if name != config.dataset_train_split:
            for column in (image, label):
                if column not in table.features:
                    raise PassloraError(f"split {name!r} has no column {column!r}")
        labels = read_labels(table, label, names, name)
        try:
            table = table.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        except Exception as error:  # datasets and arrow raise many types of their own
            raise PassloraError(f"column {image!r} does not hold images: {root_cause(error)}") from error
        return Split(TableRows(table, image, f"{config.dataset_name}, split {name}"), labels)

    train = split(config.dataset_train_split)
    wanted = [config.dataset_test_split] if config.dataset_test_split else list(TEST_SPLITS)
    found = [name for name in wanted if name in tables and name != config.dataset_train_split]
    if not found and config.dataset_test_split:
        raise PassloraError(
            f"{config.dataset_name} has no split {config.dataset_test_split!r}; it has {', '.join(tables)}"
        )
    return train, split(found[0]) if found else None, names


def find_column(
    given: str | None, flag: str, features: Any, usual: tuple[str, ...], fits: Callable[[Any], bool]
) -> str:
    """The column asked for, or the only one that fits, or the one with a usual name."""
    if given is not None:
        if given not in features:
            raise PassloraError(f"{flag} {given!r} is not one of {', '.join(features)}{nearest(given, features)}")
        return given
    fitting = [name for name, feature in features.items() if fits(feature)]
    for name in usual:
        if name in fitting:
            return name
    if len(fitting) == 1:
        return fitting[0]
    raise PassloraError(f"which column? give --{flag}, one of {', '.join(fitting or features)}")


def is_image_feature(feature: Any) -> bool:
    import datasets

    return isinstance(feature, datasets.Image) or (isinstance(feature, dict) and "bytes" in feature)


def is_label_feature(feature: Any) -> bool:
    import datasets

    kind = getattr(feature, "dtype", "")
    return isinstance(feature, datasets.ClassLabel) or kind == "string" or str(kind).startswith(("int", "uint"))


def label_names(table: Any, column: str) -> list[str]:
    """ClassLabel's names, sorted strings, or the numbers 0..max."""
    feature = table.features[column]
    if hasattr(feature, "names"):
        return [str(name) for name in feature.names]  # `datasets` itself refuses one name for two labels
    if not is_label_feature(feature):
        raise PassloraError(f"label_column {column!r} holds {feature}, not class names or whole numbers")
    values = table[column][:]
    if any(value is None for value in values):
        raise PassloraError(f"column {column!r} has rows without a label")
    if values and isinstance(values[0], str):
        names = sorted(set(values))
        for name in names:
            try:
                check_class_name(name)
            except PassloraError as error:
                raise PassloraError(f"column {column!r}, row {values.index(name)}: {error}") from None
        return names
    return [str(label) for label in range(max(values, default=-1) + 1)]


def read_labels(table: Any, column: str, names: list[str], split: str) -> np.ndarray:
    values = table[column][:]
    if values and isinstance(values[0], str):
        index = {name: i for i, name in enumerate(names)}
        values = [index.get(value, value) for value in values]
    for row, value in enumerate(values):
        if not isinstance(value, int) or not 0 <= value < len(names):
            raise PassloraError(
                f"split {split!r} has the label {value!r} in row {row}, which is none of the training split's "
                f"{len(names)} classes (is it unlabelled? choose another with --dataset_test_split)"
            )
    return np.array(values, dtype=np.int64)
