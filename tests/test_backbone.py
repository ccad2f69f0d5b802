from __future__ import annotations

import argparse
import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from passlora.config import ModelConfig
from passlora.errors import PassloraError
from passlora.network.factory import create, make_backbone, origin, rebuild, resnet18
from passlora.network.weights import load_weights


@pytest.fixture(scope="module")
def mini():
    torch.manual_seed(0)
    return make_backbone(ModelConfig())


def test_only_the_adapter_is_trainable(mini):
    trainable = {name for name, p in mini.named_parameters() if p.requires_grad}
    assert trainable and all("lora_" in name and "attn.qkv" in name for name in trainable)
    assert mini.parameter_counts()[0] == 6 * 4 * (192 + 3 * 192)


def test_deit_small_has_73728_adapter_weights_and_384_features():
    backbone = make_backbone(ModelConfig(model_name_or_path="deit_small_patch16_224", pretrained=False))
    assert backbone.parameter_counts()[0] == 73_728
    assert (backbone.feature_dim, backbone.image_size) == (384, 224)


@pytest.mark.parametrize(("targets", "weights"), [("attn", 110_592), ("attn+mlp", 294_912)])
def test_wider_targets(targets, weights):
    config = ModelConfig(model_name_or_path="deit_small_patch16_224", pretrained=False, lora_target_modules=targets)
    assert make_backbone(config).parameter_counts()[0] == weights


def test_the_feature_is_the_class_token_after_the_final_norm():
    torch.manual_seed(1)
    network = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=6, num_classes=0)
    backbone = make_backbone(ModelConfig(pretrained=False))
    base = backbone.body.base_model.model
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(backbone(x), base.forward_features(x)[:, 0], atol=1e-6)
    assert network.num_features == backbone.feature_dim == 192


def test_the_bundled_weights_are_loaded_and_a_fresh_adapter_changes_nothing(mini):
    from importlib import resources

    plain = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=6, num_classes=0).eval()
    path = resources.files("passlora") / "assets/vit_mini_patch16_64.safetensors"
    plain.load_state_dict({k: v.float() for k, v in load_file(str(path)).items()})
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(mini(x), plain(x), atol=1e-6)


