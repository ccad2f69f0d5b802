"""Pictures in, likeliest classes out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from PIL import Image
from torch import Tensor

from passlora.data.batches import as_input
from passlora.training.learner import Learner


@dataclass(frozen=True)
class Prediction:
    label: str
    probability: float


def predictions(
    learner: Learner, classes: list[str], images: Iterator[Image.Image], top_k: int, mode: str, batch_size: int
) -> Iterator[list[Prediction]]:
    """A batch at a time, as they are asked for."""
    while batch := list(islice(images, batch_size)):
        probabilities = scores(learner, batch, mode).softmax(dim=1).cpu()
        best = probabilities.topk(min(top_k, len(classes)), dim=1)
        for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            yield [Prediction(classes[i], p) for p, i in zip(values, indices, strict=True)]


def scores(learner: Learner, images: list[Image.Image], mode: str) -> Tensor:
    """Class scores, as evaluation computes them; images of one size go through the network together."""
    network, device = learner.network, learner.accelerator.device
    inputs = [as_input(image, network.backbone.image_size) for image in images]
    found = torch.empty(len(images), network.num_classes, device=device)
    for shape in {x.shape for x in inputs}:
        rows = [i for i, x in enumerate(inputs) if x.shape == shape]
        z = network.features(torch.stack([inputs[i] for i in rows]).to(device), network.num_views([mode]))
        found[rows] = network.scores(z, [mode], learner.memory)[mode].to(found)
    return found
