"""Measure passlora: `python -m benchmarks`, or some of the benchmarks by name.

Every comparison runs its sides in turns in one process, several rounds; ratios are taken round by round, so that what
else the machine does cancels out. Prints a Markdown table, that of docs/performance.md; --json keeps every round.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from . import growth, inference, step
from .arithmetic import arithmetic
from .lessons import known_classes, lessons
from .profile import draw, profile
from .timing import Row, table

BENCHMARKS: dict[str, Callable[[int], Iterator[Row]]] = {
    "step": step.against_floor,
    "usual": step.against_usual,
    "teacher": step.teacher_memory,
    "feeding": step.feeding,
    "choices": step.choices,
    "options": step.options,
    "growth": growth.old_classes,
    "collecting": growth.collecting,
    "tasks": growth.many_tasks,
    "learn": lessons,
    "known": known_classes,
    "inference": inference.inference,
    "start-up": inference.start_up,
    "profile": profile,
    "arithmetic": arithmetic,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each comparison (default: 7)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: its own choice)")
    parser.add_argument("--json", metavar="FILE", help="write every round's figures there")
    parser.add_argument("--picture", metavar="FILE", help="draw what the benchmark `profile` finds there")
    options = parser.parse_args()
    if options.picture and options.names and "profile" not in options.names:
        parser.error("--picture goes with the benchmark profile")
    for name in options.names:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    if options.threads:
        torch.set_num_threads(options.threads)
    found: dict[str, list[Row]] = {}
    for name in options.names or BENCHMARKS:
        found[name] = []
        for row in BENCHMARKS[name](options.rounds):
            print(f"{name}: {row.what}: {row.text}", flush=True)
            found[name].append(row)
        gc.collect()
    threads = torch.get_num_threads()
    print(f"\ntorch {torch.__version__}, {platform.machine()}, {threads} threads, {options.rounds} rounds\n")
    print(table([row for rows in found.values() for row in rows]))
    if options.json:
        machine = {"torch": torch.__version__, "machine": platform.machine(), "threads": threads}
        rows = {name: [row.json() for row in rows] for name, rows in found.items()}
        Path(options.json).write_text(json.dumps({**machine, **rows}, indent=1) + "\n", encoding="utf-8")
    if options.picture:
        draw(found["profile"], options.picture)


if __name__ == "__main__":
    main()
