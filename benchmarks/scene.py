"""A learner in its second task, with teacher, prototypes and random images: what the benchmarks time."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image

from passlora import Config
from passlora.data.batches import Images
from passlora.data.rows import ArrayRows, Split
from passlora.method.memory import Statistics
from passlora.training.learner import Learner, TaskData
from passlora.training.steps import EpochLog, Hooks, TaskTraining

LORA = {"model_name_or_path": "passlora/vit-mini"}
DEIT = {"model_name_or_path": "deit_small_patch16_224", "pretrained": False}
RESNET = {
    "model_name_or_path": "passlora/resnet18",
    "pretrained": False,
    "lora_r": 0,
    "temperature": 0.1,
    "kd_reduction": "batch",
    "learning_rate": 0.001,
    "weight_decay": 0.0002,
}


class Photographs:
    """The images as JPEG of 500 x 375 pixels, ImageNet's usual size, in memory."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.files = []
        for image in pixels:
            file = io.BytesIO()
            Image.fromarray(image).resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
            self.files.append(file)

    def image(self, row: int) -> Image.Image:
        return Image.open(self.files[row])

    def describe(self, row: int) -> str:
        return f"photograph {row}"


class Scene:
    """`train()` is the training of the second task, as `passlora train` does it, on `batch * steps` images of 32 px."""

    def __init__(
        self,
        settings: dict[str, Any],
        batch: int,
        steps: int,
        old: int = 10,
        new: int = 10,
        epochs: int = 1,
        jpeg: bool = False,
    ) -> None:
        budget = {"num_train_epochs": epochs, "lr_milestones": [1], "per_device_train_batch_size": batch}
        self.config = Config.make(**{**settings, **budget, "num_tasks": 2})
        self.learner = Learner(self.config, Accelerator())
        self.old, self.new, self.count = old, new, batch * steps
        network, views = self.learner.network, self.config.method.prototype_views
        network.classifier.grow(old)
        statistics = Statistics(views * old, network.backbone.feature_dim, self.config.method.covariance == "full")
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            statistics.add(
                torch.randn(views * old, network.backbone.feature_dim, generator=generator), torch.arange(views * old)
            )
        self.learner.memory.add(statistics)
        head = network.classifier
        self.old_head = (head.weight.detach().clone(), head.bias.detach().clone())
        head.grow(new)
        rng = np.random.default_rng(0)
        self.pixels = rng.integers(0, 256, (self.count, 32, 32, 3)).astype(np.uint8)
        self.classes = old + np.arange(self.count) % new
        split = Split(Photographs(self.pixels) if jpeg else ArrayRows(self.pixels, "noise"), self.classes)
        self.images = Images(split, network.backbone.image_size, self.config.data, "noise")
        self.learner.task = 1
        self.data = TaskData(self.images, np.arange(self.count), self.classes)
        self.learner.get_ready(self.data)

    def merged(self) -> Any:
        """The plain timm network that `passlora merge` makes, with a classifier of the head's size."""
        plain = self.learner.network.backbone.merged()
        plain.reset_classifier(self.learner.network.classifier.num_nodes)
        return plain.eval()

    def train(self) -> None:
        self._train(lambda log: None)

    def second_epoch(self) -> float:
        """Seconds of the last of two epochs: steps alone, without what a task needs once."""
        ends: list[float] = []
        self._train(lambda log: ends.append(time.perf_counter()))
        return ends[-1] - ends[-2]

    def _train(self, on_epoch: Callable[[EpochLog], None]) -> None:
        learner = self.learner
        training = TaskTraining(
            self.config, learner.accelerator, learner.network, learner.memory, 1, self.data, self.old_head
        )
        training.run(Hooks(on_epoch))
