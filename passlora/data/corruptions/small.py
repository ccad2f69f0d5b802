"""The 15 corruptions at the strengths of CIFAR-10-C and CIFAR-100-C, for images of some 32 pixels.

The package imagecorruptions has those of ImageNet-C alone, made for 224 pixels; its plasma clouds, lens and pictures of
frost serve here too. Strengths: Hendrycks and Dietterich, 2019, as published with CIFAR-10-C. Chance is numpy's global
generator, as in that package: `corruptions.corrupt` seeds it and puts it back.
"""

from __future__ import annotations

import functools
import importlib.resources
import io
from collections.abc import Callable
from typing import Any

import numpy as np
from imagecorruptions.corruptions import disk, next_power_of_2, plasma_fractal
from PIL import Image
from scipy.ndimage import affine_transform, correlate, gaussian_filter, map_coordinates, zoom

Pixels = np.ndarray  # height x width x 3, float, 0 to 1; the result may leave that range


def as_image(x: Pixels) -> Image.Image:
    return Image.fromarray(np.uint8(np.rint(255 * x)))


# --- noise -------------------------------------------------------------------------------------------------------


def gaussian_noise(x: Pixels, sigma: float) -> Pixels:
    return x + np.random.normal(scale=sigma, size=x.shape)


def shot_noise(x: Pixels, photons: float) -> Pixels:
    return np.random.poisson(x * photons) / photons


def impulse_noise(x: Pixels, share: float) -> Pixels:
    """Salt and pepper, half each, a colour at a time."""
    hit = np.random.uniform(size=x.shape) < share
    return np.where(hit, np.random.uniform(size=x.shape) < 0.5, x)


# --- blur --------------------------------------------------------------------------------------------------------


def blurred(x: Pixels, sigma: float) -> Pixels:
    return gaussian_filter(x, (sigma, sigma, 0), mode="nearest")


def defocus_blur(x: Pixels, strength: tuple[float, float]) -> Pixels:
    radius, softness = strength
    return correlate(x, disk(radius, softness)[..., None], mode="mirror")


def glass_blur(x: Pixels, strength: tuple[float, int]) -> Pixels:
    """Every pixel takes the value of itself or of a neighbour above or to the left, one after the other."""
    sigma, passes = strength
    height, width = x.shape[:2]
    source = list(range(height * width))
    for _ in range(passes):
        steps = np.random.randint(-1, 1, size=(height, width, 2)).tolist()
        for row in range(height - 1, 1, -1):
            for column in range(width - 1, 1, -1):
                right, down = steps[row][column]
                source[row * width + column] = source[(row + down) * width + column + right]
    return blurred(blurred(x, sigma).reshape(-1, 3)[source].reshape(x.shape), sigma)


def moved(x: Pixels, radius: int, sigma: float, angle: float) -> Pixels:
    """Motion in one direction, in degrees: half a bell curve of shifted copies; the border is continued."""
    way = np.arange(2 * radius + 1)
    weights = np.exp(-(way**2) / (2 * sigma**2))
    down, right = (np.rint(way * f(np.deg2rad(angle))).astype(int) for f in (np.sin, np.cos))
    out = np.zeros_like(x)
    for weight, dy, dx in zip(weights / weights.sum(), down, right, strict=True):
        rows, columns = (np.clip(np.arange(n) + d, 0, n - 1) for n, d in zip(x.shape, (dy, dx), strict=False))
        out += weight * x[rows[:, None], columns]
    return out


def motion_blur(x: Pixels, strength: tuple[int, float]) -> Pixels:
    return moved(x, *strength, angle=np.random.uniform(-45, 45))


def zoomed(x: Pixels, factor: float) -> Pixels:
    """The middle of the image, at the image's size."""
    size = np.array(x.shape[:2])
    crop = np.ceil(size / factor).astype(int)
    top, left = (size - crop) // 2
    large = zoom(x[top : top + crop[0], left : left + crop[1]], (factor, factor, 1), order=1)
    top, left = (np.array(large.shape[:2]) - size) // 2
    return large[top : top + size[0], left : left + size[1]]


def zoom_blur(x: Pixels, largest: float) -> Pixels:
    factors = np.arange(1, largest, 0.01)
    return (x + sum(zoomed(x, factor) for factor in factors)) / (len(factors) + 1)


# --- weather -----------------------------------------------------------------------------------------------------


def snow(x: Pixels, strength: tuple[float, float, float, float, int, float, float]) -> Pixels:
    mean, deviation, factor, threshold, radius, sigma, share = strength
    flakes = zoomed(np.random.normal(mean, deviation, size=(*x.shape[:2], 1)), factor)
    flakes = np.where(flakes < threshold, 0, np.clip(flakes, 0, 1))
    flakes = moved(flakes, radius, sigma, angle=np.random.uniform(-135, -45))
    grey = x @ np.array([0.299, 0.587, 0.114])
    whiter = np.maximum(x, 1.5 * grey[..., None] + 0.5)
    return share * x + (1 - share) * whiter + flakes + np.rot90(flakes, 2)


