"""Progress bars, shown on a terminal and silent elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from passlora.environment import is_first_process


def is_silent() -> bool:
    """No bars where standard error is not a terminal, nor on processes other than the first."""
    return not sys.stderr.isatty() or not is_first_process()


def progress(iterable: Any = None, **options: Any) -> Any:
    """A tqdm bar on standard error, unless silent."""
    from tqdm import tqdm

    return tqdm(iterable, disable=is_silent(), leave=False, dynamic_ncols=True, **options)


def silence(disable_bars: Callable[[], None]) -> None:
    """The bars of a library are silent where ours are."""
    if is_silent():
        disable_bars()
