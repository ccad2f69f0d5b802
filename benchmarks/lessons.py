"""`passlora learn`: a lesson by a classifier that needs no training against the same lesson by PASS++."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from passlora import PassLora

from .timing import Row, interleave, ratios

PRESETS = ("slda", "pass++")


def lessons(rounds: int) -> Iterator[Row]:
    """Three classes of 50 images of 32 pixels for a model that knows ten; learnt and saved, after start-up."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        first, second = (make_images(folder / name, classes) for name, classes in (("first", 10), ("second", 3)))
        for preset in PRESETS:
            model = PassLora.create(preset=preset)
            model.learn(first, num_train_epochs=1)
            model.save_pretrained(folder / preset)

        def lesson(preset: str) -> float:
            copy = folder / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder / preset, copy)
            model = PassLora.from_pretrained(copy, num_train_epochs=15)
            began = time.perf_counter()
            model.learn(second)
            model.save_pretrained(copy)
            return time.perf_counter() - began

        sides = {preset: lambda preset=preset: lesson(preset) for preset in PRESETS}  # type: ignore[misc]
        seconds = interleave(sides, rounds, warmup=0)
    for preset in PRESETS:
        yield Row(f"learn 3 classes x 50 images by {preset}, vit-mini", seconds[preset], "s")
    yield Row("learn by pass++, over slda", ratios(seconds, "pass++", "slda"), "times", ">= 20")


def make_images(folder: Path, classes: int) -> Path:
    """Noise of another brightness a class: what it shows does not matter here."""
    rng = np.random.default_rng(classes)
    for number in range(classes):
        part = folder / f"{folder.name}_{number}"
        part.mkdir(parents=True)
        for i in range(50):
            pixels = rng.integers(0, 100 + 10 * number, (32, 32, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(part / f"{i}.png")
    return folder
