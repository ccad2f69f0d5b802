"""A trained model's folder: read back exactly, by passlora and by stock peft; and refused when it is not right."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import shutil
from contextlib import suppress

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from quick import SMALL
from quick import quick as quick
from safetensors.torch import load_file, save_file

from passlora import Config, PassloraError, load_config, train
from passlora.data.dataset import load_dataset
from passlora.folder.manifest import read_manifest
from passlora.model.passlora import PassLora
from passlora.model.predictions import scores


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three tasks of digits, learnt well enough to be told from chance."""
    folder = tmp_path_factory.mktemp("model") / "digits"
    config = Config.make(
        dataset_name="digits",
        task_sizes=[3, 2, 5],
        max_train_per_class=6,
        max_test_per_class=5,
        crop_padding=0,
        horizontal_flip=False,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        radius="running",
        output_dir=str(folder),
    )
    return folder, config, train(config)


@pytest.fixture
def copy(trained, tmp_path):
    """A copy that may be damaged."""
    shutil.copytree(trained[0], tmp_path / "model")
    return tmp_path / "model"


def all_test_images(config):
    split = load_dataset(config.data, 0).test
    return [split.rgb(i) for i in range(len(split))], split.labels


@pytest.mark.parametrize("task", [None, 0, 1])
def test_any_task_is_restored_as_it_was(trained, task):
    """The accuracy of the restored model is the one recorded in training, image by image over the same test set."""
    folder, config, results = trained
    model = PassLora.from_pretrained(folder, task=task)
    stage = 2 if task is None else task
    seen = [3, 5, 10][stage]
    assert model.classes == [str(d) for d in range(seen)]
    images, labels = all_test_images(config)
    chosen = np.flatnonzero(labels < seen)
    answers = list(model.predict([images[i] for i in chosen], top_k=1, batch_size=7))
    right = np.mean([answer[0].label == str(labels[i]) for answer, i in zip(answers, chosen, strict=True)])
    assert 100 * right == pytest.approx(results["stage_accuracy"][stage])
    memory = model.learner.memory
    stored = load_file(folder / f"task_{stage:02d}" / "memory.safetensors")
    assert memory.num_classes == seen and model.learner.task == stage + 1
    assert memory.radius == float(stored["radius"]) > 0 and torch.equal(memory.means, stored["means"])


def test_the_radius_of_each_task_is_its_own(trained):
    """It is a running one: what task 1 had is not what task 2 has."""
    radii = [PassLora.from_pretrained(trained[0], task=task).learner.memory.radius for task in range(3)]
    assert len(set(radii)) == 3


def test_predictions_are_probabilities_best_first(trained):
    model = PassLora.from_pretrained(trained[0])
    image = Image.new("L", (8, 8), 90)
    (answer,) = model.predict([image], top_k=99)
    values = [p.probability for p in answer]
    assert len(answer) == 10 and values == sorted(values, reverse=True) and sum(values) == pytest.approx(1)
    (one,), (four,) = model.predict([image], views=1), model.predict([image], views=4)
    assert [p.probability for p in one] != [p.probability for p in four]
    with pytest.raises(PassloraError, match="views must be 1 or 4"):
        next(model.predict([image], views=2))


def test_images_of_many_sizes_in_one_batch(trained):
    model = PassLora.from_pretrained(trained[0])
    images = [Image.effect_noise(size, 60) for size in ((8, 8), (200, 120), (64, 64), (8, 8), (65, 64))]
    together = scores(model.learner, images, "multiview")
    alone = torch.cat([scores(model.learner, [image], "multiview") for image in images])
    assert torch.allclose(together, alone, atol=1e-4)


@pytest.mark.slow  # of the bundled backbone; test_hub.py has one of a backbone on the Hub
def test_stock_peft_reads_an_adapter_without_passlora(trained, stock_peft):
    x = torch.randn(3, 3, 64, 64)
    theirs = stock_peft(trained[0], x)
    with torch.no_grad():
        ours = PassLora.from_pretrained(trained[0], task=1).learner.network(x)
        other = PassLora.from_pretrained(trained[0], task=2).learner.network(x)
    assert (ours - theirs).abs().max() <= 1e-6
    assert (other - theirs).abs().max() > 1e-3, "the adapters of two tasks differ"


def test_resnet_models_are_read_back(tiny, tmp_path):
    config = tiny(
        model_name_or_path="passlora/resnet18",
        lora_r=0,
        pretrained=False,
        max_classes=4,
        task_sizes=[2, 2],
        max_train_per_class=2,
        preset="finetune",
        output_dir=str(tmp_path / "m"),
    )
    results = train(config)
    model = PassLora.from_pretrained(tmp_path / "m")
    images, labels = all_test_images(config)
    answers = [answer[0].label for answer in model.predict(images, top_k=1)]
    right = np.mean([answer == str(label) for answer, label in zip(answers, labels, strict=True)])
    assert 100 * right == pytest.approx(results["last"])
    with pytest.raises(PassloraError, match="its classifier reads no rotations"):
        next(model.predict(images, views=4))


