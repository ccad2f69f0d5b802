"""passlora train: a dataset's classes, task by task."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from passlora.cli.arguments import add_command
from passlora.cli.flags import add_flags, chosen_flags
from passlora.config import FIELDS, Config, is_local, load
from passlora.environment import is_first_process
from passlora.folder import layout
from passlora.runs.folder import check_run


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "train",
        "learn a dataset's classes task by task, and report",
        "Learn a dataset's classes task by task, test after each, and report. Without arguments: the embedded digits. "
        "Precedence: defaults < preset < recipe < these flags.",
    )
    parser.add_argument("--config", metavar="RECIPE", help="a recipe: YAML with the keys below")
    add_flags(parser, FIELDS)
    return parser


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, chosen_flags(arguments))
    if is_first_process():  # refuse before the seconds that torch takes
        folder = Path(config.training.output_dir)
        check_run(folder, config.flat(), config.training.overwrite_output_dir)
    from passlora.runs.run import train

    train(config)
    leave_group()
    if is_first_process():
        print_what_next(config)
    return 0


def print_what_next(config: Config) -> None:
    """Where the run lies, and the commands that go on from there."""
    folder, data = Path(config.training.output_dir), config.data.dataset_name
    has_runs = bool(config.training.seeds or config.training.class_order_seeds)
    kept = "one folder a run" if has_runs else "one task_NN folder a task"
    print(f"\nsaved in {folder}: results.json, accuracy.png, config.yaml, {kept}")
    if not has_runs:
        print(f"look:  passlora info {folder}\nask:   passlora predict {folder} IMAGE...")
    where = f" --dataset_name {shlex.quote(data)}" if is_local(data) else ""
    print(f"again: passlora train --config {folder / layout.CONFIG}{where} --output_dir {folder}-again")


def leave_group() -> None:
    """End the group of processes, if there is one, so that none is left waiting."""
    from accelerate.state import PartialState

    PartialState().destroy_process_group()
