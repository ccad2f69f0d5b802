"""Files: written whole or not at all, read with suspicion. Safetensors, JSON, YAML and text: nothing that executes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from passlora.errors import PassloraError

if TYPE_CHECKING:
    from torch import Tensor

TYPES = {"bool": "BOOL", "uint8": "U8", "bfloat16": "BF16"} | {
    f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("float", "int") for bits in (8, 16, 32, 64)
}
HEADER = 2**20  # bytes that names and shapes may take in a file
TEMPORARY = ".passlora-"  # how the name of a file or folder begins that is being written


def tidy(folder: Path) -> None:
    """Remove what a write that was cut off left."""
    for path in list(folder.glob(f"**/{TEMPORARY}*")):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def write(path: Path, save: Callable[[Path], None]) -> None:
    """`save` writes to a file beside `path`, which then takes its name: readers see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY, suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        save(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~current_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that takes its name when the block is done: it is whole, or it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=TEMPORARY) as name:
        new = Path(name) / "new"
        new.mkdir()
        yield new
        for file in new.iterdir():
            os.chmod(file, 0o666 & ~current_umask())
        if path.is_dir():
            path.rmdir()  # an empty one
        os.replace(new, path)


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def write_text(path: Path, text: str) -> None:
    def save(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write(path, save)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    import yaml

    write_text(path, yaml.safe_dump(content, sort_keys=False))


def write_tensors(path: Path, tensors: dict[str, Any], about: dict[str, str] | None = None) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        write(path, lambda temporary: save_file(state, temporary, metadata=about))
    except SafetensorError as error:  # a full disk, for one
        raise PassloraError(f"{path} cannot be written ({' '.join(str(error).split())[:200]})") from None


# --- reading -----------------------------------------------------------------------------------------------------


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def check_finite(tensors: dict[str, Tensor], what: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise PassloraError(f"{what}: {name} holds values that are not finite")


def check_inside(path: Path, root: Path) -> None:
    if not path.is_file():
        raise PassloraError(f"{path} is missing")
    if not path.resolve().is_relative_to(root.resolve()):
        raise PassloraError(f"{path} leads out of the model's folder")


def read_tensors(
    root: Path, path: Path, forms: dict[str, Tensor], digest: str | None = None, prefix: bool = False
) -> dict[str, Tensor]:
    """The tensors that `forms` name, of their shapes and types (`prefix`: their first rows), from inside `root`."""
    from safetensors import SafetensorError, safe_open

    check_inside(path, root)
    if not prefix and path.stat().st_size > HEADER + sum(form.numel() * form.element_size() for form in forms.values()):
        raise PassloraError(f"{path} is larger than it can be")
    if digest is not None and digest_of(path) != digest:
        raise PassloraError(f"{path} is not the file that was saved with the model: its SHA-256 differs")
    try:
        with safe_open(path, framework="pt") as file:
            check_names(path, set(file.keys()), set(forms))
            for name, form in forms.items():  # forms before data: nothing large is read in vain
                stored = file.get_slice(name)
                check_form(path, name, tuple(stored.get_shape()), stored.get_dtype(), form, prefix)
            tensors = {
                name: file.get_slice(name)[: form.shape[0]] if prefix else file.get_tensor(name)
                for name, form in forms.items()
            }
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PassloraError(f"{path} is not a readable safetensors file ({reason})") from None
    check_finite(tensors, str(path))
    return tensors


def check_names(path: Path, found: set[str], expected: set[str]) -> None:
    if found != expected:
        odd = min(found ^ expected)
        raise PassloraError(f"{path} {'lacks' if odd in expected else 'has an unknown'} tensor {odd[:80]!r}")


def check_form(path: Path, name: str, shape: tuple[int, ...], dtype: str, form: Tensor, prefix: bool) -> None:
    expected = tuple(form.shape)
    fits = shape[1:] == expected[1:] and shape[:1] >= expected[:1] if prefix else shape == expected
    if not fits:
        raise PassloraError(f"{path}: {name} has shape {shape}, expected {expected}")
    if dtype != type_name(form):
        raise PassloraError(f"{path}: {name} has type {dtype}, expected {type_name(form)}")


def type_name(form: Tensor) -> str:
    """As safetensors calls a tensor's type."""
    kind = str(form.dtype).removeprefix("torch.")
    return TYPES.get(kind, kind)
