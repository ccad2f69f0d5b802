"""Every recipe starts: real optimizer steps on stand-in images, with its own network, protocol and losses."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from quick import quick as quick

from passlora import train
from passlora.config import load
from passlora.data.batches import TaskData, TrainPlans
from passlora.training.learner import Learner
from passlora.training.steps import TaskTraining

RECIPES = Path(__file__).parent.parent / "recipes"
OWN_PRESET = sorted(RECIPES.glob("deit_s16_passlora/*.yaml"))
OTHERS = {*OWN_PRESET, *RECIPES.glob("accelerate_configs/*.yaml")}
FILES = sorted(path for path in RECIPES.glob("*/*.yaml") if path not in OTHERS)
CLASSES = {"digits": 10, "uoft-cs/cifar100": 100, "zh-plus/tiny-imagenet": 200, "clane9/imagenet-100": 100}
CLASSES["ILSVRC/imagenet-1k"] = 100  # as many tasks, of fewer classes
OWN_NETWORK = {}  # random weights, and small inputs: no network, no GPU
TINY_NETWORK = {"model_name_or_path": "test_vit", "pretrained": False, "image_size": 16}
# One recipe a network runs on it by default, the others on a tiny one; all run on their own with the slow tests.
EXAMPLES = ("deit_s16_lora/cifar100_t10", "resnet18_scratch/cifar100_equal_t5", "mini/digits")


def named(path):
    return f"{path.parent.name}/{path.stem}"


CASES = [pytest.param(path, TINY_NETWORK, id=f"{named(path)}, tiny") for path in FILES if named(path) not in EXAMPLES]
CASES += [
    pytest.param(path, OWN_NETWORK, id=named(path), marks=[] if named(path) in EXAMPLES else [pytest.mark.slow])
    for path in FILES
]


class EnoughError(Exception):
    pass


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """Parquet with an image a class and split: 72 px where the recipe decodes large images, 32 px elsewhere."""
    import datasets

    def make(classes, side, test):
        folder = tmp_path_factory.getbasetemp() / f"standin-{classes}-{side}-{test}"
        if folder.is_dir():
            return folder
        rng, pictures = np.random.default_rng(0), []
        for _ in range(20):
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, format="PNG")
            pictures.append({"bytes": file.getvalue(), "path": None})
        features = datasets.Features(
            {"image": datasets.Image(), "label": datasets.ClassLabel(names=[f"c{i}" for i in range(classes)])}
        )
        for split in ("train", test):
            columns = {"image": [pictures[i % 20] for i in range(classes)], "label": list(range(classes))}
            table = datasets.Dataset.from_dict(columns, features=features)
            (folder / split).parent.mkdir(exist_ok=True)
            table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
        return folder

    return make


@pytest.mark.parametrize(("path", "network"), CASES)
def test_two_steps_a_task_of_each_recipe(path, network, stand_in, tmp_path, monkeypatch):
    """Two steps of the first task, then two of the second, where teacher and prototypes take part."""
    recipe = yaml.safe_load(path.read_text())
    total = CLASSES[recipe["dataset_name"]]
    data = stand_in(total, 72 if recipe.get("image_size") == 224 else 32, recipe.get("dataset_test_split", "test"))
    changes = {"dataset_name": str(data), "per_device_train_batch_size": 1, "num_train_epochs": 1, "lr_milestones": [1]}
    if "deit" in recipe["model_name_or_path"]:
        changes |= {"pretrained": False, "image_size": 64}
    elif "image_size" in recipe:
        changes |= {"image_size": 65 if recipe["image_size"] == 224 else 16}  # the stem for large images, or for small
    flags = {"compare": [], "dataloader_num_workers": 0, "max_train_per_class": 1, "max_test_per_class": 1}
    config = load(str(path), {**changes, **network, **flags, "output_dir": str(tmp_path / "run")})
    everything, seen = TrainPlans.__iter__, []
    monkeypatch.setattr(TrainPlans, "steps_per_epoch", 2)
    monkeypatch.setattr(TrainPlans, "__iter__", lambda self: islice(everything(self), 2))
    losses_of, evaluate = TaskTraining.losses, Learner.evaluate

    def losses(self, *arguments):
        found = losses_of(self, *arguments)
        assert found.total.isfinite()
        seen.append((self.task, found.old.item(), found.kd.item()))
        return found

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        assert gradients and all(gradient.isfinite().all() for gradient in gradients)
        result = real(self, closure)
        if len(seen) == 4:
            raise EnoughError
        return result

    real = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", step)
    monkeypatch.setattr(TaskTraining, "losses", losses)
    few = lambda self, data, modes: evaluate(self, TaskData(data.images, data.rows[:4], data.classes), modes)
    monkeypatch.setattr(Learner, "evaluate", few)
    with pytest.raises(EnoughError):
        train(config)
    assert [task for task, _, _ in seen] == [0, 0, 1, 1]
    assert all(old == kd == 0 for _, old, kd in seen[:2]), "nothing to remember yet"
    assert all(old > 0 for _, old, _ in seen[2:]) and seen[3][2] > 0, "prototypes; and the student has left its teacher"


@pytest.mark.parametrize("path", OWN_PRESET, ids=named)
def test_recipes_of_the_own_preset_run_whole(path, stand_in, tmp_path):
    """Ten tasks on a tiny network, with few random features; the recipe's own network is one that timm has."""
    data = stand_in(100, 32, "test")
    own = load(str(path), {})
    assert own.method.preset == "passlora" and own.scenario.num_tasks == 10
    architecture = own.model.model_architecture or own.model.model_name_or_path
    assert timm.is_model(architecture.split(".")[0])
    changes = {**TINY_NETWORK, "model_architecture": None, "dataset_name": str(data), "lift_width": 30}
    results = train(load(str(path), {**changes, "output_dir": str(tmp_path / "run")}))
    assert len(results["stage_accuracy"]) == 10 and results["task_sizes"] == [10] * 10


