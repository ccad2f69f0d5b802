"""The paper's experiments: every cell a valid run, the page with the paper's figures, going on where it stopped."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import yaml

from passlora import PassloraError
from passlora.paper import COLUMNS, EXPERIMENTS, MINI
from passlora.reproduce import configurations

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("scale", ["full", "mini"])
def test_every_cell_is_a_valid_configuration(name, scale, tmp_path):
    configs = configurations(name, scale, {}, tmp_path)
    experiment = EXPERIMENTS[name]
    runs = sum(row.mode is None for row in experiment.rows)
    assert len(configs) == runs * (1 if scale == "mini" else len(experiment.columns))
    folders = [config.training.output_dir for config in configs.values()]
    assert len(set(folders)) == len(folders)
    for row in experiment.rows:
        if row.mode is not None:
            (source,) = [r for r in experiment.rows if r.name == row.source]
            assert row.mode in source.settings["extra_inference"]


def test_rows_of_one_experiment_differ(tmp_path):
    for name, experiment in EXPERIMENTS.items():
        for column in experiment.columns:
            configs = [
                {k: v for k, v in config.flat().items() if k != "output_dir"}
                for (_, at), config in configurations(name, "full", {}, tmp_path).items()
                if at == column
            ]
            assert all(a != b for i, a in enumerate(configs) for b in configs[:i]), name


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("mini/cifar100_t10", MINI),
        ("deit_s16_lora/cifar100_t10", COLUMNS["DeiT CIFAR-100 T=10"]),
        ("resnet18_scratch/cifar100_t5", COLUMNS["CIFAR-100 T=5"]),
        ("resnet18_scratch/cifar100_t10", COLUMNS["CIFAR-100 T=10"]),
        ("resnet18_scratch/cifar100_t20", COLUMNS["CIFAR-100 T=20"]),
    ],
)
def test_protocols_are_those_of_the_recipes(path, settings):
    from passlora import Config

    recipe = Config.make(**yaml.safe_load((ROOT / "recipes" / f"{path}.yaml").read_text())).flat()
    ours = Config.make(**settings).flat()
    different = {k for k in ours if ours[k] != recipe[k]} - {"output_dir", "extra_inference", "brightness"}
    assert not different


def test_the_papers_ablation_is_quoted():
    rows = {row.name: row.paper["CIFAR-100 T=10"] for row in EXPERIMENTS["table-7"].rows}
    assert [rows[name]["last"] for name in rows] == [8.46, 39.80, 49.03, 55.26, 57.69]


FEW = [
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
    results = json.loads((folder / "mini" / "multi-view_ensemble" / "results.json").read_text())
    measured = {(row["method"], row["metric"]): float(row["measured"]) for row in rows}
    assert measured["multi-view ensemble", "last"] == pytest.approx(results["last"], abs=1e-3)
    vanilla = results["inference_modes"]["vanilla"]
    assert measured["vanilla ensemble", "avg"] == pytest.approx(vanilla["avg"], abs=1e-3)
    page = (folder / "table-a2.md").read_text()
    assert "passlora reproduce table-a2 --scale mini" in page and len(re.findall(r"^\| .*ensemble", page, re.M)) == 2
    assert (folder / "table-a2.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "table-a2.svg").read_text()
    code, again, _ = cli("reproduce", "table-a2", *flags)
    assert code == 0 and again.count("finished already") == 2, "nothing is run twice"


def test_baselines_and_joint_training_in_one_table(tmp_path, cli):
    """Rows that train nothing, that have one task only, and that rotate, side by side."""
    code, out, err = cli("reproduce", "table-6", "--scale", "mini", *FEW, "--output_dir", tmp_path)
    assert code == 0, err
    table = out[out.rindex("Table 6") :]
    assert all(f"\n{row.name} " in table for row in EXPERIMENTS["table-6"].rows)


def test_the_list_and_mistakes(cli):
    code, out, _ = cli("reproduce")
    assert code == 0 and all(name in out for name in EXPERIMENTS)
    code, _, err = cli("reproduce", "table-77")
    assert code == 2 and "did you mean 'table-7'" in err
    code, _, err = cli("reproduce", "table-7", "--num_tasks", "x")
    assert code == 2 and "whole number" in err
    with pytest.raises(PassloraError, match="no experiment"):
        configurations("nothing", "mini", {}, Path())
