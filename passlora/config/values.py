"""Values of knobs: text turned into what it says, values turned into text, and checks of what cannot work."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from passlora.config.registry import find_name
from passlora.errors import PassloraError, nearest

RENAMED = {"ncm": "nearest_prototype"}  # values that had another name in 0.1


def knob(default: Any, help: str) -> Any:
    """A field of a dataclass, with the text that --help and docs/configuration.md show."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def coerce(name: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`, where text stands for what it says; anything else is refused by name."""
    options = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if is_optional(kind):
        if value is None or value == ["none"] or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        return coerce(name, value, without_none(kind))
    if origin is list:
        if value in (None, "none", ["none"]):
            return []
        items = value if isinstance(value, (list, tuple)) else [value]
        return [coerce(name, item, options[0]) for item in items]
    if origin is Annotated:
        return find_name(name, value, options[1].names)
    if origin is Literal:
        return choose(name, value, options)
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
    return as_number(name, value, kind)


def choose(name: str, value: Any, options: Sequence[Any]) -> Any:
    for option in options:
        if value == option or str(value) == str(option) or (value is False and option in ("no", "none")):
            return option
    if isinstance(value, str) and RENAMED.get(value) in options:
        raise PassloraError(f"{name} {value} is called {RENAMED[value]} since 0.2")
    allowed = ", ".join(str(option) for option in options)
    hint = nearest(str(value), [str(option) for option in options])
    raise PassloraError(f"{name} must be one of {allowed}; got {value!r}{hint}")


def as_number(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, (bool, list, dict)):
        try:
            number = kind(value)
            if number == float(value) and number not in (float("inf"), float("-inf")):
                return number
        except (TypeError, ValueError, OverflowError):
            pass
    wanted = "a whole number" if kind is int else "a number"
    raise PassloraError(f"{name} must be {wanted}, got {value!r}")


def is_optional(kind: Any) -> bool:
    return typing.get_origin(kind) in (Union, types.UnionType)


def without_none(kind: Any) -> Any:
    """X of `X | None`; any other type as it is."""
    if not is_optional(kind):
        return kind
    (inner,) = (option for option in typing.get_args(kind) if option is not type(None))
    return inner


def is_list(kind: Any) -> bool:
    return typing.get_origin(without_none(kind)) is list


def type_name(kind: Any) -> str:
    """How a type is shown in help and docs."""
    kind = without_none(kind)
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return "|".join(options[1].names)
    if origin is Literal:
        return "|".join(map(str, options))
    if origin is list:
        return "INT" if options[0] is int else "NAME"
    return kind.__name__.upper()


def describe(value: Any) -> str:
    """A value as text, as a recipe would write it."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def at_least(name: str, value: float, low: float) -> None:
    if not value >= low:
        raise PassloraError(f"{name} must be at least {low}, got {value}")


def above(name: str, value: float, low: float) -> None:
    if not value > low:
        raise PassloraError(f"{name} must be above {low}, got {value}")


def between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise PassloraError(f"{name} must be between {low} and {high}, got {value}")


def is_repo_id(name: str) -> bool:
    """user/name, as the Hub spells it."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", name) is not None and ".." not in name


def hub_id(name: str) -> str | None:
    """The repository that a model's name means: user/name if no folder `user` is here, hf-hub:user/name always."""
    if name.startswith("hf-hub:"):
        return name.removeprefix("hf-hub:")
    return name if is_repo_id(name) and not Path(name).parent.is_dir() else None
