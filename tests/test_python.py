"""docs/python.md as a reader runs it; callbacks; features."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from quick import SMALL, write_digits
from quick import quick as quick

from passlora import Callback, Config, PassLora, PassloraError, train

PAGE = (Path(__file__).parent.parent / "docs" / "python.md").read_text(encoding="utf-8")


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_digits(Path("photos/first"), [0, 1], 8)
    write_digits(Path("photos/second"), [2], 8)
    shutil.copy(next(Path("photos/first/digit 1").iterdir()), "photo.png")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 6
    names = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    out = capsys.readouterr().out
    for words in (
        "['digit 0', 'digit 1']",
        "% right",
        "task 0 after 0 classes",
        "epoch 1 loss",
        "(1, 192)",
        "over all ten",
    ):
        assert words in out, words
    assert names["model"].classes == ["digit 0", "digit 1", "digit 2"]
    assert out.count("learnt") == 1 + 4, "of the lesson, and of the run's four tasks"


class Notes(Callback):
    def __init__(self):
        self.told = []

    def on_task_begin(self, model, task):
        self.told.append(("begin", task, len(model.classes)))

    def on_epoch_end(self, model, log):
        self.told.append(("epoch", log.task, log.epoch))

    def on_task_end(self, model, task, lesson):
        self.told.append(("end", task, tuple(lesson.new_classes), len(model.classes)))


def test_callbacks_are_told_in_order(tmp_path):
    data = write_digits(tmp_path / "data", [0, 1], 4)
    notes = Notes()
    model = PassLora.create(**SMALL, preset="finetune", num_train_epochs=2, lr_milestones=[1])
    model.learn(data, callbacks=[notes])
    assert notes.told == [
        ("begin", 0, 0),
        ("epoch", 0, 0),
        ("epoch", 0, 1),
        ("end", 0, ("digit 0", "digit 1"), 2),
    ]


def test_callbacks_of_a_run_hear_of_every_method(tmp_path):
    notes = Notes()
    base = {**SMALL, "dataset_name": "digits", "max_train_per_class": 3, "max_test_per_class": 2, "task_sizes": [5, 5]}
    train(Config.make(**base, preset="ncm", compare=["slda"], output_dir=str(tmp_path / "run")), callbacks=[notes])
    assert [part[:2] for part in notes.told] == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)] * 2


def test_an_error_of_a_callback_is_the_callers(tmp_path):
    class Stops(Callback):
        def on_task_begin(self, model, task):
            raise RuntimeError("enough")

    data = write_digits(tmp_path / "data", [0, 1], 4)
    model = PassLora.create(**SMALL, preset="ncm")
    with pytest.raises(RuntimeError, match="enough"):
        model.learn(data, callbacks=[Stops()])
    assert model.classes == [] and model.learn(data).new_classes == ["digit 0", "digit 1"], "nothing was learnt before"


def test_features_are_those_that_the_classifier_reads(tmp_path):
    data = write_digits(tmp_path / "data", [0, 1], 4)
    model = PassLora.create(**SMALL, preset="ncm", ncm_metric="euclidean")
    before = model.features(sorted(data.rglob("*.png")))
    model.learn(data)
    z = model.features(sorted(data.rglob("*.png")), batch_size=3)
    torch.testing.assert_close(z, before, rtol=1e-4, atol=1e-5)
    means = model.learner.network.classifier.means
    torch.testing.assert_close(torch.stack([z[:4].mean(dim=0), z[4:].mean(dim=0)]), means, rtol=1e-4, atol=1e-5)
    assert model.features([]).shape == (0, z.shape[1])
    assert model.features(Image.fromarray(np.zeros((9, 9), np.uint8))).shape == (1, z.shape[1])
    with pytest.raises(PassloraError, match="no such file"):
        model.features("nowhere.png")
