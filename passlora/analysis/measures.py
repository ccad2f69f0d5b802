"""What the paper's experiments measure on runs: their own numbers, or what a closer look at the saved models tells.

Each measure returns {"values": metric -> number} and what a picture of it needs; it is kept as JSON, so that an
experiment that is started again does not measure again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from passlora import files
from passlora.analysis.paper import MINI, Row
from passlora.config import Config
from passlora.data.batches import Images
from passlora.data.corruptions import CORRUPTIONS, check, corrupted
from passlora.data.dataset import Dataset, load_dataset
from passlora.data.rows import Split
from passlora.data.scenario import make_scenario
from passlora.environment import is_first_process
from passlora.method.classifiers import Classifier, make_classifier
from passlora.method.features import of_tensors
from passlora.method.memory import Memory, Statistics
from passlora.model.passlora import PassLora
from passlora.training.learner import Learner, TaskData

Measured = dict[str, Any]
SEVERITY = 1
SHOWN = 5  # classes of a kind in a t-SNE picture


def measure(name: str, row: Row, config: Config, found: dict[str, Any], scale: str, kept: Path) -> Measured:
    """`found` is what the run returned."""
    if name == "results":
        return results(row, found)
    stamp = f"{Path(config.training.output_dir).parent.name} {row.mode}"  # the folder's name tells its settings
    if kept.is_file():
        measured = json.loads(kept.read_text(encoding="utf-8"))
        if measured.pop("of", None) == stamp:
            return measured
    measured = MEASURES[name](row, config, scale)
    if found:
        measured = {
            **results(row, found),
            **measured,
            "values": {**results(row, found)["values"], **measured["values"]},
        }
    if is_first_process():
        files.write_json(kept, {**measured, "of": stamp})
    return measured


def results(row: Row, whole: dict[str, Any]) -> Measured:
    """The numbers of a run under the row's inference mode."""
    part = whole if row.mode is None else whole["inference_modes"][row.mode]
    values = {name: part[name] for name in ("last", "avg", "forgetting", "newest")} | {"ece": whole["ece"]}
    if "train_seconds" in whole:  # not of a frozen baseline
        after_first = [value for value in whole["train_seconds"][1:] if value] or whole["train_seconds"]
        values |= {"train_seconds": fmean(after_first), "test_seconds": whole["test_seconds"][-1]}
    return {"values": values, "curves": {"accuracy": part["stage_accuracy"]}, "sizes": whole["task_sizes"]}


# --- a run's data and models, once more --------------------------------------------------------------------------


def model_after(config: Config, task: int | None = None) -> Learner:
    backbone = config.model.model_name_or_path
    return PassLora.from_pretrained(config.training.output_dir, task, model_name_or_path=backbone).learner


def task_data(split: Split, classes: np.ndarray, rows: np.ndarray, learner: Learner) -> TaskData:
    images = Images(split, learner.network.backbone.image_size, learner.config.data, "images")
    return TaskData(images, rows, classes)


def fitted(preset: str, z: Tensor, classes: Tensor) -> Classifier:
    """A preset's classifier, fitted on features of all its classes at once."""
    classifier = make_classifier(z.shape[1], Config.make(preset=preset, num_tasks=1).method)
    features = of_tensors(z, classes)
    classifier.grow(features.num_classes)
    classifier.fit_task(features)
    return classifier


def every_class(config: Config, scale: str) -> Dataset:
    """The dataset with the classes that the run left out too."""
    whole = config.replace(max_classes=MINI["max_classes"] if scale == "mini" else None)
    return load_dataset(whole.data, config.training.seed)


# --- table 1, figure 5 -------------------------------------------------------------------------------------------


def base_features(config: Config, scale: str, splits: tuple[str, ...]) -> tuple[int, list[tuple[Tensor, Tensor]]]:
    """How many classes the network was trained on, and features with labels of all classes."""
    dataset = every_class(config, scale)
    learner, found = model_after(config), []
    for name in splits:
        split = getattr(dataset, name)
        found.append(learner.features(task_data(split, split.labels, np.arange(len(split)), learner)))
    return learner.network.num_classes, found


def zero_cost(row: Row, config: Config, scale: str) -> Measured:
    """Nearest class mean on features of a network that knows the first classes only: five accuracies."""
    base, ((z, classes), (z_test, truth)) = base_features(config, scale, ("train", "test"))
    return {"values": five_accuracies(z, classes, z_test, truth, base)}


def five_accuracies(z: Tensor, classes: Tensor, z_test: Tensor, truth: Tensor, base: int) -> dict[str, float]:
    """Old (the first `base`) and new classes, each among all classes and among their own kind; and all."""
    scores, old = fitted("ncm", z, classes).scores(z_test[:, None], "single"), truth < base

    def accuracy(images: Tensor, low: int, high: int) -> float:
        predicted = low + scores[images, low:high].argmax(dim=1)
        return 100.0 * float((predicted == truth[images]).double().mean())

    total = scores.shape[1]
    return {
        "old_all": accuracy(old, 0, total),
        "old_old": accuracy(old, 0, base),
        "new_all": accuracy(~old, 0, total),
        "new_new": accuracy(~old, base, total),
        "all": accuracy(torch.ones_like(old), 0, total),
    }


