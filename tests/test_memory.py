from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import in_two_shares
from hypothesis import given, settings
from hypothesis import strategies as st

from passlora.config import MethodConfig
from passlora.method.features import TaskFeatures, of_tensors
from passlora.method.memory import Memory, Statistics


def statistics(z, nodes, num_nodes, full=False, batch=5):
    made = Statistics(num_nodes, z.shape[1], full)
    for start in range(0, len(z), batch):  # the last batch is partial
        made.add(z[start : start + batch], nodes[start : start + batch])
    return made


def samples(counts, dim=6, seed=0):
    rng = np.random.default_rng(seed)
    nodes = np.repeat(np.arange(len(counts)), counts)
    z = rng.normal(size=(len(nodes), dim)) * 3 + nodes[:, None]
    order = rng.permutation(len(nodes))
    return torch.tensor(z[order]), torch.tensor(nodes[order])


def test_means_and_covariances_against_numpy():
    z, nodes = samples([4, 9, 12])
    diag, full = statistics(z, nodes, 3), statistics(z, nodes, 3, full=True)
    for node in range(3):
        rows = z[nodes == node].numpy()
        np.testing.assert_allclose(diag.means()[node], rows.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(diag.covariances()[node], rows.var(axis=0, ddof=1), rtol=1e-10)
        np.testing.assert_allclose(full.covariances()[node], np.cov(rows.T), rtol=1e-9, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=5), st.integers(1, 20), st.integers(0, 1000))
def test_statistics_do_not_depend_on_the_batches(counts, batch, seed):
    z, nodes = samples(counts, seed=seed)
    one, other = (
        statistics(z, nodes, len(counts), batch=len(z)),
        statistics(z, nodes, len(counts), batch=batch),
    )
    assert torch.allclose(one.means(), other.means(), rtol=1e-12)
    assert torch.allclose(one.covariances(), other.covariances(), rtol=1e-9, atol=1e-12)


def memory(dim=6, views=4, prototype_views=1, covariance="radius", radius="first"):
    method = MethodConfig(sst=views == 4, prototype_views=prototype_views, covariance=covariance, radius=radius)
    return Memory(dim, method)


def trace_over_d(z, nodes, node):
    return float(np.cov(z[nodes == node].numpy().T).trace()) / z.shape[1]


def test_the_radius_of_the_first_task():
    z, nodes = samples([5, 8])
    made = memory()
    made.add(statistics(z, nodes, 2))
    expected = math.sqrt((trace_over_d(z, nodes, 0) + trace_over_d(z, nodes, 1)) / 2)
    assert made.radius == pytest.approx(expected, rel=1e-12)
    later, nodes2 = samples([7], seed=1)
    made.add(statistics(10 * later, nodes2, 1))
    assert made.radius == pytest.approx(expected, rel=1e-12), "radius: first never moves"


def test_the_running_radius():
    z, nodes = samples([5, 8])
    later, nodes2 = samples([7], seed=1)
    made = memory(radius="running")
    made.add(statistics(z, nodes, 2))
    first = made.radius**2
    made.add(statistics(later, nodes2, 1))
    assert made.radius**2 == pytest.approx((2 * first + trace_over_d(later, nodes2, 0)) / 3, rel=1e-12)


