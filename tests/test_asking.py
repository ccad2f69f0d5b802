"""A model that is only asked: the same answers, without peft."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from quick import SMALL, write_digits
from quick import quick as quick

from passlora import PassLora, PassloraError
from passlora.config import ModelConfig
from passlora.network.factory import make_backbone

KINDS = {
    "qkv": {"preset": "finetune", "lora_alpha": 8.0},
    "attn+mlp": {"preset": "pass++", "lora_target_modules": "attn+mlp", "lora_r": 2},
    "whole": {"preset": "finetune", "lora_r": 0},
    "first": {"preset": "slda", "adapt_tasks": "first"},
    "sums": {"preset": "passlora", "lift_width": 30},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits") / "data", [0, 1, 2], 6)


@pytest.mark.parametrize(
    "kind", [k if k in ("qkv", "sums") else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_the_answers_are_the_same(kind, data, tmp_path, cli):
    training = {"num_train_epochs": 2, "lr_milestones": [1], "learning_rate": 0.01}
    made = PassLora.create(**{**SMALL, **training, **KINDS[kind]})
    made.learn(data)
    made.save_pretrained(tmp_path / "m")
    images = sorted(data.rglob("*.png"))
    asked = PassLora.from_pretrained(tmp_path / "m", asking=True)
    assert not asked.learner.network.backbone.has_lora
    for ours, theirs in zip(made.predict(images), asked.predict(images), strict=True):
        assert {p.label: p.probability for p in theirs} == pytest.approx(
            {p.label: p.probability for p in ours}, abs=1e-5
        )
    torch.testing.assert_close(asked.features(images), made.features(images), rtol=1e-4, atol=1e-5)
    for change in (lambda: asked.learn(data), lambda: asked.forget(["digit 0"]), lambda: asked.rename("digit 0", "x")):
        with pytest.raises(PassloraError, match="was loaded to be asked"):
            change()
    if kind in ("qkv", "attn+mlp"):
        for model, place in ((made, "one"), (asked, "two")):
            model.merge(tmp_path / place)
        from safetensors.torch import load_file

        one, two = (load_file(tmp_path / place / "model.safetensors") for place in ("one", "two"))
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("targets", ["qkv", "attn+mlp", r"stages\.\d\.(downsample\.1|blocks\.\d+\.mlp\.fc1)"])
def test_the_forms_of_an_adapter_are_pefts_own(targets):
    name = "test_convnext" if "stages" in targets else "test_vit"
    config = ModelConfig(model_name_or_path=name, pretrained=False, lora_target_modules=targets)
    taught, asked = make_backbone(config), make_backbone(config, plain=True)
    assert {k: (tuple(t.shape), t.dtype) for k, t in taught.forms().items()} == {
        k: (tuple(t.shape), t.dtype) for k, t in asked.forms().items()
    }


def test_convolutions_of_several_groups_are_left_to_peft():
    settings = {"model_name_or_path": "test_convnext", "pretrained": False, "lora_r": 24}
    config = ModelConfig(**settings, lora_target_modules=r"stages\.0\.blocks\.0\.conv_dw")
    with pytest.warns(UserWarning, match="groups"):
        assert make_backbone(config, plain=True).has_lora


WITHOUT = """
import sys
for name in ("peft", "transformers", "datasets"):
    sys.modules[name] = None  # whoever imports it fails
from passlora.cli.main import main
main(["predict", *sys.argv[1:]])
"""


@pytest.mark.slow  # a process of its own
def test_asking_imports_no_peft(data, tmp_path):
    made = PassLora.create(**SMALL, preset="pass++", num_train_epochs=1)
    made.learn(data)
    made.save_pretrained(tmp_path / "m")
    image = next(data.rglob("*.png"))
    done = subprocess.run([sys.executable, "-c", WITHOUT, tmp_path / "m", image], capture_output=True, text=True)
    assert done.returncode == 0 and "digit" in done.stdout, done.stderr
