"""`passlora report`: a run, alone or beside others, as one HTML file that opens offline and runs nothing it needs.

Everything that is read from a run's folder may come from a stranger: it is text, escaped, or a number.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from passlora import __version__
from passlora.analysis import svg
from passlora.config import LOCAL_DATA, read_yaml
from passlora.data.corruptions import GROUPS, ROBUSTNESS
from passlora.display.tables import each_method
from passlora.errors import PassloraError
from passlora.folder import layout
from passlora.folder.manifest import MANIFEST, read_manifest
from passlora.training.metrics import class_counts

MAX_CELLS = 24  # tasks or classes up to which a matrix is a table; a picture beyond
NEEDED = (
    *("preset", "inference", "inference_modes", "compare", "task_sizes", "seconds"),
    *("last", "avg", "forgetting", "stage_accuracy", "accuracy_matrix"),
)
METRICS = ("last", "avg", "forgetting")


@dataclass
class Run:
    """What a run's folder tells."""

    name: str
    folder: Path
    results: dict[str, Any]
    confusion: np.ndarray | None
    settings: dict[str, Any]
    robustness: dict[str, Any] | None

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The results of each seed."""
        return list(self.results["runs"].values()) if "runs" in self.results else [self.results]

    @property
    def classes(self) -> list[str]:
        sizes = self.results["task_sizes"]
        return list(self.parts[0].get("classes", map(str, range(sum(sizes)))))

    @property
    def tasks(self) -> list[int]:
        """The task of each class."""
        return [task for task, size in enumerate(self.results["task_sizes"]) for _ in range(size)]

    @property
    def first(self) -> tuple[str, Path]:
        """How to speak of the seed that stands for all where no mean is shown, and the folder of its model."""
        if "runs" not in self.results:
            return "", self.folder
        name = next(iter(self.results["runs"]))
        return f" ({name.replace('_', ' ')}, the first of {len(self.parts)})", self.folder / name

    @property
    def bins(self) -> np.ndarray | None:
        found = [part["calibration"] for part in self.parts if "calibration" in part]
        return np.array(found).sum(axis=0) if found else None


def read_runs(folders: list[Path]) -> list[Run]:
    """With names that tell them apart: the folder's own, or as much of its path as it takes."""
    runs = [read_run(folder) for folder in folders]
    parts = [run.folder.resolve().parts for run in runs]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(set(parts)) and depth < max(map(len, parts)):
        depth += 1
    for run, part in zip(runs, parts, strict=True):
        run.name = "/".join(part[-depth:])
    return runs


def read_run(folder: Path) -> Run:
    try:
        results = json.loads((folder / layout.RESULTS).read_text(encoding="utf-8"))
        if not results.get("finished"):
            raise PassloraError(f"{folder} is not finished: the same passlora train command goes on with it")
        missing = [name for name in NEEDED if name not in results]
        if missing:
            raise KeyError(missing[0])
        runs = results.get("runs", {})
        if not all(re.fullmatch(r"(seed|order)_\d+", name) for name in runs):
            raise ValueError("a run's name")
        seeds = [folder / name for name in runs] or [folder]
        same_order = all(run.get("classes") == results_of(results).get("classes") for run in runs.values())
        return Run(
            folder.resolve().name,
            folder,
            results,
            add_up([read_confusion(seed / layout.CONFUSION) for seed in seeds]) if same_order else None,
            read_yaml(str(folder / layout.CONFIG)) if (folder / layout.CONFIG).is_file() else {},
            read_robustness(folder),
        )
    except FileNotFoundError:
        raise PassloraError(f"{folder} holds no {layout.RESULTS}: it is no run of passlora train") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PassloraError(f"{folder} holds a run that cannot be read ({type(error).__name__}: {error})") from None


def read_confusion(path: Path) -> np.ndarray | None:
    if not path.is_file():
        return None
    with open(path, newline="", encoding="utf-8") as file:
        return np.array([[int(cell) for cell in row[1:]] for row in list(csv.reader(file))[1:]])


def results_of(results: dict[str, Any]) -> dict[str, Any]:
    """The results themselves, or those of the first seed."""
    return next(iter(results["runs"].values())) if "runs" in results else results


