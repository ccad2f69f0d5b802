"""The paper's experiments: every cell a valid run, the page with the paper's figures, going on where it stopped."""

from __future__ import annotations

import csv
import json
import re
from math import cos, radians, sin
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
import yaml

from passlora import PassloraError
from passlora.analysis.measures import five_accuracies
from passlora.analysis.paper import COLUMNS, EXPERIMENTS, MINI
from passlora.analysis.reproduce import configurations
from passlora.config import FIELDS
from passlora.data.corruptions import CORRUPTIONS

ROOT = Path(__file__).parent.parent
SCRATCH = {"cifar100": "CIFAR-100", "tinyimagenet": "TinyImageNet", "imagenet_subset": "ImageNet-Subset"}
PRETRAINED = (("cifar100", "CIFAR-100", 10), ("tinyimagenet", "TinyImageNet", 5), ("tinyimagenet", "TinyImageNet", 10))


@pytest.fixture(autouse=True)
def no_pictures_of_single_runs(monkeypatch):
    """They are most of a tiny run's time, and test_run.py looks at them; an experiment's own are drawn."""
    for name in ("accuracy_curves", "accuracy_matrix"):
        monkeypatch.setattr(f"passlora.display.figures.{name}", lambda results, path: path.write_bytes(b""))


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("scale", ["full", "mini"])
def test_every_cell_is_a_valid_configuration(name, scale, tmp_path):
    configs = configurations(name, scale, {}, tmp_path)
    experiment = EXPERIMENTS[name]
    assert len(configs) == len(experiment.rows) * (1 if scale == "mini" else len(experiment.columns))
    for (row_name, _), by_seed in configs.items():
        assert list(by_seed) == [config.training.seed for config in by_seed.values()] == [0, 1, 2]
        assert len({config.training.output_dir for config in by_seed.values()}) == 3
        (row,) = [row for row in experiment.rows if row.name == row_name]
        if row.mode is not None:
            assert row.mode in by_seed[0].method.inference_modes


def test_rows_of_one_experiment_differ(tmp_path):
    for name, experiment in EXPERIMENTS.items():
        for column in experiment.columns:
            cells = [
                by_seed[0] for (_, at), by_seed in configurations(name, "full", {}, tmp_path).items() if at == column
            ]
            ways = [
                (config.training.output_dir, row.mode, row.exemplars)
                for config, row in zip(cells, experiment.rows, strict=True)
            ]
            assert len(set(ways)) == len(ways), name


def test_experiments_share_their_runs(tmp_path):
    """PASS++ itself is run once, whichever table asks first; another dataset, or budget, is another run."""
    folders = {
        name: configurations(name, "mini", {}, tmp_path)[row, "mini"][1].training.output_dir
        for name, row in (("table-7", "+ ensemble"), ("table-6", "PASS++"), ("fig-9", "explicit"), ("fig-16", "PASS++"))
    }
    assert len(set(folders.values())) == 1
    other = configurations("table-7", "mini", {"num_train_epochs": 4}, tmp_path)["+ ensemble", "mini"][1]
    assert other.training.output_dir not in folders.values()
    workers = configurations("table-7", "mini", {"dataloader_num_workers": 0}, tmp_path)["+ ensemble", "mini"][1]
    assert workers.training.output_dir in folders.values(), "what changes no number changes no folder"


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("mini/cifar100_t5", MINI),
        *((f"deit_s16_lora/{d}_t{t}", COLUMNS[f"DeiT {n} T={t}"]) for d, n, t in PRETRAINED),
        *((f"resnet18_scratch/{d}_t{t}", COLUMNS[f"{n} T={t}"]) for d, n in SCRATCH.items() for t in (5, 10, 20, 25)),
        *((f"resnet18_scratch/imagenet_full_t{t}", COLUMNS[f"ImageNet-Full T={t}"]) for t in (10, 25)),
        *((f"resnet18_scratch/{d}_equal_t5", COLUMNS[f"{n} equal T=5"]) for d, n in SCRATCH.items()),
    ],
)
def test_protocols_are_those_of_the_recipes(path, settings):
    from passlora import Config

    recipe = Config.make(**yaml.safe_load((ROOT / "recipes" / f"{path}.yaml").read_text())).flat()
    ours = Config.make(**settings).flat()
    different = {k for k in ours if ours[k] != recipe[k]}
    assert different <= {"output_dir", "extra_inference", "brightness", "dataloader_num_workers", "save_epochs"}
    assert recipe["brightness"] == pytest.approx(ours["brightness"], abs=1e-3)


