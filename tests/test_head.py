from __future__ import annotations

import torch
from torch import nn

from passlora.method.classifiers.head import Head


def test_old_rows_are_carried_over_bit_for_bit():
    head = Head(16)
    head.grow(8)
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    head.grow(12)
    assert head.num_nodes == 20
    assert torch.equal(head.weight[:8], weight)
    assert torch.equal(head.bias[:8], bias)
    assert head.weight.requires_grad and head.bias.requires_grad


def test_new_rows_are_initialised_as_by_nn_linear():
    head = Head(16)
    head.grow(4)
    torch.manual_seed(3)
    head.grow(6)
    torch.manual_seed(3)
    fresh = nn.Linear(16, 6)
    assert torch.equal(head.weight[4:], fresh.weight)
    assert torch.equal(head.bias[4:], fresh.bias)


def test_logits():
    head = Head(3)
    head.grow(5)
    z = torch.randn(2, 3)
    assert torch.allclose(head(z), z @ head.weight.T + head.bias, atol=1e-6)


def test_thousands_of_classes():
    head = Head(384)
    for _ in range(3):
        head.grow(4000)
    assert head(torch.randn(2, 384)).shape == (2, 12000)
