"""The Accelerator, or a sentence that says why there is none."""

from __future__ import annotations

import os
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration, gather_object

from passlora.config import TrainingConfig
from passlora.errors import PassloraError, redact

PLAIN = (
    DistributedType.NO,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
)


def make_accelerator(training: TrainingConfig, tracker: str | None = None, folder: Path | None = None) -> Accelerator:
    """As accelerate is configured, with the precision and the tracker that are asked for."""
    project = None
    if folder is not None:
        project = ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "logs"))
    try:
        accelerator = Accelerator(mixed_precision=training.mixed_precision, log_with=tracker, project_config=project)
    except (ValueError, ImportError) as error:  # fp16 on a CPU; DeepSpeed that is not installed
        raise PassloraError(f"accelerate refuses these settings: {redact(str(error))}") from error
    if accelerator.distributed_type not in PLAIN:
        kind = accelerator.distributed_type.value
        raise PassloraError(
            f"accelerate is configured for {kind}, which cuts the weights in pieces, and passlora needs them whole: "
            "use one GPU or plain data parallelism, as recipes/accelerate_configs/ddp.yaml does"
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != world:
        raise PassloraError(
            f"{world} processes were launched but accelerate sees {accelerator.num_processes}: on CPU use "
            "recipes/accelerate_configs/cpu_2proc.yaml, as docs/recipes.md shows"
        )
    return accelerator


def agree(accelerator: Accelerator, error: PassloraError | None) -> None:
    """Raise on every process if one has an error: the others would wait for it for ever in the next reduction."""
    if accelerator.num_processes > 1:
        told = [message for message in gather_object([error and str(error)]) if message is not None]
        error = error or (PassloraError(told[0]) if told else None)
    if error is not None:
        raise error
