"""Discriminant analysis with a regularised covariance: how much to regularise, and how sure to be.

Everything is computed from sums over images (class means, counts, one covariance S for all classes), so it is the same
for any order and any split into tasks. Scores of class c with H = (S + lambda I)^-1: x' H mu_c - mu_c' H mu_c / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# lambda, in units of the mean eigenvalue of S, from nearly nothing to nearly nearest means.
STRENGTHS = [10 ** (k / 3) for k in range(-9, 6)]
HEAVY_TAILS = 2.0  # features scatter more widely than Gaussians of covariance S: deviations count so many times
SATURATED = 0.95  # of the degrees of freedom: below this lambda the estimate means nothing
COMPARED = 512  # classes, at most, that the estimate looks at: a lesson takes as long with ten thousand
TAIL = 8.0  # the exponent that probabilities fall off by; docs/beyond.md tells where it was chosen
TEMPERATURES = [2 ** (k / 8) for k in range(-64, 49)]


@dataclass
class Spectrum:
    """S and class means in the eigenvectors of S: every lambda is then a division. The first classes are compared."""

    values: Tensor  # (d,)
    vectors: Tensor  # (d, d)
    centre: Tensor  # (d,), the mean of the class means
    means: Tensor  # (classes, d), less the centre, in the eigenvectors
    counts: Tensor  # (classes,)
    freedom: int  # images less classes, of all classes: S is made of

    @classmethod
    def of(cls, covariance: Tensor, means: Tensor, counts: Tensor, freedom: int) -> Spectrum:
        values, vectors = torch.linalg.eigh(covariance)
        centre = means.mean(dim=0)
        return cls(values.clamp(min=0), vectors, centre, (means - centre) @ vectors, counts.to(means), freedom)

    def inverse(self, strength: float) -> Tensor:
        """The eigenvalues of H."""
        return 1 / (self.values + strength * self.values.mean())


def is_nothing(covariance: Tensor, means: Tensor) -> bool:
    """Whether features do not differ within classes, but for rounding: nothing can be told of them then."""
    return bool(covariance.trace() / len(covariance) <= 1e-10 * means.square().mean())


def expected_accuracy(spectrum: Spectrum, strength: float) -> float:
    """Of images that were not learnt from; 0 where it cannot be told.

    An image of class c scores higher for c than for j with probability Phi(m / s). Seen from outside the sample, by the
    theory of random matrices for as many dimensions as images (Zollanvari and Dougherty, 2015), the mean of that
    difference is m = D' H D / 2 - delta / n_c and its variance s^2 = theta^2 D' H S H D, with D = mu_c - mu_j,
    theta = 1 / (1 - tr(H S) / freedom), delta = freedom (theta - 1). All j are taken as if they were independent.
    """
    h = spectrum.inverse(strength)
    used = float((spectrum.values * h).sum()) / spectrum.freedom
    if used > SATURATED:
        return 0.0
    theta = 1 / (1 - used)
    means, counts = spectrum.means[:COMPARED], spectrum.counts[:COMPARED]
    distance = squared_distances(means * h.sqrt())
    variance = squared_distances(means * h * spectrum.values.sqrt()).clamp(min=1e-30)
    margin = distance / 2 - spectrum.freedom * (theta - 1) / counts[:, None]
    deviations = margin / (HEAVY_TAILS * theta * variance.sqrt())
    deviations.fill_diagonal_(torch.inf)
    return float(torch.special.log_ndtr(deviations).sum(dim=1).exp().mean())


def compared(means: Tensor) -> Tensor:
    """Rows of some classes, the same ones whatever order they were learnt in."""
    order = means[:, 0].argsort()
    return order[torch.linspace(0, len(order) - 1, min(len(order), COMPARED)).round().long()]


def squared_distances(x: Tensor) -> Tensor:
    products = x @ x.T
    squares = products.diagonal()
    return (squares[:, None] + squares[None, :] - 2 * products).clamp(min=0)


def best_strength(spectrum: Spectrum) -> float:
    """The lambda with the highest expected accuracy; the largest if none can be told."""
    found = [expected_accuracy(spectrum, strength) for strength in STRENGTHS]
    best = max(range(len(found)), key=found.__getitem__)
    return STRENGTHS[best] if found[best] > 0 else STRENGTHS[-1]


def left_out_scores(spectrum: Spectrum, strength: float, x: Tensor, classes: Tensor) -> Tensor:
    """Scores of images that were learnt from, each by the classifier that has not seen it: exact, without a new fit.

    Without an image of class c, r off its mean: mu_c moves by -r / (n - 1), S by -n / (n - 1) r r' / freedom, and H
    by Sherman and Morrison's formula. A class of one image cannot do without it: its rows are left out by the caller.
    """
    h, means = spectrum.inverse(strength), spectrum.means
    x = (x - spectrum.centre) @ spectrum.vectors
    rows, n = torch.arange(len(x)), spectrum.counts[classes]
    r = x - means[classes]
    weight = means * h
    g = n / (n - 1) / spectrum.freedom
    rr, xr, rm = (r * r * h).sum(dim=1), (x * r * h).sum(dim=1), r @ weight.T
    rest = 1 - g * rr
    gain = (g / rest)[:, None]
    to_means = x @ weight.T + gain * xr[:, None] * rm  # x' H mu_j, with the new H
    squares = (means * weight).sum(dim=1) + gain * rm.square()  # mu_j' H mu_j
    scores = to_means - squares / 2
    step = 1 / (n - 1)
    own = to_means[rows, classes] - step * xr / rest
    own_square = squares[rows, classes] - 2 * step * rm[rows, classes] / rest + step.square() * rr / rest
    scores[rows, classes] = own - own_square / 2
    return scores


def heavy_tailed(scores: Tensor) -> Tensor:
    """The same ranking, and probabilities that fall off with a power of the distance to the best instead of an
    exponential: -8 log(1 + distance / 8). Sure answers are less sure then, and unsure ones surer."""
    distance = scores.amax(dim=1, keepdim=True) - scores
    return -TAIL * torch.log1p(distance / TAIL)


def temperature_losses(scores: Tensor, classes: Tensor, heavy_tails: bool = False) -> Tensor:
    """The cross entropy, summed over images, that each temperature would give: curves of several tasks add up."""
    shape = heavy_tailed if heavy_tails else torch.clone
    return torch.stack([F.cross_entropy(shape(scores / t), classes, reduction="sum") for t in TEMPERATURES])
