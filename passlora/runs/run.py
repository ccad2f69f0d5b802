"""The whole stream of tasks: learn, evaluate, save, report; for one seed or several, alone or beside other presets."""

from __future__ import annotations

from passlora import files
from passlora.folder import layout

import dataclasses
import importlib.util
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from passlora import __version__
from passlora.display import figures
from passlora.training import metrics
from passlora.folder import store
from passlora.method.classifiers import make_classifier
from passlora.method.classifiers.ncm import class_means
from passlora.data.batches import Images
from passlora.hub.card import write_card
from passlora.config.knobs import Config, is_local, without_data_path
from passlora.data.dataset import Dataset, load_dataset
from passlora.environment import peak_memory
from passlora.errors import PassloraError
from passlora.hub.hub import Uploads
from passlora.training.learner import EpochLog, Learner, TaskData, tally
from passlora.folder.manifest import MANIFEST, Manifest, TaskEntry, now, read_manifest, settings_of
from passlora.training.metrics import CALIBRATION_BINS
from passlora.display.tables import confusion_csv, final_table, matrix_csv, seeds_table
from passlora.data.scenario import Scenario, make_scenario

Say = Callable[[str], None]


def train(config: Config, say: Say = print) -> dict[str, Any]:
    """Run the configuration and return what results.json holds."""
    folder = Path(config.training.output_dir)
    accelerator = make_accelerator(config, folder)
    with store.lock(folder) if accelerator.is_main_process else nullcontext():
        if accelerator.is_main_process:
            store.claim(folder, config.flat(), config.training.overwrite_output_dir)
            if config.training.report_to != "none":
                settings = without_data_path(config.flat())
                accelerator.init_trackers("passlora", config={k: str(v) for k, v in settings.items()})
        accelerator.wait_for_everyone()
        return train_all(config, folder, accelerator, say if accelerator.is_main_process else silent)


def train_all(config: Config, folder: Path, accelerator: Accelerator, say: Say) -> dict[str, Any]:
    """Every seed, or class order, that is asked for."""
    variants = seed_variants(config)
    if not variants:
        results = train_one(config, folder, accelerator, say)
    else:
        runs = {}
        for name, variant in variants.items():
            say(f"== {name.replace('_', ' ')} ==")
            runs[name] = train_one(variant, folder / name, accelerator, say)
        results = combine(config, runs)
        say(seeds_table(results))
    if accelerator.is_main_process:
        files.write_json(folder / layout.RESULTS, results)
        figures.accuracy_curves(results, folder / "accuracy.png")
    for tracker in accelerator.trackers:  # end_training would also end the group of processes: a next run needs it
        tracker.finish()
    accelerator.wait_for_everyone()  # what the first process wrote is there for all
    return results


def silent(message: str) -> None:
    """What processes other than the first say."""


def make_accelerator(config: Config, folder: Path) -> Accelerator:
    training = config.training
    tracker = None if training.report_to == "none" else training.report_to
    if tracker and importlib.util.find_spec(tracker) is None:
        raise PassloraError(f"report_to {tracker} needs its package: pip install {tracker}")
    try:
        project = ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "logs"))
        accelerator = Accelerator(mixed_precision=training.mixed_precision, log_with=tracker, project_config=project)
    except ValueError as error:  # fp16 on a CPU, for one
        raise PassloraError(f"accelerate refuses these settings: {error}") from error
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != world:
        raise PassloraError(
            f"{world} processes were launched but accelerate sees {accelerator.num_processes}: on CPU use "
            "recipes/accelerate_configs/cpu_2proc.yaml, as docs/recipes.md shows"
        )
    return accelerator


def seed_variants(config: Config) -> dict[str, Config]:
    """One configuration a seed, or a class order; empty for a single run."""
    training, common = config.training, {"seeds": None, "class_order_seeds": None}
    if training.seeds:
        return {f"seed_{seed}": config.replace(**common, seed=seed) for seed in training.seeds}
    if training.class_order_seeds:
        return {f"order_{seed}": config.replace(**common, class_order_seed=seed) for seed in training.class_order_seeds}
    return {}


