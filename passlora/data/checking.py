"""A folder of images, looked at before it is learnt from: counts, unreadable files, duplicates, what is passed over."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from passlora.data.image_folder import is_image
from passlora.data.pictures import open_picture
from passlora.data.rows import TEST_SPLITS
from passlora.display.progress import progress
from passlora.errors import PassloraError

FEW = 5  # images of a class
NEAR = 3  # bits of 64 that hashes of near duplicates differ in, at most
BANDS = NEAR + 1  # so hashes that differ in so few bits share one of as many parts


@dataclass
class FolderReport:
    """What `passlora check` tells. Paths are relative to the folder."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)  # split ("" without) -> class -> images
    unreadable: dict[str, str] = field(default_factory=dict)  # file -> why
    loose: list[str] = field(default_factory=list)  # images in no class's folder
    passed_over: dict[str, int] = field(default_factory=dict)  # endings of files that are not read
    duplicates: list[list[str]] = field(default_factory=list)  # files of the same pixels
    near: list[list[str]] = field(default_factory=list)  # files that look alike

    @property
    def few(self) -> dict[str, int]:
        """Classes of fewer images to learn from than FEW."""
        learnt = self.counts.get("train", self.counts.get("", {}))
        return {name: count for name, count in learnt.items() if count < FEW}

    def across(self, groups: list[list[str]]) -> list[list[str]]:
        """Those with files of several classes, or of several splits."""
        return [group for group in groups if len({str(Path(name).parent) for name in group}) > 1]

    @property
    def is_fine(self) -> bool:
        found = any(sum(counts.values()) for counts in self.counts.values())
        return found and not (self.unreadable or self.loose or self.few or self.across(self.duplicates))


def check_folder(root: Path) -> FolderReport:
    """Every image is opened once."""
    if not root.is_dir():
        raise PassloraError(f"{root} is not a folder")
    splits = [name for name in ("train", *TEST_SPLITS) if (root / name).is_dir()] or [""]
    report, passed_over = FolderReport(), Counter[str]()
    of_pixels, of_looks = defaultdict(list), dict[str, int]()
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and not is_hidden(path, root)]
    for path in progress(files, desc="looking at images"):
        name = path.relative_to(root).as_posix()
        if not is_image(path):
            passed_over[path.suffix.lower() or "no ending"] += 1
            continue
        split, label = place_of(path.relative_to(root), splits)
        if label is None:
            report.loose.append(name)
            continue
        count = report.counts.setdefault(split, {})
        count.setdefault(label, 0)
        try:
            picture = open_picture(path)
        except PassloraError as error:
            report.unreadable[name] = str(error).split(": ", 1)[-1]
            continue
        count[label] += 1
        of_pixels[hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).digest()].append(name)
        of_looks[name] = look(picture)
    report.passed_over = dict(passed_over)
    report.duplicates = [names for names in of_pixels.values() if len(names) > 1]
    firsts = {names[0] for names in of_pixels.values()}
    report.near = [sorted(group) for group in alike({n: h for n, h in of_looks.items() if n in firsts})]
    return report


def is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def place_of(path: Path, splits: list[str]) -> tuple[str, str | None]:
    """Split and class of a file; no class if it lies in none's folder."""
    parts = path.parts
    split = parts[0] if parts[0] in splits else ""
    inside = parts[1:] if split else parts
    if split != "" or splits == [""]:
        return split, inside[0] if len(inside) > 1 else None
    return split, None


def look(picture: Image.Image) -> int:
    """64 bits: whether each of 8 x 8 places is brighter than the one to its right (dHash)."""
    grey = np.asarray(picture.convert("L").resize((9, 8), Image.Resampling.BILINEAR), dtype=np.int16)
    return int.from_bytes(np.packbits(grey[:, :-1] > grey[:, 1:]).tobytes(), "big")


def alike(hashes: dict[str, int]) -> Iterator[list[str]]:
    """Groups of names whose hashes differ in at most NEAR bits from one to the next. Flat pictures are left out."""
    plain = (0, 2**64 - 1)
    names = [name for name, value in hashes.items() if value not in plain]
    parent = {name: name for name in names}

    def root_of(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for first, second in neighbours(names, hashes):
        parent[root_of(first)] = root_of(second)
    groups = defaultdict(list)
    for name in names:
        groups[root_of(name)].append(name)
    return (group for group in groups.values() if len(group) > 1)


def neighbours(names: Iterable[str], hashes: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Pairs that are near; only those are compared that share one part of their bits."""
    width = 64 // BANDS
    for band in range(BANDS):
        buckets = defaultdict(list)
        for name in names:
            buckets[(hashes[name] >> (band * width)) % 2**width].append(name)
        for bucket in buckets.values():
            for i, first in enumerate(bucket):
                for second in bucket[i + 1 : i + 1 + 1000]:  # of very common looks not all pairs
                    if (hashes[first] ^ hashes[second]).bit_count() <= NEAR:
                        yield first, second
