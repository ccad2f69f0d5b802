"""The model card: README.md of a model's folder, written from its manifest alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from passlora import files
from passlora.config import describe, is_repo_id
from passlora.display import figures
from passlora.folder import layout
from passlora.folder.layout import CARD, NOTES, PICTURE
from passlora.folder.manifest import Manifest, split_local, versions

MAX_BYTES = 2**20  # of a card that is read
METRICS = {
    "last": "accuracy over all classes after the last task (%)",
    "avg": "mean over tasks of the accuracy over all classes seen (%)",
    "forgetting": "mean drop of a task's accuracy since its best (points)",
}
CITATION = """\
@article{zhu2024passpp,
  title   = {PASS++: A Dual Bias Reduction Framework for Non-Exemplar Class-Incremental Learning},
  author  = {Fei Zhu and Xu-Yao Zhang and Zhen Cheng and Cheng-Lin Liu},
  journal = {arXiv preprint},
  year    = {2024},
}"""


def write_card(folder: Path, manifest: Manifest) -> None:
    """README.md, and the picture it shows."""
    results = manifest.results
    stages = [task.accuracy for task in manifest.tasks if task.accuracy is not None]
    if len(stages) == len(manifest.tasks) > 1:
        sizes, preset = [len(task.classes) for task in manifest.tasks], manifest.settings["preset"]
        curve = {"task_sizes": sizes, "preset": preset, "stage_accuracy": stages, "compare": {}, **results}
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
    with_picture = (folder / PICTURE).is_file()
    title, name = (repo_id or folder.resolve().name).split("/")[-1], repo_id or "."
    sections = [
        f"---\n{metadata(manifest, title, licence)}\n---",
        f"# {escape(title)}",
        introduction(manifest),
        f"## Quick start\n\n{quick_start(manifest, name)}",
        f"## Tasks\n\n{task_table(manifest)}",
        *([f"![accuracy over all classes seen, after each task]({PICTURE})"] if with_picture else []),
        f"## Training\n\n{training_table(manifest)}",
        f"## What is stored\n\n{stored(manifest)}",
        f"## Pre-training overlap\n\n{overlap(manifest)}",
        f"## Citation\n\n```bibtex\n{CITATION}\n```",
        NOTES,
    ]
    return "\n\n".join(sections) + "\n" + notes


def is_only_metadata(path: Path) -> bool:
    """Whether a card has front matter and no text, as one that the website makes with a new repository."""
    text = path.read_bytes()[:MAX_BYTES].decode("utf-8", errors="replace")
    return not re.sub(r"^---\n.*?\n---\n?", "", text, count=1, flags=re.S).strip()


def kept(path: Path) -> tuple[str | None, str]:
    """What a person may have written into the card there is: a licence, and notes at its end."""
    import yaml

    if not path.is_file():
        return None, ""
    text = path.read_bytes()[:MAX_BYTES].decode("utf-8", errors="replace")
    notes = text.split(NOTES + "\n", 1)[1] if NOTES + "\n" in text else ""
    front = re.match(r"---\n(.*?)\n---\n", text, re.S)
    try:
        content = yaml.safe_load(front.group(1)) if front else {}
    except (yaml.YAMLError, ValueError, RecursionError):  # whatever a person, or a stranger, wrote there
        content = {}
    licence = content.get("license") if isinstance(content, dict) else None
    return licence if isinstance(licence, str) else None, notes


# --- parts -----------------------------------------------------------------------------------------------------


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
        library_name="peft" if manifest.settings["lora_r"] else "passlora",
        base_model=base,
        datasets=datasets or None,
        license=licence or base_licence,
        pipeline_tag="image-classification",
        tags=["passlora", "class-incremental-learning", "continual-learning", "pass++", "timm"]
        + (["lora"] if manifest.settings["lora_r"] else []),
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


def is_local(settings: dict[str, Any]) -> bool:
    """Whether the backbone came from a file or folder, which whoever reads the card must have."""
    return split_local(settings["model_name_or_path"], settings["model_architecture"])[1] is not None


def introduction(manifest: Manifest) -> str:
    results = manifest.results
    shown = f" It is right on {results['last']:.1f}% of test images over all of them." if "last" in results else ""
    how = f"LoRA adapters of rank {manifest.settings['lora_r']}" if manifest.settings["lora_r"] else "all its weights"
    backbone = manifest.settings.get("model_architecture") or manifest.settings["model_name_or_path"]
    learnt = (
        f"{count(len(manifest.classes), 'class', 'classes')}, learnt in {count(len(manifest.tasks), 'task', 'tasks')}"
    )
    return (
        f"An image classifier that knows {learnt} one after the other by passlora ({manifest.settings['preset']}), on "
        f"{escape(backbone)} with {how}; no image of an earlier task was kept or seen again.{shown}"
    )


def count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def quick_start(manifest: Manifest, name: str) -> str:
    settings, last = manifest.settings, len(manifest.tasks) - 1
    backbone = f", model_name_or_path={settings['model_name_or_path']!r}" if is_local(settings) else ""
    here = "" if name != "." else "In this folder (or with its path in place of the dot):\n\n"
    command = f"passlora predict {name} photo.jpg"
    parts = [
        f"""\
{here}```python
from PIL import Image

from passlora import PassLora

model = PassLora.from_pretrained({name!r}{backbone})
(answer,) = model.predict([Image.open("photo.jpg")], top_k=3)
for guess in answer:
    print(f"{{guess.label}}: {{guess.probability:.1%}}")
```""",
        f"or `{command}` on the command line.",
    ]
    if settings["keep_tasks"] == "all" and last:
        parts.append(f"With `task=0` it is the model as it was after its first task; `task={last}` is the last.")
    if (
        settings["lora_r"]
        and settings["pretrained"]
        and not is_local(settings)
        and settings["model_name_or_path"] != "passlora/vit-mini"
    ):
        size = f", img_size={settings['image_size']}" if settings["image_size"] else ""
        parts.append(f"""\
