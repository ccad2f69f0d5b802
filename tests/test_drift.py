"""Following a network that was trained on: maps with known answers, and what is moved by them."""

from __future__ import annotations

import pytest
import torch
from conftest import in_two_shares
from quick import SMALL
from quick import quick as quick

from passlora import Config, PassloraError
from passlora.data.batches import Images, select
from passlora.data.dataset import load_dataset
from passlora.method.classifiers import make_classifier
from passlora.method.drift import LinearDrift, SDCDrift
from passlora.method.features import of_tensors
from passlora.method.memory import Memory
from passlora.training.accelerator import make_accelerator
from passlora.training.learner import Learner

D = 6


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pairs(after, count=200, views=1, noise=0.0):
    z = random(count, views, D) + 2
    return [(z, after(z) + noise * random(count, views, D, seed=1), torch.arange(count))]


def test_a_linear_map_is_found_and_moves_means_and_covariances():
    true, shift = torch.eye(D, dtype=torch.float64) + 0.3 * random(D, D, seed=2), random(D, seed=3)
    drift = LinearDrift.fit(pairs(lambda z: z @ true + shift), D)
    assert torch.allclose(drift.matrix, true, atol=1e-2) and drift.residual < 1e-3
    means, other = random(5, D, seed=4), random(500, D, seed=5)
    assert torch.allclose(drift.means(means), means @ true + shift, atol=0.05)
    moved = drift.covariances(other.T.cov()[None])[0]
    assert torch.allclose(moved, (other @ true + shift).T.cov(), rtol=0.02, atol=0.05)


def test_nothing_is_moved_where_held_out_images_gain_nothing():
    """Noise alone: every map that explains it on the images it was fitted to is worse on the others."""
    drift = LinearDrift.fit(pairs(lambda z: z, count=8, noise=1.0), D)
    assert drift.residual <= 1
    still = LinearDrift.fit(pairs(lambda z: z), D)
    assert still.residual == 1 and torch.equal(still.matrix, torch.eye(D, dtype=torch.float64))
    assert torch.equal(still.means(random(3, D)), random(3, D))


def test_few_images_pull_towards_the_identity():
    true = torch.eye(D, dtype=torch.float64) + 0.3 * random(D, D, seed=2)
    few, many = (LinearDrift.fit(pairs(lambda z: z @ true, count=n, noise=0.5), D) for n in (6, 2000))
    away = [float((drift.matrix - torch.eye(D)).norm()) for drift in (few, many)]
    assert away[0] < away[1] and float((many.matrix - true).norm()) < 0.2


@pytest.mark.parametrize("kind", [LinearDrift, SDCDrift])
def test_two_processes_find_what_one_finds(kind):
    ((before, after, positions),) = pairs(lambda z: z * 1.3 + 0.2, count=61, views=4, noise=0.1)
    whole = kind.fit([(before, after, positions)], D).means(random(3, D))

    def share(rank, reduce):
        own = positions % 2 == rank
        batches = [(before[own][i : i + 9], after[own][i : i + 9], positions[own][i : i + 9]) for i in range(0, 31, 9)]
        return kind.fit([batch for batch in batches if len(batch[2])], D, reduce).means(random(3, D))

    for found in in_two_shares(share):
        torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [LinearDrift, SDCDrift])
def test_a_process_without_an_image_finds_it_too(kind):
    whole = pairs(lambda z: z * 1.3 + 0.2, count=7)
    expected = kind.fit(whole, D).means(random(3, D))
    for found in in_two_shares(lambda rank, reduce: kind.fit([] if rank else whole, D, reduce).means(random(3, D))):
        torch.testing.assert_close(found, expected)


def test_sdc_moves_a_mean_as_its_neighbours_moved():
    here, there = 0.1 * random(50, 1, D), 10 + 0.1 * random(50, 1, D, seed=1)
    z = torch.cat([here, there])
    after = torch.cat([here + 1.0, there - 2.0])
    drift = SDCDrift.fit([(z, after, torch.arange(100))], D)
    means = torch.tensor([[0.0] * D, [10.0] * D], dtype=torch.float64)
    torch.testing.assert_close(drift.means(means), means + torch.tensor([[1.0], [-2.0]]), rtol=1e-3, atol=1e-3)
    covariance = random(D, D)
    assert torch.equal(drift.covariances(covariance), covariance)


