"""What a user holds: a model that lives in a folder, is taught, asked, restored and passed on."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor

from passlora import files
from passlora.config.knobs import FIELDS, Config, DataConfig, is_local, without_data_path
from passlora.data.batches import Images, as_input
from passlora.data.corruptions import CORRUPTIONS, check, corrupted
from passlora.data.scenario import Scenario
from passlora.data.sources import Split, at_most, read_splits, to_rgb
from passlora.display.progress import silence
from passlora.errors import PassloraError
from passlora.folder import layout, store
from passlora.folder.manifest import LEARN_BUDGET, Manifest, TaskEntry, now, read_manifest, settings_of
from passlora.hub import hub
from passlora.hub.card import write_card
from passlora.network.factory import RESNET18
from passlora.training import metrics
from passlora.training.learner import Learner, TaskData
from passlora.training.metrics import Evaluation

# Of a whole configuration, what says nothing of one lesson: the other tasks, and comparisons of runs.
NO_PART_OF_A_LESSON = (
    *(name for name, knob in FIELDS.items() if knob.group == "scenario"),
    *(
        "seeds",
        "class_order_seeds",
        "compare",
        "test_fraction",
        "max_classes",
        "max_train_per_class",
        "max_test_per_class",
    ),
)


@dataclass(frozen=True)
class Prediction:
    label: str
    probability: float


@dataclass
class Lesson:
    """What one call of `learn` did; accuracies in percent, None where there was nothing to test on."""

    new_classes: list[str]
    skipped_classes: list[str]
    images: int
    seconds: float
    old_before: float | None = None
    old_after: float | None = None
    new_after: float | None = None
    all_after: float | None = None
    continued_at: int | None = None  # the step of a lesson that had been cut off
    untested: str | None = None  # why accuracies could not be measured


Picture = Image.Image | np.ndarray | str | Path


def as_picture(image: Picture) -> Image.Image:
    if isinstance(image, np.ndarray):
        return Image.fromarray(image)
    if not isinstance(image, (str, Path)):
        return image
    try:
        with Image.open(image) as opened:
            return to_rgb(opened)
    except Exception as error:  # Pillow raises many types on damaged files
        raise PassloraError(f"cannot read {image}: {error}") from None


class PassLora:
    """A model: `PassLora.create(...)` or `PassLora.from_pretrained(folder)`, then learn, predict, save_pretrained."""

    def __init__(self, learner: Learner, tasks: list[TaskEntry], source: hub.Source | None = None) -> None:
        self.learner, self.tasks = learner, tasks
        self.source = source  # where the tasks that were not learnt here can be copied from
        self.unsaved: dict[int, store.TaskState] = {}

    @classmethod
    def create(cls, **settings: Any) -> PassLora:
        """A model that knows no class yet; `settings` are the keys of docs/configuration.md."""
        config = Config.make(**{**LEARN_BUDGET, **settings, "num_tasks": 1, "task_sizes": None})
        if config.method.classifier != "head":
            raise PassloraError(f"{config.method.preset} is a baseline of passlora train: it makes no model")
        return cls(Learner(config, make_accelerator(config)), [])

    @classmethod
    def from_pretrained(
        cls, name: str | Path, task: int | None = None, revision: str | None = None, **settings: Any
    ) -> PassLora:
        """The model of a folder, or of user/name on the Hub, as it is, or as it was after `task` (0 is the first).

        `settings` change what the next task is learnt with; `model_name_or_path` says where a backbone lies that came
        from a local checkpoint file. `revision` is a branch, tag or commit on the Hub.
        """
        source = hub.locate(name, task, revision)
        manifest = read_manifest(source.folder)
        count = len(manifest.tasks)
        if task is not None and not 0 <= task < count:
            raise PassloraError(f"{name} has the tasks 0 to {count - 1}, not {task}")
        config = manifest.config(**settings)
        learner = Learner(config, make_accelerator(config))
        tasks = count if task is None else task + 1
        store.restore(source.folder, learner, manifest, tasks, source.root)
        return cls(learner, manifest.tasks[:tasks], source)

    @property
    def classes(self) -> list[str]:
        """In the order of learning."""
        return Manifest({}, self.tasks).classes

    def __repr__(self) -> str:
        model = self.learner.config.model.model_name_or_path
        return f"PassLora({len(self.classes)} classes in {len(self.tasks)} tasks, on {model})"

    # --- teaching ----------------------------------------------------------------------------------------------

    def learn(
        self, data: str | Path, on_known: str = "error", folder: str | Path | None = None, **settings: Any
    ) -> Lesson:
        """Learn the new classes of a dataset as one more task; no image of an old class is needed.

        `settings` are keys of the data and training groups; the latter stay with the model. A class that is known
        already is an error, or with `on_known="skip"` left out. A test split may hold old classes too: accuracies are
        then measured before and after. With `save_steps` or `save_epochs` the state inside the task is kept in
        `folder`, and continued from there.
        """
        settings = self._take_settings(settings)
        if folder is None:
            return self._learn(data, on_known, None, settings)
        with store.lock(Path(folder)) if self.learner.accelerator.is_main_process else nullcontext():
            return self._learn(data, on_known, Path(folder), settings)

    def _take_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The data settings of a lesson, checked; training settings become the model's own."""
        checked = Config.make(num_tasks=1, **settings).flat()
        settled = [name for name in settings if FIELDS[name].group in ("model", "method")]
        if settled:
            raise PassloraError(f"{settled[0]} was settled when the model was made: leave it out")
        training = {name: checked[name] for name in settings if FIELDS[name].group == "training"}
        if training:
            self.learner.config = self.learner.config.replace(**training)
        return {name: checked[name] for name in settings if FIELDS[name].group == "data"}

    def _learn(self, data: str | Path, on_known: str, folder: Path | None, settings: dict[str, Any]) -> Lesson:
        if self.learner.network.num_classes != len(self.classes):
            raise PassloraError("a lesson was interrupted and left the model half taught: load it again")
        began, config = time.perf_counter(), self.learner.config
        reading = data_config(config, data, settings)
        train, test, names = read_splits(reading, self.classes)
        present = [names[label] for label in np.unique(train.labels)]
        known = [name for name in present if name in self.classes]
        if known and on_known != "skip":
            raise PassloraError(f"the model knows already: {', '.join(known)} (--on_known skip leaves them out)")
        new = [name for name in present if name not in known]
        if not new:
            raise PassloraError(f"{data} has no class that the model does not know")
        lesson = Lesson(new, known, 0, 0.0)
        index = {name: i for i, name in enumerate([*self.classes, *new])}
        training = self._task_data(train, names, index, new, "training images", reading)
        lesson.images = len(training.rows)
        testing = None if test is None else self._task_data(test, names, index, list(index), "test images")
        lesson.old_before = self._accuracy(testing, range(len(self.classes)))
        old = len(self.classes)
        about = without_data_path({**config.flat(), **settings, "dataset_name": str(data)})
        about |= {"classes": new, "images": lesson.images, "processes": self.learner.accelerator.num_processes}
        about = {name: value for name, value in about.items() if name not in NO_PART_OF_A_LESSON}
        checkpoint = None if folder is None else store.read_checkpoint(folder, len(self.tasks), about)

        def save(state: dict[str, Tensor]) -> None:
            if folder is not None and self.learner.accelerator.is_main_process:
                files.write_tensors(folder / layout.CHECKPOINT, state, {"lesson": json.dumps(about)})

        name = f"learning {len(new)} classes"
        self.learner.learn(training, len(new), on_checkpoint=save, checkpoint=checkpoint, name=name)
        lesson.continued_at = None if checkpoint is None else int(checkpoint["step"])
        try:
            lesson.old_after = self._accuracy(testing, range(old))
            lesson.new_after = self._accuracy(testing, range(old, len(index)))
            lesson.all_after = self._accuracy(testing, range(len(index)))
        except PassloraError as error:  # an image that cannot be read: what was learnt is kept
            lesson.untested = str(error)
        source = None if is_local(str(data)) else str(data)
        self.tasks.append(TaskEntry(new, now(), lesson.all_after, dataset=source))
        self.unsaved[len(self.tasks) - 1] = store.TaskState.of(self.learner)
        lesson.seconds = time.perf_counter() - began
        return lesson

    def _task_data(
        self,
        split: Split,
        names: list[str],
        index: dict[str, int],
        wanted: list[str],
        what: str,
        reading: DataConfig | None = None,
    ) -> TaskData:
        """The rows of the wanted classes, with the model's class indices; augmented, if at all, as `reading` says."""
        place = np.array([index[name] if name in wanted else -1 for name in names])
        classes = place[split.labels]
        images = Images(split, self.learner.network.backbone.image_size, reading or self.learner.config.data, what)
        return TaskData(images, np.flatnonzero(classes >= 0), classes)

    def _accuracy(self, data: TaskData | None, classes: range) -> float | None:
        """Accuracy on the images of these classes, among all classes known now."""
        if data is None or len(classes) == 0:
            return None
        rows = data.rows[np.isin(data.classes[data.rows], classes)]
        if len(rows) == 0:
            return None
        mode = self.learner.config.method.inference
        evaluation = self.learner.evaluate(TaskData(data.images, rows, data.classes), [mode])[mode]
        return metrics.accuracy(evaluation.confusion, classes)

    # --- asking ------------------------------------------------------------------------------------------------

    def predict(
        self, images: Picture | Iterable[Picture], top_k: int = 5, views: int | None = None, batch_size: int = 64
    ) -> Iterator[list[Prediction]]:
        """The likeliest classes of each image, best first; a batch at a time, as they are asked for.

        An image is a picture of Pillow, an array of its pixels, or the path of a file. `views` is 1 (the image as it
        is) or 4 (the ensemble of rotations); by default as the model was evaluated.
        """
        if top_k < 1:
            raise PassloraError(f"top_k must be at least 1, got {top_k}")
        if not self.classes:
            raise PassloraError("the model has learnt nothing yet")
        several = [images] if isinstance(images, (str, Path, Image.Image, np.ndarray)) else images
        return self._predict(map(as_picture, several), top_k, self._mode(views), batch_size)

    def _predict(
        self, rest: Iterator[Image.Image], top_k: int, mode: str, batch_size: int
    ) -> Iterator[list[Prediction]]:
        classes = self.classes
        while batch := list(islice(rest, batch_size)):
            probabilities = self.scores(batch, mode).softmax(dim=1).cpu()
            best = probabilities.topk(min(top_k, len(classes)), dim=1)
            for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                yield [Prediction(classes[i], p) for p, i in zip(values, indices, strict=True)]

    def scores(self, images: list[Image.Image], mode: str) -> Tensor:
        """Class scores, as evaluation computes them; images of one size go through the network together."""
        network, device = self.learner.network, self.learner.accelerator.device
        inputs = [as_input(image, network.backbone.image_size) for image in images]
        scores = torch.empty(len(images), len(self.classes), device=device)
        for shape in {x.shape for x in inputs}:
            rows = [i for i, x in enumerate(inputs) if x.shape == shape]
            x = torch.stack([inputs[i] for i in rows]).to(device)
            scores[rows] = network.scores(x, [mode], self.learner.memory)[mode]
        return scores

    def _mode(self, views: int | None) -> str:
        method = self.learner.config.method
        if views is None:
            return method.inference
        if views not in (1, method.num_views):
            only = "1 or 4" if method.sst else "1: it was trained without rotations"
            raise PassloraError(f"views must be {only}, got {views}")
        return "single" if views == 1 else "multiview"

    def evaluate(self, data: str | Path, **settings: Any) -> Evaluation:
        """Counts over a dataset's test split, or all of it if it has none; every class must be known."""
        return self._evaluate(*self._test_split(data, settings))

    def robustness(
        self, data: str | Path, severity: int = 1, corruptions: Iterable[str] = CORRUPTIONS, **settings: Any
    ) -> Iterator[tuple[str, Evaluation]]:
        """As `evaluate`: first on the images as they are ("clean"), then under each corruption (docs/analysis.md)."""
        names = tuple(corruptions)
        check(names, severity)
        split, classes = self._test_split(data, settings)
        yield "clean", self._evaluate(split, classes)
        for name in names:
            yield name, self._evaluate(corrupted(split, name, severity), classes)

    def _test_split(self, data: str | Path, settings: dict[str, Any]) -> tuple[Split, list[str]]:
        config = data_config(self.learner.config, data, settings)
        train, test, names = read_splits(config, self.classes)
        split = at_most(train if test is None else test, config.max_test_per_class, self.learner.config.training.seed)
        unknown = [names[label] for label in np.unique(split.labels) if names[label] not in self.classes]
        if unknown:
            raise PassloraError(f"the model does not know: {', '.join(unknown[:10])}")
        return split, names

    def _evaluate(self, split: Split, names: list[str]) -> Evaluation:
        index = {name: i for i, name in enumerate(self.classes)}
        mode = self.learner.config.method.inference
        task_data = self._task_data(split, names, index, self.classes, "test images")
        return self.learner.evaluate(task_data, [mode])[mode]

    @property
    def scenario(self) -> Scenario:
        """Which classes came with which task."""
        sizes = tuple(len(task.classes) for task in self.tasks)
        return Scenario(tuple(range(sum(sizes))), sizes)

    # --- keeping -----------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model's folder (docs/model-format.md); earlier tasks are copied from where it was loaded."""
        folder = Path(folder)
        if not self.tasks:
            raise PassloraError("the model has learnt nothing yet")
        if self.learner.accelerator.is_main_process:
            self._save(folder)
        self.learner.accelerator.wait_for_everyone()
        self.source, self.unsaved = hub.Source(folder, folder), {}

    def _save(self, folder: Path) -> None:
        with store.lock(folder):
            store.check_no_rollback(folder)
            store.check_same_model(folder, [task for i, task in enumerate(self.tasks) if i not in self.unsaved])
            if self.source is not None and folder.resolve() != self.source.folder.resolve():
                self.source.fetch()
                store.check_links(self.source.folder, self.source.root)
                tasks = [i for i in range(len(self.tasks)) if i not in self.unsaved]
                store.copy_tasks(self.source.folder, folder, tasks)
            manifest = Manifest(settings_of(self.learner.config), self.tasks)
            write_card(folder, manifest)
            store.save_tasks(folder, self.learner, manifest, self.unsaved)

    def push_to_hub(
        self,
        repo_id: str,
        private: bool = False,
        revision: str | None = None,
        create_pr: bool = False,
        force: bool = False,
    ) -> str:
        """Upload the folder that the model was saved to, from the first process; returns the address there."""
        folder, url = self._own_folder(), ""
        if self.learner.accelerator.is_main_process:
            with store.lock(folder):
                url = hub.push(folder, repo_id, private, revision, create_pr, force).url
        self.learner.accelerator.wait_for_everyone()
        return url

    def rollback(self, to_task: int) -> None:
        """Become what it was after `to_task`, here and in the folder; nothing is deleted (see docs/lifecycle.md)."""
        folder = self._own_folder()
        if self.learner.accelerator.is_main_process:
            with store.lock(folder):
                write_card(folder, store.rollback(folder, to_task))
        self.learner.accelerator.wait_for_everyone()
        manifest = read_manifest(folder)
        learner = Learner(self.learner.config, self.learner.accelerator)
        store.restore(folder, learner, manifest, len(manifest.tasks))
        self.learner, self.tasks = learner, manifest.tasks

    def prune(self) -> list[str]:
        """Confirm a rollback: delete what it left behind; returns the names of what went."""
        folder, gone = self._own_folder(), []
        if self.learner.accelerator.is_main_process:
            with store.lock(folder):
                gone = store.prune(folder)
        self.learner.accelerator.wait_for_everyone()
        return gone

    def info(self) -> dict[str, Any]:
        """What `passlora info` shows: settings, classes, tasks with dates, accuracies and bytes."""
        return store.describe(self._own_folder())

    def _own_folder(self) -> Path:
        """The folder on disk that holds exactly this model."""
        folder = None if self.source is None or self.source.repo_id is not None else self.source.folder
        if folder is None or self.unsaved or len(read_manifest(folder).tasks) != len(self.tasks):
            raise PassloraError("the model is not in a folder as it is now: save_pretrained it first")
        return folder

    def merge(self, out: str | Path, format: str = "timm") -> None:
        """The adapter folded into plain weights, for serving without peft, as a new folder.

        timm: `timm.create_model("local-dir:OUT", pretrained=True)` reads it, without passlora. Its logits are those of
        all nodes: with rotations, class c of the upright image is node 4c. transformers: after
        `import passlora.serving`, `AutoModelForImageClassification` and `pipeline` read it, with the rotations inside.
        """
        out = Path(out)
        if format not in ("timm", "transformers"):
            raise PassloraError(f"format must be timm or transformers, got {format!r}")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise PassloraError(f"{out} exists already: choose another folder")
        if self.learner.config.model.feature_dim is not None:
            raise PassloraError("a backbone with a feature_dim of its own cannot be merged")
        if not self.learner.accelerator.is_main_process:
            return
        with files.new_folder(out) as folder:
            if format == "timm":
                self._write_timm(folder)
            else:
                self._write_transformers(folder)

    def _write_timm(self, folder: Path) -> None:
        network = self.learner.network
        plain = network.backbone.merged()
        architecture, arguments = plain.origin
        if architecture == RESNET18:
            raise PassloraError(f"timm has no {RESNET18}, whose stem is its own: choose the format transformers")
        known = plain.pretrained_cfg
        classifier = known.get("classifier") or "head"
        side = network.backbone.image_size
        settings = {
            "architecture": architecture,
            "num_classes": network.head.num_nodes,
            "num_features": network.backbone.feature_dim,
            "model_args": arguments,
            "label_names": [f"{name}@{90 * v}" for name in self.classes for v in range(network.num_views)],
            "pretrained_cfg": {
                "input_size": [3, side, side],
                "mean": list(network.backbone.mean),
                "std": list(network.backbone.std),
                "num_classes": network.head.num_nodes,
                "crop_pct": 224 / 256,
                "interpolation": "bilinear",
                "classifier": classifier,
                "first_conv": known.get("first_conv"),
            },
        }
        head = {f"{classifier}.{name}": tensor for name, tensor in network.head.state_dict().items()}
        files.write_tensors(folder / "model.safetensors", {**plain.state_dict(), **head})
        files.write_json(folder / "classes.json", self.classes)
        files.write_json(folder / "config.json", settings)

    def _write_transformers(self, folder: Path) -> None:
        from transformers.utils.logging import disable_progress_bar

        from passlora.serving import PassLoraConfig, PassLoraForImageClassification, PassLoraImageProcessor

        silence(disable_progress_bar)
        network, inference = self.learner.network, self.learner.config.method.inference
        if inference == "nearest_prototype":
            raise PassloraError(
                "this model answers by its nearest prototype (inference nearest_prototype): it has no logits to merge"
            )
        backbone, plain = network.backbone, network.backbone.merged()
        architecture, arguments = plain.origin
        config = PassLoraConfig(
            architecture=architecture,
            architecture_args=arguments,
            feature_dim=backbone.feature_dim,
            num_views=network.num_views,
            inference=inference,
            id2label=dict(enumerate(self.classes)),
            label2id={name: i for i, name in enumerate(self.classes)},
        )
        model = PassLoraForImageClassification(config)
        model.backbone.load_state_dict(plain.state_dict())
        model.head.load_state_dict(network.head.state_dict())
        model.save_pretrained(folder)
        PassLoraImageProcessor(backbone.image_size, backbone.mean, backbone.std).save_pretrained(folder)


def make_accelerator(config: Config) -> Accelerator:
    try:
        return Accelerator(mixed_precision=config.training.mixed_precision)
    except ValueError as error:  # fp16 on a CPU, for one
        raise PassloraError(f"accelerate refuses these settings: {error}") from error


def data_config(config: Config, data: str | Path, settings: dict[str, Any]) -> DataConfig:
    """The model's augmentation with another dataset."""
    return dataclasses.replace(config.data, dataset_name=str(data), **settings)
