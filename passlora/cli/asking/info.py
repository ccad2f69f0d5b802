"""passlora info: a model's tasks, classes, dates, accuracies and sizes, from the files alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from passlora.cli.arguments import add_command, add_model, add_revision
from passlora.config import hub_id
from passlora.display.tables import table
from passlora.folder import saving


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands, "info", "show a model's tasks, classes and sizes", "Tasks, classes, dates, accuracies and sizes."
    )
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="everything, for a program to read")
    add_revision(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    name, repo_id = arguments.model, hub_id(arguments.model)
    if repo_id is not None:
        from passlora.hub import pull

        about = pull.describe_remote(repo_id, arguments.revision)
    else:
        about = saving.describe(Path(name))
    if arguments.json:
        print(json.dumps(about, indent=2))
    else:
        print_about(name, about)
    return 0


def print_about(name: str, about: dict[str, Any]) -> None:
    settings, tasks = about["settings"], about["tasks"]
    lora = f"LoRA r = {settings['lora_r']}" if settings["lora_r"] else "trained whole"
    lora = "frozen" if settings["adapt_tasks"] == "none" else lora
    rows, seen = [["task", "classes", "learnt", "accuracy %", "kB", ""]], 0
    for i, task in enumerate(tasks):
        classes, kilobytes = task["classes"], f"{task['bytes'] / 1024:.0f}"
        seen += len(classes) - len(task["forgotten"])
        accuracy = "" if task["accuracy"] is None else f"{task['accuracy']:.1f}"
        if task["tested"] is not None:
            accuracy += f" on {task['tested']} of {seen} classes"
        shown = ", ".join(classes[:6]) + (", ..." if len(classes) > 6 else "")
        shown = "; ".join(part for part in (shown, task["change"]) if part)
        rows.append([str(i), str(len(classes)), task["learnt"], accuracy, kilobytes, shown])
    size = f"{about['bytes'] / 1024:,.0f} kB in all"
    print(
        f"{name}: {settings['model_name_or_path']}, {lora}, {settings['preset']}, {settings['inference']} inference\n"
        f"{len(about['classes'])} classes in {len(tasks)} tasks, {size}\n\n{table(rows, (0, 2, 5))}"
    )
    if about["rolled_back"]:
        print(f"rolled back; confirm: passlora rollback {name} --prune")
