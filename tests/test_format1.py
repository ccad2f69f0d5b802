"""A folder that passlora 0.1 wrote: read as it is, converted by the first command that writes, whole at any moment."""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hub_server import logged_in
from quick import quick as quick
from quick import write_digits
from safetensors.torch import load_file

from passlora import Config, PassloraError
from passlora.data.dataset import load_dataset
from passlora.folder import format1, history
from passlora.folder.manifest import read_manifest
from passlora.model.passlora import PassLora
from passlora.model.predictions import scores

SOURCE = Path(__file__).parent / "format_1"
EXPECTED = json.loads((SOURCE / "expected_scores.json").read_text())  # 0.1's own, by task and inference mode
MODES = {"multiview": "multiview", "ncm": "nearest_prototype"}  # as 0.1 called them, and as they are called today
REPO = "ann/old"


@functools.cache
def images():
    """Those that 0.1 was asked about."""
    config = Config.make(dataset_name="digits", num_tasks=1, max_classes=5, max_test_per_class=6)
    test = load_dataset(config.data, 0).test
    return [test.rgb(i) for i in range(0, len(test), 3)]


def check_scores(name, tasks=(0, 1, 2), **options):
    """The model answers as it did under 0.1, in every mode, after each of these tasks."""
    for task in tasks:
        learner = PassLora.from_pretrained(name, task=task, **options).learner
        for old, mode in MODES.items():
            expected = torch.tensor(EXPECTED[str(task)][old])
            assert torch.allclose(scores(learner, images(), mode), expected, atol=1e-5), (task, mode)


@pytest.fixture
def old(tmp_path):
    return copy_old(tmp_path / "model")


@pytest.fixture
def server(monkeypatch, tmp_path):
    with logged_in(monkeypatch, tmp_path / "cache") as server:
        yield server


def copy_old(folder):
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("expected_scores.json"))
    return folder


