"""Push, pull and load with the real huggingface_hub client, against a Hub of our own on the loopback."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from hub_server import TOKEN, Hub, logged_in
from huggingface_hub import constants
from PIL import Image
from quick import SMALL, SMALL_FLAGS, write_digits
from quick import quick as quick
from transformers import pipeline

import passlora.serving  # noqa: F401 - the pipeline reads merged models
from passlora import Config, PassloraError, train
from passlora.hub import names as hub_names
from passlora.hub import pull as hub_pull
from passlora.hub import push as hub_push
from passlora.hub.pull import pull
from passlora.hub.push import push
from passlora.model.passlora import PassLora

REPO = "ann/digits"
ONE_EPOCH = ["--num_train_epochs", "1"]


def digit_folder(root, *digits, count=3):
    return write_digits(root, digits, count, name="{}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three tasks of digits, as `train` leaves them."""
    folder = tmp_path_factory.mktemp("hub") / "digits"
    options = {"dataset_name": str(digit_folder(folder.parent / "data", 0, 1, 2, 3, 4)), "task_sizes": [2, 2, 1]}
    config = Config.make(
        **options, num_train_epochs=1, per_device_train_batch_size=8, output_dir=str(folder), preset="pass++"
    )
    train(config)
    return folder


@pytest.fixture
def model(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def server(monkeypatch, tmp_path):
    with logged_in(monkeypatch, tmp_path / "cache") as server:
        yield server


@pytest.fixture
def said():
    """What the library says while it trains."""

    class Kept(logging.Handler):
        def emit(self, record):
            lines.append(self.format(record))

    lines, logger, handler = [], logging.getLogger("passlora"), Kept()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)


def names(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def head(model):
    return model.learner.network.classifier.weight


TENSORS = ["adapter_model.safetensors", "classifier.safetensors", "memory.safetensors"]
PART = [*TENSORS, "adapter_config.json", "settings.json"]
ABOUT = ["README.md", "accuracy.png", "accuracy_matrix.csv", "passlora.json", "results.json"]


def test_a_push_is_one_commit_with_the_model_alone(server, model, cli):
    code, out, _ = cli("push", model, REPO)
    assert code == 0 and f"uploaded to {server.url}/{REPO}, tag task-02" in out
    repo = server.repos[REPO]
    _, commit = repo.refs["main"]
    assert commit.message == "Task 2: 5 classes" and repo.tags == {"task-02": commit}
    parts = [f"task_{task:02d}/{name}" for task in range(3) for name in PART]
    assert set(commit.files) == {".gitattributes", *ABOUT, *parts}, "no settings, logs or comparisons"
    for name, content in commit.files.items():
        if name not in (".gitattributes", "README.md"):
            assert content == (model / name).read_bytes()
    assert f'from_pretrained("{REPO}")' in commit.files["README.md"].decode().replace("'", '"')
    code, out, _ = cli("push", model, REPO)
    assert code == 0 and "is up to date" in out and len(repo.refs["main"]) == 2


def test_a_further_task_uploads_what_changed(server, model, tmp_path, cli):
    push(model, REPO)
    puts = sum(method == "PUT" for method, _ in server.requests)
    digit_folder(tmp_path / "more", 7)
    assert cli("learn", model, "--data", tmp_path / "more", *ONE_EPOCH)[0] == 0
    assert cli("push", model, REPO)[0] == 0
    repo = server.repos[REPO]
    before, after = repo.refs["main"][1:]
    changed = {"README.md", "passlora.json", *(f"task_03/{name}" for name in PART)}
    assert set(after.uploaded) == changed
    assert repo.tags == {"task-02": before, "task-03": after}
    assert sum(method == "PUT" for method, _ in server.requests) == puts + len(TENSORS), "adapter, head and memory"


def test_another_model_is_not_replaced_by_accident(server, model, tmp_path, cli, tiny, said):
    push(model, REPO)
    cli("learn", tmp_path / "other", "--data", digit_folder(tmp_path / "data", 8, 9), *SMALL_FLAGS, "--preset", "ncm")
    code, _, err = cli("push", tmp_path / "other", REPO)
    assert code == 2 and "ann/digits holds another model" in err and err.count("\n") == 1
    train(run_config(tiny, tmp_path))
    assert "holds another model" in "\n".join(said) and len(server.repos[REPO].refs["main"]) == 2
    assert cli("push", tmp_path / "other", REPO, "--force")[0] == 0
    assert PassLora.from_pretrained(REPO).classes == ["8", "9"]


THEIRS = {
    "README.md": b"---\nlicense: mit\n---\n# Ann's own model\n",
    "results.json": b'{"mine": 1}',
    "accuracy.png": b"a picture of ann's",
    "model.safetensors": b"weights",
}


@pytest.mark.parametrize("kept", [["README.md"], ["results.json"], ["accuracy.png"], list(THEIRS)], ids=str)
def test_a_repository_of_something_else_is_not_replaced_by_accident(server, model, cli, kept):
    """Nothing says passlora there: what would be replaced or deleted is someone's."""
    files = {name: THEIRS[name] for name in kept}
    server.add(REPO, files)
    code, _, err = cli("push", model, REPO)
    assert code == 2 and "holds something else than a passlora model" in err and err.count("\n") == 1
    assert "--force" in err and any(name in err for name in kept)
    assert [commit.files for commit in server.repos[REPO].refs["main"]] == [files]
    with pytest.raises(PassloraError, match="something else"):
        PassLora.from_pretrained(model).push_to_hub(REPO)
    assert cli("push", model, REPO, "--force")[0] == 0
    there = server.repos[REPO].refs["main"][-1].files
    assert PassLora.from_pretrained(REPO).classes and there.get("model.safetensors") == files.get("model.safetensors")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {".gitattributes": b"*.safetensors filter=lfs\n"},
        {".gitattributes": b"", "README.md": b"---\nlicense: mit\n---\n"},
        {"model.safetensors": b"what we do not write stays beside it"},
    ],
    ids=["empty", "attributes", "front matter", "another file"],
)
def test_a_repository_that_was_just_made(server, model, cli, files):
    server.add(REPO, files)
    assert cli("push", model, REPO)[0] == 0
    commit = server.repos[REPO].refs["main"][-1]
    assert "passlora.json" in commit.files and not commit.deleted
    assert all(commit.files[name] == content for name, content in files.items() if name != "README.md")
    assert "README.md" not in files or b"license: mit" in commit.files["README.md"], "the licence is a choice"


