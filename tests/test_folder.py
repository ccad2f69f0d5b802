"""A model's folder: nothing good is replaced by what is not, and nothing that passlora did not write is deleted."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading

import pytest
import timm
import torch
from quick import SMALL, quick, write_digits  # noqa: F401
from safetensors.torch import save_file

from passlora import PassLora, PassloraError
from passlora.folder.lock import lock
from passlora.training.learner import Learner

LESSON = {"num_train_epochs": 1, "per_device_train_batch_size": 8}


@pytest.fixture(scope="module")
def lessons(tmp_path_factory):
    root = tmp_path_factory.mktemp("lessons")
    return [write_digits(root / str(i), digits, 4) for i, digits in enumerate(((0, 1), (2, 3), (4,)))]


@pytest.fixture(scope="module")
def taught(tmp_path_factory, lessons):
    """Three lessons of slda, by folder; what the fixture's users change, they change in a copy."""
    folder = tmp_path_factory.mktemp("taught") / "model"
    model = PassLora.create(preset="slda", model_name_or_path="passlora/vit-mini")
    for lesson in lessons:
        model.learn(lesson)
        model.save_pretrained(folder)
    return folder


@pytest.fixture
def model(taught, tmp_path):
    return shutil.copytree(taught, tmp_path / "model")


