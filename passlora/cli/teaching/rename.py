"""passlora rename: another name for a class."""

from __future__ import annotations

import argparse
from typing import Any

from passlora.cli.arguments import FOLDER, add_backbone_path, add_command, add_model, changed, how_to_undo


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands, "rename", "give a class another name", "Give a class another name; rollback undoes it."
    )
    add_model(parser, FOLDER)
    parser.add_argument("old", metavar="OLD", help="the name as it is")
    parser.add_argument("new", metavar="NEW", help="the name to be")
    add_backbone_path(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    with changed(arguments) as model:
        model.rename(arguments.old, arguments.new)
    print(f"{arguments.old} is {arguments.new} now")
    print(how_to_undo(arguments.model, model))
    return 0