def test_the_folder_says_nothing_of_where_the_data_lay(image_tree, tiny, tmp_path):
    root = image_tree(name="secret_place", size=(20, 20))
    config = tiny(dataset_name=str(root), task_sizes=[2, 1], output_dir=str(tmp_path / "m"), preset="finetune")
    train(config)
    written = [path for path in (tmp_path / "m").rglob("*") if path.is_file()]
    assert len(written) > 10
    for path in written:
        content = path.read_bytes()
        assert b"secret_place" not in content, path
        assert str(tmp_path).encode() not in content or path.name == "config.yaml", "where the run itself lies"
    assert read_manifest(tmp_path / "m").classes == ["cat", "dog", "owl"]
    settings = yaml.safe_load((tmp_path / "m" / "config.yaml").read_text())
    assert re.fullmatch(r"local:[0-9a-f]{12}", settings["dataset_name"])
    assert train(config)["finished"], "the same data continues"
    other = image_tree(name="other_place", size=(20, 20))
    with pytest.raises(PassloraError, match=r"dataset_name was local:.*, is local:"):
        train(config.replace(dataset_name=str(other)))
    with pytest.raises(PassloraError, match="say where it lies, with --dataset_name"):
        train(load_config(str(tmp_path / "m" / "config.yaml"), {"output_dir": str(tmp_path / "n")}))


@pytest.mark.parametrize("options", [{}, {"lora_r": 0}], ids=["adapters", "whole backbones"])
def test_keeping_only_the_last_task(tiny, tmp_path, cli, options):
    flags = {"task_sizes": [2, 2, 2], "max_train_per_class": 2, "max_test_per_class": 1, "preset": "finetune"}
    flags |= {**SMALL, "max_classes": 6}
    folder = tmp_path / "m"
    results = train(tiny(**flags, **options, keep_tasks="last", output_dir=str(folder)))
    assert [path.name for path in folder.glob("task_*")] == ["task_02"]
    whole = train(tiny(**flags, **options, output_dir=str(tmp_path / "all")))
    assert results["accuracy_matrix"] == whole["accuracy_matrix"]
    model, other = PassLora.from_pretrained(folder), PassLora.from_pretrained(tmp_path / "all")
    assert torch.equal(model.learner.network.classifier.weight, other.learner.network.classifier.weight)
    for attempt in (
        lambda: PassLora.from_pretrained(folder, task=0),
        lambda: model.rollback(1),
    ):
        with pytest.raises(PassloraError, match=r"were not kept \(keep_tasks last\): there is only task 2"):
            attempt()
    assert cli("info", folder)[0] == 0
    model.save_pretrained(tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").glob("task_*")] == ["task_02"]


def edit(folder, **changes):
    path = folder / "passlora.json"
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def seal(folder):
    """As a stranger does who is careful: the manifest names the files as they are now."""
    path = folder / "passlora.json"
    content = json.loads(path.read_text())
    for task, entry in enumerate(content["tasks"]):
        for name in entry["files"]:
            file = folder / f"task_{task:02d}" / name
            if file.is_file():
                entry["files"][name] = hashlib.sha256(file.read_bytes()).hexdigest()
    path.write_text(json.dumps(content))


def cut_short(path, name):
    state = load_file(path)
    save_file({**state, name: state[name][:-4].clone()}, path)


def damage_file(folder, kind):
    """What may be wrong with the tensors of a task."""
    head = folder / "task_02" / "classifier.safetensors"
    state = load_file(head)
    if kind == "truncated":
        head.write_bytes(head.read_bytes()[:-100])
    elif kind == "huge header":
        head.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    elif kind == "pickle":
        head.write_bytes(b"\x80\x04cos\nsystem\n")
    elif kind == "shape":
        cut_short(head, "weight")
    elif kind == "nan":
        save_file({**state, "bias": state["bias"] * float("nan")}, head)
    elif kind == "extra":
        save_file({**state, "more": state["bias"].clone()}, head)
    elif kind == "lacking":
        save_file({"weight": state["weight"]}, head)
    elif kind == "few prototypes":
        cut_short(folder / "task_02" / "memory.safetensors", "means")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("truncated", "not a readable safetensors file"),
        ("huge header", "not a readable safetensors file"),
        ("pickle", "not a readable safetensors file"),
        ("shape", "weight has shape (36, 192), expected (40, 192)"),
        ("nan", "bias holds values that are not finite"),
        ("extra", "has an unknown tensor 'more'"),
        ("lacking", "lacks tensor 'bias'"),
        ("few prototypes", "means has shape (36, 192), expected (40, 192)"),
    ],
)
def test_a_file_that_is_not_right_is_one_clear_error(copy, kind, says):
    """By its digest; and by what it holds, where someone has taken care of the digest."""
    damage_file(copy, kind)
    before = sorted(p for p in copy.rglob("*"))
    name = "memory" if kind == "few prototypes" else "classifier"
    for expected in (f"task_02/{name}.safetensors is not the file that was saved with the model", says):
        with pytest.raises(PassloraError) as caught:
            PassLora.from_pretrained(copy)
        assert expected in str(caught.value) and "\n" not in str(caught.value)
        seal(copy)
    assert sorted(p for p in copy.rglob("*")) == before


