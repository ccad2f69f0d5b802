"""Models of the preset passlora, and of ridge: taught, asked, rolled back, merged, served; by the command line."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from quick import SMALL, SMALL_FLAGS, write_digits
from quick import quick as quick
from safetensors.torch import load_file
from transformers import pipeline

import passlora.serving  # noqa: F401
from passlora import Config, PassLora, PassloraError, train
from passlora.folder import saving
from passlora.folder.manifest import read_manifest
from passlora.hub import pull

BORN = {
    "passlora": ["--lift_width", "60"],
    "ridge": ["--preset", "acil", "--lift_width", "60", "--classifier_views", "4"],
    "plain": ["--preset", "slda", "--shrinkage", "error"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("digits")
    for lesson, digits in (("first", [0, 1, 2]), ("second", [3, 4])):
        write_digits(root / lesson / "train", digits, 14)
        write_digits(root / lesson / "test", range(digits[-1] + 1), 8, start=60)
    return root


@pytest.mark.parametrize("kind", BORN)
def test_a_life(kind, data, tmp_path, cli):
    model = tmp_path / "model"
    code, out, err = cli("learn", model, "--data", data / "first", *SMALL_FLAGS, *BORN[kind])
    assert code == 0, err
    code, out, err = cli("learn", model, "--data", data / "second")
    assert code == 0 and "knows 5 classes now" in out, err
    code, out, _ = cli("predict", model, data / "second" / "test", "--json", "--top_k", "1")
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(answers) == 40
    code, out, err = cli("eval", model, "--data", data / "second")
    assert code == 0, err
    entry = read_manifest(model).tasks[-1]
    right = [answer["file"].split("/")[-2] == answer["predictions"][0]["label"] for answer in answers]
    assert 100 * np.mean(right) == pytest.approx(entry.accuracy) and entry.accuracy > 50, "chance is 20"
    code, out, err = cli("merge", model, tmp_path / "served", "--format", "transformers")
    assert code == 0, err
    code, _, err = cli("merge", model, tmp_path / "timm")
    assert code == 0 if kind == "plain" else (code == 2 and "choose the format transformers" in err)
    asked = pipeline("image-classification", model=str(tmp_path / "served"))
    picture = Image.open(next((data / "second" / "test" / "digit 3").iterdir())).convert("RGB")
    theirs = {row["label"]: row["score"] for row in asked(picture, top_k=5)}
    (ours,) = PassLora.from_pretrained(model).predict([picture])
    assert theirs == pytest.approx({p.label: p.probability for p in ours}, abs=1e-5)
    assert cli("rollback", model, "--to_task", "0")[0] == 0
    assert len(PassLora.from_pretrained(model).classes) == 3


def test_a_served_model_of_a_stranger_asks_for_no_odd_map(data, tmp_path, cli):
    model = tmp_path / "model"
    assert cli("learn", model, "--data", data / "first", *SMALL_FLAGS, *BORN["passlora"])[0] == 0
    assert cli("merge", model, tmp_path / "served", "--format", "transformers")[0] == 0
    config = tmp_path / "served" / "config.json"
    settings = json.loads(config.read_text())
    assert settings["lift"] == "fourier" and settings["lift_width"] == 60 and settings["classifier_views"] == 4
    for odd in ({"lift": "cubic"}, {"lift_width": 10**9}, {"lift_width": "60"}, {"classifier_views": 3}):
        config.write_text(json.dumps({**settings, **odd}))
        with pytest.raises(PassloraError, match="not ones that passlora writes"):
            pipeline("image-classification", model=str(tmp_path / "served"))


def test_tasks_of_another_split_make_the_same_answers(tmp_path):
    """Through whole runs, on the bundled backbone: 4 + 6 classes, and 7 + 3 the other way round."""
    base = {"dataset_name": "digits", "max_train_per_class": 8, "max_test_per_class": 6, "preset": "passlora"}
    base |= {"lift_width": 80, "adapt_tasks": "none"}
    streams = {"one": {"task_sizes": [4, 6]}, "other": {"task_sizes": [7, 3], "class_order": list(range(9, -1, -1))}}
    for name, stream in streams.items():
        train(Config.make(**base, **stream, output_dir=str(tmp_path / name)))
    one, other = (PassLora.from_pretrained(tmp_path / name) for name in streams)
    z = torch.randn(20, 4, 192, generator=torch.Generator().manual_seed(0))
    order = [other.classes.index(name) for name in one.classes]
    classifiers = [model.learner.network.classifier for model in (one, other)]
    linear = [replace(classifier.as_linear(), heavy_tails=False) for classifier in classifiers]
    scores = [part(part.map(z)) * own.temperature() for part, own in zip(linear, classifiers, strict=True)]
    # The sums are the same to 1e-12 (test_discriminant.py); features of an image differ by rounding with its batch.
    torch.testing.assert_close(scores[1][:, order], scores[0], rtol=1e-4, atol=1e-4)


def test_recent_tasks_are_kept_as_far_as_there_is_room(tmp_path, monkeypatch, cli):
    """At least two of them, so that the last lesson can be undone; what is gone says so."""
    monkeypatch.setattr(saving, "RECENT_BYTES", 1)
    folder = tmp_path / "model"
    for digit in range(4):
        data = write_digits(tmp_path / f"lesson {digit}", [digit], 3)
        born = [*SMALL_FLAGS, "--lift_width", "20"] if digit == 0 else []
        assert cli("learn", folder, "--data", data, *born)[0] == 0
    assert [bool(task.files) for task in read_manifest(folder).tasks] == [False, False, True, True]
    assert sorted(path.name for path in folder.glob("task_*")) == ["task_02", "task_03"]
    code, _, err = cli("rollback", folder, "--to_task", "0")
    assert code == 2 and "were not kept (keep_tasks recent): there are tasks 2 to 3" in err
    assert cli("rollback", folder, "--to_task", "2")[0] == 0
    assert len(PassLora.from_pretrained(folder).classes) == 3
    assert cli("rollback", folder, "--prune")[0] == 0
    monkeypatch.setattr(saving, "RECENT_BYTES", 10**9)
    assert cli("learn", folder, "--data", data)[0] == 0, "it is taught on from there"
    assert [bool(task.files) for task in read_manifest(folder).tasks] == [False, False, True, True]


def test_what_is_stored_is_sums_and_no_image(data, tmp_path, cli):
    assert cli("learn", tmp_path / "m", "--data", data / "first", *SMALL_FLAGS, *BORN["passlora"])[0] == 0
    state = load_file(tmp_path / "m" / "task_00" / "classifier.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "means": (3, 60),
        "counts": (3,),
        "scatter": (60 * 61 // 2,),
        "strength": (1,),
        "temperature_losses": (113,),
    }
    assert state["counts"].tolist() == [14, 14, 14]


def test_a_new_model_of_a_preset_by_name_keeps_its_budget():
    assert PassLora.create(**SMALL).learner.config.training.num_train_epochs == 3
    assert PassLora.create(**SMALL, preset="pass").learner.config.training.num_train_epochs == 15


def test_views_of_a_model_that_reads_four(data, tmp_path, cli):
    assert cli("learn", tmp_path / "m", "--data", data / "first", *SMALL_FLAGS, *BORN["passlora"])[0] == 0
    image = next((data / "first" / "test" / "digit 1").iterdir())
    answers = [cli("predict", tmp_path / "m", image, *views)[1] for views in ([], ["--views", "4"])]
    assert answers[0] == answers[1] and "digit" in answers[0]
    code, _, err = cli("predict", tmp_path / "m", image, "--views", "1")
    assert code == 2 and "views must be 4, which the model's classifier reads" in err


def test_help_tells_what_a_new_model_is(cli):
    _, out, _ = cli("learn", "--help")
    text = " ".join(out.split())
    assert "(default: passlora for a new model)" in text and "(default: auto for a new model)" in text
    assert "(default: 3 for a new model, else as the model was last taught)" in text


def test_nothing_is_fetched_of_a_task_that_was_not_kept(monkeypatch, tmp_path):
    fetched = []
    monkeypatch.setattr(pull, "download", lambda repo_id, name, revision: fetched.append(name))
    monkeypatch.setattr(pull, "sizes", lambda *names: None)
    source = pull.Source(tmp_path, tmp_path, "ann/x", "main")
    source.fetch([])
    assert fetched == []
    source.fetch(["task_00/settings.json"])
    assert fetched == ["task_00/settings.json"]
