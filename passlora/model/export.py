"""A model as one plain network, the adapter folded in: for serving without peft, and without passlora."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from passlora.display.progress import silence
from passlora.errors import PassloraError
from passlora.files import new_folder, write_json, write_tensors
from passlora.method.classifiers import Linear
from passlora.method.feature_map import FeatureMap
from passlora.network.factory import RESNET18
from passlora.training.learner import Learner

FORMATS = ("timm", "transformers")


def merge(learner: Learner, classes: list[str], out: Path, format: str) -> None:
    """Write a new folder: it is whole, or it is not there."""
    if format not in FORMATS:
        raise PassloraError(f"format must be timm or transformers, got {format!r}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PassloraError(f"{out} exists already: choose another folder")
    if learner.config.model.feature_dim is not None:
        raise PassloraError("a backbone with a feature_dim of its own cannot be merged")
    linear = as_linear(learner)
    if learner.accelerator.is_main_process:
        with new_folder(out) as folder:
            write = write_timm if format == "timm" else write_transformers
            write(learner, linear, classes, folder)


def as_linear(learner: Learner) -> Linear:
    method = learner.config.method
    if method.inference == "nearest_prototype":
        raise PassloraError(
            "this model answers by its nearest prototype (inference nearest_prototype): it has no logits to merge"
        )
    linear = learner.network.classifier.as_linear()
    if linear is None:
        raise PassloraError(f"the classifier {method.classifier} is not linear: it cannot be merged into a plain head")
    return linear


def node_views(learner: Learner) -> int:
    """Nodes a class: a trained head has one for each rotation."""
    return learner.config.method.num_views if learner.network.classifier.trained else 1


def write_timm(learner: Learner, linear: Linear, classes: list[str], folder: Path) -> None:
    """A node a class, of the upright image: timm and stock transformers (by its wrapper of timm) read it."""
    backbone = learner.network.backbone
    plain = backbone.merged()
    architecture, arguments = plain.origin
    if architecture == RESNET18:
        raise PassloraError(f"timm has no {RESNET18}, whose stem is its own: choose the format transformers")
    if linear.unit_length or linear.map is not None or backbone.feature_blocks > 1:
        what = "features of unit length" if linear.unit_length else "several views of an image, or lifted features"
        what = "features of several blocks" if backbone.feature_blocks > 1 else what
        raise PassloraError(
            f"this model's classifier reads {what}, which timm's networks do not give: choose the format transformers"
        )
    known = plain.pretrained_cfg
    name, views, side = known.get("classifier") or "head", node_views(learner), backbone.image_size
    settings: dict[str, Any] = {
        "architecture": architecture,
        "num_classes": len(classes),
        "num_features": backbone.feature_dim,
        "model_args": arguments,
        "label_names": list(classes),
        "pretrained_cfg": {
            "input_size": [3, side, side],
            "mean": list(backbone.mean),
            "std": list(backbone.std),
            "num_classes": len(classes),
            "crop_pct": 224 / 256,
            "interpolation": "bilinear",
            "classifier": name,
            "first_conv": known.get("first_conv"),
        },
    }
    head = {f"{name}.weight": linear.weight[::views], f"{name}.bias": linear.bias[::views]}
    write_tensors(folder / "model.safetensors", {**plain.state_dict(), **head})
    write_json(folder / "classes.json", classes)
    write_json(folder / "config.json", settings)


def write_transformers(learner: Learner, linear: Linear, classes: list[str], folder: Path) -> None:
    """After `import passlora.serving`, the auto classes and pipelines of transformers read it."""
    from transformers.utils.logging import disable_progress_bar

    from passlora.serving import PassLoraConfig, PassLoraForImageClassification, PassLoraImageProcessor

    silence(disable_progress_bar)
    backbone, method = learner.network.backbone, learner.config.method
    plain = backbone.merged()
    architecture, arguments = plain.origin
    config = PassLoraConfig(
        architecture=architecture,
        architecture_args=arguments,
        feature_dim=backbone.feature_dim,
        feature_blocks=backbone.feature_blocks,
        num_views=node_views(learner),
        inference=method.inference,
        unit_length=linear.unit_length,
        heavy_tails=linear.heavy_tails,
        **({} if linear.map is None else describe_map(linear.map)),
        id2label=dict(enumerate(classes)),
        label2id={name: i for i, name in enumerate(classes)},
    )
    model = PassLoraForImageClassification(config)
    model.backbone.load_state_dict(plain.state_dict())
    model.head.load_state_dict({"weight": linear.weight, "bias": linear.bias})
    model.save_pretrained(folder)
    PassLoraImageProcessor(backbone.image_size, backbone.mean, backbone.std).save_pretrained(folder)


def describe_map(feature_map: FeatureMap) -> dict[str, Any]:
    """As PassLoraConfig has it."""
    lifted = {} if feature_map.lift == "none" else {"lift_width": feature_map.width}
    return {"classifier_views": feature_map.views, "lift": feature_map.lift, **lifted}
