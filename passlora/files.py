"""Files written whole or not at all: safetensors, JSON, YAML and text; nothing that executes on load."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    from safetensors.torch import save_file

    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write(path, lambda temporary: save_file(state, temporary, metadata=about))