def test_accelerate_reads_its_configurations():
    from accelerate.commands.config.config_args import ClusterConfig

    found = {}
    for path in sorted((RECIPES / "accelerate_configs").glob("*.yaml")):
        found[path.stem] = ClusterConfig.from_yaml_file(str(path))
        assert f"--config_file recipes/accelerate_configs/{path.name}" in path.read_text()
    assert found["multi_node"].num_machines == 2 and found["multi_node"].num_processes == 8
    assert {name: made.mixed_precision for name, made in found.items()} == {
        "cpu_2proc": "no",
        "ddp": "bf16",
        "ddp_fp16": "fp16",
        "multi_node": "bf16",
    }


# --- the command -----------------------------------------------------------------------------------------------------


def test_recipes_are_listed_copied_and_run_by_name(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    code, out, _ = cli("recipes")
    assert code == 0 and all(named(path) in out for path in RECIPES.glob("*/*.yaml"))
    assert "CIFAR-100 in ten tasks of ten on the small bundled backbone" in out
    code, out, err = cli("recipes", "copy", "mini/digits")
    assert code == 0 and "passlora train --config digits.yaml" in out, err
    assert (tmp_path / "digits.yaml").read_bytes() == (RECIPES / "mini" / "digits.yaml").read_bytes()
    code, _, err = cli("recipes", "copy", "mini/digits")
    assert code == 2 and "exists already" in err
    code, _, err = cli("recipes", "copy", "mini/digit")
    assert code == 2 and "did you mean 'mini/digits'" in err
    assert cli("recipes", "copy")[0] == 2
    code, out, err = cli("validate", "mini/cifar100_t5")
    assert code == 0, err
    code, _, err = cli("train", "--config", "mini/nothing_like_it")
    assert code == 2 and "passlora recipes lists those" in err


def test_every_hint_leads_to_a_flag_that_there_is():
    from passlora.cli.main import COMMANDS, OTHER_NAMES, known_flags, make_parser

    parser = make_parser()
    commands = parser._subparsers._group_actions[0].choices
    flags = {flag for name in commands for flag in known_flags(parser, name)}
    assert len(commands) == len(COMMANDS) and {f"--{name}" for name in OTHER_NAMES.values()} <= flags


@pytest.mark.slow
def test_the_wheel_holds_the_recipes(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(RECIPES.parent)]
    subprocess.run(command, check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    assert {f"passlora/recipes/{path.parent.name}/{path.name}" for path in RECIPES.glob("*/*.yaml")} <= inside