def step(backbone, seed=0):
    """One optimizer step on noise."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, backbone.image_size, backbone.image_size, generator=g)
    backbone.train()
    optimizer = torch.optim.SGD([p for p in backbone.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # B = 0 holds A's gradient at zero in the first
        optimizer.zero_grad()
        backbone(x).square().mean().backward()
        optimizer.step()
    backbone.eval()


@pytest.mark.parametrize("lora", [True, False])
def test_the_teacher_is_the_state_when_it_was_made(lora):
    config = ModelConfig() if lora else ModelConfig(model_name_or_path="passlora/resnet18", lora_r=0)
    torch.manual_seed(0)
    backbone = make_backbone(config).eval()
    x = torch.randn(2, 3, backbone.image_size, backbone.image_size)
    for seed in range(2):  # also when the teacher is replaced
        step(backbone, seed)
        with torch.no_grad():
            before = backbone(x).clone()
        backbone.become_teacher()
        step(backbone, seed + 10)
        taught = backbone.teacher(x)
        assert torch.equal(taught, before)
        assert not taught.requires_grad
        with torch.no_grad():
            assert not torch.allclose(backbone(x), before)
        assert all("teacher" not in n for n, p in backbone.named_parameters() if p.requires_grad)


def test_asking_the_teacher_leaves_the_student_trainable(mini):
    mini.become_teacher()
    before = {n for n, p in mini.named_parameters() if p.requires_grad}
    mini.teacher(torch.randn(1, 3, 64, 64))
    assert {n for n, p in mini.named_parameters() if p.requires_grad} == before
    assert mini.body.active_adapter == "default"


def test_the_teacher_of_a_lora_backbone_is_no_second_backbone(mini):
    mini.become_teacher()
    own = sum(p.numel() for n, p in mini.named_parameters() if ".teacher." in n)
    assert own == mini.parameter_counts()[0] and not mini._teacher


def test_a_frozen_backbone_stays_in_eval_mode(mini):
    mini.train()
    assert not any(module.training for module in mini.body.modules())
    mini.eval()


def test_the_two_stems_of_resnet18():
    small, large = resnet18(32), resnet18(224)
    assert small.conv1.stride == (1, 1) and small.conv1.kernel_size == (3, 3)
    assert isinstance(small.maxpool, torch.nn.Identity)
    assert large.conv1.stride == (2, 2) and large.conv1.kernel_size == (7, 7)
    assert isinstance(large.maxpool, torch.nn.MaxPool2d)
    assert small.forward_features(torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)
    assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 512)


def test_any_timm_model():
    config = ModelConfig(model_name_or_path="resnet10t", pretrained=False, lora_r=0, image_size=64)
    assert make_backbone(config)(torch.zeros(2, 3, 64, 64)).shape == (2, 512)
    config = ModelConfig(model_name_or_path="vit_tiny_patch16_224", pretrained=False, image_size=64)
    assert make_backbone(config)(torch.zeros(2, 3, 64, 64)).shape == (2, 192)


def test_a_network_that_widens_its_features():
    config = ModelConfig(model_name_or_path="mobilenetv3_small_100", pretrained=False, lora_r=0, image_size=64)
    backbone = make_backbone(config).eval()
    assert backbone(torch.zeros(1, 3, 64, 64)).shape == (1, backbone.feature_dim)


def test_a_pattern_that_also_matches_containers():
    backbone = make_backbone(ModelConfig(lora_target_modules=r".*\.attn(\..*)?"))
    adapted = {name.split(".lora_")[0].split(".")[-1] for name, p in backbone.named_parameters() if p.requires_grad}
    assert adapted == {"qkv", "proj"}


def test_a_local_checkpoint_with_weights_under_the_classifiers_name(tmp_path):
    torch.manual_seed(0)
    state = timm.create_model("convnext_atto", num_classes=7).state_dict()  # keeps head.norm without classifier
    save_file(state, tmp_path / "w.safetensors")
    path = str(tmp_path / "w.safetensors")
    config = ModelConfig(model_name_or_path=path, model_architecture="convnext_atto", lora_r=0)
    assert torch.equal(make_backbone(config).body.head.norm.weight, state["head.norm.weight"])


def test_images_are_resized_and_normalised(mini):
    image = torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
    x = mini.prepare(image)
    assert x.shape == (1, 3, 64, 64)
    expected = [(1 - m) / s for m, s in zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)]
    assert x[0, :, 0, 0].tolist() == pytest.approx(expected, rel=1e-5)


ARCH = "deit_tiny_patch16_224"


@pytest.fixture(scope="module")
def checkpoint():
    torch.manual_seed(5)
    return timm.create_model(ARCH, num_classes=611).state_dict()


@pytest.mark.parametrize("form", ["safetensors", "pth", "model", "deit"])
def test_local_checkpoints_of_every_form(tmp_path, checkpoint, form):
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    if form == "safetensors":
        save_file(checkpoint, path)
    elif form == "pth":
        torch.save(checkpoint, path)
    elif form == "model":
        torch.save({"model": checkpoint, "epoch": 3}, path)
    else:  # as DeiT's training script writes it
        args = argparse.Namespace(lr=0.1)
        torch.save({"model": {f"module.{k}": v for k, v in checkpoint.items()}, "args": args}, path)
    backbone = make_backbone(ModelConfig(model_name_or_path=str(path), model_architecture=ARCH))
    loaded = backbone.body.base_model.model
    assert torch.equal(loaded.blocks[3].mlp.fc1.weight, checkpoint["blocks.3.mlp.fc1.weight"])
    assert torch.equal(loaded.pos_embed, checkpoint["pos_embed"])


SMALL = "test_vit"


@pytest.fixture
def of_96_px(tmp_path):
    """Weights of a small ViT with a classifier, under the name of a file."""
    torch.manual_seed(6)
    save_file(timm.create_model(SMALL, img_size=96, num_classes=7).state_dict(), tmp_path / "w.safetensors")
    return str(tmp_path / "w.safetensors")


@pytest.mark.parametrize("side", [32, 64, 96, 160])
def test_weights_of_another_image_size_are_resampled_as_timm_does(of_96_px, side):
    config = ModelConfig(model_name_or_path=of_96_px, model_architecture=SMALL, image_size=side)
    backbone = make_backbone(config).eval()
    overlay = {"file": of_96_px}
    timms = timm.create_model(SMALL, pretrained=True, num_classes=0, img_size=side, pretrained_cfg_overlay=overlay)
    ours = backbone.body.unload().state_dict()
    assert list(ours) == list(timms.state_dict())
    assert all(torch.equal(tensor, ours[name]) for name, tensor in timms.state_dict().items())
    assert torch.equal(ours["pos_embed"], load_file(of_96_px)["pos_embed"]) == (side == 96)
    assert backbone.image_size == side and backbone(torch.rand(2, 3, side, side)).isfinite().all()


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("own_place", [True, False], ids=["class token placed", "class token without place"])
def test_only_the_grid_of_positions_is_resampled(tmp_path, registers, own_place):
    options = {"num_classes": 0, "reg_tokens": registers, "no_embed_class": not own_place}
    torch.manual_seed(6)
    state = timm.create_model(SMALL, img_size=96, **options).half().state_dict()
    save_file(state, tmp_path / "w.safetensors")
    network = timm.create_model(SMALL, img_size=64, **options)
    load_weights(network, tmp_path / "w.safetensors")
    prefix = network.pos_embed.shape[1] - 16
    assert prefix == (1 + registers if own_place else 0)
    grid = state["pos_embed"][:, prefix:].float().reshape(1, 6, 6, -1).permute(0, 3, 1, 2)
    grid = torch.nn.functional.interpolate(grid, (4, 4), mode="bicubic", antialias=True)
    expected = torch.cat([state["pos_embed"][:, :prefix].float(), grid.flatten(2).mT], dim=1)
    torch.testing.assert_close(network.pos_embed.data, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pos_embed": torch.zeros(1, 36, 64)}, r"1 of another shape \(such as pos_embed\)"),  # 35 places: no square
        ({"pos_embed": torch.zeros(1, 37, 65)}, r"1 of another shape \(such as pos_embed\)"),
        ({"pos_embed": torch.zeros(2, 37, 64)}, r"1 of another shape \(such as pos_embed\)"),
        ({"pos_embed": torch.zeros(37, 64)}, r"1 of another shape \(such as pos_embed\)"),
        ({"pos_embed": torch.full((1, 37, 64), torch.inf)}, "not finite"),
        ({"pos_embed": None}, r"1 missing \(such as pos_embed\)"),
        ({"position": torch.zeros(1)}, r"1 unknown \(such as position\)"),
        ({"patch_embed.proj.weight": torch.zeros(64, 3, 8, 8)}, r"1 of another shape \(such as patch_embed"),
    ],
)
def test_nothing_else_is_bent_to_fit(of_96_px, change, says):
    tensors = {**load_file(of_96_px), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, of_96_px)
    config = ModelConfig(model_name_or_path=of_96_px, model_architecture=SMALL, image_size=64)
    with pytest.raises(PassloraError, match=says):
        make_backbone(config)


@pytest.mark.parametrize("place", ["local-dir", "hf-hub"])
@pytest.mark.parametrize("with_classes", [True, False])
def test_what_either_timm_keeps_of_a_hub_model_rebuilds_it(tmp_path, monkeypatch, place, with_classes):
    """timm 1.0.31 writes `num_classes` among `model_args`, earlier ones do not."""
    network = timm.create_model(SMALL, img_size=32, num_classes=7)
    timm.models.save_for_hf(network, tmp_path, model_args={"img_size": 32}, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"].pop("num_classes", None)
    config["model_args"] |= {"num_classes": 7} if with_classes else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = create(f"local-dir:{tmp_path}", None, pretrained=True)
    parsed = config["pretrained_cfg"], config["architecture"], config["model_args"]
    monkeypatch.setattr(timm.models, "load_model_config_from_hf", lambda name: parsed)
    architecture, arguments = origin(f"{place}:{tmp_path}", {})
    assert architecture == SMALL and "num_classes" not in arguments
    again = rebuild(architecture, arguments)
    again.load_state_dict(made.state_dict())  # strict: no classifier, and the same places
    assert torch.equal(again.blocks[0].attn.qkv.weight, network.blocks[0].attn.qkv.weight)


class Evil:
    def __reduce__(self):
        return (open, ("pwned", "w"))


@pytest.mark.parametrize("kind", ["other network", "no weights", "garbage", "truncated", "pickle", "nan", "not a dict"])
def test_a_wrong_file_is_an_error_never_a_random_backbone(tmp_path, monkeypatch, checkpoint, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ("w.safetensors" if kind == "truncated" else "w.pth")
    if kind == "other network":
        torch.save(timm.create_model("resnet18").state_dict(), path)
    elif kind == "no weights":
        torch.save({"epoch": 1}, path)
    elif kind == "garbage":
        path.write_bytes(b"not a checkpoint")
    elif kind == "truncated":
        save_file(checkpoint, path)
        path.write_bytes(path.read_bytes()[:5000])
    elif kind == "pickle":
        torch.save({"model": Evil()}, path)
    elif kind == "nan":
        torch.save({**checkpoint, "cls_token": checkpoint["cls_token"] * float("nan")}, path)
    else:
        torch.save([1, 2], path)
    with pytest.raises(PassloraError, match=r"w\.(pth|safetensors)") as caught:
        make_backbone(ModelConfig(model_name_or_path=str(path), model_architecture=ARCH))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model_name_or_path": "deit_smal_patch16_224"}, "did you mean 'deit_small_patch16_224'"),
        (
            {"model_name_or_path": "missing.pth", "model_architecture": ARCH},
            "no checkpoint file at missing.pth",
        ),
        ({"lora_target_modules": "query"}, "matches no layer"),
        ({"lora_target_modules": r".*proj"}, "patch embedding"),
        ({"image_size": 32}, "takes 64 px"),
        ({"model_name_or_path": "resnet18", "pretrained": False}, "matches no layer"),
        ({"model_name_or_path": "deit_tiny_patch16_224.fb_in1k"}, "could not be loaded"),
        ({"model_name_or_path": "timm/no_such_model"}, "could not be loaded"),
    ],
)
def test_bad_names_are_explained(options, says):
    with pytest.raises(PassloraError) as caught:
        make_backbone(ModelConfig(**options))
    assert says in str(caught.value)
