"""Each baseline on a case whose right answer is known."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import nn

from passlora import Config, PassloraError, train
from passlora.method.classifiers import make_classifier
from passlora.method.classifiers.fetril import translate
from passlora.method.classifiers.head import Head
from passlora.method.classifiers.ncm import class_means
from passlora.method.classifiers.slda import SHRINKAGE
from passlora.method.objective import LWF_TEMPERATURE, logit_losses
from passlora.model.passlora import PassLora


@pytest.fixture
def blobs():
    """Six Gaussian classes of a common, far from round covariance; 30 features of each to learn from, 50 to test on."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(8, 8)) * np.linspace(0.2, 3, 8)
    centres = rng.normal(size=(6, 8)) * 3 + 2

    def draw(count):
        z = np.concatenate([centre + rng.normal(size=(count, 8)) @ root for centre in centres])
        return torch.from_numpy(z).float(), torch.arange(6).repeat_interleave(count)

    return draw(30), draw(50)


def taught_in_tasks(name, z, classes):
    classifier = make_classifier(name)
    for task in ((0, 1, 2), (3,), (4, 5)):
        rows = torch.isin(classes, torch.tensor(task))
        order = torch.randperm(int(rows.sum()), generator=torch.Generator().manual_seed(1))
        classifier.add(z[rows][order], classes[rows][order])
    return classifier


def test_slda_in_tasks_is_lda_in_one_pass(blobs):
    """scikit-learn's LDA on all features at once has the same decision function."""
    (z, classes), (x, truth) = blobs
    reference = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=SHRINKAGE, priors=[1 / 6] * 6)
    reference.fit(z.double().numpy(), classes.numpy())
    ours = taught_in_tasks("slda", z, classes).scores(x)
    theirs = torch.from_numpy(reference.decision_function(x.double().numpy()))
    difference = ours - theirs
    assert torch.allclose(difference, difference[:, :1].expand_as(difference), atol=2e-2 * float(theirs.std()))
    assert (ours.argmax(1) == theirs.argmax(1)).float().mean() > 0.99
    assert (ours.argmax(1) == truth).float().mean() > 0.8


def test_ncm_is_the_nearest_mean_by_cosine(blobs):
    (z, classes), (x, _) = blobs
    scores = taught_in_tasks("ncm", z, classes).scores(x)
    for i in range(0, len(x), 37):
        for c in range(6):
            mean = z[classes == c].double().mean(0)
            cosine = float(x[i].double() @ mean) / math.sqrt(float(x[i].double() @ x[i].double()) * float(mean @ mean))
            assert float(scores[i, c]) == pytest.approx(cosine, rel=1e-9)


def test_fetril_moves_the_most_similar_new_class(blobs):
    (z, classes), _ = blobs
    means = class_means(z.double(), classes)
    target = 1.5 * means[2] + 0.01
    moved = translate(z.double(), classes, means, target)
    assert torch.allclose(moved.mean(0), target, atol=1e-9)
    assert torch.allclose(moved - target, z[classes == 2].double() - means[2], atol=1e-9)


def test_fetril_knows_old_classes_without_their_features(blobs):
    (z, classes), (x, truth) = blobs
    classifier = taught_in_tasks("fetril", z, classes)
    accuracy = (classifier.scores(x).argmax(1) == truth).float()
    assert classifier.scores(x).shape == (300, 6)
    assert accuracy[truth < 3].mean() > 0.5 and accuracy[truth >= 3].mean() > 0.5
    one, two = make_classifier("fetril"), make_classifier("fetril")
    one.add(z[classes == 0], classes[classes == 0])
    assert one.scores(x).shape == (300, 1)
    two.add(z[classes < 2], classes[classes < 2])
    assert (two.scores(x[truth < 2]).argmax(1) == truth[truth < 2]).float().mean() > 0.8


# --- LwF and LwF-MC ----------------------------------------------------------------------------------------------


@pytest.fixture
def logits_case():
    g = torch.Generator().manual_seed(3)
    head = Head(5).double()
    head.grow(7)
    head.weight = nn.Parameter(torch.randn(7, 5, generator=g, dtype=torch.float64), requires_grad=False)
    head.bias.requires_grad_(False)
    z = torch.randn(4, 5, generator=g, dtype=torch.float64)
    return head, z, torch.tensor([4, 6, 5, 4]), torch.randn(4, 4, generator=g, dtype=torch.float64)