def test_a_commit_made_in_the_meantime_is_not_undone(server, model, monkeypatch):
    push(model, REPO)
    files = server.repos[REPO].refs["main"][-1].files
    (model / "results.json").write_text("{}")
    render = hub_push.render
    monkeypatch.setattr(hub_push, "render", lambda *args: server.add(REPO, files, "someone else's") and render(*args))
    with pytest.raises(PassloraError, match="the Hub answers 412: A commit has happened since"):
        push(model, REPO)
    assert server.repos[REPO].refs["main"][-1].message == "someone else's"


def test_what_a_rollback_removed_goes_there_too(server, model, cli):
    push(model, REPO)
    server.add(REPO, {**server.repos[REPO].refs["main"][-1].files, "notes.txt": b"the owner's own"})
    cli("rollback", model, "--to_task", "0")
    code, _, err = cli("push", model, REPO)
    assert code == 2 and "not confirmed" in err
    cli("rollback", model, "--prune")
    code, _, err = cli("push", model, REPO)
    assert code == 2 and "holds later tasks of this model" in err and err.count("\n") == 1
    assert cli("push", model, REPO, "--force")[0] == 0
    commit = server.repos[REPO].refs["main"][-1]
    assert {name.split("/")[0] for name in commit.files if "task" in name} == {"task_00"}
    assert "notes.txt" in commit.files
    assert set(server.repos[REPO].tags) == {"task-02", "task-00"}
    back = PassLora.from_pretrained(REPO, revision="task-02")
    assert len(back.classes) == 5, "the tag still has what was"


