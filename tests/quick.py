"""What makes tests of whole models quick: no pictures drawn where none is looked at, small networks, few images."""

from __future__ import annotations

import atexit
import gc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from passlora.display import figures

# The smallest transformer of timm, as it is when it is born.
SMALL = {"model_name_or_path": "test_vit", "pretrained": False, "image_size": 32}
SMALL_FLAGS = ["--model_name_or_path", "test_vit", "--pretrained", "false", "--image_size", "32"]
atexit.register(gc.unfreeze)  # see `quick`: what is frozen would be called a leak at the end


def draw_nothing(figure, target, **options):
    Image.new("L", (1, 1)).save(target, format="PNG")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """For the tests of a module that imports it. Its fixtures of a wider scope draw their pictures."""
    monkeypatch.setattr(figures, "write", draw_nothing)
    gc.collect()
    gc.freeze()  # each task ends with a collection, which would walk through all that was ever imported


def write_digits(root: Path, digits, count: int, start: int = 0, name: str = "digit {}") -> Path:
    """`count` images of each digit as PNG files, from the `start`-th on."""
    source = load_digits()
    for digit in digits:
        folder = root / name.format(digit)
        folder.mkdir(parents=True, exist_ok=True)
        for row in np.flatnonzero(source.target == digit)[start : start + count]:
            Image.fromarray((source.images[row] * 15.9).astype(np.uint8)).save(folder / f"{row}.png")
    return root
