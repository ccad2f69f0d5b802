"""Methods that never train the network, on features that are computed once for all of them.

What each learns, and in which order, is what `passlora train` would show it; the classifiers are the same objects.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from passlora.config import Config
from passlora.data.batches import Images
from passlora.data.dataset import load_dataset
from passlora.data.rows import kept_rows
from passlora.data.scenario import make_scenario
from passlora.method.classifiers import Classifier, make_classifier
from passlora.method.features import of_tensors
from passlora.runs.record import Record
from passlora.training.accelerator import make_accelerator
from passlora.training.evaluation import CALIBRATION_BINS, Evaluation, tally
from passlora.training.features import FeatureReader
from passlora.training.learner import Learner

NO_LIMITS = {"max_train_per_class": None, "max_test_per_class": None}


class FrozenFeatures:
    """A backbone and a dataset: features of any of its images in `views`, each computed once; how long that takes."""

    def __init__(self, config: Config, views: int) -> None:
        self.views = views
        self.accelerator = make_accelerator(config.training)
        self.dataset = load_dataset(config.replace(**NO_LIMITS).data, config.training.seed)
        self.network = Learner(config, self.accelerator).network.eval()
        size = self.network.backbone.image_size
        self.images = {
            name: Images(getattr(self.dataset, name), size, config.data, f"{name} images") for name in ("train", "test")
        }
        self.reader = FeatureReader(self.accelerator)
        self.reader.batch_size = config.training.per_device_eval_batch_size
        self.computed, self.seconds = 0, 0.0

    def read(self, split: str, rows: np.ndarray, views: int) -> Tensor:
        """(rows, views, d), on the CPU."""
        images, began = self.images[split], time.perf_counter()
        known = self.reader.count(images)
        parts = list(self.reader.read(self.network, images, rows, self.views, "features", keep=True))
        new = self.reader.count(images) - known
        if new:
            self.computed, self.seconds = self.computed + new * self.views, self.seconds + time.perf_counter() - began
        return torch.cat([z[:, :views].cpu() for _, z in parts])

    @property
    def seconds_a_view(self) -> float:
        return self.seconds / max(self.computed, 1)


def learn_stream(config: Config, source: FrozenFeatures) -> dict[str, Any]:
    """The numbers of a run, as `results.json` has them."""
    dataset, seed, data = source.dataset, config.training.seed, config.data
    scenario = make_scenario(config.scenario, dataset.train.labels.tolist(), len(dataset.class_names))
    train = kept_rows(dataset.train, data.max_train_per_class, seed)
    test = kept_rows(dataset.test, data.max_test_per_class, seed)
    index = np.array(scenario.class_index)
    classifier = make_classifier(source.network.backbone.feature_dim, config.method)
    views, record, seconds = classifier.num_views("single"), Record(["single"], {}, 0), 0.0
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
    stored = sum(tensor.numel() for tensor in classifier.state_dict().values())
    return {**record.results, "seconds": seconds, "stored": stored, "task_sizes": list(scenario.task_sizes)}


def evaluate(classifier: Classifier, z: Tensor, truth: Tensor) -> Evaluation:
    k = classifier.num_classes
    counts, bins = torch.zeros(k, k, dtype=torch.int64), torch.zeros(CALIBRATION_BINS, 3)
    for part, own in zip(z.split(1000), truth.split(1000), strict=True):
        tally(classifier.scores(part, "single"), own, counts, bins)
    return Evaluation(counts.numpy(), bins.double().numpy())
