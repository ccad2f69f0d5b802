"""Pictures in, likeliest classes out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from PIL import Image
from torch import Tensor

from passlora.data.batches import as_input
from passlora.errors import PassloraError
from passlora.training.learner import Learner


@dataclass(frozen=True)
class Prediction:
    label: str
    probability: float


def inference_mode(learner: Learner, views: int | None) -> str:
    """The mode that reads so many views of an image; without, the model's own."""
    method = learner.config.method
    if views in (None, method.classifier_views) and method.classifier_views > 1:
        return method.inference
    if method.classifier_views > 1:
        raise PassloraError(f"views must be {method.classifier_views}, which the model's classifier reads, got {views}")
    if views is None:
        return method.inference
    rotated = method.sst and learner.network.classifier.trained
    if views not in ((1, method.num_views) if rotated else (1,)):
        only = "1 or 4" if rotated else "1: its classifier reads no rotations"
        raise PassloraError(f"views must be {only}, got {views}")
    return "single" if views == 1 else "multiview"


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
    """Class scores, as evaluation computes them."""
    network = learner.network
    z = features(learner, images, network.num_views([mode]))
    return network.scores(z, [mode], learner.memory)[mode]


def image_features(learner: Learner, images: Iterator[Image.Image], batch_size: int) -> Tensor:
    """Of upright images, a batch at a time: (n, d)."""
    parts = []
    while batch := list(islice(images, batch_size)):
        parts.append(features(learner, batch, 1)[:, 0].cpu())
    return torch.cat(parts) if parts else torch.zeros(0, learner.network.backbone.feature_dim)


def features(learner: Learner, images: list[Image.Image], views: int) -> Tensor:
    """(n, views, d); images of one size go through the network together."""
    network, device = learner.network, learner.accelerator.device
    inputs = [as_input(image, network.backbone.image_size) for image in images]
    found = torch.empty(len(images), views, network.backbone.feature_dim, device=device)
    for shape in {x.shape for x in inputs}:
        rows = [i for i, x in enumerate(inputs) if x.shape == shape]
        found[rows] = network.features(torch.stack([inputs[i] for i in rows]).to(device), views).to(found)
    return found