def fingerprint(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


# --- what is not finite ------------------------------------------------------------------------------------------


def test_a_lesson_that_ends_in_no_numbers_leaves_the_model_alone(tmp_path, lessons, cli):
    """Fault 1: with keep_tasks last, the good model would be gone for ever."""
    made = PassLora.create(**SMALL, **LESSON, preset="finetune", keep_tasks="last")
    made.learn(lessons[0])
    made.save_pretrained(tmp_path / "m")
    before = fingerprint(tmp_path / "m")
    flags = ["--keep_tasks", "last", "--learning_rate", "1e30", "--num_train_epochs", "3"]
    code, _, err = cli("learn", tmp_path / "m", "--data", lessons[1], *flags)
    assert code == 2 and "lower --learning_rate" in err and "Traceback" not in err
    assert fingerprint(tmp_path / "m") == before


def test_the_last_update_is_looked_at_too(tmp_path, lessons, monkeypatch):
    """The losses were fine, the weights after the very last update are not."""
    made = PassLora.create(**SMALL, **LESSON, preset="finetune")
    made.learn(lessons[0])
    made.save_pretrained(tmp_path / "m")
    before, train = fingerprint(tmp_path / "m"), Learner.adapt

    def spoilt(self, *args):
        train(self, *args)
        with torch.no_grad():
            self.network.classifier.weight[0, 0] = torch.nan

    monkeypatch.setattr(Learner, "adapt", spoilt)
    with pytest.raises(PassloraError, match="no longer numbers"):
        made.learn(lessons[1], folder=tmp_path / "m")
    assert fingerprint(tmp_path / "m") == before
    with pytest.raises(PassloraError, match="half taught"):
        made.predict([])


# --- digests, marks ----------------------------------------------------------------------------------------------


def test_a_file_that_is_not_the_one_that_was_saved_is_refused_by_name(model, cli, tmp_path):
    part = model / "task_02" / "classifier.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with pytest.raises(PassloraError, match=r"task_02.classifier.safetensors is not the file that was saved"):
        PassLora.from_pretrained(model)
    assert PassLora.from_pretrained(model, task=1).classes == ["digit 0", "digit 1", "digit 2", "digit 3"]
    assert cli("info", model)[0] == 0
    code, _, err = cli("push", model, "ann/digits")
    assert code == 2 and "is not the file that was saved" in err


def test_pruning_deletes_what_passlora_wrote_and_nothing_else(model, cli):
    """Fault 4; no tensor of a pruned class is left."""
    (model / "task_photos").mkdir()
    (model / "task_photos" / "a.jpg").write_text("mine")
    (model / "task_notes.txt").write_text("mine")
    (model / "task_02" / "mine.txt").write_text("mine")
    (model / "task_90").mkdir()
    (model / "task_90" / "settings.json").write_text("mine")
    (model / "prototypes.safetensors").write_text("mine")
    assert cli("rollback", model, "--to_task", "0")[0] == 0
    code, out, _ = cli("rollback", model, "--prune")
    assert code == 0 and "task_01, task_02" in out and "task_90" not in out
    left = {str(p.relative_to(model)) for p in model.rglob("*") if p.is_file() and p.name not in ("README.md", ".lock")}
    assert left == {
        *("passlora.json", "task_00/classifier.safetensors", "task_00/settings.json"),
        *("task_photos/a.jpg", "task_notes.txt", "task_02/mine.txt", "task_90/settings.json", "prototypes.safetensors"),
    }
    assert PassLora.from_pretrained(model).classes == ["digit 0", "digit 1"]


def test_a_folder_in_the_way_is_told_before_anything_is_learnt(model, lessons, tmp_path, monkeypatch):
    (model / "task_03").mkdir()
    (model / "task_03" / "photo.txt").write_text("mine")
    monkeypatch.setattr(Learner, "learn", None)  # nothing may be learnt
    more = write_digits(tmp_path / "more", (7,), 3)
    with pytest.raises(PassloraError, match=r"task_03 holds files that are not passlora's"):
        PassLora.from_pretrained(model).learn(more, folder=model)


def test_saved_elsewhere_after_its_folder_went_on(model, tmp_path):
    held = PassLora.from_pretrained(model)
    (model / "task_00" / "classifier.safetensors").unlink()
    with pytest.raises(PassloraError, match="load the model again"):
        held.save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy" / "passlora.json").exists()


# --- what is written can be read ---------------------------------------------------------------------------------


def test_accuracy_over_some_classes_is_called_that(model, tmp_path, cli):
    """Fault 2: test images of the new class alone."""
    more = tmp_path / "more"
    for split, start in (("train", 0), ("test", 10)):
        write_digits(more / split, (7,), 4, start)
    code, out, _ = cli("learn", model, "--data", more)
    assert code == 0 and "tested on 1 of 6 classes" in out and "all classes" not in out
    entry = json.loads((model / "passlora.json").read_text())["tasks"][-1]
    assert entry["tested"] == 1 and "last" not in json.loads((model / "passlora.json").read_text())["results"]
    card = (model / "README.md").read_text()
    assert "tested on 1 of 6 classes" in card and "over all of them" not in card and "model-index" not in card
    assert "on 1 of 6 classes" in cli("info", model)[1]


@pytest.mark.parametrize("name", ["my..weights.safetensors", "~w.safetensors"])
def test_odd_names_of_weights_files_are_read_back(tmp_path, lessons, name, monkeypatch):
    """Fault 6."""
    network = timm.create_model("test_vit", num_classes=0, img_size=32)
    save_file(network.state_dict(), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    made = PassLora.create(model_name_or_path=name, model_architecture="test_vit", image_size=32, preset="ncm")
    made.learn(lessons[0])
    made.save_pretrained(tmp_path / "m")
    assert PassLora.from_pretrained(tmp_path / "m").classes == ["digit 0", "digit 1"]


def test_only_what_differs_from_the_defaults_is_written(taught):
    """Fault 18: a knob that a later version adds does not trouble this one."""
    settings = json.loads((taught / "passlora.json").read_text())["settings"]
    assert settings["preset"] == "slda" and "temperature" not in settings and "seed" not in settings


def test_a_task_is_restored_with_its_own_settings(tmp_path, lessons):
    made = PassLora.create(**SMALL, **LESSON, preset="finetune")
    made.learn(lessons[0])
    made.learn(lessons[1], learning_rate=0.002)
    made.save_pretrained(tmp_path / "m")
    rates = [PassLora.from_pretrained(tmp_path / "m", task=i).learner.config.training.learning_rate for i in (0, 1)]
    assert rates == [0.005, 0.002]


# --- one at a time -----------------------------------------------------------------------------------------------


def test_two_threads_do_not_hold_one_folder(tmp_path):
    """Fault 16; one thread may lock it again."""
    said = []

    def second():
        try:
            with lock(tmp_path / "m"):
                said.append("held")
        except PassloraError as error:
            said.append(str(error))

    with lock(tmp_path / "m"), lock(tmp_path / "m"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(said) == 1 and "in use by another process" in said[0]


# --- every preset makes a model ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "flags", "timm_reads_it"),
    [("slda", [], True), ("ncm", [], False), ("ncm", ["--ncm_metric", "euclidean"], True), ("fetril", [], False)],
)
def test_a_preset_that_is_fitted_lives_as_any_other(preset, flags, timm_reads_it, lessons, tmp_path, cli):
    folder = tmp_path / "m"
    born = ["--preset", preset, *flags, "--num_train_epochs", "1", "--lr_milestones", "1"]
    assert cli("learn", folder, "--data", lessons[0], *born)[0] == 0
    assert cli("learn", folder, "--data", lessons[1])[0] == 0
    picture = next((lessons[1] / "digit 2").iterdir())
    code, out, _ = cli("predict", folder, picture, "--json")
    assert code == 0 and len(json.loads(out)["predictions"]) == 4
    code, out, _ = cli("eval", folder, "--data", lessons[0])
    assert code == 0 and "all" in out
    assert cli("rollback", folder, "--to_task", "0")[0] == 0
    assert PassLora.from_pretrained(folder).classes == ["digit 0", "digit 1"]
    code, _, err = cli("merge", folder, tmp_path / "timm")
    assert (code == 0) == timm_reads_it, err
    assert timm_reads_it or "choose the format transformers" in err
    assert cli("merge", folder, tmp_path / "served", "--format", "transformers")[0] == 0
