"""What a command prints beside its results: warnings, errors, and what the library says."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from passlora.environment import is_first_process


def warn(message: str) -> None:
    print(f"passlora: {message}", file=sys.stderr, flush=True)


def fail(message: str) -> int:
    """Say what went wrong; returns the exit code."""
    who = "" if is_first_process() else f" (process {os.environ['RANK']})"
    warn(f"error{who}: {message}")
    return 2


class Printer(logging.Handler):
    """What the library says, as print would; warnings and worse go to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        # Errors are not caught, as other handlers do: a reader who has gone ends the command.
        if record.levelno >= logging.WARNING:
            warn(self.format(record))
        else:
            print(self.format(record), flush=True)


@contextmanager
def printing_what_the_library_says() -> Iterator[None]:
    """From the first process, for the time of a command: who uses the library in this process has logging as before."""
    logger = logging.getLogger("passlora")
    level, propagate = logger.level, logger.propagate
    handler = Printer() if is_first_process() else logging.NullHandler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a handler of the root, set by some other library, would say it twice
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def drop_unwritten_output() -> None:
    """What cannot be written would be tried again, and complained of, when the interpreter ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
