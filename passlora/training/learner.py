"""One task: grow, train, follow, remember or fit. Knows accelerate, knows no files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

from passlora.config import Config
from passlora.data.batches import TaskData, augmented_plans, eval_plans, generator
from passlora.display.progress import progress
from passlora.errors import PassloraError
from passlora.method import drift as drifts
from passlora.method.alignment import align
from passlora.method.classifiers import Classifier, Head, make_classifier
from passlora.method.features import FeatureBatch, TaskFeatures
from passlora.method.memory import Memory
from passlora.network.factory import make_backbone
from passlora.network.network import Network
from passlora.training.accelerator import agree
from passlora.training.evaluation import CALIBRATION_BINS, Evaluation, tally
from passlora.training.features import FeatureReader
from passlora.training.gate import adapting_pays
from passlora.training.schedule import hash_seed
from passlora.training.steps import Hooks, State, TaskTraining

log = logging.getLogger(__name__)


@dataclass
class TaskState:
    """What a task leaves behind: all it takes to go on from there."""

    backbone: State  # the adapter, or the whole backbone where that is trained; empty for one that never is
    classifier: State
    memory: State  # empty for classifiers that are not trained: they remember for themselves
    adapter_config: Any = None  # peft's, for files that stock peft reads
    settings: dict[str, Any] | None = None  # what the task was learnt with, once it is to be kept


class Learner:
    """Network and memory, and how they take in one more task."""

    def __init__(self, config: Config, accelerator: Accelerator, asking: bool = False) -> None:
        self.config, self.accelerator = config, accelerator
        self.asking = asking  # it is only asked: nothing of what teaching takes is made
        set_seed(config.training.seed)
        backbone = make_backbone(config.model, plain=asking or self.is_frozen)
        classifier = make_classifier(backbone.feature_dim, config.method)
        if config.method.drift != "none" and not classifier.trained and type(classifier).move is Classifier.move:
            raise PassloraError(f"the classifier {config.method.classifier} cannot follow a network: set --drift none")
        # A classifier that is not trained keeps exact sums, in float64, which not every device has.
        self.network = Network(backbone.to(accelerator.device), classifier)
        if classifier.trained:
            classifier.to(accelerator.device)
        self.memory = Memory(backbone.feature_dim, config.method).to(accelerator.device)
        self.task = 0  # tasks learnt so far
        self.is_half_taught = False  # a task was begun and not ended
        self._reader = FeatureReader(accelerator)

    # --- learning ----------------------------------------------------------------------------------------------

    def learn(
        self, data: TaskData, new_classes: int, hooks: Hooks | None = None, checkpoint: State | None = None
    ) -> None:
        """Train on the new classes if this task adapts the network, move what is kept of old ones, take in the new.

        `checkpoint`, one of those that `hooks` were given, continues where it was taken.
        """
        self.get_ready(data)
        self.is_half_taught = True
        if self.config.method.adapt_tasks == "auto" and self.task == 0:
            self.settle(data, new_classes, hooks or Hooks(), checkpoint)
        known, follows = self.network.num_classes, self.adapts and self.task and self.config.method.drift != "none"
        before = list(self.task_features(data, new_classes, known)) if follows else []
        if self.adapts:
            self.adapt(data, new_classes, hooks or Hooks(), checkpoint)
        self.network.eval()
        features = self.task_features(data, new_classes, known)
        if follows:
            features.keep = True
            self._follow(before, features)
        self._take_in(features, new_classes)
        self.task += 1
        self.is_half_taught = False

    def _follow(self, before: list[FeatureBatch], features: TaskFeatures) -> None:
        """Move what is kept of old classes, as the new images' features moved in training."""
        kind, classifier = self.config.method.drift, self.network.classifier
        pairs = ((old, new, positions) for (old, *_), (new, _, positions) in zip(before, features, strict=True))
        drift = drifts.KINDS[kind].fit(pairs, features.dim, features.reduce)
        if isinstance(drift, drifts.LinearDrift):
            log.info(
                f"a linear map explains {100 * (1 - drift.residual):.0f}% of how features of held-out images moved"
            )
        (self.memory if classifier.trained else classifier).move(drift)

    def _take_in(self, features: TaskFeatures, new_classes: int) -> None:
        """Remember the new classes, or fit the classifier to them."""
        classifier = self.network.classifier
        if not isinstance(classifier, Head):
            classifier.grow(new_classes)
            classifier.fit_task(features)
            return
        self.memory.remember(features)
        if self.config.method.alignment:
            draws = generator("alignment", self.config.training.seed, self.task, device=self.accelerator.device)
            align(classifier, self.memory, self.task + 1, draws)

    @property
    def adapts(self) -> bool:
        """Whether the next task trains the network."""
        tasks = self.config.method.adapt_tasks
        return tasks == "all" or (tasks in ("first", "auto") and self.task == 0)

    @property
    def is_frozen(self) -> bool:
        """Whether no task ever trains the network and its weights can be had again: nothing of it is to be kept."""
        model = self.config.model
        return self.config.method.adapt_tasks == "none" and model.pretrained and model.feature_dim is None

    def get_ready(self, data: TaskData) -> None:
        """Take up the options that save time or memory; what cannot work says so before anything has changed."""
        training = self.config.training
        if training.cache_teacher and data.images.is_random:
            raise PassloraError(
                "cache_teacher needs images that look the same in every epoch: set --horizontal_flip false "
                "--brightness 0 and --crop_padding 0 (large images: --rrc_min_scale 0)"
            )
        self.network.backbone.checkpoint_gradients(training.gradient_checkpointing)

    def training_of(
        self, data: TaskData, new_classes: int, first: int = 0, config: Config | None = None
    ) -> TaskTraining:
        """The steps of the next task, with the head grown: the classifier, or one that is thrown away afterwards.

        `first` is the model's number of the head's first class; `config` is another one than the model's.
        """
        network, config = self.network, config or self.config
        if not network.classifier.trained:
            head = Head(network.backbone.feature_dim, config.method)
            network = Network(network.backbone, head.to(self.accelerator.device))
        head = network.classifier  # type: ignore[assignment]
        old_head = (head.weight.detach().clone(), head.bias.detach().clone())
        head.grow(new_classes)
        return TaskTraining(config, self.accelerator, network, self.memory, self.task, data, old_head, first)

    def adapt(self, data: TaskData, new_classes: int, hooks: Hooks, checkpoint: State | None = None) -> None:
        """Train the network on the next task."""
        set_seed(hash_seed(self.config.training.seed, self.task))
        self._reader.forget()
        training = self.training_of(
            data, new_classes, 0 if self.network.classifier.trained else self.network.num_classes
        )
        training.run(hooks, checkpoint)
        if self.network.classifier.trained:
            self.network = training.network

    def settle(self, data: TaskData, new_classes: int, hooks: Hooks, checkpoint: State | None = None) -> None:
        """adapt_tasks auto becomes first or none, which the model keeps; a checkpoint tells that it was first."""
        set_seed(hash_seed(self.config.training.seed, self.task))
        pays = checkpoint is not None or adapting_pays(self, data, new_classes, hooks.name)
        self.config = self.config.settle(adapt_tasks="first" if pays else "none")

    def task_features(self, data: TaskData, new_classes: int, first: int, views: int | None = None) -> TaskFeatures:
        """The features of the task's training images; each process computes its share, in eval mode.

        `first` is the number of the first of the new classes, and `views` how many rotations, if not the classifier's.
        """
        method, training, accelerator = self.config.method, self.config.training, self.accelerator
        classifier, own, rows = self.network.classifier, data.classes - first, None
        present = np.unique(data.classes[data.rows])
        if present[0] < first:  # more of known classes, and perhaps new ones
            own, rows, new_classes = np.searchsorted(present, data.classes), torch.from_numpy(present), len(present)
        if views is None:
            views = method.prototype_views if classifier.trained else classifier.num_views(method.inference)
        share = (training.per_device_eval_batch_size, accelerator.process_index, accelerator.num_processes)

        def compute() -> Iterator[FeatureBatch]:
            if method.prototype_augmented:
                plans = augmented_plans(data.rows, share[0], (training.seed, self.task), *share[1:])
            else:
                plans = eval_plans(data.rows, *share)
            for batch in progress(data.images.batches(plans), desc="remembering", unit="batch", total=len(plans)):
                images = batch.images.to(accelerator.device, non_blocking=True)
                if batch.uniforms is not None:
                    images = data.images.augment(images, batch.uniforms)
                z = self.network.features(images, views, accelerator.autocast())
                classes = torch.from_numpy(own[batch.rows]).to(accelerator.device)
                yield z, classes, torch.from_numpy(np.searchsorted(data.rows, batch.rows))

        counts = torch.from_numpy(np.bincount(own[data.rows], minlength=new_classes))
        dim = self.network.backbone.feature_dim
        return TaskFeatures(compute, new_classes, counts, dim, accelerator.device, self.add_up, rows=rows)

    def add_up(self, tensor: Tensor) -> Tensor:
        """Over all processes, wherever the tensor lies."""
        if self.accelerator.num_processes == 1:
            return tensor
        return self.accelerator.reduce(tensor.to(self.accelerator.device), reduction="sum").to(tensor.device)

    # --- changing what is known --------------------------------------------------------------------------------

    def keep(self, classes: Tensor) -> None:
        """Forget every class but these."""
        self.network.classifier.keep(classes)
        if self.network.classifier.trained:
            self.memory.keep(classes)
        self.task += 1

    def join(self, other: Learner, classes: Tensor) -> None:
        """Take in what another one knows, on the same network: its classes are these, or new ones after ours."""
        mine, theirs = self.network.backbone.state(), other.network.backbone.state()
        frozen = self.is_frozen and other.is_frozen
        if not frozen and not all(torch.equal(mine[name], theirs[name]) for name in mine):
            raise PassloraError("the two models were adapted apart: their features are not the same")
        self.network.classifier.join(other.network.classifier, classes)
        self.task += 1

    # --- keeping -----------------------------------------------------------------------------------------------

    def state(self) -> TaskState:
        """A copy of what the tasks so far have left."""
        backbone, classifier = self.network.backbone, self.network.classifier
        memory = copied(self.memory.state_dict()) if classifier.trained else {}
        if self.is_frozen:
            return TaskState({}, copied(classifier.state_dict()), memory)
        return TaskState(copied(backbone.state()), copied(classifier.state_dict()), memory, backbone.adapter_config)

    def forms(self, classes: int) -> TaskState:
        """What `state` holds with so many classes, as tensors without data."""
        backbone = {} if self.is_frozen else self.network.backbone.forms()
        memory = self.memory.forms(classes) if self.network.classifier.trained else {}
        return TaskState(backbone, self.network.classifier.forms(classes), memory)

    def restore(self, tasks: int, classes: int, state: TaskState) -> None:
        """Become what was saved after `tasks` tasks."""
        self.network.classifier.grow(classes)
        self.network.classifier.load_state_dict(state.classifier)
        if state.backbone:
            self.network.backbone.load_state(state.backbone)
        if state.memory:
            self.memory.load_state_dict(state.memory)
        self.network.eval()
        self.task = tasks

    # --- asking ------------------------------------------------------------------------------------------------

    def evaluate(self, data: TaskData, modes: list[str]) -> dict[str, Evaluation]:
        """Counts over all seen classes, a mode each, from one pass over the rows."""
        accelerator, k, device = self.accelerator, self.network.num_classes, self.accelerator.device
        counts = torch.zeros(len(modes), k, k, dtype=torch.int64, device=device)
        bins = torch.zeros(len(modes), CALIBRATION_BINS, 3, device=device)
        own = np.array_split(data.rows, accelerator.num_processes)[accelerator.process_index]
        error = None
        try:
            for rows, z in self._read(data, own, self.network.num_views(modes), "testing"):
                truth = torch.from_numpy(data.classes[rows]).to(device, non_blocking=True)
                for row, scores in enumerate(self.network.scores(z, modes, self.memory).values()):
                    tally(scores, truth, counts[row], bins[row])
        except PassloraError as damaged:  # an image that only this process has seen
            error = damaged
        agree(accelerator, error)
        counts, bins = accelerator.reduce(counts, reduction="sum"), accelerator.reduce(bins, reduction="sum")
        return {
            mode: Evaluation(counts[row].cpu().numpy(), bins[row].cpu().double().numpy())
            for row, mode in enumerate(modes)
        }

    def features(self, data: TaskData) -> tuple[Tensor, Tensor]:
        """Features of the rows as they are, on the CPU, and their classes; every process computes all of them."""
        parts = list(self._read(data, data.rows, 1, "features"))
        z = torch.cat([z[:, 0].cpu() for _, z in parts])
        return z, torch.from_numpy(data.classes[np.concatenate([rows for rows, _ in parts])])

    def _read(self, data: TaskData, rows: np.ndarray, views: int, what: str) -> Iterator[tuple[np.ndarray, Tensor]]:
        self.network.eval()
        self._reader.batch_size = self.config.training.per_device_eval_batch_size
        return self._reader.read(self.network, data.images, rows, views, what, keep=not self.adapts)


def copied(state: State) -> State:
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
