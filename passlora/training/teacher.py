"""How the steps of a task come by the teacher's features: by running it, or from a cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import Tensor

from passlora.config import Config
from passlora.data.batches import Batch, TaskData, eval_plans
from passlora.display.progress import progress
from passlora.method.views import rotate
from passlora.network.network import Network

AskTeacher = Callable[[Tensor, Batch], Tensor]  # rotated rows of a process's share -> features of the whole batch
Gather = Callable[[Tensor, int], Tensor]  # features of a process's share, images of the batch -> of the whole batch


def make_teacher(
    config: Config, accelerator: Accelerator, network: Network, data: TaskData, gather: Gather
) -> AskTeacher:
    """The network as it is now, before the first step of a task, is the teacher of the task."""
    network.backbone.become_teacher()
    if config.training.cache_teacher:
        return cached_teacher(config, accelerator, network, data)

    def ask(x: Tensor, batch: Batch) -> Tensor:
        with accelerator.autocast():
            return gather(network.backbone.teacher(x).float(), len(batch.batch_rows))

    return ask


@torch.no_grad()
def cached_teacher(config: Config, accelerator: Accelerator, network: Network, data: TaskData) -> AskTeacher:
    """One pass over the task's images, before its first step: a resumed task finds the same features.

    Computed just as in a step, in batches of the same size: at first student and teacher are one, and a distance of
    rounding errors would pull the student in a random direction, with the whole weight of the distillation.
    """
    backbone, views = network.backbone, config.method.num_views
    device, size = accelerator.device, config.training.per_device_train_batch_size
    network.train()
    place = torch.zeros(len(data.classes), dtype=torch.long)
    place[torch.from_numpy(data.rows)] = torch.arange(len(data.rows))
    kept = torch.zeros(len(data.rows), views, backbone.feature_dim, device=device)
    plans = eval_plans(data.rows, size, accelerator.process_index, accelerator.num_processes)
    for batch in progress(data.images.batches(plans), desc="asking the teacher", unit="batch", total=len(plans)):
        x = rotate(backbone.prepare(batch.images.to(device, non_blocking=True)), views)
        with accelerator.autocast():
            z = backbone.teacher(x).float()
        kept[place[batch.rows].to(device)] = z.unflatten(0, (-1, views))
    kept = accelerator.reduce(kept, reduction="sum")
    return lambda x, batch: kept[place[batch.batch_rows].to(device, non_blocking=True)].flatten(0, 1)
