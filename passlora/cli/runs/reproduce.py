"""passlora reproduce: the paper's tables and figures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from passlora.cli.arguments import add_command
from passlora.cli.flags import add_flags, chosen_flags
from passlora.cli.runs.train import leave_group
from passlora.config import FIELDS

# What an experiment sets itself, row by row, or has no use for.
NOT_IN_AN_EXPERIMENT = (
    "overwrite_output_dir",
    "keep_tasks",
    "preset",
    "compare",
    "seed",
    "class_order_seeds",
    "push_to_hub",
    "hub_model_id",
    "hub_private_repo",
)


BEYOND = "beyond"


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "reproduce",
        "run one of the paper's tables or figures, or the comparison with every rival",
        "Run one of the paper's tables or figures, and write it as Markdown, CSV and picture with the paper's values "
        "beside; or `beyond`, the preset passlora against every rival. The same command goes on where it stopped. Any "
        "flag below changes every run of it.",
    )
    parser.add_argument("experiment", metavar="TABLE", nargs="?", help="such as table-7; without: a list of them")
    parser.add_argument(
        "--scale",
        choices=["full", "mini"],
        default="full",
        help="full: the paper's setting, on GPUs; mini: a small backbone, few images, on a CPU (default: full)",
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        metavar="NAME",
        help="only these, such as 'CIFAR-100 T=10', or 50-images of beyond (default: all)",
    )
    parser.add_argument(
        "--rows", nargs="+", metavar="NAME", help="of beyond: only these methods, such as SLDA PASS++ (default: all)"
    )
    add_flags(parser, [name for name in FIELDS if name not in NOT_IN_AN_EXPERIMENT])
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.experiment is None:
        print_experiments()
        return 0
    from passlora.analysis import reproduce as experiments

    overrides = chosen_flags(arguments)
    folder = Path(overrides.pop("output_dir", "runs/reproduce"))
    columns = tuple(arguments.columns or ())
    if arguments.experiment == BEYOND:
        from passlora.analysis import beyond

        rows = tuple(arguments.rows or ())
        beyond.check(arguments.scale, overrides, folder, columns, rows)
        beyond.run(arguments.scale, overrides, folder, columns, rows)
        leave_group()
        return 0
    experiments.configurations(arguments.experiment, arguments.scale, overrides, folder, columns)  # refuse before torch
    experiments.reproduce(arguments.experiment, arguments.scale, overrides, folder, columns)
    leave_group()
    return 0


def print_experiments() -> None:
    from passlora.analysis.paper import EXPERIMENTS

    width = max(map(len, EXPERIMENTS))
    for name, experiment in EXPERIMENTS.items():
        print(f"{name.ljust(width)}  {experiment.title}")
    print(f"{BEYOND.ljust(width)}  Not in the paper: the preset passlora against every rival, over class orders")
    print("\nstart one with: passlora reproduce NAME --scale mini --dataset_name path/to/cifar100")
