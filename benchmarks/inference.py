"""Asking: images a second with one view and four, adapter beside the weights or merged; how soon a command answers."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor

from .scene import DEIT, LORA, Scene
from .timing import Row, interleave, ratios


def inference(rounds: int) -> Iterator[Row]:
    """uint8 images to class scores; merged and plain timm from normalised input, as a server would run them."""
    cases = (
        ("vit-mini", LORA, 32, partial(timm.create_model, "deit_tiny_patch16_224", img_size=64, depth=6)),
        ("DeiT-S/16", DEIT, 4, partial(timm.create_model, "deit_small_patch16_224")),
    )
    for name, settings, count, create in cases:
        scene = Scene(settings, count, 1)
        network, images = scene.learner.network.eval(), scene.images.cache
        assert images is not None
        plain = create(num_classes=network.classifier.num_nodes).eval()
        merged = scene.merged()
        x = network.backbone.prepare(images)
        sides = {
            "one view": partial(scores, scene, images, "single"),
            "four views": partial(scores, scene, images, "multiview"),
            "merged": torch.no_grad()(partial(merged, x)),
            "timm": torch.no_grad()(partial(plain, x)),
        }
        seconds = interleave(sides, 4 * rounds, warmup=2)
        for side in sides:
            yield Row(f"{name}, batch {count}: {side}", [count / s for s in seconds[side]], "images/s")
        yield Row(f"{name}: four views, over one", ratios(seconds, "four views", "one view"), "times", "<= 4.1")
        yield Row(f"{name}: merged, over plain timm", ratios(seconds, "merged", "timm"), "times", "<= 1.03")


def scores(scene: Scene, images: Tensor, mode: str) -> Tensor:
    network = scene.learner.network
    z = network.features(images, network.num_views([mode]))
    return network.scores(z, [mode], scene.learner.memory)[mode]


def start_up(rounds: int) -> Iterator[Row]:
    """Seconds of whole commands."""
    command = [sys.executable, "-m", "passlora"]
    small = ["--compare", "none", "--max_train_per_class", "2", "--num_train_epochs", "1"]
    with tempfile.TemporaryDirectory() as folder:
        run, picture = str(Path(folder) / "run"), Path(folder) / "digit.png"
        subprocess.run([*command, "train", *small, "--output_dir", run], check=True, capture_output=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(picture)
        calls = {
            "passlora --help": ["--help"],
            "passlora info MODEL": ["info", run],
            "passlora predict MODEL IMAGE": ["predict", run, str(picture)],
        }
        sides = {
            name: partial(subprocess.run, [*command, *call], check=True, capture_output=True)
            for name, call in calls.items()
        }
        for name, seconds in interleave(sides, rounds).items():
            yield Row(name, seconds, "s")
        asked = {"predict": [*command, *calls["passlora predict MODEL IMAGE"]]}
        asked["imports"] = [sys.executable, "-c", "import torch, timm"]
        spent = interleave({name: partial(cpu_seconds, call) for name, call in asked.items()}, rounds)
        what = "passlora predict MODEL IMAGE: CPU seconds, over those of import torch, timm"
        yield Row(what, ratios(spent, "predict", "imports"), "times", "<= 1.15")


def cpu_seconds(command: list[str]) -> float:
    """Of a process, whatever else the machine does meanwhile."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
