"""The benchmarks run, and judge rightly; what they measure is no test's business."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.inference import scores  # noqa: E402
from benchmarks.reference import Reference  # noqa: E402
from benchmarks.scene import LORA, RESNET, Scene  # noqa: E402
from benchmarks.timing import Row, interleave, ratios, table  # noqa: E402


@pytest.fixture
def run(monkeypatch, capsys):
    """`python -m benchmarks`, in this process: exit code, standard output, standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
        try:
            runpy.run_module("benchmarks", run_name="__main__")
            code = 0
        except SystemExit as done:
            code = done.code
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


def test_rounds_are_interleaved_and_ratios_taken_round_by_round():
    order = []
    sides = {"a": lambda: order.append("a") or 2.0, "b": lambda: order.append("b") or 4.0}
    seconds = interleave(sides, rounds=3)
    assert order == [*"ab", *"ab", *"ba", *"ab"], "one to warm up, then three; each side is first in turn"
    assert ratios(seconds, "b", "a") == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("values", "goal", "met"), [([1.0, 1.2, 9.0], "<= 1.2", True), ([1.3], "<= 1.2", False), ([2.1], ">= 2", True)]
)
def test_the_median_is_held_to_the_goal(values, goal, met):
    row = Row("a step", values, "times", goal)
    assert row.met is met
    assert ("**missed**" in table([row])) is not met


def test_a_benchmark_by_name(run, tmp_path):
    code, out, err = run("teacher", "--rounds", "1", "--json", tmp_path / "found.json")
    assert code == 0, err
    rows = json.loads((tmp_path / "found.json").read_text())["teacher"]
    lora, copy = rows
    assert lora["met"] and 0 < lora["median"] < 1 < copy["median"]
    assert "| DeiT-S/16 with LoRA: memory of the teacher |" in out


def test_what_is_asked_are_the_scores():
    scene = Scene(LORA, 2, 1)
    found = {mode: scores(scene, scene.images.cache, mode) for mode in ("single", "multiview")}
    assert all(part.shape == (2, 20) for part in found.values())
    assert not torch.allclose(found["single"], found["multiview"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["inference", "start-up", "feeding", "profile", "growth", "collecting", "choices", "known"]
)
def test_the_other_benchmarks_run(run, tmp_path, name):
    code, _, err = run(name, "--rounds", "1", "--json", tmp_path / "found.json")
    assert code == 0, err
    assert json.loads((tmp_path / "found.json").read_text())[name]


def test_an_unknown_benchmark_is_named(run):
    code, _, err = run("stepp")
    assert code == 2 and "no benchmark 'stepp'; there are step, usual" in err


@pytest.mark.parametrize("settings", [LORA, {**RESNET, "image_size": 16}], ids=["lora", "resnet18"])
def test_the_usual_implementation_learns(settings):
    """It is slow, but it is training: the head moves, and so does what the backbone makes of an image."""
    scene = Scene(settings, 4, 1)
    usual = Reference(scene)
    x = torch.rand(2, 3, 16, 16) if settings is not LORA else torch.rand(2, 3, 64, 64)
    head, teacher = usual.head.weight.detach().clone(), usual.teacher(x)
    usual()
    assert not torch.equal(usual.head.weight, head)
    assert not torch.allclose(usual.backbone.eval()(x), teacher), "the student, which was its teacher's double, moved"
    assert torch.equal(usual.teacher(x), teacher)
