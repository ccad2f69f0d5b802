"""The model card: metadata that the Hub takes, a quick start that runs, and nothing of whoever trained it."""

from __future__ import annotations

import re

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard
from PIL import Image

from passlora import Config, train
from passlora.folder.manifest import Manifest, TaskEntry, read_manifest, settings_of
from passlora.hub.card import NOTES, is_only_metadata, render, write_card
from passlora.model.passlora import PassLora


def manifest(tasks=None, **settings):
    tasks = tasks or [
        TaskEntry(["cat", "dog"], "2026-01-01", 80.0, forgetting=0.0),
        TaskEntry(["owl"], "2026-01-02", 70.0, forgetting=5.0),
    ]
    return Manifest(settings_of(Config.make(num_tasks=1, **settings)), tasks)


def front_matter(text):
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.S).group(1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card") / "digits"
    config = Config.make(
        dataset_name="digits",
        task_sizes=[6, 4],
        max_train_per_class=3,
        max_test_per_class=2,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        output_dir=str(folder),
    )
    return folder, train(config)


def test_the_metadata(trained):
    folder, results = trained
    card = ModelCard.load(folder / "README.md")
    data = card.data
    assert (data.library_name, data.pipeline_tag, data.license) == ("peft", "image-classification", "apache-2.0")
    assert data.base_model == "passlora/vit-mini" and {"passlora", "lora"} <= set(data.tags)
    values = {result.metric_type: result.metric_value for result in data.eval_results}
    expected = {"accuracy": results["last"], "avg": results["avg"], "forgetting": results["forgetting"]}
    assert values == pytest.approx(expected, abs=0.01)
    assert all(
        result.dataset_name == "digits" and result.task_type == data.pipeline_tag for result in data.eval_results
    )


@pytest.mark.parametrize(
    ("settings", "base", "licence", "library"),
    [
        ({"model_name_or_path": "deit_small_patch16_224"}, "timm/deit_small_patch16_224.fb_in1k", "apache-2.0", "peft"),
        ({"model_name_or_path": "hf-hub:bob/tiny@v1"}, "bob/tiny", "other", "peft"),
        ({"model_name_or_path": "w.pth", "model_architecture": "deit_small_patch16_224"}, None, "other", "peft"),
        (
            {"model_name_or_path": "passlora/resnet18", "lora_r": 0, "pretrained": False},
            *(None, "other", "passlora"),
        ),
    ],
)
def test_the_backbone_it_names(tmp_path, settings, base, licence, library):
    data = front_matter(render(tmp_path, manifest(**settings), "ann/x"))
    assert (data.get("base_model"), data["license"], data["library_name"]) == (base, licence, library)


def test_datasets_are_those_of_the_hub(tmp_path):
    tasks = [
        TaskEntry(["a"], "", dataset="uoft-cs/cifar100"),
        TaskEntry(["b"], "", dataset="digits"),
        TaskEntry(["c"], "", 60.0),
    ]
    data = front_matter(render(tmp_path, manifest(tasks), "ann/x"))
    assert data["datasets"] == ["uoft-cs/cifar100"]
    (entry,) = data["model-index"][0]["results"]
    assert entry["dataset"]["name"] == "local images" and entry["metrics"][0]["value"] == 60.0


def test_what_a_reader_finds(trained):
    folder, results = trained
    text = (folder / "README.md").read_text()
    for heading in ("Quick start", "Tasks", "Training", "What is stored", "Pre-training overlap", "Citation"):
        assert f"\n## {heading}\n" in text
    rows = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    assert [row.split("|")[2].strip() for row in rows] == ["6", "4"]
    assert f"{results['stage_accuracy'][1]:.1f} of 10 classes" in rows[1] and "6, 7, 8, 9" in rows[1]
    assert "(accuracy.png)" in text and (folder / "accuracy.png").is_file()
    assert "| num_train_epochs | 1 |" in text and "Versions: passlora" in text
    assert "@article" in text and "No image" in text


def test_the_quick_start_runs_as_printed(trained, monkeypatch, capsys):
    """Here in this process; test_hub.py runs that of a published card in one of its own."""
    folder, _ = trained
    pixels = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "photo.jpg")
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    monkeypatch.chdir(folder)
    exec(code, {})
    (answer,) = PassLora.from_pretrained(folder).predict(folder / "photo.jpg", top_k=3)
    assert capsys.readouterr().out.splitlines() == [f"{p.label}: {p.probability:.1%}" for p in answer]


