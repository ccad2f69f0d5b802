"""Images and labels: a Hub dataset, parquet/arrow files, an image folder or the embedded digits, read row by row."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageOps

from passlora.config import LOCAL_DATA, DataConfig
from passlora.display.progress import silence
from passlora.errors import PassloraError, nearest, redact, redact_logs

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
TABLE_SUFFIXES = (".parquet", ".arrow")
TEST_SPLITS = ("test", "validation", "valid", "val", "dev")
IMAGE_COLUMNS = ("image", "img", "images", "pixel_values")
LABEL_COLUMNS = ("label", "labels", "fine_label", "target", "class", "category")


class Rows(Protocol):
    """Where images come from."""

    def image(self, row: int) -> Image.Image: ...

    def describe(self, row: int) -> str:
        """How to find the row again: for error messages."""
        ...


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


@dataclass
class Dataset:
    name: str
    train: Split
    test: Split
    class_names: list[str]


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # 16-bit grey: Pillow would clip it to white
        image = Image.fromarray((np.asarray(image, dtype=np.uint16) >> 8).astype(np.uint8))
    return ImageOps.exif_transpose(image).convert("RGB")


# --- the four kinds --------------------------------------------------------------------------------------------


Splits = tuple[Split, Split | None, list[str]]  # training, test if there is one, class names


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


def read_splits(config: DataConfig, known: Sequence[str] = ()) -> Splits:
    """The splits as they are. The test split may also have classes of `known`, which then join the names."""
    name, path = config.dataset_name, Path(config.dataset_name)
    if name == "digits":
        return digits()
    if name.startswith(LOCAL_DATA):
        raise PassloraError("these settings come from a run on local data: say where it lies, with --dataset_name")
    if (path.is_dir() and has_tables(path)) or path.suffix in TABLE_SUFFIXES:
        return from_table(config, read_tables(config, path), known)
    if path.is_dir() and (path / "dataset_dict.json").is_file():
        import datasets

        return from_table(config, datasets.load_from_disk(str(path)), known)
    if path.is_dir():
        return image_folder(config, path, known)
    is_path = name.startswith((".", "/", "~")) or name.endswith("/") or ("/" in name and Path(path.parts[0]).is_dir())
    if path.exists() or is_path:
        kind = "is not a folder, nor parquet or arrow" if path.exists() else "does not exist"
        raise PassloraError(f"dataset_name {name} {kind}")
    return from_table(config, read_hub(config), known)


@dataclass
class ArrayRows:
    """Images in memory."""

    images: np.ndarray
    name: str

    def image(self, row: int) -> Image.Image:
        return Image.fromarray(self.images[row])

    def describe(self, row: int) -> str:
        return f"row {row} of {self.name}"


def digits() -> Splits:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    source = load_digits()
    images = np.clip(np.rint(source.images * (255 / 16)), 0, 255).astype(np.uint8)
    whole = Split(ArrayRows(images, "digits"), source.target.astype(np.int64))
    return whole, None, [str(digit) for digit in range(10)]


@dataclass
class FolderRows:
    """One file an image."""

    paths: list[Path]

    def image(self, row: int) -> Image.Image:
        with Image.open(self.paths[row]) as image:
            image.load()
            return image

    def describe(self, row: int) -> str:
        return f"{self.paths[row]} (row {row})"


def image_folder(config: DataConfig, root: Path, known: Sequence[str]) -> Splits:
    """`root/<split>/<class>/*`, or `root/<class>/*` without a test split."""
    train_root = root / config.dataset_train_split
    if not train_root.is_dir():
        asked = config.dataset_train_split != "train" or config.dataset_test_split is not None
        found = [name for name in ("train", *TEST_SPLITS) if (root / name).is_dir()]
        if asked or found:
            has = f"; it has {', '.join(found)}" if found else ""
            raise PassloraError(f"{root} has no folder {config.dataset_train_split!r} to train on{has}")
        whole, names = read_folder(root, None)
        return whole, None, names
    train, names = read_folder(train_root, None)
    wanted = [config.dataset_test_split] if config.dataset_test_split else list(TEST_SPLITS)
    found = [split for split in wanted if (root / split).is_dir()]
    if not found:
        if config.dataset_test_split:
            raise PassloraError(f"no folder {root / config.dataset_test_split} for dataset_test_split")
        return train, None, names
    names = [*names, *(name for name in known if name not in names)]
    test, _ = read_folder(root / found[0], names)
    return train, test, names


def read_folder(root: Path, names: list[str] | None) -> tuple[Split, list[str]]:
    """Class folders in alphabetical order; with `names` given, no other class may appear."""
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    files = {folder.name: [f for f in sorted(folder.rglob("*")) if is_image(f)] for folder in folders}
    files = {name: paths for name, paths in files.items() if paths}
    if not files:
        raise PassloraError(f"no images in {root}: expected {root}/<class>/*.jpg (or {', '.join(IMAGE_SUFFIXES[1:])})")
    names = sorted(files) if names is None else names
    for name in files:
        if name not in names:
            raise PassloraError(f"{root} has a class {name!r} that the training split has not{nearest(name, names)}")
    paths = [path for name in sorted(files) for path in files[name]]
    labels = [names.index(name) for name in sorted(files) for _ in files[name]]
    return Split(FolderRows(paths), np.array(labels, dtype=np.int64)), names


def is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


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
        return list(feature.names)
    if not is_label_feature(feature):
        raise PassloraError(f"label_column {column!r} holds {feature}, not class names or whole numbers")
    values = table[column][:]
    if any(value is None for value in values):
        raise PassloraError(f"column {column!r} has rows without a label")
    if values and isinstance(values[0], str):
        return sorted(set(values))
    return [str(label) for label in range(max(values, default=-1) + 1)]


def read_labels(table: Any, column: str, names: list[str], split: str) -> np.ndarray:
    values = table[column][:]
    if values and isinstance(values[0], str):
        index = {name: i for i, name in enumerate(names)}
        values = [index.get(value, value) for value in values]
    wrong = [value for value in values if not isinstance(value, int) or not 0 <= value < len(names)]
    if wrong:
        raise PassloraError(
            f"split {split!r} has the label {wrong[0]!r}, which is none of the training split's {len(names)} classes "
            "(is it unlabelled? choose another with --dataset_test_split)"
        )
    return np.array(values, dtype=np.int64)


# --- choosing rows ---------------------------------------------------------------------------------------------


@dataclass
class ChosenRows:
    """Some rows of another source."""

    source: Rows
    chosen: np.ndarray

    def image(self, row: int) -> Image.Image:
        return self.source.image(int(self.chosen[row]))

    def describe(self, row: int) -> str:
        return self.source.describe(int(self.chosen[row]))


def choose(split: Split, rows: np.ndarray) -> Split:
    return Split(ChosenRows(split.rows, rows), split.labels[rows])


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
    if per_class is None or len(split) == 0:
        return split
    kept = np.concatenate([rows[:per_class] for rows in shuffled_by_class(split, seed)])
    return choose(split, np.sort(kept))
