"""From rows to batches: decode once or by workers, plan who reads what, augment on the device.

Every random choice is drawn for the *global* batch from a generator that depends on (seed, task, epoch) alone; each
process then takes its share. So one process and many see the same images with the same augmentation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from passlora.config import DataConfig
from passlora.data.sources import Split, to_rgb
from passlora.display.progress import progress
from passlora.errors import PassloraError

SMALL_SIDE = 64  # images up to this side are decoded once and kept as uint8
UNIFORMS = 6  # random numbers an image: the crop's top, left, area and shape, the flip, the brightness


def generator(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own for each key, such as ("draws", seed, task)."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


@dataclass
class Plan:
    """What one process reads for one global batch."""

    rows: np.ndarray  # this process's rows; padded, so that all processes have as many
    uniforms: Tensor | None  # (len(rows), UNIFORMS) for augmentation
    batch_rows: np.ndarray  # the whole batch, over all processes


@dataclass
class Batch:
    images: Tensor  # uint8, this process's share
    uniforms: Tensor | None
    rows: np.ndarray  # this process's rows
    batch_rows: np.ndarray

    def pin_memory(self) -> Batch:
        """Called by the loader's pinning thread, so that copies to a GPU overlap with computation."""
        uniforms = None if self.uniforms is None else self.uniforms.pin_memory()
        return Batch(self.images.pin_memory(), uniforms, self.rows, self.batch_rows)


class Images:
    """The images of a split as uint8 tensors, by plan."""

    def __init__(self, split: Split, image_size: int, config: DataConfig, what: str) -> None:
        self.split, self.image_size, self.config = split, image_size, config
        self.cache = decode_small(split, what)

    @property
    def is_small(self) -> bool:
        return self.cache is not None

    @property
    def is_random(self) -> bool:
        """Whether an image looks different from epoch to epoch."""
        config = self.config
        crop = config.crop_padding if self.is_small else config.rrc_min_scale
        return bool(crop or config.horizontal_flip or config.brightness)

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, plan: Plan) -> Batch | PassloraError:
        try:
            return self._read(plan)
        except PassloraError as error:  # a worker would turn it into a traceback: `batches` raises it
            return error

    def _read(self, plan: Plan) -> Batch:
        if self.cache is not None:
            images = self.cache[torch.from_numpy(plan.rows)]
        else:
            pixels = []
            for i, row in enumerate(plan.rows):
                u = None if plan.uniforms is None else plan.uniforms[i].tolist()
                pixels.append(cut(self.split.rgb(int(row)), self.image_size, u, self.config.rrc_min_scale))
            images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
        return Batch(images, plan.uniforms, plan.rows, plan.batch_rows)

    def batches(self, plans: TrainPlans | list[Plan]) -> Iterator[Batch]:
        """The batches of the plans; large images are decoded by workers, ahead of their use."""
        workers = 0 if self.is_small else self.config.dataloader_num_workers
        loader: DataLoader[Any] = DataLoader(
            self,  # type: ignore[arg-type]
            batch_sampler=plans,  # type: ignore[arg-type]
            collate_fn=whole,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
        )
        for batch in loader:
            if isinstance(batch, PassloraError):
                raise batch
            yield batch

    def augment(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """On the device: crop with padding (small images only: large ones are cut while decoding), flip, brightness."""
        config, u = self.config, uniforms.to(images.device, non_blocking=True)
        if self.is_small and config.crop_padding:
            images = crop_with_padding(images, config.crop_padding, u[:, 0], u[:, 1])
        if config.horizontal_flip:
            images = torch.where((u[:, 4] < 0.5)[:, None, None, None], images.flip(-1), images)
        if config.brightness:
            factor = 1 + config.brightness * (2 * u[:, 5] - 1)
            images = (images * factor[:, None, None, None]).clamp(0, 255)
        return images


def whole(batch: Any) -> Any:
    """Batches come out of `Images` whole (a named function, so that workers can be spawned)."""
    return batch


def decode_small(split: Split, what: str) -> Tensor | None:
    """All images as one uint8 tensor if every one is small; None otherwise."""
    if max(split.rgb(0).size) > SMALL_SIDE:
        return None
    size = split.rgb(0).size
    cache = np.empty((len(split), size[1], size[0], 3), dtype=np.uint8)
    for row in progress(range(len(split)), desc=f"reading {what}"):
        image = split.rgb(row)
        if max(image.size) > SMALL_SIDE:
            return None
        cache[row] = np.asarray(image if image.size == size else image.resize(size, Image.Resampling.BILINEAR))
    return torch.from_numpy(cache).permute(0, 3, 1, 2).contiguous()


def cut(image: Image.Image, size: int, uniforms: list[float] | None, min_scale: float) -> np.ndarray:
    """RandomResizedCrop with the given random numbers, or (without them) the usual 224/256 centre crop."""
    width, height = image.size
    if uniforms is None or min_scale == 0:
        side = min(width, height) * 224 / 256
        w = h = side
        left, top = (width - side) / 2, (height - side) / 2
    else:
        area = width * height * (min_scale + (1 - min_scale) * uniforms[2])
        ratio = (3 / 4) * (16 / 9) ** uniforms[3]  # log-uniform in 3/4..4/3
        w, h = min((area * ratio) ** 0.5, width), min((area / ratio) ** 0.5, height)
        left, top = (width - w) * uniforms[0], (height - h) * uniforms[1]
    box = (left, top, left + w, top + h)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))


