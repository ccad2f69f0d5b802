"""Teach, ask, test, go back, pass on: through the command line, on real digits."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from quick import SMALL, SMALL_FLAGS, write_digits
from quick import quick as quick
from safetensors.torch import save_file

from passlora import Config, PassloraError, train
from passlora.cli.main import main
from passlora.cli.teaching import learn as learn_command
from passlora.display import figures
from passlora.folder import manifest
from passlora.model.passlora import PassLora
from passlora.training.steps import TaskTraining

WRITE = figures.write  # what `quick` replaces
FLAGS = ["--num_train_epochs", "5", "--lr_milestones", "4", "--crop_padding", "0", "--horizontal_flip", "false"]
FLAGS += ["--per_device_train_batch_size", "4"]


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A model started by `learn` on three digits, and taught two more; images by class in folders."""
    root = tmp_path_factory.mktemp("life")
    write_digits(root / "first" / "train", [0, 1, 2], 16)
    write_digits(root / "first" / "test", [0, 1, 2], 10, start=60)
    write_digits(root / "second" / "train", [3, 4], 16)
    write_digits(root / "second" / "test", [0, 1, 2, 3, 4], 10, start=60)
    main(
        ["learn", str(root / "model"), "--data", str(root / "first"), "--preset", "pass++", *FLAGS, "--brightness", "0"]
    )
    main(["learn", str(root / "model"), "--data", str(root / "second")])
    return root