@pytest.mark.parametrize("task", [None, 0, 1])
def test_loading_from_the_hub(server, model, task):
    push(model, REPO)
    server.requests.clear()
    there, here = PassLora.from_pretrained(REPO, task=task), PassLora.from_pretrained(model, task=task)
    assert torch.equal(head(there), head(here)) and there.classes == here.classes
    assert torch.equal(there.learner.memory.means, here.learner.memory.means)
    fetched = {path.split("/resolve/")[1].split("/", 1)[1] for _, path in server.requests if "/resolve/" in path}
    part = f"task_{2 if task is None else task:02d}"
    assert fetched == {"passlora.json", *(f"{part}/{name}" for name in PART)}


def test_a_model_of_the_hub_is_taught_and_saved_whole(server, model, tmp_path):
    push(model, REPO)
    there = PassLora.from_pretrained(REPO, num_train_epochs=1)
    there.learn(digit_folder(tmp_path / "more", 8))
    with pytest.raises(PassloraError, match="save_pretrained it first"):
        there.push_to_hub(REPO)
    there.save_pretrained(tmp_path / "mine")
    assert torch.equal(
        head(PassLora.from_pretrained(tmp_path / "mine", task=0)), head(PassLora.from_pretrained(model, 0))
    )
    assert there.push_to_hub(REPO, revision="mine") == f"{server.url}/{REPO}"
    repo = server.repos[REPO]
    assert len(repo.refs["mine"]) == 3 and len(repo.refs["main"]) == 2 and set(repo.tags) == {"task-02"}
    assert PassLora.from_pretrained(REPO, revision="mine").classes[-1] == "8"


def test_what_was_loaded_once_is_there_without_network(server, model, monkeypatch):
    push(model, REPO)
    before = head(PassLora.from_pretrained(REPO))
    server.shutdown()
    server.server_close()
    assert torch.equal(head(PassLora.from_pretrained(REPO)), before)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert torch.equal(head(PassLora.from_pretrained(REPO)), before)
    with pytest.raises(PassloraError, match="cannot be reached on the Hub nor found in its cache"):
        PassLora.from_pretrained(REPO, task=0)


def environment(server, tmp_path, token=TOKEN):
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), "0")
    ours = {"HF_ENDPOINT": server.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
    return {**os.environ, **offline, **ours}


@pytest.mark.slow  # the second block of the card's quick start does so too, below
def test_stock_peft_reads_an_adapter_from_the_hub(server, model, tmp_path, stock_peft):
    push(model, REPO)
    x = torch.randn(2, 3, 64, 64)
    theirs = stock_peft(REPO, x, environment(server, tmp_path))
    with torch.no_grad():
        ours = PassLora.from_pretrained(model, task=1).learner.network(x)
    assert (ours - theirs).abs().max() <= 1e-6


def timm_repository(server, repo_id, tmp_path):
    """A small network as timm publishes one."""
    import timm

    network = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=3, num_classes=5)
    arguments = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3}
    timm.models.save_for_hf(network, tmp_path / "timm", model_args=arguments, safe_serialization=True)
    server.add(repo_id, {path.name: path.read_bytes() for path in (tmp_path / "timm").iterdir()})