def train_one(config: Config, folder: Path, accelerator: Accelerator, say: Say) -> dict[str, Any]:
    """One seed: the run itself, then each preset to compare with, on the same data."""
    with accelerator.main_process_first():  # one process fills the dataset cache, the others read it
        dataset = load_dataset(config.data, config.training.seed)
    scenario = make_scenario(config.scenario, dataset.train.labels.tolist(), len(dataset.class_names))
    stream = Stream(config, dataset, scenario, accelerator, say)
    training, uploads = config.training, None
    if training.push_to_hub and accelerator.is_main_process:
        uploads = Uploads(folder, str(training.hub_model_id), training.hub_private_repo, say)
    results = stream.run(config, folder, config.method.preset, uploads)
    for preset in config.training.compare:
        other = stream.run(config.as_preset(preset), folder / "compare" / preset, preset)
        results["compare"][preset] = other
    if accelerator.is_main_process:
        files.write_json(folder / layout.RESULTS, results)
        figures.accuracy_curves(results, folder / "accuracy.png")
        figures.accuracy_matrix(results, folder / "accuracy_matrix.png")
    say(final_table(results))
    if uploads:
        uploads.is_due |= bool(training.compare)  # they came after the last task's upload
        uploads.finish()
    return results


class Stream:
    """A dataset cut into tasks; methods are run over it one after another."""

    def __init__(
        self, config: Config, dataset: Dataset, scenario: Scenario, accelerator: Accelerator, say: Say
    ) -> None:
        self.dataset, self.scenario, self.accelerator, self.say = dataset, scenario, accelerator, say
        self.images: tuple[Images, Images] | None = None
        index = np.array(scenario.class_index)
        self.train_classes, self.test_classes = index[dataset.train.labels], index[dataset.test.labels]
        for task in range(scenario.num_tasks):
            if not np.isin(self.test_classes, scenario.classes(task)).any():
                names = ", ".join(dataset.class_names[label] for label in scenario.labels(task)[:5])
                raise PassloraError(f"task {task} ({names}) has no test images: its accuracy is undefined")
        sizes = "+".join(map(str, scenario.task_sizes)) if scenario.num_tasks <= 12 else f"{scenario.task_sizes[0]}+..."
        say(
            f"{dataset.name}: {len(dataset.train)} training and {len(dataset.test)} test images, "
            f"{scenario.num_classes} classes in {scenario.num_tasks} tasks ({sizes})"
        )

    def data(self, task: int, image_size: int, config: Config) -> tuple[TaskData, TaskData]:
        """Training images of `task`; test images of all classes seen by then."""
        if self.images is None:
            self.images = (
                Images(self.dataset.train, image_size, config.data, "training images"),
                Images(self.dataset.test, image_size, config.data, "test images"),
            )
        train, test = self.images
        new = np.flatnonzero(np.isin(self.train_classes, self.scenario.classes(task)))
        seen = np.flatnonzero(self.test_classes < self.scenario.seen(task))
        return TaskData(train, new, self.train_classes), TaskData(test, seen, self.test_classes)

    def entry_classes(self, task: int) -> list[str]:
        return [self.dataset.class_names[label] for label in self.scenario.labels(task)]

    def entry(self, task: int, results: dict[str, Any]) -> TaskEntry:
        names = self.entry_classes(task)
        source = None if is_local(self.dataset.name) else self.dataset.name
        return TaskEntry(names, now(), results["last"], results["forgetting"], source)

    def run(self, config: Config, folder: Path, name: str, uploads: Uploads | None = None) -> dict[str, Any]:
        """Learn every task in turn, from where the folder's run was left; model and numbers are saved after each."""
        with store.lock(folder) if self.accelerator.is_main_process else nullcontext():
            return self._run(config, folder, name, uploads)

    def _run(self, config: Config, folder: Path, name: str, uploads: Uploads | None) -> dict[str, Any]:
        if config.method.classifier != "head":
            return self.run_frozen(config, folder, name)
        self.check_same_tasks(folder)
        record = Record.read(folder, config.method.inference_modes)
        if record.tasks_done >= self.scenario.num_tasks:  # more, if `passlora learn` went on from there
            self.say(f"\n{name}: finished already")
            return record.results
        start = time.perf_counter() - record.seconds
        learner = Learner(config, self.accelerator)
        self.say(f"\n{name}: {trainable_share(learner)}")
        manifest = Manifest(settings_of(config))
        if record.tasks_done:
            manifest = read_manifest(folder)
            store.restore(folder, learner, manifest, record.tasks_done)
        checkpoint = store.read_checkpoint(folder, record.tasks_done)
        if record.tasks_done or checkpoint:
            at = f", step {int(checkpoint['step'])}" if checkpoint else ""
            self.say(f"{name}: continuing with task {record.tasks_done}{at}")
        log = Log(folder, f"seed_{config.training.seed}/{name}", self.accelerator)
        log.cut(record.tasks_done, 0 if checkpoint is None else int(checkpoint["epoch"]))
        for task in range(record.tasks_done, self.scenario.num_tasks):
            began = time.perf_counter()
            train, test = self.data(task, learner.network.backbone.image_size, config)
            label = f"{name} task {task} of 0-{self.scenario.num_tasks - 1}"
            learner.learn(train, self.scenario.task_sizes[task], log, self.saver(folder), checkpoint, label)
            checkpoint, trained = None, time.perf_counter()
            evaluations = learner.evaluate(test, config.method.inference_modes)
            record.add(evaluations, self.scenario, task)
            record.note(train_seconds=round(trained - began, 2), test_seconds=round(time.perf_counter() - trained, 2))
            if config.training.measure_drift:
                record.note(drift=self.drift(learner, task))
            record.results |= self.about(config, name, time.perf_counter() - start, task)
            record.results |= {
                "prototype_entries": learner.memory.num_entries,
                "prototype_bytes": learner.memory.num_bytes,
            }
            if self.accelerator.is_main_process:  # numbers first, the manifest last: it says which tasks are done
                manifest.tasks.append(self.entry(task, record.results))
                files.write_json(folder / layout.RESULTS, record.results)
                files.write_text(folder / layout.MATRIX, matrix_csv(record.results))
                confusion = evaluations[config.method.inference].confusion
                files.write_text(
                    folder / layout.CONFUSION, confusion_csv(record.results["classes"][: len(confusion)], confusion)
                )
                write_card(folder, manifest)
                store.save_tasks(folder, learner, manifest, {task: store.TaskState.of(learner)})
            self.say(f"{label}: {record.describe(self.scenario, task)}, {time.perf_counter() - began:.0f} s")
            if uploads:
                uploads.push()
        if config.method.proto_aug != "none":
            memory = learner.memory
            self.say(
                f"{name}: remembers {memory.num_classes} classes by {memory.num_entries:,} numbers "
                f"({memory.num_bytes / 1024:.0f} kB), radius {memory.radius:.3f}"
            )
        return record.results

    def run_frozen(self, config: Config, folder: Path, name: str) -> dict[str, Any]:
        """A baseline: features of the pretrained network, or of one adapted to the first task, with a classifier.

        It leaves numbers, no model, and is quick enough to be run again from the start.
        """
        if (folder / layout.RESULTS).is_file():
            results = json.loads((folder / layout.RESULTS).read_text(encoding="utf-8"))
            if results.get("finished"):
                self.say(f"\n{name}: finished already")
                return results
        start, learner = time.perf_counter(), Learner(config, self.accelerator)
        mode, last = config.method.inference, self.scenario.num_tasks - 1
        self.say(f"\n{name}: {config.method.classifier} on frozen features")
        record, classifier = Record([mode], {}, 0), make_classifier(config.method.classifier)
        if config.method.adapt_tasks == "first":
            first, _ = self.data(0, learner.network.backbone.image_size, config)
            learner.learn(first, self.scenario.task_sizes[0], name=f"{name}, adapting to the first task")
        _, test = self.data(last, learner.network.backbone.image_size, config)
        z_test, truth = learner.features(test)
        for task in range(last + 1):
            train, _ = self.data(task, learner.network.backbone.image_size, config)
            classifier.add(*learner.features(train))
            seen = self.scenario.seen(task)
            known = truth < seen
            confusion, bins = torch.zeros(seen, seen, dtype=torch.int64), torch.zeros(CALIBRATION_BINS, 3)
            tally(classifier.scores(z_test[known]), truth[known], confusion, bins)
            evaluation = metrics.Evaluation(confusion.numpy(), bins.double().numpy())
            record.add({mode: evaluation}, self.scenario, task)
        self.say(f"{name}: {record.describe(self.scenario, last)}")
        record.results |= self.about(config, name, time.perf_counter() - start, last)
        if self.accelerator.is_main_process:
            files.write_text(folder / layout.MATRIX, matrix_csv(record.results))
            text = confusion_csv(record.results["classes"], evaluation.confusion)
            files.write_text(folder / layout.CONFUSION, text)
            files.write_json(folder / layout.RESULTS, record.results)
        return record.results

    def drift(self, learner: Learner, task: int) -> list[float]:
        """How far the true class means have moved from the stored ones, a mean a task, in units of a class's spread.

        For analysis alone: it reads the images of old classes, which learning never does.
        """
        train, _ = self.data(task, learner.network.backbone.image_size, learner.config)
        seen = np.flatnonzero(self.train_classes < self.scenario.seen(task))
        z, classes = learner.features(TaskData(train.images, seen, self.train_classes))
        moved = (class_means(z, classes) - learner.memory.class_means().cpu()).norm(dim=1)
        spread = learner.memory.radius * learner.memory.dim**0.5
        parts = [moved[part.start : part.stop] for part in map(self.scenario.classes, range(task + 1))]
        return [float(part.mean()) / spread if spread else 0.0 for part in parts]

    def about(self, config: Config, name: str, seconds: float, task: int) -> dict[str, Any]:
        """What results.json says beside the numbers."""
        return {
            "preset": name,
            "seed": config.training.seed,
            "seconds": round(seconds, 2),
            "finished": task + 1 == self.scenario.num_tasks,
            "task_sizes": list(self.scenario.task_sizes),
            "classes": [self.dataset.class_names[label] for label in self.scenario.class_order],
            "version": __version__,
            "peak_memory_bytes": peak_memory(),
            "compare": {},
        }

    def check_same_tasks(self, folder: Path) -> None:
        """A folder may have been taught other classes than the run's, by `passlora learn`, before the run was done."""
        learnt = [task.classes for task in read_manifest(folder).tasks] if (folder / MANIFEST).is_file() else []
        own = [self.entry_classes(task) for task in range(self.scenario.num_tasks)]
        if learnt[: len(own)] != own[: len(learnt)]:
            raise PassloraError(
                f"{folder} has learnt other classes than this run's in the meantime: go on with passlora learn, or "
                "choose another --output_dir"
            )

    def saver(self, folder: Path) -> Callable[[dict[str, Any]], None]:
        """Writes the state inside a task, from the first process."""

        def save(state: dict[str, Any]) -> None:
            if self.accelerator.is_main_process:
                files.write_tensors(folder / layout.CHECKPOINT, state)

        return save


