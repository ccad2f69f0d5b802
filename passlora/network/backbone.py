"""f: a timm network with LoRA adapters, or trained whole; and the teacher, its state after the previous task."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from passlora.config import ModelConfig
from passlora.errors import PassloraError
from passlora.network.lora import adapter_forms, add_lora, can_fold, fold

BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Backbone(nn.Module):
    """z = f(x). With LoRA the weights are frozen and shared, and the teacher is a second adapter on them.

    A `plain` one is never trained: an adapter that it is given is folded into its weights, without peft.
    """

    def __init__(
        self, network: nn.Module, config: ModelConfig, image_size: int, stats: tuple[Any, Any], plain: bool = False
    ) -> None:
        super().__init__()
        plain = plain and (config.lora_r == 0 or can_fold(network, config))
        self.config, self.is_plain = config, plain
        self.image_size = image_size
        self.mean, self.std = stats
        if config.feature_dim is not None:
            network.reset_classifier(config.feature_dim)  # type: ignore[operator]
        # Some networks widen their features before the classifier.
        own = getattr(network, "head_hidden_size", None) or network.num_features
        self.feature_blocks = config.feature_blocks
        if self.feature_blocks > 1:
            check_blocks(network, self.feature_blocks)
        self.feature_dim = int(config.feature_dim or own) * self.feature_blocks  # type: ignore[arg-type]
        self.has_lora = config.lora_r > 0 and not plain
        self.body: Any = add_lora(network, config) if self.has_lora else network
        if not self.has_lora and not plain:
            self.body.to(memory_format=torch.channels_last)  # convolutions train faster so
        self._lora_layers: list[Any] = [m for m in self.body.modules() if hasattr(m, "lora_A")]
        self._teacher: list[nn.Module] = []  # a frozen copy (not LoRA); a list hides it from parameters()
        self.has_teacher = False
        self._pixels: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self._read(self.body, x)

    def _read(self, body: Any, x: Tensor) -> Tensor:
        if self.feature_blocks == 1:
            return body(x)
        return class_tokens(body.get_base_model() if self.has_lora else body, x, self.feature_blocks)

    def train(self, mode: bool = True) -> Backbone:
        """Frozen weights stay in eval mode: no batch statistics move, no layer is dropped."""
        super().train(mode and not self.has_lora and not self.is_plain)
        for layer in self._lora_layers:
            layer.one_product = mode
        return self

    def checkpoint_gradients(self, enable: bool) -> None:
        """Activations inside blocks are computed again in the backward pass, under the adapter that is active then.

        That is the student's: `teacher` switches back before it returns.
        """
        network = self.body.get_base_model() if self.has_lora else self.body
        if enable and not self.has_lora and any(isinstance(m, BATCH_NORM) for m in network.modules()):
            raise PassloraError(
                "gradient_checkpointing would show each batch twice to this backbone's batch normalisation"
            )
        try:
            network.set_grad_checkpointing(enable)
        except (AssertionError, AttributeError):
            if enable:
                raise PassloraError("this backbone of timm has no gradient checkpointing") from None

    def become_teacher(self) -> None:
        """Freeze the present state as the teacher of the next task."""
        if not self.has_lora:
            self._teacher = [copy.deepcopy(self.body).requires_grad_(False).eval()]
        else:
            from peft import set_peft_model_state_dict

            if not self.has_teacher:
                self.body.add_adapter("teacher", self.body.peft_config["default"])
            set_peft_model_state_dict(self.body, self.state(), adapter_name="teacher")
            self.body.set_adapter("default")
        self.has_teacher = True

    def state(self) -> dict[str, Tensor]:
        """The weights that learning changes: the adapter, under stock peft's names, or the whole network."""
        if not self.has_lora:
            return self.body.state_dict()
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self.body, adapter_name="default", save_embedding_layers=False)

    def forms(self) -> dict[str, Tensor]:
        """What `state` holds, as tensors without data."""
        if self.is_plain and self.config.lora_r:
            return adapter_forms(self.body, self.config)
        return {name: torch.empty_like(tensor, device="meta") for name, tensor in self.state().items()}

    @property
    def adapter_config(self) -> Any:
        """peft's own, or None without LoRA."""
        return self.body.peft_config["default"] if self.has_lora else None

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """What `state` gave; names and shapes are the caller's to check."""
        if self.is_plain and self.config.lora_r:
            fold(self.body, tensors, self.config)
            return
        if not self.has_lora:
            self.body.load_state_dict(tensors)
            return
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self.body, tensors, adapter_name="default")

    def merged(self) -> Any:
        """A copy of the plain network, with the adapter, if there is one, added to its weights."""
        body = copy.deepcopy(self.body)
        if not self.has_lora:
            return body
        body.set_adapter("default")
        return body.merge_and_unload(adapter_names=["default"])

    @torch.no_grad()
    def teacher(self, x: Tensor) -> Tensor:
        """f_old(x). Called before the student's forward, so that no graph spans the switch of adapters."""
        if not self.has_lora:
            return self._read(self._teacher[0], x)
        self._switch_to("teacher")
        try:
            return self._read(self.body, x)
        finally:
            self._switch_to("default")

    def _switch_to(self, adapter: str) -> None:
        """Layer by layer: peft's own switch looks for them among all modules, twice a step."""
        for layer in self._lora_layers:
            layer.set_adapter(adapter)

    def prepare(self, images: Tensor) -> Tensor:
        """uint8 or float images in 0..255, any size -> normalised input of the network."""
        if self._pixels is None or self._pixels[0].device != images.device:  # copied there once, not at each step
            self._pixels = (as_pixel(self.mean, images.device), as_pixel(self.std, images.device))
        return prepare(images, self.image_size, *self._pixels)

    def parameter_counts(self) -> tuple[int, int]:
        """Trainable and all weights, the teacher left out."""
        own = [p for name, p in self.named_parameters() if ".teacher." not in name]
        return sum(p.numel() for p in own if p.requires_grad), sum(p.numel() for p in own)


def check_blocks(network: Any, count: int) -> None:
    """Only a transformer with a class token has the features of several blocks."""
    blocks = len(getattr(network, "blocks", ()))
    if not blocks or not getattr(network, "num_prefix_tokens", 0) or getattr(network, "cls_token", None) is None:
        raise PassloraError("feature_blocks needs a vision transformer with a class token, which this backbone is not")
    if isinstance(getattr(network, "norm", None), nn.Identity):
        raise PassloraError("feature_blocks needs a final norm of tokens, which this backbone does not have")
    if count > blocks:
        raise PassloraError(f"feature_blocks {count}: this backbone has {blocks} blocks")


def class_tokens(network: Any, x: Tensor, count: int) -> Tensor:
    """The class tokens of the last blocks, each through the final norm, side by side (LayUP: Ahrens et al., 2024)."""
    parts = network.forward_intermediates(
        x, indices=count, norm=True, return_prefix_tokens=True, intermediates_only=True
    )
    return torch.cat([prefix[:, 0] for _, prefix in parts], dim=1)


def as_pixel(numbers: Any, device: torch.device | str = "cpu") -> Tensor:
    """A number a channel, in the shape of an image of one pixel."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)[:, None, None]


def prepare(images: Tensor, image_size: int, mean: Tensor, std: Tensor) -> Tensor:
    x = images.float() / 255
    if x.shape[-2:] != (image_size, image_size):
        shrink = x.shape[-1] > image_size
        x = nn.functional.interpolate(x, (image_size, image_size), mode="bilinear", antialias=shrink)
    return (x - mean) / std
