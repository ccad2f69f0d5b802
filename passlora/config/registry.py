"""Names that a user's own package can add to, presets and classifiers, and the plugins that add them."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated

from passlora.errors import PassloraError, nearest

PLUGINS = "passlora.plugins"  # the group of entry points; each names a module that is imported for its effect


@dataclass(frozen=True, eq=False)
class NameIn:
    """Marks text that must be one of `names`, which may grow."""

    names: Collection[str]


CLASSIFIERS = ["head", "ncm", "slda", "ridge", "fecam", "fetril", "anacp", "rgda", "probe"]
Classifier = Annotated[str, NameIn(CLASSIFIERS)]


def register_classifier_name(name: str) -> None:
    """Make `name` a value of the knob `classifier`; the class itself is registered in passlora.method.classifiers."""
    check_name("classifier", name)
    if name not in CLASSIFIERS:
        CLASSIFIERS.append(name)


def check_name(what: str, name: object) -> None:
    """Names end up in paths and on pages: letters, digits and . _ + - alone."""
    if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,63}", name, re.ASCII) is None:
        raise PassloraError(
            f"{what} {str(name)[:80]!r} is no name: letters and digits, then also . _ + -, at most 64 in all"
        )


@functools.cache
def load_plugins() -> tuple[str, ...]:
    """Import every installed plugin, once; what is wrong with those that cannot be imported."""
    faults = []
    for entry in entry_points(group=PLUGINS):
        try:
            entry.load()
        except Exception as error:  # whatever a stranger's module raises
            package = entry.dist.name if entry.dist is not None else entry.value
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            faults.append(f"the plugin {entry.name} of the package {package} cannot be imported ({reason})")
    return tuple(faults)


def find_name(knob: str, value: object, names: Collection[str]) -> str:
    """`value` if it is one of `names`, after a look into the plugins; else an error that names the nearest."""
    if isinstance(value, str):
        if value in names:
            return value
        faults = load_plugins()
        if value in names:
            return value
        hint = nearest(value, names) + "".join(f"; {fault}" for fault in faults)
    else:
        hint = ""
    allowed = ", ".join(names)
    raise PassloraError(
        f"{knob} must be one of {allowed}, or a name that an installed plugin adds; got {value!r}{hint}"
    )
