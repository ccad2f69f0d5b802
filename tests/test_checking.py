"""A folder looked at before it is learnt from; pictures of every kind."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from quick import SMALL_FLAGS, write_digits
from quick import quick as quick

from passlora import PassLora, PassloraError
from passlora.data import image_folder, pictures
from passlora.data.checking import alike, check_folder
from passlora.data.pictures import as_picture, scaled, to_rgb


def noise(seed, side=40):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3)).astype(np.uint8))


@pytest.fixture
def folder(tmp_path):
    """Ten different pictures in two classes, and one of each fault."""
    root = tmp_path / "photos"
    for label, seeds in (("cat", range(5)), ("dog", range(5, 10))):
        (root / label).mkdir(parents=True)
        for seed in seeds:
            noise(seed).save(root / label / f"{seed}.png")
    return root


def test_a_folder_in_order_is_fine(folder, cli):
    code, out, _ = cli("check", folder)
    assert code == 0 and "nothing to mend" in out and "2 classes" in out and "10" in out


def test_every_fault_is_told(folder, cli):
    noise(0).save(folder / "dog" / "copy of a cat.png")
    noise(1).save(folder / "cat" / "again.bmp")
    nearly = np.asarray(noise(6)).astype(np.int16) + 1
    Image.fromarray(nearly.clip(0, 255).astype(np.uint8)).save(folder / "dog" / "brighter.png")
    (folder / "cat" / "broken.jpg").write_bytes(b"not a picture")
    noise(20).save(folder / "loose.png")
    (folder / "cat" / "notes.txt").write_text("x")
    (folder / "owl").mkdir()
    noise(21).save(folder / "owl" / "one.png")
    code, out, _ = cli("check", folder)
    assert code == 1
    for words in (
        "fewer than 5 images to learn from:\n  owl (1)",
        "cannot be read:\n  cat/broken.jpg",
        "images in no class's folder, which are not read:\n  loose.png",
        "the same pixels in several classes or splits:\n  cat/0.png = dog/copy of a cat.png",
        "the same pixels in one class:\n  cat/1.png = cat/again.bmp",
        "nearly the same picture in one class:\n  dog/6.png = dog/brighter.png",
        "files of a kind that is not read:\n  .txt (1)",
    ):
        assert words in out, (words, out)
    code, out, _ = cli("check", folder, "--json")
    told = json.loads(out)
    assert code == 1 and told["counts"] == {"": {"cat": 6, "dog": 7, "owl": 1}} and told["loose"] == ["loose.png"]


def test_a_test_image_that_is_trained_on_is_told(tmp_path):
    for split in ("train", "test"):
        for label, start in (("cat", 0), ("dog", 10)):
            (tmp_path / split / label).mkdir(parents=True)
            for seed in range(5):
                noise(start + seed + (0 if seed == 0 else 100 * (split == "test"))).save(
                    tmp_path / split / label / f"{seed}.png"
                )
    report = check_folder(tmp_path)
    assert report.counts == {"train": {"cat": 5, "dog": 5}, "test": {"cat": 5, "dog": 5}}
    assert report.across(report.duplicates) == [
        ["test/cat/0.png", "train/cat/0.png"],
        ["test/dog/0.png", "train/dog/0.png"],
    ]
    assert not report.is_fine


def test_few_are_counted_where_they_are_learnt_from(tmp_path, cli):
    for split, count in (("train", 2), ("test", 8)):
        (tmp_path / split / "cat").mkdir(parents=True)
        for i in range(count):
            noise(10 * count + i).save(tmp_path / split / "cat" / f"{i}.png")
    (tmp_path / "train" / "dog").mkdir()
    (tmp_path / "train" / "dog" / "x.png").write_bytes(b"x")
    code, out, _ = cli("check", tmp_path)
    assert code == 1 and "cat (2), dog (0)" in out.replace("\n  ", ", "), out


def test_an_empty_folder_is_not_fine(tmp_path, cli):
    code, out, _ = cli("check", tmp_path)
    assert code == 1 and "no images: expected" in out


def test_alike_finds_what_comparing_all_pairs_finds():
    rng = np.random.default_rng(0)
    base = [int(x) for x in rng.integers(1, 2**63, 40)]
    hashes = {f"a{i}": value for i, value in enumerate(base)}
    for i, value in enumerate(base[:15]):
        for bit in rng.choice(63, i % 5, replace=False):
            value ^= 1 << int(bit)
        hashes[f"b{i}"] = value
    found = {frozenset(group) for group in alike(hashes)}
    expected = {
        frozenset((f"a{i}", f"b{i}")) for i in range(15) if (hashes[f"a{i}"] ^ hashes[f"b{i}"]).bit_count() <= 3
    }
    assert found == expected and 0 < len(found) < 15


def test_check_refuses_what_is_no_folder(tmp_path, cli):
    code, _, err = cli("check", tmp_path / "nothing")
    assert code == 2 and "is not a folder" in err


# --- what learn says of a folder -------------------------------------------------------------------------------------


def test_learn_tells_of_what_it_passes_over(tmp_path, cli, monkeypatch):
    data = write_digits(write_digits(tmp_path / "data", [0, 1], 4), [2], 1)
    noise(0).save(data / "loose.png")
    (data / "digit 0" / "photo.heic").write_bytes(b"x")
    monkeypatch.setattr(image_folder, "readable_suffixes", lambda: pictures.IMAGE_SUFFIXES)
    code, _, err = cli("learn", tmp_path / "m", "--data", data, *SMALL_FLAGS, "--lift_width", "20")
    assert code == 0, err
    assert "1 images lie in" in err and "1 files of" in err and ".heic" in err and "one image alone of digit 2" in err


def test_unreadable_images_are_an_error_or_left_out(tmp_path, cli):
    data = write_digits(tmp_path / "data", [0, 1], 4)
    (data / "digit 1" / "broken.png").write_bytes(b"x")
    flags = ["--data", data, *SMALL_FLAGS, "--lift_width", "20"]
    code, _, err = cli("learn", tmp_path / "m", *flags)
    assert code == 2 and "broken.png" in err and not (tmp_path / "m").exists()
    code, out, err = cli("learn", tmp_path / "m", *flags, "--on_unreadable", "skip")
    assert code == 0 and "skipped: cannot read" in err and "from 8 images" in out, err
    code, _, err = cli("eval", tmp_path / "m", "--data", data, "--on_unreadable", "skip")
    assert code == 0, err


# --- pictures --------------------------------------------------------------------------------------------------------


def test_transparency_lies_over_white():
    see_through = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert to_rgb(see_through).getpixel((0, 0)) == (255, 255, 255)
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert to_rgb(half).getpixel((0, 0)) == (127, 127, 127)
    grey = Image.new("LA", (4, 4), (10, 0))
    assert to_rgb(grey).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (4, 4), 0)
    palette.info["transparency"] = 0
    assert to_rgb(palette).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[0.0, 0.5, 1.0]], [[0, 128, 255]]),  # as most programs write floats
        ([[0.0, 100.0, 255.0]], [[0, 100, 255]]),
        ([[-2.0, 0.0, 2.0]], [[0, 128, 255]]),
        ([[0, 1000, 4000]], [[0, 64, 255]]),
        ([[0.0, 0.0, 0.0]], [[0, 0, 0]]),
    ],
)
def test_grey_of_any_range(values, expected, tmp_path):
    assert np.abs(scaled(np.array(values)).astype(int) - expected).max() <= 1
    picture = Image.fromarray(np.array(values, dtype=np.float32 if isinstance(values[0][1], float) else np.int32))
    picture.save(tmp_path / "x.tiff")
    assert np.abs(np.asarray(as_picture(tmp_path / "x.tiff"))[0, :, 0].astype(int) - expected[0]).max() <= 1


def test_pixels_that_are_no_numbers_are_refused(tmp_path):
    Image.fromarray(np.array([[0.0, np.nan]], dtype=np.float32)).save(tmp_path / "x.tiff")
    with pytest.raises(PassloraError, match="not all finite"):
        as_picture(tmp_path / "x.tiff")


def test_arrays_and_tensors_of_one_picture_are_the_same():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3)).astype(np.uint8)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    for same in (pixels, pixels / 255, tensor, tensor / 255, Image.fromarray(pixels)):
        assert np.array_equal(np.asarray(as_picture(same)), pixels)
    assert as_picture(pixels[:, :, 0]).mode == "L" and as_picture(tensor[:1] / 255).mode == "L"
    assert as_picture(pixels[:, :, 0] > 100).getpixel((0, 0)) in (0, 255)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (torch.randn(3, 8, 8), "undo a normalisation first"),
        (np.zeros((3, 8, 8), np.uint8), r"shape \(3, 8, 8\) is no picture"),
        (np.zeros((8, 8), np.int64), "expected bytes"),
        (np.zeros((0, 8, 3), np.uint8), "is no picture"),
        ({"a": 1}, "not a dict"),
        (np.full((2, 2), np.nan), "is no picture"),
    ],
)
def test_what_is_no_picture_is_one_sentence(odd, words):
    with pytest.raises(PassloraError, match=words):
        as_picture(odd)


def test_a_model_is_asked_by_tensors_one_or_many(tmp_path):
    data = write_digits(tmp_path / "data", [0, 1], 4)
    from quick import SMALL

    model = PassLora.create(**SMALL, lift_width=20)
    model.learn(data)
    batch = torch.rand(3, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    together = [answer[0].label for answer in model.predict(batch)]
    assert len(together) == 3 and [next(model.predict(one))[0].label for one in batch] == together


def test_photographs_of_telephones(tmp_path):
    pillow_heif = pytest.importorskip("pillow_heif")
    assert ".heic" in pictures.readable_suffixes()
    pillow_heif.register_heif_opener()
    noise(0, 64).save(tmp_path / "x.heic", quality=95)
    assert as_picture(tmp_path / "x.heic").size == (64, 64)
    if ".avif" in pictures.readable_suffixes():
        noise(0, 64).save(tmp_path / "x.avif")
        assert as_picture(tmp_path / "x.avif").size == (64, 64)
