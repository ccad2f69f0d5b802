"""Timing two or more sides against each other in one run: interleaved rounds, medians, spread, ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Seconds = dict[str, list[float]]


def interleave(sides: dict[str, Callable[[], Any]], rounds: int, warmup: int = 1) -> Seconds:
    """Seconds of each side in each round, as the side says or by the clock.

    The order turns from round to round, so that no side is always first.
    """
    names = list(sides)
    for _ in range(warmup):
        for name in names:
            sides[name]()
    seconds: Seconds = {name: [] for name in names}
    for number in range(rounds):
        for i in range(len(names)):
            name = names[(i + number) % len(names)]
            began = time.perf_counter()
            own = sides[name]()
            seconds[name].append(own if isinstance(own, float) else time.perf_counter() - began)
    return seconds


def second(run: Callable[[], Any]) -> Callable[[], float]:
    """Seconds of a second run right after the first, as `Scene.second_epoch` measures: nothing is cold."""

    def timed() -> float:
        run()
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return timed


def ratios(seconds: Seconds, over: str, under: str) -> list[float]:
    """How many times the time of `under` `over` takes, round by round: what the machine does meanwhile cancels out."""
    return [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]


@dataclass
class Row:
    """One measured thing: its value in each round, and the goal for the median, such as "<= 1.10"."""

    what: str
    values: list[float]
    unit: str
    goal: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        if not self.goal:
            return None
        sign, limit = self.goal.split()
        return self.median <= float(limit) if sign == "<=" else self.median >= float(limit)

    @property
    def text(self) -> str:
        low, high = min(self.values), max(self.values)
        spread = f" ({number(low)} to {number(high)})" if low != high else ""
        return f"{number(self.median)}{spread} {self.unit}"

    def json(self) -> dict[str, Any]:
        return {**vars(self), "median": self.median, "met": self.met}


def number(value: float) -> str:
    """Three digits that matter."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| measured | median (lowest to highest) | goal | |", "|---|---|---|---|"]
    for row in rows:
        verdict = {None: "", True: "met", False: "**missed**"}[row.met]
        lines.append(f"| {row.what} | {row.text} | {row.goal} | {verdict} |")
    return "\n".join(lines)