@pytest.fixture
def model(taught, tmp_path):
    shutil.copytree(taught / "model", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def stopped_at(monkeypatch):
    """Ctrl-C at the n-th step, for the time of the block."""

    @contextmanager
    def stop(step):
        losses, calls = TaskTraining.losses, []

        def counted(self, *args):
            calls.append(1)
            if len(calls) == step:
                raise KeyboardInterrupt
            return losses(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(TaskTraining, "losses", counted)
            yield

    return stop


def test_learning_keeps_the_old_classes_and_takes_in_the_new(taught):
    first = PassLora.from_pretrained(taught / "model", task=0)
    model = PassLora.from_pretrained(taught / "model")
    assert first.classes == ["digit 0", "digit 1", "digit 2"]
    assert model.classes == [*first.classes, "digit 3", "digit 4"]
    before, after = first.evaluate(taught / "first"), model.evaluate(taught / "second")
    assert np.diagonal(before.confusion).sum() / 30 > 0.6
    old, new = np.diagonal(after.confusion)[:3].sum() / 30, np.diagonal(after.confusion)[3:].sum() / 20
    assert old > 0.5 and new > 0.3, (old, new)


def test_the_next_task_is_learnt_as_the_first_one_was(taught):
    config = PassLora.from_pretrained(taught / "model").learner.config
    assert config.training.num_train_epochs == 5 and config.training.per_device_train_batch_size == 4
    assert config.data.horizontal_flip is False and config.data.brightness == 0
    changed = PassLora.from_pretrained(taught / "model", num_train_epochs=2).learner.config
    assert changed.training.num_train_epochs == 2


def test_what_learn_prints(model, tmp_path, cli):
    write_digits(tmp_path / "third" / "train", [5], 6)
    write_digits(tmp_path / "third" / "test", range(6), 2, start=60)
    code, out, _ = cli("learn", model, "--data", tmp_path / "third", "--num_train_epochs", "1")
    assert code == 0 and "learnt 1 classes from 6 images" in out and "knows 6 classes now" in out
    for line in ("old classes before", "old classes after", "new classes", "all classes"):
        assert line in out
    assert "tested on" not in out, "every class was"
    assert (model / "task_02" / "adapter_model.safetensors").is_file()


def test_a_new_model_says_so_and_a_name_of_the_hub_is_no_folder(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_digits(tmp_path / "data", [1, 2], 1)
    code, out, _ = cli("learn", "animals", "--data", "data", "--num_train_epochs", "1")
    assert code == 0 and out.startswith("animals is a new model\n")
    code, _, err = cli("learn", "ann/animals", "--data", "data")
    assert code == 2 and "passlora pull ann/animals first" in err and not (tmp_path / "ann").exists()
    code, _, err = cli("learn", "animals", "--data", "data/nope")
    assert code == 2 and "data/nope does not exist" in err and err.count("\n") == 1
    code, out, _ = cli("info", "animals", "--json")
    assert code == 0 and json.loads(out)["classes"] == ["digit 1", "digit 2"]
    settings = json.loads(out)["settings"]
    assert settings["preset"] == "passlora" and settings["num_train_epochs"] == 1, "a new model's, unless it is told"
    assert PassLora.create(preset="pass++", **SMALL).learner.config.training.per_device_train_batch_size == 8


def test_an_unreadable_test_image_does_not_cost_the_lesson(model, tmp_path, cli):
    write_digits(tmp_path / "third" / "train", [5], 2)
    write_digits(tmp_path / "third" / "test", [5], 2, start=60)
    next((tmp_path / "third" / "test" / "digit 5").iterdir()).write_bytes(b"broken")
    code, out, err = cli("learn", model, "--data", tmp_path / "third", "--num_train_epochs", "1")
    if "learnt" in out:  # read when it is needed
        assert code == 1 and "learnt and saved, but not tested" in err
        assert len(PassLora.from_pretrained(model).tasks) == 3
    else:  # or refused before anything is learnt
        assert code == 2 and "cannot read" in err


def test_settings_of_a_lesson_in_python(model, tmp_path):
    write_digits(tmp_path / "more", [6], 2)
    taught = PassLora.from_pretrained(model)
    taught.learn(tmp_path / "more", num_train_epochs=1, image_column=None)
    assert taught.learner.config.training.num_train_epochs == 1
    with pytest.raises(PassloraError, match=r"did you mean '(num_tasks|num_train_epochs)'"):
        taught.learn(tmp_path / "more", num_epochs=3)
    with pytest.raises(PassloraError, match="lora_r was settled"):
        taught.learn(tmp_path / "more", lora_r=8)
    assert repr(taught) == "PassLora(6 classes in 3 tasks, on passlora/vit-mini)"


def test_what_predict_takes(model, taught):
    path = next((taught / "second" / "test" / "digit 3").iterdir())
    loaded = PassLora.from_pretrained(model)
    one = list(loaded.predict(path))
    assert one == list(loaded.predict([str(path)])) == list(loaded.predict(Image.open(path)))
    assert one == list(loaded.predict(np.array(Image.open(path))))
    with pytest.raises(PassloraError, match="cannot read"):
        list(loaded.predict("nowhere.png"))
    with pytest.raises(PassloraError, match="learnt nothing yet"):
        PassLora.create().predict(path)
    evaluation = loaded.evaluate(taught / "second")
    assert evaluation.accuracy == pytest.approx(100 * np.trace(evaluation.confusion) / evaluation.confusion.sum())


def test_without_a_test_split_all_images_are_learnt(model, tmp_path, cli):
    write_digits(tmp_path / "plain", [5, 6], 3)
    code, out, _ = cli("learn", model, "--data", tmp_path / "plain", "--num_train_epochs", "1")
    assert code == 0 and "learnt 2 classes from 6 images" in out and "old classes" not in out
    assert PassLora.from_pretrained(model).tasks[-1].accuracy is None


def test_classes_that_are_known_already(model, tmp_path, cli):
    write_digits(tmp_path / "more", [1, 4, 7], 3)
    manifest = (model / "passlora.json").read_text()
    code, _, err = cli("learn", model, "--data", tmp_path / "more")
    assert code == 2 and "knows already: digit 1, digit 4" in err and err.count("\n") == 1
    assert (model / "passlora.json").read_text() == manifest
    flags = ["--on_known", "skip", "--num_train_epochs", "1"]
    code, out, _ = cli("learn", model, "--data", tmp_path / "more", *flags)
    assert code == 0 and "skipped, known already: digit 1, digit 4" in out and "learnt 1 classes from 3 images" in out
    code, _, err = cli("learn", model, "--data", tmp_path / "more", "--on_known", "skip")
    assert code == 2 and "no class that the model does not know" in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--lora_r", "8"], "lora_r was settled when"),
        (["--preset", "pass"], "preset was settled when"),
        (["--num_train_epochs", "x"], "whole number"),
        (["--learning_rat", "1"], "did you mean '--learning_rate'"),
    ],
)
def test_flags_that_do_not_fit_an_existing_model(model, taught, cli, flags, says):
    code, _, err = cli("learn", model, "--data", taught / "second", *flags)
    assert code == 2 and says in err and err.count("\n") == 1


def test_a_lesson_that_was_cut_off_goes_on(model, tmp_path, cli, stopped_at):
    """Stopped at its sixth step; the same command continues it, another one is told the difference."""
    write_digits(tmp_path / "more", [6, 7], 4)
    command = ["learn", model, "--data", tmp_path / "more", "--num_train_epochs", "5", "--save_steps", "2"]
    shutil.copytree(model, tmp_path / "undisturbed")
    assert cli("learn", tmp_path / "undisturbed", *command[2:])[0] == 0
    with stopped_at(4):
        assert cli(*command)[0] == 130
    assert (model / "checkpoint.safetensors").is_file() and len(PassLora.from_pretrained(model).tasks) == 2
    code, _, err = cli(*command, "--learning_rate", "0.1")
    assert code == 2 and "learning_rate was 0.005, is 0.1" in err and "delete" in err and err.count("\n") == 1
    write_digits(tmp_path / "others", [8], 4)
    code, _, err = cli("learn", model, "--data", tmp_path / "others", *command[4:])
    assert code == 2 and "dataset_name was local:" in err
    code, out, _ = cli(*command)
    assert code == 0 and "continued a lesson that was cut off, from its step 2" in out
    assert not (model / "checkpoint.safetensors").exists()
    for name in ("adapter_model.safetensors", "classifier.safetensors", "memory.safetensors"):
        parts = [(place / "task_02" / name).read_bytes() for place in (model, tmp_path / "undisturbed")]
        assert parts[0] == parts[1]


@pytest.mark.parametrize("content", [b"", b"x" * 100, None], ids=["empty", "garbage", "tensors that do not fit"])
def test_a_damaged_checkpoint_is_one_clear_error(model, tmp_path, cli, content):
    write_digits(tmp_path / "more", [6, 7], 2)
    path = model / "checkpoint.safetensors"
    path.write_bytes(content or b"")
    if content is None:
        save_file({"task": torch.tensor(2), "step": torch.tensor(1)}, path)
    code, _, err = cli("learn", model, "--data", tmp_path / "more")
    assert code == 2 and "delete" in err and err.count("\n") == 1
    assert len(PassLora.from_pretrained(model).tasks) == 2


def test_a_first_lesson_that_was_cut_off(tmp_path, cli, monkeypatch):
    """What it left is no obstacle for the same command; a folder of someone else's files is."""
    write_digits(tmp_path / "data", [1, 2], 2)
    command = ["learn", tmp_path / "new", "--data", tmp_path / "data", "--lift_width", "20", "--save_steps", "1"]
    write = manifest.write_json

    def killed(path, content):
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest, "write_json", killed)
    assert cli(*command)[0] == 130 and (tmp_path / "new" / "task_00").is_dir()
    monkeypatch.setattr(manifest, "write_json", write)
    assert cli(*command)[0] == 0 and PassLora.from_pretrained(tmp_path / "new").classes == ["digit 1", "digit 2"]
    code, _, err = cli("learn", tmp_path / "data", "--data", tmp_path / "data")
    assert code == 2 and "exists and is no model" in err
    code, _, err = cli("learn", tmp_path / "other", "--data", tmp_path / "nowhere")
    assert code == 2 and not (tmp_path / "other").exists(), "a lesson that never began leaves nothing"