def test_the_radius_of_four_views_reads_the_upright_ones():
    z, nodes = samples([6] * 8)
    one, four = memory(), memory(prototype_views=4)
    upright = nodes % 4 == 0
    one.add(statistics(z[upright], nodes[upright] // 4, 2))
    four.add(statistics(z, nodes, 8))
    assert four.radius == pytest.approx(one.radius, rel=1e-12)
    assert torch.allclose(four.class_means(), one.means)
    assert (one.num_entries, four.num_entries) == (2 * 6 + 1, 8 * 6 + 1)


@pytest.mark.parametrize(("views", "prototype_views"), [(4, 4), (4, 1), (1, 1)])
@pytest.mark.parametrize("covariance", ["radius", "diag", "full"])
def test_rows_keep_their_class_over_tasks(views, prototype_views, covariance):
    """A drawn node comes with the mean and the covariance of that very class, in whatever task it was learnt."""
    made = memory(views=views, prototype_views=prototype_views, covariance=covariance)
    for task, classes in enumerate((3, 2)):
        z, nodes = samples([5] * (classes * prototype_views), seed=task)
        scale = torch.arange(1.0, classes * prototype_views + 1)[nodes][:, None] * (10**task)
        made.add(statistics(z * scale, nodes, classes * prototype_views, covariance == "full"))
    rows = torch.arange(len(made.means))
    classes, view = rows // prototype_views, rows % prototype_views
    assert torch.equal(made.nodes(rows), views * classes + view)
    drawn = made.draw(200, torch.Generator().manual_seed(0), with_noise=True)
    assert set(drawn.nodes.tolist()) == set(made.nodes(rows).tolist())
    for i, node in enumerate(drawn.nodes.tolist()):
        row = prototype_views * (node // views) + node % views
        assert torch.equal(drawn.means[i], made.means[row])
        if covariance != "radius":
            assert torch.equal(drawn.covariance[i], made.spread[row])


@pytest.mark.parametrize("covariance", ["radius", "diag", "full"])
def test_the_noise_has_the_stored_covariance(covariance):
    z, nodes = samples([4, 40], dim=3)  # class 0 has a singular covariance matrix
    z = z * torch.tensor([1.0, 2.0, 0.5])
    made = memory(dim=3, views=1, covariance=covariance)
    made.add(statistics(z, nodes, 2, covariance == "full"))
    drawn = made.draw(200_000, torch.Generator().manual_seed(1), with_noise=True)
    for node in range(2):
        seen = np.cov(drawn.noise[drawn.nodes == node].numpy().T)
        stored = np.cov(z[nodes == node].numpy().T)
        expected = {"radius": made.radius**2 * np.eye(3), "diag": np.diag(np.diag(stored)), "full": stored}[covariance]
        np.testing.assert_allclose(seen, expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize("covariance", ["radius", "diag", "full"])
def test_a_class_with_one_image(covariance):
    z, nodes = samples([1, 6])
    made = memory(views=1, covariance=covariance)
    made.add(statistics(z, nodes, 2, covariance == "full"))
    assert made.radius == pytest.approx(math.sqrt(trace_over_d(z, nodes, 1)))
    drawn = made.draw(50, torch.Generator().manual_seed(0), with_noise=True)
    assert drawn.noise.isfinite().all() and drawn.covariance.isfinite().all()
    alone = memory(views=1, covariance=covariance)
    alone.add(statistics(z[nodes == 0], nodes[nodes == 0], 1, covariance == "full"))
    assert alone.radius == 0
    assert alone.draw(3, torch.Generator(), with_noise=True).noise.abs().max() == 0


def test_state_survives_a_round_trip():
    z, nodes = samples([5, 8])
    made = memory(covariance="diag")
    made.add(statistics(z, nodes, 2))
    later, nodes = samples([4], seed=1)
    made.add(statistics(later, nodes, 1))
    other = memory(covariance="diag")
    other.load_state_dict(made.state_dict())
    assert torch.equal(other.means, made.means) and torch.equal(other.spread, made.spread)
    assert other.radius == made.radius and other.num_classes == 3


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("prototype_views", [1, 4])
def test_a_task_is_remembered_from_shards_as_from_one_pass(full, prototype_views):
    """`remember` on two processes, each with its share in batches, against numpy over all features at once."""
    rng = np.random.default_rng(0)
    z, classes = torch.tensor(rng.normal(size=(20, 4, 5))), torch.tensor(rng.permutation([0] * 7 + [1] * 13))
    covariance = "full" if full else "diag"

    def share(rank, reduce):
        own = torch.arange(20).split([8, 12])[rank]
        batches = [(z[part], classes[part], part) for part in own.split(3)]
        made = memory(5, 4, prototype_views, covariance)
        made.remember(TaskFeatures(lambda: batches, 2, torch.bincount(classes), 5, reduce=reduce))
        return made.state_dict()

    one = memory(5, 4, prototype_views, covariance)
    one.remember(of_tensors(z, classes))
    for two in in_two_shares(share):
        for name, tensor in one.state_dict().items():
            assert torch.allclose(two[name], tensor, atol=1e-6), name
    for row in range(2 * prototype_views):
        own = z[classes == row // prototype_views, row % prototype_views].numpy()
        np.testing.assert_allclose(one.means[row], own.mean(axis=0), atol=1e-6)
        stored = np.cov(own.T)
        np.testing.assert_allclose(one.spread[row], stored if full else np.diag(stored), atol=1e-5)


@pytest.mark.parametrize("covariance", ["radius", "diag", "full"])
def test_forms_are_those_of_the_state(covariance):
    made = memory(prototype_views=4, covariance=covariance)
    for classes in (0, 3):
        if classes:
            z, nodes = samples([5] * 4 * classes)
            made.add(statistics(z, nodes, 4 * classes, covariance == "full"))
        state, forms = made.state_dict(), made.forms(classes)
        assert {n: (t.shape, t.dtype) for n, t in state.items()} == {n: (t.shape, t.dtype) for n, t in forms.items()}
        assert all(form.is_meta for form in forms.values())
