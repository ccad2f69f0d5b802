"""`passlora learn`: a lesson from sums against the same lesson by PASS++, and against one look at its images."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from passlora import PassLora
from passlora.folder.manifest import TaskEntry, now
from passlora.method.classifiers import make_classifier
from passlora.method.features import of_tensors

from .timing import Row, interleave, ratios, second

PRESETS = ("slda", "passlora", "pass++")


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
    yield Row("learn by pass++, over passlora", ratios(seconds, "pass++", "passlora"), "times")


def known_classes(rounds: int) -> Iterator[Row]:
    """The same three classes by the preset passlora, for models that know 100 and 10,000 classes already."""
    with tempfile.TemporaryDirectory() as place:
        data = make_images(Path(place) / "new", 3)
        few, many = (knowing(classes) for classes in (100, 10_000))
        pixels = few._load(data, {}).train.cache
        assert isinstance(pixels, torch.Tensor)

        def lesson(model: PassLora) -> float:
            learner = model.learner
            before, classes = learner.state(), learner.network.num_classes
            began = time.perf_counter()
            PassLora(learner, list(model.tasks)).learn(data)
            seconds = time.perf_counter() - began
            learner.network.classifier = make_classifier(learner.network.backbone.feature_dim, learner.config.method)
            learner.restore(1, classes, before)
            return seconds

        sides = {
            "100": lambda: lesson(few),
            "10,000": lambda: lesson(many),
            "look": second(lambda: few.learner.network.features(pixels, 4)),
        }
        seconds = interleave(sides, rounds)
    allowed = [3 * look + 1 for look in seconds["look"]]
    yield Row("one pass over the lesson's 150 images in four views, vit-mini", seconds["look"], "s")
    for known in ("100", "10,000"):
        yield Row(f"learn 3 classes x 50 images by passlora, {known} classes known", seconds[known], "s")
    shares = [spent / room for spent, room in zip(seconds["100"], allowed, strict=True)]
    yield Row("that with 100 known, over three such passes and a second", shares, "times", "<= 1")
    yield Row("that with 10,000 known, over 100", ratios(seconds, "10,000", "100"), "times", "<= 2")


def knowing(classes: int) -> PassLora:
    """A model of so many classes, whose features are random."""
    model = PassLora.create(preset="passlora", adapt_tasks="none")
    z = torch.randn(2 * classes, 4, 192, generator=torch.Generator().manual_seed(0))
    model.learner.network.classifier.grow(classes)
    model.learner.network.classifier.fit_task(of_tensors(z, torch.arange(classes).repeat_interleave(2)))
    model.learner.task = 1
    model.tasks = [TaskEntry([f"class {i}" for i in range(classes)], now())]
    return model


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