def test_a_model_in_use_is_left_alone(model, taught, tmp_path, cli, held):
    write_digits(tmp_path / "more", [6], 2)
    before = (model / "passlora.json").read_text()
    with held(model):
        for command in (["learn", model, "--data", tmp_path / "more"], ["rollback", model, "--to_task", "0"]):
            code, _, err = cli(*command)
            assert code == 2 and "in use by another process" in err and err.count("\n") == 1
        with pytest.raises(PassloraError, match="in use by another process"):
            PassLora.from_pretrained(model).save_pretrained(model)
        assert cli("info", model)[0] == 0, "looking is free"
    assert (model / "passlora.json").read_text() == before


def test_the_commands_as_methods(model):
    whole = PassLora.from_pretrained(model)
    about = whole.info()
    assert about["classes"] == whole.classes and [task["bytes"] > 1000 for task in about["tasks"]] == [True, True]
    weight = PassLora.from_pretrained(model, task=0).learner.network.classifier.weight
    whole.rollback(0)
    assert len(whole.classes) == 3 and torch.equal(whole.learner.network.classifier.weight, weight)
    whole.rollback(1)
    assert len(whole.classes) == 5
    whole.rollback(0)
    assert whole.prune() == ["task_01"] and len(PassLora.from_pretrained(model).classes) == 3
    early = PassLora.create()
    for attempt in (early.info, lambda: early.rollback(0), lambda: early.push_to_hub("ann/x")):
        with pytest.raises(PassloraError, match="save_pretrained it first"):
            attempt()


