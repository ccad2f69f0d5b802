"""Features -> classifier: each against an independent reference; one interface for all of them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from conftest import in_two_shares
from sklearn.covariance import oas
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.svm import LinearSVC

from passlora import PassloraError
from passlora.config import MethodConfig
from passlora.method.classifiers import base, make_classifier, register
from passlora.method.classifiers.fetril import translate
from passlora.method.classifiers.slda import oas_shrinkage
from passlora.method.features import TaskFeatures, of_tensors

LINEAR = ["ncm", "slda", "ridge", "fetril", "anacp"]
FITTED = [*LINEAR, "fecam", "rgda"]
TASKS = ((0, 1, 2), (3,), (4, 5))


def method(name, **options):
    trained = name == "head"
    views = {} if trained else {"sst": False, "prototype_views": 1, "inference": "single"}
    return MethodConfig(classifier=name, adapt_tasks="all" if trained else "none", **views, **options)


def draw_blobs(counts, rng, root, centres):
    parts = [centre + rng.normal(size=(n, 8)) @ root for n, centre in zip(counts, centres, strict=True)]
    return torch.from_numpy(np.concatenate(parts)).float(), torch.from_numpy(np.repeat(np.arange(6), counts))


def make_blobs(counts):
    """Six Gaussian classes of a common, far from round covariance: features to learn from, 50 of each to test on."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(8, 8)) * np.linspace(0.2, 3, 8)
    centres = rng.normal(size=(6, 8)) * 3 + 2
    return draw_blobs(counts, rng, root, centres), draw_blobs([50] * 6, rng, root, centres)


@pytest.fixture(params=[[30] * 6, [4, 9, 40, 23, 2, 31]], ids=["equal", "unequal"])
def blobs(request):
    return make_blobs(request.param)


def taught(name, z, classes, tasks=TASKS, **options):
    """One task after another, the features of each in a random order."""
    classifier = make_classifier(z.shape[1], method(name, **options))
    for task in tasks:
        rows = torch.isin(classes, torch.tensor(task)).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]
        classifier.grow(len(task))
        classifier.fit_task(of_tensors(z[rows], classes[rows] - min(task)))
    return classifier


def scores(classifier, x):
    return classifier.scores(x[:, None], "single")


def differences(values):
    """Against the first class: what all classes share decides nothing."""
    return values - values[:, :1]


# --- nearest mean ------------------------------------------------------------------------------------------------


def test_nearest_mean_by_cosine(blobs):
    (z, classes), (x, _) = blobs
    found = scores(taught("ncm", z, classes, ncm_metric="cosine"), x)
    for i in range(0, len(x), 37):
        for c in range(6):
            mean = z[classes == c].double().mean(0)
            cosine = float(x[i].double() @ mean) / math.sqrt(float(x[i].double() @ x[i].double()) * float(mean @ mean))
            assert float(found[i, c]) == pytest.approx(cosine, abs=1e-6)


def test_nearest_mean_by_euclidean_distance(blobs):
    (z, classes), (x, _) = blobs
    found = scores(taught("ncm", z, classes, ncm_metric="euclidean"), x)
    means = np.stack([z[classes == c].double().numpy().mean(0) for c in range(6)])
    distances = np.array([[((row - mean) ** 2).sum() for mean in means] for row in x.double().numpy()])
    np.testing.assert_allclose(differences(found), differences(-distances / 2), rtol=1e-4, atol=1e-4)
    assert np.array_equal(found.argmax(1), distances.argmin(1))
    cosine = scores(taught("ncm", z, classes, ncm_metric="cosine"), x)
    assert not torch.equal(cosine.argmax(1), found.argmax(1)), "the two metrics are told apart"


# --- SLDA --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "dim"), [(400, 5), (30, 8), (6, 20), (3, 4)])
def test_the_shrinkage_is_scikit_learn_s(samples, dim):
    rng = np.random.default_rng(samples)
    x = rng.normal(size=(samples, dim)) @ (rng.normal(size=(dim, dim)) * np.linspace(0.1, 2, dim))
    covariance = torch.from_numpy(x.T @ x / samples)
    assert oas_shrinkage(covariance, samples) == pytest.approx(oas(x, assume_centered=True)[1], rel=1e-10)


