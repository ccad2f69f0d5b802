from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from passlora import PassloraError, corruptions, train
from passlora.corruptions import CORRUPTIONS, corrupt, corrupted
from passlora.data import DataConfig, load_dataset


def picture(width=32, height=32):
    ramp = np.linspace(0, 255, width)[None, :, None] * np.ones((height, 1, 3))
    ramp[height // 4 : height // 2, width // 4 : width // 2] = (200, 30, 60)
    return Image.fromarray(ramp.astype(np.uint8))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_changes_the_image_and_can_be_repeated(name):
    image = picture()
    before = np.random.get_state()[1].copy()
    mild = np.asarray(corrupt(image, name, 1, 7))
    assert mild.shape == (32, 32, 3) and mild.dtype == np.uint8
    assert (np.random.get_state()[1] == before).all(), "the global generator is left as it was"
    np.random.seed(123)
    assert (np.asarray(corrupt(image, name, 1, 7)) == mild).all(), "whatever was drawn before"
    distance = [np.abs(np.asarray(corrupt(image, name, s, 7)).astype(int) - np.asarray(image)).mean() for s in (1, 5)]
    assert 0 < distance[0] < distance[1], "a higher severity damages more"


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
    train(tiny(max_train_per_class=12, num_train_epochs=3, output_dir=str(folder)), lambda message: None)
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
