"""The numbers of a run as it goes on: what results.json holds, task by task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from passlora import __version__
from passlora.config import Config
from passlora.data.scenario import Scenario
from passlora.display.tables import confusion_csv, matrix_csv
from passlora.environment import peak_memory
from passlora.files import write_text
from passlora.folder.layout import CONFUSION, MANIFEST, MATRIX
from passlora.folder.manifest import read_manifest
from passlora.folder.results import Results, read_results, write_results
from passlora.training import metrics
from passlora.training.evaluation import Evaluation


class Record:
    """Accuracy matrices and summaries under each inference mode; the first is the main one."""

    def __init__(self, modes: list[str], results: Any, tasks_done: int) -> None:
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
        return cls(modes, read_results(folder), len(read_manifest(folder).tasks))

    @property
    def seconds(self) -> float:
        return float(self.results.get("seconds", 0.0)) if self.tasks_done else 0.0

    def add(self, evaluations: dict[str, Evaluation], scenario: Scenario, task: int) -> None:
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

    def about(self, config: Config, name: str, scenario: Scenario, classes: list[str], seconds: float) -> None:
        """What results.json says beside the numbers."""
        self.results |= {
            "preset": name,
            "seed": config.training.seed,
            "seconds": round(seconds, 2),
            "finished": len(self.stages[self.modes[0]]) == scenario.num_tasks,
            "task_sizes": list(scenario.task_sizes),
            "classes": classes,
            "version": __version__,
            "peak_memory_bytes": peak_memory(),
            "compare": {},
        }

    def describe(self, scenario: Scenario, task: int) -> str:
        shown = ", ".join(f"{values[-1]:.1f}% {mode}" for mode, values in self.stages.items())
        return f"{shown} over {scenario.seen(task)} classes"

    def write(self, folder: Path, confusion: Any) -> None:
        """The numbers, and those of every class under the main inference mode."""
        write_results(folder, self.results)
        write_text(folder / MATRIX, matrix_csv(self.results))
        write_text(folder / CONFUSION, confusion_csv(self.results["classes"][: len(confusion)], confusion))


def combine(config: Config, runs: dict[str, Results]) -> Results:
    """Mean and deviation over seeds, of the run and of each preset compared with."""
    all_runs: list[Any] = list(runs.values())

    def over(parts: list[Any]) -> dict[str, Any]:
        modes = {
            mode: metrics.over_runs([part["inference_modes"][mode] for part in parts])
            for mode in parts[0]["inference_modes"]
        }
        named = {key: parts[0][key] for key in ("preset", "inference", "task_sizes")}
        return {**named, **metrics.over_runs(parts), "inference_modes": modes}

    combined: Any = {
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
    return combined
