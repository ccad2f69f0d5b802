"""What a step costs in operations and memory, counted on the real networks, and what follows for a GPU: calculated."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from .scene import DEIT, LORA, RESNET, Scene
from .timing import Row

A100_BF16 = 312e12  # operations a second at the peak, by NVIDIA's data sheet
SHARE_OF_PEAK = 0.4


def arithmetic(rounds: int) -> Iterator[Row]:
    """Operations are counted by torch; kept activations by looking at what autograd saves, for one view and three."""
    for name, settings, side in (
        ("vit-mini, 64 px", LORA, 64),
        ("DeiT-S/16, 224 px", DEIT, 224),
        ("ResNet-18, 32 px", RESNET, 32),
    ):
        backbone = Scene(settings, 2, 1).learner.network.backbone.train()
        (forward_1, back_1), (forward_3, back_3) = (operations(backbone, views, side) for views in (1, 3))
        one_way, back = (forward_3 - forward_1) / 2, (back_3 - back_1) / 2  # what does not grow with views cancels out
        view = 2 * one_way + back
        yield Row(f"{name}: forward, a view", [one_way / 1e9], "GFLOP")
        yield Row(f"{name}: backward, a view", [back / 1e9], "GFLOP")
        yield Row(f"{name}: a step (teacher, student, backward), an image in four views", [4 * view / 1e9], "GFLOP")
        speed = SHARE_OF_PEAK * A100_BF16 / (4 * view)
        yield Row(f"{name}: **calculated** at 40% of an A100's bf16 peak", [speed], "images/s")
        kept = kept_bytes(backbone, side)
        yield Row(f"{name}: activations kept for the backward pass, a view, float32", [kept / 2**20], "MB")
        yield Row(f"{name}: **calculated** for batch 64 in four views, float32", [256 * kept / 2**30], "GB")
        if backbone.has_lora:
            backbone.checkpoint_gradients(True)
            kept = kept_bytes(backbone, side)
            what = "with gradient_checkpointing: **calculated** for batch 64 in four views, and one block's more"
            yield Row(f"{name}, {what}", [256 * kept / 2**30], "GB")


def operations(backbone: torch.nn.Module, views: int, side: int) -> tuple[int, int]:
    """Forward and backward."""
    with FlopCounterMode(display=False) as forward:
        z = backbone(torch.rand(views, 3, side, side))
    with FlopCounterMode(display=False) as backward:
        z.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def kept_bytes(backbone: torch.nn.Module, side: int) -> float:
    """Of one view more, without weights: the difference between three views and one."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in backbone.parameters()}
    totals = []
    for views in (1, 3):
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            backbone(torch.rand(views, 3, side, side))
        totals.append(sum(t.untyped_storage().nbytes() for where, t in kept.items() if where not in weights))
    return (totals[1] - totals[0]) / 2
