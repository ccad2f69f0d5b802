"""Knobs as flags of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from passlora.config.knobs import FIELDS, GROUPS


def add_flags(parser: argparse.ArgumentParser, names: Iterable[str], defaults: Mapping[str, str] | None = None) -> None:
    """One flag a knob; values stay text here and are checked by config.py, as those of a recipe are.

    `defaults` says in words what a knob is where the command has a default of its own.
    """
    names = set(names)
    for group, kind in GROUPS.items():
        chosen = {name: knob for name, knob in FIELDS.items() if knob.group == group and name in names}
        if not chosen:
            continue
        section = parser.add_argument_group(group, kind.__doc__)
        for name, knob in chosen.items():
            options: dict[str, Any] = {"default": argparse.SUPPRESS, "metavar": type_name(knob.type)}
            if "list" in str(knob.type):
                options["nargs"] = "+"
            elif knob.type is bool:
                options.update(nargs="?", const="true")
            default = (defaults or {}).get(name) or describe(knob.default)
            section.add_argument(f"--{name}", help=f"{knob.help} (default: {default})".replace("%", "%%"), **options)


def type_name(kind: Any) -> str:
    """How a type is shown in help and docs."""
    text = str(kind) if not isinstance(kind, type) else kind.__name__
    if "Literal" in text and "list" not in text:
        inside = text[text.index("Literal[") + len("Literal[") :].split("]")[0]
        return inside.replace("'", "").replace(", ", "|")
    if "list" in text:
        return "INT" if "int" in text else "NAME"
    return text.replace(" | None", "").replace("Optional[", "").rstrip("]").upper()


def describe(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def chosen_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name in FIELDS}
