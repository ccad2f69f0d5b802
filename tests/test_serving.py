"""Merged models in transformers: the same scores as `predict`, and nothing but whole, harmless folders."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from quick import SMALL
from quick import quick as quick
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, pipeline

from passlora import Config, PassLora, PassloraError, train
from passlora.model import export
from passlora.model.predictions import scores
from passlora.network.factory import rebuild
from passlora.serving import PassLoraConfig, PassLoraForImageClassification

SIZES = ((8, 8), (64, 40), (120, 90), (65, 64))


def images():
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in SIZES]


def make(folder, **options):
    base = {"dataset_name": "digits", "task_sizes": [6, 4], "max_train_per_class": 4, "max_test_per_class": 1}
    base |= {"num_train_epochs": 1, "per_device_train_batch_size": 8, "output_dir": str(folder)}
    train(Config.make(**{**base, **options}))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return make(tmp_path_factory.mktemp("serving") / "model")


@pytest.fixture(scope="module")
def merged(trained):
    PassLora.from_pretrained(trained).merge(trained.parent / "merged", "transformers")
    return trained.parent / "merged"


@pytest.fixture
def copy(merged, tmp_path):
    shutil.copytree(merged, tmp_path / "merged")
    return tmp_path / "merged"


def answers(folder, merged, views):
    """What the pipeline says of images of many sizes, and what `predict` says."""
    model = PassLora.from_pretrained(folder)
    asked = pipeline("image-classification", model=str(merged))
    theirs = asked(images(), top_k=len(model.classes))
    ours = list(model.predict(images(), top_k=len(model.classes), views=views))
    return (
        [{row["label"]: row["score"] for row in rows} for rows in theirs],
        [pytest.approx({p.label: p.probability for p in rows}, abs=1e-5) for rows in ours],
    )


def test_the_pipeline_answers_as_predict_does(trained, merged):
    theirs, ours = answers(trained, merged, views=4)
    assert theirs == ours


def test_the_auto_classes_read_it(trained, merged):
    model = AutoModelForImageClassification.from_pretrained(merged)
    assert model.config.id2label == {i: str(i) for i in range(10)} and model.config.label2id["7"] == 7
    assert AutoConfig.from_pretrained(merged).inference == "multiview"
    pixels = AutoImageProcessor.from_pretrained(merged)(images(), return_tensors="pt")["pixel_values"]
    assert pixels.shape == (4, 3, 64, 64)
    with torch.no_grad():
        answer = model(pixels, labels=torch.tensor([0, 1, 2, 3]))
    own = scores(PassLora.from_pretrained(trained).learner, images(), "multiview")
    assert torch.allclose(answer.logits, own, atol=1e-4)
    assert answer.loss == pytest.approx(float(torch.nn.functional.cross_entropy(own, torch.arange(4))), abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {**SMALL, "preset": "pass"},  # one view of four
        {**SMALL, "preset": "finetune"},  # no rotations
        {**SMALL, "inference": "vanilla"},
        pytest.param(
            {"model_name_or_path": "passlora/resnet18", "lora_r": 0, "pretrained": False}, marks=pytest.mark.slow
        ),
    ],
    ids=["single", "plain", "vanilla", "resnet18"],
)
def test_other_models(tmp_path, cli, options):
    folder = make(tmp_path / "model", max_train_per_class=2, max_classes=4, task_sizes=[2, 2], **options)
    code, out, _ = cli("merge", folder, tmp_path / "merged", "--format", "transformers")
    assert code == 0 and "pipeline('image-classification'" in out
    theirs, ours = answers(folder, tmp_path / "merged", views=None)
    assert theirs == ours
    if "lora_r" in options:
        code, _, err = cli("merge", folder, tmp_path / "timm")
        assert code == 2 and "choose the format transformers" in err and not (tmp_path / "timm").exists()


def test_nearest_prototypes_have_no_logits(tmp_path, cli):
    folder = make(tmp_path / "model", max_train_per_class=1, preset="finetune", inference="nearest_prototype", **SMALL)
    code, _, err = cli("merge", folder, tmp_path / "merged", "--format", "transformers")
    assert code == 2 and "it has no logits to merge" in err and not (tmp_path / "merged").exists()


def in_a_process(code, *arguments):
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # it is imported first above, too
def test_transformers_may_be_imported_first(merged):
    """The folder's own words, below, do it the other way round. The image processor is read before any model."""
    code = """
import sys
from transformers import AutoImageProcessor, pipeline
import passlora.serving
passlora.serving.register()
from PIL import Image
print(AutoImageProcessor.from_pretrained(sys.argv[1]))
print(pipeline("image-classification", model=sys.argv[1])(Image.new("RGB", (30, 30)), top_k=10))
"""
    said = in_a_process(code, merged)
    assert said.count("'label'") == 10 and "PassLoraImageProcessor" in said


@pytest.mark.slow
def test_importing_passlora_leaves_transformers_alone_and_the_folder_says_what_to_import(merged):
    (own_words,) = re.findall(r"```python\n(.*?)```", (merged / "README.md").read_text(), re.S)
    before = """
import sys
finders = list(sys.meta_path)
import passlora
assert sys.meta_path == finders
from transformers import AutoConfig
try:
    AutoConfig.from_pretrained(sys.argv[1])
except ValueError as error:
    print("refused:", error)
"""
    after = "from PIL import Image\nprint(classifier(Image.new('RGB', (30, 30)), top_k=10))"
    said = in_a_process(f"{before}\n{own_words}\n{after}".replace("FOLDER", str(merged)), merged)
    assert re.search("refused: .*passlora", said) and said.count("'label'") == 10


