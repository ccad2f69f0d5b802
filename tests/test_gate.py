"""Whether to adapt: decided by held-out classes of the first task, kept with the model, the same when interrupted."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import timm
import torch
from quick import SMALL, SMALL_FLAGS, write_digits
from quick import quick as quick
from safetensors.torch import save_file

from passlora import Config, PassLora, train
from passlora.data.batches import Images, select
from passlora.data.dataset import load_dataset
from passlora.folder.manifest import read_manifest
from passlora.method.classifiers.ncm import left_out_losses
from passlora.method.discriminant import TEMPERATURES
from passlora.training import gate
from passlora.training.accelerator import make_accelerator
from passlora.training.learner import Learner
from passlora.training.steps import TaskTraining

DIGITS = {"dataset_name": "digits", "max_train_per_class": 16, "max_test_per_class": 4, "horizontal_flip": False}
DIGITS |= {"crop_padding": 0, "preset": "passlora", "lift_width": 64, "task_sizes": [8, 2]}

FINE = {"num_train_epochs": 1}  # the bundled backbone, which knows enough of digits


def run(folder, **options):
    return train(Config.make(**{**DIGITS, **options, "output_dir": str(folder)}))


@pytest.fixture(scope="module")
def blind(tmp_path_factory):
    """A backbone that sees nothing until it is trained: all weights of its first layer are 0."""
    network = timm.create_model("test_vit", num_classes=0, img_size=32)
    state = network.state_dict()
    state["patch_embed.proj.weight"].zero_()
    file = tmp_path_factory.mktemp("blind") / "blind.safetensors"
    save_file(state, file)
    training = {
        "lora_r": 0,
        "sst": False,  # four times as quick
        "learning_rate": 0.003,
        "per_device_train_batch_size": 16,
        "num_train_epochs": 8,
        "lr_milestones": [7],
    }
    return {"model_name_or_path": str(file), "model_architecture": "test_vit", "image_size": 32, **training}


@pytest.fixture(scope="module")
def adapted(blind, tmp_path_factory):
    """Its run: the folder, and the results."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    return folder, run(folder, **blind)


def test_a_backbone_that_knows_enough_stays_as_it_is(tmp_path, caplog):
    caplog.set_level(logging.INFO, "passlora")
    run(tmp_path / "run", **FINE)
    (said,) = [line for line in caplog.messages if line.startswith("adapting the backbone")]
    assert "does not pay" in said and "% right before and" in said
    assert read_manifest(tmp_path / "run").settings["adapt_tasks"] == "none"
    assert not list((tmp_path / "run").rglob("adapter*")), "a task that did not adapt stores no adapter"
    pretrained = PassLora.create(preset="slda").learner.network
    loaded = PassLora.from_pretrained(tmp_path / "run").learner.network
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(pretrained(x), loaded(x)), "nothing of the trial is left"


def test_one_that_gains_is_adapted_and_says_so(adapted, blind):
    folder, results = adapted
    assert read_manifest(folder).settings["adapt_tasks"] == "first"
    first, second = (folder / f"task_0{task}" / "backbone.safetensors" for task in (0, 1))
    assert first.read_bytes() == second.read_bytes(), "later tasks do not train it"
    assert results["last"] > 25
    model = PassLora.from_pretrained(folder, model_name_or_path=blind["model_name_or_path"])
    assert model.learner.config.method.adapt_tasks == "first" and not model.learner.adapts


def test_too_few_classes_to_tell(tmp_path, cli):
    data = write_digits(tmp_path / "data", [0, 1, 2], 6)
    code, out, err = cli("learn", tmp_path / "m", "--data", data, *SMALL_FLAGS, "--lift_width", "20")
    assert code == 0, err
    assert "takes four classes of two images to tell" in out + err
    assert read_manifest(tmp_path / "m").settings["adapt_tasks"] == "none"
    code, out, _ = cli("info", tmp_path / "m", "--json")
    assert json.loads(out)["settings"]["preset"] == "passlora", "what learn starts a model with"


def test_a_trial_that_diverges_leaves_the_backbone_as_it_is(tmp_path, caplog):
    caplog.set_level(logging.INFO, "passlora")
    data = write_digits(tmp_path / "data", [0, 1, 2, 3], 4)
    model = PassLora.create(
        **SMALL, learning_rate=1e30, num_train_epochs=2, per_device_train_batch_size=4, lift_width=20
    )
    before = {name: tensor.clone() for name, tensor in model.learner.network.backbone.state().items()}
    model.learn(data)
    assert any("it stays as it is: the loss is no longer finite" in line for line in caplog.messages)
    assert model.learner.config.method.adapt_tasks == "none"
    assert all(torch.equal(t, before[name]) for name, t in model.learner.network.backbone.state().items())


def test_a_class_of_one_image_is_not_asked(tmp_path, caplog):
    caplog.set_level(logging.INFO, "passlora")
    data = write_digits(write_digits(tmp_path / "data", [0, 1, 2, 3], 4), [4, 5], 1)
    model = PassLora.create(**SMALL, num_train_epochs=1, lift_width=20)
    model.learn(data)
    assert sum(line.startswith("adapting the backbone") for line in caplog.messages) == 1, "the others were"


