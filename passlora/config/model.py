"""Knobs of the backbone and its adapter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypedDict

from passlora.config.values import above, between, knob
from passlora.errors import PassloraError


@dataclass
class ModelConfig:
    """The backbone f and its adapter."""

    model_name_or_path: str = knob(
        "passlora/vit-mini",
        "passlora/vit-mini (bundled, 64 px), passlora/resnet18 (from scratch), any timm model name, a Hub id "
        "such as hf-hub:timm/deit_small_patch16_224.fb_in1k, or a local .safetensors/.pth checkpoint",
    )
    model_architecture: str | None = knob(
        None, "timm architecture of a local checkpoint, such as deit_small_patch16_224"
    )
    pretrained: bool = knob(True, "load pretrained weights (false: random weights, to train from scratch)")
    image_size: int | None = knob(None, "side of the square input in pixels (none: the backbone's own)")
    feature_dim: int | None = knob(
        None,
        "project the features to so many dimensions, by a layer that is trained too: 2 to draw them (needs lora_r 0)",
    )
    feature_blocks: int = knob(
        1,
        "blocks of a transformer whose class tokens are the features, from the last one back, side by side (LayUP: 6)",
    )
    lora_r: int = knob(4, "rank of the LoRA adapters; 0 trains the whole backbone instead")
    lora_alpha: float | None = knob(None, "LoRA scale times lora_r (none: lora_r, so that the scale is 1)")
    lora_target_modules: str = knob(
        "qkv",
        "layers to adapt: qkv, attn (qkv and proj), attn+mlp (all of a block's linear layers), or a regex that "
        "matches timm's whole module names",
    )

    def __post_init__(self) -> None:
        between("lora_r", self.lora_r, 0, 1024)
        if self.lora_alpha is not None:
            above("lora_alpha", self.lora_alpha, 0)
        if self.feature_dim is not None:
            between("feature_dim", self.feature_dim, 1, 4096)
            if self.lora_r > 0:
                raise PassloraError("feature_dim adds a layer to the backbone, which must be trained: set --lora_r 0")
        between("feature_blocks", self.feature_blocks, 1, 64)
        if self.feature_blocks > 1 and self.feature_dim is not None:
            raise PassloraError("feature_dim projects the last block's features: set --feature_blocks 1")
        if self.image_size is not None:
            between("image_size", self.image_size, 8, 4096)
        try:
            re.compile(self.lora_target_modules)
        except re.error as error:
            raise PassloraError(
                f"lora_target_modules: {self.lora_target_modules!r} is not a valid regex ({error})"
            ) from None
        # A model may come from a stranger: no pattern that takes for ever to fail.
        if len(re.findall(r"[*+{]", self.lora_target_modules)) > 4 or re.search(r"\)[*+{]", self.lora_target_modules):
            raise PassloraError(
                f"lora_target_modules: {self.lora_target_modules[:80]!r} is too complicated; use at most four of "
                "* + {, and none of them after a group"
            )

    def check(self) -> None:
        """Refuse knobs that contradict each other."""
        if self.model_name_or_path == "passlora/resnet18" and (self.lora_r > 0 or self.pretrained):
            raise PassloraError("passlora/resnet18 is trained from scratch: set --lora_r 0 and --pretrained false")
        is_file = self.model_name_or_path.endswith((".safetensors", ".pth", ".pt", ".bin"))
        if is_file and self.model_architecture is None:
            raise PassloraError(
                f"{self.model_name_or_path} is a checkpoint file: say which network it holds with "
                "--model_architecture, such as deit_small_patch16_224"
            )
        if self.model_architecture is not None and not is_file:
            raise PassloraError("model_architecture goes with a local checkpoint file as model_name_or_path")


class ModelSettings(TypedDict, total=False):
    """The knobs above as keyword arguments that an editor can complete."""

    model_name_or_path: str
    model_architecture: str | None
    pretrained: bool
    image_size: int | None
    feature_dim: int | None
    feature_blocks: int
    lora_r: int
    lora_alpha: float | None
    lora_target_modules: str
