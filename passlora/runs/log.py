"""training_log.jsonl: each epoch's losses, for a person and for the tracker."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from accelerate import Accelerator

from passlora.errors import PassloraError
from passlora.files import write_text
from passlora.folder.layout import LOG
from passlora.training.steps import EpochLog


class TrainingLog:
    """Appends each epoch's losses to the file, and sends them to the tracker."""

    def __init__(self, folder: Path, name: str, accelerator: Accelerator) -> None:
        self.folder, self.name, self.accelerator = folder, name, accelerator
        self.epochs = 0  # over all tasks

    def cut(self, task: int, epoch: int) -> None:
        """Forget the epochs that will be run again."""
        path = self.folder / LOG
        if self.accelerator.is_main_process and path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if is_before(line, task, epoch)]
            self.epochs = len(kept)
            write_text(path, "".join(kept))

    def __call__(self, log: EpochLog) -> None:
        values = {**log.losses, "task": log.task, "learning_rate": log.learning_rate}
        self.accelerator.log({f"{self.name}/{key}": value for key, value in values.items()}, step=self.epochs)
        self.epochs += 1
        if self.accelerator.is_main_process:
            try:
                with open(self.folder / LOG, "a", encoding="utf-8") as file:
                    file.write(json.dumps(dataclasses.asdict(log)) + "\n")
            except FileNotFoundError:
                raise PassloraError(f"{self.folder} is no longer there: the run cannot go on") from None


def is_before(line: str, task: int, epoch: int) -> bool:
    """Whether a line of the log belongs to an earlier epoch; a line that was cut off does not."""
    try:
        entry = json.loads(line)
        return (entry["task"], entry["epoch"]) < (task, epoch)
    except (ValueError, KeyError):
        return False
