"""The folder of a run: whether it can take one, and making room. Only what passlora wrote is ever deleted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from passlora.config import read_yaml, without_data_path
from passlora.errors import PassloraError
from passlora.files import TEMPORARY, tidy, write_text
from passlora.folder.checkpoints import difference
from passlora.folder.history import check_no_rollback
from passlora.folder.layout import (
    BACKUP,
    CARD,
    CHECKPOINT,
    CONFIG,
    CONFUSION,
    LOCK,
    LOG,
    MANIFEST,
    MATRIX,
    MATRIX_PICTURE,
    NOTES,
    PICTURE,
    PROTOTYPES,
    RESULTS,
    task_number,
)
from passlora.folder.manifest import read_manifest
from passlora.folder.results import read_results
from passlora.folder.saving import is_our_card
from passlora.folder.tasks import remove_task

MARK = "# settings of a run of passlora train"  # the first line of its config.yaml
NUMBERS = (RESULTS, LOG, MATRIX, CONFUSION, MATRIX_PICTURE, PICTURE)
MODEL = (MANIFEST, BACKUP, CHECKPOINT, PROTOTYPES)
TRACKED = "passlora"  # the trackers' project: the folder of its own in logs/


def check_run(folder: Path, config: dict[str, Any], overwrite: bool) -> None:
    """Say why the folder can take neither a new run nor the continuation of this one, if so."""
    if folder.exists() and not folder.is_dir():
        raise PassloraError(f"output_dir {folder} is a file")
    if not folder.is_dir() or holds_only(folder, LOCK):
        return
    if not is_run(folder):
        raise PassloraError(f"output_dir {folder} is not empty and holds no run: choose another --output_dir")
    if overwrite or holds_only(folder, CONFIG, LOCK):
        return  # (it stopped before anything was learnt, at a mistake most likely)
    if shown := difference(read_yaml(str(folder / CONFIG)), without_data_path(config)):
        raise PassloraError(
            f"output_dir {folder} holds a run with other settings ({shown}): choose another --output_dir, "
            "or add --overwrite_output_dir"
        )


def is_run(folder: Path) -> bool:
    """Whether passlora wrote the config.yaml there: by its mark, or, before 0.2, by what else is there."""
    path = folder / CONFIG
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        if file.read(len(MARK)) == MARK.encode():
            return True
    return holds_passlora(folder) or any(holds_passlora(part) for part in run_folders(folder))


def holds_passlora(folder: Path) -> bool:
    """Whether a model or the results of a run lie there."""
    for read in (read_manifest, read_results):
        try:
            read(folder)
            return True
        except PassloraError:
            continue
    return False


def run_folders(folder: Path) -> list[Path]:
    """Where the seeds, class orders and compared presets of a run may lie."""
    seeds = [path for path in folder.iterdir() if re.fullmatch(r"(seed|order)_\d+", path.name)]
    compared = [] if (folder / "compare").is_symlink() else list(folder.glob("compare/*"))
    return [path for path in (*seeds, *compared) if path.is_dir() and not path.is_symlink()]


def holds_only(folder: Path, *names: str) -> bool:
    """Whether nothing else lies there, but for what a write that was cut off left."""
    return all(path.name in names or path.name.startswith(TEMPORARY) for path in folder.iterdir())


def claim(folder: Path, config: dict[str, Any], overwrite: bool) -> None:
    """Make the folder ready to start or continue a run."""
    check_run(folder, config, overwrite)
    if overwrite:
        clear(folder)
    else:
        check_no_rollback(folder)
    tidy(folder)
    write_text(folder / CONFIG, f"{MARK}\n{yaml.safe_dump(without_data_path(config), sort_keys=False)}")


def clear(folder: Path) -> None:
    """Delete a run's files, by their exact names; whatever else lies there stays."""
    for part in run_folders(folder):
        if holds_passlora(part) or (part / CHECKPOINT).is_file() or (part / LOG).is_file():
            clear(part)
            remove_if_empty(part)
    remove_if_empty(folder / "compare")
    for path in folder.iterdir():
        if task_number(path.name) is not None:
            remove_task(path)
    clear_card(folder / CARD)
    for name in (*NUMBERS, *MODEL, CONFIG):
        if (folder / name).is_file():
            (folder / name).unlink()
    logs = folder / "logs"
    if (logs / TRACKED).is_dir() and not logs.is_symlink() and not (logs / TRACKED).is_symlink():
        shutil.rmtree(logs / TRACKED)
        remove_if_empty(logs)


def clear_card(path: Path) -> None:
    """Of our card only what a person wrote below our line stays."""
    if is_our_card(path):
        notes = path.read_text(encoding="utf-8", errors="surrogateescape").split(NOTES, 1)[1].strip()
        path.unlink()
        if notes:
            path.write_text(f"{notes}\n", encoding="utf-8", errors="surrogateescape")


def remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink() and holds_only(folder, LOCK):
        (folder / LOCK).unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def check_still_there(folder: Path) -> None:
    """A run whose folder was taken away in the meantime does not go on as if nothing had happened."""
    if not (folder / CONFIG).is_file():
        raise PassloraError(f"{folder} is no longer the folder of this run: its {CONFIG} is gone")
