"""Where LoRA sits on a network."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from passlora.config import ModelConfig
from passlora.errors import PassloraError

_BLOCK = r"(.*\.)?blocks\.\d+\."
LORA_TARGETS = {
    "qkv": _BLOCK + r"attn\.(qkv|q_proj|k_proj|v_proj)",
    "attn": _BLOCK + r"attn\.(qkv|q_proj|k_proj|v_proj|proj)",
    "attn+mlp": _BLOCK + r"(attn\.(qkv|q_proj|k_proj|v_proj|proj)|mlp\.fc[12])",
}


def adapted_layers(network: Any, config: ModelConfig) -> tuple[str, list[str]]:
    """The layers that LoRA sits on, as a pattern and by their names."""
    pattern = LORA_TARGETS.get(config.lora_target_modules, config.lora_target_modules)
    layers = [name for name, module in network.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    matched = [name for name in layers if re.fullmatch(pattern, name)]
    if not matched:
        shown = ", ".join(layers[:6])
        raise PassloraError(
            f"lora_target_modules {config.lora_target_modules!r} matches no layer of this backbone; its layers are "
            f"{shown}, ... (--lora_r 0 trains the whole backbone)"
        )
    embedding = [name for name in matched if re.search(r"(^|\.)(patch_embed|stem|conv_stem)(\.|$)", name)]
    if embedding:
        raise PassloraError(
            f"lora_target_modules {config.lora_target_modules!r} also matches the patch embedding "
            f"({embedding[0]}); anchor it, as in {LORA_TARGETS['attn']!r}"
        )
    if {name for name, _ in network.named_modules() if name and re.fullmatch(pattern, name)} != set(matched):
        pattern = "|".join(map(re.escape, matched))  # the pattern also matches containers, which peft refuses
    return pattern, matched


def lora_alpha(config: ModelConfig) -> float:
    return config.lora_alpha if config.lora_alpha is not None else config.lora_r


def add_lora(network: Any, config: ModelConfig) -> Any:
    """Freeze the network and put LoRA (B = 0) on the layers that the pattern matches."""
    from peft import LoraConfig, get_peft_model

    from passlora.network.lora_layer import LoraLinear

    pattern, _ = adapted_layers(network, config)
    alpha: Any = lora_alpha(config)
    lora = LoraConfig(r=config.lora_r, lora_alpha=alpha, target_modules=pattern)
    lora._register_custom_module({nn.Linear: LoraLinear})
    return get_peft_model(network, lora).eval()


def can_fold(network: Any, config: ModelConfig) -> bool:
    """Whether the adapter is a plain sum of weights; not so on convolutions of several groups."""
    layers = (network.get_submodule(name) for name in adapted_layers(network, config)[1])
    return all(getattr(layer, "groups", 1) == 1 for layer in layers)


def adapter_forms(network: Any, config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of an adapter under stock peft's names, without data: what a file of it holds, without peft."""
    forms = {}
    for name in adapted_layers(network, config)[1]:
        out, into, *kernel = network.get_submodule(name).weight.shape
        shapes = {"lora_A": (config.lora_r, into, *kernel), "lora_B": (out, config.lora_r, *(1 for _ in kernel))}
        for part, shape in shapes.items():
            forms[f"base_model.model.{name}.{part}.weight"] = torch.empty(shape, device="meta")
    return forms


@torch.no_grad()
def fold(network: Any, adapter: dict[str, Tensor], config: ModelConfig) -> None:
    """W + s B A in the place of each adapted layer's W."""
    for name in adapted_layers(network, config)[1]:
        weight = network.get_submodule(name).weight
        a, b = (adapter[f"base_model.model.{name}.{part}.weight"].to(weight) for part in ("lora_A", "lora_B"))
        delta = (b.flatten(1) @ a.flatten(1)).view_as(weight)
        weight += lora_alpha(config) / config.lora_r * delta
