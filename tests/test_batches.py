from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from passlora.config import DataConfig
from passlora.data.batches import (
    UNIFORMS,
    Images,
    Plan,
    TrainPlans,
    as_input,
    augmented_plans,
    crop_with_padding,
    cut,
    eval_plans,
    generator,
    select,
    share_of,
    to_pixels,
)
from passlora.data.dataset import load_dataset
from passlora.data.rows import Split
from passlora.model.passlora import PassLora
from passlora.model.predictions import scores as predicted_scores
from passlora.network.backbone import as_pixel, prepare
from passlora.network.factory import IMAGENET_MEAN, IMAGENET_STD


@given(st.integers(1, 40), st.integers(1, 9))
def test_shares_put_together_are_the_batch(count, world):
    shares = [share_of(count, rank, world) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    assert np.concatenate(shares)[:count].tolist() == list(range(count))


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 4))
def test_every_epoch_reads_every_row_once_on_any_number_of_processes(count, batch, world):
    rows = np.arange(100, 100 + count)
    alone = list(TrainPlans(rows, batch, 2, (0, 0), 0, 1))
    together = [list(TrainPlans(rows, batch, 2, (0, 0), rank, world)) for rank in range(world)]
    steps = -(-count // batch)
    assert len(alone) == 2 * steps
    for epoch in range(2):
        read = np.concatenate([p.batch_rows for p in alone[epoch * steps : (epoch + 1) * steps]])
        assert sorted(read.tolist()) == rows.tolist()
    for step, plan in enumerate(alone):
        parts = [plans[step] for plans in together]
        merged = np.concatenate([p.rows for p in parts])[: len(plan.rows)]
        assert merged.tolist() == plan.rows.tolist() == plan.batch_rows.tolist()
        uniforms = torch.cat([p.uniforms for p in parts])[: len(plan.rows)]
        assert torch.equal(uniforms, plan.uniforms)


def test_the_order_depends_on_seed_task_and_epoch():
    def orders(*key):
        return [p.batch_rows.tolist() for p in TrainPlans(np.arange(50), 50, 2, key, 0, 1)]

    assert orders(0, 0) == orders(0, 0)
    assert len({str(order) for key in ((0, 0), (0, 1), (1, 0)) for order in orders(*key)}) == 6


@given(st.integers(0, 30), st.integers(1, 8), st.integers(1, 4))
def test_evaluation_reads_each_row_exactly_once(count, batch, world):
    rows = np.arange(count) * 3
    read = [p.rows for rank in range(world) for p in eval_plans(rows, batch, rank, world)]
    assert sorted(np.concatenate(read).tolist() if read else []) == rows.tolist()
    assert all(1 <= len(part) <= batch for part in read)


def test_augmentation_of_a_row_does_not_depend_on_who_reads_it():
    rows = np.arange(7)

    def by_row(world):
        plans = [p for rank in range(world) for p in augmented_plans(rows, 2, (0,), rank, world)]
        return {int(r): u.tolist() for p in plans for r, u in zip(p.rows, p.uniforms, strict=True)}

    assert by_row(1) == by_row(3)


def test_crop_with_padding_against_slicing():
    images = torch.randint(0, 255, (5, 3, 6, 7), dtype=torch.uint8)
    u = torch.tensor([0.0, 0.99, 0.5, 0.3, 0.7])
    got = crop_with_padding(images, 2, u, u.flip(0))
    padded = torch.nn.functional.pad(images, [2] * 4)
    for i in range(5):
        top, left = int(u[i] * 5), int(u.flip(0)[i] * 5)
        assert torch.equal(got[i], padded[i, :, top : top + 6, left : left + 7])
    middle = crop_with_padding(images, 2, torch.full((5,), 0.5), torch.full((5,), 0.5))
    assert torch.equal(middle, images)


def images(**options):
    config = DataConfig(**options)
    data = load_dataset(DataConfig(max_train_per_class=3), 0)
    return Images(data.train, 64, config, "test")


def test_small_images_are_decoded_once_and_kept_as_uint8():
    made = images()
    assert made.is_small and made.cache.dtype == torch.uint8 and made.cache.shape == (30, 3, 8, 8)
    made.split.rows = None  # nothing is read again
    plan = eval_plans(np.array([4, 2]), 8, 0, 1)[0]
    assert torch.equal(made.__getitems__(plan).images, made.cache[[4, 2]])


def test_flip_and_brightness():
    made = images(crop_padding=0, brightness=0.5)
    x = made.cache[:2].clone()
    u = torch.full((2, UNIFORMS), 0.9)
    u[0, 4] = 0.1  # flips the first only
    u[:, 5] = torch.tensor([0.0, 1.0])
    got = made.augment(x, u)
    assert torch.allclose(got[0], x[0].flip(-1).float() * 0.5)
    assert torch.allclose(got[1], (x[1].float() * 1.5).clamp(max=255))
    plain = images(crop_padding=0, brightness=0.0, horizontal_flip=False)
    assert torch.equal(plain.augment(x, u), x)


def test_large_images_are_cut_to_size_by_workers(image_tree):
    root = image_tree(size=(150, 100))
    data = load_dataset(DataConfig(dataset_name=str(root)), 0)
    made = Images(data.train, 96, DataConfig(dataloader_num_workers=2), "test")
    assert not made.is_small
    plans = TrainPlans(np.arange(12), 5, 1, (0,), 0, 1)
    batches = list(made.batches(plans))
    assert [len(b.images) for b in batches] == [5, 5, 2]
    assert batches[0].images.shape == (5, 3, 96, 96) and batches[0].images.dtype == torch.uint8
    again = list(Images(data.train, 96, DataConfig(dataloader_num_workers=0), "test").batches(plans))
    assert all(torch.equal(a.images, b.images) for a, b in zip(batches, again, strict=True))


# --- an image is prepared by itself ----------------------------------------------------------------------------

SMALL = [(1, 1), (40, 30), (8, 8), (30, 40), (64, 20), (20, 64), (64, 64), (40, 30)]
LARGE = [(150, 100), (70, 20), (65, 65)]


def folder_of(root, sizes, classes=("cat", "dog")):
    """For each class an image of each size, in this order; classes differ in brightness and direction."""
    rng = np.random.default_rng(3)
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i, (width, height) in enumerate(sizes):
            ramp = np.linspace(0, 150, width)[None, :, None] if label else np.linspace(0, 150, height)[:, None, None]
            noise = rng.integers(0, 60, (height, width, 3)) + 40 * label
            Image.fromarray((ramp + noise).astype(np.uint8)).save(root / name / f"{i:02}.png")
    return root


def whole_folder(root):
    """All images of a folder, none held out."""
    return load_dataset(DataConfig(dataset_name=str(root), test_fraction=0.01), 0).train.rows.source


def images_of(root, image_size=64, **options):
    rows = whole_folder(root)
    return Images(Split(rows, np.zeros(len(rows.paths), dtype=np.int64)), image_size, DataConfig(**options), "test")


def network_input(x, image_size=64):
    return prepare(x, image_size, as_pixel(IMAGENET_MEAN), as_pixel(IMAGENET_STD))


def read(made, rows, uniforms=None):
    """The network's input, as the learner has it of a batch."""
    rows = np.array(rows)
    batch = made.__getitems__(Plan(rows, uniforms, rows))
    return network_input(batch.images if uniforms is None else made.augment(batch.images, uniforms), made.image_size)


def test_images_of_one_size_are_kept_as_they_are(tmp_path):
    for made in (images(), images_of(folder_of(tmp_path / "x", [(40, 30)] * 3))):
        pixels = np.stack([np.asarray(made.split.rgb(row)) for row in range(len(made))]).transpose(0, 3, 1, 2)
        assert made.cache.dtype == torch.uint8 and made.cache.is_contiguous()
        assert np.array_equal(made.cache.numpy(), pixels)


@pytest.mark.parametrize("odd", [(1, 1), (64, 64), (20, 50)])
@pytest.mark.parametrize("image_size", [32, 64])
def test_the_first_image_does_not_decide_for_the_others(tmp_path, odd, image_size):
    """Batches of the others, plain and augmented, are those of the folder without it."""
    options = {"brightness": 0.0, "crop_padding": 4}
    one_size = images_of(folder_of(tmp_path / "one", [(40, 30)] * 4), image_size, **options)
    unequal = images_of(folder_of(tmp_path / "two", [(40, 30)] * 4), image_size, **options)
    first = unequal.split.rows.paths[0]
    Image.new("RGB", odd).save(first)
    unequal = Images(unequal.split, image_size, unequal.config, "test")
    assert unequal.is_small and not isinstance(unequal.cache, torch.Tensor)
    others = range(1, 8)
    assert torch.allclose(read(unequal, others), read(one_size, others), atol=1e-5)
    uniforms = torch.rand(7, UNIFORMS, generator=generator("test"))
    augmented = read(one_size, others, uniforms)
    assert torch.allclose(read(unequal, others, uniforms), augmented, atol=1e-5)
    assert not torch.allclose(augmented, read(one_size, others), atol=0.1), "there is something to compare"


@pytest.mark.parametrize("image_size", [32, 64, 224])
@pytest.mark.parametrize("size", SMALL)
def test_a_small_image_is_resized_as_the_network_resizes_a_batch(size, image_size):
    image = Image.effect_noise(size, 80).convert("RGB")
    by_network = network_input(to_pixels(image)[None], image_size)
    assert torch.allclose(network_input(as_input(image, image_size)[None], image_size), by_network, atol=2e-6)


@pytest.mark.parametrize("sizes", [SMALL, SMALL[::-1], SMALL + LARGE, LARGE + SMALL, [(40, 30)] * 3, LARGE])
def test_evaluation_reads_what_predict_reads(tmp_path, sizes):
    made = images_of(folder_of(tmp_path / "x", sizes))
    assert made.is_small == (max(map(max, sizes)) <= 64)
    predicted = network_input(torch.stack([as_input(made.split.rgb(row), 64) for row in range(len(made))]))
    assert torch.allclose(read(made, range(len(made))), predicted, atol=2e-6)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tiny = {"model_name_or_path": "test_vit", "pretrained": False, "image_size": 64}
    model = PassLora.create(
        **tiny, preset="pass++", num_train_epochs=2, per_device_train_batch_size=8, horizontal_flip=False
    )
    model.learn(folder_of(tmp_path_factory.mktemp("learnt") / "x", SMALL + LARGE))
    return model


@pytest.mark.parametrize("sizes", [SMALL, SMALL + LARGE], ids=["small", "small and large"])
def test_evaluate_answers_as_predict_does_image_by_image(model, tmp_path, sizes):
    root = folder_of(tmp_path / "x", sizes)
    paths = whole_folder(root).paths
    wanted = np.zeros((2, 2), dtype=int)
    for path, answer in zip(paths, model.predict(paths, top_k=1, batch_size=5), strict=True):
        wanted[model.classes.index(path.parent.name), model.classes.index(answer[0].label)] += 1
    assert model.evaluate(root).confusion.tolist() == wanted.tolist()
    rows = np.arange(len(paths))
    tested = images_of(root).__getitems__(Plan(rows, None, rows)).images
    learner = model.learner
    scores = learner.network.scores(learner.network.features(tested, 4), ["multiview"], learner.memory)["multiview"]
    predicted = predicted_scores(learner, [Image.open(path) for path in paths], "multiview")
    assert torch.allclose(predicted, scores, atol=1e-5)


def test_training_on_small_images_among_large_ones(tmp_path):
    root = folder_of(tmp_path / "x", [(20, 20), (150, 100)])
    cropped, plain = images_of(root, rrc_min_scale=0.3), images_of(root, rrc_min_scale=0.0)
    plan = Plan(np.arange(4), torch.rand(4, UNIFORMS, generator=generator("test")), np.arange(4))
    batch = cropped.__getitems__(plan).images
    assert batch.dtype == torch.uint8 and batch.shape == (4, 3, 64, 64)
    u = plan.uniforms[0].tolist()
    assert torch.equal(batch[0], to_pixels(cut(cropped.split.rgb(0), 64, u, 0.3))), "RandomResizedCrop for all"
    as_tested = plain.__getitems__(Plan(np.arange(4), None, np.arange(4))).images
    assert torch.equal(plain.__getitems__(plan).images, as_tested), "rrc_min_scale 0: as in testing"


def test_rows_of_the_classes_that_a_model_knows():
    made = images()
    data = select(made, np.array([2, 0, 1, 2, 1]), ["ape", "bee", "cow"], {"cow": 0, "ape": 7, "yak": 1})
    assert data.images is made
    assert data.classes.tolist() == [0, 7, -1, 0, -1] and data.rows.tolist() == [0, 1, 3]
    assert select(made, np.array([], dtype=np.int64), [], {"cow": 0}).rows.tolist() == []


def test_images_can_be_the_keys_of_what_is_kept_with_them():
    made, kept = images(), WeakKeyDictionary()
    kept[made] = 1
    assert kept[made] == 1 and images() not in kept
    del made
    assert len(kept) == 0


# --- crops -----------------------------------------------------------------------------------------------------


def test_the_crop_of_a_large_image():
    gradient = np.tile(np.linspace(0, 255, 256).astype(np.uint8)[None, :, None], (256, 1, 3))
    image = Image.fromarray(gradient)
    centre = np.asarray(cut(image, 224))
    assert centre.shape == (224, 224, 3)
    assert np.array_equal(centre, gradient[16:240, 16:240]), "the middle 224 of 256 pixels"
    small = np.asarray(cut(image, 32, [0.0, 0.0, 0.0, 0.5, 0.5, 0.5], 0.04))  # a square of 4% of the area, top left
    assert small[0, 0, 0] < 5 and 40 < small[0, -1, 0] < 56


def test_generators_have_a_key():
    draw = lambda *key: torch.rand(3, generator=generator(*key)).tolist()
    assert draw("a", 1) == draw("a", 1)
    assert draw("a", 1) != draw("a", 2)
    assert draw("a", 1) != draw("b", 1)


@pytest.mark.parametrize("size", [1, 3])
def test_a_last_batch_of_one(size):
    plans = list(TrainPlans(np.arange(5), 4, 1, (0,), 0, size))
    assert [len(p.batch_rows) for p in plans] == [4, 1]
    assert len(plans[1].rows) == 1
