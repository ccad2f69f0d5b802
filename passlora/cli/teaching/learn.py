"""passlora learn: new classes for a model, or a new model."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from passlora import files
from passlora.cli.arguments import FOLDER, READING, add_command, add_data, add_model, reading_settings
from passlora.cli.flags import add_flags, chosen_flags
from passlora.cli.output import warn
from passlora.config import FIELDS, LEARN_PRESET, LEARN_SUMS, PRESETS, Config, describe, for_learning, hub_id
from passlora.display.tables import mistakes, table
from passlora.environment import is_first_process
from passlora.errors import PassloraError
from passlora.folder import history, saving
from passlora.folder.lock import lock
from passlora.folder.manifest import AUGMENTATION, BUDGET, MANIFEST, read_manifest

# Settled for good when a model is made.
BORN_WITH = tuple(name for name, knob in FIELDS.items() if knob.group in ("model", "method"))
# May differ from lesson to lesson.
TEACHING = (*BUDGET, "per_device_eval_batch_size", "mixed_precision", "save_epochs", "save_steps", "seed")


def add(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "learn",
        "teach a model new classes; none of the old images is needed",
        "Teach a model the classes of a folder or dataset, as one more task. A MODEL that does not exist yet is "
        "started, with the flags of the groups model and method. With --save_steps or --save_epochs the same command "
        "continues a lesson that was cut off.",
    )
    add_model(parser, FOLDER)
    add_data(parser)
    parser.add_argument(
        "--on_known",
        choices=["error", "skip", "extend"],
        default="error",
        help="classes the model knows already: error, skip (leave them out), extend (learn from more images of them, "
        "as if they had been there before) (default: error)",
    )
    defaults = dict.fromkeys((*BUDGET, *AUGMENTATION), "as the model was last taught")
    new = {"preset": LEARN_PRESET, **PRESETS[LEARN_PRESET], **LEARN_SUMS}
    for name, value in new.items():
        before = ", else as the model was last taught" if name in BUDGET else ""
        defaults[name] = f"{describe(value)} for a new model{before}"
    add_flags(parser, (*BORN_WITH, *READING, *AUGMENTATION, *TEACHING), defaults)
    return parser


def run(arguments: argparse.Namespace) -> int:
    folder, reading = Path(arguments.model), reading_settings(arguments)
    flags = {name: value for name, value in chosen_flags(arguments).items() if name not in reading}
    check_can_learn(folder, flags)  # before anything is written, and before the seconds that torch takes
    with lock(folder) if is_first_process() else nullcontext():
        exists = check_can_learn(folder, flags)  # another process may have been faster
        if is_first_process():
            files.tidy(folder)
        if not exists and is_first_process():
            print(f"{folder} is a new model", flush=True)
        from passlora.model.passlora import PassLora

        model = PassLora.from_pretrained(folder, **flags) if exists else PassLora.create(**flags)
        lesson = model.learn(arguments.data, on_known=arguments.on_known, folder=folder, **reading)
        model.save_pretrained(folder)
    if not is_first_process():
        return 0
    print_lesson(lesson, folder, model.classes)
    return 0 if lesson.untested is None else 1


def check_can_learn(folder: Path, flags: dict[str, Any]) -> bool:
    """Whether the folder holds a model already; an error if it can neither be taught so, nor become one."""
    if not (folder / MANIFEST).is_file():
        if hub_id(str(folder)) is not None:
            raise PassloraError(
                f"{folder} is not here: to teach a model of the Hub, passlora pull {folder} first; to start a new one "
                f"there, make the folder {folder.parent} first"
            )
        Config.make(**for_learning(flags), num_tasks=1)
        saving.check_new_model(folder)
        return False
    settled = [name for name in flags if name in BORN_WITH and name != "model_name_or_path"]
    if settled:
        raise PassloraError(f"{settled[0]} was settled when {folder} was made: leave it out")
    read_manifest(folder).config(**flags)
    history.check_no_rollback(folder)
    return True


def print_lesson(lesson: Any, folder: Path, classes: list[str]) -> None:
    """What a Lesson brought, for a model that knows `classes` now."""
    num_classes = len(classes)
    if lesson.continued_at is not None:
        print(f"continued a lesson that was cut off, from its step {lesson.continued_at}")
    if lesson.untested is not None:
        warn(f"learnt and saved, but not tested: {lesson.untested}")
    if lesson.skipped_classes:
        print(f"skipped, known already: {', '.join(lesson.skipped_classes)}")

    def some(names: list[str]) -> str:
        return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")

    more = f"; more of {some(lesson.extended_classes)}" if lesson.extended_classes else ""
    what = f"{len(lesson.new_classes)} classes from {lesson.images} images in {lesson.seconds:.0f} s"
    print(f"learnt {what}: {some(lesson.new_classes) or 'none new'}{more}")
    shown = {
        "old classes before": lesson.old_before,
        "old classes after": lesson.old_after,
        "new classes": lesson.new_after,
        "all classes": lesson.all_after,
    }
    measured = [[what, f"{value:.1f}%"] for what, value in shown.items() if value is not None]
    if measured:
        print(table(measured))
    for evaluation in list(lesson.evaluations.values())[:1]:
        worst = mistakes(classes, evaluation.confusion)
        if worst:
            print(worst)
    if 0 < lesson.tested_classes < num_classes:
        print(f"tested on {lesson.tested_classes} of {num_classes} classes")
    print(f"{folder} knows {num_classes} classes now; ask it: passlora predict {folder} IMAGE...")
