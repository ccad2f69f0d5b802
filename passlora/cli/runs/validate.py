"""passlora validate: a recipe checked, without running it."""

from __future__ import annotations

import argparse
from typing import Any

from passlora.cli.arguments import add_command
from passlora.cli.flags import add_flags, chosen_flags
from passlora.config import FIELDS, describe, load


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "validate",
        "check a recipe without running it",
        "Check a recipe, with any flags on top, and print the settings that differ from the defaults.",
    )
    parser.add_argument("config", metavar="RECIPE", help="the YAML file")
    add_flags(parser, FIELDS)
    return parser


def run(arguments: argparse.Namespace) -> int:
    path, config = arguments.config, load(arguments.config, chosen_flags(arguments))
    for name, value in config.flat().items():
        if value != FIELDS[name].default:
            print(f"{name}: {describe(value)}")
    print(f"{path} is valid; start it with: passlora train --config {path}")
    return 0
