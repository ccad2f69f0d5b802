"""The folder of a run on disk: what lies where, written atomically. Only safetensors, JSON, YAML, CSV and pictures."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import PassloraError

if TYPE_CHECKING:
    from .learner import Learner

CONFIG, RESULTS, LOG, PROTOTYPES, HEAD = (
    "config.yaml",
    "results.json",
    "training_log.jsonl",
    "prototypes.safetensors",
    "head.safetensors",
)
OURS = (
    "task_*",
    "seed_*",
    "order_*",
    "compare",
    "logs",
    "accuracy.png",
    "accuracy_matrix.png",
    RESULTS,
    LOG,
    PROTOTYPES,
    "accuracy_matrix.csv",
    CONFIG,
)


def check_free(folder: Path, overwrite: bool) -> None:
    """Say why the folder cannot take a new run, if it cannot."""
    if folder.exists() and not folder.is_dir():
        raise PassloraError(f"output_dir {folder} is a file")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / CONFIG).is_file():
            raise PassloraError(f"output_dir {folder} is not empty and holds no run: choose another --output_dir")
        if not overwrite:
            raise PassloraError(
                f"output_dir {folder} holds a run already: choose another --output_dir, or add --overwrite_output_dir"
            )


def claim(folder: Path, overwrite: bool) -> None:
    """Make the folder ready for a new run; only a run's own files are ever removed."""
    check_free(folder, overwrite)
    for pattern in OURS:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PassloraError(f"output_dir {folder} cannot be made: {error.strerror}") from None


def write(path: Path, save: Callable[[Path], None]) -> None:
    """`save` writes to a file beside `path`, which then takes its name: readers see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
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


def write_tensors(path: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write(path, lambda temporary: save_file(state, temporary))


def save_task(folder: Path, learner: Learner, task: int) -> None:
    """The model after `task`: its adapter (or, trained whole, its backbone) and head; and all prototypes so far."""
    folder.mkdir(parents=True, exist_ok=True)
    backbone = learner.network.backbone
    with tempfile.TemporaryDirectory(dir=folder, prefix=".task-") as name:
        target = Path(name) / "task"
        if backbone.has_lora:
            backbone.body.save_pretrained(str(target), selected_adapters=["default"], save_embedding_layers=False)
            (target / "README.md").unlink(missing_ok=True)  # peft's template
        else:
            write_tensors(target / "backbone.safetensors", backbone.body.state_dict())
        write_tensors(target / HEAD, learner.network.head.state_dict())
        os.replace(target, folder / f"task_{task:02d}")
    write_tensors(folder / PROTOTYPES, learner.memory.state_dict())
