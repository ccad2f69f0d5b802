"""f: a timm network with LoRA adapters, or trained whole; and the teacher, its state after the previous task."""

from __future__ import annotations

import argparse
import copy
import re
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from passlora.config import ModelConfig
from passlora.errors import PassloraError, nearest, redact, redact_logs

VIT_MINI = "passlora/vit-mini"
RESNET18 = "passlora/resnet18"
SAFETENSORS = "model.safetensors"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

MAX_WEIGHTS = 2 * 10**9  # of an architecture that a file describes
BATCH_NORM = nn.modules.batchnorm._BatchNorm
_BLOCK = r"(.*\.)?blocks\.\d+\."
LORA_TARGETS = {
    "qkv": _BLOCK + r"attn\.(qkv|q_proj|k_proj|v_proj)",
    "attn": _BLOCK + r"attn\.(qkv|q_proj|k_proj|v_proj|proj)",
    "attn+mlp": _BLOCK + r"(attn\.(qkv|q_proj|k_proj|v_proj|proj)|mlp\.fc[12])",
}


class Backbone(nn.Module):
    """z = f(x). With LoRA the weights are frozen and shared, and the teacher is a second adapter on them."""

    def __init__(self, network: nn.Module, config: ModelConfig, image_size: int, stats: tuple[Any, Any]) -> None:
        super().__init__()
        self.image_size = image_size
        self.mean, self.std = stats
        if config.feature_dim is not None:
            network.reset_classifier(config.feature_dim)  # type: ignore[operator]
        # Some networks widen their features before the classifier.
        own = getattr(network, "head_hidden_size", None) or network.num_features
        self.feature_dim = int(config.feature_dim or own)  # type: ignore[arg-type]
        self.has_lora = config.lora_r > 0
        self.body: Any = add_lora(network, config) if self.has_lora else network
        if not self.has_lora:
            self.body.to(memory_format=torch.channels_last)  # convolutions train faster so
        self._lora_layers: list[Any] = [m for m in self.body.modules() if hasattr(m, "lora_A")]
        self._teacher: list[nn.Module] = []  # a frozen copy (not LoRA); a list hides it from parameters()
        self.has_teacher = False
        self._pixels: tuple[Tensor, Tensor] | None = None
        self._compiled_by: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def train(self, mode: bool = True) -> Backbone:
        """Frozen weights stay in eval mode: no batch statistics move, no layer is dropped."""
        super().train(mode and not self.has_lora)
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

    def compile_network(self, backend: str | None) -> None:
        """By torch.compile, in place: names of weights stay, and student and teacher get a graph each."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend is not None and backend not in known:
            raise PassloraError(f"torch.compile has no backend {backend!r}{nearest(backend, known)}")
        for network in (self.body, *self._teacher):
            if backend != self._compiled_by:
                network._compiled_call_impl = None
            if backend is not None and network._compiled_call_impl is None:
                network.compile(backend=backend)
        self._compiled_by = backend

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

    @property
    def adapter_config(self) -> Any:
        """peft's own, or None without LoRA."""
        return self.body.peft_config["default"] if self.has_lora else None

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """What `state` gave; names and shapes are the caller's to check."""
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
            return self._teacher[0](x)
        self._switch_to("teacher")
        try:
            return self.body(x)
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


