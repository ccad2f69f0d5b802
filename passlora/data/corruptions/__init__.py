"""Images as bad weather, bad cameras and bad files make them: 15 corruptions, five severities each.

Hendrycks and Dietterich, 2019: ImageNet-C for photographs, computed by the package imagecorruptions-imaug (pip install
"passlora[robustness]"), and CIFAR-100-C for small images (small.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass

import numpy as np
from PIL import Image

from passlora.data.pictures import to_rgb
from passlora.data.rows import Rows, Split
from passlora.errors import PassloraError, nearest

GROUPS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
CORRUPTIONS = tuple(name for names in GROUPS.values() for name in names)
SEEDED = ("impulse_noise", "glass_blur")  # these draw from a generator of their own
ROBUSTNESS = "robustness.json"  # in a model's folder `eval`
SMALLEST, LARGEST = 32, 256  # pixels of the shorter side that the corruptions are made for
SMALL = 64  # up to here at the strengths of CIFAR-100-C


def check(names: tuple[str, ...], severity: int) -> None:
    """Refuse before anything is computed."""
    for name in names:
        if name not in CORRUPTIONS:
            raise PassloraError(f"no corruption {name!r}{nearest(name, CORRUPTIONS)}")
    if severity not in range(1, 6):
        raise PassloraError(f"severity must be 1 (mild) to 5, got {severity}")
    if importlib.util.find_spec("imagecorruptions") is None:
        raise PassloraError('corruptions need a package: pip install "passlora[robustness]"')


@dataclass
class CorruptedRows:
    """The images of another source, each damaged in its own, repeatable way."""

    source: Rows
    name: str
    severity: int

    def image(self, row: int) -> Image.Image:
        return corrupt(to_rgb(self.source.image(row)), self.name, self.severity, row)

    def describe(self, row: int) -> str:
        return self.source.describe(row)


def corrupted(split: Split, name: str, severity: int) -> Split:
    return Split(CorruptedRows(split.rows, name, severity), split.labels)


def corrupt(image: Image.Image, name: str, severity: int, seed: int) -> Image.Image:
    """Small images keep their size (at least 32 px), photographs get the 256 px that evaluation crops 224 from."""
    from imagecorruptions import corrupt as damage_photograph

    from passlora.data.corruptions.small import damage

    side = min(image.size)
    wanted = min(max(side, SMALLEST), LARGEST)
    if wanted != side:
        size = tuple(max(wanted, round(length * wanted / side)) for length in image.size)
        image = image.resize(size, Image.Resampling.BILINEAR)  # type: ignore[arg-type]
    own = int.from_bytes(hashlib.sha256(f"{name} {severity} {seed}".encode()).digest()[:4], "big")
    pixels = np.asarray(image)
    before = np.random.get_state()
    np.random.seed(own)  # both draw from numpy's global generator
    try:
        if wanted <= SMALL:
            return Image.fromarray(damage(pixels, name, severity))
        arguments = {"seed": own} if name in SEEDED else {}
        return Image.fromarray(damage_photograph(pixels, severity, name, **arguments))
    finally:
        np.random.set_state(before)
