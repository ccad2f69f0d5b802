"""Discriminants and ridge from sums: against fits that leave images out, fresh samples, and all classes at once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from passlora.config import MethodConfig
from passlora.method import discriminant, feature_map
from passlora.method.classifiers import make_classifier, moments, ridge
from passlora.method.discriminant import (
    STRENGTHS,
    Spectrum,
    best_strength,
    compared,
    expected_accuracy,
    heavy_tailed,
    left_out_scores,
    temperature_losses,
)
from passlora.method.feature_map import FeatureMap
from passlora.method.features import of_tensors

PLAIN = {"sst": False, "prototype_views": 1, "inference": "single", "adapt_tasks": "none"}
LIFTED = {"lift": "fourier", "lift_width": 40, "classifier_views": 4}


def method(name, **options):
    return MethodConfig(classifier=name, **PLAIN, **options)


def draw(counts, dim=6, seed=0, spread=1.0, views=None):
    """Gaussian classes of a covariance that is far from round."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(len(counts), dim)) * spread
    root = np.random.default_rng(98).normal(size=(dim, dim)) * np.linspace(0.2, 1.5, dim)
    classes = np.repeat(np.arange(len(counts)), counts)
    shape = (len(classes), dim) if views is None else (len(classes), views, dim)
    noise = rng.normal(size=shape) @ root
    z = (centres[classes] if views is None else centres[classes][:, None]) + noise
    return torch.from_numpy(z), torch.from_numpy(classes)


def spectrum_of(z, classes, choose=lambda means: slice(None)):
    counts = torch.bincount(classes)
    means = torch.stack([z[classes == c].mean(dim=0) for c in range(len(counts))])
    centred = z - means[classes]
    freedom = len(z) - len(counts)
    rows = choose(means)
    return Spectrum.of(centred.T @ centred / freedom, means[rows], counts[rows], freedom)


# --- images left out ---------------------------------------------------------------------------------------------


def test_scores_without_an_image_are_those_of_a_fit_without_it():
    z, classes = draw([5, 2, 9, 4])
    spectrum, strength = spectrum_of(z, classes), 0.3
    found = left_out_scores(spectrum, strength, z, classes)
    weight_of_identity = strength * float(spectrum.values.mean())
    for out in range(len(z)):
        rest = torch.arange(len(z)) != out
        means = torch.stack([z[rest & (classes == c)].mean(dim=0) for c in range(4)])
        centred = z[rest] - means[classes[rest]]
        covariance = centred.T @ centred / (len(z) - 4) + weight_of_identity * torch.eye(6, dtype=z.dtype)
        weight = torch.linalg.solve(covariance, means.T).T
        expected = weight @ z[out] - (weight * means).sum(dim=1) / 2
        torch.testing.assert_close(found[out] - found[out, 0], expected - expected[0], rtol=1e-9, atol=1e-9)


def test_ridge_without_an_image_is_a_ridge_without_it():
    z, classes = draw([5, 2, 9, 4])
    counts = torch.bincount(classes).double()
    rows = z / counts[classes].sqrt()[:, None]
    targets = torch.nn.functional.one_hot(classes).double() / counts[classes].sqrt()[:, None]
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    means = torch.stack([z[classes == c].mean(dim=0) for c in range(4)])
    found = ridge.left_out_scores(z @ vectors, classes, means @ vectors, counts, 1 / (values + 0.2))
    for out in range(len(z)):
        rest = torch.arange(len(z)) != out
        gram = rows[rest].T @ rows[rest] + 0.2 * torch.eye(6, dtype=z.dtype)
        expected = z[out] @ torch.linalg.solve(gram, rows[rest].T @ targets[rest])
        torch.testing.assert_close(found[out], expected, rtol=1e-9, atol=1e-9)


