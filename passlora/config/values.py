"""Values of knobs: text turned into what it says, and the checks that refuse what cannot work."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any, Literal, Union

from passlora.errors import PassloraError, nearest


def coerce(name: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`, where text stands for what it says; anything else is refused by name."""
    options = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None or value == ["none"] or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        (inner,) = (option for option in options if option is not type(None))
        return coerce(name, value, inner)
    if origin is list:
        if value in (None, "none", ["none"]):
            return []
        items = value if isinstance(value, (list, tuple)) else [value]
        return [coerce(name, item, options[0]) for item in items]
    if origin is Literal:
        for option in options:
            if value == option or str(value) == str(option) or (value is False and option in ("no", "none")):
                return option
        allowed = ", ".join(str(option) for option in options)
        hint = nearest(str(value), [str(option) for option in options])
        raise PassloraError(f"{name} must be one of {allowed}; got {value!r}{hint}")
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise PassloraError(f"{name} must be true or false, got {value!r}")
    if kind is str:
        if isinstance(value, (str, Path)):
            return str(value)
        raise PassloraError(f"{name} must be text, got {value!r}")
    if not isinstance(value, (bool, list, dict)):
        try:
            number = kind(value)
            if number == float(value) and number not in (float("inf"), float("-inf")):
                return number
        except (TypeError, ValueError, OverflowError):
            pass
    wanted = "a whole number" if kind is int else "a number"
    raise PassloraError(f"{name} must be {wanted}, got {value!r}")


def at_least(name: str, value: float, low: float) -> None:
    if not value >= low:
        raise PassloraError(f"{name} must be at least {low}, got {value}")


def above(name: str, value: float, low: float) -> None:
    if not value > low:
        raise PassloraError(f"{name} must be above {low}, got {value}")


def between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise PassloraError(f"{name} must be between {low} and {high}, got {value}")
