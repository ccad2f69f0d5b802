"""The folder of a run on disk: what lies where, written atomically. Only safetensors, JSON, YAML, CSV and pictures."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from passlora.config import FIELDS, read_yaml, without_data_path
from passlora.errors import PassloraError
from passlora.files import TEMPORARY, tidy, write_json, write_tensors, write_text, write_yaml
from passlora.folder.layout import (
    ADAPTER,
    BACKBONE,
    BACKUP,
    CARD,
    CHECKPOINT,
    CONFIG,
    CONFUSION,
    HEAD,
    LOCK,
    LOG,
    MANIFEST,
    MATRIX,
    NOTES,
    PICTURE,
    PROTOTYPES,
    RESULTS,
    task_folder,
)
from passlora.folder.manifest import Manifest, TaskEntry, read_manifest, to_json

if TYPE_CHECKING:
    from passlora.training.learner import Learner

HELD: set[str] = set()  # folders that this process has locked
fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None  # not on Windows

OURS = (
    "task_*",
    "seed_*",
    "order_*",
    "compare",
    "logs",
    PICTURE,
    "accuracy_matrix.png",
    RESULTS,
    LOG,
    PROTOTYPES,
    MATRIX,
    CONFUSION,
    MANIFEST,
    BACKUP,
    CHECKPOINT,
    CONFIG,
    CARD,
)
MAY_CHANGE = (
    "output_dir",
    "overwrite_output_dir",
    "dataloader_num_workers",
    "gradient_checkpointing",
    "torch_compile_backend",
    "cache_teacher",
    "report_to",
    "save_steps",
    "save_epochs",
    "push_to_hub",
    "hub_model_id",
    "hub_private_repo",
)


def check_run(folder: Path, config: dict[str, Any], overwrite: bool) -> None:
    """Say why the folder can take neither a new run nor the continuation of this one, if so."""
    if folder.exists() and not folder.is_dir():
        raise PassloraError(f"output_dir {folder} is a file")
    if not folder.is_dir() or holds_only(folder, LOCK) or overwrite:
        if overwrite and folder.is_dir() and not holds_only(folder, LOCK) and not (folder / CONFIG).is_file():
            raise PassloraError(f"output_dir {folder} is not empty and holds no run: choose another --output_dir")
        return
    if not (folder / CONFIG).is_file():
        raise PassloraError(f"output_dir {folder} is not empty and holds no run: choose another --output_dir")
    if holds_only(folder, CONFIG, LOCK):
        return  # it stopped before anything was learnt, at a mistake most likely
    if shown := difference(read_yaml(str(folder / CONFIG)), without_data_path(config)):
        raise PassloraError(
            f"output_dir {folder} holds a run with other settings ({shown}): choose another --output_dir, "
            "or add --overwrite_output_dir"
        )


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Settings that differ, other than those that may; empty if none does."""
    known = {
        **{name: knob.default for name, knob in FIELDS.items()},
        **before,
    }  # a knob that came later had its default
    changed = [key for key in now if now[key] != known.get(key) and key not in MAY_CHANGE]
    return "; ".join(f"{key} was {known.get(key)}, is {now[key]}" for key in changed[:5])


def check_new_model(folder: Path) -> None:
    """Say why the folder cannot become a model, if so; what a first lesson left when it was cut off is no obstacle."""
    if folder.exists() and not folder.is_dir():
        raise PassloraError(f"{folder} is a file")
    names = [CHECKPOINT, LOCK, PROTOTYPES, RESULTS, MATRIX, CONFUSION, PICTURE]
    if folder.is_dir():
        names += [path.name for path in folder.glob("task_*") if path.is_dir()]
        names += [CARD] if is_our_card(folder / CARD) else []
    if folder.is_dir() and not holds_only(folder, *names):
        raise PassloraError(f"{folder} exists and is no model: choose another folder")


def holds_only(folder: Path, *names: str) -> bool:
    """Whether nothing else lies there, but for what a write that was cut off left."""
    return all(path.name in names or path.name.startswith(TEMPORARY) for path in folder.iterdir())


def is_our_card(path: Path) -> bool:
    return path.is_file() and NOTES.encode() in path.read_bytes()


def claim(folder: Path, config: dict[str, Any], overwrite: bool) -> None:
    """Make the folder ready to start or continue a run; only a run's own files are ever removed."""
    check_run(folder, config, overwrite)
    if not overwrite:
        check_no_rollback(folder)
    else:
        for pattern in OURS:
            for path in folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    tidy(folder)
    write_yaml(folder / CONFIG, without_data_path(config))


