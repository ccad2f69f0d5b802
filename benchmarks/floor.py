"""What a step cannot do without: the network forward, backward as far as the adapter reaches, and the teacher forward.

No code of passlora: timm's network, random input of the right size, the sum of the features as loss.
"""

from __future__ import annotations

from collections.abc import Callable

import timm
import torch
from torch import nn


def transformer(architecture: str, rows: int, side: int, **arguments: object) -> Callable[[], None]:
    """Weights frozen; the gradient flows back to the input of the first adapted layer, the first block's qkv."""
    network = timm.create_model(architecture, num_classes=0, **arguments).requires_grad_(False).eval()
    network.blocks[0].attn.qkv.register_forward_pre_hook(lambda module, inputs: (inputs[0].requires_grad_(),))
    x = torch.rand(rows, 3, side, side)

    def step() -> None:
        network(x).sum().backward()
        with torch.no_grad():
            network(x)

    return step


def resnet18(rows: int, side: int) -> Callable[[], None]:
    """All weights get gradients; the teacher is the same network in eval mode. Channels-last, as ours is."""
    network = timm.create_model("resnet18", num_classes=0)
    network.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    network.maxpool = nn.Identity()
    network.to(memory_format=torch.channels_last)
    x = torch.rand(rows, 3, side, side)

    def step() -> None:
        network.train()
        network(x).sum().backward()
        network.zero_grad()
        network.eval()
        with torch.no_grad():
            network(x)

    return step


def steps(step: Callable[[], None], count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            step()

    return run