@pytest.mark.slow  # .ci/run takes it with the newest releases, too
def test_a_backbone_of_the_hub_and_the_quick_start_of_the_card(server, tmp_path, cli, monkeypatch):
    """Every block of code in the published card runs as printed."""
    monkeypatch.chdir(tmp_path)
    timm_repository(server, "bob/small-vit", tmp_path)
    data = digit_folder(tmp_path / "data", 3, 4)
    flags = ["--model_name_or_path", "hf-hub:bob/small-vit", "--num_train_epochs", "1", "--preset", "pass++"]
    code, _, err = cli("learn", tmp_path / "m", "--data", data, *flags)
    assert code == 0, err
    assert cli("push", tmp_path / "m", REPO)[0] == 0
    card = server.repos[REPO].refs["main"][-1].files["README.md"].decode()
    assert "base_model: bob/small-vit" in card
    Image.open(next((data / "3").iterdir())).convert("RGB").save(tmp_path / "photo.jpg")
    blocks = re.findall(r"```python\n(.*?)```", card, re.S)
    assert len(blocks) == 2
    x = torch.randn(2, 3, 32, 32)
    torch.save(x, tmp_path / "x.pt")
    ask = "import torch\nwith torch.no_grad():\n    torch.save(features.eval()(torch.load('x.pt')), 'z.pt')\n"
    alone = "import sys\nsys.modules['passlora'] = None\n"  # stock peft needs none of it
    run = f"for code in ({blocks[0]!r}, {alone + blocks[1] + ask!r}): exec(code, {{}})"  # each by itself
    command = [sys.executable, "-c", run]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(server, tmp_path))
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        ours = PassLora.from_pretrained(tmp_path / "m").learner.network(x)
    assert (torch.load(tmp_path / "z.pt") - ours).abs().max() <= 1e-6
    for form in ("timm", "transformers"):
        assert cli("merge", REPO, tmp_path / f"merged {form}", "--format", form)[0] == 0
    import timm

    plain = timm.create_model(f"local-dir:{tmp_path / 'merged timm'}", pretrained=True).eval()
    asked = pipeline("image-classification", model=str(tmp_path / "merged transformers"))(str(tmp_path / "photo.jpg"))
    (answer,) = PassLora.from_pretrained(REPO).predict([Image.open(tmp_path / "photo.jpg")])
    assert plain(x).shape == (2, 2) and asked[0]["score"] == pytest.approx(answer[0].probability, abs=1e-5)


def test_a_backbone_of_the_hub_is_no_pickle(server, tmp_path, cli):
    timm_repository(server, "bob/small-vit", tmp_path)
    files = server.repos["bob/small-vit"].refs["main"][-1].files
    server.add("bob/pickled", {"config.json": files["config.json"], "pytorch_model.bin": b"\x80\x04cos\nsystem\n"})
    decoy = json.loads(files["config.json"])
    decoy["pretrained_cfg"]["hf_hub_filename"] = "pytorch_model.bin"
    more = {"pytorch_model.bin": b"\x80\x04cos\nsystem\n", "config.json": json.dumps(decoy).encode()}
    server.add("bob/decoy", {**files, **more})
    data = digit_folder(tmp_path / "others", 3, 4)
    flags = ["--preset", "ncm", "--model_name_or_path", "hf-hub:bob/decoy"]
    code, _, err = cli("learn", tmp_path / "decoy", "--data", data, *flags)
    assert code == 0, err
    for odd in (
        b"{}",
        b"[]",
        b'{"architecture": 5}',
        b'{"architecture": "vit_tiny_patch16_224", "model_args": {"depth": "x"}}',
    ):
        server.add("bob/odd", {**files, "config.json": odd})
        code, _, err = cli("learn", tmp_path / "odd", "--data", data, "--model_name_or_path", "hf-hub:bob/odd")
        assert code == 2 and "could not be loaded" in err and err.count("\n") == 1
    flags = ["--model_name_or_path", "hf-hub:bob/pickled"]
    code, _, err = cli("learn", tmp_path / "m", "--data", digit_folder(tmp_path / "data", 3, 4), *flags)
    assert code == 2 and "has no model.safetensors" in err and err.count("\n") == 1
    assert not any("pytorch_model.bin" in path for _, path in server.requests)


# --- pull ------------------------------------------------------------------------------------------------------


