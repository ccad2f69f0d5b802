"""Arguments that several commands share, and what is read from them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from passlora import files
from passlora.cli.flags import chosen_flags
from passlora.config import FIELDS, Config, hub_id
from passlora.errors import PassloraError
from passlora.folder import history
from passlora.folder.layout import CHECKPOINT
from passlora.folder.lock import check_links, lock
from passlora.folder.manifest import AUGMENTATION, read_manifest

FOLDER = "a model's folder, such as runs/digits"
ANYWHERE = FOLDER + ", or user/name on the Hub"

NOT_READING = (
    *AUGMENTATION,
    "dataset_name",
    "test_fraction",
    "max_classes",
    "max_train_per_class",
    "max_test_per_class",
)
READING = tuple(name for name, knob in FIELDS.items() if knob.group == "data" and name not in NOT_READING)


def add_command(commands: Any, name: str, short: str, long: str) -> argparse.ArgumentParser:
    """A command, with one line for the list of commands and a few for its own help."""
    return commands.add_parser(name, help=short, description=long, allow_abbrev=False)


def add_model(parser: argparse.ArgumentParser, what: str = ANYWHERE) -> None:
    parser.add_argument("model", metavar="MODEL", help=what)


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, metavar="FOLDER", help="images by class, or any dataset_name")


def add_task_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", type=int, help="the model as it was after this task; 0 is the first (default: now)")
    add_backbone_path(parser)
    add_revision(parser)


def add_backbone_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model_name_or_path", help="where the backbone lies, if it came from a local checkpoint")


def add_revision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", help="branch, tag or commit of a model on the Hub (default: main)")


def load_model(arguments: argparse.Namespace) -> Any:
    """The PassLora that MODEL and the flags of `add_task_flags` name, to be asked."""
    if hub_id(arguments.model) is None:
        read_manifest(Path(arguments.model))  # refuse before the seconds that torch takes
    from passlora.model.passlora import PassLora

    path = arguments.model_name_or_path
    settings = {"model_name_or_path": path} if path else {}
    return PassLora.from_pretrained(arguments.model, arguments.task, arguments.revision, asking=True, **settings)


@contextmanager
def changed(arguments: argparse.Namespace) -> Iterator[Any]:
    """The PassLora of MODEL; saved when the block is done, as it was if anything goes wrong."""
    folder, path = Path(arguments.model), arguments.model_name_or_path
    read_manifest(folder)  # refuse before the seconds that torch takes
    with lock(folder):
        history.check_no_rollback(folder)
        if (folder / CHECKPOINT).is_file():
            raise PassloraError(
                f"a lesson of {folder} was cut off: finish it with the same passlora learn, or delete its {CHECKPOINT}"
            )
        files.tidy(folder)
        from passlora.model.passlora import PassLora

        model = PassLora.from_pretrained(folder, **({"model_name_or_path": path} if path else {}))
        yield model
        model.save_pretrained(folder)


def how_to_undo(folder: Any, model: Any) -> str:
    """The last change of a model that was saved: in words."""
    if not model.tasks[-2].files:
        return (
            f"it cannot be undone: the task before was not kept (keep_tasks {model.learner.config.training.keep_tasks})"
        )
    return f"undo: passlora rollback {folder} --to_task {len(model.tasks) - 2}"


def reading_settings(arguments: argparse.Namespace, names: tuple[str, ...] = READING) -> dict[str, Any]:
    """The flags that say how data is read, as checked values."""
    given = {name: value for name, value in chosen_flags(arguments).items() if name in names}
    return {name: Config.make(num_tasks=1, **{name: value}).flat()[name] for name, value in given.items()}


def evaluation_folder(arguments: argparse.Namespace) -> Path:
    """Where a look at a model leaves its files: --output_dir, its folder `eval`, or beside us for one on the Hub."""
    here, is_remote = Path(arguments.model), hub_id(arguments.model) is not None
    if arguments.output_dir is None and not is_remote:
        check_links(here)
    return Path(arguments.output_dir or (f"{here.name}-eval" if is_remote else here / "eval"))