def test_eval(model, taught, cli, monkeypatch):
    monkeypatch.setattr(figures, "write", WRITE)
    code, out, _ = cli("eval", model, "--data", taught / "second")
    assert code == 0 and "ECE" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("task", "all"))]
    assert [row[-3:-1] for row in rows] == [["3", "30"], ["2", "20"], ["5", "50"]]
    with open(model / "eval" / "confusion_matrix.csv", newline="") as file:
        table = list(csv.reader(file))
    confusion = np.array([[int(cell) for cell in row[1:]] for row in table[1:]])
    assert table[0][1:] == [f"digit {d}" for d in range(5)] and confusion.sum(axis=1).tolist() == [10] * 5
    assert f"{100 * np.trace(confusion) / 50:.1f}" == rows[-1][-1]
    assert (model / "eval" / "confusion_matrix.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = cli("eval", model, "--data", taught / "second", "--task", "0")
    assert code == 2 and "does not know: digit 3, digit 4" in err


def test_rollback_undo_and_prune(model, tmp_path, cli):
    whole = PassLora.from_pretrained(model)
    first = PassLora.from_pretrained(model, task=0)
    code, out, _ = cli("rollback", model, "--to_task", "0")
    assert code == 0 and "3 classes" in out
    back = PassLora.from_pretrained(model)
    assert back.classes == first.classes
    assert torch.equal(back.learner.network.classifier.weight, first.learner.network.classifier.weight)
    assert torch.equal(back.learner.memory.means, first.learner.memory.means)
    code, out, _ = cli("info", model)
    assert "--prune" in out

    write_digits(tmp_path / "other", [8], 3)
    code, _, err = cli("learn", model, "--data", tmp_path / "other")
    assert code == 2 and "rolled back and not confirmed" in err
    code, out, _ = cli("rollback", model, "--to_task", "1")
    assert code == 0 and "undo:" not in out and "--prune" not in cli("info", model)[1]
    assert PassLora.from_pretrained(model).classes == whole.classes, "nothing was lost"
    PassLora.from_pretrained(model).save_pretrained(model)

    cli("rollback", model, "--to_task", "0")
    code, out, _ = cli("rollback", model, "--prune")
    assert code == 0 and "deleted: task_01" in out and not (model / "task_01").exists()
    assert PassLora.from_pretrained(model).classes == first.classes
    assert cli("learn", model, "--data", tmp_path / "other", "--num_train_epochs", "1")[0] == 0
    assert PassLora.from_pretrained(model).classes == [*first.classes, "digit 8"]
    code, _, err = cli("rollback", model, "--to_task", "5")
    assert code == 2 and "has the tasks 0 to 1, not 5" in err


PLAIN_TIMM = """
import sys
sys.modules["passlora"] = sys.modules["peft"] = None  # whoever imports them fails
import timm, torch
out, x, y = sys.argv[1:]
model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
with torch.no_grad():
    torch.save(model(torch.load(x)), y)
"""


@pytest.mark.slow  # test_hub.py reads one by timm in this process
def test_merge_is_read_by_plain_timm(taught, tmp_path, cli):
    code, out, _ = cli("merge", taught / "model", tmp_path / "merged")
    assert code == 0 and "local-dir:" in out
    model = PassLora.from_pretrained(taught / "model")
    images = torch.randint(0, 255, (3, 3, 64, 64), dtype=torch.uint8)
    x = model.learner.network.backbone.prepare(images)
    torch.save(x, tmp_path / "x.pt")
    command = [sys.executable, "-c", PLAIN_TIMM, tmp_path / "merged", tmp_path / "x.pt", tmp_path / "y.pt"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    theirs, network = torch.load(tmp_path / "y.pt"), model.learner.network
    single = network.scores(network.features(images), ["single"], model.learner.memory)["single"]
    assert theirs.shape == (3, 5) and torch.allclose(theirs, single, atol=1e-4)
    assert json.loads((tmp_path / "merged" / "classes.json").read_text()) == model.classes
    code, _, err = cli("merge", taught / "model", tmp_path / "merged")
    assert code == 2 and "exists already" in err


STOCK_TRANSFORMERS = """
import json, sys
sys.modules["passlora"] = sys.modules["peft"] = None  # whoever imports them fails
from transformers import AutoModelForImageClassification, pipeline
out, *photos = sys.argv[1:]
model = AutoModelForImageClassification.from_pretrained(out)
print(json.dumps([[model.config.id2label[i] for i in range(5)], pipeline("image-classification", model=out)(photos)]))
"""


@pytest.mark.slow  # a process of its own
def test_merge_is_read_by_stock_transformers(taught, tmp_path, cli):
    assert cli("merge", taught / "model", tmp_path / "merged")[0] == 0
    photos = []
    for digit in range(5):  # as large as photographs are: small images are seen whole by passlora
        small = Image.open(next((taught / "second" / "test" / f"digit {digit}").iterdir())).convert("RGB")
        photos.append(tmp_path / f"{digit}.png")
        small.resize((256, 256), Image.Resampling.BICUBIC).save(photos[-1])
    command = [sys.executable, "-c", STOCK_TRANSFORMERS, tmp_path / "merged", *photos]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names, answers = json.loads(done.stdout.splitlines()[-1])
    model = PassLora.from_pretrained(taught / "model")
    assert names == model.classes
    for theirs, ours in zip(answers, model.predict(photos, views=1), strict=True):
        found, expected = {a["label"]: a["score"] for a in theirs}, {p.label: p.probability for p in ours}
        assert found == pytest.approx({label: expected[label] for label in found}, abs=0.02), "but for the resizing"


def test_a_model_saved_elsewhere_keeps_every_task(taught, tmp_path):
    model = PassLora.from_pretrained(taught / "model")
    model.save_pretrained(tmp_path / "copy")
    for task in (0, 1):
        a, b = (PassLora.from_pretrained(f, task=task).learner.network for f in (taught / "model", tmp_path / "copy"))
        assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    with pytest.raises(PassloraError, match="learnt nothing yet"):
        PassLora.create().save_pretrained(tmp_path / "empty")


def test_no_save_over_another_model_or_over_later_tasks(model, tmp_path):
    """What is in the folder must be what this one was loaded from."""
    write_digits(tmp_path / "data", [8, 9], 1)
    write_digits(tmp_path / "more", [7], 1)
    before = {path: path.read_bytes() for path in sorted(model.rglob("*.safetensors"))}
    fresh = PassLora.create(**SMALL, num_train_epochs=1, lr_milestones=[1])
    fresh.learn(tmp_path / "data")
    stale = PassLora.from_pretrained(model, num_train_epochs=1)
    for other in (fresh, PassLora.from_pretrained(model, task=0)):
        with pytest.raises(PassloraError, match="holds another model, or other tasks"):
            other.save_pretrained(model)
    assert before == {path: path.read_bytes() for path in sorted(model.rglob("*.safetensors"))}
    newer = PassLora.from_pretrained(model, num_train_epochs=1)
    newer.learn(tmp_path / "data")
    newer.save_pretrained(model)
    newer.save_pretrained(model)
    stale.learn(tmp_path / "more")
    with pytest.raises(PassloraError, match="holds another model, or other tasks"):
        stale.save_pretrained(model)
    assert len(PassLora.from_pretrained(model).tasks) == 3


def test_a_process_that_was_faster_is_not_overwritten(tmp_path, cli, monkeypatch):
    """Between the look at the folder and its lock, another process finishes the model's first lesson."""
    write_digits(tmp_path / "a", [1, 2], 1)
    write_digits(tmp_path / "b", [3, 4], 1)
    flags = ["--num_train_epochs", "1"]
    born = [*SMALL_FLAGS, *flags]
    lock, entered = learn_command.lock, []

    @contextmanager
    def late(folder):
        if not entered:
            entered.append(1)
            main(["learn", str(tmp_path / "m"), "--data", str(tmp_path / "a"), *born])
        with lock(folder):
            yield

    monkeypatch.setattr(learn_command, "lock", late)
    assert cli("learn", tmp_path / "m", "--data", tmp_path / "b", *flags)[0] == 0
    assert PassLora.from_pretrained(tmp_path / "m").classes == ["digit 1", "digit 2", "digit 3", "digit 4"]


@pytest.mark.parametrize(
    "name", [".lock", "results.json", "task_01/adapter_config.json", "task_02", "eval", ".passlora-x"]
)
def test_links_out_of_a_strangers_folder_are_not_followed(model, taught, tmp_path, cli, name):
    """Nothing outside is read, written, emptied or sent."""
    private = tmp_path / "private"
    private.mkdir()
    (private / "confusion_matrix.csv").write_text("mine")
    (private / "key").write_text("secret")
    path = model / name
    path.unlink(missing_ok=True)
    path.symlink_to(private if name in ("task_02", "eval", ".passlora-x") else private / "key")
    write_digits(tmp_path / "more", [9], 1)
    for command in (
        ["learn", model, "--data", tmp_path / "more", "--num_train_epochs", "1"],
        ["eval", model, "--data", taught / "second"],
        ["rollback", model, "--to_task", "0"],
        ["push", model, "ann/x"],
    ):
        code, _, err = cli(*command)
        assert code == 2 and "leads out of the model's folder" in err and err.count("\n") == 1
    if name != ".lock":
        with pytest.raises(PassloraError, match="leads out of the model's folder"):
            PassLora.from_pretrained(model).save_pretrained(tmp_path / "copy")
    assert (private / "key").read_text() == "secret" and (private / "confusion_matrix.csv").read_text() == "mine"


def test_a_readme_that_yaml_dislikes_is_no_obstacle(model, tmp_path, cli):
    write_digits(tmp_path / "more", [9], 1)
    for text in ("updated: 2026-13-45", "x: " + "[" * 5000, "\x00\xff"):
        (model / "README.md").write_text(f"---\n{text}\n---\n")
        PassLora.from_pretrained(model).save_pretrained(model)
    assert cli("learn", model, "--data", tmp_path / "more", "--num_train_epochs", "1")[0] == 0


def test_a_lesson_continues_with_the_same_images_only(model, tmp_path, cli, stopped_at):
    write_digits(tmp_path / "more", [6, 7], 5)
    command = ["learn", model, "--data", tmp_path / "more", "--num_train_epochs", "3", "--save_steps", "1"]
    with stopped_at(3):
        assert cli(*command)[0] == 130
    next((tmp_path / "more" / "digit 6").iterdir()).unlink()
    code, _, err = cli(*command)
    assert code == 2 and "images was 10, is 9" in err


def test_an_object_whose_lesson_was_interrupted_says_so(model, tmp_path, stopped_at):
    write_digits(tmp_path / "more", [6, 7], 2)
    taught = PassLora.from_pretrained(model)
    with stopped_at(1), pytest.raises(KeyboardInterrupt):
        taught.learn(tmp_path / "more")
    with pytest.raises(PassloraError, match="load it again"):
        taught.learn(tmp_path / "more")


def test_card_and_numbers_follow_a_rollback(tmp_path, cli):
    config = Config.make(
        **SMALL,
        dataset_name="digits",
        task_sizes=[4, 3, 3],
        max_train_per_class=1,
        max_test_per_class=1,
        preset="finetune",
        num_train_epochs=1,
        output_dir=str(tmp_path / "m"),
    )
    results = train(config)
    assert cli("rollback", tmp_path / "m", "--to_task", "1")[0] == 0
    assert "knows 7 classes, learnt in 2 tasks" in (tmp_path / "m" / "README.md").read_text()
    with pytest.raises(PassloraError, match="rolled back and not confirmed"):
        train(config)
    cli("rollback", tmp_path / "m", "--prune")
    trimmed = json.loads((tmp_path / "m" / "results.json").read_text())
    assert trimmed["last"] == results["stage_accuracy"][1] and len(trimmed["accuracy_matrix"]) == 2
    assert not trimmed["finished"] and len((tmp_path / "m" / "accuracy_matrix.csv").read_text().splitlines()) == 3
    again = train(config)
    assert again["accuracy_matrix"] == results["accuracy_matrix"], "the run goes on from there"


def test_a_run_does_not_take_lessons_for_its_own_tasks(tmp_path, cli):
    config = {"dataset_name": "digits", "task_sizes": [2, 2, 1, 5], "max_train_per_class": 1, "max_test_per_class": 1}
    config |= {**SMALL, "preset": "finetune", "num_train_epochs": 1, "output_dir": str(tmp_path / "m")}
    train(Config.make(**config))
    cli("rollback", tmp_path / "m", "--to_task", "0")
    cli("rollback", tmp_path / "m", "--prune")
    write_digits(tmp_path / "more", [6, 7], 1)
    assert cli("learn", tmp_path / "m", "--data", tmp_path / "more")[0] == 0
    with pytest.raises(PassloraError, match="has learnt other classes than this run's"):
        train(Config.make(**config))


def test_mixed_precision_of_a_lesson(model):
    taught = PassLora.from_pretrained(model, mixed_precision="no")
    assert taught.learner.accelerator.mixed_precision == "no"
    try:
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a new process: accelerate settles it once
        assert PassLora.create(mixed_precision="bf16").learner.accelerator.mixed_precision == "bf16"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_lesson_with_an_augmentation_of_its_own(tmp_path):
    """Settings of the data reach the images; a lesson refused leaves the model as it was."""
    write_digits(tmp_path / "a", [0, 1], 2)
    model = PassLora.create(**SMALL, num_train_epochs=1, lr_milestones=[1])
    with pytest.raises(PassloraError, match="look the same in every epoch"):
        model.learn(tmp_path / "a", cache_teacher=True, crop_padding=0, brightness=0)
    model.learn(tmp_path / "a", cache_teacher=True, crop_padding=0, brightness=0, horizontal_flip=False)
    assert model.classes == ["digit 0", "digit 1"]


def test_two_lessons_before_one_save(tmp_path):
    for name, digit in (("a", 0), ("b", 1), ("c", 2)):
        write_digits(tmp_path / name, [digit, digit + 5], 2)
    model = PassLora.create(**SMALL, preset="pass++", num_train_epochs=1, lr_milestones=[1])
    states = []
    for name in ("a", "b", "c"):
        model.learn(str(tmp_path / name))
        states.append(model.learner.network.classifier.weight.detach().clone())
    model.save_pretrained(tmp_path / "model")
    for task, weight in enumerate(states):
        assert torch.equal(
            PassLora.from_pretrained(tmp_path / "model", task=task).learner.network.classifier.weight, weight
        )