def test_pull_and_bring_up_to_date(server, model, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    push(model, REPO)
    code, out, _ = cli("pull", REPO)
    assert code == 0 and "digits knows 5 classes from 3 tasks" in out and "passlora info digits" in out
    pulled = tmp_path / "digits"
    for name in names(pulled) - {".lock", "README.md"}:
        assert (pulled / name).read_bytes() == (model / name).read_bytes() and not (pulled / name).is_symlink()
    of_the_run = {"config.yaml", "training_log.jsonl", "accuracy_matrix.png", "confusion_matrix.csv"}
    assert names(model) - names(pulled) == of_the_run

    cli("learn", model, "--data", digit_folder(tmp_path / "more", 9), *ONE_EPOCH)
    push(model, REPO)
    assert cli("pull", REPO, pulled)[0] == 0
    assert torch.equal(head(PassLora.from_pretrained(pulled)), head(PassLora.from_pretrained(model)))
    assert len(PassLora.from_pretrained(pulled, task=2).classes) == 5

    assert cli("pull", REPO, tmp_path / "early", "--revision", "task-02")[0] == 0
    cli("learn", tmp_path / "early", "--data", digit_folder(tmp_path / "other", 6), *ONE_EPOCH)
    before = {name: (tmp_path / "early" / name).read_bytes() for name in names(tmp_path / "early")}
    code, _, err = cli("pull", REPO, tmp_path / "early")
    assert code == 2 and "has learnt other tasks than ann/digits" in err
    assert before == {name: (tmp_path / "early" / name).read_bytes() for name in names(tmp_path / "early")}


def test_a_download_that_was_cut_off_goes_on(server, model, tmp_path, cli):
    push(model, REPO)
    server.faults = [["GET", "task_01/classifier", "half", 99]]
    code, _, err = cli("pull", REPO, tmp_path / "pulled")
    assert code == 2 and err.splitlines()[-1].startswith("passlora: error:") and not (tmp_path / "pulled").exists()
    server.faults, count = [], len(server.requests)
    assert cli("pull", REPO, tmp_path / "pulled")[0] == 0
    again = [path for method, path in server.requests[count:] if method == "GET" and "/resolve/" in path]
    assert not any("task_00" in path for path in again), "what had arrived is not fetched again"
    assert torch.equal(head(PassLora.from_pretrained(tmp_path / "pulled")), head(PassLora.from_pretrained(model)))


def test_a_pull_that_was_killed_while_copying_can_be_repeated(server, model, tmp_path, cli, monkeypatch):
    push(model, REPO)
    copies, copy_file = [], hub_pull.copy_file

    def killed(source, name, target):
        copies.append(name)
        if len(copies) == 6:
            raise KeyboardInterrupt
        copy_file(source, name, target)

    monkeypatch.setattr(hub_pull, "copy_file", killed)
    assert cli("pull", REPO, tmp_path / "pulled")[0] == 130
    assert (tmp_path / "pulled" / "results.json").is_file() and not (tmp_path / "pulled" / "passlora.json").exists()
    monkeypatch.setattr(hub_pull, "copy_file", copy_file)
    assert cli("pull", REPO, tmp_path / "pulled")[0] == 0
    assert len(PassLora.from_pretrained(tmp_path / "pulled").classes) == 5


def test_notes_written_on_the_hub_or_here_are_kept(server, model, tmp_path, cli):
    push(model, REPO)
    files = server.repos[REPO].refs["main"][-1].files
    card = files["README.md"].decode().replace("license: apache-2.0", "license: mit") + "\nWritten on the Hub.\n"
    server.add(REPO, {**files, "README.md": card.encode()})
    cli("learn", model, "--data", digit_folder(tmp_path / "more", 9), *ONE_EPOCH)
    push(model, REPO)
    text = server.repos[REPO].refs["main"][-1].files["README.md"].decode()
    assert text.endswith("\nWritten on the Hub.\n") and "license: mit" in text and "knows 6 classes" in text
    pull(REPO, tmp_path / "pulled", "task-02")
    path = tmp_path / "pulled" / "README.md"
    path.write_text(path.read_text() + "\nWritten here.\n")
    pull(REPO, tmp_path / "pulled")
    assert path.read_text().endswith("\nWritten here.\n") and "knows 6 classes" in path.read_text()


def test_a_stranger_can_not_choose_where_files_go(server, model, tmp_path, cli):
    push(model, REPO)
    files = server.repos[REPO].refs["main"][-1].files
    extra = {"../evil.txt": b"x", "task_00/../../evil.txt": b"x", "run.py": b"x", "task_00/evil.pkl": b"x"}
    server.add(REPO, {**files, **extra})
    assert cli("pull", REPO, tmp_path / "inner" / "pulled")[0] == 0
    assert not [p for p in tmp_path.rglob("*") if "evil" in p.name or p.name == "run.py"]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config.json": b"{}"}, "has no passlora.json: it is no passlora model"),
        ({"passlora.json": b"[" * 9}, "cannot be read"),
        ({"passlora.json": b'{"format_version": 99}'}, "a newer passlora wrote it"),
    ],
)
def test_repositories_that_are_no_model(server, tmp_path, cli, files, says):
    server.add("bob/other", files)
    for command in (["pull", "bob/other", tmp_path / "x"], ["info", "bob/other"], ["predict", "bob/other", "a.png"]):
        code, _, err = cli(*command)
        assert code == 2 and says in err and err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_manifest_of_no_sane_size_is_not_fetched(server, monkeypatch):
    server.add("bob/huge", {"passlora.json": b" " * 2000})
    monkeypatch.setattr(hub_pull, "MAX_BYTES", 1000)
    with pytest.raises(PassloraError, match="larger than any manifest"):
        PassLora.from_pretrained("bob/huge")
    assert not any(method == "GET" and "/resolve/" in path for method, path in server.requests)