def test_rows_stay_what_they_are_whatever_the_flags(tmp_path):
    """A switch that a row's preset sets is the row's; others are the user's."""
    cells = configurations("table-6", "mini", {"kd_weight": 20, "temperature": 3}, tmp_path)
    weights = {row: by_seed[0].method.kd_weight for (row, _), by_seed in cells.items()}
    assert weights["finetune"] == weights["joint"] == 0 and weights["PASS++"] == weights["KD only"] == 20
    for by_seed in cells.values():
        trained = by_seed[0].method.adapt_tasks != "none" and by_seed[0].method.new_loss == "softmax"
        assert by_seed[0].method.temperature == (3 if trained else 1), "not where it would have no effect"
    ablation = configurations("table-7", "mini", {"proto_aug": "implicit"}, tmp_path)
    assert ablation["KD only", "mini"][0].method.proto_aug == "none"


def test_one_dataset_is_not_taken_for_another(tmp_path):
    with pytest.raises(PassloraError, match="several datasets: say with --columns"):
        configurations("table-2", "full", {"dataset_name": "/data/cifar100"}, tmp_path)
    columns = ("CIFAR-100 T=5", "CIFAR-100 T=20")
    cells = configurations("table-2", "full", {"dataset_name": "/data/cifar100"}, tmp_path, columns)
    assert {column for _, column in cells} == set(columns)
    with pytest.raises(PassloraError, match="did you mean 'CIFAR-100 T=20'"):
        configurations("table-2", "full", {}, tmp_path, ("CIFAR-100 T=21",))
    with pytest.raises(PassloraError, match="mini has one column"):
        configurations("table-2", "mini", {}, tmp_path, columns)


def test_a_knob_that_is_new_does_not_change_where_runs_lie(tmp_path, monkeypatch):
    folder = lambda: configurations("table-3", "mini", {}, tmp_path)["PASS++", "mini"][0].training.output_dir
    after = folder()
    fewer = {name: knob for name, knob in FIELDS.items() if name != "gamma"}
    for module in ("config.config", "analysis.reproduce"):
        monkeypatch.setattr(f"passlora.{module}.FIELDS", fewer)
    assert folder() == after


def test_the_papers_ablation_is_quoted():
    rows = {row.name: row.paper["CIFAR-100 T=10"] for row in EXPERIMENTS["table-7"].rows}
    assert [rows[name]["last"] for name in rows] == [8.46, 39.80, 49.03, 55.26, 57.69]


NETWORK = ["--model_name_or_path", "test_vit", "--pretrained", "false", "--image_size", "16"]  # tiny
FEW = [
    *NETWORK,
    *["--dataset_name", "digits", "--num_tasks", "2", "--max_train_per_class", "2", "--max_test_per_class", "2"],
    *["--num_train_epochs", "1", "--seeds", "0", "1"],
]


