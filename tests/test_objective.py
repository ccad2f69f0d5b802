"""Each term against an independent computation: loops over samples and classes in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from conftest import plain_head
from torch.utils._python_dispatch import TorchDispatchMode

from passlora.config import MethodConfig
from passlora.method.memory import Draw
from passlora.method.objective import (
    Teacher,
    explicit_losses,
    hard_losses,
    implicit_losses,
    kd_loss,
    lwf_loss,
    nearest_new,
    new_loss,
    objective,
    old_loss,
    quadratic_form,
)


def cross_entropy(logits, node):
    """-log softmax, in Python floats."""
    values = [float(v) for v in logits]
    top = max(values)
    return top + math.log(sum(math.exp(v - top) for v in values)) - values[node]


def logits_of(head, z):
    return [
        sum(float(w) * float(x) for w, x in zip(row, z.detach(), strict=True)) + float(b)
        for row, b in zip(head.weight.detach(), head.bias.detach(), strict=True)
    ]


def scaled(values, tau):
    return [v / tau for v in values]


@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_new_loss(case, tau):
    rows = [
        cross_entropy(scaled(logits_of(case.head, z), tau), int(n)) for z, n in zip(case.z, case.nodes, strict=True)
    ]
    assert float(new_loss(case.head(case.z), case.nodes, tau)) == pytest.approx(sum(rows) / len(rows), rel=1e-12)


@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_explicit_loss(case, tau):
    got = explicit_losses(case.head, case.draw, tau)
    for i in range(case.drawn):
        z = case.draw.means[i] + case.draw.noise[i]
        expected = cross_entropy(scaled(logits_of(case.head, z), tau), int(case.draw.nodes[i]))
        assert float(got[i]) == pytest.approx(expected, rel=1e-12)


def covariances(case):
    """The same matrices in the three stored forms, each with its dense equivalent."""
    eye = torch.eye(case.dim, dtype=torch.float64)
    variances = torch.diagonal(case.full, dim1=1, dim2=2)
    return {
        "radius": (torch.tensor(0.36, dtype=torch.float64), (0.36 * eye).expand(case.drawn, -1, -1)),
        "diag": (variances, torch.diag_embed(variances)),
        "full": (case.full, case.full),
    }


@pytest.mark.parametrize("form", ["radius", "diag", "full"])
@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_implicit_loss(case, form, tau):
    gamma = 0.8
    stored, dense = covariances(case)[form]
    draw = Draw(case.draw.nodes, case.draw.means, stored)
    got = implicit_losses(case.head, draw, tau, gamma)
    for i in range(case.drawn):
        own = int(draw.nodes[i])
        plain = logits_of(case.head, draw.means[i])
        logits = []
        for c in range(case.head.num_nodes):
            v = case.head.weight[c] - case.head.weight[own]
            logits.append(plain[c] / tau + gamma / 2 * float(v @ dense[i] @ v) / tau**2)
        assert float(got[i]) == pytest.approx(cross_entropy(logits, own), rel=1e-10)


@pytest.mark.parametrize("form", ["radius", "diag", "full"])
@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_the_implicit_loss_bounds_the_explicit_one(case, form, tau):
    """Monte Carlo: the mean over samples of N(mu, gamma * Sigma) lies below the bound, and close for small gamma."""
    stored, dense = covariances(case)[form]
    head, count = case.head, 200_000
    g = torch.Generator().manual_seed(0)
    gaps = {}
    for gamma in (0.01, 0.3):
        bound = implicit_losses(head, Draw(case.draw.nodes, case.draw.means, stored), tau, gamma)
        i = 0
        root = torch.linalg.cholesky(dense[i] + 1e-12 * torch.eye(case.dim, dtype=torch.float64))
        e = torch.randn(count, case.dim, generator=g, dtype=torch.float64)
        z = case.draw.means[i] + math.sqrt(gamma) * e @ root.T
        nodes = case.draw.nodes[i].expand(count)
        sampled = explicit_losses(head, Draw(nodes, z, stored, torch.zeros_like(z)), tau)
        error = float(sampled.std()) / math.sqrt(count)
        gaps[gamma] = float(bound[i] - sampled.mean())
        assert gaps[gamma] > -4 * error
    assert abs(gaps[0.01]) < 0.05 * float(bound[0]) + 0.01
    assert gaps[0.3] > gaps[0.01]


def test_the_quadratic_form_vanishes_at_the_own_node(case):
    for stored, _ in covariances(case).values():
        form = quadratic_form(case.head.weight, case.draw.nodes, stored)
        assert form.gather(1, case.draw.nodes[:, None]).abs().max() < 1e-12


@pytest.mark.parametrize("form", ["radius", "diag", "full"])
def test_the_gradient_of_the_quadratic_form_by_finite_differences(case, form):
    """A node is drawn twice, so that its two shares add up."""
    stored, _ = covariances(case)[form]
    weight, nodes = case.head.weight.detach().requires_grad_(), case.draw.nodes.clone()
    nodes[1] = nodes[0]
    assert torch.autograd.gradcheck(lambda w: quadratic_form(w, nodes, stored), (weight,))


def nearest_by_loops(case):
    found = []
    for mean, node in zip(case.draw.means, case.draw.nodes, strict=True):
        best, where = -2.0, None
        for row, z in enumerate(case.z):
            if row % case.views != int(node) % case.views:
                continue
            cosine = float(mean @ z / (mean.norm() * z.norm()))
            if cosine > best:
                best, where = cosine, row
        found.append(where)
    return found


def test_the_nearest_new_feature_is_of_the_same_view(case):
    assert nearest_new(case.draw, case.z, case.views).tolist() == nearest_by_loops(case)


@pytest.mark.parametrize("label", ["hard", "soft"])
@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_hard_loss(case, label, tau):
    config = MethodConfig(hard_label=label, temperature=tau)
    got = hard_losses(case.head, case.draw, case.z, case.nodes, config)
    for i, near in enumerate(nearest_by_loops(case)):
        mixed = 0.7 * case.draw.means[i] + 0.3 * case.z[near]
        logits = scaled(logits_of(case.head, mixed), tau)
        expected = cross_entropy(logits, int(case.draw.nodes[i]))
        if label == "soft":
            expected = 0.7 * expected + 0.3 * cross_entropy(logits, int(case.nodes[near]))
        assert float(got[i]) == pytest.approx(expected, rel=1e-12)


def test_old_loss_is_one_mean_over_both_kinds(case):
    config = MethodConfig()
    both = torch.cat(
        [
            explicit_losses(case.head, case.draw, 1.0),
            hard_losses(case.head, case.draw, case.z, case.nodes, config),
        ]
    )
    assert torch.equal(old_loss(case.head, case.draw, case.z, case.nodes, config), both.mean())
    plain = dataclasses.replace(config, hardness=False)
    expected = explicit_losses(case.head, case.draw, 1.0).mean()
    assert torch.equal(old_loss(case.head, case.draw, case.z, case.nodes, plain), expected)


@pytest.mark.parametrize("proto_aug", ["explicit", "implicit"])
def test_old_loss_reaches_the_head_only(case, proto_aug):
    old_loss(case.head, case.draw, case.z, case.nodes, MethodConfig(proto_aug=proto_aug)).backward()
    assert case.z.grad is None
    assert case.head.weight.grad.abs().sum() > 0 and case.head.bias.grad.abs().sum() > 0


def test_kd_loss(case):
    rows = [
        math.sqrt(sum(float(a - b) ** 2 for a, b in zip(x, y, strict=True)))
        for x, y in zip(case.z, case.teacher, strict=True)
    ]
    assert float(kd_loss(case.z, case.teacher, "mean")) == pytest.approx(sum(rows) / len(rows), rel=1e-12)
    whole = math.sqrt(sum(row**2 for row in rows))
    assert float(kd_loss(case.z, case.teacher, "batch")) == pytest.approx(whole, rel=1e-12)


def test_the_batch_norm_is_16_times_the_mean_at_256_equal_rows():
    z = torch.ones(256, 8, dtype=torch.float64)
    teacher = torch.zeros_like(z)
    assert float(kd_loss(z, teacher, "batch") / kd_loss(z, teacher, "mean")) == pytest.approx(16)


@pytest.mark.parametrize("reduction", ["mean", "batch"])
def test_kd_has_a_finite_gradient_where_student_equals_teacher(case, reduction):
    kd_loss(case.z, case.z.detach().clone(), reduction).backward()
    assert torch.equal(case.z.grad, torch.zeros_like(case.z))


def test_the_total(case):
    config = MethodConfig(proto_aug_weight=3.0, kd_weight=5.0)
    losses = objective(case.head, case.z, case.nodes, case.draw, Teacher(case.teacher), config)
    assert torch.equal(losses.new, new_loss(case.head(case.z), case.nodes, 1.0))
    assert torch.equal(losses.old, old_loss(case.head, case.draw, case.z, case.nodes, config))
    assert torch.equal(losses.kd, kd_loss(case.z, case.teacher, "mean"))
    assert float(losses.total) == pytest.approx(float(losses.new + 3 * losses.old + 5 * losses.kd), rel=1e-12)
    first = objective(case.head, case.z, case.nodes, None, None, config)
    assert torch.equal(first.total, losses.new) and float(first.old) == float(first.kd) == 0


def test_every_term_counts_whatever_is_distilled(case):
    """Distilling outputs leaves prototype augmentation in the sum; in the first task both are 0."""
    config = MethodConfig(kd_on="logits", proto_aug_weight=3.0, kd_weight=5.0)
    old_nodes = case.views * case.old
    outputs = case.head(case.teacher)[:, :old_nodes].detach()
    losses = objective(case.head, case.z, case.nodes, case.draw, Teacher(case.teacher, outputs), config)
    assert torch.equal(losses.old, old_loss(case.head, case.draw, case.z, case.nodes, config)) and float(losses.old) > 0
    assert torch.equal(losses.kd, lwf_loss(case.head(case.z)[:, :old_nodes], outputs)) and float(losses.kd) > 0
    assert float(losses.total) == pytest.approx(float(losses.new + 3 * losses.old + 5 * losses.kd), rel=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"proto_aug": "implicit"},
        {"hard_label": "soft"},
        {"hardness": False, "kd_reduction": "batch"},
        {"temperature": 0.5},
    ],
)
def test_gradients_by_finite_differences(case, options):
    config = MethodConfig(**options)
    # The hard features take z as a constant: hold it fixed there while z moves in the other terms.
    fixed = case.z.detach().clone()

    def total(weight, bias, z):
        head = plain_head(case.dim).double()
        head.__dict__.update(weight=weight, bias=bias)
        for name in ("weight", "bias"):
            del head._parameters[name]
        new = new_loss(head(z), case.nodes, config.temperature)
        old = old_loss(head, case.draw, fixed, case.nodes, config)
        return new + config.proto_aug_weight * old + config.kd_weight * kd_loss(z, case.teacher, config.kd_reduction)

    weight = case.head.weight.detach().clone().requires_grad_()
    bias = case.head.bias.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(total, (weight, bias, case.z), eps=1e-6, atol=1e-6, rtol=1e-5)
    losses = objective(case.head, case.z, case.nodes, case.draw, Teacher(case.teacher), config)
    got = torch.autograd.grad(losses.total, [case.head.weight, case.head.bias, case.z])
    expected = torch.autograd.grad(total(weight, bias, case.z), [weight, bias, case.z])
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """The most elements that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("proto_aug", ["explicit", "implicit"])
@pytest.mark.parametrize("form", ["radius", "diag"])
def test_thousands_of_old_classes(proto_aug, form):
    """No (drawn, nodes, d) tensor, forward or backward: with 64 x 8,000 x 384 floats it would have 197 M elements."""
    g = torch.Generator().manual_seed(0)
    head = plain_head(384)
    head.grow(8_000)
    nodes = torch.randint(7_900, (64,), generator=g)
    means = torch.randn(64, 384, generator=g)
    covariance = torch.tensor(0.25) if form == "radius" else torch.rand(64, 384, generator=g)
    draw = Draw(nodes, means, covariance, torch.zeros_like(means))
    z = torch.randn(32, 384, generator=g)
    targets = 7_960 + torch.arange(32)
    with LargestTensor() as watch:
        loss = old_loss(head, draw, z, targets, MethodConfig(proto_aug=proto_aug))
        loss.backward()
    assert loss.isfinite() and head.weight.grad.isfinite().all()
    assert watch.largest <= 8_000 * 384
