"""A checkpoint: the state inside a task, as tensors: weights, Adam's moments, random numbers, losses of the epoch."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor

from passlora.network.network import Network

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
WHOLE_NUMBERS = ("growth_interval", "_growth_tracker")  # of the scaler's state, which is strict about types


def take_checkpoint(
    step: int,
    network: Network,
    optimizer: torch.optim.Optimizer,
    draws: torch.Generator,
    accelerator: Accelerator,
    history: list[Tensor],
) -> dict[str, Tensor]:
    """Everything that the steps after `step` depend on, beyond the task before and the configuration."""
    state = {"step": torch.tensor(step), "draws": draws.get_state(), "random": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random_cuda"] = torch.cuda.get_rng_state(accelerator.device)
    if accelerator.scaler is not None:  # fp16
        values = accelerator.scaler.state_dict().items()
        state |= {f"scaler/{name}": torch.tensor(value, dtype=torch.float64) for name, value in values}
    if history:
        state["history"] = torch.stack(history)
    state |= {f"backbone/{name}": tensor for name, tensor in network.backbone.state().items()}
    state |= {f"head/{name}": tensor for name, tensor in network.classifier.state_dict().items()}
    for i, parameter in enumerate(network.trainable()):
        known = optimizer.state.get(parameter, {})  # empty until an update holds: a scaler skips those that overflow
        state |= {f"adam/{i}/{name}": known[name] for name in MOMENTS if name in known}
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def load_checkpoint(
    state: dict[str, Tensor],
    network: Network,
    optimizer: torch.optim.Optimizer,
    draws: torch.Generator,
    accelerator: Accelerator,
) -> list[Tensor]:
    """Undo `take_checkpoint`; returns the losses since the epoch began."""
    device = accelerator.device

    def part(prefix: str) -> dict[str, Tensor]:
        return {name[len(prefix) :]: tensor for name, tensor in state.items() if name.startswith(prefix)}

    network.backbone.load_state(part("backbone/"))
    network.classifier.load_state_dict(part("head/"))
    for i, parameter in enumerate(network.trainable()):
        if moments := part(f"adam/{i}/"):
            own = optimizer.state[parameter] = {"step": moments["step"].to(device)}
            for name in MOMENTS[1:]:  # laid out in memory as the weight is: fused Adam walks over both side by side
                own[name] = torch.empty_like(parameter, requires_grad=False).copy_(moments[name])
    draws.set_state(state["draws"])
    torch.set_rng_state(state["random"])
    if "random_cuda" in state:
        torch.cuda.set_rng_state(state["random_cuda"], device)
    if accelerator.scaler is not None and (scaler := part("scaler/")):
        values = {name: int(value) if name in WHOLE_NUMBERS else float(value) for name, value in scaler.items()}
        accelerator.scaler.load_state_dict(values)
    return list(state["history"].to(device)) if "history" in state else []
