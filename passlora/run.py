"""The whole stream of tasks: learn, evaluate, save, report; for one seed or several, alone or beside other presets."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from . import __version__, figures, metrics, store
from .batches import Images
from .config import Config
from .data import Dataset, load_dataset
from .errors import PassloraError
from .learner import EpochLog, Learner, TaskData
from .manifest import Manifest, TaskEntry, settings_of
from .report import final_table, matrix_csv, seeds_table
from .scenario import Scenario, make_scenario

Say = Callable[[str], None]


def train(config: Config, say: Say = print) -> dict[str, Any]:
    """Run the configuration and return what results.json holds."""
    folder = Path(config.training.output_dir)
    accelerator = make_accelerator(config, folder)
    if accelerator.is_main_process:
        store.claim(folder, config.training.overwrite_output_dir)
        store.write_yaml(folder / store.CONFIG, config.flat())
        if config.training.report_to != "none":
            accelerator.init_trackers("passlora", config={key: str(value) for key, value in config.flat().items()})
    else:
        say = silent
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
        store.write_json(folder / store.RESULTS, results)
        figures.accuracy_curves(results, folder / "accuracy.png")
    accelerator.end_training()
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
        return {f"seed_{seed}": config.but(**common, seed=seed) for seed in training.seeds}
    if training.class_order_seeds:
        return {f"order_{seed}": config.but(**common, class_order_seed=seed) for seed in training.class_order_seeds}
    return {}


def train_one(config: Config, folder: Path, accelerator: Accelerator, say: Say) -> dict[str, Any]:
    """One seed: the run itself, then each preset to compare with, on the same data."""
    with accelerator.main_process_first():  # one process fills the dataset cache, the others read it
        dataset = load_dataset(config.data, config.training.seed)
    scenario = make_scenario(config.scenario, dataset.train.labels.tolist(), len(dataset.class_names))
    stream = Stream(config, dataset, scenario, accelerator, say)
    results = stream.run(config, folder, config.method.preset)
    for preset in config.training.compare:
        other = stream.run(config.as_preset(preset), folder / "compare" / preset, preset)
        results["compare"][preset] = other
    if accelerator.is_main_process:
        store.write_json(folder / store.RESULTS, results)
        store.write_text(folder / "accuracy_matrix.csv", matrix_csv(results))
        figures.accuracy_curves(results, folder / "accuracy.png")
        figures.accuracy_matrix(results, folder / "accuracy_matrix.png")
    say(final_table(results))
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
                raise PassloraError(f"task {task + 1} ({names}) has no test images: its accuracy is undefined")
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

    def entry(self, task: int, accuracy: float) -> TaskEntry:
        names = [self.dataset.class_names[label] for label in self.scenario.labels(task)]
        return TaskEntry(names, datetime.now(timezone.utc).isoformat(timespec="seconds"), accuracy)

    def run(self, config: Config, folder: Path, name: str) -> dict[str, Any]:
        """Learn every task in turn; the model and the numbers so far are saved after each."""
        start = time.perf_counter()
        learner = Learner(config, self.accelerator)
        self.say(f"\n{name}: {trainable_share(learner)}")
        modes = config.method.inference_modes
        matrices: dict[str, metrics.Matrix] = {mode: [] for mode in modes}
        stages: dict[str, list[float]] = {mode: [] for mode in modes}
        results: dict[str, Any] = {}
        manifest = Manifest(settings_of(config))
        log = Log(folder, f"seed_{config.training.seed}/{name}", self.accelerator)
        for task in range(self.scenario.num_tasks):
            began = time.perf_counter()
            train, test = self.data(task, learner.network.backbone.image_size, config)
            label = f"{name} task {task + 1}/{self.scenario.num_tasks}"
            learner.learn(train, self.scenario.task_sizes[task], log, label)
            evaluations = learner.evaluate(test, modes)
            for mode, evaluation in evaluations.items():
                matrices[mode].append(metrics.matrix_row(evaluation.confusion, self.scenario, task))
                stages[mode].append(metrics.accuracy(evaluation.confusion, range(self.scenario.seen(task))))
            results = {
                "preset": name,
                **metrics.summary(matrices[modes[0]], stages[modes[0]]),
                "ece": evaluations[modes[0]].calibration_error,
                "inference": modes[0],
                "inference_modes": {mode: metrics.summary(matrices[mode], stages[mode]) for mode in modes},
                "seed": config.training.seed,
                "seconds": round(time.perf_counter() - start, 2),
                "finished": task + 1 == self.scenario.num_tasks,
                "task_sizes": list(self.scenario.task_sizes),
                "classes": [self.dataset.class_names[label] for label in self.scenario.class_order],
                "prototype_entries": learner.memory.num_entries,
                "prototype_bytes": learner.memory.num_bytes,
                "version": __version__,
                "compare": {},
            }
            if self.accelerator.is_main_process:
                manifest.tasks.append(self.entry(task, stages[modes[0]][-1]))
                store.save_tasks(folder, learner, manifest, {task: store.TaskState.of(learner)})
                store.write_json(folder / store.RESULTS, results)
            self.say(f"{label}: {describe_stage(stages, self.scenario, task)}, {time.perf_counter() - began:.0f} s")
        if config.method.proto_aug != "none":
            memory = learner.memory
            self.say(
                f"{name}: remembers {memory.num_classes} classes by {memory.num_entries:,} numbers "
                f"({memory.num_bytes / 1024:.0f} kB), radius {memory.radius:.3f}"
            )
        return results


class Log:
    """Appends each epoch's losses to training_log.jsonl, and sends them to the tracker."""

    def __init__(self, folder: Path, name: str, accelerator: Accelerator) -> None:
        self.folder, self.name, self.accelerator = folder, name, accelerator
        self.epochs = 0  # over all tasks

    def __call__(self, log: EpochLog) -> None:
        if not all(np.isfinite(list(log.losses.values()))):
            raise PassloraError(
                f"the loss is no longer finite in task {log.task + 1}, epoch {log.epoch + 1}: lower --learning_rate"
            )
        values = {**log.losses, "task": log.task, "learning_rate": log.learning_rate}
        self.accelerator.log({f"{self.name}/{key}": value for key, value in values.items()}, step=self.epochs)
        self.epochs += 1
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / store.LOG, "a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(log)) + "\n")


def trainable_share(learner: Learner) -> str:
    trainable, total = learner.network.backbone.parameter_counts()
    kind = "LoRA adapter" if learner.network.backbone.has_lora else "whole backbone"
    per_class = learner.network.num_views * (learner.network.backbone.feature_dim + 1)
    return (
        f"training {trainable:,} of {total:,} backbone weights ({100 * trainable / total:.2f}%, {kind}) "
        f"and {per_class:,} head weights a class"
    )


def describe_stage(stages: dict[str, list[float]], scenario: Scenario, task: int) -> str:
    shown = ", ".join(f"{values[-1]:.1f}% {mode}" for mode, values in stages.items())
    return f"{shown} over {scenario.seen(task)} classes"


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
