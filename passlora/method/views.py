"""The four rotations: stacking them, labelling them, and the inference that undoes them.

Node of class c in view v is `num_views * c + v`, so the 0-degree nodes are `logits[:, ::num_views]`. A batch of B
images becomes num_views * B rows, image by image: row `num_views * i + v` is image i in view v. With `num_views` 1
(no SST) everything below is the plain classifier.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(images: Tensor, num_views: int) -> Tensor:
    """Eq. 3: (B, C, H, W) -> (num_views * B, C, H, W), view v turned by v * 90 degrees."""
    if num_views == 1:
        return images
    turned = [torch.rot90(images, v, dims=(-2, -1)) for v in range(num_views)]
    return torch.stack(turned, dim=1).flatten(0, 1)


def nodes(classes: Tensor, num_views: int) -> Tensor:
    """Labels of the rows that `rotate` makes: class c in view v -> num_views * c + v."""
    return (num_views * classes[:, None] + torch.arange(num_views, device=classes.device)).flatten()


def class_scores(logits: Tensor, num_views: int, mode: str) -> Tensor:
    """Logits of rotated rows (num_views * B, num_views * k) -> scores (B, k).

    multiview (Eq. 13): view v is read on its own nodes; single: the 0-degree view alone; vanilla: every view is read
    on the 0-degree nodes.
    """
    k = logits.shape[1] // num_views
    grid = logits.view(-1, num_views, k, num_views)  # image, view of the image, class, view of the node
    if mode == "multiview":
        return torch.diagonal(grid, dim1=1, dim2=3).mean(dim=-1)
    if mode == "single":
        return grid[:, 0, :, 0]
    if mode == "vanilla":
        return grid[:, :, :, 0].mean(dim=1)
    raise ValueError(f"unknown inference mode {mode!r}")
