"""One LoRA training step at full size: images a second, peak memory, and who gets gradients.

    python -m benchmarks.step --batch 8 --steps 3

Random weights (the arithmetic is the same) and random images; second task, so that teacher, prototypes, hardness and
distillation are all in the step.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import numpy as np
import torch
from accelerate import Accelerator

from passlora import Config
from passlora.batches import Batch, Images
from passlora.data import ArrayRows, Split
from passlora.learner import Learner, TaskData
from passlora.memory import Statistics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224", help="timm name, or passlora/vit-mini")
    parser.add_argument("--batch", type=int, default=8, help="images a step (each in four views)")
    parser.add_argument("--steps", type=int, default=3, help="steps to time, after one to warm up")
    parser.add_argument("--classes", type=int, default=10, help="old classes, and new ones")
    options = parser.parse_args()

    pretrained = options.model == "passlora/vit-mini"
    config = Config.make(model_name_or_path=options.model, pretrained=pretrained, num_tasks=2)
    learner = Learner(config, Accelerator())
    network, old = learner.network, options.classes
    network.grow(old)
    statistics = Statistics(4 * old, network.backbone.feature_dim, full=False)
    statistics.add(torch.randn(12 * old, network.backbone.feature_dim), torch.arange(12 * old) % (4 * old))
    learner.memory.remember(statistics)
    network.backbone.become_teacher()
    network.grow(old)

    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (options.batch, 32, 32, 3)).astype(np.uint8)
    classes = old + np.arange(options.batch) % old
    images = Images(Split(ArrayRows(pixels, "noise"), classes), network.backbone.image_size, config.data, "noise")
    data = TaskData(images, np.arange(options.batch), classes)
    rows = np.arange(options.batch)
    batch = Batch(images.cache, torch.rand(options.batch, 6), rows, rows)
    optimizer = torch.optim.Adam(network.trainable(), lr=config.training.learning_rate)
    network.train()

    def step() -> float:
        optimizer.zero_grad()
        losses = learner._losses(network, batch, data, options.batch, torch.Generator().manual_seed(0))
        losses.total.backward()
        optimizer.step()
        return losses.total.item()

    step()
    seconds = []
    for _ in range(options.steps):
        began = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - began)
    with_gradient = {name for name, p in network.named_parameters() if p.grad is not None}
    assert all(".lora_" in name or name.startswith("head.") for name in with_gradient), "a frozen weight got a gradient"
    report = {
        "model": options.model,
        "batch": options.batch,
        "loss": round(loss, 3),
        "images_per_second": round(options.batch / float(np.median(seconds)), 2),
        "views_per_second": round(4 * options.batch / float(np.median(seconds)), 2),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "tensors_with_gradient": len(with_gradient),
        "weights_with_gradient": sum(p.numel() for name, p in network.named_parameters() if name in with_gradient),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
