"""What a model knows, changed: more images of a class, classes forgotten and renamed, two models made one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import SMALL, SMALL_FLAGS, write_digits
from quick import quick as quick

from passlora import PassLora, PassloraError
from passlora.config import MethodConfig
from passlora.folder import history, manifest
from passlora.folder.manifest import read_manifest
from passlora.method.classifiers import make_classifier
from passlora.method.classifiers.moments import Moments
from passlora.method.features import of_tensors
from passlora.method.triangle import unpacked
from passlora.training import metrics

PLAIN = {"sst": False, "prototype_views": 1, "inference": "single", "adapt_tasks": "none"}
LIFTED = {"lift": "fourier", "lift_width": 30, "classifier_views": 4}
KINDS = {
    "passlora": MethodConfig(classifier="slda", shrinkage="error", **LIFTED, **PLAIN),
    "slda": MethodConfig(classifier="slda", **PLAIN),
    "ncm": MethodConfig(classifier="ncm", **PLAIN),
    "ridge": MethodConfig(classifier="ridge", **{**LIFTED, "lift": "relu"}, **PLAIN),
    "fecam": MethodConfig(classifier="fecam", **PLAIN),
    "rgda": MethodConfig(classifier="rgda", **PLAIN),
    "anacp": MethodConfig(classifier="anacp", lift_width=30, **PLAIN),
}
SUMS = ("passlora", "slda", "ncm")  # that take in more images of a class as if they had been there before
DIM = 5


def images(classes, count=8, seed=0):
    """{class: features (n, 4, d)}."""
    draw = torch.Generator().manual_seed(seed)
    return {c: torch.randn(count + c, 4, DIM, generator=draw) + 0.5 * c for c in classes}


def taught(kind, *lessons, exact=False):
    """Classes are numbered as they come; a lesson may bring more of a class that is known."""
    method = replace(KINDS[kind], exact_forgetting=exact)
    classifier, known = make_classifier(DIM, method), []
    for lesson in lessons:
        new = [c for c in lesson if c not in known]
        known += new
        classifier.grow(len(new))
        rows = torch.tensor([known.index(c) for c in lesson])
        z = torch.cat(list(lesson.values()))
        classes = torch.cat([torch.full((len(part),), i) for i, part in enumerate(lesson.values())])
        features = of_tensors(z, classes)
        classifier.fit_task(replace(features, rows=rows) if len(new) < len(lesson) else features)
    return classifier, known


def answers(classifier, known):
    """Before how sure to be is settled; the classes in their natural order."""
    x = torch.randn(20, 4, DIM, generator=torch.Generator().manual_seed(9))
    order = torch.tensor([known.index(c) for c in sorted(known)])
    if not isinstance(classifier, Moments):
        return classifier.scores(x, "single")[:, order]
    weight, bias = classifier.solved()
    return (classifier.map(x.double()) @ weight.T + bias)[:, order]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", SUMS)
@settings(max_examples=8, deadline=None)
@given(cut=st.integers(1, 7), seed=st.integers(0, 5))
def test_more_images_of_a_class_are_as_if_they_had_been_there_before(kind, exact, cut, seed):
    if exact and kind == "ncm":
        return
    whole = images(range(4), seed=seed)
    first = {c: z[:cut] if c in (1, 2) else z for c, z in whole.items() if c != 3}
    second = {c: whole[c][cut:] for c in (2, 1)} | {3: whole[3]}
    one, other = taught(kind, whole, exact=exact), taught(kind, first, second, exact=exact)
    torch.testing.assert_close(answers(*other), answers(*one), rtol=1e-6, atol=1e-6)
    if kind != "ncm":
        torch.testing.assert_close(other[0].scatter, one[0].scatter, rtol=1e-8, atol=1e-8)
        assert torch.equal(other[0].counts.sort().values, one[0].counts.sort().values)


@pytest.mark.parametrize("kind", ["passlora", "slda", "ridge"])
def test_a_class_that_is_forgotten_exactly_was_never_taught(kind):
    whole = images(range(5))
    classifier, _ = taught(kind, {c: whole[c] for c in (0, 1, 2)}, {c: whole[c] for c in (3, 4)}, exact=True)
    classifier.keep(torch.tensor([0, 2, 4]))
    never, _ = taught(kind, {c: whole[c] for c in (0, 2)}, {4: whole[4]}, exact=True)
    assert "matrix" not in classifier.remains()
    torch.testing.assert_close(classifier.scatter, never.scatter, rtol=1e-9, atol=1e-9)
    if kind == "ridge":  # chose lambda on the images of the class too
        never.strength.copy_(classifier.strength)
        never.forget_computed()
    torch.testing.assert_close(answers(classifier, [0, 2, 4]), answers(never, [0, 2, 4]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["passlora", "slda", "rgda", "anacp", "ridge"])
def test_what_is_left_of_shared_sums_stands_for_the_images_that_are_left(kind):
    """Not for all of them, or every other class would seem to scatter more widely, and answers be less sure."""
    whole = images(range(8), count=30)
    classifier, _ = taught(kind, whole)
    level = unpacked(classifier.scatter, classifier.map.width if kind in ("passlora", "slda", "ridge") else DIM).trace()
    before = level / classifier.weight_of_sums()
    classifier.keep(torch.tensor([1, 5]))
    level = unpacked(classifier.scatter, classifier.map.width if kind in ("passlora", "slda", "ridge") else DIM).trace()
    assert float(level / classifier.weight_of_sums()) == pytest.approx(float(before), rel=1e-9)


def test_more_images_do_not_undo_how_sure_to_be():
    whole = images(range(5), count=40)
    classifier, _ = taught("passlora", whole)
    before = float(classifier.temperature_losses.min())
    more, _ = taught("passlora", whole, {c: z[:2] for c, z in images(range(5), seed=3).items()})
    assert float(more.temperature_losses.min()) > 0.9 * before


def test_a_refused_combination_changes_nothing():
    first, second = (taught("ridge", images((0, 1), seed=seed))[0] for seed in (0, 1))
    before = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    with pytest.raises(PassloraError):
        first.join(second, torch.tensor([1, 2]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in first.state_dict().items())


@pytest.mark.parametrize("kind", ["ncm", "fecam"])
def test_what_is_kept_a_class_alone_is_forgotten_exactly_in_any_case(kind):
    whole = images(range(4))
    classifier, _ = taught(kind, whole)
    classifier.keep(torch.tensor([0, 1, 3]))
    never, _ = taught(kind, {c: whole[c] for c in (0, 1, 3)})
    assert classifier.remains() == ""
    torch.testing.assert_close(answers(classifier, [0, 1, 3]), answers(never, [0, 1, 3]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_two_that_were_taught_apart_are_one_that_was_taught_in_one_place(kind):
    whole = images(range(6))
    one, known = taught(kind, {c: whole[c] for c in (0, 1, 2)}, {c: whole[c] for c in (3, 4, 5)})
    first, _ = taught(kind, {c: whole[c] for c in (0, 1, 2)})
    second, _ = taught(kind, {c: whole[c] for c in (3, 4, 5)})
    first.join(second, torch.tensor([3, 4, 5]))
    if kind == "ridge":  # either chose lambda on its own images
        first.strength.copy_(one.strength)
        first.forget_computed()
    torch.testing.assert_close(answers(first, known), answers(one, known), rtol=1e-6, atol=1e-6)
    assert first.num_classes == 6


@pytest.mark.parametrize("kind", SUMS)
def test_a_class_of_both_is_one_class_of_the_images_of_both(kind):
    whole = images(range(4))
    first, _ = taught(kind, {0: whole[0], 1: whole[1][:3]})
    second, _ = taught(kind, {1: whole[1][3:], 2: whole[2], 3: whole[3]})
    first.join(second, torch.tensor([1, 2, 3]))
    one, known = taught(kind, whole)
    torch.testing.assert_close(answers(first, known), answers(one, known), rtol=1e-6, atol=1e-6)


def test_a_class_of_both_is_refused_where_it_cannot_be_joined():
    first, second = (taught("ridge", images((0, 1), seed=seed))[0] for seed in (0, 1))
    with pytest.raises(PassloraError, match="cannot join the images of one class"):
        first.join(second, torch.tensor([1, 2]))


# --- through the command line --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("digits")
    write_digits(root / "first", [0, 1, 2], 8)
    write_digits(root / "more", [1, 3], 8, start=20)
    write_digits(root / "both", [0, 1, 2], 8)
    write_digits(root / "both", [1], 8, start=20)
    write_digits(root / "both", [3], 8, start=20)
    write_digits(root / "other", [3, 4], 8)
    return root


BORN = {
    "passlora": ["--lift_width", "40"],
    "exact": ["--lift_width", "40", "--exact_forgetting", "true"],
    "pass++": ["--preset", "pass++", "--num_train_epochs", "1"],
}


def named(model, image):
    (answer,) = PassLora.from_pretrained(model).predict([image], top_k=9)
    return {guess.label: guess.probability for guess in answer}


@pytest.mark.parametrize("kind", ["passlora", "pass++", pytest.param("exact", marks=pytest.mark.slow)])
def test_a_life_of_changes(kind, data, tmp_path, cli):
    model = tmp_path / "model"
    assert cli("learn", model, "--data", data / "first", *SMALL_FLAGS, *BORN[kind])[0] == 0
    image = next((data / "other" / "digit 4").iterdir())
    before = named(model, image)
    code, out, err = cli("rename", model, "digit 1", "one")
    assert code == 0 and "digit 1 is one now" in out, err
    assert named(model, image) == pytest.approx({{"digit 1": "one"}.get(k, k): v for k, v in before.items()})
    code, out, err = cli("forget", model, "digit 0")
    assert code == 0 and "knows 2 classes now" in out and "--to_task 1" in out, err
    assert "what remains of it: " in out and ("nothing" not in out)
    assert set(named(model, image)) == {"one", "digit 2"}
    assert "digit 0" not in (model / "README.md").read_text()
    code, out, _ = cli("info", model)
    assert code == 0 and "digit 1 is one now" in out and "forgot 1" in out
    code, out, err = cli("learn", model, "--data", data / "other")
    assert code == 0 and "knows 4 classes now" in out, err
    code, out, err = cli("eval", model, "--data", data / "other")
    assert code == 0, err
    # All the way back, and again to the end.
    assert cli("rollback", model, "--to_task", "0")[0] == 0
    assert named(model, image) == pytest.approx(before)
    assert cli("rollback", model, "--to_task", "3")[0] == 0
    assert PassLora.from_pretrained(model).classes == ["one", "digit 2", "digit 3", "digit 4"]


def test_forgetting_for_good_leaves_no_name_and_no_sums(data, tmp_path, cli):
    model = tmp_path / "model"
    assert cli("learn", model, "--data", data / "first", *SMALL_FLAGS, *BORN["exact"])[0] == 0
    assert cli("learn", model, "--data", data / "other")[0] == 0
    (model / "task_00" / "mine.txt").write_text("not passlora's")
    code, out, err = cli("forget", model, "digit 1", "digit 3", "--prune")
    assert code == 0 and "deleted: task_00, task_01" in out and "what remains of them" in out, err
    assert sorted(path.name for path in (model / "task_00").iterdir()) == ["mine.txt"]
    assert not (model / "task_01").exists()
    for path in model.rglob("*"):
        if path.is_file():
            assert b"digit 1" not in path.read_bytes() and b"digit 3" not in path.read_bytes(), path
    found = PassLora.from_pretrained(model)
    assert found.classes == ["digit 0", "digit 2", "digit 4"] and len(found.tasks) == 3
    code, _, err = cli("rollback", model, "--to_task", "1")
    assert code == 2 and "were not kept" in err
    assert cli("learn", model, "--data", data / "more", "--on_known", "skip")[0] == 0
    assert cli("forget", model, "--prune")[1].strip() == "nothing to delete"


def test_more_of_a_known_class_by_the_command_line(data, tmp_path, cli):
    one, both = tmp_path / "one", tmp_path / "both"
    flags = [*SMALL_FLAGS, *BORN["passlora"]]
    assert cli("learn", one, "--data", data / "first", *flags)[0] == 0
    code, _, err = cli("learn", one, "--data", data / "more")
    assert code == 2 and "extend learns from more images of them" in err
    code, out, err = cli("learn", one, "--data", data / "more", "--on_known", "extend")
    assert code == 0 and "learnt 1 classes from 16 images" in out and "more of digit 1" in out, err
    assert read_manifest(one).tasks[-1].extended == ["digit 1"]
    assert cli("learn", both, "--data", data / "both", *flags)[0] == 0
    sums = [PassLora.from_pretrained(folder).learner.network.classifier for folder in (one, both)]
    # Features of an image differ by rounding with its batch.
    torch.testing.assert_close(sums[0].scatter, sums[1].scatter, rtol=1e-3, atol=1e-5)
    assert torch.equal(sums[0].counts, sums[1].counts) and sums[0].counts.tolist() == [8, 16, 8, 8]
    code, out, err = cli("learn", one, "--data", data / "first", "--on_known", "extend")
    assert code == 0 and "none new; more of digit 0, digit 1, digit 2" in out, err


def test_a_trained_head_refuses_more_of_a_known_class(data, tmp_path, cli):
    model = tmp_path / "model"
    assert cli("learn", model, "--data", data / "first", *SMALL_FLAGS, *BORN["pass++"])[0] == 0
    before = (model / "passlora.json").read_bytes()
    code, _, err = cli("learn", model, "--data", data / "more", "--on_known", "extend")
    assert code == 2 and "cannot learn from more images of a class it knows" in err
    assert (model / "passlora.json").read_bytes() == before


def test_two_teams_one_model(data, tmp_path, cli):
    flags = [*SMALL_FLAGS, *BORN["passlora"], "--adapt_tasks", "none"]
    for name in ("first", "other", "more"):
        assert cli("learn", tmp_path / name, "--data", data / name, *flags)[0] == 0
    assert cli("learn", tmp_path / "one", "--data", data / "first", *flags)[0] == 0
    assert cli("learn", tmp_path / "one", "--data", data / "other")[0] == 0
    code, out, err = cli("combine", tmp_path / "first", tmp_path / "other", tmp_path / "out")
    assert code == 0 and "knows 5 classes" in out, err
    image = next((data / "other" / "digit 4").iterdir())
    found, expected = named(tmp_path / "out", image), named(tmp_path / "one", image)
    assert max(found, key=found.get) == max(expected, key=expected.get)
    sums = [PassLora.from_pretrained(tmp_path / name).learner.network.classifier for name in ("out", "one")]
    torch.testing.assert_close(sums[0].scatter, sums[1].scatter, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(sums[0].means, sums[1].means, rtol=1e-6, atol=1e-9)
    assert torch.equal(sums[0].strength, sums[1].strength)
    assert cli("rollback", tmp_path / "out", "--to_task", "0")[0] == 0, "the tasks of the first stay restorable"
    # A name that both know.
    code, _, err = cli("combine", tmp_path / "first", tmp_path / "more", tmp_path / "x")
    assert code == 2 and "both models know digit 1" in err and not (tmp_path / "x").exists()
    code, out, _ = cli("combine", tmp_path / "first", tmp_path / "more", tmp_path / "joined", "--on_clash", "join")
    assert code == 0 and "digit 1: one class, of the images of both" in out
    joined = PassLora.from_pretrained(tmp_path / "joined")
    assert joined.classes == ["digit 0", "digit 1", "digit 2", "digit 3"]
    assert joined.learner.network.classifier.counts.tolist() == [8, 16, 8, 8]
    code, out, _ = cli("combine", tmp_path / "first", tmp_path / "more", tmp_path / "two", "--on_clash", "rename")
    assert code == 0 and "is digit 1 (2)" in out
    assert PassLora.from_pretrained(tmp_path / "two").classes == [f"digit {i}" for i in ("0", "1", "2", "1 (2)", "3")]
    code, _, err = cli("combine", tmp_path / "first", tmp_path / "other", tmp_path / "out")
    assert code == 2 and "exists already" in err


def test_what_cannot_be_combined_says_why(data, tmp_path, cli):
    born = {"a": ["--lift_width", "40"], "b": ["--lift_width", "20"], "c": BORN["pass++"]}
    for name, flags in born.items():
        assert cli("learn", tmp_path / name, "--data", data / "first", *SMALL_FLAGS, *flags)[0] == 0
    code, _, err = cli("combine", tmp_path / "a", tmp_path / "b", tmp_path / "out", "--on_clash", "join")
    assert code == 2 and "differ in lift_width (40 and 20)" in err
    code, _, err = cli("combine", tmp_path / "c", tmp_path / "c", tmp_path / "out", "--on_clash", "join")
    assert code == 2 and "models of the classifier head cannot be combined" in err
    assert not (tmp_path / "out").exists()


def test_networks_that_were_adapted_apart_do_not_mix(data, tmp_path):
    models = []
    for name in ("first", "other"):
        model = PassLora.create(**SMALL, preset="slda", adapt_tasks="first", num_train_epochs=1)
        model.learn(data / name)
        models.append(model)
    with pytest.raises(PassloraError, match="were adapted apart"):
        models[0].combine(models[1])


def test_wrong_names_are_refused_and_nothing_changes(data, tmp_path, cli):
    model = tmp_path / "model"
    assert cli("learn", model, "--data", data / "first", *SMALL_FLAGS, *BORN["passlora"])[0] == 0
    before = (model / "passlora.json").read_bytes()
    for command, words in {
        ("forget", model, "digit 9"): "knows no class 'digit 9', did you mean",
        ("forget", model, "digit 0", "digit 1", "digit 2"): "all the classes that the model knows",
        ("forget", model): "which classes?",
        ("rename", model, "cat", "dog"): "knows no class 'cat'",
        ("rename", model, "digit 0", "digit 1"): "knows a class 'digit 1' already",
        ("rename", model, "digit 0", "a\nb"): "line end or a control character",
        ("combine", model, tmp_path / "nothing", tmp_path / "out"): "does not exist",
    }.items():
        code, _, err = cli(*command)
        assert code == 2 and words in err.replace("; did", ", did"), (command, err)
    assert (model / "passlora.json").read_bytes() == before and not (model / "task_01").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"forgotten": ["nobody"]}, "which was not known"),
        ({"renamed": {"digit 0": "digit 1"}}, "appears twice"),
        ({"renamed": {"digit 0": "x"}, "forgotten": ["digit 0"]}, "renames what it forgets"),
        ({"extended": ["nobody"]}, "which was not known"),
        ({"forgotten": "digit 0"}, "without class names"),
        ({"renamed": ["digit 0"]}, "without class names"),
        ({"forgotten": [f"digit {i}" for i in range(3)]}, "no class is left"),
        ({"renamed": {"digit 0": 7}}, "without class names"),
    ],
)
def test_a_strangers_changes_are_looked_at(change, words, data, tmp_path):
    model = PassLora.create(**SMALL, lift_width=20)
    model.learn(data / "first")
    content = json.loads(
        json.dumps(manifest.to_json(manifest.Manifest(manifest.settings_of(model.learner.config), model.tasks)))
    )
    content["tasks"].append({"classes": [], "learnt": "", "files": {}, **change})
    with pytest.raises(PassloraError, match=words):
        manifest.check(content)


def test_a_taught_model_tells_what_it_has_forgotten(tmp_path, cli):
    model = tmp_path / "model"
    for lesson, new in (("a", [0, 1]), ("b", [2]), ("c", [3])):
        write_digits(tmp_path / lesson / "train", new, 8)
        write_digits(tmp_path / lesson / "test", range(new[-1] + 1), 6, start=60)
        flags = [*SMALL_FLAGS, *BORN["passlora"]] if lesson == "a" else []
        assert cli("learn", model, "--data", tmp_path / lesson, *flags)[0] == 0
    tasks = read_manifest(model).tasks
    assert [len(task.by_task) for task in tasks] == [1, 2, 3] and tasks[0].forgetting == 0
    matrix = [[*task.by_task, *[None] * (3 - len(task.by_task))] for task in tasks]
    assert tasks[2].forgetting == pytest.approx(metrics.forgetting(matrix))
    assert "mean drop of a task" in (model / "README.md").read_text()
    # Where some class had no test images, nothing is claimed.
    write_digits(tmp_path / "d" / "train", [4], 8)
    write_digits(tmp_path / "d" / "test", [4], 6, start=60)
    assert cli("learn", model, "--data", tmp_path / "d")[0] == 0
    last = read_manifest(model).tasks[-1]
    assert last.by_task[:3] == [None] * 3 and last.by_task[3] is not None and last.forgetting is None


def test_what_the_network_learnt_of_a_class_remains(data):
    model = PassLora.create(**SMALL, preset="ncm", adapt_tasks="first", num_train_epochs=1)
    model.learn(data / "first")
    model.learn(data / "other")
    assert model.forget(["digit 4"]) == "", "of a class that came later nothing does"
    assert "taught the network in the first task" in model.forget(["digit 0"])


def test_a_prune_that_was_cut_off_is_made_up_for(data, tmp_path, cli, monkeypatch):
    model = tmp_path / "model"
    assert cli("learn", model, "--data", data / "first", *SMALL_FLAGS, *BORN["passlora"])[0] == 0
    assert cli("eval", model, "--data", data / "first")[0] == 0
    assert cli("forget", model, "digit 1")[0] == 0
    with monkeypatch.context() as cut:
        cut.setattr(history.tasks, "remove_task", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        assert cli("forget", model, "--prune")[0] == 130
    assert (model / "task_00").is_dir()
    assert "deleted: task_00" in cli("forget", model, "--prune")[1]
    for path in model.rglob("*"):
        if path.is_file():
            assert b"digit 1" not in path.read_bytes(), path
    assert len(PassLora.from_pretrained(model).classes) == 2


def test_undo_is_promised_only_where_it_can_be_had(data, tmp_path, cli):
    model = tmp_path / "model"
    flags = [*SMALL_FLAGS, *BORN["passlora"], "--keep_tasks", "last"]
    assert cli("learn", model, "--data", data / "first", *flags)[0] == 0
    assert (
        "it cannot be undone: the task before was not kept (keep_tasks last)" in cli("rename", model, "digit 1", "x")[1]
    )


def test_a_lesson_that_was_cut_off_is_not_lost_by_a_change(data, tmp_path, cli):
    model = tmp_path / "model"
    assert cli("learn", model, "--data", data / "first", *SMALL_FLAGS, *BORN["passlora"])[0] == 0
    (model / "checkpoint.safetensors").write_bytes(b"hours of training")
    code, _, err = cli("forget", model, "digit 1")
    assert code == 2 and "was cut off: finish it" in err and (model / "checkpoint.safetensors").is_file()


def test_odd_requests_are_one_sentence(data, tmp_path):
    model = PassLora.create(**SMALL, lift_width=20)
    model.learn(data / "first")
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(PassloraError, match="has no class that the model does not know"):
        model.learn(data / "first", classes=[], on_known="extend")
    with pytest.raises(PassloraError, match="was loaded to be asked"):
        model.combine(PassLora.from_pretrained(tmp_path / "m", asking=True), "join")


def test_a_model_is_known_again_after_a_class_was_forgotten_for_good(data, tmp_path, cli):
    """Push and pull ask whether one model is an earlier state of the other."""
    model = tmp_path / "model"
    assert cli("learn", model, "--data", data / "first", *SMALL_FLAGS, *BORN["passlora"])[0] == 0
    before = read_manifest(model)
    assert cli("forget", model, "digit 1", "--prune")[0] == 0
    assert read_manifest(model).starts_with(before) and not before.starts_with(read_manifest(model))


def test_forgetting_a_class_is_no_gain_of_accuracy(tmp_path, cli):
    model = tmp_path / "model"
    for lesson, new in (("a", [0, 1, 2]), ("b", [3])):
        write_digits(tmp_path / lesson / "train", new, 8)
        write_digits(tmp_path / lesson / "test", [d for d in range(new[-1] + 1) if lesson == "a" or d], 6, start=60)
    assert cli("learn", model, "--data", tmp_path / "a", *SMALL_FLAGS, *BORN["passlora"])[0] == 0
    assert cli("forget", model, "digit 0")[0] == 0
    assert cli("learn", model, "--data", tmp_path / "b")[0] == 0
    last = read_manifest(model).tasks[-1]
    assert last.by_task[0] is not None and last.forgetting is None, "its classes were others before"
