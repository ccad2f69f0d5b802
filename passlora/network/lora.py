"""Where LoRA sits on a network."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from passlora.config import ModelConfig
from passlora.errors import PassloraError

_BLOCK = r"(.*\.)?blocks\.\d+\."
LORA_TARGETS = {
    "qkv": _BLOCK + r"attn\.(qkv|q_proj|k_proj|v_proj)",
    "attn": _BLOCK + r"attn\.(qkv|q_proj|k_proj|v_proj|proj)",
    "attn+mlp": _BLOCK + r"(attn\.(qkv|q_proj|k_proj|v_proj|proj)|mlp\.fc[12])",
}


def add_lora(network: Any, config: ModelConfig) -> Any:
    """Freeze the network and put LoRA (B = 0) on the layers that the pattern matches."""
    from peft import LoraConfig, get_peft_model

    from passlora.network.lora_layer import LoraLinear

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
    lora = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha if config.lora_alpha is not None else config.lora_r,  # type: ignore[arg-type]
        target_modules=pattern,
    )
    lora._register_custom_module({nn.Linear: LoraLinear})
    return get_peft_model(network, lora).eval()
