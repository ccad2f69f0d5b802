"""passlora robustness: a model on damaged images."""

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
from passlora.display.tables import table

FLAGS = (*READING, "max_test_per_class")


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "robustness",
        "test a model on damaged images",
        "Accuracy under 15 corruptions (noise, blur, weather, digital), each and on average, at the strengths of "
        "ImageNet-C; for images of up to 64 pixels those of CIFAR-100-C. Needs: "
        'pip install "passlora[robustness]". Uses the test split of the data, or all of it if it has none.',
    )
    add_model(parser)
    add_data(parser)
    parser.add_argument("--severity", type=int, default=1, help="1 (mild) to 5 (default: 1)")
    parser.add_argument("--corruptions", nargs="+", metavar="NAME", help="only these, such as fog snow (default: all)")
    parser.add_argument(
        "--output_dir", help="where the numbers go (default: MODEL/eval; ./NAME-eval for one on the Hub)"
    )
    add_task_flags(parser)
    add_flags(parser, FLAGS)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from passlora.data import corruptions

    names = tuple(arguments.corruptions or corruptions.CORRUPTIONS)
    corruptions.check(names, arguments.severity)
    reading = reading_settings(arguments, FLAGS)
    model = load_model(arguments)
    parts = dict(model.robustness(arguments.data, arguments.severity, names, **reading))
    found = {name: part.accuracy for name, part in parts.items()}
    clean = found.pop("clean")
    mean = sum(found.values()) / len(found)
    group_of = {name: group for group, members in corruptions.GROUPS.items() for name in members}
    rows = [["", "kind", "accuracy %", "drop"], ["clean", "", f"{clean:.1f}", ""]]
    rows += [[name, group_of[name], f"{value:.1f}", f"{clean - value:.1f}"] for name, value in found.items()]
    rows.append(["mean", "", f"{mean:.1f}", f"{clean - mean:.1f}"])
    out = evaluation_folder(arguments)
    about = {"learnt": model.tasks[-1].learnt, "images": int(parts["clean"].confusion.sum())}  # the model looked at
    content = {**about, "severity": arguments.severity, "clean": clean, "accuracy": found, "mean": mean}
    files.write_json(out / corruptions.ROBUSTNESS, content)
    files.write_text(out / "robustness.csv", "\n".join(",".join(row) for row in rows) + "\n")
    from passlora.display import figures

    for suffix in ("png", "svg"):
        figures.robustness(content, out / f"robustness.{suffix}")
    print(f"{table(rows, (0, 1))}\n\nseverity {arguments.severity} of 5")
    print(f"saved in {out}: robustness.csv, .json, .png and .svg")
    return 0