def check_links(folder: Path, root: Path | None = None) -> None:
    """Refuse links that lead out of the folder (or of `root`): nothing is written, copied or sent through them."""
    inside = (root or folder).resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise PassloraError(f"{path} leads out of the model's folder")


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the system lets go of it when the process ends, however it ends."""
    name, is_new = str(folder.resolve()), not folder.exists()
    if name in HELD:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_links(folder)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        raise PassloraError(f"{folder} cannot be written to: {error.strerror}") from None
    with open(handle, "w", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PassloraError(f"{folder} is in use by another process") from None
            except OSError:  # a file system without locks
                pass
        HELD.add(name)
        try:
            yield
        finally:
            HELD.remove(name)
            if is_new and [path.name for path in folder.iterdir()] == [LOCK]:  # nothing came of it
                shutil.rmtree(folder)


@dataclass
class TaskState:
    """What one task's folder holds."""

    backbone: dict[str, Any]
    head: dict[str, Any]

    @classmethod
    def of(cls, learner: Learner) -> TaskState:
        def copy(state: dict[str, Any]) -> dict[str, Any]:
            return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

        return cls(copy(learner.network.backbone.state()), copy(learner.network.head.state_dict()))


def save_tasks(folder: Path, learner: Learner, manifest: Manifest, states: dict[int, TaskState]) -> None:
    """The given tasks' adapters (or backbones) and heads, all prototypes, and last the manifest that names them.

    Until the manifest is replaced the folder is the model it was before; what it does not need goes after that.
    """
    folder.mkdir(parents=True, exist_ok=True)
    last = len(manifest.tasks) - 1
    if keep_last := manifest.settings["keep_tasks"] == "last":
        states = {task: state for task, state in states.items() if task == last}
    backbone = learner.network.backbone
    for task, state in states.items():
        target = folder / task_folder(task)
        with tempfile.TemporaryDirectory(dir=folder, prefix=TEMPORARY) as name:
            new = Path(name) / "task"
            new.mkdir()
            write_tensors(new / (ADAPTER if backbone.has_lora else BACKBONE), state.backbone)
            if backbone.has_lora:
                backbone.body.peft_config["default"].save_pretrained(str(new))
            write_tensors(new / HEAD, state.head)
            if target.is_dir():
                shutil.rmtree(target)  # left by a save that was cut off
            os.replace(new, target)
    write_tensors(folder / PROTOTYPES, learner.memory.state_dict())
    write_json(folder / MANIFEST, to_json(manifest))
    (folder / CHECKPOINT).unlink(missing_ok=True)
    if keep_last:
        for path in (folder / task_folder(task) for task in range(last)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)


