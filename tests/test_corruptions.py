from __future__ import annotations

import colorsys
import json

import numpy as np
import pytest
from PIL import Image

from passlora import PassloraError, train
from passlora.config import DataConfig
from passlora.data import corruptions
from passlora.data.corruptions import CORRUPTIONS, corrupt, corrupted, small
from passlora.data.dataset import load_dataset


def picture(width=32, height=32):
    ramp = np.linspace(0, 255, width)[None, :, None] * np.ones((height, 1, 3))
    ramp[height // 4 : height // 2, width // 4 : width // 2] = (200, 30, 60)
    return Image.fromarray(ramp.astype(np.uint8))


@pytest.mark.parametrize("side", [32, pytest.param(96, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_changes_the_image_and_can_be_repeated(name, side):
    image = picture(side, side)
    before = np.random.get_state()[1].copy()
    mild = np.asarray(corrupt(image, name, 1, 7))
    assert mild.shape == (side, side, 3) and mild.dtype == np.uint8
    assert (np.random.get_state()[1] == before).all(), "the global generator is left as it was"
    np.random.seed(123)
    assert (np.asarray(corrupt(image, name, 1, 7)) == mild).all(), "whatever was drawn before"
    weak, strong = (np.mean([change(image, name, severity, seed) for seed in range(4)]) for severity in (1, 5))
    assert weak > 0 and strong > 0
    if (name, side) != ("elastic_transform", 32):  # CIFAR-100-C's mildest moves the image furthest, as a whole
        assert weak < strong, "a higher severity damages more"


def change(image, name, severity, seed):
    return np.abs(np.asarray(corrupt(image, name, severity, seed)).astype(int) - np.asarray(image)).mean()


def test_small_images_are_damaged_at_the_strengths_of_cifar_100_c():
    """Each against its definition, with the strength published for CIFAR-10-C."""
    grey = np.full((64, 64, 3), 0.5)
    np.random.seed(0)
    assert damage_small("gaussian_noise", grey, 1).std() == pytest.approx(0.04, rel=0.05)
    assert damage_small("gaussian_noise", grey, 5).std() == pytest.approx(0.10, rel=0.05)
    assert damage_small("shot_noise", grey, 1).var() == pytest.approx(0.5 / 500, rel=0.1)
    noisy = damage_small("impulse_noise", grey, 5)
    assert (noisy == 0).mean() == pytest.approx(0.035, abs=0.006) and (noisy == 1).mean() == pytest.approx(
        0.035, abs=0.006
    )
    image = np.asarray(picture(), dtype=float) / 255
    mean = image.mean(axis=(0, 1))
    assert damage_small("contrast", image, 2) == pytest.approx(mean + 0.5 * (image - mean), abs=1 / 255)
    for severity, added in ((1, 0.05), (5, 0.3)):
        bright = damage_small("brightness", image, severity)
        for row, column in ((0, 0), (10, 10), (20, 5), (31, 31)):
            hue, saturation, value = colorsys.rgb_to_hsv(*image[row, column])
            wanted = colorsys.hsv_to_rgb(hue, saturation, min(value + added, 1))
            assert bright[row, column] == pytest.approx(wanted, abs=1.01 / 255)


def test_small_blurs_move_no_light_and_glass_only_takes_from_neighbours():
    dot = np.zeros((33, 33, 3))
    dot[16, 16] = 1
    for name in ("defocus_blur", "motion_blur"):
        for severity in (1, 3, 5):
            soft = damage_small(name, dot, severity)
            assert soft.sum() == pytest.approx(3, rel=0.1), name
            assert 0 < soft[16, 16, 0] < 1 and (soft[:8] == 0).all(), name
    numbers = np.arange(32 * 32).reshape(32, 32)
    coded = np.stack([numbers // 256, numbers % 256, 0 * numbers], axis=2) / 255  # each pixel says where it is
    np.random.seed(0)
    found = np.rint(255 * small.glass_blur(coded, (0.05, 1))).astype(int)
    rows, columns = np.divmod(found[..., 0] * 256 + found[..., 1], 32)
    down, right = rows - np.arange(32)[:, None], columns - np.arange(32)
    assert set(np.unique(down)) == set(np.unique(right)) == {-1, 0}, "from above or the left, one pixel at most"
    assert 0.4 < (down[2:, 2:] == -1).mean() < 0.6


def test_small_images_may_be_long():
    for name in CORRUPTIONS:
        assert corrupt(picture(400, 40), name, 3, 0).size == (400, 40)


def damage_small(name, image, severity):
    return small.damage(np.uint8(np.rint(255 * image)), name, severity) / 255


def test_noise_differs_from_image_to_image():
    split = load_dataset(DataConfig(), 0).test
    noisy = corrupted(split, "gaussian_noise", 2)
    a, b = (np.asarray(noisy.rgb(row)).astype(int) - np.asarray(noisy_source(split, row)) for row in (0, 1))
    assert (a != b).any() and (noisy.labels == split.labels).all()


def noisy_source(split, row):
    return split.rgb(row).resize((32, 32), Image.Resampling.BILINEAR)


def test_tiny_and_large_images_get_a_size_that_corruptions_are_made_for():
    assert corrupt(picture(8, 8), "fog", 1, 0).size == (32, 32)
    assert corrupt(picture(600, 900), "fog", 1, 0).size == (256, 384)
    assert corrupt(picture(200, 100), "pixelate", 1, 0).size == (200, 100)


def test_mistakes_are_one_sentence(monkeypatch):
    with pytest.raises(PassloraError, match="no corruption 'frog'; did you mean 'fog'"):
        corruptions.check(("frog",), 1)
    with pytest.raises(PassloraError, match=r"severity must be 1 \(mild\) to 5, got 6"):
        corruptions.check(("fog",), 6)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PassloraError, match=r'pip install "passlora\[robustness\]"'):
        corruptions.check(("fog",), 1)


def test_the_command(tiny, tmp_path, cli):
    folder = tmp_path / "run"
    train(tiny(preset="slda", max_train_per_class=12, output_dir=str(folder)))
    flags = ["--data", "digits", "--max_test_per_class", "5"]
    names = ["--corruptions", "gaussian_noise", "contrast", "fog"]
    code, out, err = cli("robustness", folder, *flags, *names, "--severity", "5")
    assert code == 0, err
    found = json.loads((folder / "eval" / "robustness.json").read_text())
    assert found["severity"] == 5 and set(found["accuracy"]) == {"gaussian_noise", "contrast", "fog"}
    assert found["mean"] == pytest.approx(sum(found["accuracy"].values()) / 3)
    assert found["mean"] < found["clean"] - 5, "the strongest damage must show"
    assert "gaussian_noise" in out and f"{found['clean']:.1f}" in out
    for name in ("robustness.csv", "robustness.png", "robustness.svg"):
        assert (folder / "eval" / name).stat().st_size > 50
    from passlora import PassLora

    model = PassLora.from_pretrained(folder)
    clean = model.evaluate("digits", max_test_per_class=5)
    assert clean.accuracy == pytest.approx(found["clean"]) and clean.confusion.sum() == 50
    assert (
        dict(model.robustness("digits", 5, ["fog"], max_test_per_class=5))["fog"].accuracy == found["accuracy"]["fog"]
    )
    code, _, err = cli("robustness", folder, *flags, "--severity", "0")
    assert code == 2 and "severity" in err
