"""passlora predict: what is on images."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from passlora.cli.arguments import add_command, add_model, add_task_flags, load_model
from passlora.cli.output import warn
from passlora.errors import PassloraError


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "predict",
        "name what is on images",
        "Name what is on images. Unreadable files are reported and skipped; the exit code is then 1.",
    )
    add_model(parser)
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="image files, or folders of them")
    parser.add_argument("--top_k", type=int, default=5, help="classes to show an image (default: 5)")
    parser.add_argument("--views", type=int, help="1, or 4 for the ensemble of rotations (default: the model's own)")
    parser.add_argument("--batch_size", type=int, default=64, help="images a step (default: 64)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object a line")
    form.add_argument("--csv", action="store_true", help="comma-separated values, with a header")
    add_task_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Writes a line an image as soon as its batch is done."""
    for name in ("top_k", "batch_size"):
        if getattr(arguments, name) < 1:
            raise PassloraError(f"{name} must be at least 1, got {getattr(arguments, name)}")
    paths = list(find_images(arguments.images))
    model = load_model(arguments)
    writer = Writer(arguments.json, arguments.csv)
    unreadable = 0
    for start in range(0, len(paths), arguments.batch_size):
        readable, images = [], []
        for path in paths[start : start + arguments.batch_size]:
            image = read(path)
            if image is None:
                unreadable += 1
                continue
            readable.append(path)
            images.append(image)
        answers = model.predict(images, arguments.top_k, arguments.views, arguments.batch_size)
        for path, answer in zip(readable, answers, strict=True):
            writer.write(path, [(p.label, p.probability) for p in answer])
    if unreadable:
        warn(f"{unreadable} of {len(paths)} images could not be read")
    return 1 if unreadable else 0


def find_images(names: list[str]) -> Iterator[Path]:
    """Files as named; folders in order of their files' names."""
    from passlora.data.image_folder import is_image

    for name in names:
        path = Path(name)
        if path.is_dir():
            found = [file for file in sorted(path.rglob("*")) if is_image(file)]
            if not found:
                raise PassloraError(f"no images in {path}")
            yield from found
        else:
            yield path


def read(path: Path) -> Any:
    """The image in RGB, or None after saying why not."""
    from passlora.data.pictures import open_picture

    try:
        return open_picture(path)
    except PassloraError as error:
        warn(f"skipped {str(error).removeprefix('cannot read ')}")
        return None


class Writer:
    """Predictions to standard output, as text, JSON lines or CSV."""

    def __init__(self, as_json: bool, as_csv: bool) -> None:
        self.as_json, self.csv = as_json, csv.writer(sys.stdout) if as_csv else None
        if self.csv:
            self.csv.writerow(["file", "rank", "label", "probability"])

    def write(self, path: Path, answer: list[tuple[str, float]]) -> None:
        if self.as_json:
            ranked = [{"label": label, "probability": round(p, 6)} for label, p in answer]
            print(json.dumps({"file": str(path), "predictions": ranked}))
        elif self.csv:
            self.csv.writerows([str(path), rank, label, f"{p:.6f}"] for rank, (label, p) in enumerate(answer, start=1))
        else:
            print(f"{path}: " + ", ".join(f"{label} {100 * p:.1f}%" for label, p in answer))
        sys.stdout.flush()
