"""What is kept of the classes learnt: feature means, their spread, and no image.

Rows are stored in the order of learning, `prototype_views` rows a class, so row and class always agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from passlora.config import MethodConfig
from passlora.method.drift import Drift
from passlora.method.features import TaskFeatures
from passlora.method.views import nodes


class Statistics:
    """Per-node sums in float64, exact whatever the batches."""

    def __init__(self, num_nodes: int, dim: int, full: bool, device: torch.device | str = "cpu") -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.count = zeros(num_nodes)
        self.total = zeros(num_nodes, dim)
        self.squares = zeros(num_nodes, dim, dim) if full else zeros(num_nodes, dim)
        self.full = full

    def add(self, z: Tensor, nodes: Tensor) -> None:
        z, nodes = z.detach().to(self.total), nodes.to(self.total.device)
        self.count += torch.bincount(nodes, minlength=len(self.count))
        self.total.index_add_(0, nodes, z)
        if self.full:
            for node in nodes.unique().tolist():  # d x d a node: one at a time bounds the memory
                rows = z[nodes == node]
                self.squares[node] += rows.T @ rows
        else:
            self.squares.index_add_(0, nodes, z.square())

    def means(self) -> Tensor:
        """Eq. 4."""
        return self.total / self.count[:, None]

    def covariances(self) -> Tensor:
        """Unbiased: variances (nodes, d), or matrices (nodes, d, d) if full; NaN for a node with one sample."""
        mean, n = self.means(), self.count.view(-1, *[1] * (self.squares.dim() - 1))
        square_of_mean = mean[:, :, None] * mean[:, None, :] if self.full else mean.square()
        covariance = (self.squares - n * square_of_mean) / (n - 1)
        variances = torch.diagonal(covariance, dim1=-2, dim2=-1) if self.full else covariance
        variances.clamp_(min=0)  # rounding may leave -1e-17
        covariance[self.count < 2] = math.nan
        return covariance


def collect(features: TaskFeatures, views: int, full: bool) -> Statistics:
    """Sums over a task's images on all processes, a node a class and view."""
    exact = "cpu" if torch.device(features.device).type == "mps" else features.device  # mps has no float64
    statistics = Statistics(views * features.num_classes, features.dim, full, exact)
    for z, classes, _ in features:
        statistics.add(z[:, :views].flatten(0, 1), nodes(classes, views))
    for name in ("count", "total", "squares"):
        setattr(statistics, name, features.reduce(getattr(statistics, name)))
    return statistics


@dataclass
class Draw:
    """Old nodes drawn for one step."""

    nodes: Tensor  # (B,)
    means: Tensor  # (B, d)
    covariance: Tensor  # r^2 as a scalar, variances (B, d) or matrices (B, d, d)
    noise: Tensor | None = None  # (B, d), a sample of N(0, covariance), when asked for