def softmax(values, temperature):
    exponentials = [math.exp(float(v) / temperature) for v in values]
    return [e / sum(exponentials) for e in exponentials]


def test_lwf_against_sums_by_hand(logits_case):
    head, z, nodes, old = logits_case
    config = Config.make(num_tasks=1, preset="lwf").method
    losses = logit_losses(head, z, nodes, old, config)
    logits = head(z).tolist()
    new = kd = 0.0
    for row, node, teacher in zip(logits, nodes.tolist(), old.tolist(), strict=True):
        new -= math.log(softmax(row, 1)[node]) / 4
        p, q = softmax(teacher, LWF_TEMPERATURE), softmax(row[:4], LWF_TEMPERATURE)
        kd += LWF_TEMPERATURE**2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / 4
    assert float(losses.new) == pytest.approx(new) and float(losses.kd) == pytest.approx(kd)
    assert float(losses.total) == pytest.approx(new + config.kd_weight * kd)
    same = logit_losses(head, z, nodes, head(z)[:, :4].detach(), config)
    assert float(same.kd) == pytest.approx(0, abs=1e-12)


def test_lwf_mc_against_sums_by_hand(logits_case):
    head, z, nodes, old = logits_case
    config = Config.make(num_tasks=1, preset="lwf-mc").method
    losses = logit_losses(head, z, nodes, old, config)

    def binary(logit, target):
        p = 1 / (1 + math.exp(-logit))
        return -target * math.log(p) - (1 - target) * math.log(1 - p)

    new = kd = 0.0
    for row, node, teacher in zip(head(z).tolist(), nodes.tolist(), old.tolist(), strict=True):
        new += sum(binary(row[c], float(c == node)) for c in range(4, 7)) / 4
        kd += sum(binary(row[c], 1 / (1 + math.exp(-teacher[c]))) for c in range(4)) / 4
    assert float(losses.new) == pytest.approx(new) and float(losses.kd) == pytest.approx(kd)
    first = logit_losses(head, z, nodes, None, config)
    rows = zip(head(z).tolist(), nodes.tolist(), strict=True)
    everything = sum(binary(row[c], float(c == node)) for row, node in rows for c in range(7))
    assert float(first.total) == pytest.approx(everything / 4) and float(first.kd) == 0


# --- in a run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["lwf", "lwf-mc", "ncm", "slda", "simplecil", "fetril"])
def test_every_baseline_runs_on_real_digits(tiny, tmp_path, preset):
    budget = {"max_train_per_class": 12, "max_test_per_class": 10, "num_train_epochs": 4, "lr_milestones": [3]}
    config = tiny(preset=preset, task_sizes=[4, 3, 3], output_dir=str(tmp_path / "run"), **budget)
    said = []
    results = train(config, said.append)
    assert results["finished"] and results["preset"] == preset and len(results["stage_accuracy"]) == 3
    assert results["stage_accuracy"][0] > 40, "four digits, after few steps"
    assert json.loads((tmp_path / "run" / "results.json").read_text())["last"] == results["last"]
    if config.method.classifier != "head":
        assert results["last"] > 45, "no forgetting on frozen features"
        assert not (tmp_path / "run" / "passlora.json").exists()
        assert train(config, said.append)["last"] == results["last"] and "finished already" in said[-2]


def test_baselines_beside_a_run(tiny, tmp_path, cli):
    config = tiny(
        preset="finetune",
        compare=["ncm", "slda"],
        extra_inference=["nearest_prototype"],
        max_train_per_class=3,
        output_dir=str(tmp_path / "run"),
    )
    results = train(config, lambda text: None)
    assert list(results["compare"]) == ["ncm", "slda"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"classifier": "slda"}, "adapt_tasks"),
        ({"adapt_tasks": "first"}, "adapt_tasks"),
        ({"preset": "slda", "inference": "multiview", "sst": True}, "reads plain features"),
    ],
)
def test_settings_that_cannot_be(tiny, flags, says):
    with pytest.raises(PassloraError, match=says):
        tiny(**flags)


def test_a_baseline_is_no_model():
    with pytest.raises(PassloraError, match="slda is a baseline of passlora train"):
        PassLora.create(preset="slda")
