from __future__ import annotations

import torch
from conftest import plain_head
from torch import nn

from passlora.config import MethodConfig
from passlora.method.classifiers import Head
from passlora.method.views import class_scores


def test_old_rows_are_carried_over_bit_for_bit():
    head = plain_head(16)
    head.grow(8)
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    head.grow(12)
    assert head.num_nodes == 20
    assert torch.equal(head.weight[:8], weight)
    assert torch.equal(head.bias[:8], bias)
    assert head.weight.requires_grad and head.bias.requires_grad


def test_new_rows_are_initialised_as_by_nn_linear():
    head = plain_head(16)
    head.grow(4)
    torch.manual_seed(3)
    head.grow(6)
    torch.manual_seed(3)
    fresh = nn.Linear(16, 6)
    assert torch.equal(head.weight[4:], fresh.weight)
    assert torch.equal(head.bias[4:], fresh.bias)


def test_logits():
    head = plain_head(3)
    head.grow(5)
    z = torch.randn(2, 3)
    assert torch.allclose(head(z), z @ head.weight.T + head.bias, atol=1e-6)


def test_thousands_of_classes():
    head = plain_head(384)
    for _ in range(3):
        head.grow(4000)
    assert head(torch.randn(2, 384)).shape == (2, 12000)


def test_four_nodes_a_class_with_rotations():
    head = Head(6, MethodConfig())
    head.grow(2)
    head.grow(3)
    assert (head.num_classes, head.num_nodes) == (5, 20)
    z = torch.randn(3, 4, 6)
    logits = head(z.flatten(0, 1))
    for mode in ("multiview", "single", "vanilla"):
        assert torch.allclose(head.scores(z, mode), class_scores(logits, 4, mode), atol=1e-6)
        assert head.num_views(mode) == (1 if mode == "single" else 4)
    assert torch.allclose(head.scores(z[:, :1], "single"), head(z[:, 0])[:, ::4], atol=1e-6), "one view is enough"
    assert torch.equal(head.as_linear()(z[:, 0]), head(z[:, 0]))
