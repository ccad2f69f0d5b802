"""The checkpoint of a lesson that is being learnt: the state inside a task, in the model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from passlora.config import FIELDS
from passlora.errors import PassloraError
from passlora.files import check_finite, write_tensors
from passlora.folder.layout import CHECKPOINT

# Settings that a run, or a lesson, may be continued with in another value: they change no result.
MAY_CHANGE = (
    "output_dir",
    "overwrite_output_dir",
    "dataloader_num_workers",
    "gradient_checkpointing",
    "cache_teacher",
    "per_device_eval_batch_size",
    "compare",
    "report_to",
    "save_steps",
    "save_epochs",
    "push_to_hub",
    "hub_model_id",
    "hub_private_repo",
)


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Settings that differ, other than those that may; empty if none does."""
    known = {
        **{name: knob.default for name, knob in FIELDS.items()},
        **before,
    }  # a knob that came later had its default
    changed = [key for key in now if now[key] != known.get(key) and key not in MAY_CHANGE]
    return "; ".join(f"{key} was {known.get(key)}, is {now[key]}" for key in changed[:5])


def write_checkpoint(folder: Path, state: dict[str, Any], lesson: dict[str, Any]) -> None:
    """`lesson` says what is being learnt, and how: another one does not go on from here."""
    check_finite(state, "the state inside the task cannot be saved")
    write_tensors(folder / CHECKPOINT, state, {"lesson": json.dumps(lesson)})


def read_checkpoint(folder: Path, task: int, lesson: dict[str, Any]) -> dict[str, Any] | None:
    """The state inside `task` that was saved last; None if there is none, or it is of a task that is done."""
    from safetensors import SafetensorError, safe_open

    path = folder / CHECKPOINT
    if not path.is_file():
        return None
    anew = f"delete {path} to begin the task anew"
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            before = dict(json.loads((file.metadata() or {}).get("lesson", "{}")))
        if int(state["task"]) != task:
            return None
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError):
        raise PassloraError(f"{path} cannot be read; {anew}") from None
    if shown := difference(before, lesson):
        raise PassloraError(f"{folder} was being taught with other settings ({shown}): continue with those, or {anew}")
    return state