class Record:
    """The numbers of a run as it goes on: results.json, and what it is made from."""

    def __init__(self, modes: list[str], results: dict[str, Any], tasks_done: int) -> None:
        self.modes, self.results, self.tasks_done = modes, results, tasks_done
        parts = results.get("inference_modes", {})
        self.matrices: dict[str, metrics.Matrix] = {m: parts[m]["accuracy_matrix"] if m in parts else [] for m in modes}
        self.stages: dict[str, list[float]] = {m: parts[m]["stage_accuracy"] if m in parts else [] for m in modes}
        for mode in modes:  # a task whose manifest was not written is learnt again
            del self.matrices[mode][tasks_done:], self.stages[mode][tasks_done:]
        for name in set(metrics.PER_TASK) & set(results):
            del results[name][tasks_done:]

    @classmethod
    def read(cls, folder: Path, modes: list[str]) -> Record:
        if not (folder / MANIFEST).is_file():
            return cls(modes, {}, 0)
        results = json.loads((folder / layout.RESULTS).read_text(encoding="utf-8"))
        return cls(modes, results, len(read_manifest(folder).tasks))

    @property
    def seconds(self) -> float:
        return float(self.results.get("seconds", 0.0)) if self.tasks_done else 0.0

    def add(self, evaluations: dict[str, metrics.Evaluation], scenario: Scenario, task: int) -> None:
        for mode, evaluation in evaluations.items():
            self.matrices[mode].append(metrics.matrix_row(evaluation.confusion, scenario, task))
            self.stages[mode].append(metrics.accuracy(evaluation.confusion, range(scenario.seen(task))))
        summaries = {mode: metrics.summary(self.matrices[mode], self.stages[mode]) for mode in self.modes}
        main = self.modes[0]
        ece, bins = evaluations[main].calibration_error, evaluations[main].bins.tolist()
        self.results |= {**summaries[main], "ece": ece, "calibration": bins}
        self.results |= {"inference": main, "inference_modes": summaries}
        self.note(bias=metrics.bias(evaluations[main].confusion, scenario, task))

    def note(self, **values: Any) -> None:
        """Add a task's value to lists of metrics.PER_TASK."""
        for name, value in values.items():
            known = self.results.setdefault(name, [])
            known += [None] * (len(self.stages[self.modes[0]]) - 1 - len(known))  # of tasks before this was noted
            known.append(value)

    def describe(self, scenario: Scenario, task: int) -> str:
        shown = ", ".join(f"{values[-1]:.1f}% {mode}" for mode, values in self.stages.items())
        return f"{shown} over {scenario.seen(task)} classes"