def test_names_cannot_break_out(tmp_path):
    """Class and dataset names are a stranger's: they stay text, in their cell of the table and their line of YAML."""
    evil = "a | b\n# heading <script>alert(1)</script> `x` ![p](http://x)"
    tasks = [TaskEntry([evil], "", 50.0, dataset="x/y\nlicense: mit\n---\n")]
    text = render(tmp_path, manifest(tasks), "ann/x")
    data = front_matter(text)
    assert data["license"] == "apache-2.0" and "datasets" not in data
    assert data["model-index"][0]["results"][0]["dataset"]["name"] == tasks[0].dataset
    assert "<script>" not in text.replace("\\<script", "") and "\n# heading" not in text
    (row,) = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    assert len(re.findall(r"(?<!\\)\|", row)) == 5


def test_notes_and_licence_of_a_person_are_kept(trained, tmp_path):
    folder, _ = trained
    model = read_manifest(folder)
    write_card(tmp_path, model)
    path = tmp_path / "README.md"
    text = path.read_text().replace("license: apache-2.0", "license: cc-by-4.0") + "\nTaken with my own camera.\n"
    path.write_text(text)
    write_card(tmp_path, model)
    again = path.read_text()
    assert again.endswith(f"{NOTES}\n\nTaken with my own camera.\n") and front_matter(again)["license"] == "cc-by-4.0"
    path.write_text("---\n: [\n---\nbroken")
    write_card(tmp_path, model)
    assert front_matter(path.read_text())["license"] == "apache-2.0"


def test_no_curve_where_accuracies_are_not_known(tmp_path):
    write_card(tmp_path, manifest([TaskEntry(["a"], ""), TaskEntry(["b"], "")]))
    text = (tmp_path / "README.md").read_text()
    assert "accuracy.png" not in text and not (tmp_path / "accuracy.png").exists()
    assert "model-index" not in front_matter(text)


def test_an_accuracy_over_some_classes_is_called_that(tmp_path):
    whole, part = TaskEntry(["cat", "dog"], "", 90.0), TaskEntry(["owl"], "", 40.0)
    part.tested = 1
    write_card(tmp_path, manifest([whole, part]))
    text = (tmp_path / "README.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    assert "| 90.0 of 2 classes |" in rows[0] and "| 40.0, tested on 1 of 3 classes |" in rows[1]
    assert "It is right on 40.0% of test images (tested on 1 of 3 classes)." in text
    assert "over all of them" not in text
    assert not (tmp_path / "accuracy.png").exists(), "its axis says over all classes"
    assert "model-index" not in front_matter(text)


SUMS = "the mean of each class's features and one matrix of their products, summed over the images of all classes"


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        (
            "pass++",
            "an adapter and a head; for each class 4 mean feature vectors; and the spread of features around them. "
            "No image",
        ),
        (
            "pass",
            "an adapter and a head; for each class 1 mean feature vector; and the spread of features around them. "
            "No image",
        ),
        ("simplecil", "an adapter and one mean feature vector a class. No image"),
        ("fetril", "an adapter and one mean feature vector a class and a linear SVM. No image"),
        ("ncm", "one mean feature vector a class. No image"),
        ("slda", f"{SUMS}. No image"),
        ("klda", f"{SUMS} (of random functions of the features of 1 view of an image). No image"),
        ("fecam", "one mean feature vector and one covariance a class. No image"),
        (
            "rgda",
            "one mean feature vector and a few directions of its spread a class, and one covariance of all classes.",
        ),
        (
            "anacp",
            "an adapter and the mean of each class's features and the sum of random functions of them, and matrices",
        ),
        ("joint-probe", "a linear layer. No image"),
    ],
)
def test_what_is_stored_is_that_of_the_classifier(tmp_path, preset, words):
    text = render(tmp_path, manifest(preset=preset), "ann/x")
    assert f"For each task {words}" in text
    is_frozen = preset in ("ncm", "slda", "klda", "fecam", "rgda", "joint-probe")
    assert ("whose weights stay as they are" in text) == is_frozen
    assert ("LoRA adapters of rank 4" in text) == ("lora" in front_matter(text)["tags"]) == (not is_frozen)


def test_what_is_stored_by_a_classifier_from_elsewhere(tmp_path):
    model = manifest()
    model.settings["classifier"] = "mine"
    assert "For each task an adapter and the tensors of its classifier. No image" in render(tmp_path, model, "ann/x")


@pytest.mark.parametrize(
    ("text", "is_so"),
    [
        ("---\nlicense: mit\n---\n", True),
        ("---\r\nlicense: mit\r\n---", True),
        ("\n", True),
        ("---\nlicense: mit\n---\n# My model\n", False),
        ("My model", False),
    ],
)
def test_a_card_that_nobody_wrote(tmp_path, text, is_so):
    (tmp_path / "README.md").write_bytes(text.encode())
    assert is_only_metadata(tmp_path / "README.md") is is_so
