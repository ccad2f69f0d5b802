"""The one error type for everything a user can cause: shown as a sentence, never as a traceback."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable


class PassloraError(Exception):
    """Says which value is wrong, what was expected, and what to do."""


class DivergedError(PassloraError):
    """Training went astray: the loss is no number any more."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no valid name is close."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def redact(text: str) -> str:
    """One line, without anything that looks like a token or the signature of a link."""
    text = re.sub(r"\bhf_\w+", "hf_...", " ".join(text.split()))
    return re.sub(r"(https?://[^\s?]+)\?[^\s'\")]+", r"\1", text)[:300]


class Redacting(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if re.search(r"^Retrying in|thrown while requesting|^No files have been modified", record.getMessage()):
            return False  # noise: the error at the end says what is wrong
        record.msg, record.args = redact(record.getMessage()), ()
        return True


REDACTING = Redacting()


def redact_logs() -> None:
    """What the Hub's client logs, too; called before it is asked for anything."""
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(REDACTING)
