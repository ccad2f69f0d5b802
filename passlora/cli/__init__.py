"""The command line: a module a command."""

from passlora.cli.main import main

__all__ = ["main"]
