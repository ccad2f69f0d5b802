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
from .manifest import MANIFEST, Manifest, to_json

if TYPE_CHECKING:
    from .learner import Learner

CONFIG, RESULTS, LOG = "config.yaml", "results.json", "training_log.jsonl"
PROTOTYPES, HEAD = "prototypes.safetensors", "head.safetensors"
ADAPTER, BACKBONE = "adapter_model.safetensors", "backbone.safetensors"
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
    MANIFEST,
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


def save_task(folder: Path, learner: Learner, manifest: Manifest) -> None:
    """The model after the manifest's last task: adapter (or, trained whole, backbone), head and prototypes.

    The manifest is written last: until then the folder is the model it was before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    backbone, target = learner.network.backbone, folder / task_folder(len(manifest.tasks) - 1)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".task-") as name:
        new = Path(name) / "task"
        new.mkdir()
        write_tensors(new / (ADAPTER if backbone.has_lora else BACKBONE), backbone.state())
        if backbone.has_lora:
            backbone.body.peft_config["default"].save_pretrained(str(new))
        write_tensors(new / HEAD, learner.network.head.state_dict())
        shutil.rmtree(target, ignore_errors=True)
        os.replace(new, target)
    write_tensors(folder / PROTOTYPES, learner.memory.state_dict())
    write_json(folder / MANIFEST, to_json(manifest))


def task_folder(task: int) -> str:
    return f"task_{task:02d}"


def restore(folder: Path, learner: Learner, manifest: Manifest, tasks: int) -> None:
    """Make a fresh learner what it was after the first `tasks` tasks; every tensor is checked before it is used."""
    backbone, d = learner.network.backbone, learner.network.backbone.feature_dim
    part = folder / task_folder(tasks - 1)
    seen = sum(len(task.classes) for task in manifest.tasks[:tasks])
    nodes = learner.network.num_views * seen
    shapes = {name: tuple(tensor.shape) for name, tensor in backbone.state().items()}
    weights = read_tensors(folder, part / (ADAPTER if backbone.has_lora else BACKBONE), shapes)
    head = read_tensors(folder, part / HEAD, {"weight": (nodes, d), "bias": (nodes,)})
    memory, rows = learner.memory, learner.memory.prototype_views * seen
    shapes = {"means": (rows, d), "radii": (tasks,), "class_tasks": (seen,)}
    if memory.spread is not None:
        shapes["covariances"] = (rows, *memory.spread.shape[1:])
    # Later tasks' rows come after: a task still being saved, or one rolled back.
    prototypes = read_tensors(folder, folder / PROTOTYPES, shapes, prefix=True)
    expected = [i for i, task in enumerate(manifest.tasks[:tasks]) for _ in task.classes]
    if prototypes["class_tasks"].tolist() != expected:
        raise PassloraError(f"{folder / PROTOTYPES} and {MANIFEST} disagree on which task each class came with")
    learner.restore(tasks, weights, head, prototypes)


def read_tensors(folder: Path, path: Path, shapes: dict[str, tuple[int, ...]], prefix: bool = False) -> dict[str, Any]:
    """Exactly the named tensors, of these shapes (with `prefix`: their first rows), finite, from inside the folder."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise PassloraError(f"{path} is missing")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise PassloraError(f"{path} leads out of the model's folder")
    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if names != shapes.keys():
                odd = min(names ^ shapes.keys())
                raise PassloraError(f"{path} {'lacks' if odd in shapes else 'has an unknown'} tensor {odd[:80]!r}")
            for name, shape in shapes.items():  # shapes before data: nothing large is read in vain
                found = tuple(file.get_slice(name).get_shape())
                fits = found[1:] == shape[1:] and found[:1] >= shape[:1] if prefix else found == shape
                if not fits:
                    raise PassloraError(f"{path}: {name} has shape {found}, expected {shape}")
            for name, shape in shapes.items():
                tensors[name] = file.get_slice(name)[: shape[0]] if prefix else file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PassloraError(f"{path} is not a readable safetensors file ({reason})") from None
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise PassloraError(f"{path}: {name} holds values that are not finite")
    return tensors
