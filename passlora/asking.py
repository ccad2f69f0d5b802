"""The commands that ask a model: `predict` and `info`."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import PassloraError
from .manifest import read_manifest
from .report import table


def info(name: str) -> str:
    """Tasks, classes, dates, accuracies and sizes, from the files alone."""
    folder = Path(name)
    manifest = read_manifest(folder)
    settings = manifest.settings
    lora = f"LoRA r = {settings['lora_r']}" if settings["lora_r"] else "trained whole"
    rows = [["task", "classes", "learnt", "accuracy %", "kB", ""]]
    for i, task in enumerate(manifest.tasks):
        part = folder / f"task_{i:02d}"
        size = sum(f.stat().st_size for f in part.glob("*") if f.is_file()) / 1024
        accuracy = "" if task.accuracy is None else f"{task.accuracy:.1f}"
        shown = ", ".join(task.classes[:6]) + (", ..." if len(task.classes) > 6 else "")
        rows.append([str(i), str(len(task.classes)), task.learnt, accuracy, f"{size:.0f}", shown])
    total = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1024
    return (
        f"{name}: {settings['model_name_or_path']}, {lora}, {settings['preset']}, {settings['inference']} inference\n"
        f"{len(manifest.classes)} classes in {len(manifest.tasks)} tasks, {total:,.0f} kB in all\n\n{table(rows)}"
    )


def predict(arguments: argparse.Namespace) -> int:
    """Writes a line an image as soon as its batch is done; returns the exit code."""
    for name in ("top_k", "batch_size"):
        if getattr(arguments, name) < 1:
            raise PassloraError(f"{name} must be at least 1, got {getattr(arguments, name)}")
    paths = list(find_images(arguments.images))
    read_manifest(Path(arguments.model))  # refuse before the seconds that torch takes
    from .model import PassLora

    model = PassLora.from_pretrained(arguments.model, arguments.task, arguments.model_name_or_path)
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
        print(f"passlora: {unreadable} of {len(paths)} images could not be read", file=sys.stderr)
    return 1 if unreadable else 0


def find_images(names: list[str]) -> Iterator[Path]:
    """Files as named; folders in order of their files' names."""
    from .data import is_image

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
    from PIL import Image

    from .data import to_rgb

    try:
        with Image.open(path) as image:
            return to_rgb(image)
    except Exception as error:  # Pillow raises many types on damaged files
        reason = "no such file" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
        print(f"passlora: skipped {path}: {reason}", file=sys.stderr)
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
