"""passlora recipes: those that come with it, and copies of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from passlora import files
from passlora.cli.arguments import add_command
from passlora.config.recipes import LAUNCHING, about, find_recipe, recipe_names
from passlora.errors import PassloraError


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "recipes",
        "list the recipes that come with passlora, or copy one",
        "List the recipes that come with passlora. `passlora train --config mini/digits` runs one by its name; "
        "`passlora recipes copy mini/digits` makes a file of it, to be changed.",
    )
    parser.add_argument("action", nargs="?", choices=["copy"], help="copy NAME: as a file here")
    parser.add_argument("name", nargs="?", metavar="NAME", help="such as mini/digits")
    parser.add_argument("--to", metavar="FILE", help="where the copy goes (default: ./NAME.yaml, without the folder)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.action is None:
        names = recipe_names()
        width = max(map(len, names))
        for name in names:
            print(f"{name.ljust(width)}  {about(name)}")
        print("\nrun one: passlora train --config NAME; copy one: passlora recipes copy NAME")
        return 0
    if arguments.name is None:
        raise PassloraError("which recipe? passlora recipes lists them")
    source = find_recipe(arguments.name)
    target = Path(arguments.to or source.name)
    if target.exists():
        raise PassloraError(f"{target} exists already: choose another name with --to")
    files.write_text(target, source.read_text(encoding="utf-8"))
    if source.parent.name == LAUNCHING:
        print(f"saved as {target}; accelerate launch --config_file {target} -m passlora train ...")
    else:
        print(f"saved as {target}; change it, then: passlora train --config {target}")
    return 0
