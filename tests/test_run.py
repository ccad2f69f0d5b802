from __future__ import annotations

import csv
import json
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from passlora import Config, PassLora, PassloraError, files, train
from passlora.config import load
from passlora.data.dataset import load_dataset
from passlora.data.scenario import Scenario
from passlora.folder.manifest import read_manifest
from passlora.runs.folder import claim
from passlora.training import metrics

TINY = {"model_name_or_path": "test_vit", "pretrained": False, "image_size": 32}  # where the size does not matter


class Listener(logging.Handler):
    """What the library says, for fixtures that several tests share (caplog is one test's)."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())

    def __enter__(self):
        logger = logging.getLogger("passlora")
        self.level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self.said

    def __exit__(self, *_):
        logging.getLogger("passlora").removeHandler(self)
        logging.getLogger("passlora").setLevel(self.level)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A real run with two seeds, two inference modes and a comparison."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = Config.make(
        dataset_name="digits",
        task_sizes=[4, 3, 3],
        max_train_per_class=4,
        max_test_per_class=3,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        extra_inference=["single"],
        compare=["finetune"],
        seeds=[0, 3],
        output_dir=str(folder),
        **TINY,
    )
    with Listener() as said:
        results = train(config)
    return folder, results, "\n".join(said)


def test_results_json_has_everything_in_percent(finished):
    folder, results, _ = finished
    saved = json.loads((folder / "results.json").read_text())
    assert saved == json.loads(json.dumps(results))
    for part in (saved, saved["compare"]["finetune"], saved["runs"]["seed_3"]["compare"]["finetune"]):
        assert 0 <= part["last"] <= 100 and 0 <= part["avg"] <= 100
        assert len(part["stage_accuracy"]) == 3 and part["stage_accuracy"][-1] == part["last"]
        assert [len(row) for row in part["accuracy_matrix"]] == [3, 3, 3]
        assert part["accuracy_matrix"][0][1] is None and part["accuracy_matrix"][2][0] is not None
    assert saved["inference"] == "multiview" and set(saved["inference_modes"]) == {"multiview", "single"}
    assert saved["seeds"] == [0, 3] and saved["seconds"] > 0 and saved["finished"]


def test_what_is_noted_of_each_task(finished):
    folder, results, _ = finished
    for name, run in results["runs"].items():
        assert len(run["bias"]) == len(run["train_seconds"]) == len(run["test_seconds"]) == 3 and "drift" not in run
        assert run["bias"][0] is None and all(0 <= share <= 100 for pair in run["bias"][1:] for share in pair)
        with open(folder / name / "confusion_matrix.csv", newline="") as file:
            head, *rows = list(csv.reader(file))
        confusion = np.array([[int(cell) for cell in row[1:]] for row in rows])
        assert head[1:] == [row[0] for row in rows] == run["classes"]
        assert 100 * np.trace(confusion) / confusion.sum() == pytest.approx(run["last"])
        scenario = Scenario(tuple(range(10)), (4, 3, 3))
        assert metrics.bias(confusion, scenario, 2) == pytest.approx(run["bias"][2])
        bins = np.array(run["calibration"])
        assert bins[:, 0].sum() == confusion.sum() and bins[:, 1].sum() == np.trace(confusion)
        assert run["newest"] == pytest.approx(np.mean([run["accuracy_matrix"][t][t] for t in (1, 2)]))
        assert run["peak_memory_bytes"] > 100 * 2**20


def test_drift_is_the_distance_of_the_true_means_from_the_stored(tiny, tmp_path):
    """Against means of features by hand, from the saved models."""
    config = tiny(measure_drift=True, num_train_epochs=3, output_dir=str(tmp_path), **TINY)
    drift = train(config)["drift"]
    assert len(drift[0]) == 1 and drift[0][0] == pytest.approx(0, abs=1e-5), "nothing has moved yet"
    assert len(drift[1]) == 2 and drift[1][1] == pytest.approx(0, abs=1e-5)
    data = load_dataset(config.data, 0).train
    learner = PassLora.from_pretrained(tmp_path).learner
    learner.network.eval()
    images = torch.stack([torch.from_numpy(np.array(data.rgb(row))).permute(2, 0, 1) for row in range(len(data))])
    with torch.no_grad():
        z = learner.network(learner.network.backbone.prepare(images))
    moved = []
    for label in range(6):
        true = z[torch.from_numpy(data.labels == label)].mean(dim=0)
        moved.append(float((true - learner.memory.means[4 * label]).norm()))
    spread = learner.memory.radius * 64**0.5
    assert drift[1][0] == pytest.approx(np.mean(moved) / spread, rel=1e-4) and drift[1][0] > 0.001


def test_seeds_are_averaged(finished):
    _, results, _ = finished
    runs = [results["runs"]["seed_0"], results["runs"]["seed_3"]]
    for name in ("last", "avg", "forgetting"):
        values = [run[name] for run in runs]
        assert results[name] == pytest.approx(sum(values) / 2)
        assert results["std"][name] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert [run["seed"] for run in runs] == [0, 3]


def test_numbers_follow_from_the_matrix(finished):
    run = finished[1]["runs"]["seed_0"]
    assert run["forgetting"] == pytest.approx(metrics.forgetting(run["accuracy_matrix"]))
    sizes = run["task_sizes"]  # as many test images in each class, so stages are means weighted by size
    for t, stage in enumerate(run["stage_accuracy"]):
        weighted = sum(run["accuracy_matrix"][t][i] * sizes[i] for i in range(t + 1)) / sum(sizes[: t + 1])
        assert stage == pytest.approx(weighted)


def test_the_folder_holds_a_model_a_task_and_no_image(finished):
    folder = finished[0] / "seed_0"
    for task, seen in enumerate((4, 7, 10)):
        part = folder / f"task_{task:02d}"
        assert {p.name for p in part.iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
            "classifier.safetensors",
            "memory.safetensors",
            "settings.json",
        }
        assert load_file(part / "classifier.safetensors")["weight"].shape == (4 * seen, 64)
        assert load_file(part / "memory.safetensors")["means"].shape == (4 * seen, 64)
        adapter = load_file(part / "adapter_model.safetensors")
        assert sum(t.numel() for t in adapter.values()) == 6_144
    heads = [load_file(folder / f"task_{t:02d}" / "classifier.safetensors")["weight"] for t in (1, 2)]
    assert not torch.equal(heads[0], heads[1][:28]), "each task has a head of its own"
    suffixes = {p.suffix for p in finished[0].rglob("*") if p.is_file() and p.name != ".lock"}
    assert suffixes == {".safetensors", ".json", ".jsonl", ".yaml", ".csv", ".md", ".png"}


def test_pictures_and_tables(finished):
    folder, _, said = finished
    for name in ("accuracy.png", "seed_0/accuracy.png", "seed_0/accuracy_matrix.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    rows = (folder / "seed_0" / "accuracy_matrix.csv").read_text().splitlines()
    assert rows[0] == "after_task,task_0,task_1,task_2,all_seen" and len(rows) == 4
    for text in (
        "training 6,144 of 306,240 backbone weights (2.01%",
        "after task 2",
        "forgetting",
        "2 runs, mean",
    ):
        assert text in said


def test_the_log_has_every_epoch(finished):
    lines = (finished[0] / "seed_0" / "training_log.jsonl").read_text().splitlines()
    logs = [json.loads(line) for line in lines]
    assert [(log["task"], log["epoch"]) for log in logs] == [(0, 0), (1, 0), (2, 0)]
    assert set(logs[2]["losses"]) == {"total", "new", "old", "kd"} and len(logs[0]["steps"]) == 2


def test_the_resolved_config_is_saved(finished):
    config = load(str(finished[0] / "config.yaml"), {})
    assert config.training.seeds == [0, 3] and config.method.hardness is True


def test_a_folder_with_a_run_is_not_overwritten_unasked(finished, tmp_path):
    flat = load(str(finished[0] / "config.yaml"), {}).flat()
    with pytest.raises(PassloraError, match=r"kd_weight was 10.0, is 3.*--overwrite_output_dir"):
        claim(finished[0], {**flat, "kd_weight": 3}, overwrite=False)
    (tmp_path / "thesis.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(PassloraError, match="holds no run"):
            claim(tmp_path, flat, overwrite)
    assert (tmp_path / "thesis.txt").exists()


def test_a_finished_run_is_read_again_not_run_again(finished, monkeypatch):
    folder, results, _ = finished
    monkeypatch.setattr("passlora.runs.stream.PassLora", None)  # nothing may be learnt
    with Listener() as said:
        again = train(load(str(folder / "config.yaml"), {}))
    assert "".join(said).count("finished already") == 4
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in results.items() if k != "seconds"}


def test_a_mistake_can_be_corrected_in_the_same_folder(tiny, tmp_path):
    flags = {"max_train_per_class": 1, "max_test_per_class": 1, "preset": "finetune", **TINY}
    with pytest.raises(PassloraError, match="does not exist"):
        train(tiny(dataset_name="./nowhere", output_dir=str(tmp_path / "run"), **flags))
    results = train(tiny(output_dir=str(tmp_path / "run"), **flags))
    assert results["finished"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    files.write_json(path, {"a": 1})

    def fail(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.write(path, fail)
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_class_orders_in_one_call(tiny, tmp_path):
    config = tiny(
        class_order_seeds=[1, 2],
        task_sizes=[5, 5],
        max_train_per_class=2,
        preset="finetune",
        output_dir=str(tmp_path),
        **TINY,
    )
    results = train(config)
    orders = [run["classes"] for run in results["runs"].values()]
    assert list(results["runs"]) == ["order_1", "order_2"] and orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == [str(d) for d in range(10)]


def test_a_diverging_run_stops_with_a_sentence(tiny, tmp_path):
    config = tiny(learning_rate=1e30, num_train_epochs=2, output_dir=str(tmp_path), max_train_per_class=2, **TINY)
    with pytest.raises(PassloraError, match="lower --learning_rate"):
        train(config)


def test_a_task_without_test_images_is_refused(image_tree, tiny, tmp_path):
    root = image_tree(count=2, size=(20, 20))
    for path in (root / "test" / "owl").iterdir():
        path.unlink()
    config = tiny(dataset_name=str(root), task_sizes=[2, 1], output_dir=str(tmp_path / "out"))
    with pytest.raises(PassloraError, match=r"task 1 \(owl\) has no test images"):
        train(config)


@pytest.mark.parametrize("preset", ["pass++", "fetril"])
def test_a_run_is_a_loop_over_learn(preset, image_tree, tmp_path):
    """With the same settings, seed and images, two calls of `learn` leave the very files that a run leaves."""
    root = image_tree(classes=("ape", "bee", "cat", "dog"), size=(20, 16))
    settings = {"preset": preset, **TINY, "num_train_epochs": 2, "per_device_train_batch_size": 3, "seed": 0}
    settings |= {"lr_milestones": [1], "gradient_accumulation_steps": 2}
    train(Config.make(dataset_name=str(root), task_sizes=[2, 2], output_dir=str(tmp_path / "run"), **settings))
    model = PassLora.create(**settings)
    for classes in (["ape", "bee"], ["cat", "dog"]):
        model.learn(root, classes=classes)
    model.save_pretrained(tmp_path / "taught")
    run, taught = (read_manifest(tmp_path / name) for name in ("run", "taught"))
    for ours, theirs in zip(run.tasks, taught.tasks, strict=True):
        assert ours.files == theirs.files and {"adapter_model.safetensors", "classifier.safetensors"} <= set(ours.files)
        assert (ours.classes, ours.accuracy) == (theirs.classes, theirs.accuracy)
    assert run.tasks[0].files["classifier.safetensors"] != run.tasks[1].files["classifier.safetensors"]
    other = PassLora.create(**{**settings, "num_train_epochs": 1})
    other.learn(root, classes=["ape", "bee"])
    other.save_pretrained(tmp_path / "other")
    changed = read_manifest(tmp_path / "other").tasks[0].files
    assert changed["adapter_model.safetensors"] != run.tasks[0].files["adapter_model.safetensors"], "digests can differ"
