"""Progress: bars on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from passlora.environment import is_first_process

FIRST_LINE, NEXT_LINE = 10.0, 30.0  # seconds: what is short says nothing, what is long fills no log


def is_silent() -> bool:
    """No bars where standard error is not a terminal, nor on processes other than the first."""
    return not sys.stderr.isatty() or not is_first_process()


def progress(iterable: Any = None, **options: Any) -> Any:
    """A tqdm bar on standard error, or lines where that is not a terminal; on the first process only."""
    if is_silent() and is_first_process():
        return Lines(iterable, **options)
    from tqdm import tqdm

    return tqdm(iterable, disable=is_silent(), leave=False, dynamic_ncols=True, **options)


def is_seen(bar: Any, often: bool) -> bool:
    """Whether a text set now is going to be seen: in the next line, or on a terminal when it is time (`often`)."""
    return bar.is_due if isinstance(bar, Lines) else often and not bar.disable


class Lines:
    """Stands in for a tqdm bar in a log: `training, epoch 2/4: 40% (12 s, 18 s left)`, as a line of its own."""

    def __init__(
        self, iterable: Any = None, desc: str = "", total: int | None = None, initial: int = 0, unit: str = "step"
    ) -> None:
        self.iterable, self.name, self.unit, self.postfix = iterable, desc, unit, ""
        self.total = len(iterable) if total is None and hasattr(iterable, "__len__") else total
        self.initial = self.done = initial
        self.start = time.monotonic()
        self.next_line = self.start + FIRST_LINE

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable:
            yield item
            self.update()

    def set_postfix_str(self, text: str) -> None:
        self.postfix = text

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.next_line

    def update(self, steps: int = 1) -> None:
        self.done += steps
        now = time.monotonic()
        if now >= self.next_line and self.done != self.total:
            self.next_line = now + NEXT_LINE
            print(self.line(now - self.start), file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        what = ", ".join(filter(None, (self.name, self.postfix)))
        if self.total is None:
            return f"{what}: {self.unit} {self.done} ({duration(seconds)})"
        left = seconds / (self.done - self.initial) * (self.total - self.done)
        return f"{what}: {100 * self.done // self.total}% ({duration(seconds)}, {duration(left)} left)"

    def close(self) -> None:
        """As of a bar; there is nothing to take away."""


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def silence(disable_bars: Callable[[], None]) -> None:
    """The bars of a library are silent where ours are."""
    if is_silent():
        disable_bars()
