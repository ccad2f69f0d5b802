from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from conftest import SMALL
from quick import quick as quick

from passlora import PassLora, train
from passlora.data.batches import Images, TaskData
from passlora.data.dataset import load_dataset
from passlora.errors import PassloraError
from passlora.method.views import rotate
from passlora.network.backbone import Backbone
from passlora.training.learner import Learner
from passlora.training.schedule import hash_seed
from passlora.training.steps import Hooks


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


def task_data(images, labels, classes):
    return TaskData(images, np.flatnonzero(np.isin(labels, list(classes))), labels)


def learner_with_data(config, accelerator):
    learner = Learner(config, accelerator)
    split = load_dataset(config.data, config.training.seed).train
    images = Images(split, learner.network.backbone.image_size, config.data, "test")
    return learner, images, split.labels


def learn_two(config, accelerator):
    learner, images, labels = learner_with_data(config, accelerator)
    logs = []
    first, second = config.scenario.task_sizes
    learner.learn(task_data(images, labels, range(first)), first, Hooks(logs.append))
    learner.learn(task_data(images, labels, range(first, first + second)), second, Hooks(logs.append))
    return learner, images, labels, logs


def state(learner):
    return {name: tensor.clone() for name, tensor in learner.network.state_dict().items()}


@pytest.mark.parametrize("task", [0, 1])
def test_only_adapter_and_head_change(small, accelerator, task):
    config = small()
    learner, images, labels = learner_with_data(config, accelerator)
    classes = (range(6), range(6, 10))
    for known in classes[:task]:
        learner.learn(task_data(images, labels, known), len(known))
    before = state(learner)
    learner.learn(task_data(images, labels, classes[task]), len(classes[task]))
    after = state(learner)
    own = [name for name in before if not name.startswith("classifier.")]
    changed = {name for name in own if not torch.equal(before[name], after[name])}
    assert changed and all("lora_" in name for name in changed)
    frozen = [p for n, p in learner.network.named_parameters() if n in own and "lora_" not in n]
    assert frozen and all(p.grad is None and not p.requires_grad for p in frozen)


def test_the_teacher_equals_the_previous_tasks_model_and_stays(small, accelerator):
    config = small()
    learner, images, labels = learner_with_data(config, accelerator)
    learner.learn(task_data(images, labels, range(6)), 6)
    x = learner.network.backbone.prepare(images.cache[:3])
    with torch.no_grad():
        previous = learner.network(x)
    seen = []
    teacher = learner.network.backbone.teacher

    def watch(rows):
        seen.append(teacher(x))
        return teacher(rows)

    learner.network.backbone.teacher = watch
    learner.learn(task_data(images, labels, range(6, 10)), 4)
    assert len(seen) == 3 and all(torch.equal(z, seen[0]) for z in seen), "at every step of the next task"
    torch.testing.assert_close(seen[0], previous, rtol=0, atol=5e-6)


def test_prototypes_are_exact_class_means(small, accelerator):
    """Against numpy over the un-augmented images, one by one; the last batch is partial."""
    config = small(per_device_eval_batch_size=7)
    learner, images, labels, _ = learn_two(config, accelerator)
    rows = np.flatnonzero(labels == 8)
    with torch.no_grad():
        z = [learner.network(rotate(learner.network.backbone.prepare(images.cache[[r]]), 4)).numpy() for r in rows]
    by_view = np.stack(z).astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(learner.memory.means[4 * 8 : 4 * 9], by_view, atol=1e-5)
    assert learner.memory.num_classes == 10 and learner.memory.num_entries == 40 * 64 + 1


def test_old_prototypes_are_kept_bit_for_bit(small, accelerator):
    config = small()
    learner, images, labels = learner_with_data(config, accelerator)
    learner.learn(task_data(images, labels, range(6)), 6)
    means, radius = learner.memory.means.clone(), learner.memory.radius
    learner.learn(task_data(images, labels, range(6, 10)), 4)
    assert torch.equal(learner.memory.means[: len(means)], means) and learner.memory.radius == radius


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(small, accelerator):
    runs = [learn_two(small(seed=seed), accelerator) for seed in (0, 0, 1)]
    curves = [[value for log in logs for value in log.steps] for *_, logs in runs]
    assert curves[0] == curves[1]
    assert curves[0][0] != curves[2][0], "the first step differs already: weights and batches are seeded"
    assert torch.equal(runs[0][0].network.classifier.weight, runs[1][0].network.classifier.weight)


