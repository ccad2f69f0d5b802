"""Jinja2 templates of the package: what is HTML escapes every value, Markdown is told where to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def fill(template: str, values: dict[str, Any], filters: dict[str, Callable[..., Any]] | None = None) -> str:
    """The template of that name in `assets`; a value it asks for and does not get is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("passlora", "assets"),
        autoescape=select_autoescape(disabled_extensions=["md.j2"], default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(filters or {})
    return environment.get_template(template).render(values)