# --- the command line ------------------------------------------------------------------------------------------


def test_commands_take_a_model_of_the_hub(server, model, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    push(model, REPO)
    data = digit_folder(tmp_path / "few", 0, 1, count=2)
    code, out, _ = cli("predict", REPO, data / "0" / "0.png", "--top_k", "1", "--task", "0")
    assert code == 0 and out.count("%") == 1
    code, out, _ = cli("info", REPO)
    assert code == 0 and "5 classes in 3 tasks" in out
    sizes = [task["bytes"] for task in PassLora.from_pretrained(model).info()["tasks"]]
    assert all(f"  {size / 1024:.0f}  " in out for size in sizes), "as on the disk"
    code, out, _ = cli("eval", REPO, "--data", data, "--revision", "task-02")
    assert code == 0 and (tmp_path / "digits-eval" / "confusion_matrix.csv").is_file()
    assert cli("merge", REPO, tmp_path / "merged")[0] == 0
    (tmp_path / "ann").mkdir()
    code, _, err = cli("info", REPO)
    assert code == 2 and "ann/digits does not exist" in err, "the folder `ann` is here: a path"
    assert cli("info", f"hf-hub:{REPO}")[0] == 0
    (tmp_path / "ann").rmdir()
    code, _, err = cli("info", "ann/nothing")
    assert code == 2 and "neither a folder here nor a model on the Hub" in err and err.count("\n") == 1
    code, _, err = cli("info", REPO, "--revision", "task-77")
    assert code == 2 and "no such revision" in err
    code, _, err = cli("predict", model, data, "--revision", "main")
    assert code == 2 and "revision goes with a model on the Hub" in err


def test_private_branch_and_pull_request(server, model, cli):
    assert cli("push", model, "ann/secret", "--private")[0] == 0
    assert server.repos["ann/secret"].private
    code, out, _ = cli("push", model, "ann/secret", "--revision", "try-out")
    assert code == 0 and ("branch try-out" in out or "up to date" in out)
    server.add("ann/public", {"README.md": b""})
    code, _, err = cli("push", model, "ann/public", "--private")
    assert code == 2 and "exists, and is public" in err and len(server.repos["ann/public"].refs["main"]) == 1
    server.add("bob/digits", {"README.md": b"bob's"})
    code, out, _ = cli("push", model, "bob/digits", "--create_pr")
    assert code == 0 and "opened" in out and "/bob/digits/discussions/1" in out
    assert "passlora.json" in server.repos["bob/digits"].pull_requests[0].files
    assert len(server.repos["bob/digits"].refs["main"]) == 1
    code, _, err = cli("push", model, "bob/digits", "--create_pr", "--revision", "x")
    assert code == 2 and "leave out the revision" in err


def test_tokens(server, model, cli, monkeypatch):
    """Wrong, missing and without rights: a sentence each, which does not tell the token."""
    code, _, err = cli("push", model, "bob/digits")
    assert code == 2 and "(403" in err and "namespace" in err
    wrong = "hf_" + "w" * 34
    monkeypatch.setenv("HF_TOKEN", wrong)
    code, out, err = cli("push", model, REPO)
    assert code == 2 and "refuses the token (401" in err and wrong not in out + err and err.count("\n") == 1
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(model / "no-token"))
    code, out, err = cli("push", model, REPO)
    assert code == 2 and "log in" in err and err.count("\n") == 1
    assert not server.repos