def test_an_experiment_from_the_command_line(tmp_path, cli):
    flags = ["--scale", "mini", *FEW, "--output_dir", tmp_path]
    code, out, err = cli("reproduce", "table-a2", *flags)
    assert code == 0, err
    folder = tmp_path / "table-a2" / "mini"
    assert "57.7)" in out and "vanilla ensemble" in out
    with open(folder / "table-a2.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    runs = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs").glob("*/seed_*/results.json"))]
    assert [run["seed"] for run in runs] == [0, 1], "three rows read one run a seed"
    measured = {(row["method"], row["metric"]): float(row["measured"]) for row in rows}
    assert measured["multi-view ensemble", "last"] == pytest.approx(mean(run["last"] for run in runs), abs=1e-3)
    vanilla = [run["inference_modes"]["vanilla"]["avg"] for run in runs]
    assert measured["vanilla ensemble", "avg"] == pytest.approx(mean(vanilla), abs=1e-3)
    deviation = next(row["deviation"] for row in rows if (row["method"], row["metric"]) == ("vanilla ensemble", "avg"))
    assert float(deviation) == pytest.approx(stdev(vanilla), abs=1e-3)
    page = (folder / "table-a2.md").read_text()
    assert "passlora reproduce table-a2 --scale mini --model_name_or_path test_vit" in page and "--seeds 0 1" in page
    assert "over 2 seeds" in page and len(re.findall(r"^\| .*ensemble", page, re.M)) == 2
    assert (folder / "table-a2.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "table-a2.svg").read_text()
    code, again, _ = cli("reproduce", "table-a2", *flags)
    assert code == 0 and again.count("finished already") == 6, "nothing is run twice"
    code, more, _ = cli("reproduce", "table-3", *flags)
    assert code == 0 and more.count("finished already") == 2 and "69.1" not in more, "nor for another table"


def test_baselines_and_joint_training_in_one_table(tmp_path, cli):
    """Rows that train nothing, that have one task only, and that rotate, side by side."""
    code, out, err = cli("reproduce", "table-6", "--scale", "mini", *FEW[:-1], "--output_dir", tmp_path)  # one seed
    assert code == 0, err
    table = out[out.rindex("Table 6") :]
    assert all(f"\n{row.name} " in table for row in EXPERIMENTS["table-6"].rows)


TINY = ["--scale", "mini", "--seeds", "0", "--num_train_epochs", "1", "--max_test_per_class", "4"]
TWO_TASKS = [*TINY, *NETWORK, "--dataset_name", "digits", "--num_tasks", "2"]
BASE = [*TINY, "--dataset_name", "digits", "--max_classes", "5", "--max_train_per_class", "5"]


@pytest.mark.slow
def test_zero_cost_learning_and_its_picture(tmp_path, cli):
    code, out, err = cli("reproduce", "table-1", *BASE, "--output_dir", tmp_path)
    assert code == 0, err
    kept = json.loads((tmp_path / "table-1/mini/mini/with_SST/seed_0.json").read_text())["values"]
    assert kept["old_old"] >= kept["old_all"] and kept["new_new"] >= kept["new_all"], "fewer classes to choose from"
    assert kept["all"] == pytest.approx((kept["old_all"] + kept["new_all"]) / 2), "5 base and 5 novel digits"
    assert kept["new_new"] > 40, "the novel digits were never trained on, and their means still tell them apart"
    assert f"{kept['new_new']:.1f} (52.1)" in out
    code, out, err = cli("reproduce", "fig-5", *BASE, "--output_dir", tmp_path)
    assert code == 0 and out.count("finished already") == 2, err
    panel = json.loads((tmp_path / "fig-5/mini/mini/with_SST/seed_0.json").read_text())["points"][0]
    assert len(panel["places"]) == 40 and set(panel["classes"]) == set(range(10)) and panel["novel_from"] == 5
    assert (tmp_path / "fig-5/mini/fig-5.png").stat().st_size > 10_000


def test_five_accuracies_by_hand():
    """Means at 0, 10 (old) and 20, 30 (new) on a circle of directions; one old image lies on a new class's side."""
    angle = lambda *degrees: torch.tensor([[cos(radians(d)), sin(radians(d))] for d in degrees])
    z, classes = angle(0, 30, 60, 90), torch.arange(4)
    z_test, truth = angle(1, 50, 61, 89, 40), torch.tensor([0, 1, 2, 3, 3])
    got = five_accuracies(z, classes, z_test, truth, 2)
    assert got["old_all"] == 50 and got["old_old"] == 100, "50 degrees is nearest to class 2, but of the old ones to 1"
    assert got["new_all"] == pytest.approx(200 / 3) and got["new_new"] == pytest.approx(200 / 3)
    assert got["all"] == pytest.approx(60)


@pytest.mark.slow
def test_features_on_a_plane(tmp_path, cli):
    tasks = ["--task_sizes", "6", "4", "--max_train_per_class", "4"]
    flags = [*TINY, *NETWORK, *tasks, "--output_dir", tmp_path]
    code, _, err = cli("reproduce", "fig-4", *flags)
    assert code == 0, err
    kept = json.loads((tmp_path / "fig-4/mini/mini/protoAug/seed_0.json").read_text())
    assert [len(panel["places"]) for panel in kept["points"]] == [24, 40]
    assert all(len(place) == 2 for panel in kept["points"] for place in panel["places"])
    assert (tmp_path / "fig-4/mini/fig-4.svg").stat().st_size > 10_000


@pytest.mark.slow
def test_curves_under_corruptions(tmp_path, cli):
    flags = [*TWO_TASKS, "--max_train_per_class", "3", "--output_dir", tmp_path]
    code, out, err = cli("reproduce", "fig-15", *flags)
    assert code == 0, err
    kept = json.loads((tmp_path / "fig-15/mini/mini/PASS++/seed_0.json").read_text())
    assert set(kept["curves"]) == {"clean", *CORRUPTIONS} and all(len(c) == 2 for c in kept["curves"].values())
    (results,) = (tmp_path / "runs").glob("*/seed_0/results.json")
    assert kept["curves"]["clean"] == pytest.approx(json.loads(results.read_text())["stage_accuracy"])
    assert kept["values"]["mean"] == pytest.approx(mean(kept["values"][name] for name in CORRUPTIONS))
    assert all(f"\n{name} " in out for name in CORRUPTIONS)


@pytest.mark.slow
def test_classifiers_fitted_anew_on_features(tmp_path, cli):
    flags = [*TWO_TASKS, "--max_train_per_class", "8", "--output_dir", tmp_path]
    code, out, err = cli("reproduce", "features", *flags)
    assert code == 0 and "slda_refitted" in out, err
    kept = json.loads((tmp_path / "features/mini/mini/pretrained/seed_0.json").read_text())["values"]
    assert kept["last"] == pytest.approx(kept["slda_refitted"]), "in two tasks or at once: SLDA is the same"
    joint = json.loads((tmp_path / "features/mini/mini/joint/seed_0.json").read_text())["values"]
    assert joint["slda_refitted"] != kept["slda_refitted"], "training has changed the features"


def test_memory_is_the_papers(tmp_path, cli):
    """Table 10 in its own units: what the paper rounds is what the objects hold."""
    code, _, err = cli("reproduce", "table-10", "--output_dir", tmp_path)
    assert code == 0, err
    with open(tmp_path / "table-10/full/table-10.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["paper"]:
                assert float(row["measured"]) == pytest.approx(float(row["paper"]), rel=0.1), row
    assert not (tmp_path / "runs").exists(), "nothing needs to be run"


def test_seconds_with_and_without_rotations(tmp_path, cli):
    flags = [*TWO_TASKS, "--max_train_per_class", "20", "--output_dir", tmp_path]
    code, out, err = cli("reproduce", "table-9", *flags)
    assert code == 0 and "train_seconds" in out and "(29.3)" in out, err


def test_the_list_and_mistakes(cli):
    code, out, _ = cli("reproduce")
    assert code == 0 and all(name in out for name in EXPERIMENTS)
    code, _, err = cli("reproduce", "table-77")
    assert code == 2 and "did you mean 'table-7'" in err
    code, _, err = cli("reproduce", "table-7", "--num_tasks", "x")
    assert code == 2 and "whole number" in err
    with pytest.raises(PassloraError, match="no experiment"):
        configurations("nothing", "mini", {}, Path())
