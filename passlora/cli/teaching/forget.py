"""passlora forget: a model without some of its classes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from passlora.cli.arguments import FOLDER, add_backbone_path, add_command, add_model, changed, how_to_undo
from passlora.errors import PassloraError
from passlora.folder import history
from passlora.folder.lock import lock
from passlora.folder.manifest import read_manifest


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "forget",
        "remove classes from a model",
        "Remove classes: from the classifier, from what is kept of classes, from the card. What of them remains in "
        "sums over all classes is said; a model that was started with --exact_forgetting true keeps none of it. The "
        "tasks before still hold the classes, so that rollback can undo it, until --prune.",
    )
    add_model(parser, FOLDER)
    parser.add_argument("classes", metavar="CLASS", nargs="*", help="names of classes, as passlora info shows them")
    parser.add_argument(
        "--prune",
        action="store_true",
        help="for good: delete the weights of the tasks before, and the classes' names; alone, for what was forgotten "
        "earlier",
    )
    add_backbone_path(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    folder, names = Path(arguments.model), arguments.classes
    if not names and not arguments.prune:
        raise PassloraError("which classes? name them, or give --prune for what was forgotten earlier")
    if names:
        with changed(arguments) as model:
            remains = model.forget(names)
        print(f"forgot {', '.join(names)}; {folder} knows {len(model.classes)} classes now")
        print(f"what remains of {'them' if len(names) > 1 else 'it'}: {remains or 'nothing'}")
        if not arguments.prune:
            print(f"{how_to_undo(folder, model)}; for good: passlora forget {folder} --prune")
    if arguments.prune:
        read_manifest(folder)
        from passlora.hub.card import write_card

        with lock(folder):
            gone = history.forget_for_good(folder)
            write_card(folder, read_manifest(folder))
        print(f"deleted: {', '.join(gone)}" if gone else "nothing to delete")
    return 0
