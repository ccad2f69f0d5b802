"""peft's LoRA layer with fewer passes over memory: x (W + s B A)^T instead of x W^T + s (x A^T) B^T.

The sum of weights is as large as the layer, the products it saves are as large as the batch. It is made for each pass
and thrown away; weights, names and files stay peft's own. docs/performance.md has what it wins.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
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
    """What peft puts in the place of a linear layer: `one_product` while it trains, peft's own sum when it is asked.

    So answers are those of stock peft to the last digits. Anything but plain LoRA in float32 or float64 is left to peft
    too: in 16 bits, a small s B A would be rounded away when added to W.
    """

    one_product = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not self.one_product or not self._is_plain(x):
            return super().forward(x, *args, **kwargs)
        name, base = self.active_adapters[0], self.base_layer
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        return Adapted.apply(x, base.weight, base.bias, a, b, self.scaling[name])

    def _is_plain(self, x: Tensor) -> bool:
        active = self.active_adapters
        if self.disable_adapters or self.merged or len(active) != 1 or active[0] not in self.lora_A:
            return False
        a, b = self.lora_A[active[0]], self.lora_B[active[0]]
        usual = active[0] not in self.lora_variant and b.bias is None
        usual = usual and isinstance(self.lora_dropout[active[0]], nn.Identity)
        exact = x.dtype == a.weight.dtype == self.base_layer.weight.dtype and x.dtype in (torch.float32, torch.float64)
        return usual and exact and not torch.is_autocast_enabled(x.device.type)
