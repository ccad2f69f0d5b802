"""The command line: parse, call, print. Nothing heavy is imported before the arguments are known to be right."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from passlora import __version__
from passlora.cli.models import evaluate, info, learn, merge, predict, pull, push, robustness, rollback
from passlora.cli.runs import env, report, reproduce, train, validate
from passlora.environment import is_first_process
from passlora.errors import PassloraError, nearest

# A module a command, in the order of the help. Each has add(commands), which returns its parser, and
# run(arguments), which returns the exit code and imports what is heavy.
COMMANDS = (
    *(train, validate, reproduce, report),
    *(learn, predict, evaluate, robustness, info, rollback, merge, push, pull),
    env,
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
    for module in COMMANDS:
        module.add(commands).set_defaults(run=module.run)
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
        code = run(argv)
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
    if code:
        sys.exit(code)


def run(argv: Sequence[str] | None) -> int:
    arguments = parse(argv)
    if arguments.command is None:
        make_parser().print_help()
        return 0
    return arguments.run(arguments)
