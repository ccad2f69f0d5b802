"""A run's folder through the command line: what is deleted, what goes on, and what happens if it is taken away."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from passlora import PassloraError
from passlora.folder.layout import NOTES
from passlora.folder.manifest import read_manifest
from passlora.folder.results import read_results, write_results
from passlora.runs.folder import is_run
from passlora.runs.stream import Method, Stream

TINY = [
    *["--model_name_or_path", "test_vit", "--pretrained", "false", "--image_size", "16"],
    *["--dataset_name", "digits", "--max_train_per_class", "2", "--max_test_per_class", "1"],
    *["--num_train_epochs", "1", "--task_sizes", "6", "4"],
]
SLDA = [*TINY, "--preset", "slda"]  # trains nothing: a run of a second


def tree(folder):
    """Every file below, but for locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix() for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of one seed."""
    from passlora.cli.main import main

    folder = tmp_path_factory.mktemp("slda") / "run"
    main(["train", *SLDA, "--output_dir", str(folder)])
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def part(folder, name="results.json"):
    return json.loads((folder / name).read_text())


# --- what is deleted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [(), ("--overwrite_output_dir",)], ids=["plain", "overwrite"])
@pytest.mark.parametrize("theirs", ["a: 1\n", "dataset_name: digits\nseed: 0\n", "- x\n", ""])
def test_somebodys_config_yaml_makes_no_run(overwrite, theirs, cli, tmp_path):
    folder = tmp_path / "project"
    names = ("README.md", "logs/server.log", "compare/notes.txt", "task_list.txt", "task_00/photo.jpg", "results.json")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    (folder / "config.yaml").write_text(theirs)
    code, _, err = cli("train", *SLDA, "--output_dir", folder, *overwrite)
    assert code == 2 and "is not empty and holds no run: choose another --output_dir" in err
    assert tree(folder) == {"config.yaml", *names} and (folder / "config.yaml").read_text() == theirs
    assert all((folder / name).read_text() == "mine" for name in names)


def test_overwriting_removes_what_a_run_wrote_and_nothing_else(cli, tmp_path):
    pytest.importorskip("tensorboard")
    folder, flags = tmp_path / "run", ["--output_dir", tmp_path / "run"]
    seeds = ["--seeds", "0", "--compare", "ncm", "--report_to", "tensorboard"]
    code, _, err = cli("train", *SLDA, *flags, *seeds)
    assert code == 0, err
    written = tree(folder)
    for name in ("seed_0/task_01/", "seed_0/compare/ncm/task_00/", "logs/passlora/", "seed_0/README.md"):
        assert any(path.startswith(name) for path in written), name
    theirs = {
        *("README.md", "logs/server.log", "logs/passlora.txt", "compare/notes.txt", "compare/ncm/notes.txt"),
        *("task_list.txt", "task_07/photo.jpg", "task_photos/1.jpg", "seed_0/notes.txt", "seed_2/notes.txt"),
        *("seed_0/task_00/photo.jpg", "seeds/list.txt", "passlora.txt", "accuracy.jpg"),
    }
    for name in theirs:
        assert not (folder / name).exists(), "the run does not write it"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    card = folder / "seed_0" / "README.md"
    card.write_text(card.read_text() + "\nTaken with my camera.\n")
    code, _, err = cli("train", *SLDA, *flags, "--overwrite_output_dir")
    assert code == 0, err
    new = {path for path in tree(folder) if "/" not in path or path.startswith(("task_00/", "task_01/"))}
    assert tree(folder) - new == {name for name in theirs if "/" in name} | {"seed_0/README.md"}
    assert card.read_text() == "Taken with my camera.\n", "what stood below our line, and no more"
    for name in theirs - {"README.md"}:
        assert (folder / name).read_text() == "mine", name
    assert (folder / "README.md").read_text().endswith(f"{NOTES}\nmine"), "the new run's card has taken it in"
    assert part(folder)["finished"] and "runs" not in part(folder) and len(read_manifest(folder).tasks) == 2


def test_a_run_of_0_1_can_be_overwritten(cli, tmp_path):
    """Its config.yaml has no mark, but a model lies beside it."""
    folder = Path(shutil.copytree(Path(__file__).parent / "format_1", tmp_path / "run"))
    before = tree(folder)
    assert "prototypes.safetensors" in before
    code, _, err = cli("train", *SLDA, "--output_dir", folder)
    assert code == 2 and "--overwrite_output_dir" in err and tree(folder) == before
    code, _, err = cli("train", *SLDA, "--output_dir", folder, "--overwrite_output_dir")
    assert code == 0, err
    assert not {"prototypes.safetensors", "task_00/head.safetensors"} & tree(folder)


# --- what goes on --------------------------------------------------------------------------------------------------


def test_a_preset_to_compare_with_can_be_added_to_a_finished_run(run, cli, monkeypatch):
    before, ran = part(run), []
    stream = Method.learn_all
    monkeypatch.setattr(Method, "learn_all", lambda self, uploads: ran.append(self.name) or stream(self, uploads))
    flags = ["--output_dir", run, "--per_device_eval_batch_size", "3"]
    code, out, err = cli("train", *SLDA, *flags)
    assert code == 0 and "slda: finished already" in out and ran == [], err
    code, out, err = cli("train", *SLDA, *flags, "--compare", "ncm")
    assert code == 0 and out.count("finished already") == 1 and ran == ["ncm"], err
    after = part(run)
    assert set(after["compare"]) == {"ncm"} and after["compare"]["ncm"]["finished"]
    assert {**after, "compare": {}} == before
    code, out, err = cli("train", *SLDA, *flags, "--compare", "ncm", "simplecil")
    assert code == 0 and out.count("finished already") == 2 and ran == ["ncm", "simplecil"], err
    assert set(part(run)["compare"]) == {"ncm", "simplecil"}
    code, _, err = cli("train", *SLDA, "--output_dir", run, "--seed", "1")
    assert code == 2 and "seed was 0, is 1" in err, "what changes results is still another run"


@pytest.fixture
def pushed(monkeypatch):
    """Folders that would have been uploaded, each with the number of its tasks and compared presets."""
    from passlora.hub.push import Pushed

    seen = []

    def push(folder, repo_id, private):
        compared = (folder / "compare").is_dir() and len(list((folder / "compare").iterdir()))
        seen.append((folder.name, repo_id, len(read_manifest(folder).tasks), int(compared)))
        return Pushed("https://hub/" + repo_id, True, "task")

    monkeypatch.setattr("passlora.hub.push.push", push)
    return seen


def test_a_run_that_is_pushed_may_be_compared(cli, tmp_path, pushed):
    flags = ["--push_to_hub", "true", "--hub_model_id", "a/b", "--compare", "slda"]
    code, out, err = cli("train", *TINY, "--preset", "ncm", *flags, "--output_dir", tmp_path / "main")
    assert code == 0, err
    assert set(part(tmp_path / "main")["compare"]) == {"slda"}
    assert pushed == [("main", "a/b", 1, 0), ("main", "a/b", 2, 0), ("main", "a/b", 2, 1)], "the run alone, and again"
    assert out.count("uploaded to https://hub/a/b") == 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--preset", "pass", "--sst", "false", "--compare", "pass++"], "compare pass++: inference multiview needs"),
        (["--preset", "ncm", "--compare", "slda", "ncm"], "compare: ncm is the run itself"),
        (["--preset", "ncm", "--compare", "sldaa"], "did you mean 'slda'"),
    ],
)
def test_a_preset_that_cannot_be_compared_is_refused_before_anything_is_trained(
    flags, says, cli, tmp_path, monkeypatch
):
    monkeypatch.setattr(Stream, "__init__", lambda *_: pytest.fail("begun"))
    flags += [] if "--sst" not in flags else ["--prototype_views", "1", "--inference", "single"]
    code, out, err = cli("train", *TINY, *flags, "--output_dir", tmp_path / "run")
    assert code == 2 and says in err and err.count("\n") == 1 and out == ""
    assert not (tmp_path / "run").exists()


# --- a folder that is taken away -----------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["slda", "pass++"])
@pytest.mark.parametrize("gone", [".", "config.yaml"])
def test_a_folder_that_vanishes_between_two_tasks_ends_the_run(gone, preset, cli, tmp_path, monkeypatch):
    folder, learn = tmp_path / "run", Method.learn

    def and_take_it_away(self, task, *arguments):
        lesson = learn(self, task, *arguments)
        if task == 0:
            shutil.rmtree(folder) if gone == "." else (folder / gone).unlink()
        return lesson

    monkeypatch.setattr(Method, "learn", and_take_it_away)
    code, out, err = cli("train", *TINY, "--preset", preset, "--output_dir", folder)
    assert code == 2 and "is no longer the folder of this run: its config.yaml is gone" in err
    assert "saved in" not in out and not is_run(folder)
    if gone == ".":
        assert tree(folder) == set()
    else:
        assert len(read_manifest(folder).tasks) == 1 and not part(folder)["finished"], "as the first task left it"


def test_a_folder_that_vanishes_after_the_last_task(cli, tmp_path, monkeypatch):
    folder, learn_all = tmp_path / "run", Method.learn_all

    def and_take_it_away(self, uploads):
        results = learn_all(self, uploads)
        shutil.rmtree(folder)
        return results

    monkeypatch.setattr(Method, "learn_all", and_take_it_away)
    code, _, err = cli("train", *SLDA, "--output_dir", folder)
    assert code == 2 and "its config.yaml is gone" in err and tree(folder) == set()


# --- results.json --------------------------------------------------------------------------------------------------

DAMAGED = {
    "cut off": '{"last": 1',
    "a list": "[1, 2]",
    "a number": "3",
    "nothing": "",
    "not text": "\udcff",
    "nested": "[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_results_are_one_sentence_to_whoever_reads_them(content, run, cli):
    (run / "results.json").write_text(content, errors="surrogateescape")
    with pytest.raises(PassloraError, match="run") as refused:
        read_results(run)
    for command in (["train", *SLDA, "--output_dir", run], ["report", run, "--html", run / "page.html"]):
        code, _, err = cli(*command)
        assert code == 2 and err == f"passlora: error: {refused.value}\n"
    assert cli("info", run)[0] == 0, "the model does not need them"


def test_results_lack_nothing_that_readers_use(run):
    whole = read_results(run)
    for name in ("last", "accuracy_matrix", "compare", "preset", "inference_modes"):
        write_results(run, {key: value for key, value in whole.items() if key != name})
        with pytest.raises(PassloraError, match=name):
            read_results(run)
    write_results(run, whole)
    assert read_results(run) == whole
    (run / "results.json").unlink()
    with pytest.raises(PassloraError, match=r"holds no results\.json: it is no run of passlora train"):
        read_results(run)
