"""The command line, in process where nothing heavy runs, and as a real process where it matters."""

from __future__ import annotations

import csv
import errno
import json
import logging
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import checkpoint_filter_fn

from passlora import cli as command_line
from passlora.cli.main import COMMANDS, main, make_parser
from passlora.cli.runs import env, train
from passlora.cli.teaching import learn
from passlora.config import FIELDS, Config

ROOT = Path(__file__).parent.parent


HEAVY = ("torch", "timm", "peft", "transformers", "accelerate", "datasets", "matplotlib")


def heavy_imports(*argv):
    """Run the command in a fresh interpreter, and tell which heavy packages it imported."""
    code = (
        "import sys\nfrom passlora.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["train", "--help"],
        ["train", "--learning_rat", "1"],
        ["train", "--lora_r", "x"],
        ["train", "--sst", "false"],
        ["validate", str(ROOT / "recipes/mini/digits.yaml")],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported_to_help_or_to_refuse(argv):
    assert "HEAVY []" in heavy_imports(*argv)


def test_help_lists_every_knob(cli):
    code, out, _ = cli("train", "--help")
    assert code == 0
    for name in FIELDS:
        assert f"--{name}" in out
    code, out, _ = cli("--help")
    assert code == 0 and all(command in out for command in ("train", "validate", "env"))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["train", "--learning_rat", "1"], "unknown flag --learning_rat; did you mean '--learning_rate'?"),
        (["train", "--learning_rate=fast"], "learning_rate must be a number, got 'fast'"),
        (["train", "--preset", "pas++"], "did you mean 'pass++'"),
        (["train", "extra"], "unexpected argument 'extra'"),
        (["trian"], "invalid choice: 'trian'"),
        (["train", "--lr", "1"], "unknown flag --lr; here it is --learning_rate"),
        (["train", "--epochs=3"], "unknown flag --epochs; here it is --num_train_epochs"),
        (["train", "--batch-size", "3"], "unknown flag --batch-size; here it is --per_device_train_batch_size"),
        (["learn", "m", "--data", "x", "--model", "y"], "unknown flag --model; here it is --model_name_or_path"),
        (["learn", "m", "--data", "x", "--lora_rank", "4"], "unknown flag --lora_rank; here it is --lora_r"),
        (["--versoin"], "unknown flag --versoin; did you mean '--version'?"),
        (["train", "--config", "nowhere.yaml"], "no recipe at nowhere.yaml"),
        (["train", "--dataset_name", "digits"], "how many tasks?"),
        (["train", "--lora_r"], "expected one argument"),
        (["validate"], "required: RECIPE"),
    ],
)
def test_mistakes_get_one_sentence(cli, argv, says):
    code, out, err = cli(*argv)
    assert code == 2 and out == ""
    assert says in err and err.startswith("passlora: error: ") and err.count("\n") == 1


