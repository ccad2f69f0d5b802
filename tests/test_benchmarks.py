"""The benchmarks run, and judge rightly; what they measure is no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.reference import Reference  # noqa: E402
from benchmarks.scene import LORA, RESNET, Scene  # noqa: E402
from benchmarks.timing import Row, interleave, ratios, table  # noqa: E402


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


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


def test_a_benchmark_by_name(tmp_path):
    done = run("teacher", "--rounds", "1", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["teacher"]
    lora, copy = rows
    assert lora["met"] and 0 < lora["median"] < 1 < copy["median"]
    assert "| DeiT-S/16 with LoRA: memory of the teacher |" in done.stdout


def test_an_unknown_benchmark_is_named():
    done = run("stepp")
    assert done.returncode == 2 and "no benchmark 'stepp'; there are step, usual" in done.stderr


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