def content(folder):
    """Every file with what is in it."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(folder, change):
    path = folder / "passlora.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def rolled_back(folder, to_task=0):
    """As 0.1 leaves a folder that was rolled back and not confirmed: the whole manifest aside, the other one cut."""
    shutil.copyfile(folder / "passlora.json", folder / "passlora.backup.json")
    edit(folder, lambda manifest: manifest.update(tasks=manifest["tasks"][: to_task + 1]))
    return folder


def keeping_last(folder):
    """As 0.1 leaves a folder with keep_tasks last."""
    edit(folder, lambda manifest: manifest["settings"].update(keep_tasks="last"))
    for task in (0, 1):
        shutil.rmtree(folder / f"task_{task:02d}")
    return folder


def check_converted(folder, tasks=(0, 1, 2)):
    """Format 2, and nothing of format 1 is left; every file is the one that the manifest names."""
    names = content(folder)
    assert not [name for name in names if name.endswith(("prototypes.safetensors", "head.safetensors"))]
    assert not [name for name in names if ".passlora-" in name]
    manifest = json.loads((folder / "passlora.json").read_text())
    assert manifest["format_version"] == 2
    for task in tasks:
        part = f"task_{task:02d}"
        listed = {f"{part}/{name}" for name in manifest["tasks"][task]["files"]}
        assert listed == {name for name in names if name.startswith(part)} and len(listed) == 5
    check_scores(folder, tasks)


# --- reading ---------------------------------------------------------------------------------------------------


def test_it_is_read_as_it_was_and_left_as_it_is(old, tmp_path, cli):
    before = content(old)
    data = write_digits(tmp_path / "data", range(5), 2, name="{}")
    check_scores(old)
    assert read_manifest(old).format_version == 1
    code, out, _ = cli("info", old)
    assert code == 0 and "5 classes in 3 tasks" in out
    code, out, _ = cli("predict", old, data / "0", "--json", "--task", "1")
    assert code == 0 and [len(json.loads(line)["predictions"]) for line in out.splitlines()] == [4, 4]
    assert cli("eval", old, "--data", data, "--output_dir", tmp_path / "eval")[0] == 0
    assert cli("merge", old, tmp_path / "merged")[0] == 0
    assert content(old) == before


def test_an_inference_mode_that_had_another_name(old):
    edit(old, lambda manifest: manifest["settings"].update(inference="ncm", extra_inference=["ncm", "single"]))
    model = PassLora.from_pretrained(old)
    assert model.learner.config.method.inference == "nearest_prototype"
    assert model.learner.config.method.extra_inference == ["nearest_prototype", "single"]
    best = [answer[0].label for answer in model.predict(images(), top_k=1)]
    assert best == [str(row.index(max(row))) for row in EXPECTED["2"]["ncm"]]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("task_02/head.safetensors", "head.safetensors is not a readable safetensors file"),
        ("prototypes.safetensors", "prototypes.safetensors is not a readable safetensors file"),
        ("task_02/adapter_model.safetensors", "adapter_model.safetensors is not a readable safetensors file"),
    ],
)
def test_a_damaged_file_is_one_clear_error_and_nothing_is_converted(old, cli, name, says):
    path = old / name
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(PassloraError, match=says):
        PassLora.from_pretrained(old)
    code, _, err = cli("rollback", old, "--to_task", "0")
    if "adapter" not in name:  # an adapter is the same in both formats: it is not read to be converted
        assert code == 2 and says in err and err.count("\n") == 1 and read_manifest(old).format_version == 1
        assert (old / "prototypes.safetensors").is_file() and (old / "task_02/head.safetensors").is_file()


def test_classes_that_moved_to_another_task(old):
    edit(old, lambda manifest: manifest["tasks"][0]["classes"].append(manifest["tasks"][1]["classes"].pop(0)))
    with pytest.raises(PassloraError, match="disagree on which task each class came with"):
        PassLora.from_pretrained(old)


# --- commands that write ---------------------------------------------------------------------------------------


def test_learning_converts(old, tmp_path, cli):
    data = write_digits(tmp_path / "data", [7], 2)
    code, _, err = cli("learn", old, "--data", data, "--num_train_epochs", "1")
    assert code == 0, err
    check_converted(old)
    assert PassLora.from_pretrained(old).classes == [*"01234", "digit 7"]


def test_the_next_task_is_learnt_as_from_a_folder_that_is_not_converted(old, tmp_path):
    """Radius, spread and prototypes of format 1 mean the same to what is learnt next."""
    copy_old(tmp_path / "converted")
    format1.convert(tmp_path / "converted")
    data = write_digits(tmp_path / "data", [7], 4)
    states = []
    for folder in (old, tmp_path / "converted"):
        model = PassLora.from_pretrained(folder, num_train_epochs=1)
        model.learn(data)
        states.append(model.learner.state())
    for a, b in zip(*((s.backbone, s.classifier, s.memory) for s in states), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_rollback_and_prune_convert(old, cli):
    assert cli("rollback", old, "--to_task", "1")[0] == 0
    check_converted(old, (0, 1))
    assert (old / "passlora.backup.json").is_file()
    assert cli("rollback", old, "--to_task", "2")[0] == 0
    check_converted(old)
    assert not (old / "passlora.backup.json").exists()


def test_a_prune_with_nothing_to_prune_converts(old, cli):
    code, out, _ = cli("rollback", old, "--prune")
    assert code == 0 and "nothing to delete" in out
    check_converted(old)


def test_saving_converts(old):
    PassLora.from_pretrained(old).save_pretrained(old)
    check_converted(old)


def test_saving_elsewhere_converts_only_there(old, tmp_path):
    before = content(old)
    PassLora.from_pretrained(old).save_pretrained(tmp_path / "copy")
    check_converted(tmp_path / "copy")
    assert {name: data for name, data in content(old).items() if name != ".lock"} == before


def test_an_early_task_saved_elsewhere(old, tmp_path):
    PassLora.from_pretrained(old, task=1).save_pretrained(tmp_path / "copy")
    check_converted(tmp_path / "copy", (0, 1))
    assert len(read_manifest(tmp_path / "copy").tasks) == 2 and not (tmp_path / "copy" / "task_02").exists()


# --- the Hub ---------------------------------------------------------------------------------------------------


def uploaded_by_0_1(server, folder):
    named = ("passlora.json", "prototypes.safetensors", "README.md", "results.json", "accuracy_matrix.csv")
    files = {name: data for name, data in content(folder).items() if "/" in name or name in named}
    return server.add(REPO, {**files, ".gitattributes": b"*.safetensors filter=lfs\n"})


def test_pushing_converts_here_and_there(server, old, cli):
    there = uploaded_by_0_1(server, old)
    assert "prototypes.safetensors" in there.files and "task_00/head.safetensors" in there.files
    check_scores(REPO)
    code, _, err = cli("push", old, REPO)
    assert code == 0, err
    check_converted(old)
    commit = server.repos[REPO].refs["main"][-1]
    assert not [name for name in commit.files if name.endswith(("prototypes.safetensors", "head.safetensors"))]
    assert {name for name in commit.files if name.startswith("task_")} == {
        name for name in content(old) if name.startswith("task_")
    }
    check_scores(REPO)


def test_pulling_converts(server, old, tmp_path, cli):
    uploaded_by_0_1(server, old)
    assert cli("pull", REPO, tmp_path / "pulled")[0] == 0
    check_converted(tmp_path / "pulled")


def test_a_folder_that_0_1_pulled_is_brought_up_to_date(server, old, tmp_path, cli):
    """It holds the first two tasks in format 1; the Hub has all three in format 2."""
    early = copy_old(tmp_path / "early")
    shutil.rmtree(early / "task_02")
    edit(early, lambda manifest: manifest.update(tasks=manifest["tasks"][:2]))
    assert cli("push", old, REPO)[0] == 0
    assert cli("pull", REPO, early)[0] == 0
    check_converted(early)


def test_a_model_of_the_hub_saved_here_is_converted(server, old, tmp_path):
    uploaded_by_0_1(server, old)
    PassLora.from_pretrained(REPO).save_pretrained(tmp_path / "mine")
    check_converted(tmp_path / "mine")


# --- rolled back by 0.1, and keep_tasks last -------------------------------------------------------------------


def test_a_rollback_of_0_1_can_be_undone(old, cli):
    rolled_back(old)
    before = content(old)
    check_scores(old, (0,))
    assert "--prune" in cli("info", old)[1] and content(old) == before
    code, _, err = cli("learn", old, "--data", "digits")
    assert code == 2 and "rolled back and not confirmed" in err
    assert cli("rollback", old, "--to_task", "2")[0] == 0
    check_converted(old)
    assert not (old / "passlora.backup.json").exists()


def test_a_rollback_of_0_1_can_go_elsewhere(old, cli):
    rolled_back(old)
    assert cli("rollback", old, "--to_task", "1")[0] == 0
    check_converted(old, (0, 1))
    assert len(read_manifest(old, "passlora.backup.json").tasks) == 3
    assert cli("rollback", old, "--to_task", "2")[0] == 0
    check_converted(old)


def test_a_rollback_of_0_1_can_be_confirmed(old, cli):
    """Nothing of the classes that went stays in any file."""
    rolled_back(old)
    code, out, _ = cli("rollback", old, "--prune")
    assert code == 0 and "deleted: task_01, task_02" in out
    check_converted(old, (0,))
    assert not (old / "passlora.backup.json").exists()
    for path in old.rglob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if path.name != "adapter_model.safetensors" and name != "radius":
                assert len(tensor) == 2 * 4, "two classes in four views"


def test_where_0_1_kept_only_the_last_task(old, tmp_path, cli):
    keeping_last(old)
    before = content(old)
    check_scores(old, (2,))
    with pytest.raises(PassloraError, match="were not kept"):
        PassLora.from_pretrained(old, task=1)
    assert content(old) == before
    code, _, err = cli("rollback", old, "--to_task", "1")
    assert code == 2 and "were not kept (keep_tasks last): there is only task 2" in err
    check_converted(old, (2,))
    assert [entry.files for entry in read_manifest(old).tasks[:2]] == [{}, {}]
    data = write_digits(tmp_path / "data", [7], 1)
    assert cli("learn", old, "--data", data, "--num_train_epochs", "1")[0] == 0
    assert [path.name for path in old.glob("task_*")] == ["task_03"]
    assert PassLora.from_pretrained(old).classes == [*"01234", "digit 7"]


# --- killed while converting -----------------------------------------------------------------------------------


class Kept:
    """In place of a learner: what `restore` would give it."""

    @functools.cached_property
    def learner(self):
        return PassLora.from_pretrained(SOURCE).learner

    def forms(self, classes):
        return self.learner.forms(classes)

    def restore(self, tasks, classes, state):
        self.state = {**state.backbone, **state.classifier, **state.memory}


KEPT = Kept()


def states(folder, tasks, name="passlora.json"):
    manifest = read_manifest(folder, name)
    found = []
    for task in tasks:
        history.restore(folder, KEPT, manifest, task + 1)
        found.append(KEPT.state)
    return found


def same(first, second):
    pairs = list(zip(first, second, strict=True))
    return all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs)


def convert_and_die(folder, event):
    """Convert in a process that ends, without any clearing up, at its n-th step on the disk; whether it got there."""
    child = os.fork()
    if child == 0:
        count = 0

        def dying(function):
            def step(*args, **kwargs):
                nonlocal count
                count += 1
                if count == event:
                    os._exit(9)
                return function(*args, **kwargs)

            return step

        for name in ("replace", "fsync", "unlink", "rmdir", "open"):
            setattr(os, name, dying(getattr(os, name)))
        try:
            format1.convert(folder)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


FOLDERS = pytest.mark.parametrize(
    ("make", "tasks", "kept"),
    [
        (lambda folder: folder, (0, 1, 2), (0, 1, 2)),
        (rolled_back, (0,), (0, 1, 2)),
        (keeping_last, (2,), (2,)),
    ],
    ids=["plain", "rolled back", "last task only"],
)


def kill_sweep(tmp_path, make, tasks, kept, stride):
    """At every `stride`-th step. `tasks` are those of the model, `kept` those that can be gone back to."""
    whole = make(copy_old(tmp_path / "whole"))
    is_back = (whole / "passlora.backup.json").is_file()
    everything = "passlora.backup.json" if is_back else "passlora.json"
    before, all_before = states(whole, tasks), states(whole, kept, everything)
    event, formats = 1, []
    while True:
        folder = make(copy_old(tmp_path / str(event)))
        was_killed = convert_and_die(folder, event)
        assert same(states(folder, tasks), before), event
        assert same(states(folder, kept, everything), all_before), event
        assert len(read_manifest(folder).tasks) == len(read_manifest(whole).tasks)
        formats.append(read_manifest(folder).format_version)
        format1.convert(folder)  # the next command that writes
        assert same(states(folder, tasks), before) and same(states(folder, kept, everything), all_before), event
        assert not list(folder.rglob("head.safetensors")) and not (folder / "prototypes.safetensors").exists()
        if stride == 1 and event % 9 == 0:
            check_scores(folder, tasks)
        shutil.rmtree(folder)
        if not was_killed:
            break
        event += stride
    assert event > 15 and formats == sorted(formats) and set(formats) == {1, 2}, "before the manifest, and after it"


@pytest.mark.slow
@FOLDERS
def test_killed_while_converting_it_is_the_same_model(tmp_path, make, tasks, kept):
    kill_sweep(tmp_path, make, tasks, kept, 5)


@pytest.mark.slow
@FOLDERS
def test_killed_at_any_moment_it_is_the_same_model(tmp_path, make, tasks, kept):
    kill_sweep(tmp_path, make, tasks, kept, 1)


def test_interrupted_it_leaves_nothing_half_written(old, monkeypatch):
    """Ctrl-C instead of a kill: what was being written is cleared away."""
    replace, calls = os.replace, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        replace(*args)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        format1.convert(old)
    monkeypatch.undo()
    assert not list(old.rglob(".passlora-*")) and read_manifest(old).format_version == 1
    check_scores(old)
