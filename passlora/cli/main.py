"""The command line: parse, call, print. Nothing heavy is imported before the arguments are known to be right."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from passlora import __version__, files
from passlora.cli.commands import add_commands
from passlora.cli.flags import add_flags, chosen_flags, describe
from passlora.cli.lifecycle import run_command
from passlora.config.knobs import FIELDS, Config, is_local, load
from passlora.environment import describe_environment, is_first_process
from passlora.errors import PassloraError, nearest
from passlora.folder import layout

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

DESCRIPTION = """\
passlora teaches a pretrained vision model new classes, task after task, without keeping any old image.

start here:
  passlora train                                     the embedded digits: ten classes in four tasks, about 2 minutes
  passlora train --config recipes/mini/digits.yaml   the same, from a recipe; any flag overrides it
  accelerate launch -m passlora train --config recipes/deit_s16_lora/cifar100_t10.yaml
  passlora predict runs/digits photo.png             ask the model that a run left
"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PassloraError(f"{message} (see {self.prog} --help)")


def make_parser() -> Parser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="passlora", description=DESCRIPTION, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"passlora {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")

    train = commands.add_parser(
        "train",
        help="learn a dataset's classes task by task, and report",
        description="Learn a dataset's classes task by task, test after each, and report. Without arguments: the "
        "embedded digits. Precedence: defaults < preset < recipe < these flags.",
        allow_abbrev=False,
    )
    train.add_argument("--config", metavar="RECIPE", help="a recipe: YAML with the keys below")
    add_flags(train, FIELDS)

    validate = commands.add_parser(
        "validate",
        help="check a recipe without running it",
        description="Check a recipe, with any flags on top, and print the settings that differ from the defaults.",
        allow_abbrev=False,
    )
    validate.add_argument("config", metavar="RECIPE", help="the YAML file")
    add_flags(validate, FIELDS)

    reproduce = commands.add_parser(
        "reproduce",
        help="run one of the paper's tables or figures",
        description="Run one of the paper's tables or figures, and write it as Markdown, CSV and picture with the "
        "paper's values beside. The same command goes on where it stopped. Any flag below changes every run of it.",
        allow_abbrev=False,
    )
    reproduce.add_argument("experiment", metavar="TABLE", nargs="?", help="such as table-7; without: a list of them")
    reproduce.add_argument(
        "--scale",
        choices=["full", "mini"],
        default="full",
        help="full: the paper's setting, on GPUs; mini: a small backbone, few images, on a CPU (default: full)",
    )
    reproduce.add_argument(
        "--columns", nargs="+", metavar="NAME", help="only these, such as 'CIFAR-100 T=10' (default: all)"
    )
    add_flags(reproduce, [name for name in FIELDS if name not in NOT_IN_AN_EXPERIMENT])

    report = commands.add_parser(
        "report",
        help="write a run as one HTML page",
        description="Write a run of passlora train as one HTML page that opens offline: numbers, curves, matrices, "
        "every class, calibration, corruptions (after passlora robustness), settings; other runs beside it.",
        allow_abbrev=False,
    )
    report.add_argument("run", metavar="RUN", help="the folder of a run, such as runs/digits")
    report.add_argument("--compare", nargs="+", default=[], metavar="RUN", help="folders of runs to show beside it")
    report.add_argument("--html", default="report.html", metavar="FILE", help="the page (default: report.html)")
    report.add_argument(
        "--plots", metavar="FOLDER", help="also save its pictures here, as PNG, SVG and PDF, for a paper"
    )

    add_commands(commands)
    commands.add_parser("env", help="show versions and devices", description="Show versions and devices.")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        if flag.startswith("--"):
            known = nearest(flag, known_flags(parser, arguments.command))
            raise PassloraError(f"unknown flag {flag}{known}")
        raise PassloraError(f"unexpected argument {flag!r}")
    return arguments


def known_flags(parser: Parser, command: str) -> list[str]:
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return [option for action in commands.choices[command]._actions for option in action.option_strings]