# --- the expected accuracy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [15, 40, 200])
@pytest.mark.parametrize("strength", [0.1, 1.0])
def test_the_expected_accuracy_is_that_on_fresh_images(monkeypatch, count, strength):
    """Two Gaussian classes in 30 dimensions, where the tails are Gaussian: also with fewer images than dimensions."""
    monkeypatch.setattr(discriminant, "HEAVY_TAILS", 1.0)
    expected, real = [], []
    for seed in range(8):
        z, classes = draw([count, count], 30, seed, spread=0.7)
        spectrum = spectrum_of(z, classes)
        expected.append(expected_accuracy(spectrum, strength))
        fresh, truth = draw([4000, 4000], 30, 1000 + seed, spread=0.7)
        weight = spectrum.means * spectrum.inverse(strength)
        scores = ((fresh - spectrum.centre) @ spectrum.vectors) @ weight.T - (spectrum.means * weight).sum(dim=1) / 2
        real.append(float((scores.argmax(dim=1) == truth).double().mean()))
    assert np.mean(expected) == pytest.approx(np.mean(real), abs=0.03)


def test_fewer_images_are_regularised_more():
    few, many = (best_strength(spectrum_of(*draw([count] * 5, 40))) for count in (4, 400))
    assert few > 10 * many


def test_more_dimensions_than_images_do_not_fool_it():
    """Nearly without lambda the sample is fitted exactly: there the estimate says nothing, and is not chosen."""
    spectrum = spectrum_of(*draw([4] * 4, 60))
    assert expected_accuracy(spectrum, STRENGTHS[0]) == 0 < expected_accuracy(spectrum, best_strength(spectrum))


def test_many_classes_are_compared_by_a_part_of_them_whatever_their_order(monkeypatch):
    monkeypatch.setattr(discriminant, "COMPARED", 7)
    z, classes = draw([6] * 30, 8)
    spectrum, turned = spectrum_of(z, classes, compared), spectrum_of(z, 29 - classes, compared)
    assert len(spectrum.means) == 7
    for strength in STRENGTHS:
        assert expected_accuracy(spectrum, strength) == pytest.approx(expected_accuracy(turned, strength), abs=1e-12)


def test_more_classes_than_are_compared(monkeypatch):
    """The temperature is fitted on the new classes' images, whether or not they are among those compared."""
    z, classes = draw(COUNTS, views=4)
    x, _ = draw([3] * 6, seed=1, views=4)
    monkeypatch.setattr(discriminant, "COMPARED", 3)
    few = [
        taught(WAYS["passlora"], z, classes, stream) for stream in ([[0, 1, 2], [3], [4, 5]], [[5, 4], [0, 3, 2, 1]])
    ]
    assert torch.equal(few[0].strength, few[1].strength) and all(c.temperature_losses.any() for c in few)
    monkeypatch.undo()
    whole = taught(WAYS["passlora"], z, classes, [range(6)])
    whole.strength.copy_(few[0].strength)
    whole.forget_computed()
    found = raw_scores(few[0], x, [[0, 1, 2], [3], [4, 5]])
    torch.testing.assert_close(found, raw_scores(whole, x, [range(6)]), rtol=1e-4, atol=1e-4)


# --- any order, any split ----------------------------------------------------------------------------------------

COUNTS = [7, 3, 12, 5, 9, 4]


@st.composite
def streams(draw_from):
    """The six classes in any order, cut into tasks anywhere."""
    order = draw_from(st.permutations(range(6)))
    cuts = sorted(draw_from(st.sets(st.integers(1, 5))))
    return [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, 6], strict=True)]


def taught(made, z, classes, stream):
    """One task after another; classes are numbered as they come."""
    classifier = make_classifier(z.shape[-1], made)
    for task in stream:
        rows = torch.cat([(classes == c).nonzero()[:, 0] for c in task])
        number = torch.cat([torch.full((COUNTS[c],), i) for i, c in enumerate(task)])
        classifier.grow(len(task))
        classifier.fit_task(of_tensors(z[rows].float(), number))
    return classifier


def raw_scores(classifier, x, stream):
    """Before temperature and tails, the classes as they were numbered at first."""
    order = torch.tensor([c for task in stream for c in task])
    linear = replace(classifier.as_linear(), heavy_tails=False)
    scores = linear(x[:, 0].float() if linear.map is None else linear.map(x.float()))
    return (scores * classifier.temperature())[:, order.argsort()]


