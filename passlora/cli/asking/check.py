"""passlora check: a folder of images, looked at before it is learnt from."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from passlora.cli.arguments import add_command
from passlora.display.tables import table

SHOWN = 10  # of a kind


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "check",
        "look at a folder of images before it is learnt from",
        "Classes and how many images each has; images that cannot be read, that lie in no class's folder, that are "
        "there twice, or look nearly the same, in one class or in several; files of a kind that is not read. Nothing "
        "is changed. The exit code is 1 if something ought to be mended.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="<class>/*.jpg, or train/<class>/* and test/<class>/*")
    parser.add_argument("--json", action="store_true", help="everything, for a program to read")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from passlora.data.checking import FEW, check_folder

    report = check_folder(Path(arguments.folder))
    if arguments.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
        return 0 if report.is_fine else 1
    splits = list(report.counts)
    names = sorted({name for counts in report.counts.values() for name in counts})
    rows = [["class", *(split or "images" for split in splits)]]
    rows += [[name, *(str(report.counts[split].get(name, 0)) for split in splits)] for name in names]
    rows.append([f"{len(names)} classes", *(str(sum(report.counts[split].values())) for split in splits)])
    print(table(rows))
    told(f"fewer than {FEW} images to learn from", [f"{name} ({count})" for name, count in report.few.items()])
    told("cannot be read", [f"{name}: {why}" for name, why in report.unreadable.items()])
    told("images in no class's folder, which are not read", report.loose)
    for what, groups in (("the same pixels", report.duplicates), ("nearly the same picture", report.near)):
        across = report.across(groups)
        told(f"{what} in several classes or splits", [" = ".join(group) for group in across])
        told(f"{what} in one class", [" = ".join(group) for group in groups if group not in across])
    told("files of a kind that is not read", [f"{suffix} ({count})" for suffix, count in report.passed_over.items()])
    mend = "mend these before passlora learn, or leave out with --on_unreadable skip what cannot be read"
    mend = mend if names else f"no images: expected {arguments.folder}/<class>/*.jpg"
    print("\nnothing to mend" if report.is_fine else f"\n{mend}")
    return 0 if report.is_fine else 1


def told(what: str, which: list[str]) -> None:
    if which:
        more = f"\n  ... and {len(which) - SHOWN} more" if len(which) > SHOWN else ""
        print(f"\n{what}:\n  " + "\n  ".join(which[:SHOWN]) + more)
