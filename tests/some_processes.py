"""Runs commands of passlora, each on some processes: `python tests/some_processes.py FOLDER`.

FOLDER/jobs.json lists them: {"argv": [...], "processes": 2, "env": {...}, "die_after": 1}. The processes are forked
from this one, to save them the imports, and then meet as those of torchrun do. What each said and how it ended is in
FOLDER/done.json. With `die_after` the first process dies when it has written so many checkpoints.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from pathlib import Path

import matplotlib.pyplot  # noqa: F401
import peft  # noqa: F401
import sklearn.datasets
import sklearn.svm  # noqa: F401
import timm  # noqa: F401
import two_resnets

from passlora.cli.main import main as command_line
from passlora.folder import checkpoints
from passlora.model import teaching
from passlora.runs import run  # noqa: F401

LIMIT, AFTER_ONE_FAILED = 120, 20  # seconds


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def die_after(checkpoints_written: int) -> None:
    left = checkpoints_written

    def write(*arguments) -> None:
        nonlocal left
        checkpoints.write_checkpoint(*arguments)
        left -= 1
        if left == 0:
            os._exit(9)

    teaching.write_checkpoint = write


def run_one(job: dict, rank: int, port: int, out: Path) -> None:
    """In a process of its own: never returns."""
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{out}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    world = job.get("processes", 1)
    os.environ |= {"ACCELERATE_USE_CPU": "true", **job.get("env", {})}
    if world > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if job.get("die_after"):
        die_after(job["die_after"])
    code = 1
    try:
        run_command = two_resnets.main if job["argv"][0] == "two_resnets" else command_line
        run_command(job["argv"])
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_job(job: dict, folder: Path, number: int) -> dict:
    port, began, failed = free_port(), time.monotonic(), None
    places = [folder / f"job_{number}_{rank}" for rank in range(job.get("processes", 1))]
    running = {}
    for rank, place in enumerate(places):
        child = os.fork()
        if child == 0:
            run_one(job, rank, port, place)
        running[child] = rank
    codes: list[int | None] = [None] * len(places)
    while running:
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[running.pop(child)] = os.waitstatus_to_exitcode(status)
                failed = failed or (time.monotonic() if status else None)
        late = time.monotonic() - began > LIMIT or (failed and time.monotonic() - failed > AFTER_ONE_FAILED)
        if late:  # it hangs: its code stays None
            for child in running:
                os.kill(child, 9)
                os.waitpid(child, 0)
            break
        time.sleep(0.02)
    said = {stream: [Path(f"{place}.{stream}").read_text() for place in places] for stream in ("out", "err")}
    return {"codes": codes, **said}


def main() -> None:
    folder = Path(sys.argv[1])
    jobs = json.loads((folder / "jobs.json").read_text())
    gc.freeze()  # accelerate collects garbage after each task: the libraries are none
    done = [run_job(job, folder, number) for number, job in enumerate(jobs)]
    (folder / "done.json").write_text(json.dumps(done))
    gc.unfreeze()


if __name__ == "__main__":
    main()
