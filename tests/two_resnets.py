"""Run by test_distributed.py on two processes: how far apart are their networks after a task?"""

from __future__ import annotations

import numpy as np
import torch
from accelerate import Accelerator

from passlora import Config, Learner
from passlora.data.batches import Images
from passlora.data.dataset import load_dataset
from passlora.training.learner import TaskData


def main() -> None:
    accelerator = Accelerator()
    assert accelerator.num_processes == 2
    config = Config.make(
        model_name_or_path="passlora/resnet18",
        lora_r=0,
        pretrained=False,
        task_sizes=[10],
        max_train_per_class=2,
        num_train_epochs=1,
        per_device_train_batch_size=5,
    )
    learner = Learner(config, accelerator)
    split = load_dataset(config.data, 0).train
    images = Images(split, 32, config.data, "digits")
    learner.learn(TaskData(images, np.arange(len(split)), split.labels), 10)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    apart = []
    for f in (learner.network.backbone, learner.network.backbone.teacher):
        with torch.no_grad():
            first, second = accelerator.gather(f(x)).chunk(2)
        apart.append(float((first - second).abs().max()))
    if accelerator.is_main_process:
        print(f"student {apart[0]} teacher {apart[1]}", flush=True)
    accelerator.end_training()  # a group of processes that is not ended may abort at exit


if __name__ == "__main__":
    main()