def damage(folder, kind):
    head, manifest = folder / "task_02" / "classifier.safetensors", folder / "passlora.json"
    content = json.loads(manifest.read_text())
    if kind == "missing":
        head.unlink()
    elif kind == "symlink":
        outside = folder.parent / "outside.safetensors"
        shutil.move(head, outside)
        head.symlink_to(outside)
    elif kind == "future":
        edit(folder, format_version=99)
    elif kind == "classes":
        content["tasks"][1]["classes"].append("ghost")
        manifest.write_text(json.dumps(content))
    elif kind == "twice":
        content["tasks"][1]["classes"][0] = "0"
        manifest.write_text(json.dumps(content))
    elif kind == "unlisted":
        del content["tasks"][2]["files"]["memory.safetensors"]
        manifest.write_text(json.dumps(content))
    elif kind == "file":
        content["tasks"][2]["files"]["../../x"] = 64 * "0"
        manifest.write_text(json.dumps(content))
    elif kind == "digest":
        content["tasks"][2]["files"]["memory.safetensors"] = 64 * "g"
        manifest.write_text(json.dumps(content))
    elif kind == "setting":
        edit(folder, settings={**content["settings"], "output_dir": "/etc"})
    elif kind.startswith("backbone "):
        edit(folder, settings={**content["settings"], "model_name_or_path": kind.split(" ", 1)[1]})
    elif kind == "checkpoint elsewhere":
        away = {"model_name_or_path": "../away.pth", "model_architecture": "deit_tiny_patch16_224"}
        edit(folder, settings={**content["settings"], **away})
    elif kind == "bomb":
        edit(folder, settings={**content["settings"], "lora_r": 10**9})
    elif kind == "json":
        manifest.write_text("{")
    elif kind == "list":
        manifest.write_text("[]")
    elif kind == "deep":
        manifest.write_text("[" * 100_000)
    elif kind == "no manifest":
        manifest.unlink()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "classifier.safetensors is missing"),
        ("symlink", "leads out of the model's folder"),
        ("future", "a newer passlora wrote it"),
        ("classes", "expected (44, 192)"),
        ("twice", "a class name appears twice"),
        ("unlisted", "memory.safetensors is not among the files of the model"),
        ("file", "a task whose files are not those of a task"),
        ("digest", "a task with a malformed digest"),
        ("setting", "unknown setting 'output_dir'"),
        ("backbone /etc/passwd", "leads out of the model's folder"),
        ("backbone local-dir:/etc", "leads out of the model's folder"),
        ("backbone hf-hub:../x", "leads out of the model's folder"),
        ("checkpoint elsewhere", "leads out of the model's folder"),
        ("bomb", "lora_r must be between 0 and 1024"),
        ("json", "cannot be read"),
        ("list", "not a manifest"),
        ("deep", "cannot be read"),
        ("no manifest", "it is no model"),
    ],
)
def test_a_folder_that_is_not_right_is_one_clear_error(copy, kind, says):
    damage(copy, kind)
    before = sorted(p for p in copy.rglob("*"))
    with pytest.raises(PassloraError) as caught:
        PassLora.from_pretrained(copy)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(p for p in copy.rglob("*")) == before


def test_classes_that_moved_to_another_task(copy):
    """The last task knows them all in the same order; the task that they were moved to never had so many."""
    content = json.loads((copy / "passlora.json").read_text())
    content["tasks"][0]["classes"].append(content["tasks"][1]["classes"].pop(0))
    (copy / "passlora.json").write_text(json.dumps(content))
    assert PassLora.from_pretrained(copy).classes == [str(d) for d in range(10)]
    with pytest.raises(PassloraError, match=r"has shape \(12, 192\), expected \(16, 192\)"):
        PassLora.from_pretrained(copy, task=0)


def test_a_save_that_was_cut_off_leaves_the_model_before(trained, copy):
    """Killed after the third task's files, before the manifest: the folder is the two-task model."""
    content = json.loads((copy / "passlora.json").read_text())
    edit(copy, tasks=content["tasks"][:2])
    model = PassLora.from_pretrained(copy)
    before = PassLora.from_pretrained(trained[0], task=1)
    assert model.classes == before.classes
    assert torch.equal(model.learner.memory.means, before.learner.memory.means)
    assert model.learner.memory.radius == before.learner.memory.radius