@pytest.mark.parametrize("name", ["digits", "a/b/c", "ann/..", "../x", "ann/", "/digits"])
def test_names_that_are_none(model, cli, name):
    code, _, err = cli("push", model, name)
    assert code == 2 and "user/name" in err and err.count("\n") == 1


# --- servers that fail -----------------------------------------------------------------------------------------


def test_an_upload_that_fails_once_is_retried_by_the_client(server, model):
    server.faults = [["PUT", "/blobs/", 500, 2], ["POST", "/preupload/", 503, 1]]
    assert push(model, REPO).tag == "task-02"


@pytest.mark.parametrize("answer", [500, 403, "cut"])
def test_an_upload_cut_off_in_the_middle_leaves_no_commit_and_goes_on(server, model, cli, answer):
    """Some blobs arrive; the next push brings only the others."""
    server.faults = [["PUT", "/blobs/[0-7]", answer, 10_000]]
    code, out, err = cli("push", model, REPO)
    assert code == 2 and err.count("\n") == 1 and "secretsignature" not in out + err
    assert len(server.repos[REPO].refs["main"]) == 1 and not server.repos[REPO].tags
    arrived = set(server.blobs)
    server.faults = []
    server.requests.clear()
    assert cli("push", model, REPO)[0] == 0
    brought = {path.split("/")[-1] for method, path in server.requests if method == "PUT"}
    assert brought and brought.isdisjoint(arrived) and arrived | brought == set(server.blobs)


def run_config(tiny, tmp_path, **changes):
    options = {"task_sizes": [4, 3, 3], "max_train_per_class": 2, "max_test_per_class": 1, "preset": "finetune"}
    options |= {**SMALL, "push_to_hub": True, "hub_model_id": REPO, "output_dir": str(tmp_path / "run")}
    return tiny(**{**options, **changes})


def test_training_uploads_after_each_task(server, tiny, tmp_path, said):
    train(run_config(tiny, tmp_path))
    repo = server.repos[REPO]
    _, *commits = repo.refs["main"]
    assert [commit.message for commit in commits] == ["Task 0: 4 classes", "Task 1: 7 classes", "Task 2: 10 classes"]
    assert repo.tags == {f"task-{i:02d}": commit for i, commit in enumerate(commits)}
    assert {name for name in commits[1].uploaded if "task_" in name} == {f"task_01/{name}" for name in PART}
    for task in range(3):
        at_tag = PassLora.from_pretrained(REPO, revision=f"task-{task:02d}")
        assert torch.equal(head(at_tag), head(PassLora.from_pretrained(tmp_path / "run", task=task)))
    assert sum("uploaded to" in line for line in said) == 3 and TOKEN not in "".join(said)
    everything = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert TOKEN.encode() not in everything
    train(run_config(tiny, tmp_path))
    assert len(repo.refs["main"]) == 4, "a finished run has nothing left to upload"


def test_comparisons_come_last(server, tiny, tmp_path):
    train(run_config(tiny, tmp_path, preset="lwf-kd", compare=["finetune"]))
    repo = server.repos[REPO]
    *_, last = repo.refs["main"]
    assert len(repo.refs["main"]) == 5 and repo.tags["task-02"] == last
    assert list(json.loads(last.files["results.json"])["compare"]) == ["finetune"]


def test_a_server_that_falls_silent_does_not_hold_up_training(server, tiny, tmp_path, monkeypatch, said):
    monkeypatch.setattr(hub_names, "PATIENCE", 0.5)
    server.faults = [["POST", "/commit/", "silent", 99]]
    assert train(run_config(tiny, tmp_path))["finished"]
    assert "upload to ann/digits failed: the Hub cannot be reached (ReadTimeout" in "\n".join(said)
    server.silence.set()


def test_a_failed_upload_is_made_up_for_by_the_next_task(server, tiny, tmp_path, said):
    server.faults = [["POST", "/commit/", 507, 1]]
    results = train(run_config(tiny, tmp_path))
    assert results["finished"]
    _, *commits = server.repos[REPO].refs["main"]
    assert [commit.message for commit in commits] == ["Task 1: 7 classes", "Task 2: 10 classes"]
    assert {"task_00/classifier.safetensors", "task_01/classifier.safetensors"} <= set(commits[0].files)
    text = "\n".join(said)
    assert "upload to ann/digits failed: the Hub answers 507" in text and "passlora push" not in text