def read_robustness(folder: Path) -> dict[str, Any] | None:
    """What `passlora robustness` left, if the model is still the one it looked at."""
    path = folder / "eval" / ROBUSTNESS
    if not path.is_file() or not (folder / MANIFEST).is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["learnt"] != read_manifest(folder).tasks[-1].learnt:
        return None
    return {
        "images": int(found["images"]),
        "severity": int(found["severity"]),
        "clean": float(found["clean"]),
        "accuracy": {str(name): float(value) for name, value in found["accuracy"].items()},
    }


def add_up(matrices: list[np.ndarray | None]) -> np.ndarray | None:
    known = [matrix for matrix in matrices if matrix is not None]
    return np.sum(known, axis=0) if known and len(known) == len(matrices) else None


# --- pieces ------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Cells are ready HTML."""
    top = "".join(f"<th scope=col>{cell}</th>" for cell in head)
    body = "".join(
        f"<tr><th scope=row>{row[0]}</th>{''.join(c if c.startswith('<td') else f'<td>{c}</td>' for c in row[1:])}</tr>"
        for row in rows
    )
    return f'<div class=wide><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def heat(value: float | None, words: str | None = None) -> str:
    """A cell coloured by a number from 0 to 100."""
    if value is None:
        return "<td></td>"
    return f'<td style="--v:{min(max(value / 100, 0), 1):.3f}">{words or f"{value:.0f}"}</td>'