@functools.cache
def ice(name: str) -> Pixels:
    """Every fifth pixel of a photograph of frost."""
    with (importlib.resources.files("imagecorruptions") / "frost" / name).open("rb") as file:
        return np.asarray(Image.open(file).convert("RGB"))[2::5, 2::5] / 255


def frost(x: Pixels, strength: tuple[float, float]) -> Pixels:
    """A random piece of one of five photographs is added."""
    picture = ice(("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")[np.random.randint(5)])
    rows, columns = (
        (np.random.randint(max(there - here, 1)) + np.arange(here)) % there
        for there, here in zip(picture.shape[:2], x.shape[:2], strict=True)
    )
    return strength[0] * x + strength[1] * picture[rows[:, None], columns]


def fog(x: Pixels, strength: tuple[float, float]) -> Pixels:
    density, decay = strength
    height, width = x.shape[:2]
    cloud = plasma_fractal(next_power_of_2(max(height, width)), decay)[:height, :width, None]
    return (x + density * cloud) * x.max() / (x.max() + density)


def brightness(x: Pixels, added: float) -> Pixels:
    """To the value of hue, saturation, value: colours keep their proportions; black turns grey."""
    value = x.max(axis=2, keepdims=True)
    target = np.minimum(value + added, 1)
    return np.where(value > 0, x * target / np.maximum(value, 1e-9), target)


# --- digital -----------------------------------------------------------------------------------------------------


def contrast(x: Pixels, left: float) -> Pixels:
    mean = x.mean(axis=(0, 1), keepdims=True)
    return mean + left * (x - mean)


def elastic_transform(x: Pixels, strength: tuple[float, float, float]) -> Pixels:
    """An affine map that moves three corners of a square by up to the third strength, then a smooth random flow.

    Strengths (of the flow: how far, how smooth) in sides of the image.
    """
    far, smooth, corners = (min(x.shape[:2]) * part for part in strength)
    centre, third = np.array(x.shape[:2]) // 2, min(x.shape[:2]) // 3
    target = centre + third * np.array([[1, 1], [-1, 1], [-1, -1]])
    source = target + np.random.uniform(-corners, corners, size=(3, 2))
    matrix = np.linalg.solve(np.c_[target, np.ones(3)], source).T  # 2 x 3: where each pixel comes from
    x = np.stack([affine_transform(x[..., c], matrix, order=1, mode="mirror") for c in range(3)], axis=-1)
    if not far:
        return x
    flow = [far * gaussian_filter(np.random.uniform(-1, 1, size=x.shape[:2]), smooth, truncate=3) for _ in range(2)]
    places = np.indices(x.shape[:2]) + np.array(flow)
    return np.stack([map_coordinates(x[..., c], places, order=1, mode="reflect") for c in range(3)], axis=-1)


def pixelate(x: Pixels, left: float) -> Pixels:
    image = as_image(x)
    small = image.resize((int(image.width * left), int(image.height * left)), Image.Resampling.BOX)
    return np.asarray(small.resize(image.size, Image.Resampling.BOX)) / 255


def jpeg_compression(x: Pixels, quality: int) -> Pixels:
    file = io.BytesIO()
    as_image(x).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file)) / 255


# --- strengths ---------------------------------------------------------------------------------------------------

STRENGTHS: dict[Callable[[Pixels, Any], Pixels], tuple[Any, Any, Any, Any, Any]] = {
    gaussian_noise: (0.04, 0.06, 0.08, 0.09, 0.10),
    shot_noise: (500, 250, 100, 75, 50),
    impulse_noise: (0.01, 0.02, 0.03, 0.05, 0.07),
    defocus_blur: ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    glass_blur: ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)),
    motion_blur: ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    zoom_blur: (1.06, 1.11, 1.16, 1.21, 1.26),
    snow: (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    frost: ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    fog: ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    brightness: (0.05, 0.1, 0.15, 0.2, 0.3),
    contrast: (0.75, 0.5, 0.4, 0.3, 0.15),
    elastic_transform: ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    pixelate: (0.95, 0.9, 0.85, 0.75, 0.65),
    jpeg_compression: (80, 65, 58, 50, 40),
}
BY_NAME = {make.__name__: (make, strengths) for make, strengths in STRENGTHS.items()}


def damage(pixels: np.ndarray, name: str, severity: int) -> np.ndarray:
    """Bytes in, bytes out."""
    make, strengths = BY_NAME[name]
    return (255 * np.clip(make(pixels / 255, strengths[severity - 1]), 0, 1)).astype(np.uint8)
