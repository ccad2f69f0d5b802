"""The usual way to write PASS-like training, as public code does it: slow on purpose, correct all the same.

The student runs twice a step (for the loss, and for the distance to the teacher), the teacher is a copied backbone that
keeps its autograd graph, every image is augmented by Pillow in a Python loop (by this process, as ours is), and old
classes are drawn and their features made one by one with numpy.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from peft.tuners.lora import Linear
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from passlora.network.lora_layer import LoraLinear

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def as_usual(network: nn.Module) -> nn.Module:
    """peft's own LoRA layers, and memory laid out as torch does without being told."""
    for layer in network.modules():
        if isinstance(layer, LoraLinear):
            layer.__class__ = Linear
    return network.to(memory_format=torch.contiguous_format)


class Pictures(Dataset[Any]):
    """Pad, crop, flip and brighten by Pillow, then to the network's size: one image at a time."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, side: int) -> None:
        self.pixels, self.labels, self.side = pixels, labels, side

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        image = ImageOps.expand(Image.fromarray(self.pixels[row]), border=4)
        left, top = random.randint(0, 8), random.randint(0, 8)
        image = image.crop((left, top, left + 32, top + 32))
        if random.random() < 0.5:
            image = ImageOps.mirror(image)
        image = ImageEnhance.Brightness(image).enhance(1 + 63 / 255 * (2 * random.random() - 1))
        image = image.resize((self.side, self.side), Image.Resampling.BILINEAR)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None], int(self.labels[row])


class Reference:
    """One task with the losses of PASS++: new data, prototypes, hard prototypes, distillation; a call is an epoch."""

    def __init__(self, scene: Any) -> None:
        """On the images of a Scene, with a copy of its backbone."""
        ours, training = scene.learner.network.backbone, scene.config.training
        self.backbone = as_usual(copy.deepcopy(ours.body))
        self.backbone.train(not ours.has_lora)
        self.teacher = copy.deepcopy(self.backbone).eval()
        self.head = nn.Linear(ours.feature_dim, 4 * (scene.old + scene.new))
        self.temperature = scene.config.method.temperature
        rng = np.random.default_rng(0)
        self.prototypes, self.radius = rng.normal(size=(4 * scene.old, ours.feature_dim)).astype(np.float32), 1.0
        weights = [p for p in self.backbone.parameters() if p.requires_grad] + list(self.head.parameters())
        self.optimizer = torch.optim.Adam(weights, lr=training.learning_rate)
        pictures = Pictures(scene.pixels, scene.classes, ours.image_size)
        self.loader: DataLoader[Any] = DataLoader(
            pictures, batch_size=training.per_device_train_batch_size, shuffle=True
        )

    def __call__(self) -> None:
        for images, labels in self.loader:
            x = torch.stack([torch.rot90(images, k, (2, 3)) for k in range(4)], 1).reshape(-1, *images.shape[1:])
            y = torch.stack([labels * 4 + k for k in range(4)], 1).reshape(-1)
            loss = self.loss(x, y, len(images))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def loss(self, x: Tensor, y: Tensor, batch: int) -> Tensor:
        tau = self.temperature
        loss_new = F.cross_entropy(self.head(self.backbone(x)) / tau, y)
        z = self.backbone(x)
        z_old = self.teacher(x)
        loss_kd = torch.dist(z, z_old, 2)
        features, labels = [], []
        by_view = [z[v::4].detach().numpy() for v in range(4)]
        norms = [np.linalg.norm(new, axis=1) for new in by_view]
        for _ in range(batch):
            node = np.random.randint(len(self.prototypes))
            mu = self.prototypes[node]
            features.append(mu + self.radius * np.random.normal(0, 1, mu.shape).astype(np.float32))
            labels.append(node)
            new = by_view[node % 4]
            features.append(0.7 * mu + 0.3 * new[int(np.argmax(new @ mu / norms[node % 4]))])
            labels.append(node)
        old = self.head(torch.from_numpy(np.stack(features)).float()) / tau
        loss_old = F.cross_entropy(old, torch.tensor(labels))
        return loss_new + 10 * loss_old + 10 * loss_kd