def test_the_student_runs_once_a_step_and_the_teacher_without_autograd(small, accelerator, monkeypatch):
    config = small()
    learner, images, labels = learner_with_data(config, accelerator)
    learner.learn(task_data(images, labels, range(6)), 6)
    calls = []
    body = learner.network.backbone.body
    forward, layer = body.forward, body.base_model.model.blocks[0].attn.qkv
    monkeypatch.setattr(
        body,
        "forward",
        lambda x: (calls.append((layer.active_adapters[0], torch.is_grad_enabled())), forward(x))[1],
    )
    learner.training_of(task_data(images, labels, range(6, 10)), 4).run(Hooks())
    steps = -(-24 // 8)
    assert calls == [("teacher", False), ("default", True)] * steps


SWITCHES = [
    {"proto_aug": "implicit"},
    {"proto_aug": "implicit", "covariance": "full"},
    {"covariance": "diag", "radius": "running"},
    {"covariance": "full", "hard_label": "soft"},
    {"prototype_views": 1, "prototype_augmented": True},
    {"hardness": False, "kd_reduction": "batch", "temperature": 0.1},
    {"preset": "pass"},
    {"preset": "lwf-kd"},
    {"preset": "finetune"},
    {"sst": False, "inference": "single", "prototype_views": 1},
    {"extra_inference": ["single", "vanilla", "nearest_prototype"]},
    {"gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine"},
    {"task_sizes": [3, 7]},  # 9 images in batches of 8: a last batch of one
    {"task_sizes": [1, 9]},
    {"task_sizes": [9, 1]},
    {"max_train_per_class": 1},
    {"max_train_per_class": 1, "covariance": "full", "proto_aug": "implicit"},
]


@pytest.mark.parametrize("options", SWITCHES, ids=str)
def test_every_switch_runs(small, accelerator, options):
    """Fewer old than new classes, one class a task, one image a class, a last batch of one: all finite."""
    config = small(**{"max_train_per_class": 3, **options})
    learner, images, labels, logs = learn_two(config, accelerator)
    assert all(np.isfinite(list(log.losses.values())).all() for log in logs)
    second = logs[-1].losses
    assert (second["old"] > 0) == (config.method.proto_aug != "none")
    updates = len(logs[-1].steps) // config.training.gradient_accumulation_steps
    assert (second["kd"] > 0) == (config.method.kd_weight > 0 and updates > 1), "the first step starts at the teacher"
    assert logs[0].losses["old"] == logs[0].losses["kd"] == 0, "the first task knows no old class"
    data = task_data(images, labels, range(10))
    modes = config.method.inference_modes
    for mode, evaluation in learner.evaluate(data, modes).items():
        assert evaluation.confusion.shape == (10, 10) and evaluation.confusion.sum() == len(data.rows), mode
        assert evaluation.bins[:, 0].sum() == len(data.rows) and 0 <= evaluation.calibration_error <= 100


def test_resnet18_trains_whole_with_a_copied_teacher(tiny, accelerator):
    config = tiny(
        model_name_or_path="passlora/resnet18",
        lora_r=0,
        pretrained=False,
        image_size=8,
        max_train_per_class=2,
        temperature=0.1,
        kd_reduction="batch",
    )
    learner, *_, logs = learn_two(config, accelerator)
    assert np.isfinite(logs[-1].losses["total"]) and logs[-1].losses["kd"] > 0
    assert learner.network.backbone.parameter_counts()[0] == learner.network.backbone.parameter_counts()[1]
    teacher = learner.network.backbone._teacher[0]
    assert not any(m.training for m in teacher.modules()) and not any(p.requires_grad for p in teacher.parameters())


def test_a_last_batch_of_one_image_with_batch_normalisation(tiny, accelerator):
    options = {"lora_r": 0, "pretrained": False, "preset": "finetune", "task_sizes": [3, 7], "max_train_per_class": 3}
    config = tiny(model_name_or_path="passlora/resnet18", image_size=16, **options)
    *_, logs = learn_two(config, accelerator)
    assert len(logs[0].steps) == 2 and np.isfinite(logs[0].steps).all()
    too_small = tiny(model_name_or_path="resnet18", image_size=32, **options)  # its last feature map is 1 x 1
    with pytest.raises(PassloraError, match="choose another --per_device_train_batch_size"):
        learn_two(too_small, accelerator)


def test_scores_are_float32_under_mixed_precision(small, accelerator, bf16_works):
    if not bf16_works:
        pytest.skip("this processor fails on bfloat16")
    learner = Learner(small(), accelerator)
    learner.network.classifier.grow(10)
    images = torch.randint(0, 255, (2, 3, 8, 8), dtype=torch.uint8)
    precision = torch.autocast("cpu", dtype=torch.bfloat16)
    found = {}
    for name, context in (("bf16", precision), ("exact", None)):
        z = learner.network.features(images, 4, context)
        found[name] = learner.network.scores(z, ["multiview", "single"], learner.memory)
    scores, exact = found["bf16"], found["exact"]
    for mode in exact:
        assert scores[mode].dtype == torch.float32
        assert len(scores[mode].unique()) == scores[mode].numel(), "bfloat16 logits would collide"
        assert not torch.equal(scores[mode], exact[mode]), "the backbone did run in bfloat16"


def test_accuracy_modes_against_loops(small, accelerator):
    config = small(extra_inference=["single", "vanilla", "nearest_prototype"], max_train_per_class=3)
    learner, images, labels, _ = learn_two(config, accelerator)
    data = task_data(images, labels, range(10))
    got = {mode: e.confusion for mode, e in learner.evaluate(data, config.method.inference_modes).items()}
    expected = {mode: np.zeros((10, 10), dtype=int) for mode in got}
    for row in data.rows:
        with torch.no_grad():
            z = learner.network(rotate(learner.network.backbone.prepare(images.cache[[row]]), 4))
            logits = learner.network.classifier(z)
        scores = {
            "multiview": [sum(logits[v, 4 * c + v] for v in range(4)) for c in range(10)],
            "vanilla": [sum(logits[v, 4 * c] for v in range(4)) for c in range(10)],
            "single": [logits[0, 4 * c] for c in range(10)],
            "nearest_prototype": [-(z[0] - learner.memory.means[4 * c]).norm() for c in range(10)],
        }
        for mode in got:
            expected[mode][labels[row], int(np.argmax([float(s) for s in scores[mode]]))] += 1
    for mode in got:
        assert np.array_equal(got[mode], expected[mode]), mode


def test_gradient_accumulation_averages(small, accelerator):
    """Two half batches give the gradient of the whole: the same weights as one step on it (plain L_new).

    Adam forgives a gradient of another scale, its L2 term does not: both are in.
    """
    base = {"preset": "finetune", "max_train_per_class": 4, "task_sizes": [4, 6], "num_train_epochs": 2}
    base["weight_decay"] = 0.1
    whole = learner_with_data(small(**base, per_device_train_batch_size=16), accelerator)
    halves = learner_with_data(small(**base, per_device_train_batch_size=8, gradient_accumulation_steps=2), accelerator)
    for learner, images, labels in (whole, halves):
        learner.learn(task_data(images, labels, range(4)), 4)
    a, b = whole[0].network.classifier.weight, halves[0].network.classifier.weight
    assert torch.allclose(a, b, atol=2e-4)
    fresh = Learner(small(**base), accelerator)
    set_seed(hash_seed(0, 0))
    fresh.network.classifier.grow(4)
    assert not torch.allclose(a, fresh.network.classifier.weight, atol=2e-4)


def test_the_learning_rate_changes_after_the_milestone_epoch(small, accelerator):
    config = small(num_train_epochs=3, lr_milestones=[2], preset="finetune", max_train_per_class=2)
    *_, logs = learn_two(config, accelerator)
    assert [log.learning_rate for log in logs[:3]] == [0.005, 0.005, pytest.approx(0.0005)]


def test_large_images_can_be_learnt(image_tree, small, accelerator):
    root = image_tree(size=(90, 80), count=3)
    config = small(dataset_name=str(root), task_sizes=[1, 2], max_train_per_class=None, dataloader_num_workers=1)
    learner, images, _, logs = learn_two(config, accelerator)
    assert not images.is_small
    assert np.isfinite(logs[-1].losses["total"]) and learner.memory.num_classes == 3


@pytest.mark.slow
def test_a_deit_small_step_at_224_px_reaches_adapter_and_head_only(image_tree, tiny, accelerator):
    root = image_tree(count=1, classes=("ant", "bee"), size=(32, 32), splits=("train", "test"))
    config = tiny(
        dataset_name=str(root), task_sizes=[1, 1], model_name_or_path="deit_small_patch16_224", pretrained=False
    )
    learner, images, labels = learner_with_data(config, accelerator)
    learner.learn(task_data(images, labels, [0]), 1)
    before = state(learner)
    learner.learn(task_data(images, labels, [1]), 1)
    after = state(learner)
    changed = {
        n
        for n in before
        if not n.startswith("classifier.") and ".teacher." not in n and not torch.equal(before[n], after[n])
    }
    assert changed and all(".attn.qkv.lora_" in name and ".default." in name for name in changed)
    assert learner.network.backbone.image_size == 224 and learner.memory.means.shape == (8, 384)


# --- nothing is computed that nobody reads -----------------------------------------------------------------------


def test_asking_builds_no_teacher(image_tree, tmp_path):
    root = image_tree(classes=("cat", "dog"), size=(16, 16))
    model = PassLora.create(**SMALL, preset="pass++", num_train_epochs=1)
    for name in ("cat", "dog"):
        model.learn(root, classes=[name])
    assert model.learner.network.backbone.has_teacher, "the second lesson needed one"
    model.save_pretrained(tmp_path / "model")
    asked = PassLora.from_pretrained(tmp_path / "model")
    list(asked.predict(root / "test" / "cat" / "0.png"))
    asked.evaluate(root)
    asked.merge(tmp_path / "merged", "transformers")
    assert not asked.learner.network.backbone.has_teacher
    assert not any("teacher" in name for name in asked.learner.network.state_dict())


def test_a_lesson_tests_old_images_before_and_every_image_once_after(image_tree, monkeypatch):
    first = image_tree(name="first", classes=("cat", "dog"), count=3, size=(16, 16))
    image_tree(name="second", splits=("train",), classes=("owl",), size=(16, 16))
    second = image_tree(name="second", splits=("test",), classes=("cat", "dog", "owl"), count=3, size=(16, 16))
    model = PassLora.create(**SMALL, preset="pass++", num_train_epochs=1)
    model.learn(first)
    data = model._load(second, {})
    tested, read = [], Images.__getitems__

    def count(images, plan):
        if images is data.test:
            tested.extend(plan.rows.tolist())
        return read(images, plan)

    monkeypatch.setattr(Images, "__getitems__", count)
    lesson = model.learn(data)
    assert None not in (lesson.old_before, lesson.old_after, lesson.new_after, lesson.all_after)
    names = [data.class_names[label] for label in data.test.split.labels]
    times = {name: sum(tested.count(row) for row, own in enumerate(names) if own == name) / 3 for name in set(names)}
    assert times == {"cat": 2, "dog": 2, "owl": 1}
    assert max(tested.count(row) for row in tested) == 2


@pytest.mark.parametrize(("preset", "steps"), [("ncm", 0), ("slda", 0), ("simplecil", 24), ("fetril", 24)])
def test_a_network_at_rest_sees_each_image_once_in_a_whole_run(small, tmp_path, monkeypatch, preset, steps):
    """60 images to learn from and 40 to test on, which are tested again after every task; `steps` trained on in one."""
    rows, forward = [], Backbone.forward
    monkeypatch.setattr(Backbone, "forward", lambda self, x: (rows.append(len(x)), forward(self, x))[1])
    results = train(small(preset=preset, task_sizes=[4, 3, 3], output_dir=str(tmp_path / "run")))
    assert results["finished"] and len(results["stage_accuracy"]) == 3
    assert sum(rows) == 60 + 40 + steps