def read_checkpoint(folder: Path, task: int, lesson: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """The state inside `task` that was saved last; None if there is none, or it is of a task that is done.

    One that was saved under other settings than `lesson` is refused.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / CHECKPOINT
    if not path.is_file():
        return None
    anew = f"delete {path} to begin the task anew"
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            before = json.loads((file.metadata() or {}).get("lesson", "null"))
        if int(state["task"]) != task:
            return None
        shown = difference(dict(before), lesson) if before and lesson else ""
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError):
        raise PassloraError(f"{path} cannot be read; {anew}") from None
    if (before is None) != (lesson is None):
        what = "training" if before is None else "lesson"
        raise PassloraError(f"{folder} has the state of another {what} that was cut off: continue that, or {anew}")
    if shown:
        raise PassloraError(f"{folder} was being taught with other settings ({shown}): continue with those, or {anew}")
    return state


def check_same_model(folder: Path, tasks: list[TaskEntry]) -> None:
    """Whoever saves a model over another one, or over later tasks of its own, is told."""
    if (folder / MANIFEST).exists():
        there = [(task.classes, task.learnt) for task in read_manifest(folder).tasks]
        if there != [(task.classes, task.learnt) for task in tasks]:
            raise PassloraError(f"{folder} holds another model, or other tasks of this one: choose another folder")


def copy_tasks(source: Path, folder: Path, tasks: list[int]) -> None:
    """Earlier tasks of a model that is saved to another folder."""
    for task in tasks:
        if (source / task_folder(task)).is_dir():  # keep_tasks may have dropped it
            shutil.copytree(source / task_folder(task), folder / task_folder(task), dirs_exist_ok=True)


def rollback(folder: Path, to_task: int) -> Manifest:
    """Make the model what it was after `to_task`. Nothing is deleted: `prune` confirms, a later task undoes."""
    current, backup = read_manifest(folder), folder / BACKUP
    whole = read_manifest(folder, BACKUP) if backup.is_file() else current
    if not 0 <= to_task < len(whole.tasks):
        raise PassloraError(f"{folder} has the tasks 0 to {len(whole.tasks) - 1}, not {to_task}")
    check_kept(folder, to_task, whole)
    is_undo = to_task == len(whole.tasks) - 1
    if not backup.is_file() and not is_undo:
        write_json(backup, to_json(current))
    whole.tasks = whole.tasks[: to_task + 1]
    write_json(folder / MANIFEST, to_json(whole))
    if is_undo:
        backup.unlink(missing_ok=True)
    return whole


def prune(folder: Path) -> list[str]:
    """Delete what a rollback left behind; returns the names of what went."""
    manifest, gone = read_manifest(folder), []
    trim_results(folder, len(manifest.tasks))
    (folder / BACKUP).unlink(missing_ok=True)
    for path in sorted(folder.glob("task_*")):
        if path.name not in {task_folder(i) for i in range(len(manifest.tasks))} and not path.is_symlink():
            shutil.rmtree(path)
            gone.append(path.name)
    return gone


def trim_results(folder: Path, tasks: int) -> None:
    """The numbers of a training, cut to its first tasks."""
    from passlora.display.tables import matrix_csv
    from passlora.training.metrics import trim

    try:
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        if "runs" in results or len(results["stage_accuracy"]) <= tasks:
            return
        results = trim(results, tasks)
        write_text(folder / MATRIX, matrix_csv(results))
        (folder / CONFUSION).unlink(missing_ok=True)  # of the tasks that went
    except (OSError, ValueError, KeyError, TypeError):  # no training's, or not readable: nothing that a model needs
        return
    write_json(folder / RESULTS, results)


def describe(folder: Path) -> dict[str, Any]:
    """What the files say of a model: settings, classes, tasks with their bytes, and the bytes of all."""
    manifest = read_manifest(folder)

    def size(place: Path) -> int:
        return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())

    tasks = [
        {**dataclasses.asdict(task), "bytes": size(folder / task_folder(i))} for i, task in enumerate(manifest.tasks)
    ]
    return {
        "settings": manifest.settings,
        "classes": manifest.classes,
        "results": manifest.results,
        "tasks": tasks,
        "bytes": size(folder),
        "rolled_back": (folder / BACKUP).is_file(),
    }


def check_no_rollback(folder: Path) -> None:
    if (folder / BACKUP).is_file():
        raise PassloraError(
            f"{folder} is rolled back and not confirmed: passlora rollback {folder} --prune confirms, "
            f"passlora rollback {folder} --to_task N goes elsewhere"
        )


def check_kept(folder: Path, task: int, manifest: Manifest) -> None:
    last = len(manifest.tasks) - 1
    if task < last and manifest.settings["keep_tasks"] == "last" and not (folder / task_folder(task)).is_dir():
        raise PassloraError(f"the weights of task {task} were not kept (keep_tasks last): there is only task {last}")


def restore(folder: Path, learner: Learner, manifest: Manifest, tasks: int, root: Path | None = None) -> None:
    """Make a fresh learner what it was after the first `tasks` tasks; every tensor is checked before it is used.

    No file may lead out of `root`: the folder itself, or the cache that its links point into.
    """
    check_kept(folder, tasks - 1, manifest)
    root = root or folder
    backbone, d = learner.network.backbone, learner.network.backbone.feature_dim
    part = folder / task_folder(tasks - 1)
    seen = sum(len(task.classes) for task in manifest.tasks[:tasks])
    nodes = learner.network.num_views * seen
    forms = {
        name: Form(*tensor.shape, dtype="F32" if tensor.is_floating_point() else "I64")
        for name, tensor in backbone.state().items()
    }
    weights = read_tensors(root, part / (ADAPTER if backbone.has_lora else BACKBONE), forms)
    head = read_tensors(root, part / HEAD, {"weight": Form(nodes, d), "bias": Form(nodes)})
    memory, rows = learner.memory, learner.memory.prototype_views * seen
    forms = {"means": Form(rows, d), "radii": Form(tasks, dtype="F64"), "class_tasks": Form(seen, dtype="I64")}
    if memory.spread is not None:
        forms["covariances"] = Form(rows, *memory.spread.shape[1:])
    # Later tasks' rows come after: a task still being saved, or one rolled back.
    prototypes = read_tensors(root, folder / PROTOTYPES, forms, prefix=True)
    expected = [i for i, task in enumerate(manifest.tasks[:tasks]) for _ in task.classes]
    if prototypes["class_tasks"].tolist() != expected:
        raise PassloraError(f"{folder / PROTOTYPES} and {MANIFEST} disagree on which task each class came with")
    learner.restore(tasks, weights, head, prototypes)


class Form:
    """Shape and type that a stored tensor must have."""

    def __init__(self, *shape: int, dtype: str = "F32") -> None:
        self.shape, self.dtype = shape, dtype


def read_tensors(folder: Path, path: Path, forms: dict[str, Form], prefix: bool = False) -> dict[str, Any]:
    """Exactly the named tensors, of these forms (with `prefix`: their first rows), finite, from inside the folder."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise PassloraError(f"{path} is missing")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise PassloraError(f"{path} leads out of the model's folder")
    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if names != forms.keys():
                odd = min(names ^ forms.keys())
                raise PassloraError(f"{path} {'lacks' if odd in forms else 'has an unknown'} tensor {odd[:80]!r}")
            for name, form in forms.items():  # forms before data: nothing large is read in vain
                stored, shape = file.get_slice(name), form.shape
                found = tuple(stored.get_shape())
                fits = found[1:] == shape[1:] and found[:1] >= shape[:1] if prefix else found == shape
                if not fits:
                    raise PassloraError(f"{path}: {name} has shape {found}, expected {shape}")
                if stored.get_dtype() != form.dtype:
                    raise PassloraError(f"{path}: {name} has type {stored.get_dtype()}, expected {form.dtype}")
            for name, form in forms.items():
                tensors[name] = file.get_slice(name)[: form.shape[0]] if prefix else file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PassloraError(f"{path} is not a readable safetensors file ({reason})") from None
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise PassloraError(f"{path}: {name} holds values that are not finite")
    return tensors
