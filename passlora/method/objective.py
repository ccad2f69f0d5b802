"""L_new + alpha * L_old + beta * L_kd, each term a small pure function.

Equation numbers are the paper's, as docs/method.md lists them. `z` are features of the rotated rows of a batch (see
views.py), `nodes` their labels, `tau` the temperature of the training logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from passlora.config import MethodConfig
from passlora.method.classifiers import Head
from passlora.method.memory import Draw


@dataclass
class Losses:
    """The terms (unweighted) and their weighted sum."""

    new: Tensor
    old: Tensor
    kd: Tensor
    total: Tensor


def new_loss(logits: Tensor, nodes: Tensor, tau: float, known: int = 0) -> Tensor:
    """Cross entropy of the new data over all nodes (first term of Eq. 8), or over those after the first `known`."""
    return F.cross_entropy(logits[:, known:] / tau, nodes - known)


def new_binary_loss(logits: Tensor, nodes: Tensor, known: int) -> Tensor:
    """LwF-MC: each new node says yes or no on its own; the first `known` nodes are the old classes'."""
    return binary_loss(logits[:, known:], F.one_hot(nodes, logits.shape[1])[:, known:].to(logits.dtype))


def explicit_losses(head: Head, draw: Draw, tau: float) -> Tensor:
    """Eq. 5 in Eq. 8: cross entropy of mu + r*e, one value a drawn node."""
    assert draw.noise is not None
    return F.cross_entropy(head(draw.means + draw.noise) / tau, draw.nodes, reduction="none")


def implicit_losses(head: Head, draw: Draw, tau: float, gamma: float) -> Tensor:
    """Eq. 10: the upper bound for infinitely many samples of N(mu, gamma * Sigma), one value a drawn node."""
    quadratic = quadratic_form(head.weight, draw.nodes, draw.covariance)
    logits = head(draw.means) / tau + gamma / (2 * tau**2) * quadratic
    return F.cross_entropy(logits, draw.nodes, reduction="none")


def quadratic_form(weight: Tensor, nodes: Tensor, covariance: Tensor) -> Tensor:
    """(phi_c - phi_c0)^T Sigma_b (phi_c - phi_c0) for each drawn node c0 = nodes[b] and each node c: (B, nodes).

    The square is multiplied out, so that only the full form makes a (B, nodes, d) tensor.
    """
    if covariance.dim() < 3:
        return QuadraticForm.apply(weight, nodes, covariance)
    mapped = weight @ covariance  # (B, nodes, d): a full matrix a class is the costly form
    squares = (mapped * weight).sum(dim=2)
    cross = (mapped @ weight[nodes][:, :, None])[:, :, 0]
    return squares - 2 * cross + squares.gather(1, nodes[:, None])


