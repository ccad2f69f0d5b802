"""`passlora report`: a run, alone or beside others, as one HTML file that opens offline and runs nothing it needs.

Everything that is read from a run's folder may come from a stranger: the template escapes it, or it is a number here.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from passlora.analysis import sections
from passlora.analysis.run_folder import Run
from passlora.display import figures, templates
from passlora.errors import PassloraError
from passlora.training.evaluation import Evaluation

NOT_NUMBERS = (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError)


@contextmanager
def showing(run: Run) -> Iterator[None]:
    """What a stranger's folder holds instead of numbers, and the like, is one clear error."""
    try:
        yield
    except NOT_NUMBERS as error:
        words = " ".join(str(error).split())[:200]
        raise PassloraError(f"{run.folder} cannot be shown ({type(error).__name__}: {words})") from error


def render(runs: list[Run]) -> str:
    """The page: the first run in full, the others beside it in curves and numbers."""
    from markupsafe import Markup

    run = runs[0]
    assets = resources.files("passlora") / "assets"
    style, script = ((assets / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    with showing(run):
        values = {
            "style": Markup(style),
            "script": Markup(script),
            "script_digest": digest,
            "name": run.name,
            "about": sections.about(run),
            "tiles": sections.tiles(run),
            "first_seed": run.first_seed,
            "sections": {
                "methods": sections.comparison(runs),
                "curves": sections.accuracy_curves(runs),
                "matrix": sections.accuracy_matrix(run),
                "bias": sections.biases(run),
                "confusion": sections.confusions(run),
                "classes": sections.per_class(run),
                "calibration": sections.calibration(run),
                "robustness": sections.robustness(run),
                "cost": sections.cost(run),
                "settings": sections.settings(run),
            },
        }
        html = templates.fill("report.html.j2", values)
        html.encode("utf-8")  # a name may hold half a letter, which no file can
    return html


def save_plots(runs: list[Run], folder: Path) -> None:
    """The page's pictures as files for a paper."""
    run = runs[0]
    with showing(run):
        for kind in ("png", "svg", "pdf"):
            figures.accuracy_curves(sections.curves_of(runs), folder / f"accuracy.{kind}")
            figures.accuracy_matrix(run.results, folder / f"accuracy_matrix.{kind}")
            if run.confusion is not None:
                figures.confusion_matrix(run.classes, run.confusion, folder / f"confusion_matrix.{kind}")
                if run.bins is not None:
                    figures.reliability(Evaluation(run.confusion, run.bins), folder / f"reliability.{kind}")
            if run.robustness is not None:
                figures.robustness(run.robustness, folder / f"robustness.{kind}")