@pytest.mark.parametrize("views", [1, 4])
def test_slda_after_an_exact_map_is_slda_on_the_moved_features(views):
    true, shift = torch.eye(D, dtype=torch.float64) + 0.2 * random(D, D, seed=2), random(D, seed=3)
    drift = LinearDrift(true, shift, 0.0)
    settings = {"preset": "slda", "num_tasks": 1, "classifier_views": views, "adapt_tasks": "all", "drift": "linear"}
    z, classes = random(60, views, D, seed=7), torch.arange(60) % 3
    moved, refitted = (make_classifier(D, Config.make(**settings).method) for _ in range(2))
    for classifier, features in ((moved, z), (refitted, z @ true + shift)):
        classifier.grow(3)
        classifier.fit_task(of_tensors(features, classes))
    moved.move(drift)
    for name, tensor in refitted.state_dict().items():
        torch.testing.assert_close(moved.state_dict()[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("covariance", ["radius", "diag", "full"])
def test_a_memory_is_moved(covariance):
    method = Config.make(preset="slca++", num_tasks=1, covariance=covariance).method
    memory = Memory(D, method)
    z, classes = random(40, D, seed=7).float(), torch.arange(40) % 2
    memory.remember(of_tensors(z, classes))
    before = memory.means.clone()
    memory.move(LinearDrift(2 * torch.eye(D, dtype=torch.float64), torch.ones(D, dtype=torch.float64), 0.0))
    assert torch.allclose(memory.means, 2 * before + 1)
    if covariance != "radius":
        twice = Memory(D, method)
        twice.remember(of_tensors(2 * z + 1, classes))
        assert torch.allclose(memory.spread, twice.spread, rtol=1e-4)


def test_what_cannot_be_moved_says_so():
    classifier = make_classifier(D, Config.make(preset="fecam", num_tasks=1).method)
    with pytest.raises(PassloraError, match="fecam cannot follow a network that is trained on"):
        classifier.move(LinearDrift(torch.eye(D), torch.zeros(D), 1.0))


def taught(**settings):
    """Two tasks of digits on a small network; the learner, and the features of each task's images at the end."""
    base = {"dataset_name": "digits", "max_train_per_class": 12, "horizontal_flip": False, "crop_padding": 0}
    base |= {"num_train_epochs": 3, "per_device_train_batch_size": 8, "learning_rate": 0.01, "task_sizes": [5, 5]}
    config = Config.make(**{**base, **SMALL, **settings})
    learner = Learner(config, make_accelerator(config.training))
    data = load_dataset(config.data, 0)
    images = Images(data.train, 32, config.data, "digits")
    names = [{str(d): d for d in digits} for digits in (range(5), range(5, 10))]
    tasks = [select(images, data.train.labels, data.class_names, index) for index in names]
    for task in tasks:
        learner.learn(task, 5)
    return learner, [learner.features(task) for task in tasks]


def test_old_classes_are_followed_through_training():
    """The means that are kept end nearer to the true ones than without a map; and the network has moved."""
    away = {}
    for drift in ("none", "linear", "sdc"):
        learner, ((z, classes), _) = taught(preset="ncm", adapt_tasks="all", drift=drift)
        true = torch.stack([z[classes == c].mean(dim=0) for c in range(5)])
        away[drift] = float((learner.network.classifier.means[:5] - true).norm())
    assert away["none"] > 0.1, "the network moved"
    assert away["linear"] < 0.8 * away["none"] and away["sdc"] < away["none"]


SLOW = [pytest.param(preset, marks=pytest.mark.slow) for preset in ("slca++", "ssiat")]


@pytest.mark.parametrize("preset", [*SLOW, "sldc"])
def test_alignment_brings_the_nodes_of_all_tasks_to_one_scale(preset):
    """Each task trains its own nodes alone: without samples of all classes, one task's nodes shout the other's down."""
    right = {}
    for alignment in (False, True):
        learner, tasks = taught(preset=preset, **({} if alignment else {"alignment": False}))
        z, classes = (torch.cat(part) for part in zip(*tasks, strict=True))
        scores = learner.network.classifier.scores(z[:, None], "single")
        right[alignment] = float((scores.argmax(dim=1) == classes).float().mean())
    assert right[True] > right[False], right
