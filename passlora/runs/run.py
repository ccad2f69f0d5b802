"""`passlora train`: for one seed or several, alone or beside other presets."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from accelerate import Accelerator

from passlora.config import Config, without_data_path
from passlora.data.dataset import load_dataset
from passlora.display import figures
from passlora.display.tables import final_table, seeds_table
from passlora.errors import PassloraError
from passlora.folder.layout import MATRIX_PICTURE, PICTURE
from passlora.folder.lock import lock
from passlora.folder.results import Results, write_results
from passlora.hub.push import Uploads
from passlora.runs.folder import TRACKED, check_still_there, claim
from passlora.runs.record import combine
from passlora.runs.stream import Stream
from passlora.training.accelerator import make_accelerator
from passlora.training.callbacks import Callback

log = logging.getLogger(__name__)


def train(config: Config, callbacks: Sequence[Callback] = ()) -> Results:
    """Run the configuration and return what results.json holds; `callbacks` are told of every task of every method."""
    folder, training = Path(config.training.output_dir), config.training
    tracker = None if training.report_to == "none" else training.report_to
    if tracker and importlib.util.find_spec(tracker) is None:
        raise PassloraError(f"report_to {tracker} needs its package: pip install {tracker}")
    accelerator = make_accelerator(training, tracker, folder)
    with lock(folder) if accelerator.is_main_process else nullcontext():
        if accelerator.is_main_process:
            claim(folder, config.flat(), training.overwrite_output_dir)
            if tracker:
                settings = without_data_path(config.flat())
                accelerator.init_trackers(TRACKED, config={k: str(v) for k, v in settings.items()})
        accelerator.wait_for_everyone()
        return train_all(config, folder, accelerator, callbacks)


def train_all(config: Config, folder: Path, accelerator: Accelerator, callbacks: Sequence[Callback] = ()) -> Results:
    """Every seed, or class order, that is asked for."""
    variants = seed_variants(config)
    if not variants:
        results = train_one(config, folder, folder, accelerator, callbacks)
    else:
        runs = {}
        for name, variant in variants.items():
            log.info(f"== {name.replace('_', ' ')} ==")
            runs[name] = train_one(variant, folder / name, folder, accelerator, callbacks)
        results = combine(config, runs)
        log.info(seeds_table(results))
    if accelerator.is_main_process:
        check_still_there(folder)
        write_results(folder, results)
        figures.accuracy_curves(results, folder / PICTURE)
    for tracker in accelerator.trackers:  # end_training would also end the group of processes: a next run needs it
        tracker.finish()
    accelerator.wait_for_everyone()  # what the first process wrote is there for all
    return results


def seed_variants(config: Config) -> dict[str, Config]:
    """One configuration a seed, or a class order; empty for a single run."""
    training, common = config.training, {"seeds": None, "class_order_seeds": None}
    if training.seeds:
        return {f"seed_{seed}": config.replace(**common, seed=seed) for seed in training.seeds}
    if training.class_order_seeds:
        return {f"order_{seed}": config.replace(**common, class_order_seed=seed) for seed in training.class_order_seeds}
    return {}


def train_one(
    config: Config, folder: Path, root: Path, accelerator: Accelerator, callbacks: Sequence[Callback]
) -> Results:
    """One seed: the run itself, then each preset to compare with, on the same data. `root` is the whole run's."""
    training, uploads = config.training, None
    with accelerator.main_process_first():  # one process fills the dataset cache, the others read it
        dataset = load_dataset(config.data, training.seed)
    stream = Stream(root, dataset, config.scenario, accelerator, callbacks)
    if training.push_to_hub and accelerator.is_main_process:
        uploads = Uploads(folder, str(training.hub_model_id), training.hub_private_repo)
    results = stream.run(config, folder, config.method.preset, uploads)
    results["compare"] = {
        preset: stream.of(other.scenario).run(other, folder / "compare" / preset, preset)
        for preset, other in ((preset, config.as_preset(preset)) for preset in training.compare)
    }
    if accelerator.is_main_process:
        check_still_there(root)
        write_results(folder, results)
        figures.accuracy_curves(results, folder / PICTURE)
        figures.accuracy_matrix(results, folder / MATRIX_PICTURE)
    log.info(final_table(results))
    if uploads:
        uploads.is_due |= bool(training.compare)  # they came after the last task's upload
        uploads.finish()
    return results
