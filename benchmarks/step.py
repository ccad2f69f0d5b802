"""The training step: against what it cannot do without, against the usual implementation, and what feeds it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from passlora import Config
from passlora.data.batches import TrainPlans
from passlora.method.views import rotate
from passlora.training.learner import Learner

from . import floor
from .reference import Reference, as_usual
from .scene import DEIT, LORA, RESNET, Scene
from .timing import Row, interleave, ratios, second

LORA_NAME, DEIT_NAME, RESNET_NAME = (
    "vit-mini with LoRA, 64 px, batch 16",
    "DeiT-S/16 with LoRA, 224 px, batch 2",
    "ResNet-18, 32 px, batch 8",
)


def against_floor(rounds: int) -> Iterator[Row]:
    """A whole step (data, views, student, teacher, prototypes, hardness, distillation, Adam) against the bare one."""
    bare_lora = floor.transformer("deit_tiny_patch16_224", 64, 64, img_size=64, depth=6)
    bare_deit = floor.transformer("deit_small_patch16_224", 8, 224)
    cases: list[tuple[str, dict[str, Any], int, int, Any]] = [
        (LORA_NAME, LORA, 16, 2, bare_lora),
        (DEIT_NAME, DEIT, 2, 1, bare_deit),
        (RESNET_NAME, RESNET, 8, 1, floor.resnet18(32, 32)),
    ]
    for name, settings, batch, count, bare in cases:
        scene = Scene(settings, batch, count, epochs=2)
        seconds = interleave({"ours": scene.second_epoch, "floor": second(floor.steps(bare, count))}, 3 * rounds)
        yield Row(f"{name}: a step", [s / count for s in seconds["ours"]], "s")
        yield Row(f"{name}: a step, over the floor", ratios(seconds, "ours", "floor"), "times", "<= 1.10")


def against_usual(rounds: int) -> Iterator[Row]:
    """Whole epochs against the usual implementation, which reference.py writes down."""
    for name, settings, batch, count in ((RESNET_NAME, RESNET, 8, 3), (LORA_NAME, LORA, 16, 8)):
        scene = Scene(settings, batch, count, epochs=2)
        seconds = interleave({"ours": scene.second_epoch, "usual": second(Reference(scene))}, rounds)
        yield Row(f"{name}: an epoch", [scene.count / s for s in seconds["ours"]], "images/s")
        yield Row(f"{name}: an epoch, usual implementation", [scene.count / s for s in seconds["usual"]], "images/s")
        yield Row(f"{name}: over the usual implementation", ratios(seconds, "usual", "ours"), "times", ">= 2")


def choices(rounds: int) -> Iterator[Row]:
    """What is always on, against doing without it."""
    for name, settings, batch, count in (
        (f"{LORA_NAME}: LoRA in one product, over peft's layers", LORA, 16, 2),
        (f"{DEIT_NAME}: LoRA in one product, over peft's layers", DEIT, 2, 1),
        (f"{RESNET_NAME}: channels-last, over torch's default", RESNET, 8, 1),
    ):
        ours, usual = (Scene(settings, batch, count, epochs=2) for _ in range(2))
        as_usual(usual.learner.network.backbone.body)
        seconds = interleave({"ours": ours.second_epoch, "usual": usual.second_epoch}, 3 * rounds)
        yield Row(name, ratios(seconds, "ours", "usual"), "times")
    weights = list(Scene(RESNET, 8, 1).learner.network.parameters())
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    adams = {fused: torch.optim.Adam(weights, fused=fused) for fused in (True, False)}
    seconds = interleave({"fused": adams[True].step, "loop": adams[False].step}, 3 * rounds)
    yield Row("ResNet-18: Adam in one pass, over torch's default", ratios(seconds, "fused", "loop"), "times")


def options(rounds: int) -> Iterator[Row]:
    """What the options that trade memory, start-up or augmentation for time do to an epoch."""
    plain = {**LORA, "crop_padding": 0, "horizontal_flip": False, "brightness": 0}
    chosen = {
        "gradient_checkpointing": {"gradient_checkpointing": True},
        "cache_teacher (5 epochs, its pass included)": {"cache_teacher": True},
    }
    for name, option in chosen.items():
        with_it, without = (Scene({**plain, **extra}, 16, 4, epochs=5) for extra in (option, {}))
        seconds = interleave({"with": with_it.train, "without": without.train}, rounds)
        yield Row(f"vit-mini with LoRA: {name}, over training without", ratios(seconds, "with", "without"), "times")


def teacher_memory(rounds: int) -> Iterator[Row]:
    """What appears when a teacher is made: bytes of live tensors, before and after."""
    for name, settings, goal in (("DeiT-S/16 with LoRA", DEIT, "<= 1"), ("ResNet-18 (a copy)", RESNET, "")):
        learner = Learner(Config.make(**settings, num_tasks=2), Accelerator())
        before = live_bytes()
        learner.network.backbone.become_teacher()
        yield Row(f"{name}: memory of the teacher", [(live_bytes() - before) / 2**20], "MB", goal)


def live_bytes() -> int:
    """Of all tensors that Python can reach, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance would wake lazy objects of torch
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def feeding(rounds: int) -> Iterator[Row]:
    """Images made ready for the network: drawn (photographs: decoded), augmented, resized, rotated; by one process."""
    photographs = {**DEIT, "dataloader_num_workers": 0}
    for name, settings, batch, count in (
        (LORA_NAME, LORA, 16, 8),
        (RESNET_NAME, RESNET, 8, 3),
        (f"{DEIT_NAME}, JPEG of 500 x 375", photographs, 2, 2),
    ):
        scene = Scene(settings, batch, count, epochs=2, jpeg=settings is photographs)
        backbone = scene.learner.network.backbone
        plans = TrainPlans(np.arange(scene.count), batch, 1, (0, 0), 0, 1)

        def feed(scene: Scene = scene, backbone: Any = backbone, plans: TrainPlans = plans) -> None:
            for part in scene.images.batches(plans):
                assert part.uniforms is not None
                rotate(backbone.prepare(scene.images.augment(part.images, part.uniforms)), 4)

        seconds = interleave({"feeding": second(feed), "training": scene.second_epoch}, rounds)
        yield Row(f"{name}: feeding", [scene.count / s for s in seconds["feeding"]], "images/s")
        yield Row(f"{name}: feeding, over the step's appetite", ratios(seconds, "training", "feeding"), "times", ">= 5")
