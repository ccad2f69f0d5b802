"""Kills a real process at the n-th event, starts it again, and compares with one that was left alone.

    python tests/kill_sweep.py train|learn WORK_FOLDER IMAGE_FOLDER [STRIDE [OFFSET]]

Events are training steps, flushes to disk and renames: so kills fall inside steps, inside saves, and between any two
files of a save. The process is killed by SIGKILL. Children are forked from this one to save the imports. `train` is one
run with a comparison; `learn` starts a model with one lesson, and teaches it a second.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import matplotlib.pyplot  # noqa: F401
import peft  # noqa: F401
import timm  # noqa: F401

from passlora import Config
from passlora.cli.main import main as command_line
from passlora.runs.run import train
from passlora.training.steps import TaskTraining

BACKBONE = {"model_name_or_path": "test_vit", "pretrained": False, "image_size": 32}
BUDGET = {"num_train_epochs": 2, "lr_milestones": [1], "per_device_train_batch_size": 4, "save_steps": 1}


def run_training(data: Path, folder: Path) -> None:
    options = {"task_sizes": [2, 1], "radius": "running", "compare": ["finetune", "slda"], **BACKBONE, **BUDGET}
    train(Config.make(dataset_name=str(data), output_dir=str(folder), **options))


def run_lessons(data: Path, folder: Path) -> None:
    """The lessons that are not learnt yet; a script would ask `passlora info`."""
    flags = as_flags(BUDGET)
    manifest = folder / "passlora.json"
    done = len(json.loads(manifest.read_text())["tasks"]) if manifest.is_file() else 0
    for lesson in ("first", "second")[done:]:
        born = ["--preset", "pass++", "--radius", "running", *as_flags(BACKBONE)] if lesson == "first" else []
        command_line(["learn", str(folder), "--data", str(data.parent / lesson), *flags, *born])


def as_flags(options: dict) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", str(value).strip("[]"))]


def split_lessons(data: Path) -> None:
    """Two folders of classes from one."""
    for lesson, classes in (("first", ("cat", "dog")), ("second", ("owl",))):
        for split in ("train", "test"):
            for name in classes:
                shutil.copytree(data / split / name, data.parent / lesson / split / name, dirs_exist_ok=True)


WORK = {"train": run_training, "learn": run_lessons}


def run_child(work: str, data: Path, folder: Path, kill_at: int) -> tuple[bool, int]:
    """One process that kills itself at event `kill_at` (0: never): was it killed, and how many events had it?"""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        events = 0

        def counted(function):
            def wrapper(*args, **kwargs):
                nonlocal events
                events += 1
                if events == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return wrapper

        os.replace, os.fsync, TaskTraining.losses = counted(os.replace), counted(os.fsync), counted(TaskTraining.losses)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            WORK[work](data, folder)
        except BaseException as error:
            print(f"the child failed: {error!r}", file=sys.stderr)
            os._exit(1)
        os.write(writer, str(events).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    told = os.read(reader, 100)
    os.close(reader)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"the child failed with status {status}"
    return killed, int(told or 0)


def fingerprint(folder: Path) -> dict[str, str]:
    """Every weight file's bytes, the numbers, the loss of every step, and the manifest but for its dates."""
    found = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".safetensors", ".jsonl", ".csv")
    }
    if (folder / "results.json").is_file():
        results = json.loads((folder / "results.json").read_text())
        for part in (results, *results["compare"].values()):
            for name in ("seconds", "train_seconds", "test_seconds", "peak_memory_bytes"):
                part.pop(name, None)
        found["results"] = json.dumps(results, sort_keys=True)
    manifest = json.loads((folder / "passlora.json").read_text())
    for task in manifest["tasks"]:
        task.pop("learnt")
    found["manifest"] = json.dumps(manifest, sort_keys=True)
    found["card"] = re.search(r"knows \d+ classes, learnt in \d+ tasks", (folder / "README.md").read_text()).group()
    found["left over"] = str([str(p) for p in folder.rglob(".passlora-*")])
    return found


def main() -> None:
    work, place, data = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    stride, offset = (int(x) for x in (*sys.argv[4:6], "1", "1")[:2])
    if work == "learn":
        split_lessons(data)
    gc.freeze()  # accelerate collects garbage after each task: the libraries are none
    _, total = run_child(work, data, place / "reference", 0)
    reference = fingerprint(place / "reference")
    kills, different = 0, []
    for point in range(offset, total + 1, stride):
        folder = place / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        killed, _ = run_child(work, data, folder, point)
        assert killed, point
        kills += 1
        # a second kill, a little later, before the run may finish
        kills += run_child(work, data, folder, 7)[0]
        run_child(work, data, folder, 0)
        if fingerprint(folder) != reference:
            different.append(point)
    points = len(range(offset, total + 1, stride))
    gc.unfreeze()
    print(f"{work}: {kills} kills at {points} of {total} points, {len(different)} different: {different}")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
