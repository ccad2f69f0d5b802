"""LwF and LwF-MC against sums by hand, and every baseline in a run. Classifiers: test_classifiers.py."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
from conftest import plain_head
from quick import quick as quick
from torch import nn

from passlora import Config, PassLora, PassloraError, train
from passlora.data.batches import Images, select
from passlora.data.dataset import load_dataset
from passlora.method.objective import LWF_TEMPERATURE, Teacher, objective
from passlora.training.steps import TaskTraining

# --- LwF and LwF-MC ----------------------------------------------------------------------------------------------


@pytest.fixture
def logits_case():
    g = torch.Generator().manual_seed(3)
    head = plain_head(5).double()
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
    losses = objective(head, z, nodes, None, Teacher(z, old), config)
    logits = head(z).tolist()
    new = kd = 0.0
    for row, node, teacher in zip(logits, nodes.tolist(), old.tolist(), strict=True):
        new -= math.log(softmax(row, 1)[node]) / 4
        p, q = softmax(teacher, LWF_TEMPERATURE), softmax(row[:4], LWF_TEMPERATURE)
        kd += LWF_TEMPERATURE**2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / 4
    assert float(losses.new) == pytest.approx(new) and float(losses.kd) == pytest.approx(kd)
    assert float(losses.total) == pytest.approx(new + config.kd_weight * kd)
    same = objective(head, z, nodes, None, Teacher(z, head(z)[:, :4].detach()), config)
    assert float(same.kd) == pytest.approx(0, abs=1e-12)


def test_lwf_mc_against_sums_by_hand(logits_case):
    head, z, nodes, old = logits_case
    config = Config.make(num_tasks=1, preset="lwf-mc").method
    losses = objective(head, z, nodes, None, Teacher(z, old), config, known=4)

    def binary(logit, target):
        p = 1 / (1 + math.exp(-logit))
        return -target * math.log(p) - (1 - target) * math.log(1 - p)

    new = kd = 0.0
    for row, node, teacher in zip(head(z).tolist(), nodes.tolist(), old.tolist(), strict=True):
        new += sum(binary(row[c], float(c == node)) for c in range(4, 7)) / 4
        kd += sum(binary(row[c], 1 / (1 + math.exp(-teacher[c]))) for c in range(4)) / 4
    assert float(losses.new) == pytest.approx(new) and float(losses.kd) == pytest.approx(kd)
    first = objective(head, z, nodes, None, None, config)
    rows = zip(head(z).tolist(), nodes.tolist(), strict=True)
    everything = sum(binary(row[c], float(c == node)) for row, node in rows for c in range(7))
    assert float(first.total) == pytest.approx(everything / 4) and float(first.kd) == 0


# --- in a run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "preset",
    [
        *(pytest.param(preset, marks=pytest.mark.slow) for preset in ("lwf", "lwf-mc")),
        "ncm",
        "slda",
        "simplecil",
        "fetril",
        "fecam",
    ],
)
def test_every_baseline_runs_on_real_digits_and_makes_a_model(tiny, tmp_path, caplog, preset):
    caplog.set_level(logging.INFO, "passlora")
    budget = {"max_train_per_class": 12, "max_test_per_class": 10, "num_train_epochs": 4, "lr_milestones": [3]}
    config = tiny(preset=preset, task_sizes=[4, 3, 3], output_dir=str(tmp_path / "run"), **budget)
    results = train(config)
    assert results["finished"] and results["preset"] == preset and len(results["stage_accuracy"]) == 3
    assert results["stage_accuracy"][0] > 40, "four digits, after few steps"
    assert json.loads((tmp_path / "run" / "results.json").read_text())["last"] == results["last"]
    if config.method.classifier != "head":
        assert results["last"] > 45, "no forgetting on frozen features"
    model = PassLora.from_pretrained(tmp_path / "run")
    data = load_dataset(config.data, config.training.seed)
    index = {name: i for i, name in enumerate(model.classes)}
    tested = select(Images(data.test, 64, config.data, "digits"), data.test.labels, data.class_names, index)
    assert model.learner.evaluate(tested, ["single"])["single"].accuracy == pytest.approx(results["last"])
    caplog.clear()
    assert train(config)["last"] == results["last"]
    assert any("finished already" in message for message in caplog.messages)


def test_baselines_beside_a_run(small, tmp_path):
    config = small(
        preset="finetune",
        compare=["ncm", "slda"],
        extra_inference=["nearest_prototype"],
        max_train_per_class=3,
        output_dir=str(tmp_path / "run"),
    )
    results = train(config)
    assert list(results["compare"]) == ["ncm", "slda"]
    for name in results["compare"]:
        assert len(PassLora.from_pretrained(tmp_path / "run" / "compare" / name).classes) == 10


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"classifier": "slda"}, "start from its --preset"),
        ({"preset": "slda", "adapt_tasks": "all", "lift": "relu"}, "cannot follow a network"),
        ({"preset": "ranpac", "adapt_tasks": "all"}, "cannot follow a network"),
        ({"preset": "slda", "adapt_tasks": "all", "kd_weight": 1, "kd_on": "logits"}, "distils a trained head"),
        ({"preset": "slda", "alignment": True}, "alignment true has no effect"),
        ({"preset": "slda", "drift": "linear"}, "drift linear has no effect"),
        ({"adapt_tasks": "first"}, "adapt_tasks"),
        ({"preset": "slda", "inference": "multiview", "adapt_tasks": "first", "sst": True}, "has one way to answer"),
    ],
)
def test_settings_that_cannot_be(tiny, flags, says):
    with pytest.raises(PassloraError, match=says):
        tiny(**flags)


def test_a_lesson_by_slda_needs_no_training(image_tree, monkeypatch):
    """No step is taken, and what it learns is right."""
    monkeypatch.setattr(TaskTraining, "__init__", lambda *arguments: pytest.fail("a frozen model was trained"))
    root = image_tree(size=(16, 16))
    model = PassLora.create(preset="slda")
    for names in (["cat", "dog"], ["owl"]):
        lesson = model.learn(root, classes=names)
    assert lesson.all_after == 100 and lesson.old_before == 100
