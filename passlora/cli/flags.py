"""Knobs as flags of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from passlora.config import FIELDS, GROUPS, describe, is_list, type_name


def add_flags(parser: argparse.ArgumentParser, names: Iterable[str], defaults: Mapping[str, str] | None = None) -> None:
    """A flag for each knob in `names`. Values stay text here: Config.make checks them, as it does those of a recipe.

    `defaults` says in words what applies where the command has a default of its own.
    """
    names = set(names)
    for group, kind in GROUPS.items():
        chosen = {name: knob for name, knob in FIELDS.items() if knob.group == group and name in names}
        if not chosen:
            continue
        section = parser.add_argument_group(group, kind.__doc__)
        for name, knob in chosen.items():
            options: dict[str, Any] = {"default": argparse.SUPPRESS, "metavar": type_name(knob.type)}
            if is_list(knob.type):
                options["nargs"] = "+"
            elif knob.type is bool:
                options.update(nargs="?", const="true")
            default = (defaults or {}).get(name) or describe(knob.default)
            section.add_argument(f"--{name}", help=f"{knob.help} (default: {default})".replace("%", "%%"), **options)


def chosen_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The knobs that were given on the command line, as text."""
    return {name: value for name, value in vars(arguments).items() if name in FIELDS}
