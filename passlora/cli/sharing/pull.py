"""passlora pull: a model from the Hugging Face Hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from passlora.cli.arguments import add_command, add_revision


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "pull",
        "download a model from the Hugging Face Hub",
        "Download a model from the Hugging Face Hub into a folder of its own: all of its tasks. A folder that holds an "
        "earlier state of the same model is brought up to date.",
    )
    parser.add_argument("repo", metavar="USER/NAME", help="the model on the Hub")
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="where to (default: ./NAME)")
    add_revision(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from passlora.hub import names, pull

    names.check_repo_id(arguments.repo)
    folder = Path(arguments.folder or arguments.repo.split("/")[-1])
    manifest = pull.pull(arguments.repo, folder, arguments.revision)
    print(f"{folder} knows {len(manifest.classes)} classes from {len(manifest.tasks)} tasks")
    print(f"look: passlora info {folder}")
    return 0
