"""Run by test_distributed.py on two processes: how far apart are their networks after a task?

python tests/two_resnets.py [MODEL]
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from accelerate import Accelerator

from passlora import Config, Learner
from passlora.data.batches import Images, TaskData
from passlora.data.dataset import load_dataset


def main(argv: list[str]) -> None:
    accelerator = Accelerator()
    assert accelerator.num_processes == 2
    config = Config.make(
        model_name_or_path=argv[1] if len(argv) > 1 else "passlora/resnet18",
        image_size=32,
        lora_r=0,
        pretrained=False,
        task_sizes=[6, 4],
        max_train_per_class=2,
        num_train_epochs=1,
        per_device_train_batch_size=5,
    )
    learner = Learner(config, accelerator)
    split = load_dataset(config.data, 0).train
    images = Images(split, 32, config.data, "digits")
    for classes in (range(6), range(6, 10)):  # the network after the first is the teacher of the second
        learner.learn(TaskData(images, np.flatnonzero(np.isin(split.labels, classes)), split.labels), len(classes))
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    backbone, apart = learner.network.backbone, []
    with torch.no_grad():
        for f in (backbone, backbone.teacher):
            first, second = accelerator.gather(f(x)).chunk(2)
            apart.append(float((first - second).abs().max()))
        moved = bool((backbone(x) - backbone.teacher(x)).abs().max() > 0)
    if accelerator.is_main_process:
        print(f"student {apart[0]} teacher {apart[1]} moved {moved}", flush=True)
    accelerator.end_training()  # a group of processes that is not ended may abort at exit


if __name__ == "__main__":
    main(sys.argv)
