"""Presets: named sets of values for knobs. PASS++ is what the knobs' own defaults spell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from passlora.config.registry import NameIn, check_name
from passlora.errors import PassloraError, nearest

DEFAULT_PRESET = "pass++"
_PLAIN: dict[str, Any] = {
    "sst": False,
    "proto_aug": "none",
    "hardness": False,
    "prototype_views": 1,
    "inference": "single",
}
# Trained on every task by its own classes alone; Gaussians of all classes then align the head.
_ALIGNED: dict[str, Any] = {
    **_PLAIN,
    "kd_weight": 0.0,
    "new_loss": "new_classes",
    "covariance": "full",
    "alignment": True,
}
_FROZEN: dict[str, Any] = {**_PLAIN, "kd_weight": 0.0, "adapt_tasks": "none"}
PRESETS: dict[str, dict[str, Any]] = {
    "pass++": {},
    "pass": {"hardness": False, "prototype_views": 1, "inference": "single"},
    "lwf-kd": _PLAIN,
    "finetune": {**_PLAIN, "kd_weight": 0.0},
    "lwf": {**_PLAIN, "kd_on": "logits", "kd_weight": 1.0},
    "lwf-mc": {**_PLAIN, "kd_on": "logits", "kd_weight": 1.0, "new_loss": "binary"},
    "slca++": {**_ALIGNED, "lr_later_tasks": 0.1},
    "ssiat": {**_ALIGNED, "drift": "sdc"},
    "sldc": {**_ALIGNED, "drift": "linear", "kd_weight": 1.0},
    "ncm": {**_FROZEN, "classifier": "ncm"},
    "slda": {**_FROZEN, "classifier": "slda"},
    "simplecil": {**_FROZEN, "classifier": "ncm", "adapt_tasks": "first"},
    "fetril": {**_FROZEN, "classifier": "fetril", "adapt_tasks": "first"},
    "fecam": {**_FROZEN, "classifier": "fecam"},
    "acil": {**_FROZEN, "classifier": "ridge", "lift": "relu"},
    "ranpac": {**_FROZEN, "classifier": "ridge", "lift": "relu", "adapt_tasks": "first"},
    "klda": {**_FROZEN, "classifier": "slda", "lift": "fourier", "shrinkage": "error"},
    "layup": {**_FROZEN, "classifier": "ridge", "feature_blocks": 6, "adapt_tasks": "first"},
    "anacp": {**_FROZEN, "classifier": "anacp", "adapt_tasks": "first"},
    "rgda": {**_FROZEN, "classifier": "rgda"},
    "joint": {**_PLAIN, "kd_weight": 0.0, "joint": True},
    "joint-probe": {**_FROZEN, "classifier": "probe", "joint": True},
    "passlora": {
        **_FROZEN,
        "sst": True,
        "classifier": "slda",
        "classifier_views": 4,
        "lift": "fourier",
        "shrinkage": "error",
        "adapt_tasks": "auto",
    },
}
Preset = Annotated[str, NameIn(PRESETS)]

LEARN_PRESET = "passlora"  # of a model that `passlora learn` starts
# How it is taught. A trained head: small batches, since steps count and folders are small.
LEARN_TRAINED: dict[str, Any] = {"per_device_train_batch_size": 8, "num_train_epochs": 15, "lr_milestones": [10]}
# The preset passlora: of the first lesson, if it adapts; a task's sums are large, so that not every one is kept.
LEARN_SUMS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3,
    "lr_milestones": [2],
    "learning_rate": 0.002,
    "keep_tasks": "recent",
}

# What `passlora train` runs when it is given neither a recipe nor a dataset. recipes/mini/digits.yaml says the same.
DEFAULT_RECIPE: dict[str, Any] = {
    "model_name_or_path": "passlora/vit-mini",
    "dataset_name": "digits",
    "task_sizes": [4, 2, 2, 2],
    "crop_padding": 0,
    "horizontal_flip": False,
    "brightness": 0.0,
    "num_train_epochs": 4,
    "lr_milestones": [3],
    "per_device_train_batch_size": 8,
    "compare": ["passlora", "finetune"],
    "output_dir": "runs/digits",
}


def for_learning(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a new model is made of: as asked for, else by the preset and the budget of `passlora learn`."""
    preset = given.get("preset", LEARN_PRESET)
    return {**(LEARN_SUMS if preset == LEARN_PRESET else LEARN_TRAINED), "preset": preset, **given}


def register_preset(name: str, settings: Mapping[str, Any]) -> None:
    """Add a preset: `settings` are values of knobs, which are checked when the preset is used."""
    from passlora.config.config import FIELDS  # the knobs' types need the presets' names

    check_name("preset", name)
    if name in PRESETS:
        raise PassloraError(f"preset {name} is taken: choose another name")
    for key in settings:
        if key not in FIELDS or key == "preset":
            raise PassloraError(f"preset {name}: {key!r} is no knob that a preset can set{nearest(str(key), FIELDS)}")
    PRESETS[name] = dict(settings)
