"""Folders of image files, a folder a class."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from passlora.config import DataConfig
from passlora.data.pictures import IMAGE_SUFFIXES, MODERN_SUFFIXES, readable_suffixes
from passlora.data.rows import TEST_SPLITS, Split, Splits
from passlora.errors import PassloraError, nearest

log = logging.getLogger(__name__)


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
    tell_what_is_passed_over(root, folders)
    names = sorted(files) if names is None else names
    for name in files:
        if name not in names:
            raise PassloraError(f"{root} has a class {name!r} that the training split has not{nearest(name, names)}")
    paths = [path for name in sorted(files) for path in files[name]]
    labels = [names.index(name) for name in sorted(files) for _ in files[name]]
    return Split(FolderRows(paths), np.array(labels, dtype=np.int64)), names


def tell_what_is_passed_over(root: Path, folders: list[Path]) -> None:
    """A line each: photographs in no class's folder, and of kinds that are not read here."""
    loose = sum(is_image(path) for path in root.iterdir() if path.is_file())
    if loose:
        log.warning(f"{loose} images lie in {root} itself, in no class's folder: they are not read")
    unread = set(MODERN_SUFFIXES) - set(readable_suffixes())
    found = (
        [path for folder in folders for path in folder.rglob("*") if path.suffix.lower() in unread] if unread else []
    )
    if found:
        kinds = ", ".join(sorted({path.suffix.lower() for path in found}))
        log.warning(f"{len(found)} files of {root} are not read ({kinds}): pip install 'passlora[heif]' reads them")


def is_image(path: Path) -> bool:
    return path.suffix.lower() in readable_suffixes() and not path.name.startswith(".")