def test_training_goes_on_without_a_hub_and_says_how_to_finish(server, tiny, tmp_path, cli, said):
    server.shutdown()
    server.server_close()
    folder = tmp_path / "run"
    results = train(run_config(tiny, tmp_path, hub_private_repo=True))
    assert results["finished"] and len(PassLora.from_pretrained(folder).classes) == 10
    text = "\n".join(said)
    assert text.count("upload to ann/digits failed") == 4, "three tasks, and once more at the end"
    (command,) = re.findall(r"finish it with: passlora (.*)", text)
    assert command == f"push {folder} {REPO} --private"
    constants.ENDPOINT = Hub().url
    code, out, err = cli(*command.split())
    assert code == 0, err
    assert "uploaded to" in out


def test_starting_the_training_again_finishes_the_upload(server, tiny, tmp_path):
    server.faults = [["POST", "/commit/", 507, 99]]
    train(run_config(tiny, tmp_path))
    assert len(server.repos[REPO].refs["main"]) == 1
    server.faults = []
    train(run_config(tiny, tmp_path))
    assert server.repos[REPO].refs["main"][-1].message == "Task 2: 10 classes"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"hub_model_id": None}, "give --hub_model_id"),
        ({"hub_model_id": "digits"}, "must be user/name"),
        ({"seeds": [0, 1]}, "goes with one run"),
    ],
)
def test_settings_that_cannot_be(tiny, tmp_path, flags, says):
    with pytest.raises(PassloraError, match=says):
        run_config(tiny, tmp_path, **flags)


def test_the_cache_is_not_a_way_out(server, model, tmp_path):
    """Links of the cache into itself are followed, links elsewhere are not."""
    push(model, REPO)
    source = PassLora.from_pretrained(REPO).source
    path = source.folder / "task_02" / "classifier.safetensors"
    outside = tmp_path / "outside.safetensors"
    shutil.copyfile(path, outside)
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(PassloraError, match="leads out of the model's folder"):
        PassLora.from_pretrained(REPO)
    with pytest.raises(PassloraError, match="leads out of the model's folder"):
        pull(REPO, tmp_path / "pulled")
    assert not (tmp_path / "pulled" / "passlora.json").exists()


def test_a_folder_in_use_is_not_pushed(server, model, cli, held):
    with held(model):
        code, _, err = cli("push", model, REPO)
    assert code == 2 and "in use by another process" in err and not server.repos


def test_a_class_that_is_renamed_and_forgotten_on_the_way(server, model, tmp_path, cli):
    """Published, changed, published again, taken over elsewhere: one model all along."""
    assert cli("push", model, REPO)[0] == 0
    assert cli("pull", REPO, tmp_path / "theirs")[0] == 0
    assert cli("rename", model, "1", "one")[0] == 0
    assert cli("forget", model, "3")[0] == 0
    code, out, err = cli("push", model, REPO)
    assert code == 0 and "tag task-04" in out and "earlier tasks still hold classes that were forgotten" in err, err
    assert PassLora.from_pretrained(REPO).classes == ["0", "one", "2", "4"]
    assert PassLora.from_pretrained(REPO, task=2).classes == ["0", "1", "2", "3", "4"]
    code, _, err = cli("pull", REPO, tmp_path / "theirs")
    assert code == 0 and PassLora.from_pretrained(tmp_path / "theirs").classes == ["0", "one", "2", "4"], err
    assert cli("forget", model, "--prune")[0] == 0
    code, _, err = cli("push", model, REPO)
    assert code == 0 and "still hold" not in err, err
    *_, commit = server.repos[REPO].refs["main"]
    assert not any(name.startswith(("task_00", "task_01", "task_02", "task_03")) for name in commit.files)
    assert '"3"' not in commit.files["passlora.json"].decode()
    code, _, err = cli("pull", REPO, tmp_path / "theirs")
    assert code == 0 and PassLora.from_pretrained(tmp_path / "theirs").classes == ["0", "one", "2", "4"], err
