"""What a user holds: a model that lives in a folder, knows its classes, and can be asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor

from . import store
from .batches import SMALL_SIDE, cut
from .data import to_rgb
from .errors import PassloraError
from .learner import Learner
from .manifest import Manifest, TaskEntry, read_manifest


@dataclass(frozen=True)
class Prediction:
    label: str
    probability: float


class PassLora:
    """A trained model: `PassLora.from_pretrained(folder).predict([image])`."""

    def __init__(self, learner: Learner, tasks: list[TaskEntry]) -> None:
        self.learner, self.tasks = learner, tasks

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, task: int | None = None, model_name_or_path: str | None = None
    ) -> PassLora:
        """The model as it is, or as it was after `task` (0 is the first).

        `model_name_or_path` says where a backbone lies that came from a local checkpoint file.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        count = len(manifest.tasks)
        if task is not None and not 0 <= task < count:
            raise PassloraError(f"{folder} has the tasks 0 to {count - 1}, not {task}")
        changes = {} if model_name_or_path is None else {"model_name_or_path": model_name_or_path}
        learner = Learner(manifest.config(**changes), Accelerator())
        tasks = count if task is None else task + 1
        store.restore(folder, learner, manifest, tasks)
        return cls(learner, manifest.tasks[:tasks])

    @property
    def classes(self) -> list[str]:
        """In the order of learning."""
        return Manifest({}, self.tasks).classes

    def predict(
        self, images: Iterable[Image.Image], top_k: int = 5, views: int | None = None, batch_size: int = 64
    ) -> Iterator[list[Prediction]]:
        """The likeliest classes of each image, best first; a batch at a time.

        `views` is 1 (the image as it is) or 4 (the ensemble of rotations); by default as the model was evaluated.
        """
        if top_k < 1:
            raise PassloraError(f"top_k must be at least 1, got {top_k}")
        mode, classes, rest = self._mode(views), self.classes, iter(images)
        while batch := list(islice(rest, batch_size)):
            probabilities = self.scores(batch, mode).softmax(dim=1).cpu()
            best = probabilities.topk(min(top_k, len(classes)), dim=1)
            for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                yield [Prediction(classes[i], p) for p, i in zip(values, indices, strict=True)]

    def scores(self, images: list[Image.Image], mode: str) -> Tensor:
        """Class scores, as evaluation computes them; images of one size go through the network together."""
        network, device = self.learner.network, self.learner.accelerator.device
        inputs = [as_input(image, network.backbone.image_size) for image in images]
        scores = torch.empty(len(images), len(self.classes), device=device)
        for shape in {x.shape for x in inputs}:
            rows = [i for i, x in enumerate(inputs) if x.shape == shape]
            x = torch.stack([inputs[i] for i in rows]).to(device)
            scores[rows] = network.scores(x, [mode], self.learner.memory)[mode]
        return scores

    def _mode(self, views: int | None) -> str:
        method = self.learner.config.method
        if views is None:
            return method.inference
        if views not in (1, method.num_views):
            only = "1 or 4" if method.sst else "1: it was trained without rotations"
            raise PassloraError(f"views must be {only}, got {views}")
        return "single" if views == 1 else "multiview"


def as_input(image: Image.Image, size: int) -> Tensor:
    """One image as evaluation reads it: small ones at their own size, large ones by their centre crop."""
    image = to_rgb(image)
    pixels: Any = image if max(image.size) <= SMALL_SIDE else cut(image, size, None, 0.0)
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)
