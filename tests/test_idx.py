"""MNIST's own format, whole and damaged."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from passlora import Config, PassloraError
from passlora.data.dataset import load_dataset


def idx(array, sizes=None, kind=8):
    sizes = array.shape if sizes is None else sizes
    return bytes([0, 0, kind, len(sizes)]) + b"".join(n.to_bytes(4, "big") for n in sizes) + array.tobytes()


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("t10k", 6)):
        images = rng.integers(0, 256, (count, 5, 4), dtype=np.uint8)
        (tmp_path / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{split}-labels-idx1-ubyte").write_bytes(idx(np.arange(count, dtype=np.uint8) % 3))
    return tmp_path


def load(folder):
    return load_dataset(Config.make(dataset_name=str(folder), num_tasks=3).data, 0)


def test_images_labels_and_splits(folder):
    data = load(folder)
    assert (len(data.train), len(data.test), data.class_names) == (12, 6, ["0", "1", "2"])
    first = np.asarray(data.train.rgb(0))
    expected = np.random.default_rng(0).integers(0, 256, (12, 5, 4), dtype=np.uint8)[0]
    assert first.shape == (5, 4, 3) and (first[:, :, 0] == expected).all()


def test_without_a_test_split_images_are_held_out(folder):
    for path in folder.glob("t10k*"):
        path.unlink()
    data = load(folder)
    assert len(data.train) + len(data.test) == 12 and len(data.test) >= 3


def zipped(content):
    """Without the time of day, which would give the tests other names in each of several processes."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("train-labels-idx1-ubyte", idx(np.zeros(11, np.uint8)), "12 images but 11 labels"),
        ("train-labels-idx1-ubyte", idx(np.zeros(12, np.uint8), kind=13), "is no idx file of bytes"),
        ("train-labels-idx1-ubyte", idx(np.zeros(5, np.uint8), sizes=(12,)), "does not hold the 12 numbers"),
        ("train-labels-idx1-ubyte", idx(np.zeros(13, np.uint8), sizes=(12,)), "does not hold the 12 numbers"),
        ("train-images-idx3-ubyte.gz", zipped(idx(np.zeros(1, np.uint8), sizes=(2**31, 9, 9))), "more than"),
        ("train-images-idx3-ubyte.gz", zipped(idx(np.zeros(240, np.uint8), (12, 5, 4)))[:-20], "cannot be read"),
        ("train-images-idx3-ubyte.gz", b"no gzip at all", "cannot be read"),
        ("t10k-labels-idx1-ubyte", idx(np.full(6, 7, np.uint8)), "labels that the training split lacks"),
    ],
)
def test_what_is_damaged_is_one_sentence(folder, name, content, says):
    (folder / name).write_bytes(content)
    with pytest.raises(PassloraError, match=says):
        load(folder)


def test_images_without_labels(folder):
    (folder / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(PassloraError, match="needs both a file of images and a file of labels"):
        load(folder)