def test_a_readme_that_is_there_stays(merged, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    AutoModelForImageClassification.from_pretrained(merged).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_features_of_unit_length(copy):
    """Written by `unit_length`, without which (as 0.1 wrote it) features go to the head as they are."""
    pixels = torch.rand(3, 3, 64, 64)
    path = copy / "config.json"
    settings = {key: value for key, value in json.loads(path.read_text()).items() if key != "unit_length"}
    for unit_length in (None, False, True):
        more = {} if unit_length is None else {"unit_length": unit_length}
        path.write_text(json.dumps({**settings, **more}))
        model = AutoModelForImageClassification.from_pretrained(copy)
        model.save_pretrained(copy.parent / "again")
        model = AutoModelForImageClassification.from_pretrained(copy.parent / "again")
        with torch.no_grad():
            z = [model.backbone(torch.rot90(pixels, v, dims=(-2, -1))) for v in range(4)]
            if unit_length:
                z = [rows / rows.square().sum(dim=1, keepdim=True).sqrt() for rows in z]
            expected = torch.stack([model.head(rows)[:, v::4] for v, rows in enumerate(z)]).mean(dim=0)
            torch.testing.assert_close(model(pixels).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "arguments"),
    [
        ("vit_relpos_small_patch16_224", {"img_size": 32, "depth": 1, "embed_dim": 48, "num_heads": 3}),
        ("eva02_tiny_patch14_224", {"img_size": 28, "depth": 1}),
        ("swin_tiny_patch4_window7_224", {"img_size": 32, "window_size": 4, "depths": [1, 2], "num_heads": [1, 2]}),
    ],
    ids=["relative positions", "rotary positions", "windows"],
)
def test_buffers_that_no_file_holds(tmp_path, architecture, arguments):
    torch.manual_seed(0)
    features = rebuild(architecture, arguments).num_features
    config = PassLoraConfig(architecture, arguments, feature_dim=features, num_labels=3)
    model = PassLoraForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    buffers = dict(again.named_buffers())
    assert buffers.keys() > {name for name, _ in model.named_buffers()} & model.state_dict().keys(), (
        "some are not saved"
    )
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    pixels = torch.rand(2, 3, arguments["img_size"], arguments["img_size"])
    with torch.no_grad():
        assert torch.equal(again(pixels).logits, model(pixels).logits)


def test_importing_passlora_stays_light():
    code = "import sys, passlora; print([m for m in ('torch', 'transformers', 'timm', 'peft') if m in sys.modules])"
    assert in_a_process(code).strip() == "[]"


def test_missing_unknown_and_misshapen_weights_are_errors(copy):
    path = copy / "model.safetensors"
    weights = load_file(path)
    for change, says in (
        ({"head.bias": None}, "1 missing weights, such as head.bias"),
        ({"more": weights["head.bias"].clone()}, "1 unexpected weights, such as more"),
        ({"head.bias": weights["head.bias"] * float("nan")}, "head.bias holds values that are not finite"),
        ({"head.bias": weights["head.bias"][:-1].clone()}, "1 mismatched weights, such as .*head.bias"),
    ):
        tensors = {name: tensor for name, tensor in {**weights, **change}.items() if tensor is not None}
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(PassloraError, match=says):
            AutoModelForImageClassification.from_pretrained(copy)


class Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


def test_a_pickle_is_never_loaded(copy, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForImageClassification.from_pretrained(copy)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture_args": {"checkpoint_path": "x.pth"}}, "not taken from a file"),
        ({"architecture_args": {"pretrained": True}}, "not taken from a file"),
        ({"architecture_args": {"pretrained_cfg": {"file": "x.pth"}}}, "not taken from a file"),
        ({"architecture": "hf-hub:someone/else"}, "no architecture of timm"),
        ({"architecture_args": {"depth": "many"}}, "cannot be built"),
        ({"architecture_args": {"patch_size": 0}}, "cannot be built"),
        ({"architecture_args": {"act_layer": "nope"}}, "cannot be built"),
        ({"architecture_args": {"depth": 10**6}}, "not taken from a file"),
        ({"architecture_args": {"depth": 12, "embed_dim": 4095}}, "more than passlora builds"),
        ({"architecture_args": [1]}, "not ones that passlora writes"),
        ({"architecture": None}, "not ones that passlora writes"),
        ({"num_views": -1}, "not ones that passlora writes"),
        ({"feature_dim": None}, "not ones that passlora writes"),
        ({"inference": "bogus"}, "not ones that passlora writes"),
        ({"unit_length": "yes"}, "not ones that passlora writes"),
    ],
)
def test_a_strangers_settings(copy, changes, says):
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(PassloraError, match=says):
        AutoModelForImageClassification.from_pretrained(copy)


def test_merging_is_whole_or_not_at_all(trained, tmp_path, monkeypatch):
    model = PassLora.from_pretrained(trained)
    monkeypatch.setattr(
        export, "write_timm", lambda learner, linear, classes, folder: (folder / "half").touch() or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        model.merge(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PassloraError, match="format must be timm or transformers"):
        model.merge(tmp_path / "out", "onnx")