def test_an_unknown_key_in_a_recipe(cli, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("num_tasks: 2\nlora_rank: 4\n")
    code, _, err = cli("validate", str(recipe))
    assert code == 2 and "unknown key 'lora_rank'; did you mean 'lora_r'?" in err


def test_validate(capsys):
    recipe = str(ROOT / "recipes/resnet18_scratch/cifar100_t20.yaml")
    main(["validate", recipe, "--kd_weight", "3"])
    out = capsys.readouterr().out
    assert "base_classes: 40" in out and "kd_weight: 3" in out and f"passlora train --config {recipe}" in out


def test_env(capsys):
    main(["env"])
    out = capsys.readouterr().out
    for name in ("passlora", "torch", "timm", "peft", "accelerate", "accelerators"):
        assert name in out


def test_without_a_command_the_help_is_shown(capsys):
    main([])
    assert "start here" in capsys.readouterr().out


def test_version(cli):
    code, out, _ = cli("--version")
    assert code == 0 and out.startswith("passlora ")


FAST = ["--max_train_per_class", "2", "--max_test_per_class", "1", "--num_train_epochs", "1"]
TINY = ["--model_name_or_path", "test_vit", "--pretrained", "false", "--image_size", "32"]


@pytest.mark.slow
def test_train_as_a_process(tmp_path):
    """`python -m passlora train` runs the embedded default, here with less to compute; not a terminal: no bars."""
    command = [sys.executable, "-m", "passlora", "train", *FAST, *TINY, "--compare", "none"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step/s" not in done.stderr and "Warning" not in done.stderr
    assert "saved in runs/digits" in done.stdout


def test_the_default_run_and_the_same_again(tmp_path, cli, monkeypatch):
    flags = [*FAST, *TINY, "--compare", "none"]
    monkeypatch.chdir(tmp_path)
    assert cli("train", *flags)[0] == 0
    results = json.loads((tmp_path / "runs/digits/results.json").read_text())
    assert results["task_sizes"] == [4, 2, 2, 2] and results["compare"] == {}
    code, out, _ = cli("train", *flags)
    assert code == 0 and out.count("finished already") == 1
    code, _, err = cli("train", *flags, "--kd_weight", "3")
    assert code == 2 and "kd_weight was 10.0, is 3.0" in err


@pytest.mark.parametrize("size", [(40, 30), (90, 80)], ids=["decoded once", "decoded by workers"])
def test_bad_data_is_one_sentence_from_the_command_line(size, cli, image_tree, tmp_path):
    root = image_tree(size=size)
    bad = root / "train" / "dog" / "2.png"
    bad.write_bytes(b"")
    code, _, err = cli("train", "--dataset_name", str(root), "--num_tasks", "3", "--output_dir", str(tmp_path / "o"))
    assert code == 2 and "dog/2.png" in err and err.count("\n") == 1


@pytest.mark.slow
def test_mixed_precision_and_a_tracker(tmp_path, bf16_works):
    pytest.importorskip("tensorboard")
    command = [
        *[sys.executable, "-m", "passlora", "train", *TINY, "--task_sizes", "5", "5", "--num_train_epochs", "1"],
        *["--max_train_per_class", "2", "--max_test_per_class", "1", "--compare", "none", "--output_dir", "out"],
        *["--mixed_precision", "bf16" if bf16_works else "no", "--report_to", "tensorboard"],
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    logs = [json.loads(line) for line in (tmp_path / "out/training_log.jsonl").read_text().splitlines()]
    assert all(0 < log["losses"]["total"] < 1000 for log in logs)
    assert list((tmp_path / "out/logs").rglob("events*"))


def test_a_tracker_that_is_not_installed(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = cli("train", "--report_to", "wandb", "--output_dir", str(tmp_path / "o"))
    assert code == 2 and "pip install wandb" in err


# --- switches that were ignored, names that were two ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--new_loss", "binary", "--proto_aug", "none", "--hardness", "false"], "goes with distilled outputs"),
        (["--preset", "lwf-kd", "--new_loss", "binary"], "goes with distilled outputs: set --kd_on logits"),
        (["--preset", "slda", "--proto_aug", "implicit"], "proto_aug implicit has no effect: it needs"),
        (["--preset", "ncm", "--kd_weight", "3"], "kd_weight 3 has no effect: it needs --adapt_tasks all"),
        (["--preset", "finetune", "--kd_on", "logits"], "kd_on logits has no effect: it needs a --kd_weight above 0"),
        (["--inference", "ncm"], "inference ncm is called nearest_prototype since 0.2"),
        (["--extra_inference", "single", "ncm"], "extra_inference ncm is called nearest_prototype since 0.2"),
    ],
)
@pytest.mark.parametrize(
    "command", [["train", "--num_tasks", "2"], ["learn", "MODEL", "--preset", "pass++", "--data", "digits"]]
)
def test_a_switch_without_effect_and_an_old_name_are_refused(command, flags, says, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(*command, *flags)
    assert code == 2 and says in err and err.count("\n") == 1 and out == ""
    assert not any(tmp_path.iterdir()), "nothing was begun"


def test_distilled_outputs_leave_the_loss_on_old_classes_in(cli, tmp_path):
    flags = [*TINY, "--dataset_name", "digits", "--task_sizes", "5", "5", *FAST, "--per_device_train_batch_size", "4"]
    code, _, err = cli("train", *flags, "--kd_on", "logits", "--output_dir", tmp_path)
    assert code == 0, err
    first, second = [json.loads(line)["losses"] for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    assert first["old"] == first["kd"] == 0 and first["total"] == pytest.approx(first["new"])
    assert second["old"] > 0 and second["kd"] > 0, "in 0.1 the switch dropped the loss on prototypes"
    assert second["total"] == pytest.approx(second["new"] + 10 * second["old"] + 10 * second["kd"], rel=1e-5)


# --- images of any size --------------------------------------------------------------------------------------------


def striped(root, sizes, first=None):
    """Two classes that differ in the direction of their stripes alone; `first` is the size of an image before all."""
    for name in ("across", "down"):
        (root / name).mkdir(parents=True)
        for i, (width, height) in enumerate(sizes):
            rows, columns = np.mgrid[:height, :width]
            stripes = ((rows if name == "across" else columns) + i) % 8 < 4
            pixels = np.repeat((stripes * 255).astype(np.uint8)[..., None], 3, axis=2)
            Image.fromarray(pixels).save(root / name / f"{i:02}.png")
    if first:
        Image.new("RGB", first).save(root / "across" / "-first.png")
    return root


@pytest.mark.parametrize("command", ["learn", "train"])
def test_one_tiny_image_does_not_make_all_images_tiny(command, cli, tmp_path):
    """In 0.1 an image of one pixel that sorts first made every training image one of one pixel."""
    data = striped(tmp_path / "data" / "train", [(32, 32)] * 6, first=(1, 1)).parent
    tested = striped(data / "test", [(32, 32)] * 4)
    model, flags = tmp_path / "model", ["--preset", "slda"]
    if command == "learn":
        code, _, err = cli("learn", model, "--data", data, *flags)
    else:
        code, _, err = cli("train", "--dataset_name", data, "--num_tasks", "1", *flags, "--output_dir", model)
    assert code == 0, err
    code, out, err = cli("predict", model, tested, "--json", "--top_k", "1")
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(answers) == 8, err
    assert all(Path(a["file"]).parent.name == a["predictions"][0]["label"] for a in answers)


def test_predict_answers_as_eval_counts_image_by_image(cli, tmp_path):
    sizes = [(1, 1), (40, 30), (8, 8), (30, 40), (64, 20), (20, 64), (64, 64)]
    model = tmp_path / "model"
    taught = striped(tmp_path / "data", [*sizes, (150, 100)])
    assert cli("learn", model, "--data", taught, *TINY, "--preset", "slda")[0] == 0
    seen = []
    for name, tested in (("small", sizes), ("small and large", [*sizes, (150, 100), (70, 20)])):
        root = striped(tmp_path / name, tested, first=(3, 2))
        code, _, err = cli("eval", model, "--data", root)
        assert code == 0, err
        rows = (model / "eval" / "confusion_matrix.csv").read_text().splitlines()
        counted = {line.split(",")[0]: [int(n) for n in line.split(",")[1:]] for line in rows[1:]}
        code, out, err = cli("predict", model, root, "--csv", "--top_k", "1", "--batch_size", "5")
        assert code == 0, err
        answers = [(Path(row["file"]).parent.name, row["label"]) for row in csv.DictReader(out.splitlines())]
        names = rows[0].split(",")[1:]
        assert counted == {truth: [answers.count((truth, name)) for name in names] for truth in ("across", "down")}
        seen.append(counted)
    assert all(sum(map(sum, counted.values())) == n for counted, n in zip(seen, (15, 19), strict=True))


@pytest.mark.parametrize("size", [16, 48, 64])
def test_a_checkpoint_at_another_image_size(size, cli, tmp_path):
    """Its position embedding is resampled, as timm does with its own weights; 0.1 refused it."""
    torch.manual_seed(0)
    network = timm.create_model("test_vit", num_classes=0, img_size=32)
    save_file(network.state_dict(), tmp_path / "own.safetensors")
    data, model = striped(tmp_path / "data", [(size, size)] * 3), tmp_path / "model"
    file = ["--model_name_or_path", tmp_path / "own.safetensors"]
    flags = ["--model_architecture", "test_vit", "--image_size", size, "--preset", "ncm"]
    code, _, err = cli("learn", model, "--data", data, *file, *flags)
    assert code == 0, err
    code, out, err = cli("predict", model, data, *file, "--json")
    assert code == 0 and len(out.splitlines()) == 6, err
    by_timm = timm.create_model("test_vit", num_classes=0, img_size=size)
    by_timm.load_state_dict(checkpoint_filter_fn(network.state_dict(), by_timm))
    images = torch.stack([to_tensor(path) for path in sorted((data / "down").iterdir())])
    with torch.no_grad():
        mean = by_timm.eval()((images - 0.5) / 0.5).mean(dim=0)
    kept = load_file(model / "task_00" / "classifier.safetensors")["means"]
    assert torch.allclose(kept[1], mean, atol=1e-4), "the features are those of timm's own network"
    code, _, err = cli("learn", tmp_path / "other", "--data", data, *file, *flags[:3], "20", *flags[4:])
    assert code == 2 and "20" in err and err.count("\n") == 1


def to_tensor(path):
    return torch.from_numpy(np.asarray(Image.open(path), dtype=np.float32) / 255).permute(2, 0, 1)


# --- the commands --------------------------------------------------------------------------------------------------


def test_every_module_of_a_command_is_registered():
    found = {
        name
        for room in ("runs", "teaching", "asking", "sharing")
        for _, name, _ in pkgutil.iter_modules([f"{command_line.__path__[0]}/{room}"], f"passlora.cli.{room}.")
    }
    assert found == {module.__name__ for module in COMMANDS}


@pytest.mark.parametrize("module", COMMANDS, ids=lambda module: module.__name__.rsplit(".")[-1])
def test_every_command_explains_itself_and_is_documented(module):
    commands = make_parser()._subparsers._group_actions[0]
    (name,) = [name for name, parser in commands.choices.items() if parser.get_default("run") is module.run]
    parser = commands.choices[name]
    assert [choice.help for choice in commands._choices_actions if choice.dest == name] != [None]
    assert parser.description and all(action.help for action in parser._actions)
    assert any(f"passlora {name}" in page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))


# --- what is printed -----------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch):
    """`passlora env` does this instead."""
    return lambda act: monkeypatch.setattr(env, "run", lambda arguments: act() or 0)


def raising(error):
    def act():
        raise error

    return act


def speak():
    logging.getLogger("passlora").debug("thought")
    logging.getLogger("passlora.somewhere").info("learnt %d classes", 3)
    logging.getLogger("passlora").warning("no upload")


def test_what_the_library_says_is_printed_once_and_only_for_the_time_of_a_command(cli, command, caplog, monkeypatch):
    logger = logging.getLogger("passlora")
    before = logger.handlers[:], logger.level, logger.propagate
    command(speak)
    for _ in range(2):
        assert cli("env") == (0, "learnt 3 classes\n", "passlora: no upload\n")
        assert (logger.handlers, logger.level, logger.propagate) == before
    assert not caplog.records, "a handler of the root would say it twice"
    monkeypatch.setenv("RANK", "1")
    assert cli("env") == (0, "", "")
    command(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["env"])
    assert (logger.handlers, logger.level, logger.propagate) == before


@pytest.mark.parametrize(
    ("names", "where"), [((), ""), (("a/b.json",), " at a/b.json"), (("a/tmp", None, "a/b.json"), " at a/b.json")]
)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_refusal_of_the_system_is_one_sentence(cli, command, number, names, where):
    command(raising(OSError(number, os.strerror(number), *names)))
    assert cli("env") == (2, "", f"passlora: error: env stopped{where}: {os.strerror(number)}\n")


def test_an_error_of_a_library_that_only_looks_like_one_of_the_system_is_not_hidden(command):
    command(raising(OSError("not a model")))
    with pytest.raises(OSError, match="not a model"):
        main(["env"])


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="only Linux has a disk that is always full")
def test_output_onto_a_full_disk():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "passlora", "reproduce"], stdout=full, stderr=-1, text=True)
    assert (done.returncode, done.stderr) == (2, f"passlora: error: reproduce stopped: {os.strerror(errno.ENOSPC)}\n")


