"""Pictures of any kind as upright RGB: files, pictures of Pillow, arrays and tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from passlora.errors import PassloraError

if TYPE_CHECKING:
    from torch import Tensor

    Picture = Image.Image | np.ndarray | Tensor | str | Path

# Read where Pillow, or its plugin pillow-heif (pip install "passlora[heif]"), can.
MODERN_SUFFIXES = (".heic", ".heif", ".avif")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


@functools.cache
def register_plugins() -> None:
    """HEIC, where its plugin is installed."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        return
    register_heif_opener()


@functools.cache
def readable_suffixes() -> tuple[str, ...]:
    """Endings of files that are read here."""
    register_plugins()
    known = Image.registered_extensions()
    return (*IMAGE_SUFFIXES, *(suffix for suffix in MODERN_SUFFIXES if known.get(suffix) in Image.OPEN))


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright; transparency over white; more than 8 bits a channel brought to 8."""
    if image.mode.startswith("I;16"):  # 16-bit grey: Pillow would clip it to white
        image = Image.fromarray((np.asarray(image, dtype=np.uint16) >> 8).astype(np.uint8))
    elif image.mode in ("F", "I"):
        image = Image.fromarray(scaled(np.asarray(image)))
    image = ImageOps.exif_transpose(image)
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def scaled(values: np.ndarray) -> np.ndarray:
    """Grey values of any range as 0 to 255: those of 0 to 1 times 255, of 0 to 255 as they are, others stretched."""
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise PassloraError("its pixels are not all finite numbers")
    low, high = float(values.min(initial=0.0)), float(values.max(initial=0.0))
    if low < 0 or high > 255:
        values = (values - values.min()) / max(float(np.ptp(values)), 1e-12) * 255
    elif 0 < high <= 1:
        values = values * 255
    return np.rint(values).astype(np.uint8)


def as_picture(image: Picture) -> Image.Image:
    """What a user of Python may have: a path, a picture of Pillow, an array (height, width, colours) or a tensor
    (colours, height, width), of bytes or of floats from 0 to 1."""
    if isinstance(image, (str, Path)):
        return open_picture(image)
    if isinstance(image, Image.Image):
        return image
    array = as_array(image)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or 0 in array.shape:
        raise PassloraError(
            f"an array of shape {tuple(array.shape)} is no picture: expected (height, width) or (height, width, 3); "
            "of a tensor (3, height, width)"
        )
    return Image.fromarray(array)


def pictures(images: Picture | Iterable[Picture]) -> Iterator[Image.Image]:
    """One, or several, as they are asked for."""
    several: Any = images if isinstance(images, Iterable) and not is_picture(images) else [images]
    return map(as_picture, several)


def is_picture(image: Any) -> bool:
    """One, rather than several: a tensor or array of four dimensions is several."""
    if isinstance(image, (str, Path, Image.Image)):
        return True
    return getattr(image, "ndim", 4) < 4


def as_array(image: Any) -> np.ndarray:
    """Bytes, colours last."""
    if hasattr(image, "detach"):
        image = image.detach().cpu().numpy()
        if image.ndim == 3:
            image = np.moveaxis(image, 0, 2)
    if not isinstance(image, np.ndarray):
        raise PassloraError(
            f"a picture is a path, a picture of Pillow, an array or a tensor, not a {type(image).__name__}"
        )
    if image.dtype in (np.uint8, np.bool_):
        return image.astype(np.uint8) * (255 if image.dtype == np.bool_ else 1)
    if image.dtype.kind == "f" and image.size and 0 <= image.min() and image.max() <= 1:
        return np.rint(image * 255).astype(np.uint8)
    what = f"values of {image.min():g} to {image.max():g}" if image.size else "no values"
    raise PassloraError(
        f"an array of {image.dtype} with {what} is no picture: expected bytes (uint8), or floats from 0 to 1; undo a "
        "normalisation first"
    )


def open_picture(path: str | Path) -> Image.Image:
    """In RGB; what cannot be read is one sentence."""
    register_plugins()
    try:
        with Image.open(path) as opened:
            return to_rgb(opened)
    except FileNotFoundError:
        raise PassloraError(f"cannot read {path}: no such file") from None
    except Exception as error:  # Pillow raises many types on damaged files
        raise PassloraError(f"cannot read {path}: {' '.join(str(error).split()) or type(error).__name__}") from None
