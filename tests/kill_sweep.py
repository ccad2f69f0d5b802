"""Kills a real training process at the n-th event, continues it, and compares with a run that was left alone.

    python tests/kill_sweep.py WORK_FOLDER IMAGE_FOLDER [STRIDE [OFFSET]]

Events are training steps, flushes to disk and renames: so kills fall inside steps, inside saves, and between any two
files of a save. The process is killed by SIGKILL. Children are forked from this one to save the imports.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from passlora import Config
from passlora.learner import Learner
from passlora.run import train


def config(data: str, folder: Path) -> Config:
    return Config.make(
        dataset_name=data,
        task_sizes=[2, 1],
        num_train_epochs=2,
        lr_milestones=[1],
        per_device_train_batch_size=4,
        radius="running",
        save_steps=1,
        compare=["finetune"],
        output_dir=str(folder),
    )


def run_child(data: str, folder: Path, kill_at: int) -> tuple[bool, int]:
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

        os.replace, os.fsync, Learner._losses = counted(os.replace), counted(os.fsync), counted(Learner._losses)
        train(config(data, folder), lambda text: None)
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
    """Every weight file's bytes, the numbers, and the loss of every step."""
    found = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".safetensors", ".jsonl", ".csv")
    }
    results = json.loads((folder / "results.json").read_text())
    for part in (results, results["compare"]["finetune"]):
        part.pop("seconds")
    found["results"] = json.dumps(results, sort_keys=True)
    found["left over"] = str([str(p) for p in folder.rglob(".passlora-*")])
    return found


def main() -> None:
    work, data = Path(sys.argv[1]), sys.argv[2]
    stride, offset = (int(x) for x in [*sys.argv[3:5], "1", "1"][:2]) if len(sys.argv) > 4 else (1, 1)
    _, total = run_child(data, work / "reference", 0)
    reference = fingerprint(work / "reference")
    kills, different = 0, []
    for point in range(offset, total + 1, stride):
        folder = work / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        killed, _ = run_child(data, folder, point)
        assert killed, point
        kills += 1
        # a second kill, a little later, before the run may finish
        kills += run_child(data, folder, 7)[0]
        run_child(data, folder, 0)
        if fingerprint(folder) != reference:
            different.append(point)
    points = len(range(offset, total + 1, stride))
    print(f"{kills} kills at {points} of {total} points, {len(different)} different: {different}")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
