"""What the commands of a model's life take: learn, predict, eval, robustness, info, rollback, merge, push, pull."""

from __future__ import annotations

import argparse
from typing import Any

from passlora.cli.flags import add_flags, describe
from passlora.config.knobs import FIELDS
from passlora.folder.manifest import AUGMENTATION, BUDGET, LEARN_BUDGET

BORN_WITH = tuple(name for name, knob in FIELDS.items() if knob.group in ("model", "method"))
DATA = tuple(name for name, knob in FIELDS.items() if knob.group == "data" and name != "dataset_name")
READING = tuple(
    name
    for name in DATA
    if name not in (*AUGMENTATION, "test_fraction", "max_classes", "max_train_per_class", "max_test_per_class")
)
NEW_MODEL = {name: f"{describe(value)} for a new model, else as before" for name, value in LEARN_BUDGET.items()}
TEACHING = (*BUDGET, "per_device_eval_batch_size", "mixed_precision", "save_epochs", "save_steps", "seed")

FOLDER = "a model's folder, such as runs/digits"
ANYWHERE = FOLDER + ", or user/name on the Hub"


def add_commands(commands: Any) -> None:
    for add in (
        add_learn,
        add_predict,
        add_evaluate,
        add_robustness,
        add_info,
        add_rollback,
        add_merge,
        add_push,
        add_pull,
    ):
        add(commands)


def add_learn(commands: Any) -> None:
    parser = add_command(
        commands,
        "learn",
        "teach a model new classes; none of the old images is needed",
        "Teach a model the classes of a folder or dataset, as one more task. A MODEL that does not exist yet is "
        "started, with the flags of the groups model and method. With --save_steps or --save_epochs the same command "
        "continues a lesson that was cut off.",
        FOLDER,
    )
    parser.add_argument("--data", required=True, metavar="FOLDER", help="images by class, or any dataset_name")
    parser.add_argument(
        "--on_known",
        choices=["error", "skip"],
        default="error",
        help="classes the model knows already (default: error)",
    )
    kept = dict.fromkeys((*BUDGET, *AUGMENTATION), "as the model was last taught")
    add_flags(parser, (*BORN_WITH, *READING, *AUGMENTATION, *TEACHING), {**kept, **NEW_MODEL})


def add_predict(commands: Any) -> None:
    parser = add_command(
        commands,
        "predict",
        "name what is on images",
        "Name what is on images. Unreadable files are reported and skipped; the exit code is then 1.",
    )
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="image files, or folders of them")
    parser.add_argument("--top_k", type=int, default=5, help="classes to show an image (default: 5)")
    parser.add_argument("--views", type=int, help="1, or 4 for the ensemble of rotations (default: the model's own)")
    parser.add_argument("--batch_size", type=int, default=64, help="images a step (default: 64)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object a line")
    form.add_argument("--csv", action="store_true", help="comma-separated values, with a header")
    add_task_flags(parser)


def add_evaluate(commands: Any) -> None:
    parser = add_command(
        commands,
        "eval",
        "test a model on labelled images",
        "Accuracy of each task's classes and of all, calibration error, and the confusion matrix as CSV and picture. "
        "Uses the test split of the data, or all of it if it has none.",
    )
    parser.add_argument("--data", required=True, metavar="FOLDER", help="images by class, or any dataset_name")
    parser.add_argument(
        "--output_dir", help="where the confusion matrix goes (default: MODEL/eval; ./NAME-eval for one on the Hub)"
    )
    add_task_flags(parser)
    add_flags(parser, READING)


def add_robustness(commands: Any) -> None:
    parser = add_command(
        commands,
        "robustness",
        "test a model on damaged images",
        "Accuracy under 15 corruptions (noise, blur, weather, digital), each and on average, at the strengths of "
        "ImageNet-C; for images of up to 64 pixels those of CIFAR-100-C. Needs: "
        'pip install "passlora[robustness]". Uses the test split of the data, or all of it if it has none.',
    )
    parser.add_argument("--data", required=True, metavar="FOLDER", help="images by class, or any dataset_name")
    parser.add_argument("--severity", type=int, default=1, help="1 (mild) to 5 (default: 1)")
    parser.add_argument("--corruptions", nargs="+", metavar="NAME", help="only these, such as fog snow (default: all)")
    parser.add_argument(
        "--output_dir", help="where the numbers go (default: MODEL/eval; ./NAME-eval for one on the Hub)"
    )
    add_task_flags(parser)
    add_flags(parser, (*READING, "max_test_per_class"))


def add_info(commands: Any) -> None:
    parser = add_command(
        commands, "info", "show a model's tasks, classes and sizes", "Tasks, classes, dates, accuracies and sizes."
    )
    parser.add_argument("--json", action="store_true", help="everything, for a program to read")
    add_revision(parser)


def add_rollback(commands: Any) -> None:
    parser = add_command(
        commands,
        "rollback",
        "make a model what it was after an earlier task",
        "Make a model what it was after an earlier task. Nothing is deleted until --prune; until then any task can be "
        "gone back to.",
        FOLDER,
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--to_task", type=int, help="the last task to keep; 0 is the first")
    choice.add_argument("--prune", action="store_true", help="confirm: delete what the rollback left behind")


def add_merge(commands: Any) -> None:
    parser = add_command(
        commands,
        "merge",
        "fold the adapter into plain weights, for serving without peft",
        "Write a folder with the backbone, adapter folded in, and the head as its classifier.",
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument(
        "--format",
        choices=["timm", "transformers"],
        default="timm",
        help="timm: timm.create_model('local-dir:OUT', pretrained=True) reads it, without passlora; transformers: "
        "pipeline('image-classification', model='OUT') does, after import passlora.serving, with the ensemble of "
        "rotations inside (default: timm)",
    )
    add_task_flags(parser)


def add_push(commands: Any) -> None:
    parser = add_command(
        commands,
        "push",
        "upload a model to the Hugging Face Hub",
        "Upload a model to the Hugging Face Hub: one commit with what changed, and a tag that names the last task "
        "(task-00 is the first). Log in before, with: hf auth login.",
        FOLDER,
    )
    parser.add_argument("repo", metavar="USER/NAME", help="where to; made if it does not exist")
    parser.add_argument("--private", action="store_true", help="make the repository private, if it is made")
    parser.add_argument("--revision", help="branch to commit to (default: main; another gets no tag)")
    parser.add_argument("--create_pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--force", action="store_true", help="replace another model, or later tasks of this one")


def add_pull(commands: Any) -> None:
    parser = commands.add_parser(
        "pull",
        help="download a model from the Hugging Face Hub",
        description="Download a model from the Hugging Face Hub into a folder of its own: all of its tasks. A folder "
        "that holds an earlier state of the same model is brought up to date.",
        allow_abbrev=False,
    )
    parser.add_argument("repo", metavar="USER/NAME", help="the model on the Hub")
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="where to (default: ./NAME)")
    add_revision(parser)


def add_command(commands: Any, name: str, short: str, long: str, what: str = ANYWHERE) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=short, description=long, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help=what)
    return parser


def add_task_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", type=int, help="the model as it was after this task; 0 is the first (default: now)")
    parser.add_argument("--model_name_or_path", help="where the backbone lies, if it came from a local checkpoint")
    add_revision(parser)


def add_revision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", help="branch, tag or commit of a model on the Hub (default: main)")