def test_a_task_that_is_not_there(trained):
    with pytest.raises(PassloraError, match="has the tasks 0 to 2, not 3"):
        PassLora.from_pretrained(trained[0], task=3)


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(3):
        Image.effect_noise((30, 30), 50 + i).save(folder / f"{i}.png")
    return folder


def test_predict_from_the_command_line(trained, pictures, cli):
    code, out, _ = cli("predict", trained[0], pictures, "--top_k", "2")
    assert code == 0 and len(out.splitlines()) == 3 and out.count("%") == 6
    code, out, _ = cli("predict", trained[0], pictures, "--json", "--views", "1", "--batch_size", "2")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["file"] for row in rows] == [str(pictures / f"{i}.png") for i in range(3)]
    assert all(len(row["predictions"]) == 5 for row in rows)
    code, out, _ = cli("predict", trained[0], pictures / "1.png", "--csv", "--top_k", "1", "--task", "0")
    header, row = out.split()
    assert header == "file,rank,label,probability" and row.split(",")[2] in "012"


def test_unreadable_files_are_reported_and_skipped(trained, pictures, cli):
    (pictures / "1.png").write_bytes(b"broken")
    code, out, err = cli("predict", trained[0], pictures, pictures / "gone.png")
    assert code == 1 and len(out.splitlines()) == 2
    assert "skipped" in err and "1.png" in err and "gone.png: no such file" in err and "2 of 4 images" in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--task", "9"], "has the tasks 0 to 2"),
        (["--top_k", "0"], "top_k must be at least 1"),
        (["--views", "3"], "views must be 1 or 4"),
        (["--top_kk", "1"], "did you mean '--top_k'"),
    ],
)
def test_mistakes_in_predict(trained, pictures, cli, flags, says):
    code, _, err = cli("predict", trained[0], pictures, *flags)
    assert code == 2 and says in err and err.count("\n") == 1


def test_info(trained, cli):
    code, out, _ = cli("info", trained[0])
    assert code == 0 and "10 classes in 3 tasks" in out and "passlora/vit-mini, LoRA r = 4" in out
    assert f"{trained[2]['stage_accuracy'][1]:.1f}" in out
    code, _, err = cli("info", "nowhere")
    assert code == 2 and "nowhere does not exist" in err
    code, _, err = cli("info", trained[0].parent / "digist")
    assert code == 2 and "digits'" in err and "did you mean" in err and err.count("\n") == 1


def damage_at_random(whole, folder, choice):
    """Any file of the folder cut, overwritten, swapped for another or removed; no other error, no memory eaten."""
    shutil.copytree(whole, folder)
    files = sorted(p for p in folder.rglob("*") if p.suffix in (".json", ".safetensors") and "results" not in p.name)
    path = choice.draw(st.sampled_from(files))
    content = path.read_bytes()
    at = choice.draw(st.integers(0, len(content) - 1))
    match choice.draw(st.sampled_from(["cut", "overwrite", "insert", "swap", "remove", "directory"])):
        case "cut":
            path.write_bytes(content[:at])
        case "overwrite":
            noise = choice.draw(st.binary(min_size=1, max_size=16))
            path.write_bytes(content[:at] + noise + content[at + len(noise) :])
        case "insert":
            path.write_bytes(content[:at] + choice.draw(st.binary(min_size=1, max_size=16)) + content[at:])
        case "swap":
            path.write_bytes(choice.draw(st.sampled_from(files)).read_bytes())
        case "remove":
            path.unlink()
        case "directory":
            path.unlink()
            path.mkdir()
    if choice.draw(st.booleans()) and (folder / "passlora.json").is_file():
        with suppress(ValueError, LookupError, TypeError, AttributeError):  # as far as the manifest can be read
            seal(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(PassloraError):
        model = PassLora.from_pretrained(folder)
        assert len(model.classes) == 10 and model.learner.network.classifier.weight.isfinite().all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kilobytes"
    shutil.rmtree(folder)


ROUNDS = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=15, **ROUNDS)
@given(choice=st.data())
def test_whatever_is_damaged_it_is_a_model_or_one_clear_error(trained, tmp_path_factory, choice):
    damage_at_random(trained[0], tmp_path_factory.mktemp("fuzz") / "model", choice)


@pytest.mark.slow
@settings(max_examples=150, **ROUNDS)
@given(choice=st.data())
def test_whatever_is_damaged_many_times(trained, tmp_path_factory, choice):
    damage_at_random(trained[0], tmp_path_factory.mktemp("fuzz") / "model", choice)
