"""docs/extending.md, taken at its word: its code as a package installed beside passlora, in fresh processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import image_files
from safetensors.torch import load_file

from passlora.method.classifiers.base import KINDS

PAGE = (Path(__file__).parent.parent / "docs/extending.md").read_text()
TINY = ["--model_name_or_path", "test_vit", "--pretrained", "false", "--image_size", "32"]


def block(language, containing):
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.S) if containing in text]
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """What `pip install` makes of the page's two files."""
    folder = tmp_path_factory.mktemp("site-packages")
    (folder / "passlora_gauss.py").write_text(block("python", '@register("gauss")'))
    (folder / "test_gauss.py").write_text(block("python", "def test_two_processes"))
    project = tomllib.loads(block("toml", "[project]"))["project"]
    about = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n{name} = {value}" for group, e in project["entry-points"].items() for name, value in e.items()
    ]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def python(site, *arguments):
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=site.parent)


# Runs the commands one after another in a process that has not seen the plugin; each gives a line of JSON.
COMMANDS = """
import contextlib, io, json, sys
from passlora.cli.main import main
for argv in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(argv)
        except SystemExit as done:
            code = done.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


@pytest.fixture(scope="module")
def done(site):
    """A run of the page's preset beside SLDA, and every command; what each ended with, said and complained of."""
    root = site.parent
    run, model, photos = root / "run", root / "birds", image_files(root / "photos", count=6, size=(32, 32))
    more = image_files(root / "more", splits=(), classes=("yak",), size=(32, 32))
    flags = ["--dataset_name", "digits", "--task_sizes", "6", "4", "--max_train_per_class", "10", *TINY]
    flags += ["--max_test_per_class", "3", "--preset", "gauss", "--compare", "slda", "--output_dir", run]
    commands = {
        "train": ["train", *flags],
        "info": ["info", run, "--json"],
        "learn": ["learn", model, "--data", photos, "--preset", "gauss", *TINY],
        "again": ["learn", model, "--data", more],
        "predict": ["predict", model, photos / "test", more, "--json"],
        "eval": ["eval", model, "--data", photos],
        "rollback": ["rollback", model, "--to_task", "0"],
        "merge": ["merge", model, root / "merged"],
        "typo": ["learn", root / "x", "--data", photos, "--preset", "gaus"],
        "help": ["validate", run / "config.yaml"],
    }
    argv = json.dumps([[str(part) for part in command] for command in commands.values()])
    process = python(site, "-c", COMMANDS, argv)
    assert process.returncode == 0, process.stderr
    return dict(zip(commands, map(json.loads, process.stdout.splitlines()), strict=True))


@pytest.mark.slow
def test_a_run_with_it(site, done):
    code, out, err = done["train"]
    assert code == 0, err
    folder = site.parent / "run"
    results = json.loads((folder / "results.json").read_text())
    assert results["preset"] == "gauss" and set(results["compare"]) == {"slda"} and results["finished"]
    assert results["last"] > 20, "ten digits, by a random network: chance is 10"
    assert "gauss on frozen features" in out
    first, second = (load_file(folder / f"task_0{task}" / "classifier.safetensors") for task in (0, 1))
    assert first.keys() == {"means", "variances"} and len(first["means"]) == 6 and len(second["means"]) == 10
    assert all(torch.equal(second[name][:6], first[name]) for name in first)
    assert (second["variances"] > 0).all()


@pytest.mark.slow
def test_every_command_knows_it(site, done):
    for name in ("info", "learn", "again", "predict", "eval", "rollback", "help"):
        assert done[name][0] == 0, done[name]
    assert json.loads(done["info"][1])["settings"]["classifier"] == "gauss"
    assert "learnt 3 classes" in done["learn"][1] and "knows 4 classes now" in done["again"][1]
    answers = [json.loads(line) for line in done["predict"][1].splitlines()]
    assert len(answers) == 18 + 4 and {len(answer["predictions"]) for answer in answers} == {4}
    right = [Path(answer["file"]).parent.name == answer["predictions"][0]["label"] for answer in answers]
    assert sum(right) > 0.7 * len(right), "classes of other brightness"
    code, _, err = done["merge"]
    assert code == 2 and "the classifier gauss is not linear" in err and not (site.parent / "merged").exists()
    assert done["typo"][0] == 2 and "did you mean 'gauss'?" in done["typo"][2]


@pytest.mark.slow
def test_without_the_plugin_the_sentence_tells_of_plugins(site, done, image_tree, tmp_path, cli):
    assert "gauss" not in KINDS, "this process has not loaded it"
    folder, photos = site.parent / "run", image_tree(count=1)
    commands = (
        ["predict", folder, photos],
        ["info", folder],
        ["learn", folder, "--data", photos],
        ["train", "--config", folder / "config.yaml", "--output_dir", tmp_path / "again"],
        ["learn", tmp_path / "new", "--data", photos, "--preset", "gauss"],
    )
    for command in commands:
        code, out, err = cli(*command)
        assert code == 2 and out == "" and err.count("\n") == 1
        assert "or a name that an installed plugin adds; got 'gauss'" in err
    assert not (tmp_path / "again").exists() and not (tmp_path / "new").exists()


def run_page_tests(site):
    return python(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", site, site / "test_gauss.py")


@pytest.mark.slow
def test_the_tests_of_the_page_pass(site):
    done = run_page_tests(site)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout


@pytest.mark.slow
def test_the_tests_of_the_page_can_fail(site, tmp_path):
    whole = (site / "passlora_gauss.py").read_text()
    alone = whole.replace("(features.reduce(part) for part in (total, squares, count))", "(total, squares, count)")
    assert alone != whole
    (tmp_path / "passlora_gauss.py").write_text(alone)
    (tmp_path / "test_gauss.py").write_text((site / "test_gauss.py").read_text())
    done = run_page_tests(tmp_path)
    assert done.returncode == 1 and "1 failed, 2 passed" in done.stdout, "without the reduction"


def test_the_page_names_what_the_base_class_has():
    from passlora.method.classifiers import Classifier

    named = set(re.findall(r"`(\w+)", " ".join(re.findall(r"^\| (`[^|]+)\|", PAGE, re.M))))
    own = {name for name in vars(Classifier) if not name.startswith("_") and name not in ("trained", "enlarge")}
    assert named - {"__init__"} == own and "enlarge(buffer, rows)" in PAGE
