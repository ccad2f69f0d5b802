"""Every recipe starts: two real optimizer steps on stand-in images, with its own network, protocol and losses."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from passlora import train
from passlora.config import load

RECIPES = Path(__file__).parent.parent / "recipes"
FILES = sorted(path for path in RECIPES.glob("*/*.yaml") if path.parent.name != "accelerate_configs")
CLASSES = {"digits": 10, "uoft-cs/cifar100": 100, "zh-plus/tiny-imagenet": 200, "clane9/imagenet-100": 100}


class EnoughError(Exception):
    pass


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """Parquet with two images a class: 72 px where the recipe decodes large images, 32 px elsewhere."""
    import datasets

    def make(classes, side):
        folder = tmp_path_factory.getbasetemp() / f"standin-{classes}-{side}"
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
        for split in ("train", "test"):
            columns = {"image": [pictures[i % 20] for i in range(classes)], "label": list(range(classes))}
            table = datasets.Dataset.from_dict(columns, features=features)
            (folder / split).parent.mkdir(exist_ok=True)
            table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
        return folder

    return make


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_two_steps_of_each_recipe(path, stand_in, tmp_path, monkeypatch):
    recipe = yaml.safe_load(path.read_text())
    total = 1000 if recipe["dataset_name"] == "ILSVRC/imagenet-1k" else CLASSES[recipe["dataset_name"]]
    data = stand_in(total, 72 if recipe.get("image_size") == 224 else 32)
    changes = {"dataset_name": str(data), "per_device_train_batch_size": 2, "output_dir": str(tmp_path / "run")}
    if "deit" in recipe["model_name_or_path"]:
        changes["pretrained"] = False  # random weights of the same network: tests have no network
    config = load(str(path), {**changes, "compare": [], "dataloader_num_workers": 0})
    losses = []

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        assert gradients and all(g.isfinite().all() for g in gradients)
        losses.append(sum(float(g.abs().sum()) for g in gradients))
        result = real(self, closure)
        if len(losses) == 2:
            raise EnoughError
        return result

    real = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", step)
    with pytest.raises(EnoughError):
        train(config, lambda message: None)
    assert all(total > 0 for total in losses)


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
