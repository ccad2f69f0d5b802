"""passlora eval: a model on labelled images."""

from __future__ import annotations

import argparse
from typing import Any

from passlora import files
from passlora.cli.arguments import (
    READING,
    add_command,
    add_data,
    add_model,
    add_task_flags,
    evaluation_folder,
    load_model,
    reading_settings,
)
from passlora.cli.flags import add_flags
from passlora.display.tables import confusion_csv, mistakes, table


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "eval",
        "test a model on labelled images",
        "Accuracy of each task's classes and of all, calibration error, and the confusion matrix as CSV and picture. "
        "Uses the test split of the data, or all of it if it has none.",
    )
    add_model(parser)
    add_data(parser)
    parser.add_argument(
        "--output_dir", help="where the confusion matrix goes (default: MODEL/eval; ./NAME-eval for one on the Hub)"
    )
    add_task_flags(parser)
    add_flags(parser, READING)
    return parser


def run(arguments: argparse.Namespace) -> int:
    reading = reading_settings(arguments)
    model = load_model(arguments)
    result = model.evaluate(arguments.data, **reading)
    from passlora.display import figures
    from passlora.training import metrics

    shown = accuracy_table(result, model.scenario)
    bias = metrics.bias(result.confusion, model.scenario, model.scenario.num_tasks - 1)
    out = evaluation_folder(arguments)
    files.write_text(out / "confusion_matrix.csv", confusion_csv(model.classes, result.confusion))
    figures.confusion_matrix(model.classes, result.confusion, out / "confusion_matrix.png")
    figures.reliability(result, out / "reliability.png")
    print(f"{shown}\n\ncalibration error (ECE) {result.calibration_error:.1f}%")
    worst = mistakes(model.classes, result.confusion)
    if worst:
        print(worst)
    if bias is not None:
        print(f"old classes taken for the last task's {bias[0]:.1f}%, the last task's for old {bias[1]:.1f}%")
    print(f"saved in {out}: confusion_matrix.csv, confusion_matrix.png, reliability.png")
    return 0


def accuracy_table(result: Any, scenario: Any) -> str:
    """An Evaluation by the tasks of a Scenario; nothing where there is no image."""
    from passlora.training import metrics

    totals = result.confusion.sum(axis=1)
    rows = [["", "classes", "images", "accuracy %"]]
    for task in range(scenario.num_tasks):
        part = scenario.classes(task)
        images = int(totals[part.start : part.stop].sum())
        accuracy = f"{metrics.accuracy(result.confusion, part):.1f}" if images else ""
        rows.append([f"task {task}", str(len(part)), str(images), accuracy])
    every = range(scenario.num_classes)
    rows.append(["all", str(len(every)), str(int(totals.sum())), f"{metrics.accuracy(result.confusion, every):.1f}"])
    return table(rows)