def tsne(row: Row, config: Config, scale: str) -> Measured:
    """Test features of a few base and novel classes, laid out by t-SNE; and how well they are apart as they are."""
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_score

    base, ((z, truth),) = base_features(config, scale, ("test",))
    shown = torch.tensor([*range(SHOWN), *range(base, base + SHOWN)])
    chosen = torch.isin(truth, shown)
    z, truth = z[chosen].double(), truth[chosen]
    perplexity = min(30.0, (len(z) - 1) / 3)
    places = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(z.numpy())
    values = {
        f"silhouette_{kind}": 100.0 * float(silhouette_score(z[part].numpy(), truth[part].numpy()))
        for kind, part in (("base", truth < base), ("novel", truth >= base))
    }
    panel = {"title": row.name, "places": places.tolist(), "classes": truth.tolist(), "novel_from": base}
    return {"values": values, "points": [panel]}


# --- figure 4 ----------------------------------------------------------------------------------------------------


def plane(row: Row, config: Config, scale: str) -> Measured:
    """Test features of two dimensions after each task."""
    dataset = load_dataset(config.data, config.training.seed)
    scenario = make_scenario(config.scenario, dataset.train.labels.tolist(), len(dataset.class_names))
    classes, panels = np.array(scenario.class_index)[dataset.test.labels], []
    for task in range(scenario.num_tasks):
        learner = model_after(config, task)
        seen = np.flatnonzero(classes < scenario.seen(task))
        z, truth = learner.features(task_data(dataset.test, classes, seen, learner))
        panels.append({"title": f"{row.name}, task {task}", "places": z.tolist(), "classes": truth.tolist()})
    return {"values": {}, "points": panels}


# --- features --------------------------------------------------------------------------------------------------


def features(row: Row, config: Config, scale: str) -> Measured:
    """What two simple classifiers make of the final features, fitted anew on all training images, old ones too."""
    dataset = load_dataset(config.data, config.training.seed)
    learner = model_after(config)
    index = np.array(make_scenario(config.scenario, dataset.train.labels.tolist()).class_index)
    found = []
    for split in (dataset.train, dataset.test):
        found.append(learner.features(task_data(split, index[split.labels], np.arange(len(split)), learner)))
    (z, classes), (z_test, truth) = found
    values = {}
    for name in ("ncm", "slda"):
        scores = fitted(name, z, classes).scores(z_test[:, None], "single")
        values[f"{name}_refitted"] = 100.0 * float((scores.argmax(dim=1) == truth).double().mean())
    return {"values": values}


# --- figures 15, 16 ----------------------------------------------------------------------------------------------


def robustness(row: Row, config: Config, scale: str) -> Measured:
    """Accuracy after each task on all classes seen, clean and under each corruption."""
    check(CORRUPTIONS, SEVERITY)
    dataset = load_dataset(config.data, config.training.seed)
    scenario = make_scenario(config.scenario, dataset.train.labels.tolist(), len(dataset.class_names))
    classes = np.array(scenario.class_index)[dataset.test.labels]
    images: dict[str, Images] = {}
    curves: dict[str, list[float]] = {name: [] for name in ("clean", *CORRUPTIONS)}
    for task in range(scenario.num_tasks):
        learner = model_after(config, task)
        mode = row.mode or config.method.inference
        rows = np.flatnonzero(classes < scenario.seen(task))
        for name in curves:
            if name not in images:
                split = dataset.test if name == "clean" else corrupted(dataset.test, name, SEVERITY)
                images[name] = Images(split, learner.network.backbone.image_size, config.data, name)
            evaluation = learner.evaluate(TaskData(images[name], rows, classes), [mode])[mode]
            curves[name].append(evaluation.accuracy)
    values = {name: fmean(stages) for name, stages in curves.items()}
    values["mean"] = fmean(values[name] for name in CORRUPTIONS)
    return {"values": values, "curves": curves, "sizes": list(scenario.task_sizes)}


# --- table 10 ----------------------------------------------------------------------------------------------------

CLASSES_AND_SIDE = {  # and what an image of the dataset measures
    "uoft-cs/cifar100": (100, 32),
    "zh-plus/tiny-imagenet": (200, 64),
    "clane9/imagenet-100": (100, 224),
    "ILSVRC/imagenet-1k": (1000, 224),
}


def memory(row: Row, config: Config, scale: str) -> Measured:
    """Numbers kept of all classes of a dataset."""
    classes, side = CLASSES_AND_SIDE.get(config.data.dataset_name, CLASSES_AND_SIDE["uoft-cs/cifar100"])
    classes = min(classes, config.data.max_classes or classes)
    if row.exemplars:
        return {"values": {"entries": float(row.exemplars * classes * 3 * side**2)}}
    method = config.method
    dim = 192 if scale == "mini" else 512  # vit-mini, ResNet-18
    kept = Memory(dim, method)
    nothing = Statistics(classes * method.prototype_views, dim, method.covariance == "full")
    nothing.count += 2
    kept.add(nothing)
    return {"values": {"entries": float(kept.num_entries)}}


MEASURES: dict[str, Callable[[Row, Config, str], Measured]] = {
    "zero_cost": zero_cost,
    "tsne": tsne,
    "plane": plane,
    "features": features,
    "robustness": robustness,
    "memory": memory,
}
