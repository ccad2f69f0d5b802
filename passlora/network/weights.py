"""Files of a backbone's weights: read without executing anything, and taken only if they fit."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from passlora.errors import PassloraError

SAFETENSORS = "model.safetensors"
CLASSIFIER = ("head.", "head_dist.", "fc.", "classifier.", "pre_logits.")


def load_weights(network: Any, path: Path) -> None:
    """Weights from a .safetensors or .pth file; the classifier is left out, everything else must fit exactly.

    Position embeddings of another input size are resampled first, as timm does with its own weights.
    """
    state = read_weights(path)
    for key in ("model", "state_dict"):
        if isinstance(state.get(key), dict):
            state = state[key]
    tensors = {key.removeprefix("module."): value for key, value in state.items() if isinstance(value, Tensor)}
    own = network.state_dict()
    tensors = {key: value for key, value in tensors.items() if key in own or not key.startswith(CLASSIFIER)}
    resample_positions(network, tensors)
    check_fit(own, tensors, path)
    network.load_state_dict({key: value.to(own[key].dtype) for key, value in tensors.items()})


def resample_positions(network: Any, tensors: dict[str, Tensor]) -> None:
    """A ViT's position embedding, in place, from the square grid of its file to the network's own."""
    from timm.layers import resample_abs_pos_embed

    own, given = getattr(network, "pos_embed", None), tensors.get("pos_embed")
    grid = getattr(getattr(network, "patch_embed", None), "grid_size", None)
    if own is None or given is None or grid is None or own.shape == given.shape:
        return
    if own.ndim != 3 or given.ndim != 3 or own.shape[::2] != given.shape[::2]:
        return
    prefix = own.shape[1] - math.prod(grid)  # class token and registers, where they have places of their own
    places = given.shape[1] - prefix
    if prefix >= 0 and places > 0 and math.isqrt(places) ** 2 == places:
        tensors["pos_embed"] = resample_abs_pos_embed(given, list(grid), num_prefix_tokens=prefix)


def check_fit(own: dict[str, Tensor], tensors: dict[str, Tensor], path: Path) -> None:
    """No weight missing, unknown, of another shape, or not finite."""
    missing = sorted(own.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - own.keys())
    misshapen = sorted(key for key in own.keys() & tensors.keys() if own[key].shape != tensors[key].shape)
    problems = [
        f"{len(names)} {what} (such as {names[0]})"
        for names, what in ((missing, "missing"), (unknown, "unknown"), (misshapen, "of another shape"))
        if names
    ]
    if problems:
        raise PassloraError(f"{path} does not fit the architecture: weights {', '.join(problems)}")
    if not all(value.isfinite().all() for value in tensors.values() if value.is_floating_point()):
        raise PassloraError(f"{path} holds weights that are not finite")


def read_weights(path: Path) -> dict[str, Any]:
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
