"""Which network a name stands for: the bundled ones, timm's, the Hub's, a local file of weights."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from passlora.config import ModelConfig
from passlora.errors import PassloraError, nearest, redact, redact_logs
from passlora.network.backbone import Backbone
from passlora.network.weights import SAFETENSORS, check_safetensors, load_weights

VIT_MINI = "passlora/vit-mini"
RESNET18 = "passlora/resnet18"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MAX_WEIGHTS = 2 * 10**9  # of an architecture that a file describes


def make_backbone(config: ModelConfig, plain: bool = False) -> Backbone:
    """The backbone that the configuration names, or an error that says what is wrong with it; `plain`: not to train."""
    name = config.model_name_or_path
    if name == VIT_MINI:
        network, size = vit_mini(config), config.image_size or 64
        return Backbone(network, config, size, (IMAGENET_MEAN, IMAGENET_STD), plain)
    if name == RESNET18:
        size = config.image_size or 32
        return Backbone(resnet18(size), config, size, (IMAGENET_MEAN, IMAGENET_STD), plain)
    if config.model_architecture is not None:
        if not Path(name).is_file():
            raise PassloraError(f"no checkpoint file at {name}")
        network = create(config.model_architecture, config.image_size)
        load_weights(network, Path(name))
    else:
        network = create(name, config.image_size, pretrained=config.pretrained)
    settings = network.pretrained_cfg
    own = getattr(getattr(network, "patch_embed", None), "img_size", None)  # a transformer's, fixed when it was built
    size = config.image_size or (own or settings["input_size"])[-1]
    check_patches(network, size)
    return Backbone(network, config, size, (settings["mean"], settings["std"]), plain)


def check_patches(network: Any, image_size: int) -> None:
    """A transformer cuts the image into squares, without a rest."""
    patches = getattr(network, "patch_embed", None)
    sides: tuple[int, ...] = getattr(patches, "patch_size", None) or ()
    if not getattr(patches, "dynamic_img_pad", False) and any(image_size % side for side in sides):
        raise PassloraError(f"image_size {image_size}: this backbone needs a multiple of {sides[0]}")


def create(name: str, image_size: int | None, pretrained: bool = False) -> Any:
    """A timm network without classifier."""
    import timm

    from_hub = name.startswith(("hf-hub:", "hf_hub:", "local-dir:"))
    if not from_hub and "/" in name:
        name, from_hub = f"hf-hub:{name}", True
    if not from_hub and not timm.is_model(name.split(".")[0]):
        known = nearest(name, [*timm.list_models(), VIT_MINI, RESNET18])
        raise PassloraError(f"{name!r} is neither a timm model, nor a Hub id, nor a checkpoint file{known}")
    arguments: dict[str, Any] = {"img_size": image_size} if image_size else {}
    try:
        options: dict[str, Any] = {"num_classes": 0, "pretrained": pretrained}
        if pretrained and name.startswith("hf"):
            redact_logs()
            check_safetensors(name.split(":", 1)[1])
            options["pretrained_cfg_overlay"] = {"hf_hub_filename": SAFETENSORS, "custom_load": False}
        try:
            network: Any = timm.create_model(name, **options, **arguments)
        except TypeError:  # convolutional networks take any size and no such option
            arguments = {}
            network = timm.create_model(name, **options)
        network.origin = origin(name, arguments)
    except PassloraError:
        raise
    except Exception as error:  # timm and the Hub's client raise many types, on a stranger's settings above all
        reason = redact(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
        raise PassloraError(
            f"the weights of {name!r} could not be loaded ({reason}); without network give a local checkpoint, "
            "or --pretrained false for random weights"
        ) from error
    local = name.removeprefix("local-dir:")
    network.name_or_path = name if local == name else f"local-dir:{Path(local).name}"  # peft writes it into its config
    return network


def origin(name: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """timm's architecture and its arguments: enough for `rebuild`, without the network that a Hub id needs."""
    from timm.models import load_model_config_from_hf

    if ":" not in name:
        return name.split(".")[0], arguments
    kind, place = name.split(":", 1)
    if kind == "local-dir":
        settings = json.loads((Path(place) / "config.json").read_text(encoding="utf-8"))
        architecture, own = settings["architecture"], settings.get("model_args")
    else:
        _, architecture, own = load_model_config_from_hf(place)
    own = {key: value for key, value in (own or {}).items() if key != "num_classes"}  # the classifier is never its own
    return architecture, {**own, **arguments}


def rebuild(architecture: str, arguments: dict[str, Any]) -> Any:
    """A network as `origin` describes it, without classifier, with random weights; safe with a stranger's words."""
    import timm

    if not all(is_harmless(name, value) for name, value in arguments.items()):
        raise PassloraError(f"these arguments of an architecture are not taken from a file: {str(arguments)[:200]}")
    if architecture != RESNET18 and not timm.is_model(architecture):
        raise PassloraError(f"{architecture[:80]!r} is no architecture of timm")

    def build() -> Any:
        if architecture == RESNET18:
            return resnet18(**arguments)
        return timm.create_model(architecture, num_classes=0, **arguments)

    try:
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in build().parameters())
        if weights <= MAX_WEIGHTS:
            return build()
    except Exception as error:  # timm raises many types on odd arguments
        raise PassloraError(f"{architecture} cannot be built with {arguments} ({redact(str(error))})") from None
    raise PassloraError(f"{architecture} with {arguments} has {weights:,} weights: more than passlora builds")


def is_harmless(name: str, value: Any) -> bool:
    """No argument that loads something, and no number that takes for ever to build."""
    if name.startswith(("pretrained", "checkpoint", "cache")):
        return False
    if isinstance(value, (list, tuple)):
        return len(value) <= 16 and all(is_harmless(name, inner) for inner in value)
    limit = 256 if "depth" in name or "layers" in name else 4096
    return isinstance(value, (bool, str)) or (isinstance(value, (int, float)) and abs(value) <= limit)


def vit_mini(config: ModelConfig) -> Any:
    """The bundled backbone: six DeiT-Ti blocks at 64 px, pretrained (docs/backbones.md)."""
    import timm

    architecture = "deit_tiny_patch16_224"
    arguments: dict[str, Any] = {"img_size": 64, "depth": 6}
    network: Any = timm.create_model(architecture, num_classes=0, **arguments)
    network.origin = architecture, arguments
    if config.image_size not in (None, 64):
        raise PassloraError(f"{VIT_MINI} takes 64 px, not image_size {config.image_size}")
    if config.pretrained:
        with resources.as_file(resources.files("passlora") / "assets/vit_mini_patch16_64.safetensors") as path:
            load_weights(network, path)
    network.name_or_path = VIT_MINI
    return network


def resnet18(image_size: int) -> Any:
    """ResNet-18; for inputs up to 64 px with a 3x3 stride-1 stem and without max-pooling."""
    import timm

    network: Any = timm.create_model("resnet18", num_classes=0)
    if image_size <= 64:
        network.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
        network.maxpool = nn.Identity()
    network.origin = RESNET18, {"image_size": image_size}
    return network
