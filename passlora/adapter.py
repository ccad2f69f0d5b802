"""peft's LoRA layer with fewer passes over memory: x (W + s B A)^T instead of x W^T + s (x A^T) B^T.

The sum of weights is as large as the layer, the products it saves are as large as the batch. It is made for each pass
and thrown away; weights, names and files stay peft's own. docs/performance.md has what it wins.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class Adapted(torch.autograd.Function):
    """x (W + s B A)^T + bias, with gradients for x, A and B; never one of W's size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return F.linear(x, torch.addmm(weight, b, a, alpha=scale), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        rows, out = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        to_a = ((out @ b).T @ rows).mul_(ctx.scale)
        to_b = ((rows @ a.T).T @ out).T.mul(ctx.scale)  # in this order, so that the long side is read as it lies
        to_x = gradient @ torch.addmm(weight, b, a, alpha=ctx.scale) if ctx.needs_input_grad[0] else None
        return to_x, None, None, to_a, to_b, None


class LoraLinear(Linear):
    """What peft puts in the place of a linear layer; in mixed precision it computes as peft does.

    (There, a small s B A would be rounded away when added to W.)
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        active = self.active_adapters
        plain = not args and not kwargs and not self.disable_adapters and not self.merged and len(active) == 1
        if not plain or torch.is_autocast_enabled(x.device.type) or x.dtype != self.base_layer.weight.dtype:
            return super().forward(x, *args, **kwargs)
        a, b = self.lora_A[active[0]].weight, self.lora_B[active[0]].weight
        return Adapted.apply(x, self.base_layer.weight, self.base_layer.bias, a, b, self.scaling[active[0]])