def test_what_is_trained_on_is_not_asked():
    config = Config.make(**DIGITS)
    data = load_dataset(config.data, 0)
    images = Images(data.train, 64, config.data, "digits")
    task = select(images, data.train.labels, data.class_names, {str(d): i + 3 for i, d in enumerate((5, 7, 2, 9, 4))})
    task = gate.numbered_from_0(task)
    assert sorted(set(task.classes[task.rows].tolist())) == [0, 1, 2, 3, 4]
    tuned = gate.every_other(task, 0)
    assert sorted(set(data.train.labels[tuned.rows].tolist())) == [2, 4, 5]
    assert sorted(set(tuned.classes[tuned.rows].tolist())) == [0, 1, 2]
    others = gate.every_other(task, 1)
    assert sorted(set(data.train.labels[others.rows].tolist())) == [7, 9]
    assert sorted(set(others.classes[others.rows].tolist())) == [0, 1]


def test_an_image_is_told_by_means_without_it():
    z = torch.randn(11, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    classes = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3])
    losses, right = left_out_losses(z, classes, torch.bincount(classes), lambda tensor: tensor)
    unit = torch.nn.functional.normalize(z, dim=1)
    scores = torch.zeros(11, 4, dtype=z.dtype)
    for i in range(11):
        for c in range(4):
            rows = [j for j in range(11) if classes[j] == c and j != i]
            scores[i, c] = torch.cosine_similarity(unit[rows].mean(dim=0), z[i], dim=0)
    best = min(TEMPERATURES, key=lambda t: float(torch.nn.functional.cross_entropy(scores / t, classes)))
    expected = torch.nn.functional.cross_entropy(scores / best, classes, reduction="none")
    torch.testing.assert_close(losses, expected)
    assert torch.equal(right, scores.argmax(dim=1) == classes)


@pytest.mark.parametrize(
    ("gains", "pays"),
    [
        ([0.4, 0.5, 0.3, 0.4], True),
        ([1.0, 0.3, -0.2, -0.3], False),  # one class of four says nothing of those to come: 0.7 standard errors
        ([-0.1, -0.2, -0.1, -0.2], False),
        ([0.9, 0.3, -0.1, -0.2], False),  # 0.9
        ([0.9, 0.5, -0.1, -0.2], True),  # 1.1
    ],
)
def test_classes_are_counted_not_images(monkeypatch, gains, pays):
    """`gains`: by how much the mean cross entropy of each class falls in the trial that it is asked in."""
    classes, scatter, done = torch.arange(4).repeat_interleave(10), torch.tensor([-1.0, 1.0]).repeat(20), []

    def trial(learner, data, count, half, name):
        done.append(half)
        # What is not asked, since it was trained on, would say the opposite.
        gain = torch.where(classes % 2 == half, -9.0, torch.tensor(gains)[classes])
        return gate.Answers(classes, -gain + scatter, classes >= 0)

    class Alone:
        add_up = staticmethod(lambda tensor: tensor)

    monkeypatch.setattr(gate, "answers", lambda *given: gate.Answers(classes, torch.zeros(40), classes >= 0))
    monkeypatch.setattr(gate, "answers_of_a_trial", trial)
    data = gate.TaskData(None, np.arange(40), classes.numpy())
    assert gate.adapting_pays(Alone, data, 4, "") is pays and done == [0, 1]


def test_a_first_task_that_was_cut_off_ends_as_if_it_had_not_been(tmp_path, monkeypatch, adapted, blind):
    """Inside the training that follows the trial: the checkpoint tells what was decided."""
    folder, whole = adapted
    losses, calls = TaskTraining.losses, []

    def stop(self, *arguments):
        calls.append(self.head.num_classes == 8)
        if sum(calls) == 40:  # of 64 steps, after trials, which train half of the classes
            raise KeyboardInterrupt
        return losses(self, *arguments)

    monkeypatch.setattr(TaskTraining, "losses", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", save_steps=10, **blind)
    monkeypatch.setattr(TaskTraining, "losses", losses)
    monkeypatch.setattr(gate, "answers", lambda *arguments: pytest.fail("decided already"))
    results = run(tmp_path / "run", save_steps=10, **blind)
    assert results["accuracy_matrix"] == whole["accuracy_matrix"]
    for name in ("backbone", "classifier"):
        files = [place / "task_01" / f"{name}.safetensors" for place in (folder, tmp_path / "run")]
        assert files[0].read_bytes() == files[1].read_bytes(), name


def test_the_backbone_is_what_it_was_after_a_trial():
    config = Config.make(**{**DIGITS, **SMALL})
    learner = Learner(config, make_accelerator(config.training))
    before = {name: tensor.clone() for name, tensor in learner.network.backbone.state().items()}
    data = load_dataset(config.data, 0)
    images = Images(data.train, 32, config.data, "digits")
    task = select(images, data.train.labels, data.class_names, {str(d): d for d in range(8)})
    gate.adapting_pays(learner, task, 8, "trial")
    after = learner.network.backbone.state()
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