def numbers(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def section(name: str, title: str, *parts: str) -> str:
    return f'<section><h2 id="{name}">{escape(title)}</h2>{"".join(parts)}</section>'


def with_deviation(part: dict[str, Any], metric: str) -> str:
    spread = part.get("std", {}).get(metric)
    return f"{part[metric]:.1f}" + (f" ± {spread:.1f}" if spread is not None else "")


def matrix_picture(share: np.ndarray, description: str) -> str:
    """A square a cell: white is 0, dark is 1."""
    from PIL import Image

    shade = np.stack([255 - 232 * share**0.6, 255 - 190 * share**0.6, 255 - 120 * share**0.6], axis=-1)
    side = len(share) * max(1, 600 // len(share))
    image = Image.fromarray(shade.astype(np.uint8)).resize((side, side), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img class=pixels alt="{escape(description, quote=True)}" src="data:image/png;base64,{data}">'


# --- sections ----------------------------------------------------------------------------------------------------


def headline(run: Run) -> str:
    results = run.results
    tiles = {
        "last accuracy (%)": with_deviation(results, "last"),
        "average over tasks (%)": with_deviation(results, "avg"),
        "forgetting (points)": with_deviation(results, "forgetting"),
    }
    if all("ece" in part for part in run.parts):
        tiles["calibration error (%)"] = f"{np.mean([part['ece'] for part in run.parts]):.1f}"
    tiles["classes in tasks"] = f"{sum(results['task_sizes'])} in {len(results['task_sizes'])}"
    if "prototype_entries" in run.parts[0]:
        tiles["numbers kept of old classes"] = f"{run.parts[0]['prototype_entries']:,}"
    tiles["seconds"] = f"{results['seconds']:,.0f}"
    return "<dl class=tiles>" + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in tiles.items()) + "</dl>"


def methods(runs: list[Run]) -> dict[str, dict[str, Any]]:
    """Everything that has a curve: each run under each inference mode, and the presets compared within it."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        for name, part in each_method(run.results):
            named = name if len(runs) == 1 else f"{run.name}: {name}"
            found[named] = {**part, "task_sizes": run.results["task_sizes"]}
    return found


def comparison(runs: list[Run]) -> str:
    rows = [[escape(name), *(with_deviation(part, m) for m in METRICS)] for name, part in methods(runs).items()]
    return section(
        "methods",
        "Methods",
        "<p>Percent. <b>last</b>: over all classes at the end; <b>avg</b>: mean over tasks of the accuracy over all "
        "classes seen by then; <b>forgetting</b>: mean drop of earlier tasks from their best.</p>",
        table(["method", *METRICS], rows),
    )


def accuracy_curves(runs: list[Run]) -> str:
    series = {
        name: (list(accumulate(part["task_sizes"])), part["stage_accuracy"]) for name, part in methods(runs).items()
    }
    words = "; ".join(f"{name} from {values[0]:.1f} to {values[-1]:.1f}" for name, (_, values) in series.items())
    chart = svg.curves(series, f"Accuracy over all classes seen, after each task: {words}.", "classes seen")
    seen = sorted({n for counts, _ in series.values() for n in counts})
    at = {name: dict(zip(counts, values, strict=True)) for name, (counts, values) in series.items()}
    rows = [[escape(name), *(f"{known[n]:.1f}" if n in known else "" for n in seen)] for name, known in at.items()]
    return section(
        "curves",
        "Accuracy after each task",
        f"<figure>{chart}</figure>",
        numbers("The numbers", table(["method", *map(str, seen)], rows)),
    )


def accuracy_matrix(run: Run) -> str:
    matrix = run.results["accuracy_matrix"]
    explain = (
        "<p>Row: after learning that task. Column: accuracy (%) on that task's classes, among all classes seen.</p>"
    )
    if len(matrix) > MAX_CELLS:
        filled = np.array([[0.0 if value is None else value for value in row] for row in matrix])
        description = "Accuracy matrix: rows are tasks learnt, columns tasks tested; darker is better"
        return section("matrix", "Task by task", explain, matrix_picture(filled / 100, description))
    head = ["after", *(f"task {i}" for i in range(len(matrix)))]
    rows = [[f"task {i}", *map(heat, row)] for i, row in enumerate(matrix)]
    return section("matrix", "Task by task", explain, table(head, rows, "heat"))


def biases(run: Run) -> str:
    """Old for new and new for old; and how far the old classes' means have moved, where that was measured."""
    part = run.parts[0]
    known = [(task, pair) for task, pair in enumerate(part.get("bias", [])) if pair is not None]
    if not known:
        return ""
    rows = [[f"task {task}", f"{old:.1f}", f"{new:.1f}"] for task, (old, new) in known]
    content = [
        "<p>Share (%) of images of old classes that are taken for one of the task just learnt, and of new images taken "
        "for an old class. A model without memory takes nearly everything for new.</p>",
        table(["after", "old taken for new", "new taken for old"], rows),
    ]
    if part.get("drift"):
        tasks = len(part["drift"])
        head = ["after", *(f"task {i}" for i in range(tasks))]
        moved = [
            [f"task {i}", *(f"{d:.2f}" for d in row), *[""] * (tasks - i - 1)] for i, row in enumerate(part["drift"])
        ]
        content += [
            "<p>Prototype drift: how far the true mean of a class has moved from the stored one, in units of the "
            "typical distance of an image from its class's mean.</p>",
            table(head, moved),
        ]
    return section("bias", f"Old against new{run.first[0]}", *content)


def confusions(run: Run) -> str:
    if run.confusion is None:
        return ""
    classes, confusion = run.classes, run.confusion
    mixed = confusion - np.diag(np.diagonal(confusion))
    worst = np.argsort(-mixed, axis=None, kind="stable")[:10]
    pairs = [divmod(int(at), len(classes)) for at in worst if mixed.flat[at]]
    listed = "".join(
        f"<li>{escape(classes[a])} taken for {escape(classes[b])}: {mixed[a, b]} of {confusion[a].sum()} images</li>"
        for a, b in pairs
    )
    share = 100 * confusion / confusion.sum(axis=1, keepdims=True).clip(min=1)
    if len(classes) <= MAX_CELLS:
        rows = [[escape(name), *map(heat, row)] for name, row in zip(classes, share.tolist(), strict=True)]
        shown = table(["true, as %", *map(escape, classes)], rows, "heat")
    else:
        right = float(np.diagonal(share).mean())
        description = (
            f"Confusion matrix of {len(classes)} classes in the order of learning, rows true, columns predicted; on "
            f"average {right:.0f}% of a class lie on the diagonal. The list below names the most frequent confusions."
        )
        shown = matrix_picture(share / 100, description)
    return section(
        "confusion",
        "What is taken for what",
        "<p>Rows: true classes, in the order of learning. Columns: what the model said.</p>",
        shown,
        f"<p>Most frequent:</p><ul>{listed or '<li>nothing</li>'}</ul>",
    )


def per_class(run: Run) -> str:
    if run.confusion is None:
        return ""
    right, total = class_counts(run.confusion)
    rows = []
    for i, (name, task) in enumerate(zip(run.classes, run.tasks, strict=True)):
        others = run.confusion[i].copy()
        others[i] = 0
        worst = escape(run.classes[int(others.argmax())]) if others.any() else ""
        accuracy = 100 * right[i] / max(total[i], 1)
        cells = f"<td>{task}</td><td>{total[i]}</td>{heat(accuracy, f'{accuracy:.1f}')}<td class=text>{worst}</td>"
        rows.append(f"<tr><th scope=row class=text>{escape(name)}</th>{cells}</tr>")
    head = (
        "<th scope=col>class</th><th scope=col data-kind=number>task</th><th scope=col data-kind=number>images</th>"
        "<th scope=col data-kind=number>accuracy (%)</th><th scope=col class=text>most often taken for</th>"
    )
    return section(
        "classes",
        "Class by class",
        "<p hidden><label>Search: <input type=search id=class-search autocomplete=off></label></p>",
        f'<div class=wide><table class="sortable" data-search=class-search><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>",
    )


def calibration(run: Run) -> str:
    if run.bins is None:
        return ""
    images, right, confidence = run.bins.T
    error = 100 * np.abs(right - confidence).sum() / images.sum()
    mean_confidence, mean_accuracy = 100 * confidence.sum() / images.sum(), 100 * right.sum() / images.sum()
    lean = "more sure than right" if mean_confidence > mean_accuracy else "less sure than it could be"
    sentence = (
        f"On average the model believes to be right in {mean_confidence:.1f}% of images, and it is in "
        f"{mean_accuracy:.1f}%: it is {lean}. Expected calibration error (15 bins): {error:.1f}%."
    )
    rows = [
        [f"up to {100 * (i + 1) / len(images):.0f}", f"{n:.0f}", f"{100 * r / n:.1f}", f"{100 * c / n:.1f}"]
        for i, (n, r, c) in enumerate(run.bins)
        if n
    ]
    return section(
        "calibration",
        "Calibration",
        f"<p>{sentence}</p><figure>{svg.reliability(run.bins.tolist(), f'Reliability diagram. {sentence}')}</figure>",
        numbers("The numbers", table(["confidence (%)", "images", "accuracy (%)", "mean confidence (%)"], rows)),
    )


def robustness(run: Run) -> str:
    model = run.first[1]
    if run.robustness is None and not (model / MANIFEST).is_file():
        return ""  # a baseline, which leaves no model
    if run.robustness is None:
        command = f"passlora robustness {shlex.quote(str(model))} --data DATA"
        return section(
            "robustness",
            "Damaged images",
            f"<p>Not measured. To measure it, and see it in the report of that folder:</p><pre>{escape(command)}</pre>",
        )
    accuracy, clean = run.robustness["accuracy"], run.robustness["clean"]
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    mean = float(np.mean(list(accuracy.values())))
    worst = min(accuracy, key=lambda name: accuracy[name])
    sentence = (
        f"Severity {run.robustness['severity']} of 5, {run.robustness['images']} images: {clean:.1f}% on clean images, "
        f"{mean:.1f}% on average over {len(accuracy)} corruptions, least under {worst.replace('_', ' ')} "
        f"({accuracy[worst]:.1f}%)."
    )
    names = ["clean", *(name.replace("_", " ") for name in accuracy)]
    rows = [
        [escape(name.replace("_", " ")), group_of.get(name, ""), f"{value:.1f}", f"{clean - value:.1f}"]
        for name, value in accuracy.items()
    ]
    return section(
        "robustness",
        "Damaged images",
        f"<p>{escape(sentence)}</p><figure>{svg.bars(names, [clean, *accuracy.values()], sentence)}</figure>",
        numbers("The numbers", table(["corruption", "kind", "accuracy (%)", "drop"], rows)),
    )


def cost(run: Run) -> str:
    part = run.parts[0]
    if "train_seconds" not in part:
        return ""
    rows = [
        [f"task {task}", f"{train:.1f}", f"{test:.1f}"]
        for task, (train, test) in enumerate(zip(part["train_seconds"], part["test_seconds"], strict=True))
        if train is not None
    ]
    kept = (
        f"<p>Kept of all classes: {part['prototype_entries']:,} numbers ({part['prototype_bytes'] / 1024:.0f} kB), no "
        f"image. Peak memory of the process: {part.get('peak_memory_bytes', 0) / 2**20:,.0f} MB.</p>"
    )
    times = table(["", "learning (s)", "testing all classes seen (s)"], rows)
    return section("cost", f"Time and memory{run.first[0]}", kept, numbers("Seconds a task", times))


def settings(run: Run) -> str:
    config, again, folder = (
        shlex.quote(str(p)) for p in (run.folder / layout.CONFIG, f"{run.folder}-again", run.folder)
    )
    lines = [f"passlora train --config {config} --output_dir {again}", f"passlora report {folder} --html report.html"]
    if str(run.settings.get("dataset_name", "")).startswith(LOCAL_DATA):
        lines[0] += " --dataset_name PATH   # the data lay on the machine of the run"
    if (run.first[1] / MANIFEST).is_file():
        lines.append(f"passlora info {shlex.quote(str(run.first[1]))}")
    commands = "\n".join(lines)
    rows = [[escape(str(name)), f"<td class=text>{escape(str(value))}</td>"] for name, value in run.settings.items()]
    return section(
        "settings",
        "Settings, and how to get this again",
        f"<pre>{escape(commands)}</pre>",
        numbers("Every setting", table(["setting", "value"], rows)) if rows else "",
        f"<p class=soft>passlora {escape(str(run.results.get('version', __version__)))}</p>",
    )


def render(runs: list[Run]) -> str:
    """The page: the first run in full, the others beside it in curves and numbers."""
    run = runs[0]
    assets = resources.files("passlora") / "assets"
    style, script = ((assets / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    seeds = len(run.parts)
    about = [
        str(run.results["preset"]),
        f"{run.results['inference']} inference",
        str(run.settings.get("model_name_or_path", "")),
        str(run.settings.get("dataset_name", "")).split(":")[0],
        f"{seeds} seeds, mean ± deviation" if seeds > 1 else f"seed {run.results.get('seed', 0)}",
    ]
    sections = [
        comparison(runs),
        accuracy_curves(runs),
        accuracy_matrix(run),
        biases(run),
        confusions(run),
        per_class(run),
        calibration(run),
        robustness(run),
        cost(run),
        settings(run),
    ]
    links = "".join(
        f'<a href="#{part.split(chr(34))[1]}">{part.split(">")[2].split("<")[0]}</a>' for part in sections if part
    )
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f'<meta http-equiv=Content-Security-Policy content="{policy}">'
        f"<title>{escape(run.name)}: passlora report</title><style>{style}</style></head><body>"
        f"<header><h1>{escape(run.name)}</h1><p class=soft>{escape(' · '.join(filter(None, about)))}</p>"
        f"{headline(run)}<nav aria-label=Sections>{links}</nav></header><main>{''.join(sections)}</main>"
        f"<script>{script}</script></body></html>\n"
    )


def save_plots(runs: list[Run], folder: Path) -> None:
    """The page's pictures as files for a paper."""
    from passlora.display import figures
    from passlora.training.evaluation import Evaluation

    run, results = runs[0], dict(runs[0].results)
    results["preset"], *others = methods(runs)
    results["compare"] = {name: methods(runs)[name] for name in others}
    for kind in ("png", "svg", "pdf"):
        figures.accuracy_curves(results, folder / f"accuracy.{kind}")
        figures.accuracy_matrix(results, folder / f"accuracy_matrix.{kind}")
        if run.confusion is not None:
            figures.confusion_matrix(run.classes, run.confusion, folder / f"confusion_matrix.{kind}")
            if run.bins is not None:
                figures.reliability(Evaluation(run.confusion, run.bins), folder / f"reliability.{kind}")
        if run.robustness is not None:
            figures.robustness(run.robustness, folder / f"robustness.{kind}")