WAYS = {
    "passlora": method("slda", shrinkage="error", **LIFTED),
    "slda": method("slda"),
    "ridge": method("ridge", **{**LIFTED, "lift": "relu"}),
}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=15, deadline=None)
@given(stream=streams())
def test_any_order_and_any_split_make_the_same_model(way, stream):
    z, classes = draw(COUNTS, views=4)
    x, _ = draw([3] * 6, seed=1, views=4)
    once = taught(WAYS[way], z, classes, [range(6)])
    parts = taught(WAYS[way], z, classes, stream)
    if way == "ridge":  # whose lambda is chosen on images of the task at hand
        parts.strength.copy_(once.strength)
        parts.forget_computed()
    else:
        assert torch.equal(parts.strength, once.strength)
    expected = raw_scores(once, x, [range(6)])
    torch.testing.assert_close(
        raw_scores(parts, x, stream), expected, rtol=1e-6, atol=2e-6 * float(expected.abs().max())
    )


def test_ridge_in_tasks_is_ridge_at_once():
    """To 1e-8, by weighted least squares on all rows, for classes of unequal size."""
    z, classes = draw(COUNTS)
    z = z.float()
    found = taught(method("ridge"), z, classes, [[0, 1], [2], [3, 4, 5]])
    counts = torch.tensor(COUNTS).double()
    root = counts[classes].rsqrt()[:, None]
    rows, targets = z.double() * root, torch.nn.functional.one_hot(classes).double() * root
    gram = rows.T @ rows
    assert torch.allclose(found.whole(), gram, rtol=1e-10, atol=1e-10)
    lam = float(found.strength) * float(gram.trace()) / 6
    above = torch.cat([rows, math.sqrt(lam) * torch.eye(6, dtype=rows.dtype)])
    expected = torch.linalg.lstsq(above, torch.cat([targets, torch.zeros(6, 6, dtype=rows.dtype)])).solution.T
    regular = found.whole() + lam * torch.eye(6, dtype=rows.dtype)
    exact = torch.linalg.solve(regular, found.means.T).T
    assert torch.allclose(exact, expected, rtol=1e-8, atol=1e-8)
    assert torch.allclose(found.as_linear().weight * found.temperature(), expected.float(), rtol=1e-5, atol=1e-5)


def test_a_large_class_does_not_push_a_small_one_aside():
    """Without weights, ridge answers with the class of 400 images all along the border."""
    rng = np.random.default_rng(0)
    z = torch.from_numpy(np.concatenate([rng.normal(-0.7, 1, (400, 1)), rng.normal(0.7, 1, (20, 1))])).float()
    z = torch.cat([z, torch.ones(420, 1)], dim=1)
    classifier = make_classifier(2, method("ridge"))
    classifier.grow(2)
    classifier.fit_task(of_tensors(z, torch.tensor([0] * 400 + [1] * 20)))
    border = classifier.scores(torch.tensor([[[-0.4, 1.0]], [[0.4, 1.0]]]), "single").argmax(dim=1)
    assert border.tolist() == [0, 1]


# --- how sure ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["slda", "ridge"])
def test_the_temperature_makes_it_as_sure_as_it_is_right(name):
    options = {"shrinkage": "error"} if name == "slda" else {}
    classifier = make_classifier(30, method(name, **options))
    z, classes = draw([12] * 10, 30, spread=0.5)
    classifier.grow(10)
    classifier.fit_task(of_tensors(z.float(), classes))
    x, truth = draw([300] * 10, 30, seed=5, spread=0.5)
    scores = classifier.scores(x.float()[:, None], "single")
    right = float((scores.argmax(dim=1) == truth).double().mean())
    gap = abs(float(scores.softmax(dim=1).amax(dim=1).mean()) - right)
    raw = scores * classifier.temperature()
    assert gap < 0.1 < abs(float(raw.softmax(dim=1).amax(dim=1).mean()) - right)


def test_heavy_tails_keep_the_ranking_and_fall_off_with_a_power():
    scores = torch.tensor([[3.0, 1.0, -20.0], [0.0, 0.0, 8.0]], dtype=torch.float64)
    odds = (scores.max(dim=1, keepdim=True).values - scores) / 8
    expected = (1 + odds) ** -8.0
    found = heavy_tailed(scores)
    torch.testing.assert_close(found.softmax(dim=1), expected / expected.sum(dim=1, keepdim=True))
    assert torch.equal(found.argsort(dim=1, stable=True), scores.argsort(dim=1, stable=True))
    near = scores / 1e6
    torch.testing.assert_close(heavy_tailed(near).softmax(dim=1), near.softmax(dim=1), rtol=0, atol=1e-9)


