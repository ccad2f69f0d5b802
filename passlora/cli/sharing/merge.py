"""passlora merge: plain weights, for serving without peft."""

from __future__ import annotations

import argparse
from typing import Any

from passlora.cli.arguments import add_command, add_model, add_task_flags, load_model


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "merge",
        "fold the adapter into plain weights, for serving without peft",
        "Write a folder with the backbone, adapter folded in, and the head as its classifier.",
    )
    add_model(parser)
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument(
        "--format",
        choices=["timm", "transformers"],
        default="timm",
        help="timm: timm.create_model('local-dir:OUT', pretrained=True) and pipeline('image-classification', "
        "model='OUT') of stock transformers read it, without passlora, one view; transformers: the pipeline reads it "
        "after import passlora.serving, with all views inside (default: timm)",
    )
    add_task_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    out = arguments.out
    load_model(arguments).merge(out, arguments.format)
    if arguments.format == "timm":
        print(f"saved in {out}; read it with timm.create_model('local-dir:{out}', pretrained=True)")
    else:
        print(f"saved in {out}; import passlora.serving, then pipeline('image-classification', model='{out}') reads it")
    return 0
