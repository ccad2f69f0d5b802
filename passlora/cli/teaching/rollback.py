"""passlora rollback: a model as it was after an earlier task."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from passlora.cli.arguments import FOLDER, add_command, add_model
from passlora.folder import history, layout
from passlora.folder.lock import lock
from passlora.folder.manifest import read_manifest


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "rollback",
        "make a model what it was after an earlier task",
        "Make a model what it was after an earlier task. Nothing is deleted until --prune; until then any task can be "
        "gone back to.",
    )
    add_model(parser, FOLDER)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--to_task", type=int, help="the last task to keep; 0 is the first")
    choice.add_argument("--prune", action="store_true", help="confirm: delete what the rollback left behind")
    return parser


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.model)
    read_manifest(folder)  # nothing is made where there is no model
    from passlora.hub.card import write_card

    with lock(folder):
        if arguments.prune:
            gone = history.prune(folder)
            print(f"deleted: {', '.join(gone)}" if gone else "nothing to delete")
            return 0
        manifest = history.rollback(folder, arguments.to_task)
        write_card(folder, manifest)
    print(f"{folder} is what it was after task {arguments.to_task}: {len(manifest.classes)} classes")
    if (folder / layout.BACKUP).is_file():
        last = len(read_manifest(folder, layout.BACKUP).tasks) - 1
        print(f"undo: passlora rollback {folder} --to_task {last}; confirm: passlora rollback {folder} --prune")
    return 0