def test_the_shrinkage_of_a_multiple_of_the_identity_is_whole():
    assert oas_shrinkage(torch.eye(4, dtype=torch.float64) * 3, 100) == 1.0
    assert oas_shrinkage(torch.zeros(4, 4, dtype=torch.float64), 100) == 1.0


def lda(z, classes):
    """Weights and biases of Gaussian classes with equal priors, written out in numpy from all features at once."""
    z, classes = z.double().numpy(), classes.numpy()
    means = np.stack([z[classes == c].mean(axis=0) for c in np.unique(classes)])
    centred = z - means[classes]
    freedom = len(z) - len(means)
    pooled = centred.T @ centred / freedom
    level, share = np.trace(pooled) / z.shape[1], oas_shrinkage(torch.from_numpy(pooled), freedom)
    shrunk = (1 - share) * pooled + share * level * np.eye(z.shape[1])
    weight = means @ np.linalg.inv(shrunk)
    return weight, -0.5 * (weight * means).sum(axis=1), share


def test_slda_in_tasks_is_lda_in_one_pass(blobs):
    (z, classes), (x, truth) = blobs
    weight, bias, _ = lda(z, classes)
    found = scores(taught("slda", z, classes), x)
    expected = differences(x.double().numpy() @ weight.T + bias)
    np.testing.assert_allclose(differences(found), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert (found.argmax(1) == truth).float().mean() > 0.8


def test_slda_is_scikit_learn_s_lda():
    """With as many images of each class. Its covariance divides by n, ours by n - 6: one factor on all scores."""
    rng = np.random.default_rng(5)
    root, centres = rng.normal(size=(8, 8)) * np.linspace(0.2, 3, 8), rng.normal(size=(6, 8)) * 3 + 2
    (z, classes), (x, _) = (draw_blobs([count] * 6, rng, root, centres) for count in (12, 20))
    _, _, share = lda(z, classes)
    assert 0.01 < share < 0.99
    reference = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=share, priors=[1 / 6] * 6)
    reference.fit(z.double().numpy(), classes.numpy())
    theirs = differences(reference.decision_function(x.double().numpy())) * (len(z) - 6) / len(z)
    found = differences(scores(taught("slda", z, classes), x))
    np.testing.assert_allclose(found, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def test_slda_with_fewer_images_than_dimensions():
    """The covariance alone would be singular: the shrinkage makes it an answer, and a good one."""
    rng = np.random.default_rng(2)
    centres = rng.normal(size=(3, 40))
    draw = lambda n: torch.from_numpy(np.repeat(centres, n, axis=0) + 0.7 * rng.normal(size=(3 * n, 40))).float()
    classifier = taught("slda", draw(4), torch.arange(3).repeat_interleave(4), ((0, 1, 2),))
    found = scores(classifier, draw(30))
    assert found.isfinite().all() and (found.argmax(1) == torch.arange(3).repeat_interleave(30)).float().mean() > 0.9


# --- FeTrIL ------------------------------------------------------------------------------------------------------


def test_fetril_moves_the_most_similar_new_class(blobs):
    (z, classes), _ = blobs
    means = torch.stack([z[classes == c].double().mean(0) for c in range(6)])
    target = 1.5 * means[2] + 0.01
    moved = translate(z.double(), classes, means, target)
    assert torch.allclose(moved.mean(0), target, atol=1e-9)
    assert torch.allclose(moved - target, z[classes == 2].double() - means[2], atol=1e-9)


def test_fetril_is_an_svm_on_new_and_moved_features(blobs):
    """The second task, by hand: two new classes beside two old ones, which only their means are left of."""
    (z, classes), (x, _) = blobs
    z, x = z.double().numpy(), x.double().numpy()
    classes = classes.numpy()
    found = taught("fetril", torch.from_numpy(z).float(), torch.from_numpy(classes), ((0, 1), (2, 3)))
    new = np.isin(classes, (2, 3))
    parts, labels = [z[new]], [classes[new]]
    for old in (0, 1):
        mean = z[classes == old].mean(axis=0)
        means = {c: z[classes == c].mean(axis=0) for c in (2, 3)}
        near = max(means, key=lambda c: mean @ means[c] / np.linalg.norm(mean) / np.linalg.norm(means[c]))
        parts.append(z[classes == near] - means[near] + mean)
        labels.append(np.full(len(parts[-1]), old))
    unit = lambda rows: rows / np.linalg.norm(rows, axis=1, keepdims=True)
    svm = LinearSVC(dual=False).fit(unit(np.concatenate(parts)), np.concatenate(labels))
    got = scores(found, torch.from_numpy(x).float())
    np.testing.assert_allclose(got, svm.decision_function(unit(x)), rtol=1e-2, atol=1e-2)


def test_fetril_knows_old_classes_without_their_features():
    (z, classes), (x, truth) = make_blobs([30] * 6)
    classifier = taught("fetril", z, classes)
    right = (scores(classifier, x).argmax(1) == truth).float()
    assert scores(classifier, x).shape == (300, 6)
    assert right[truth < 3].mean() > 0.5 and right[truth >= 3].mean() > 0.5
    one, two = taught("fetril", z, classes, ((0,),)), taught("fetril", z, classes, ((0, 1),))
    assert scores(one, x).shape == (300, 1)
    assert (scores(two, x[truth < 2]).argmax(1) == truth[truth < 2]).float().mean() > 0.8


# --- FeCAM -------------------------------------------------------------------------------------------------------


def test_fecam_by_hand(blobs):
    """A covariance, not the correlation of a covariance, regularised, brought to a correlation, inverted."""
    (z, classes), (x, _) = blobs
    found = scores(taught("fecam", z, classes), x)
    unit = lambda rows: rows / np.linalg.norm(rows, axis=1, keepdims=True)
    z, x = unit(z.double().numpy()), unit(x.double().numpy())
    for c in range(6):
        own = z[classes.numpy() == c]
        covariance = np.cov(own.T) if len(own) > 1 else np.eye(8)
        covariance = covariance + np.diag(covariance).mean() * np.eye(8)
        deviation = np.sqrt(np.diag(covariance))
        away = x - own.mean(axis=0)
        distance = (away @ np.linalg.inv(covariance / np.outer(deviation, deviation)) * away).sum(axis=1)
        np.testing.assert_allclose(found[:, c], -distance, rtol=1e-3, atol=1e-4)
    assert taught("fecam", torch.from_numpy(z).float(), classes).as_linear() is None


# --- all of them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"name": "ncm"}, {"name": "ncm", "ncm_metric": "euclidean"}, {"name": "slda"}])
def test_taught_in_two_tasks_as_in_one(blobs, options):
    """What is kept adds up: nothing depends on how classes came in tasks."""
    (z, classes), (x, _) = blobs
    whole = taught(z=z, classes=classes, tasks=(range(6),), **options)
    parts = taught(z=z, classes=classes, tasks=(range(2), range(2, 6)), **options)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
    torch.testing.assert_close(scores(parts, x), scores(whole, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FITTED)
def test_two_shares_as_one(blobs, name):
    """Each process reads its share in batches; sums over both give each the classifier of one process."""
    (z, classes), (x, _) = blobs

    def share(rank, reduce):
        classifier = make_classifier(8, method(name))
        for first, last in ((0, 4), (4, 6)):
            rows = ((classes >= first) & (classes < last)).nonzero()[:, 0]
            of_task = [(z[part][:, None], classes[part] - first, part - rows[0]) for part in rows.split(7)]
            classifier.grow(last - first)
            own, counts = of_task[rank::2], torch.bincount(classes[rows] - first)
            classifier.fit_task(TaskFeatures(lambda own=own: own, last - first, counts, 8, reduce=reduce))
        return classifier

    one = make_classifier(8, method(name))
    for first, last in ((0, 4), (4, 6)):
        rows = (classes >= first) & (classes < last)
        one.grow(last - first)
        one.fit_task(of_tensors(z[rows], classes[rows] - first))
    for shared in in_two_shares(share):
        for key, tensor in one.state_dict().items():
            torch.testing.assert_close(shared.state_dict()[key], tensor, rtol=1e-6, atol=1e-6, msg=key)
        torch.testing.assert_close(scores(shared, x), scores(one, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options", [*({"name": name} for name in ["head", *LINEAR]), {"name": "ncm", "ncm_metric": "euclidean"}], ids=str
)
def test_as_a_linear_layer_it_gives_the_scores(blobs, options):
    (z, classes), (x, _) = blobs
    if options["name"] == "head":
        classifier = make_classifier(8, method("head"))
        classifier.grow(6)
        nodes = classifier.as_linear()(x)
        assert nodes.shape == (300, 24)
        assert torch.allclose(nodes[:, ::4], scores(classifier, x), atol=1e-6)
        return
    classifier = taught(z=z, classes=classes, **options)
    linear = classifier.as_linear()
    rows = x.double() if linear.map is None else linear.map(x[:, None]).double()
    if linear.unit_length:
        rows = rows / rows.norm(dim=1, keepdim=True)
    by_hand = rows @ linear.weight.double().T + linear.bias.double()
    torch.testing.assert_close(scores(classifier, x).double(), by_hand, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", base.KINDS)
def test_forms_are_those_of_what_is_stored(name):
    """At every size, from none: what a reader expects of a file is what a writer puts there."""
    classifier = make_classifier(5, method(name))
    described = lambda state: {key: (tuple(t.shape), t.dtype) for key, t in state.items()}
    for classes, more in ((0, 3), (3, 2), (5, 0)):
        assert classifier.num_classes == classes
        forms = classifier.forms(classes)
        assert all(form.is_meta for form in forms.values())
        assert described(forms) == described(classifier.state_dict())
        fresh = make_classifier(5, method(name))
        fresh.grow(classes)
        fresh.load_state_dict(classifier.state_dict())  # grown at once, it takes what grew in steps
        if more:
            classifier.grow(more)


@pytest.mark.parametrize("name", FITTED)
def test_what_was_computed_goes_when_something_else_is_loaded(blobs, name):
    (z, classes), (x, _) = blobs
    one, other = taught(name, z, classes), taught(name, z * 2 + 1, classes)
    before, expected = scores(one, x), scores(other, x)
    assert not torch.allclose(before, expected)
    one.load_state_dict(other.state_dict())
    assert torch.equal(scores(one, x), expected)


@pytest.mark.parametrize("name", FITTED)
def test_what_was_computed_goes_with_the_next_task(blobs, name):
    (z, classes), (x, _) = blobs
    classifier = taught(name, z, classes, ((0, 1),))
    assert scores(classifier, x).shape == (300, 2)
    classifier.grow(1)
    classifier.fit_task(of_tensors(z[classes == 2], torch.zeros(int((classes == 2).sum()), dtype=torch.long)))
    torch.testing.assert_close(scores(classifier, x), scores(taught(name, z, classes, ((0, 1), (2,))), x))


@pytest.mark.parametrize("options", [*({"name": name} for name in FITTED), {"name": "ncm", "ncm_metric": "euclidean"}])
def test_a_single_image_a_class(options):
    z = torch.eye(4)[:3] * torch.tensor([1.0, 2.0, 0.5, 1.0]) + 0.1
    alone = taught(z=z[:1], classes=torch.tensor([0]), tasks=((0,),), **options)
    assert scores(alone, z).isfinite().all() and scores(alone, z).shape == (3, 1)
    for tasks in (((0, 1, 2),), ((0,), (1, 2)), ((0, 1), (2,))):
        found = scores(taught(z=z, classes=torch.arange(3), tasks=tasks, **options), z)
        assert found.isfinite().all() and found.argmax(1).tolist() == [0, 1, 2], tasks


def test_one_name_is_one_classifier():
    with pytest.raises(PassloraError, match="'slda' is registered already"):

        @register("slda")
        class Other(base.Classifier):
            pass

    kind = base.KINDS["slda"]
    assert kind.__name__ == "SLDA" and register("slda")(kind) is kind, "the same one again is no harm"
    with pytest.raises(PassloraError, match=r"no classifier 'sdla'.*slda"):
        make_classifier(4, dataclasses.replace(method("slda"), classifier="sdla"))
