"""The commands of a model's life: learn, predict, eval, robustness, info, rollback, merge, push, pull."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from passlora import files
from passlora.cli.commands import BORN_WITH, READING
from passlora.cli.flags import chosen_flags
from passlora.config.knobs import Config, hub_id
from passlora.display.tables import confusion_csv, table
from passlora.environment import is_first_process
from passlora.errors import PassloraError
from passlora.folder import layout, store
from passlora.folder.manifest import MANIFEST, read_manifest


def run_command(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    handlers = {
        "learn": learn,
        "predict": predict,
        "eval": evaluate,
        "robustness": robustness,
        "info": info,
        "rollback": rollback,
        "merge": merge,
        "push": push,
        "pull": pull,
    }
    return handlers[arguments.command](arguments)


def load(arguments: argparse.Namespace) -> Any:
    if hub_id(arguments.model) is None:
        read_manifest(Path(arguments.model))  # refuse before the seconds that torch takes
    from passlora.model.passlora import PassLora

    path = arguments.model_name_or_path
    settings = {"model_name_or_path": path} if path else {}
    return PassLora.from_pretrained(arguments.model, arguments.task, arguments.revision, **settings)


def learn(arguments: argparse.Namespace) -> int:
    folder, flags = Path(arguments.model), chosen_flags(arguments)
    reading = checked_reading(arguments, READING)
    flags = {name: value for name, value in flags.items() if name not in reading}
    check_can_learn(folder, flags)  # before anything is written, and before the seconds that torch takes
    with store.lock(folder) if is_first_process() else nullcontext():
        exists = check_can_learn(folder, flags)  # another process may have been faster
        if is_first_process():
            files.tidy(folder)
        if not exists and is_first_process():
            print(f"{folder} is a new model", flush=True)
        from passlora.model.passlora import PassLora

        model = PassLora.from_pretrained(folder, **flags) if exists else PassLora.create(**flags)
        lesson = model.learn(arguments.data, arguments.on_known, folder, **reading)
        model.save_pretrained(folder)
    if not is_first_process():
        return 0
    if lesson.continued_at is not None:
        print(f"continued a lesson that was cut off, from its step {lesson.continued_at}")
    if lesson.untested is not None:
        print(f"passlora: learnt and saved, but not tested: {lesson.untested}", file=sys.stderr)
    if lesson.skipped_classes:
        print(f"skipped, known already: {', '.join(lesson.skipped_classes)}")
    names = ", ".join(lesson.new_classes[:10]) + (", ..." if len(lesson.new_classes) > 10 else "")
    print(f"learnt {len(lesson.new_classes)} classes from {lesson.images} images in {lesson.seconds:.0f} s: {names}")
    shown = {
        "old classes before": lesson.old_before,
        "old classes after": lesson.old_after,
        "new classes": lesson.new_after,
        "all classes": lesson.all_after,
    }
    measured = [[what, f"{value:.1f}%"] for what, value in shown.items() if value is not None]
    if measured:
        print(table(measured))
    print(f"{folder} knows {len(model.classes)} classes now; ask it: passlora predict {folder} IMAGE...")
    return 0 if lesson.untested is None else 1


def checked_reading(arguments: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """The flags that say how data is read, as checked values."""
    given = {name: value for name, value in chosen_flags(arguments).items() if name in names}
    return {name: Config.make(num_tasks=1, **{name: value}).flat()[name] for name, value in given.items()}


def check_can_learn(folder: Path, flags: dict[str, Any]) -> bool:
    """Whether the folder holds a model already; an error if it can neither be taught so, nor become one."""
    if not (folder / MANIFEST).is_file():
        if hub_id(str(folder)) is not None:
            raise PassloraError(
                f"{folder} is not here: to teach a model of the Hub, passlora pull {folder} first; to start a new one "
                f"there, make the folder {folder.parent} first"
            )
        Config.make(**{**flags, "num_tasks": 1})
        store.check_new_model(folder)
        return False
    settled = [name for name in flags if name in BORN_WITH and name != "model_name_or_path"]
    if settled:
        raise PassloraError(f"{settled[0]} was settled when {folder} was made: leave it out")
    read_manifest(folder).config(**flags)
    store.check_no_rollback(folder)
    return True


def evaluate(arguments: argparse.Namespace) -> int:
    reading = checked_reading(arguments, READING)
    model = load(arguments)
    result = model.evaluate(arguments.data, **reading)
    from passlora.display import figures
    from passlora.training import metrics

    scenario, totals = model.scenario, result.confusion.sum(axis=1)
    bias = metrics.bias(result.confusion, scenario, scenario.num_tasks - 1)
    rows = [["", "classes", "images", "accuracy %"]]
    for task in range(scenario.num_tasks):
        part = scenario.classes(task)
        images = int(totals[part.start : part.stop].sum())
        accuracy = f"{metrics.accuracy(result.confusion, part):.1f}" if images else ""
        rows.append([f"task {task}", str(len(part)), str(images), accuracy])
    every = range(scenario.num_classes)
    rows.append(["all", str(len(every)), str(int(totals.sum())), f"{metrics.accuracy(result.confusion, every):.1f}"])
    out = evaluation_folder(arguments)
    files.write_text(out / "confusion_matrix.csv", confusion_csv(model.classes, result.confusion))
    figures.confusion_matrix(model.classes, result.confusion, out / "confusion_matrix.png")
    figures.reliability(result, out / "reliability.png")
    print(f"{table(rows)}\n\ncalibration error (ECE) {result.calibration_error:.1f}%")
    if bias is not None:
        print(f"old classes taken for the last task's {bias[0]:.1f}%, the last task's for old {bias[1]:.1f}%")
    print(f"saved in {out}: confusion_matrix.csv, confusion_matrix.png, reliability.png")
    return 0


def evaluation_folder(arguments: argparse.Namespace) -> Path:
    """Where a look at a model leaves its files: --output_dir, its folder `eval`, or beside us for one on the Hub."""
    here, is_remote = Path(arguments.model), hub_id(arguments.model) is not None
    if arguments.output_dir is None and not is_remote:
        store.check_links(here)
    return Path(arguments.output_dir or (f"{here.name}-eval" if is_remote else here / "eval"))


def robustness(arguments: argparse.Namespace) -> int:
    from passlora.data import corruptions

    names = tuple(arguments.corruptions or corruptions.CORRUPTIONS)
    corruptions.check(names, arguments.severity)
    reading = checked_reading(arguments, (*READING, "max_test_per_class"))
    model = load(arguments)
    parts = dict(model.robustness(arguments.data, arguments.severity, names, **reading))
    found = {name: part.accuracy for name, part in parts.items()}
    clean = found.pop("clean")
    mean = sum(found.values()) / len(found)
    group_of = {name: group for group, members in corruptions.GROUPS.items() for name in members}
    rows = [["", "kind", "accuracy %", "drop"], ["clean", "", f"{clean:.1f}", ""]]
    rows += [[name, group_of[name], f"{value:.1f}", f"{clean - value:.1f}"] for name, value in found.items()]
    rows.append(["mean", "", f"{mean:.1f}", f"{clean - mean:.1f}"])
    out = evaluation_folder(arguments)
    about = {"learnt": model.tasks[-1].learnt, "images": int(parts["clean"].confusion.sum())}  # the model looked at
    content = {**about, "severity": arguments.severity, "clean": clean, "accuracy": found, "mean": mean}
    files.write_json(out / corruptions.ROBUSTNESS, content)
    files.write_text(out / "robustness.csv", "\n".join(",".join(row) for row in rows) + "\n")
    from passlora.display import figures

    for suffix in ("png", "svg"):
        figures.robustness(content, out / f"robustness.{suffix}")
    print(f"{table(rows, (0, 1))}\n\nseverity {arguments.severity} of 5")
    print(f"saved in {out}: robustness.csv, .json, .png and .svg")
    return 0


def rollback(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.model)
    read_manifest(folder)  # nothing is made where there is no model
    from passlora.hub.card import write_card

    with store.lock(folder):
        if arguments.prune:
            gone = store.prune(folder)
            print(f"deleted: {', '.join(gone)}" if gone else "nothing to delete")
            return 0
        manifest = store.rollback(folder, arguments.to_task)
        write_card(folder, manifest)
    print(f"{folder} is what it was after task {arguments.to_task}: {len(manifest.classes)} classes")
    if (folder / layout.BACKUP).is_file():
        last = len(read_manifest(folder, layout.BACKUP).tasks) - 1
        print(f"undo: passlora rollback {folder} --to_task {last}; confirm: passlora rollback {folder} --prune")
    return 0


def merge(arguments: argparse.Namespace) -> int:
    out = arguments.out
    load(arguments).merge(out, arguments.format)
    if arguments.format == "timm":
        print(f"saved in {out}; read it with timm.create_model('local-dir:{out}', pretrained=True)")
    else:
        read = f"pipeline('image-classification', model='{out}')"
        print(f"saved in {out}; after import passlora.serving, read it with {read}")
    return 0


def push(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.model)
    read_manifest(folder)
    from passlora.hub import hub

    with store.lock(folder):
        done = hub.push(
            folder, arguments.repo, arguments.private, arguments.revision, arguments.create_pr, arguments.force
        )
    if arguments.create_pr:
        print(f"opened {done.url}")
    elif not done.changed:
        print(f"{done.url} is up to date")
    else:
        print(f"uploaded to {done.url}" + (f", tag {done.tag}" if done.tag else f", branch {arguments.revision}"))
        where = "" if done.tag else f" --revision {arguments.revision}"
        print(f"ask it: passlora predict {arguments.repo} IMAGE...{where}")
    return 0


def pull(arguments: argparse.Namespace) -> int:
    from passlora.hub import hub

    hub.check_repo_id(arguments.repo)
    folder = Path(arguments.folder or arguments.repo.split("/")[-1])
    manifest = hub.pull(arguments.repo, folder, arguments.revision)
    print(f"{folder} knows {len(manifest.classes)} classes from {len(manifest.tasks)} tasks")
    print(f"look: passlora info {folder}")
    return 0


def info(arguments: argparse.Namespace) -> int:
    """Tasks, classes, dates, accuracies and sizes, from the files alone."""
    name, folder = arguments.model, Path(arguments.model)
    repo_id = hub_id(name)
    if repo_id is not None:
        from passlora.hub import hub

        about = hub.describe_remote(repo_id, arguments.revision)
    else:
        about = store.describe(folder)
    if arguments.json:
        print(json.dumps(about, indent=2))
        return 0
    settings, tasks = about["settings"], about["tasks"]
    lora = f"LoRA r = {settings['lora_r']}" if settings["lora_r"] else "trained whole"
    rows = [["task", "classes", "learnt", "accuracy %", "kB", ""]]
    for i, task in enumerate(tasks):
        classes, kilobytes = task["classes"], f"{task['bytes'] / 1024:.0f}"
        accuracy = "" if task["accuracy"] is None else f"{task['accuracy']:.1f}"
        shown = ", ".join(classes[:6]) + (", ..." if len(classes) > 6 else "")
        rows.append([str(i), str(len(classes)), task["learnt"], accuracy, kilobytes, shown])
    size = f"{about['bytes'] / 1024:,.0f} kB in all"
    print(
        f"{name}: {settings['model_name_or_path']}, {lora}, {settings['preset']}, {settings['inference']} inference\n"
        f"{len(about['classes'])} classes in {len(tasks)} tasks, {size}\n\n{table(rows, (0, 2, 5))}"
    )
    if about["rolled_back"]:
        print(f"rolled back; confirm: passlora rollback {name} --prune")
    return 0


def predict(arguments: argparse.Namespace) -> int:
    """Writes a line an image as soon as its batch is done; returns the exit code."""
    for name in ("top_k", "batch_size"):
        if getattr(arguments, name) < 1:
            raise PassloraError(f"{name} must be at least 1, got {getattr(arguments, name)}")
    paths = list(find_images(arguments.images))
    model = load(arguments)
    writer = Writer(arguments.json, arguments.csv)
    unreadable = 0
    for start in range(0, len(paths), arguments.batch_size):
        readable, images = [], []
        for path in paths[start : start + arguments.batch_size]:
            image = read(path)
            if image is None:
                unreadable += 1
                continue
            readable.append(path)
            images.append(image)
        answers = model.predict(images, arguments.top_k, arguments.views, arguments.batch_size)
        for path, answer in zip(readable, answers, strict=True):
            writer.write(path, [(p.label, p.probability) for p in answer])
    if unreadable:
        print(f"passlora: {unreadable} of {len(paths)} images could not be read", file=sys.stderr)
    return 1 if unreadable else 0


def find_images(names: list[str]) -> Iterator[Path]:
    """Files as named; folders in order of their files' names."""
    from passlora.data.sources import is_image

    for name in names:
        path = Path(name)
        if path.is_dir():
            found = [file for file in sorted(path.rglob("*")) if is_image(file)]
            if not found:
                raise PassloraError(f"no images in {path}")
            yield from found
        else:
            yield path


def read(path: Path) -> Any:
    """The image in RGB, or None after saying why not."""
    from PIL import Image

    from passlora.data.sources import to_rgb

    try:
        with Image.open(path) as image:
            return to_rgb(image)
    except Exception as error:  # Pillow raises many types on damaged files
        reason = "no such file" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
        print(f"passlora: skipped {path}: {reason}", file=sys.stderr)
        return None


class Writer:
    """Predictions to standard output, as text, JSON lines or CSV."""

    def __init__(self, as_json: bool, as_csv: bool) -> None:
        self.as_json, self.csv = as_json, csv.writer(sys.stdout) if as_csv else None
        if self.csv:
            self.csv.writerow(["file", "rank", "label", "probability"])

    def write(self, path: Path, answer: list[tuple[str, float]]) -> None:
        if self.as_json:
            ranked = [{"label": label, "probability": round(p, 6)} for label, p in answer]
            print(json.dumps({"file": str(path), "predictions": ranked}))
        elif self.csv:
            self.csv.writerows([str(path), rank, label, f"{p:.6f}"] for rank, (label, p) in enumerate(answer, start=1))
        else:
            print(f"{path}: " + ", ".join(f"{label} {100 * p:.1f}%" for label, p in answer))
        sys.stdout.flush()