class Memory:
    """Prototypes, radius and covariances of every class learnt."""

    def __init__(self, dim: int, method: MethodConfig) -> None:
        self.dim, self.num_views, self.prototype_views = dim, method.num_views, method.prototype_views
        self.covariance, self.radius_rule = method.covariance, method.radius
        self.means = torch.zeros(0, dim)
        spread_dims = {"radius": 0, "diag": 1, "full": 2}[self.covariance]
        self.spread: Tensor | None = torch.zeros(0, *[dim] * spread_dims) if spread_dims else None
        self.radius = 0.0
        self._factors: Tensor | None = None

    @property
    def num_classes(self) -> int:
        return len(self.means) // self.prototype_views

    @property
    def num_entries(self) -> int:
        """Numbers stored: the paper's measure of memory."""
        return self.means.numel() + (1 if self.spread is None else self.spread.numel())

    @property
    def num_bytes(self) -> int:
        return 4 * self.num_entries

    def nodes(self, rows: Tensor) -> Tensor:
        """Row of this memory -> node of the head."""
        return self.num_views * (rows // self.prototype_views) + rows % self.prototype_views

    def keep(self, classes: Tensor) -> None:
        """Forget every class but these."""
        rows = nodes(classes, self.prototype_views).to(self.means.device)
        self.means = self.means[rows]
        self.spread = None if self.spread is None else self.spread[rows]
        self._factors = None

    def class_means(self) -> Tensor:
        """The 0-degree prototypes, one a class."""
        return self.means[:: self.prototype_views]

    def remember(self, features: TaskFeatures) -> None:
        """Eq. 4 to 7 for the classes of one task."""
        self.add(collect(features, self.prototype_views, self.covariance == "full"))

    def add(self, statistics: Statistics) -> None:
        """Append the classes of one task (`statistics` has prototype_views nodes a class)."""
        device = self.means.device
        covariances = statistics.covariances()
        variances = torch.diagonal(covariances, dim1=-2, dim2=-1) if statistics.full else covariances
        self.radius = self._next_radius(variances[:: self.prototype_views].mean(dim=1))
        if self.spread is not None:
            single = statistics.count < 2  # one image says nothing of its class's spread: use the radius
            isotropic = self.radius**2 * torch.ones(self.dim).to(covariances)
            covariances[single] = torch.diag(isotropic) if statistics.full else isotropic
            self.spread = torch.cat([self.spread, covariances.to(device, torch.float32)])
        self.means = torch.cat([self.means, statistics.means().to(device, torch.float32)])
        self._factors = None

    def move(self, drift: Drift) -> None:
        """What is kept of the classes so far, as the network sees them now that it was trained on others."""
        self.means = drift.means(self.means)
        if self.spread is not None:
            whole = torch.diag_embed(self.spread) if self.covariance == "diag" else self.spread
            moved = drift.covariances(whole)
            self.spread = torch.diagonal(moved, dim1=-2, dim2=-1).clone() if self.covariance == "diag" else moved
        self._factors = None

    def _next_radius(self, traces: Tensor) -> float:
        """`traces` are tr(Sigma_k)/d of the new classes; classes of one image (NaN) do not count."""
        known = traces[~traces.isnan()]
        if self.num_classes == 0:
            return math.sqrt(known.mean()) if len(known) else 0.0  # Eq. 7
        if self.radius_rule == "first":
            return self.radius
        old = self.num_classes
        return math.sqrt((old * self.radius**2 + float(known.sum())) / (old + len(known)))  # Eq. 6

    def draw(self, count: int, generator: torch.Generator, with_noise: bool) -> Draw:
        """`count` old nodes, uniformly with replacement; with a Gaussian sample around each if asked for."""
        device = self.means.device
        rows = torch.randint(len(self.means), (count,), generator=generator, device=device)
        spread = torch.full((), self.radius**2, device=device) if self.spread is None else self.spread[rows]
        draw = Draw(self.nodes(rows), self.means[rows], spread)
        if with_noise:
            e = torch.randn(count, self.dim, generator=generator, device=device)
            if self.covariance == "full":
                draw.noise = (self._square_roots()[rows] @ e[:, :, None])[:, :, 0]
            else:
                draw.noise = draw.covariance.sqrt() * e
        return draw

    def _square_roots(self) -> Tensor:
        """Sigma^(1/2) of every row, once a task; eigenvalues, since Sigma is singular with fewer than d images."""
        if self._factors is None:
            assert self.spread is not None
            values, vectors = torch.linalg.eigh(self.spread)
            self._factors = vectors * values.clamp(min=0).sqrt()[:, None, :]
        return self._factors

    def to(self, device: torch.device | str) -> Memory:
        self.means = self.means.to(device)
        self.spread = None if self.spread is None else self.spread.to(device)
        self._factors = None
        return self

    def state_dict(self) -> dict[str, Tensor]:
        state = {"means": self.means, "radius": torch.tensor([self.radius], dtype=torch.float64)}
        return state if self.spread is None else {**state, "covariances": self.spread}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.radius, self.means = float(state["radius"]), state["means"].to(self.means)
        if self.spread is not None:
            self.spread = state["covariances"].to(self.spread)
        self._factors = None

    def forms(self, classes: int) -> dict[str, Tensor]:
        """What a file of so many classes holds, as tensors without data."""
        rows = self.prototype_views * classes
        forms = {"means": torch.empty(rows, self.dim, device="meta")}
        forms["radius"] = torch.empty(1, dtype=torch.float64, device="meta")
        if self.spread is not None:
            forms["covariances"] = torch.empty(rows, *self.spread.shape[1:], device="meta")
        return forms