class QuadraticForm(torch.autograd.Function):
    """The form for Sigma = r^2 I (r^2 as a scalar) and for diagonal ones (variances (B, d)).

    Its gradient is written out, since autograd would add up four tensors as large as a head of 40,000 nodes.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, nodes: Tensor, covariance: Tensor) -> Tensor:
        ctx.save_for_backward(weight, nodes, covariance)
        own = weight[nodes]
        if covariance.dim() == 0:
            squares = covariance * torch.linalg.vector_norm(weight, dim=1).square()[None, :]
        else:
            squares = covariance @ weight.square().T
        return torch.addmm(squares, covariance * own, weight.T, alpha=-2) + (covariance * own * own).sum(1, True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight, nodes, covariance = ctx.saved_tensors
        own = weight[nodes]
        if covariance.dim() == 0:
            to_weight = weight * (2 * covariance * gradient.sum(dim=0))[:, None]
        else:
            to_weight = (gradient.T @ (2 * covariance)).mul_(weight)
        to_weight.addmm_(gradient.T, covariance * own, alpha=-2)
        to_own = 2 * covariance * (gradient.sum(1, True) * own - gradient @ weight)
        return to_weight.index_add_(0, nodes, to_own), None, None


def nearest_new(draw: Draw, z: Tensor, num_views: int) -> Tensor:
    """For each drawn prototype, the row of `z` nearest by cosine among the rows of the same view."""
    similarity = F.normalize(draw.means, dim=1) @ F.normalize(z, dim=1).T
    row_view = torch.arange(len(z), device=z.device) % num_views
    other_view = (draw.nodes % num_views)[:, None] != row_view[None, :]
    return similarity.masked_fill(other_view, -torch.inf).argmax(dim=1)


def hard_losses(head: Head, draw: Draw, z: Tensor, nodes: Tensor, config: MethodConfig) -> Tensor:
    """Eq. 11: the prototype mixed with its nearest new feature, one value a drawn node."""
    z = z.detach()
    near = nearest_new(draw, z, config.num_views)
    mixing = config.hard_mixing
    logits = head(mixing * draw.means + (1 - mixing) * z[near]) / config.temperature
    losses = F.cross_entropy(logits, draw.nodes, reduction="none")
    if config.hard_label == "soft":
        losses = mixing * losses + (1 - mixing) * F.cross_entropy(logits, nodes[near], reduction="none")
    return losses


def old_loss(head: Head, draw: Draw, z: Tensor, nodes: Tensor, config: MethodConfig) -> Tensor:
    """Prototype augmentation: one mean over the sampled (or bounded) and the hard features."""
    if config.proto_aug == "explicit":
        losses = explicit_losses(head, draw, config.temperature)
    else:
        losses = implicit_losses(head, draw, config.temperature, config.gamma)
    if config.hardness:
        losses = torch.cat([losses, hard_losses(head, draw, z, nodes, config)])
    return losses.mean()


def kd_loss(z: Tensor, z_teacher: Tensor, reduction: str) -> Tensor:
    """||f_old(x) - f(x)||: mean of the rows' norms, or one norm of the whole batch; gradient 0 at distance 0."""
    difference = z - z_teacher
    if reduction == "mean":
        return torch.linalg.vector_norm(difference, dim=1).mean()
    return torch.linalg.vector_norm(difference)


LWF_TEMPERATURE = 2.0  # as Li and Hoiem distil


def lwf_loss(logits: Tensor, logits_teacher: Tensor) -> Tensor:
    """LwF: cross entropy between the softened outputs of teacher and student on the old nodes, less its minimum."""
    student = F.log_softmax(logits / LWF_TEMPERATURE, dim=1)
    teacher = F.log_softmax(logits_teacher / LWF_TEMPERATURE, dim=1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * LWF_TEMPERATURE**2


def binary_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """LwF-MC: binary cross entropy of each node, summed over nodes, mean over rows."""
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(logits)


@dataclass
class Teacher:
    """What the state before the task says of a batch: its features, or the outputs of the old nodes on them."""

    z: Tensor
    logits: Tensor | None = None  # with kd_on logits


def distillation(z: Tensor, logits: Tensor, teacher: Teacher, config: MethodConfig) -> Tensor:
    """The distance to the teacher: in features (Eq. 12), or in the old nodes' outputs (LwF, LwF-MC)."""
    if config.kd_on == "features":
        return kd_loss(z, teacher.z, config.kd_reduction)
    assert teacher.logits is not None
    own = logits[:, : teacher.logits.shape[1]]
    if config.new_loss == "binary":
        return binary_loss(own, teacher.logits.sigmoid())
    return lwf_loss(own, teacher.logits)


def objective(
    head: Head,
    z: Tensor,
    nodes: Tensor,
    draw: Draw | None,
    teacher: Teacher | None,
    config: MethodConfig,
    known: int = 0,
) -> Losses:
    """Eq. 12: a sum of three terms. `draw` and `teacher` are None in the first task, or where a method has no use.

    The first `known` nodes are the old classes'.
    """
    logits = head(z)
    zero = logits.new_zeros(())
    if config.new_loss == "binary":
        new = new_binary_loss(logits, nodes, known)
    else:
        new = new_loss(logits, nodes, config.temperature, known if config.new_loss == "new_classes" else 0)
    old = zero if draw is None else old_loss(head, draw, z, nodes, config)
    kd = zero if teacher is None else distillation(z, logits, teacher, config)
    return Losses(new, old, kd, new + config.proto_aug_weight * old + config.kd_weight * kd)
