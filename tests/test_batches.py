from __future__ import annotations

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
    TrainPlans,
    augmented_plans,
    crop_with_padding,
    cut,
    eval_plans,
    generator,
    share_of,
)
from passlora.data.sources import load_dataset


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


def test_a_small_image_among_large_ones_is_no_reason_to_shrink_them(image_tree):
    root = image_tree(size=(150, 100))
    Image.new("RGB", (20, 20)).save(root / "train" / "cat" / "0.png")
    data = load_dataset(DataConfig(dataset_name=str(root)), 0)
    assert not Images(data.train, 96, DataConfig(), "test").is_small


def test_the_crop_of_a_large_image():
    gradient = np.tile(np.linspace(0, 255, 256).astype(np.uint8)[None, :, None], (256, 1, 3))
    image = Image.fromarray(gradient)
    centre = cut(image, 224, None, 0.08)
    assert centre.shape == (224, 224, 3)
    assert np.array_equal(centre, gradient[16:240, 16:240]), "the middle 224 of 256 pixels"
    assert np.array_equal(cut(image, 224, [0.5] * 6, 0.0), centre), "rrc_min_scale 0 means the centre crop"
    small = cut(image, 32, [0.0, 0.0, 0.0, 0.5, 0.5, 0.5], 0.04)  # a square of 4% of the area, at the top left
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
