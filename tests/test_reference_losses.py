"""The loss of every step of three short runs, held to recorded ones: what makes training faster may not change it.

`python tests/test_reference_losses.py` records them anew, which is right only when the method itself changes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator

from passlora import Config
from passlora.data.batches import Images, TaskData
from passlora.data.dataset import load_dataset
from passlora.training.learner import Learner
from passlora.training.steps import Hooks

RECORDED = Path(__file__).parent / "reference_losses.json"
DIGITS = {
    "dataset_name": "digits",
    "task_sizes": [6, 4],
    "max_train_per_class": 6,
    "crop_padding": 1,
    "num_train_epochs": 2,
    "lr_milestones": [1],
    "per_device_train_batch_size": 8,
}
RESNET = {"model_name_or_path": "passlora/resnet18", "pretrained": False, "lora_r": 0, "image_size": 16}
RUNS = {
    "lora": {},
    "lora, implicit": {"proto_aug": "implicit", "covariance": "diag", "radius": "running", "hard_label": "soft"},
    # A small learning rate: at the paper's 0.001 Adam's first steps turn the rounding of another order of sums (as by
    # channels-last, or by another number of threads) into 1e-3 of the loss.
    "resnet18": {**RESNET, "temperature": 0.1, "kd_reduction": "batch", "learning_rate": 1e-4, "weight_decay": 2e-4},
}


def losses_of(run: str, **changes) -> list[float]:
    """The total loss of each step of two tasks."""
    config = Config.make(**{**DIGITS, **RUNS[run], **changes})
    learner = Learner(config, Accelerator(cpu=True))
    split = load_dataset(config.data, config.training.seed).train
    images = Images(split, learner.network.backbone.image_size, config.data, "test")
    steps: list[float] = []
    for classes in (range(6), range(6, 10)):
        rows = np.flatnonzero(np.isin(split.labels, classes))
        data = TaskData(images, rows, split.labels)
        learner.learn(data, len(classes), Hooks(lambda log: steps.extend(log.steps)))
    return steps


@pytest.mark.parametrize("run", ["lora", *(pytest.param(run, marks=pytest.mark.slow) for run in list(RUNS)[1:])])
def test_the_losses_are_the_recorded_ones(run):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))[run]
    assert len(recorded) == 16
    assert losses_of(run) == pytest.approx(recorded, rel=1e-5)


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({run: losses_of(run) for run in RUNS}, indent=1) + "\n", encoding="utf-8")
