"""passlora env: what a bug report needs."""

from __future__ import annotations

import argparse
from typing import Any

from passlora.cli.arguments import add_command
from passlora.environment import describe_environment


def add(commands: Any) -> argparse.ArgumentParser:
    return add_command(commands, "env", "show versions and devices", "Show versions and devices.")


def run(arguments: argparse.Namespace) -> int:
    print(describe_environment())
    return 0