@pytest.mark.parametrize("lift", ["none", "fourier"])
def test_lifted_features_have_heavy_tails_and_plain_ones_stay_linear(lift):
    """The temperature is the best one for the tails that the answers have."""
    classifier = make_classifier(6, method("slda", shrinkage="error", lift=lift, lift_width=30))
    z, classes = draw([12] * 5)
    classifier.grow(5)
    classifier.fit_task(of_tensors(z.float(), classes))
    linear, x = classifier.as_linear(), z.float()[:, None]
    raw = replace(linear, heavy_tails=False)(x[:, 0] if linear.map is None else linear.map(x))
    expected = raw if lift == "none" else heavy_tailed(raw)
    assert linear.heavy_tails == (lift == "fourier")
    assert torch.equal(classifier.scores(x, "single"), expected)
    spectrum = Spectrum.of(classifier.covariance(), classifier.means, classifier.counts, classifier.freedom)
    left_out = left_out_scores(spectrum, float(classifier.strength), classifier.map(x).double(), classes)
    losses = temperature_losses(left_out, classes, heavy_tails=lift == "fourier")
    torch.testing.assert_close(classifier.temperature_losses, losses)


@pytest.mark.parametrize("name", ["slda", "ridge"])
def test_a_class_of_one_image_says_nothing_of_the_temperature(name):
    """Left out, nothing is left of it: it would only say that nothing can be known."""
    options = {"shrinkage": "error"} if name == "slda" else {}
    classifier = make_classifier(6, method(name, **options))
    z, classes = draw([1] * 5)
    classifier.grow(5)
    classifier.fit_task(of_tensors(z.float(), classes))
    assert classifier.temperature() == 1.0 and classifier.scores(z.float()[:, None], "single").isfinite().all()


def test_what_is_left_out_is_of_every_class(monkeypatch):
    """Also where the images come in turns, a class each."""
    monkeypatch.setattr(moments.Sample, "MOST", 60)
    z, classes = torch.zeros(600, 3), torch.arange(600) % 10
    sample = moments.Sample(of_tensors(z, classes))
    list(sample.features)
    ((_, chosen),) = sample.parts
    assert len(chosen) == 60 and len(chosen.unique()) == 10


# --- lifts -------------------------------------------------------------------------------------------------------


def test_a_lift_s_numbers_are_the_same_for_ever():
    """They are stored nowhere: a model that was taught with others would be worthless."""
    assert feature_map.BANDWIDTH == 3.0
    assert feature_map.gaussian(192, 2000)[0, :3].tolist() == pytest.approx([1.7640524, 0.4001572, 0.9787380], abs=1e-6)
    assert feature_map.gaussian(192, 2000)[-1, -1].item() == pytest.approx(-1.7089849, abs=1e-6)
    assert feature_map.phases(2000)[:2].tolist() == pytest.approx([2.6202266, 4.5259323], abs=1e-5)


def test_the_fourier_lift_is_a_gaussian_kernel():
    x = torch.nn.functional.normalize(torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    lifted = FeatureMap(8, 1, "fourier", 40_000)(3 * x[:, None])  # their length does not matter
    kernel = torch.exp(-torch.cdist(x, x).square() / (2 * feature_map.BANDWIDTH**2))
    assert torch.allclose(lifted @ lifted.T, kernel, atol=0.02)


def test_the_relu_lift_is_a_random_layer():
    z = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(0))
    by_hand = (z[:, 0].numpy() @ np.random.RandomState(0).standard_normal((8, 50))).clip(min=0)
    np.testing.assert_allclose(FeatureMap(8, 1, "relu", 50)(z), by_hand, rtol=1e-4, atol=1e-5)


def test_views_stand_side_by_side_and_count_alike():
    z = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    longer = z * torch.tensor([1.0, 5.0, 0.1, 2.0])[:, None]
    assert torch.equal(FeatureMap(8, 4)(z), z.reshape(3, 32)), "as they are, so that they can be moved"
    for lift in ("relu", "fourier"):
        lifted = FeatureMap(8, 4, lift, 50)
        assert lifted(z).shape == (3, 50) and torch.allclose(lifted(longer), lifted(z), atol=1e-5)
