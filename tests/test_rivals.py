"""Rivals of the preset passlora, each against a plain computation; and the comparison of all of them."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from quick import SMALL, SMALL_FLAGS, write_digits
from quick import quick as quick
from scipy.stats import multivariate_normal, t
from sklearn.linear_model import LogisticRegression
from transformers import pipeline

import passlora.serving  # noqa: F401
from passlora import Config, PassLora, PassloraError, train
from passlora.analysis import beyond, on_features, rivals
from passlora.config import ModelConfig
from passlora.method.classifiers import anacp, make_classifier, rgda
from passlora.method.features import of_tensors
from passlora.method.triangle import packed, size, unpacked
from passlora.network.factory import make_backbone


def method(preset, **settings):
    return Config.make(preset=preset, num_tasks=1, adapt_tasks="none", **settings).method


def gaussians(count=30, d=5, classes=3):
    rng = np.random.default_rng(0)
    z = np.concatenate(
        [rng.normal(size=(count, d)) @ rng.normal(size=(d, d)) + 2 * rng.normal(size=d) for _ in range(3)]
    )
    return z, np.repeat(np.arange(classes), count)


def taught(preset, z, y, tasks=((0,), (1, 2)), **settings):
    classifier = make_classifier(z.shape[1], method(preset, **settings))
    for task in tasks:
        rows = np.isin(y, task)
        classifier.grow(len(task))
        classifier.fit_task(of_tensors(torch.from_numpy(z[rows]), torch.from_numpy(y[rows] - min(task))))
    return classifier


def test_rgda_is_gaussian_classes_of_the_covariance_it_says(monkeypatch):
    z, y = gaussians()
    monkeypatch.setattr(rgda, "RANK", 2)
    found = taught("rgda", z, y).scores(torch.from_numpy(z)[:, None].float(), "single")
    own = [np.cov(z[y == c].T) for c in range(3)]
    shared = sum(own) / 3
    level = np.trace(shared) / 5
    for c in range(3):
        values, vectors = np.linalg.eigh(own[c])
        strongest = (vectors[:, -2:] * values[-2:]) @ vectors[:, -2:].T
        whole = rgda.OWN * strongest + rgda.SHARED * shared + rgda.IDENTITY * level * np.eye(5)
        expected = multivariate_normal(z[y == c].mean(axis=0), whole).logpdf(z)
        differences = found[:, c].double().numpy() - expected  # what all classes share is left out
        assert np.ptp(differences) < 1e-3
        assert (
            abs(differences[0] - (found[0, 0].item() - multivariate_normal_of(z, y, own, shared, level, 0)[0])) < 1e-3
        )


def multivariate_normal_of(z, y, own, shared, level, c):
    values, vectors = np.linalg.eigh(own[c])
    strongest = (vectors[:, -2:] * values[-2:]) @ vectors[:, -2:].T
    whole = rgda.OWN * strongest + rgda.SHARED * shared + rgda.IDENTITY * level * np.eye(5)
    return multivariate_normal(z[y == c].mean(axis=0), whole).logpdf(z)


def test_anacp_projects_onto_its_targets():
    """With many images and little regularisation, lifted features of a class land at its target prototype."""
    z, y = gaussians(count=60)
    classifier = taught("anacp", z, y, lift_width=600)
    lower = torch.linalg.cholesky(classifier.covariance())
    targets = anacp.pushed_apart(classifier.means.double(), lower)
    assert torch.allclose(targets.norm(dim=1), torch.ones(3, dtype=targets.dtype))
    grams = anacp.regularised(unpacked(classifier.grams, classifier.width))
    h = classifier.heads(torch.from_numpy(z)[:, None])
    joint = h.transpose(1, 2) @ h
    torch.testing.assert_close(unpacked(classifier.grams, classifier.width), joint)
    projection = torch.linalg.solve(grams, h.transpose(1, 2) @ targets[torch.from_numpy(y)])
    for head in range(anacp.HEADS):
        for c in range(3):
            mean = (h[head] @ projection[head])[torch.from_numpy(y == c)].mean(dim=0)
            assert (mean - targets[c]).norm() < 0.5 * (targets - targets[c]).norm(dim=1).max()
    rng = np.random.default_rng(1)
    round_ones = rng.normal(size=(180, 5)) + 3 * rng.normal(size=(3, 5))[y]
    classifier = taught("anacp", round_ones, y, lift_width=600)
    right = classifier.scores(torch.from_numpy(round_ones)[:, None].float(), "single").argmax(dim=1).numpy() == y
    assert right.mean() > 0.9


def test_targets_lie_further_apart_where_classes_are_round():
    means = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.2]], dtype=torch.float64)
    lower = torch.linalg.cholesky(torch.tensor([[4.0, 0.0], [0.0, 0.01]], dtype=torch.float64))
    centre = means.mean(dim=0)
    white = (means - centre) @ torch.linalg.inv(lower).T
    u, s, v = np.linalg.svd(white.numpy(), full_matrices=False)
    by_hand = u @ np.diag(s + 1) @ v @ lower.T.numpy() + centre.numpy()
    by_hand /= np.linalg.norm(by_hand, axis=1, keepdims=True)
    assert np.allclose(anacp.pushed_apart(means, lower).numpy(), by_hand)


def test_a_triangle_is_the_whole():
    whole = torch.randn(3, 4, 4, dtype=torch.float64)
    whole = whole + whole.transpose(1, 2)
    assert packed(whole).shape == (3, size(4)) and torch.equal(unpacked(packed(whole), 4), whole)


def test_the_probe_is_logistic_regression_and_learns_once():
    z, y = gaussians(count=40)
    probe = taught("joint-probe", z, y, tasks=((0, 1, 2),))
    found = probe.scores(torch.from_numpy(z)[:, None].float(), "single").argmax(dim=1).numpy()
    x = (z - z.mean(axis=0)) / z.std(axis=0)
    theirs = LogisticRegression(C=0.1, max_iter=300).fit(x, y).predict(x)
    assert (found == theirs).mean() > 0.9 and (found == y).mean() > 0.8
    probe.grow(1)
    with pytest.raises(PassloraError, match="learns all classes at once, as a bound"):
        probe.fit_task(of_tensors(torch.randn(4, 5), torch.zeros(4, dtype=torch.long)))


# --- features of several blocks ------------------------------------------------------------------------------------


def test_the_features_of_several_blocks_are_their_class_tokens():
    network = make_backbone(ModelConfig(feature_blocks=3)).eval()
    tokens = []
    base = network.body.get_base_model()
    for block in base.blocks[-3:]:
        block.register_forward_hook(lambda module, given, out: tokens.append(base.norm(out)[:, 0]))
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        z = network(x)
    assert z.shape == (2, 576) and network.feature_dim == 576
    assert torch.allclose(z, torch.cat(tokens, dim=1), atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(z[:, -192:], make_backbone(ModelConfig()).eval()(x), atol=1e-6), (
            "the last is the plain one"
        )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"feature_blocks": 7}, "feature_blocks 7: this backbone has 6 blocks"),
        ({"feature_blocks": 2, "model_name_or_path": "test_resnet", "pretrained": False}, "with a class token"),
    ],
)
def test_blocks_that_are_not_there(settings, says):
    with pytest.raises(PassloraError, match=says):
        make_backbone(ModelConfig(lora_r=0, **settings))


LIVES = {
    "layup": ["--feature_blocks", "2", "--num_train_epochs", "1"],
    "anacp": ["--lift_width", "60", "--num_train_epochs", "1"],
    "rgda": [],
    "slca++": ["--num_train_epochs", "2"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("digits")
    for lesson, digits in (("first", [0, 1, 2]), ("second", [3, 4])):
        write_digits(root / lesson / "train", digits, 12)
        write_digits(root / lesson / "test", range(digits[-1] + 1), 6, start=60)
    return root


@pytest.mark.parametrize(
    "preset", ["layup", *(pytest.param(name, marks=pytest.mark.slow) for name in LIVES if name != "layup")]
)
def test_a_life(preset, data, tmp_path, cli):
    """Taught by the command line, taught on, asked, merged and served, rolled back."""
    model = tmp_path / "model"
    code, _, err = cli("learn", model, "--data", data / "first", *SMALL_FLAGS, "--preset", preset, *LIVES[preset])
    assert code == 0, err
    code, out, err = cli("learn", model, "--data", data / "second")
    assert code == 0 and "knows 5 classes now" in out, err
    code, out, err = cli("eval", model, "--data", data / "second")
    assert code == 0, err
    code, _, err = cli("merge", model, tmp_path / "served", "--format", "transformers")
    if preset == "rgda":
        assert code == 2 and "is not linear" in err
    else:
        assert code == 0, err
        image = next((data / "second" / "test" / "digit 3").iterdir())
        asked = {
            row["label"]: row["score"] for row in pipeline("image-classification", str(tmp_path / "served"))(str(image))
        }
        (ours,) = PassLora.from_pretrained(model).predict([image])
        assert asked == pytest.approx({p.label: p.probability for p in ours}, abs=1e-4)
    code, _, err = cli("merge", model, tmp_path / "timm")
    assert code == (0 if preset == "slca++" else 2)
    assert cli("rollback", model, "--to_task", "0")[0] == 0
    assert len(PassLora.from_pretrained(model).classes) == 3


# --- the comparison ------------------------------------------------------------------------------------------------


def test_paired_differences_and_their_interval():
    values = [1.0, 2.0, 4.0, 3.0, 2.5]
    mean, half = beyond.interval(values)
    low, high = t.interval(0.95, 4, np.mean(values), np.std(values, ddof=1) / math.sqrt(5))
    assert (mean - half, mean + half) == pytest.approx((low, high), abs=2e-3)
    assert math.isnan(beyond.interval([1.0])[1])


def test_every_row_of_every_column_can_be_run(tmp_path):
    for scale in rivals.COLUMNS:
        beyond.check(scale, {}, tmp_path, [])
    with pytest.raises(PassloraError, match="did you mean '50-images'"):
        beyond.chosen_columns("mini", ["50-image"])


def test_the_comparison_from_the_command_line(tmp_path, cli, monkeypatch):
    rows = ("nearest mean", "passlora, never adapted", "passlora")
    column = rivals.MINI_COLUMNS["digits"]
    few = {**column.settings, **SMALL, "max_train_per_class": 4, "max_test_per_class": 3, "num_train_epochs": 1}
    monkeypatch.setitem(rivals.MINI_COLUMNS, "digits", rivals.Column("digits", few, rows))
    flags = ["--scale", "mini", "--columns", "digits", "--seeds", "0", "1", "--lift_width", "40"]
    flags += ["--output_dir", str(tmp_path)]
    code, out, err = cli("reproduce", "beyond", *flags)
    assert code == 0, err
    page = (tmp_path / "beyond/mini/digits/beyond.md").read_text()
    assert "passlora reproduce beyond --scale mini" in page and "over 2 class orders" in page
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(rows) and sum("**" in line for line in lines) >= 1
    kept = {
        path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("beyond/mini/digits/*/order_0.json")
    }
    assert kept["passlora"]["adapted"] in ("none", "first")
    frozen, run = kept["passlora__never_adapted"], kept["passlora"]
    if run["adapted"] == "none":
        assert frozen["last"] == pytest.approx(run["last"]), "features that are shared make the model of a run"
        assert frozen["avg"] == pytest.approx(run["avg"])
    assert kept["nearest_mean"]["passes"] == 1 and frozen["passes"] == 4
    again = cli("reproduce", "beyond", *flags)[1]
    assert "training" not in again and re.findall(r"\d+\.\d", again)[-5:] == re.findall(r"\d+\.\d", out)[-5:]


@pytest.mark.parametrize("adapt", ["first", "auto"])
def test_an_adapted_network_that_is_shared_makes_the_models_of_runs(tmp_path, adapt):
    """Two classifiers on one network that was trained once, and each in a run of its own."""
    base = {**SMALL, "dataset_name": "digits", "max_classes": 6, "max_train_per_class": 6, "max_test_per_class": 5}
    base |= {"num_tasks": 2, "num_train_epochs": 2, "seed": 3, "class_order_seed": 3, "adapt_tasks": adapt}
    sources = on_features.Sources()
    for preset in ("slda", "ncm"):
        config = Config.make(**base, preset=preset, output_dir=str(tmp_path / preset))
        run = train(config)
        decided, _ = sources.settled(config)
        shared = sources.learnt(decided)
        assert shared["accuracy_matrix"] == run["accuracy_matrix"] and shared["ece"] == pytest.approx(
            run["ece"], abs=1e-3
        )
        stored = beyond.numbers_stored(tmp_path / preset, 1)
        assert shared["stored"] == stored
    assert len(sources._features) == 1, "the network was trained once"


def test_rows_are_chosen_and_a_wrong_one_is_refused(tmp_path):
    chosen = beyond.chosen_columns("mini", ["digits"], ["SLDA", "passlora"])
    assert chosen["digits"].rows == ("SLDA", "passlora")
    with pytest.raises(PassloraError, match="did you mean 'SLDA'"):
        beyond.chosen_columns("mini", ["digits"], ["SLDAA"])
    with pytest.raises(PassloraError, match="the column 100-tasks has none of these rows"):
        beyond.check("mini", {}, tmp_path, ["100-tasks"], ["PASS++"])


def test_joint_training_sees_all_classes_in_one_task():
    config = Config.make(preset="joint", num_tasks=5)
    from passlora.data.scenario import make_scenario

    assert make_scenario(config.scenario, list(range(10)), 10).task_sizes == (10,)
    assert Config.make(preset="pass++", num_tasks=5, compare=["joint"]).as_preset("joint").scenario.joint


@pytest.mark.slow
def test_bounds_beside_a_run_see_all_classes_at_once(tmp_path, cli, monkeypatch):
    """Over two seeds, with the pictures, and in the report page: their curve is one point."""
    flags = ["--dataset_name", "digits", "--num_tasks", "5", "--max_train_per_class", "6", "--max_test_per_class", "3"]
    flags += [*SMALL_FLAGS, "--preset", "ncm", "--compare", "joint", "joint-probe", "--num_train_epochs", "1"]
    code, _, err = cli("train", *flags, "--seeds", "0", "1", "--output_dir", tmp_path / "run")
    assert code == 0, err
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["task_sizes"] == [2] * 5 and len(results["stage_accuracy"]) == 5
    for bound in ("joint", "joint-probe"):
        part = results["compare"][bound]
        assert part["task_sizes"] == [10] and len(part["stage_accuracy"]) == 1
    monkeypatch.undo()  # the page's pictures are drawn
    code, _, err = cli("report", tmp_path / "run", "--html", tmp_path / "page.html")
    assert code == 0 and "joint-probe" in (tmp_path / "page.html").read_text(), err


def test_the_comparison_refuses_what_would_mix_columns(tmp_path):
    with pytest.raises(PassloraError, match="these columns differ in dataset_name"):
        beyond.check("mini", {"dataset_name": "photos"}, tmp_path, ["digits", "50-images"])
    with pytest.raises(PassloraError, match="chooses its class orders itself"):
        beyond.check("mini", {"class_order_seed": 3}, tmp_path, ["digits"])


def test_a_held_out_test_split_is_that_of_the_order(tmp_path):
    """Digits have no test split: the features of one order's images are not another's."""
    sources = on_features.Sources()
    found = []
    for order in (0, 1):
        row = rivals.ROWS["nearest mean"]
        small = {**SMALL, "lora_r": 4}
        config = beyond.configuration(rivals.MINI_COLUMNS["digits"], row, order, small, tmp_path)
        found.append(sources.features(config).dataset.test.labels)
    assert not np.array_equal(found[0], found[1])
