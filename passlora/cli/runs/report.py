"""passlora report: a run as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from passlora import files
from passlora.cli.arguments import add_command


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "report",
        "write a run as one HTML page",
        "Write a run of passlora train as one HTML page that opens offline: numbers, curves, matrices, every class, "
        "calibration, corruptions (after passlora robustness), settings; other runs beside it.",
    )
    parser.add_argument("folder", metavar="RUN", help="the folder of a run, such as runs/digits")
    parser.add_argument("--compare", nargs="+", default=[], metavar="RUN", help="folders of runs to show beside it")
    parser.add_argument("--html", default="report.html", metavar="FILE", help="the page (default: report.html)")
    parser.add_argument(
        "--plots", metavar="FOLDER", help="also save its pictures here, as PNG, SVG and PDF, for a paper"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    from passlora.analysis import page
    from passlora.analysis.run_folder import read_runs

    runs = read_runs([Path(folder) for folder in (arguments.folder, *arguments.compare)])
    files.write_text(Path(arguments.html), page.render(runs))
    if arguments.plots:
        page.save_plots(runs, Path(arguments.plots))
    print(f"saved {arguments.html}: open it in any browser")
    if arguments.plots:
        print(f"saved its pictures in {arguments.plots}")
    return 0
