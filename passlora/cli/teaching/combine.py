"""passlora combine: two models that were taught apart as one that knows both."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from passlora.cli.arguments import ANYWHERE, FOLDER, add_backbone_path, add_command
from passlora.config import hub_id
from passlora.errors import PassloraError
from passlora.folder.manifest import read_manifest


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "combine",
        "make one model of two that were taught apart",
        "Two models on the same backbone and adapter become one that knows the classes of both, without any image. For "
        "classifiers that keep sums it is the very model that would have been taught in one place. A and B stay as "
        "they are; the tasks of A stay restorable.",
    )
    parser.add_argument("first", metavar="A", help=ANYWHERE)
    parser.add_argument("second", metavar="B", help=ANYWHERE)
    parser.add_argument("out", metavar="OUT", help=FOLDER + ": to be made")
    parser.add_argument(
        "--on_clash",
        choices=["error", "join", "rename"],
        default="error",
        help="a class name of both: error, join (the same class, images of both count), rename (two classes; B's "
        "becomes 'NAME (2)'); (default: error)",
    )
    add_backbone_path(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out)
    if out.exists():
        raise PassloraError(f"{out} exists already: choose another folder")
    for name in (arguments.first, arguments.second):
        if hub_id(name) is None:
            read_manifest(Path(name))  # refuse before the seconds that torch takes
    from passlora.model.passlora import PassLora

    path = arguments.model_name_or_path
    settings = {"model_name_or_path": path} if path else {}
    model, other = (PassLora.from_pretrained(name, **settings) for name in (arguments.first, arguments.second))
    renamed = model.combine(other, arguments.on_clash)
    model.save_pretrained(out)
    for old, new in renamed.items():
        print(
            f"{old}: " + ("one class, of the images of both" if old == new else f"that of {arguments.second} is {new}")
        )
    print(f"{out} knows {len(model.classes)} classes; ask it: passlora predict {out} IMAGE...")
    return 0