The features alone, by stock peft:

```python
import timm
from peft import PeftModel

backbone = timm.create_model({timm_name(settings)!r}, pretrained=True, num_classes=0{size})
features = PeftModel.from_pretrained(backbone, {name!r}, subfolder="{layout.task_folder(last)}")
```""")
    return "\n\n".join(parts)


def timm_name(settings: dict[str, Any]) -> str:
    name = settings["model_name_or_path"]
    return f"hf-hub:{name}" if "/" in name and ":" not in name else name


def task_table(manifest: Manifest) -> str:
    rows = ["| task | classes | accuracy, all seen (%) | which |", "|---|---|---|---|"]
    seen = accumulate(len(task.classes) for task in manifest.tasks)
    for i, (task, total) in enumerate(zip(manifest.tasks, seen, strict=True)):
        accuracy = "" if task.accuracy is None else f"{task.accuracy:.1f} of {total} classes"
        names = ", ".join(escape(name) for name in task.classes[:20]) + (", ..." if len(task.classes) > 20 else "")
        rows.append(f"| {i} | {len(task.classes)} | {accuracy} | {names} |")
    results = [f"{METRICS[name]}: {value:.1f}" for name, value in manifest.results.items()]
    return "\n".join(rows) + ("\n\n" + "\n".join(f"- {line}" for line in results) if results else "")


def training_table(manifest: Manifest) -> str:
    known = {name: value for name, value in manifest.settings.items() if value not in (None, [])}
    rows = [f"| {name} | {escape(describe(value))} |" for name, value in known.items()]
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    return "\n".join(["| setting | value |", "|---|---|", *rows, "", f"Versions: {used}."])


def stored(manifest: Manifest) -> str:
    views = manifest.settings["prototype_views"]
    weights = "an adapter" if manifest.settings["lora_r"] else "the backbone"
    return (
        f"For each task {weights} and a head; for each class {views} mean feature vector{'s' if views > 1 else ''}; "
        "and the spread of features around them. No image, no thumbnail, and no path of the training data. A mean of "
        "features is not an image, but it does tell that the class was learnt, and about what its images look like to "
        "the network. Only safetensors, JSON, CSV, Markdown and a picture of the curve: nothing in here is executed."
    )


def overlap(manifest: Manifest) -> str:
    if not manifest.settings["pretrained"]:
        return "None: the backbone was trained from scratch, on the classes above alone."
    return (
        "The backbone was pretrained on other images. Where their classes overlap with the ones above, a part of the "
        "accuracy is knowledge from pre-training rather than from incremental learning, and numbers are not comparable "
        "with backbones trained without those classes (the paper uses a DeiT-S/16 of 611 ImageNet classes for that)."
    )


def escape(text: str) -> str:
    """A name from anywhere, as text within a line of Markdown."""
    text = " ".join(text.split())
    return re.sub(r"([\\`*_{}\[\]<>|#!])", r"\\\1", text)