class Log:
    """Appends each epoch's losses to training_log.jsonl, and sends them to the tracker."""

    def __init__(self, folder: Path, name: str, accelerator: Accelerator) -> None:
        self.folder, self.name, self.accelerator = folder, name, accelerator
        self.epochs = 0  # over all tasks

    def cut(self, task: int, epoch: int) -> None:
        """Forget the epochs that will be run again."""
        path = self.folder / layout.LOG
        if self.accelerator.is_main_process and path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if is_before(line, task, epoch)]
            self.epochs = len(kept)
            files.write_text(path, "".join(kept))

    def __call__(self, log: EpochLog) -> None:
        if not all(np.isfinite(list(log.losses.values()))):
            raise PassloraError(
                f"the loss is no longer finite in task {log.task}, epoch {log.epoch + 1}: lower --learning_rate"
            )
        values = {**log.losses, "task": log.task, "learning_rate": log.learning_rate}
        self.accelerator.log({f"{self.name}/{key}": value for key, value in values.items()}, step=self.epochs)
        self.epochs += 1
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / layout.LOG, "a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(log)) + "\n")


def is_before(line: str, task: int, epoch: int) -> bool:
    """Whether a line of the log belongs to an earlier epoch; a line that was cut off does not."""
    try:
        entry = json.loads(line)
        return (entry["task"], entry["epoch"]) < (task, epoch)
    except (ValueError, KeyError):
        return False