def as_input(image: Image.Image, size: int) -> Tensor:
    """One image as evaluation reads it: small ones at their own size, large ones by their centre crop."""
    image = to_rgb(image)
    pixels: Any = image if max(image.size) <= SMALL_SIDE else cut(image, size, None, 0.0)
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)


def crop_with_padding(images: Tensor, padding: int, u_top: Tensor, u_left: Tensor) -> Tensor:
    """Each image shifted by its own amount over a zero border; no loop over images."""
    count, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, [padding] * 4)
    top = (u_top * (2 * padding + 1)).long()
    left = (u_left * (2 * padding + 1)).long()
    y = top[:, None] + torch.arange(height, device=images.device)
    x = left[:, None] + torch.arange(width, device=images.device)
    image = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[None, :, None, None]
    return padded[image, channel, y[:, None, :, None], x[:, None, None, :]]


class TrainPlans:
    """All batches of one task, epoch after epoch: one loader (and its workers) lives for the whole task."""

    def __init__(
        self, rows: np.ndarray, batch_size: int, epochs: int, key: tuple, rank: int, world: int, start: int = 0
    ) -> None:
        self.rows, self.batch_size, self.epochs, self.key = rows, batch_size, epochs, key
        self.rank, self.world = rank, world
        self.start = start  # steps done before an interruption

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __len__(self) -> int:
        return self.epochs * self.steps_per_epoch

    def __iter__(self) -> Iterator[Plan]:
        for epoch in range(self.start // self.steps_per_epoch, self.epochs):
            step = epoch * self.steps_per_epoch
            draw = generator("batches", *self.key, epoch)
            order = self.rows[torch.randperm(len(self.rows), generator=draw).numpy()]
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                uniforms = torch.rand(len(batch), UNIFORMS, generator=draw)
                share = share_of(len(batch), self.rank, self.world)
                if step >= self.start:
                    yield Plan(batch[share], uniforms[torch.from_numpy(share)], batch)
                step += 1


def share_of(count: int, rank: int, world: int) -> np.ndarray:
    """Positions of a process's share of `count` items: as many for each process, the surplus repeating item 0.

    Shares put one after another hold the items in order first, then the repetitions: `shares[:count]` undoes it.
    """
    each = -(-count // world)
    positions = np.arange(rank * each, (rank + 1) * each)
    return np.where(positions < count, positions, 0)


def eval_plans(rows: np.ndarray, batch_size: int, rank: int, world: int) -> list[Plan]:
    """Each row read by exactly one process; nothing is padded, nothing thrown away."""
    own = np.array_split(rows, world)[rank]
    parts = [own[start : start + batch_size] for start in range(0, len(own), batch_size)]
    return [Plan(part, None, part) for part in parts]


def augmented_plans(rows: np.ndarray, batch_size: int, key: tuple, rank: int, world: int) -> list[Plan]:
    """As `eval_plans`, with random numbers for augmentation that belong to the row, whoever reads it."""
    uniforms = torch.rand(len(rows), UNIFORMS, generator=generator("augmented", *key))
    places = eval_plans(np.arange(len(rows)), batch_size, rank, world)
    return [Plan(rows[p.rows], uniforms[torch.from_numpy(p.rows)], rows[p.rows]) for p in places]