@pytest.mark.parametrize("preset", ["pass++", "slda"])
@pytest.mark.parametrize("data", ["digits", "./my photos"])
def test_a_run_ends_with_the_commands_that_go_on_from_there(capsys, preset, data):
    config = Config.make(preset=preset, num_tasks=2, dataset_name=data, output_dir="runs/x")
    train.print_what_next(config)
    where = " --dataset_name './my photos'" if data == "./my photos" else ""
    again = f"again: passlora train --config runs/x/config.yaml{where} --output_dir runs/x-again\n"
    assert capsys.readouterr().out == (
        "\nsaved in runs/x: results.json, accuracy.png, config.yaml, one task_NN folder a task\n"
        f"look:  passlora info runs/x\nask:   passlora predict runs/x IMAGE...\n{again}"
    )
    train.print_what_next(config.replace(seeds=[0, 1]))
    saved = "\nsaved in runs/x: results.json, accuracy.png, config.yaml, one folder a run\n"
    assert capsys.readouterr().out == saved + again


def test_a_lesson_tested_on_some_classes_gives_no_accuracy_of_all(capsys):
    def printed(**measured):
        nothing = dict.fromkeys(("old_before", "old_after", "new_after", "all_after", "continued_at", "untested"))
        about = {
            "new_classes": ["owl"],
            "skipped_classes": [],
            "extended_classes": [],
            "evaluations": {},
            "images": 5,
            "seconds": 1.0,
            "tested_classes": 0,
        }
        learn.print_lesson(SimpleNamespace(**{**nothing, **about, **measured}), Path("m"), ["a", "b", "owl"])
        return capsys.readouterr().out.splitlines()[1:-1]

    whole = printed(old_before=90.0, old_after=80.0, new_after=70.0, all_after=75.0, tested_classes=3)
    assert whole[-1].split() == ["all", "classes", "75.0%"] and len(whole) == 4
    assert printed(new_after=70.0, tested_classes=1) == [
        "new classes  70.0%",
        "tested on 1 of 3 classes",
    ]
    assert printed() == []


def test_an_interruption_says_whether_the_same_command_goes_on(cli, command, monkeypatch):
    command(raising(KeyboardInterrupt()))
    assert cli("env") == (130, "", "\npasslora: stopped\n")
    monkeypatch.setattr("passlora.cli.runs.train.run", lambda arguments: raising(KeyboardInterrupt())())
    code, _, err = cli("train")
    assert code == 130 and "stopped; the same command goes on" in err


def test_a_reader_who_has_seen_enough():
    command = f"{sys.executable} -m passlora train --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("usage") and done.stderr == ""
