"""passlora push: a model onto the Hugging Face Hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from passlora.cli.arguments import FOLDER, add_command, add_model
from passlora.folder.lock import lock
from passlora.folder.manifest import read_manifest


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "push",
        "upload a model to the Hugging Face Hub",
        "Upload a model to the Hugging Face Hub: one commit with what changed, and a tag that names the last task "
        "(task-00 is the first). Log in before, with: hf auth login.",
    )
    add_model(parser, FOLDER)
    parser.add_argument("repo", metavar="USER/NAME", help="where to; made if it does not exist")
    parser.add_argument("--private", action="store_true", help="make the repository private, if it is made")
    parser.add_argument("--revision", help="branch to commit to (default: main; another gets no tag)")
    parser.add_argument("--create_pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--force", action="store_true", help="replace another model, or later tasks of this one")
    return parser


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.model)
    read_manifest(folder)  # nothing is made where there is no model
    from passlora.hub.push import push

    with lock(folder):
        done = push(folder, arguments.repo, arguments.private, arguments.revision, arguments.create_pr, arguments.force)
    if arguments.create_pr:
        print(f"opened {done.url}")
    elif not done.changed:
        print(f"{done.url} is up to date")
    else:
        print(f"uploaded to {done.url}" + (f", tag {done.tag}" if done.tag else f", branch {arguments.revision}"))
        where = "" if done.tag else f" --revision {arguments.revision}"
        print(f"ask it: passlora predict {arguments.repo} IMAGE...{where}")
    return 0
