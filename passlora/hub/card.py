"""The model card: README.md of a model's folder, written from its manifest alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from passlora import files
from passlora.config import describe, is_repo_id
from passlora.display import figures, templates
from passlora.folder import layout
from passlora.folder.layout import CARD, NOTES, PICTURE
from passlora.folder.manifest import Manifest, split_local, versions

MAX_BYTES = 2**20  # of a card that is read
FRONT = re.compile(r"---\n(.*?)\n---(?:\n|\Z)", re.S)
METRICS = {
    "last": "accuracy over all classes after the last task (%)",
    "avg": "mean over tasks of the accuracy over all classes seen (%)",
    "forgetting": "mean drop of a task's accuracy since its best (points)",
}


@dataclass
class TaskLine:
    """A task as the card tells of it."""

    names: list[str]
    seen: int  # classes known by then
    tested: int  # of them, those that had test images
    accuracy: str  # "" if not tested

    @property
    def is_whole(self) -> bool:
        return self.tested == self.seen


def write_card(folder: Path, manifest: Manifest) -> None:
    """README.md, and the picture it shows."""
    tasks = manifest.tasks
    stages = [task.accuracy for task, line in zip(tasks, task_lines(manifest), strict=True) if line.is_whole]
    if len(stages) == len(tasks) > 1 and None not in stages:
        sizes, preset = [len(task.classes) - len(task.forgotten) for task in tasks], manifest.settings["preset"]
        curve = {"task_sizes": sizes, "preset": preset, "stage_accuracy": stages, "compare": {}, **manifest.results}
        figures.accuracy_curves(curve, folder / PICTURE)
    else:
        (folder / PICTURE).unlink(missing_ok=True)  # of an earlier state
    files.write_text(folder / CARD, render(folder, manifest, None, [folder / CARD]))


def render(folder: Path, manifest: Manifest, repo_id: str | None = None, cards: Sequence[Path] = ()) -> str:
    """The card's text; without a `repo_id` its quick start is for someone in the folder itself.

    What people wrote into `cards`, earlier ones of the same model, stays: of each part the first one's that has it.
    """
    written = [kept(path) for path in cards]
    default = base_model(manifest.settings)[1]
    licence = next((licence for licence, _ in written if licence not in (None, default)), None)
    notes = next((notes for _, notes in written if notes.strip()), "")
    title, name = (repo_id or folder.resolve().name).split("/")[-1], repo_id or "."
    settings, lines = manifest.settings, task_lines(manifest)
    values = {
        "metadata": metadata(manifest, title, licence),
        "title": title,
        "name": name,
        "settings": settings,
        "is_local": is_local(settings),
        "backbone": settings.get("model_architecture") or settings["model_name_or_path"],
        "timm_name": timm_name(settings),
        "classes": len(manifest.classes),
        "tasks": lines,
        "last": lines[-1],
        "last_folder": layout.task_folder(len(lines) - 1),
        "results": {METRICS[metric]: f"{value:.1f}" for metric, value in manifest.results.items()},
        "picture": PICTURE if (folder / PICTURE).is_file() else None,
        "training": {name: describe(value) for name, value in settings.items() if value not in (None, [])},
        "versions": versions(),
        "notes_mark": NOTES,
    }
    return templates.fill("card.md.j2", values, {"md": escape, "python": repr}) + notes


def read_text(path: Path) -> str:
    return path.read_bytes()[:MAX_BYTES].decode("utf-8", errors="replace").replace("\r\n", "\n")


def is_only_metadata(path: Path) -> bool:
    """Whether a card has nothing in it that a person wrote, as that of a repository just made on the website."""
    text = read_text(path)
    front = FRONT.match(text)
    return not text[front.end() if front else 0 :].strip()


def kept(path: Path) -> tuple[str | None, str]:
    """What a person may have written into the card there is: a licence, and notes at its end."""
    import yaml

    if not path.is_file():
        return None, ""
    text = read_text(path)
    front = FRONT.match(text)
    body = text[front.end() if front else 0 :]
    notes = text.split(NOTES, 1)[1].removeprefix("\n") if NOTES in text else body  # without our line, all is a person's
    try:
        content = yaml.safe_load(front.group(1)) if front else {}
    except (yaml.YAMLError, ValueError, RecursionError):  # whatever a person, or a stranger, wrote there
        content = {}
    licence = content.get("license") if isinstance(content, dict) else None
    return licence if isinstance(licence, str) else None, notes


def metadata(manifest: Manifest, title: str, licence: str | None) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    base, base_licence = base_model(manifest.settings)
    named = dict.fromkeys(task.dataset or "" for task in manifest.tasks)
    datasets = [name for name in named if is_repo_id(name)]
    last = manifest.tasks[-1].dataset
    evaluation = [
        EvalResult(
            task_type="image-classification",
            dataset_type=last or "imagefolder",
            dataset_name=last or "local images",
            metric_type="accuracy" if metric == "last" else metric,
            metric_name=METRICS[metric],
            metric_value=round(value, 2),
        )
        for metric, value in manifest.results.items()
    ]
    data = ModelCardData(
        model_name=title,
        library_name="peft" if has_adapter(manifest.settings) else "passlora",
        base_model=base,
        datasets=datasets or None,
        license=licence or base_licence,
        pipeline_tag="image-classification",
        tags=["passlora", "class-incremental-learning", "continual-learning", "pass++", "timm"]
        + (["lora"] if has_adapter(manifest.settings) else []),
        eval_results=evaluation or None,
    )
    return data.to_yaml()


def base_model(settings: dict[str, Any]) -> tuple[str | None, str]:
    """Hub id and licence of the backbone, as far as they are known."""
    name = settings["model_name_or_path"]
    if name == "passlora/vit-mini":
        return name, "apache-2.0"
    if is_local(settings) or not settings["pretrained"]:
        return None, "other"  # a file of the user's, or trained from scratch
    if "/" in name:
        return re.sub(r"^hf[-_]hub:", "", name).split("@")[0], "other"
    import timm

    known = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return (known.hf_hub_id if known else None), (known.license if known else None) or "other"


def has_adapter(settings: dict[str, Any]) -> bool:
    return settings["lora_r"] > 0 and settings["adapt_tasks"] != "none"


def is_local(settings: dict[str, Any]) -> bool:
    """Whether the backbone came from a file or folder, which whoever reads the card must have."""
    return split_local(settings["model_name_or_path"], settings["model_architecture"])[1] is not None


def timm_name(settings: dict[str, Any]) -> str | None:
    """What timm calls the backbone, if stock peft can put an adapter of ours on it."""
    name = settings["model_name_or_path"]
    if not has_adapter(settings) or not settings["pretrained"] or is_local(settings) or name == "passlora/vit-mini":
        return None
    if settings["feature_blocks"] > 1:  # timm's own features are those of one block
        return None
    return f"hf-hub:{name}" if "/" in name and ":" not in name else name


def task_lines(manifest: Manifest) -> list[TaskLine]:
    """Of classes by today's names, and of those alone that are known today."""
    lines, seen = [], 0
    for task, names in zip(manifest.tasks, manifest.classes_by_task, strict=True):
        seen += len(task.classes) - len(task.forgotten)
        accuracy = "" if task.accuracy is None else f"{task.accuracy:.1f}"
        lines.append(TaskLine(names, seen, seen if task.tested is None else task.tested, accuracy))
    return lines


def escape(text: str) -> str:
    """A name from anywhere, as text within a line of Markdown."""
    text = " ".join(text.split())
    return re.sub(r"([\\`*_{}\[\]<>|#!])", r"\\\1", text)
