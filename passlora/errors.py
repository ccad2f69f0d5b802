"""The one error type for everything a user can cause: shown as a sentence, never as a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PassloraError(Exception):
    """Says which value is wrong, what was expected, and what to do."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no valid name is close."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
