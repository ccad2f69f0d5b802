"""The command line: parse, call, print. Nothing heavy is imported before the arguments are known to be right."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from passlora import __version__
from passlora.cli.asking import check, evaluate, info, predict, robustness
from passlora.cli.output import drop_unwritten_output, fail, printing_what_the_library_says
from passlora.cli.runs import env, recipes, report, reproduce, train, validate
from passlora.cli.sharing import merge, pull, push
from passlora.cli.teaching import combine, forget, learn, rename, rollback
from passlora.errors import PassloraError, nearest

# A module a command, in the order of the help. Each has add(commands), which returns its parser, and
# run(arguments), which returns the exit code and imports what is heavy.
COMMANDS = (
    *(train, recipes, validate, reproduce, report),
    *(check, learn, predict, evaluate, robustness, info),
    *(forget, rename, combine, rollback),
    *(merge, push, pull),
    env,
)
RESUMABLE = ("train", "learn", "reproduce")

# What people type first -> what it is called here.
OTHER_NAMES = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "model": "model_name_or_path",
    "backbone": "model_name_or_path",
    "arch": "model_architecture",
    "lora_rank": "lora_r",
    "rank": "lora_r",
    "r": "lora_r",
    "alpha": "lora_alpha",
    "target_modules": "lora_target_modules",
    "dataset": "dataset_name",
    "data": "dataset_name",
    "method": "preset",
    "tasks": "num_tasks",
    "output": "output_dir",
    "out": "output_dir",
    "o": "output_dir",
    "wd": "weight_decay",
    "fp16": "mixed_precision",
    "bf16": "mixed_precision",
    "workers": "dataloader_num_workers",
    "num_workers": "dataloader_num_workers",
    "recipe": "config",
    "topk": "top_k",
    "k": "top_k",
}

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
    for module in COMMANDS:
        module.add(commands).set_defaults(run=module.run)
    return parser


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    arguments, unknown = parser.parse_known_args(argv)
    if not unknown:
        return arguments
    flag = unknown[0].split("=")[0]
    if flag.startswith("--"):
        known = known_flags(parser, arguments.command)
        meant = f"--{OTHER_NAMES.get(flag[2:].replace('-', '_'), '')}"
        hint = f"; here it is {meant}" if meant in known else nearest(flag, known)
        raise PassloraError(f"unknown flag {flag}{hint}")
    raise PassloraError(f"unexpected argument {flag!r}")


def known_flags(parser: Parser, command: str | None) -> list[str]:
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    chosen = parser if command is None else commands.choices[command]
    return [option for action in chosen._actions for option in action.option_strings]


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    command = argv[0] if argv else "passlora"
    try:
        with printing_what_the_library_says():
            code = run(argv)
        sys.stdout.flush()  # while an error can still be told
    except PassloraError as error:
        code = fail(str(error))
    except BrokenPipeError:  # whoever reads the output has seen enough
        drop_unwritten_output()
        code = 1
    except OSError as error:
        if error.errno is None:  # not of the system: some libraries use this type for errors of their own
            raise
        place = error.filename2 or error.filename
        code = fail(f"{command} stopped{f' at {place}' if place else ''}: {error.strerror}")
        drop_unwritten_output()
    except KeyboardInterrupt:
        hint = "; the same command goes on (inside a task, with --save_steps or --save_epochs)"
        print(f"\npasslora: stopped{hint if command in RESUMABLE else ''}", file=sys.stderr)
        code = 130
    if code:
        sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Parses, then hands over to the command's module; returns the exit code."""
    parser = make_parser()
    arguments = parse(parser, argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    return arguments.run(arguments)