def as_pixel(numbers: Any, device: torch.device | str = "cpu") -> Tensor:
    """A number a channel, in the shape of an image of one pixel."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)[:, None, None]


def prepare(images: Tensor, image_size: int, mean: Tensor, std: Tensor) -> Tensor:
    x = images.float() / 255
    if x.shape[-2:] != (image_size, image_size):
        shrink = x.shape[-1] > image_size
        x = nn.functional.interpolate(x, (image_size, image_size), mode="bilinear", antialias=shrink)
    return (x - mean) / std


def make_backbone(config: ModelConfig) -> Backbone:
    """The backbone that the configuration names, or an error that says what is wrong with it."""
    name = config.model_name_or_path
    if name == VIT_MINI:
        network, size = vit_mini(config), config.image_size or 64
        return Backbone(network, config, size, (IMAGENET_MEAN, IMAGENET_STD))
    if name == RESNET18:
        size = config.image_size or 32
        return Backbone(resnet18(size), config, size, (IMAGENET_MEAN, IMAGENET_STD))
    if config.model_architecture is not None:
        if not Path(name).is_file():
            raise PassloraError(f"no checkpoint file at {name}")
        network = create(config.model_architecture, config.image_size)
        load_checkpoint(network, Path(name))
    else:
        network = create(name, config.image_size, pretrained=config.pretrained)
    settings = network.pretrained_cfg
    own = getattr(getattr(network, "patch_embed", None), "img_size", None)  # a transformer's, fixed when it was built
    size = config.image_size or (own or settings["input_size"])[-1]
    return Backbone(network, config, size, (settings["mean"], settings["std"]))


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
    from timm.models._hub import load_model_config_from_hf, load_model_config_from_path

    if ":" not in name:
        return name.split(".")[0], arguments
    kind, place = name.split(":", 1)
    read = load_model_config_from_path if kind == "local-dir" else load_model_config_from_hf
    _, architecture, own = read(place)
    return architecture, {**(own or {}), **arguments}


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


def check_safetensors(model_id: str) -> None:
    """No pickle from the Hub: the repository must have its weights as safetensors."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repo_id, _, revision = model_id.partition("@")
    try:
        hf_hub_download(repo_id, SAFETENSORS, revision=revision or None)
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        raise PassloraError(
            f"{repo_id} has no {SAFETENSORS}: passlora loads no other format from the Hub, as it could hold code"
        ) from None


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
            load_checkpoint(network, path)
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


def load_checkpoint(network: Any, path: Path) -> None:
    """Weights from a .safetensors or .pth file; the classifier is left out, everything else must fit exactly."""
    state = read_checkpoint(path)
    for key in ("model", "state_dict"):
        if isinstance(state.get(key), dict):
            state = state[key]
    tensors = {key.removeprefix("module."): value for key, value in state.items() if isinstance(value, Tensor)}
    classifier = ("head.", "head_dist.", "fc.", "classifier.", "pre_logits.")
    own = network.state_dict()
    tensors = {key: value for key, value in tensors.items() if key in own or not key.startswith(classifier)}
    missing = sorted(own.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - own.keys())
    misshapen = [key for key in own.keys() & tensors.keys() if own[key].shape != tensors[key].shape]
    if missing or unknown or misshapen:
        problems = [
            f"{len(names)} {what} (such as {names[0]})"
            for names, what in (
                (missing, "missing"),
                (unknown, "unknown"),
                (sorted(misshapen), "of another shape"),
            )
            if names
        ]
        raise PassloraError(f"{path} does not fit the architecture: weights {', '.join(problems)}")
    if not all(value.isfinite().all() for value in tensors.values() if value.is_floating_point()):
        raise PassloraError(f"{path} holds weights that are not finite")
    network.load_state_dict({key: value.to(own[key].dtype) for key, value in tensors.items()})


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Never executes code: safetensors, or torch's weights-only reader."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        # DeiT's training script stores its command line beside the weights.
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # both readers raise types of their own on a damaged file
        reason = str(error).strip().splitlines()[0]
        raise PassloraError(f"{path} is not a readable checkpoint ({reason})") from error
    if not isinstance(state, dict):
        raise PassloraError(f"{path} does not hold a dictionary of weights")
    return state


def add_lora(network: Any, config: ModelConfig) -> Any:
    """Freeze the network and put LoRA (B = 0) on the layers that the pattern matches."""
    from peft import LoraConfig, get_peft_model

    from passlora.network.lora import LoraLinear

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
