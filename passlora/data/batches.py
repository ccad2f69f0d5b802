"""From rows to batches: decode once or by workers, plan who reads what, augment on the device.

Every random choice is drawn for the *global* batch from a generator that depends on (seed, task, epoch) alone; each
process then takes its share. So one process and many see the same images with the same augmentation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from passlora.config import DataConfig
from passlora.data.pictures import to_rgb
from passlora.data.rows import Split
from passlora.display.progress import progress
from passlora.errors import PassloraError

SMALL_SIDE = 64  # images up to this side are small: seen whole, and kept decoded
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
    images: Tensor  # this process's share, in 0..255: uint8, or float where one was resized
    uniforms: Tensor | None
    rows: np.ndarray  # this process's rows
    batch_rows: np.ndarray

    def pin_memory(self) -> Batch:
        """Called by the loader's pinning thread, so that copies to a GPU overlap with computation."""
        uniforms = None if self.uniforms is None else self.uniforms.pin_memory()
        return Batch(self.images.pin_memory(), uniforms, self.rows, self.batch_rows)


class Images:
    """The images of a split, by plan. Each is prepared by itself: no image depends on the others of its split."""

    def __init__(self, split: Split, image_size: int, config: DataConfig, what: str) -> None:
        self.split, self.image_size, self.config = split, image_size, config
        self.cache = read_small(split, what)

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
        if isinstance(self.cache, Tensor):
            images = self.cache[torch.from_numpy(plan.rows)]
        else:
            uniforms = [None] * len(plan.rows) if plan.uniforms is None else plan.uniforms
            images = torch.stack([self._one(int(row), u) for row, u in zip(plan.rows, uniforms, strict=True)])
        return Batch(images, plan.uniforms, plan.rows, plan.batch_rows)

    def _one(self, row: int, u: Tensor | None) -> Tensor:
        """An image at the network's size: cropped at random in training, else as `as_input` has it."""
        size, config = self.image_size, self.config
        if self.cache is not None:
            pixels = self.cache[row]
            if u is not None and config.crop_padding:
                pixels = crop_with_padding(pixels[None], config.crop_padding, u[:1], u[1:2])[0]
            return resize(pixels, size)
        image = self.split.rgb(row)
        if u is not None and config.rrc_min_scale:
            return to_pixels(cut(image, size, u.tolist(), config.rrc_min_scale))
        return as_input(image, size)

    def batches(self, plans: TrainPlans | list[Plan]) -> Iterator[Batch]:
        """The batches of the plans; large images are decoded by workers, ahead of their use."""
        workers = 0 if self.is_small else self.config.dataloader_num_workers
        loader: DataLoader[Any] = DataLoader(
            self,  # type: ignore[arg-type]
            batch_sampler=plans,  # type: ignore[arg-type]
            collate_fn=whole,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its seed for workers is not taken from the training's random numbers
        )
        for batch in loader:
            if isinstance(batch, PassloraError):
                raise batch
            yield batch

    def augment(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """On the device: crop with padding (images of one size; others are cropped when read), flip, brightness."""
        config, u = self.config, uniforms.to(images.device, non_blocking=True)
        if isinstance(self.cache, Tensor) and config.crop_padding:
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


def read_small(split: Split, what: str) -> Tensor | list[Tensor] | None:
    """All images as uint8 if every one is small, as one tensor if they have one size; None at the first large one."""
    pixels = []
    for row in progress(range(len(split)), desc=f"reading {what}"):
        image = split.rgb(row)
        if is_large(image):
            return None
        pixels.append(to_pixels(image))
    return torch.stack(pixels) if len({image.shape for image in pixels}) == 1 else pixels


def is_large(image: Image.Image) -> bool:
    return max(image.size) > SMALL_SIDE


def to_pixels(image: Image.Image) -> Tensor:
    """An RGB image as uint8: colour, height, width."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def as_input(image: Image.Image, size: int) -> Tensor:
    """An image as evaluation and prediction see it, size x size, 0..255: a small one whole, of a large one the middle.

    Small ones become float: rounding would set them apart from those that the network resizes itself.
    """
    image = to_rgb(image)
    return to_pixels(cut(image, size)) if is_large(image) else resize(to_pixels(image), size)


def resize(pixels: Tensor, size: int) -> Tensor:
    """One small image, as `prepare` of the network does it with a batch."""
    x = pixels.float()
    if x.shape[-2:] == (size, size):
        return x
    return F.interpolate(x[None], (size, size), mode="bilinear", antialias=x.shape[-1] > size)[0]


def cut(image: Image.Image, size: int, uniforms: list[float] | None = None, min_scale: float = 0.0) -> Image.Image:
    """RandomResizedCrop with the given random numbers, or (without them) the usual 224/256 centre crop."""
    width, height = image.size
    if uniforms is None:
        w = h = min(width, height) * 224 / 256
        left, top = (width - w) / 2, (height - h) / 2
    else:
        area = width * height * (min_scale + (1 - min_scale) * uniforms[2])
        ratio = (3 / 4) * (16 / 9) ** uniforms[3]  # log-uniform in 3/4..4/3
        w, h = min((area * ratio) ** 0.5, width), min((area / ratio) ** 0.5, height)
        left, top = (width - w) * uniforms[0], (height - h) * uniforms[1]
    box = (left, top, left + w, top + h)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


def crop_with_padding(images: Tensor, padding: int, u_top: Tensor, u_left: Tensor) -> Tensor:
    """Each image shifted by its own amount over a zero border; no loop over images."""
    count, channels, height, width = images.shape
    padded = F.pad(images, [padding] * 4)
    top = (u_top * (2 * padding + 1)).long()
    left = (u_left * (2 * padding + 1)).long()
    y = top[:, None] + torch.arange(height, device=images.device)
    x = left[:, None] + torch.arange(width, device=images.device)
    image = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[None, :, None, None]
    return padded[image, channel, y[:, None, :, None], x[:, None, None, :]]


@dataclass
class TaskData:
    """Rows of a split to learn from or to test on, and the model's class index of every row of that split."""

    images: Images
    rows: np.ndarray
    classes: np.ndarray  # -1 where the model has no such class


def select(images: Images, labels: np.ndarray, class_names: Sequence[str], index: Mapping[str, int]) -> TaskData:
    """The rows whose class is in `index`, which says the model's class index of a name."""
    place = np.array([index.get(name, -1) for name in class_names], dtype=np.int64)
    classes = place[labels]
    return TaskData(images, np.flatnonzero(classes >= 0), classes)


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