def main(argv: Sequence[str] | None = None) -> None:
    try:
        run(argv)
    except PassloraError as error:
        who = "" if is_first_process() else f" (process {os.environ['RANK']})"
        print(f"passlora: error{who}: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # whoever reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        command = (argv if argv is not None else sys.argv[1:])[:1]
        hint = "; the same command goes on (inside a task, with --save_steps or --save_epochs)"
        print(f"\npasslora: stopped{hint if command[0] in ('train', 'learn', 'reproduce') else ''}", file=sys.stderr)
        sys.exit(130)


def run(argv: Sequence[str] | None) -> None:
    arguments = parse(argv)
    if arguments.command == "train":
        train(load(arguments.config, chosen_flags(arguments)))
    elif arguments.command == "validate":
        validate(arguments.config, load(arguments.config, chosen_flags(arguments)))
    elif arguments.command == "reproduce":
        reproduce(arguments)
    elif arguments.command == "report":
        report(arguments)
    elif arguments.command == "env":
        print(describe_environment())
    elif arguments.command is not None:
        if code := run_command(arguments):
            sys.exit(code)
    else:
        make_parser().print_help()


def train(config: Config) -> None:
    from pathlib import Path

    from passlora.folder import store

    folder = Path(config.training.output_dir)
    if is_first_process():
        # refuse before the seconds that torch takes
        store.check_run(folder, config.flat(), config.training.overwrite_output_dir)
    from passlora.runs.run import train as run_training

    run_training(config)
    leave_group()
    if is_first_process():
        runs = config.training.seeds or config.training.class_order_seeds
        is_model = not runs and config.method.classifier == "head"
        where = ", one task_NN folder a task" if is_model else ", one folder a run" if runs else ""
        print(f"\nsaved in {folder}: results.json, accuracy.png, config.yaml{where}")
        if is_model:
            print(f"look:  passlora info {folder}\nask:   passlora predict {folder} IMAGE...")
        data = config.data.dataset_name
        where = f" --dataset_name {shlex.quote(data)}" if is_local(data) else ""
        print(f"again: passlora train --config {folder / layout.CONFIG}{where} --output_dir {folder}-again")


def leave_group() -> None:
    """End the group of processes, if there is one, so that none is left waiting."""
    from accelerate.state import PartialState

    PartialState().destroy_process_group()


def validate(path: str, config: Config) -> None:
    differing = {k: v for k, v in config.flat().items() if v != FIELDS[k].default}
    for name, value in differing.items():
        print(f"{name}: {describe(value)}")
    print(f"{path} is valid; start it with: passlora train --config {path}")


def report(arguments: argparse.Namespace) -> None:
    from pathlib import Path

    from passlora.analysis import page
    from passlora.analysis.run_folder import read_runs

    runs = read_runs([Path(folder) for folder in (arguments.run, *arguments.compare)])
    files.write_text(Path(arguments.html), page.render(runs))
    if arguments.plots:
        page.save_plots(runs, Path(arguments.plots))
    print(f"saved {arguments.html}: open it in any browser")
    if arguments.plots:
        print(f"saved its pictures in {arguments.plots}")


def reproduce(arguments: argparse.Namespace) -> None:
    from pathlib import Path

    from passlora.analysis import reproduce as experiments
    from passlora.analysis.paper import EXPERIMENTS

    if arguments.experiment is None:
        width = max(map(len, EXPERIMENTS))
        for name, experiment in EXPERIMENTS.items():
            print(f"{name.ljust(width)}  {experiment.title}")
        print("\nstart one with: passlora reproduce NAME --scale mini --dataset_name path/to/cifar100")
        return
    overrides = chosen_flags(arguments)
    folder = Path(overrides.pop("output_dir", "runs/reproduce"))
    columns = tuple(arguments.columns or ())
    experiments.configurations(arguments.experiment, arguments.scale, overrides, folder, columns)  # refuse before torch
    experiments.reproduce(arguments.experiment, arguments.scale, overrides, folder, columns)
    leave_group()