def trainable_share(learner: Learner) -> str:
    trainable, total = learner.network.backbone.parameter_counts()
    kind = "LoRA adapter" if learner.network.backbone.has_lora else "whole backbone"
    per_class = learner.network.num_views * (learner.network.backbone.feature_dim + 1)
    return (
        f"training {trainable:,} of {total:,} backbone weights ({100 * trainable / total:.2f}%, {kind}) "
        f"and {per_class:,} head weights a class"
    )


def combine(config: Config, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Mean and deviation over seeds, of the run and of each preset compared with."""
    all_runs = list(runs.values())

    def over(parts: list[dict[str, Any]]) -> dict[str, Any]:
        modes = {
            mode: metrics.over_runs([part["inference_modes"][mode] for part in parts])
            for mode in parts[0]["inference_modes"]
        }
        named = {key: parts[0][key] for key in ("preset", "inference")}
        return {**named, **metrics.over_runs(parts), "inference_modes": modes}

    return {
        **over(all_runs),
        "compare": {name: over([run["compare"][name] for run in all_runs]) for name in config.training.compare},
        "seeds": config.training.seeds or config.training.class_order_seeds,
        "seed": config.training.seed,
        "seconds": round(sum(run["seconds"] for run in all_runs), 2),
        "finished": True,
        "task_sizes": all_runs[0]["task_sizes"],
        "version": __version__,
        "runs": runs,
    }
