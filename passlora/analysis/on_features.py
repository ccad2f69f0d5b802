"""Methods that never train the network, or only on the first task, on features that are computed once for all of them.

What each learns, and in which order, is what `passlora train` would show it; the classifiers are the same objects.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from passlora.config import FIELDS, Config
from passlora.data.batches import Images, TaskData
from passlora.data.dataset import load_dataset, read_splits
from passlora.data.rows import kept_rows
from passlora.data.scenario import make_scenario
from passlora.method.classifiers import Classifier, make_classifier
from passlora.method.features import of_tensors
from passlora.runs.record import Record
from passlora.training.accelerator import make_accelerator
from passlora.training.evaluation import CALIBRATION_BINS, Evaluation, tally
from passlora.training.features import FeatureReader
from passlora.training.learner import Learner
from passlora.training.steps import Hooks

NO_LIMITS = {"max_train_per_class": None, "max_test_per_class": None}
# What is done with features, and changes none of them.
READING = (
    *("preset", "classifier", "ncm_metric", "classifier_views", "lift", "lift_width", "shrinkage", "inference"),
    *("prototype_views", "prototype_augmented", "radius", "covariance", "output_dir"),
)
MOST = 3  # sources that are held in memory: as it is, of several blocks, adapted


class SharedFeatures:
    """A network as pretrained, or adapted to the first task, and a dataset: features of any image, computed once."""

    def __init__(self, config: Config) -> None:
        adapts = config.method.adapt_tasks == "first"
        self.accelerator = make_accelerator(config.training)
        data = config if adapts else config.replace(**NO_LIMITS)
        self.dataset = load_dataset(data.data, config.training.seed)
        learner = Learner(config, self.accelerator)
        size = learner.network.backbone.image_size
        self.images = {
            name: Images(getattr(self.dataset, name), size, config.data, f"{name} images") for name in ("train", "test")
        }
        began = time.perf_counter()
        if adapts:
            learner.adapt(*first_task(config, self.images["train"]), Hooks(name="adapting to task 0"))
        self.adapting = time.perf_counter() - began if adapts else 0.0
        self.network = learner.network.eval()
        weights = {} if learner.is_frozen else learner.network.backbone.state()
        self.stored = sum(tensor.numel() for tensor in weights.values())
        self.views = 1
        self.reader = FeatureReader(self.accelerator)
        self.reader.batch_size = config.training.per_device_eval_batch_size
        self.computed, self.seconds = 0, 0.0

    def read(self, split: str, rows: np.ndarray, views: int) -> Tensor:
        """(rows, views, d), on the CPU."""
        self.views = max(self.views, views)
        images, began = self.images[split], time.perf_counter()
        known = self.reader.count(images, self.views)
        parts = list(self.reader.read(self.network, images, rows, self.views, "features", keep=True))
        new = self.reader.count(images, self.views) - known
        if new:
            self.computed, self.seconds = self.computed + new * self.views, self.seconds + time.perf_counter() - began
        return torch.cat([z[:, :views].cpu() for _, z in parts])

    @property
    def seconds_a_view(self) -> float:
        return self.seconds / max(self.computed, 1)


def first_task(config: Config, images: Images) -> tuple[TaskData, int]:
    """Its images, and how many classes it has."""
    labels = images.split.labels
    scenario = make_scenario(config.scenario, labels.tolist(), int(labels.max()) + 1)
    rows = np.flatnonzero(np.isin(labels, scenario.labels(0)))
    return TaskData(images, rows, np.array(scenario.class_index)[labels]), scenario.task_sizes[0]


class Sources:
    """What several methods share: features, the latest ones held in memory, and whether adapting pays."""

    def __init__(self) -> None:
        self._features: dict[str, SharedFeatures] = {}
        self._decisions: dict[str, tuple[str, float]] = {}
        self._learnt: dict[str, dict[str, Any]] = {}

    def settled(self, config: Config) -> tuple[Config, float]:
        """With `adapt_tasks auto` decided, by held-out classes of the first task; and the seconds that took."""
        if config.method.adapt_tasks != "auto":
            return config, 0.0
        key = trained_key(config)
        if key not in self._decisions:
            learner = Learner(config, make_accelerator(config.training))
            dataset = load_dataset(config.data, config.training.seed)
            images = Images(dataset.train, learner.network.backbone.image_size, config.data, "training images")
            began = time.perf_counter()
            learner.settle(*first_task(config, images), Hooks(name="task 0"))
            self._decisions[key] = learner.config.method.adapt_tasks, time.perf_counter() - began
        decision, seconds = self._decisions[key]
        return config.settle(adapt_tasks=decision), seconds

    def learnt(self, config: Config) -> dict[str, Any]:
        """`learn_stream`, once for methods that are the same under two names, as a preset that was not to adapt."""
        labels = ("preset", "output_dir", *(("sst",) if config.method.adapt_tasks == "none" else ()))
        key = json.dumps({k: v for k, v in config.flat().items() if k not in labels}, default=str)
        if key not in self._learnt:
            self._learnt[key] = learn_stream(config, self.features(config))
        return dict(self._learnt[key])

    def features(self, config: Config) -> SharedFeatures:
        """One a network and dataset."""
        key = trained_key(config) if config.method.adapt_tasks == "first" else frozen_key(config)
        if key not in self._features:
            for old in list(self._features)[: len(self._features) - MOST + 1]:
                del self._features[old]
            self._features[key] = SharedFeatures(config)
        return self._features[key]


def trained_key(config: Config) -> str:
    """Settings of the same key train the same network."""
    told = {name: value for name, value in config.flat().items() if name not in READING}
    return json.dumps({name: value for name, value in told.items() if value != FIELDS[name].default}, default=str)


def frozen_key(config: Config) -> str:
    """Settings of the same key have the same features, while nothing is trained."""
    # The seed draws the test images of a dataset that has none of its own, and the weights of a backbone without.
    is_seeded = not config.model.pretrained or read_splits(config.data)[1] is None
    data = {**vars(config.data), **NO_LIMITS}
    return json.dumps([vars(config.model), data, config.training.seed if is_seeded else None], default=str)


def learn_stream(config: Config, source: SharedFeatures) -> dict[str, Any]:
    """The numbers of a run, as `results.json` has them."""
    dataset, seed, data = source.dataset, config.training.seed, config.data
    scenario = make_scenario(config.scenario, dataset.train.labels.tolist(), len(dataset.class_names))
    train = kept_rows(dataset.train, data.max_train_per_class, seed)
    test = kept_rows(dataset.test, data.max_test_per_class, seed)
    index = np.array(scenario.class_index)
    classifier = make_classifier(source.network.backbone.feature_dim, config.method)
    views, record, seconds = classifier.num_views("single"), Record(["single"], {}, 0), source.adapting
    for task in range(scenario.num_tasks):
        rows = train[np.isin(dataset.train.labels[train], scenario.labels(task))]
        z = source.read("train", rows, views)
        classes = torch.from_numpy(index[dataset.train.labels[rows]] - scenario.classes(task).start)
        began = time.perf_counter()
        classifier.grow(scenario.task_sizes[task])
        classifier.fit_task(of_tensors(z, classes))
        classifier.scores(z[:1], "single")  # what is computed at the first question belongs to learning
        seconds += time.perf_counter() - began + source.seconds_a_view * z.shape[0] * views
        rows = test[index[dataset.test.labels[test]] < scenario.seen(task)]
        truth = torch.from_numpy(index[dataset.test.labels[rows]])
        record.add({"single": evaluate(classifier, source.read("test", rows, views), truth)}, scenario, task)
    stored = source.stored + sum(tensor.numel() for tensor in classifier.state_dict().values())
    return {**record.results, "seconds": seconds, "stored": stored, "task_sizes": list(scenario.task_sizes)}


def evaluate(classifier: Classifier, z: Tensor, truth: Tensor) -> Evaluation:
    k = classifier.num_classes
    counts, bins = torch.zeros(k, k, dtype=torch.int64), torch.zeros(CALIBRATION_BINS, 3)
    for part, own in zip(z.split(1000), truth.split(1000), strict=True):
        tally(classifier.scores(part, "single"), own, counts, bins)
    return Evaluation(counts.numpy(), bins.double().numpy())
