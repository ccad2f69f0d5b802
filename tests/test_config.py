from __future__ import annotations

import subprocess
import sys
import typing
from pathlib import Path

import pytest
import yaml

from passlora import Config, PassloraError
from passlora.config import (
    DEFAULT_RECIPE,
    FIELDS,
    PRESETS,
    MethodSettings,
    ModelSettings,
    NewModelSettings,
    ReadingSettings,
    TrainingSettings,
    load,
)
from passlora.folder.manifest import SETTINGS

RECIPES = sorted(p for p in (Path(__file__).parent.parent / "recipes").glob("*/*.yaml") if "accelerate" not in str(p))


def make(**flat):
    return Config.make(**{"num_tasks": 2, **flat})


def test_defaults_are_the_settled_ones():
    method = make().method
    assert (method.proto_aug_weight, method.kd_weight, method.hard_mixing) == (10, 10, 0.7)
    assert (method.temperature, method.kd_reduction, method.inference) == (1.0, "mean", "multiview")
    assert make().model.lora_r == 4 and make().training.learning_rate == 0.005


def test_precedence_defaults_preset_recipe_command_line(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("preset: pass\nnum_tasks: 2\nkd_weight: 3\nlearning_rate: 5e-4\n")
    config = load(str(recipe), {"kd_weight": "7"})
    assert config.method.hardness is False, "the preset wins over the default"
    assert config.method.kd_weight == 7, "the command line wins over the recipe"
    assert config.training.learning_rate == 5e-4, "YAML reads 5e-4 as text"
    assert load(str(recipe), {"hardness": "true"}).method.hardness is True, "a flag wins over the preset"


FITTED = (
    "ncm",
    "slda",
    "simplecil",
    "fetril",
    "fecam",
    "acil",
    "ranpac",
    "klda",
    "layup",
    "anacp",
    "rgda",
    "joint-probe",
    "passlora",
)  # on features, not trained


@pytest.mark.parametrize("preset", list(PRESETS))
def test_presets_are_valid(preset):
    method = make(preset=preset).method
    assert method.sst == (preset in ("pass", "pass++", "passlora"))
    assert (method.kd_weight > 0) == (preset in ("pass", "pass++", "lwf-kd", "lwf", "lwf-mc", "sldc"))
    assert (method.classifier == "head") == (preset not in FITTED)
    assert (method.proto_aug != "none") == (preset in ("pass", "pass++"))
    assert method.hardness == (preset == "pass++")
    assert method.prototype_views == (4 if preset == "pass++" else 1)


def test_a_compared_preset_decides_its_own_switches_and_keeps_the_budget():
    config = make(preset="pass++", num_train_epochs=3, proto_aug="implicit", kd_weight=4, compare=["pass", "finetune"])
    other = config.as_preset("pass")
    assert other.training.num_train_epochs == 3 and other.method.kd_weight == 4
    assert other.method.proto_aug == "implicit" and not other.method.hardness and other.training.compare == []
    plain = config.as_preset("finetune").method
    assert (plain.kd_weight, plain.proto_aug, plain.sst) == (0, "none", False)
    assert make(covariance="diag", compare=["pass"]).as_preset("pass").method.covariance == "diag"
    assert make(covariance="diag").as_preset("finetune").method.covariance == "radius", "without effect there"


def test_presets_of_a_head_and_of_sums_beside_each_other():
    """The budget is the run's; what makes a classifier is its preset's."""
    budget = {"num_train_epochs": 20, "learning_rate": 0.01, "keep_tasks": "last"}
    sums = make(**budget).as_preset("passlora")
    assert sums.method.classifier == "slda" and sums.training.learning_rate == 0.01
    assert (sums.training.num_train_epochs, sums.training.keep_tasks) == (20, "last")
    frozen = make(preset="passlora", adapt_tasks="none", lift="relu", compare=["pass++"])
    assert frozen.as_preset("pass++").method == make().method


def test_what_is_compared_is_checked_at_the_start():
    with pytest.raises(PassloraError, match=r"^compare pass\+\+: inference multiview needs rotations"):
        make(preset="pass", sst=False, compare=["finetune", "pass++"])


def test_a_compared_run_is_never_pushed():
    config = make(push_to_hub=True, hub_model_id="ann/x", hub_private_repo=True, compare=["slda", "finetune"])
    for preset in config.training.compare:
        other = config.as_preset(preset).training
        assert (other.push_to_hub, other.hub_model_id, other.hub_private_repo) == (False, None, False)
    assert make(preset="slda", push_to_hub=True, hub_model_id="ann/x").training.push_to_hub, "every preset is a model"


@pytest.mark.parametrize("old", list(PRESETS))
@pytest.mark.parametrize("new", list(PRESETS))
def test_a_preset_on_the_command_line_wins_over_a_resolved_config(tmp_path, old, new):
    """config.yaml names every switch; --preset must still mean that preset, alone and as a comparison."""
    path = tmp_path / "config.yaml"
    own = {preset: switches.get("kd_weight") for preset, switches in PRESETS.items()}
    path.write_text(yaml.safe_dump(make(preset=old, kd_weight=4.0 if own[old] is None else own[old]).flat()))
    got = load(str(path), {"preset": new}).method
    kept = 4.0 if own[old] is None else 10.0  # what was chosen beside the old preset, or the default
    expected = make(preset=new, kd_weight=kept if own[new] is None else own[new]).method
    assert got == expected
    if old != new:
        assert load(str(path), {}).as_preset(new).method == expected


def test_a_recipes_inference_modes_fit_the_preset_of_the_command_line(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("num_tasks: 2\nextra_inference: [single, vanilla, nearest_prototype]\n")
    assert load(str(path), {"preset": "finetune"}).method.inference_modes == ["single", "nearest_prototype"]
    assert load(str(path), {"preset": "pass"}).method.inference_modes == ["single", "vanilla", "nearest_prototype"]


def test_none_unsets_what_a_recipe_sets():
    recipe = str(Path(__file__).parent.parent / "recipes/mini/digits.yaml")
    config = load(recipe, {"task_sizes": ["none"], "num_tasks": "5", "compare": ["none"]})
    assert config.scenario.task_sizes is None and config.training.compare == []


def test_a_resolved_config_reads_back_as_itself(tmp_path):
    config = make(preset="pass", seeds=[1, 2], lr_milestones=[2], image_size=64)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.flat()))
    assert load(str(path), {}).flat() == config.flat()


@pytest.mark.parametrize(
    ("flat", "says"),
    [
        ({"learning_rat": 1}, "did you mean 'learning_rate'"),
        ({"lora_r": "four"}, "lora_r must be a whole number, got 'four'"),
        ({"lora_r": 2.5}, "lora_r must be a whole number"),
        ({"lora_r": True}, "lora_r must be a whole number"),
        ({"learning_rate": "nan"}, "learning_rate must be a number"),
        ({"learning_rate": "inf"}, "learning_rate must be a number"),
        ({"learning_rate": -1}, "above 0"),
        ({"sst": "maybe"}, "true or false"),
        ({"preset": "pas"}, "did you mean 'pass'"),
        ({"inference": "multi"}, "one of multiview, single, vanilla, nearest_prototype"),
        ({"prototype_views": 2}, "one of 1, 4"),
        ({"task_sizes": ["a"], "num_tasks": None}, "whole number"),
        ({"dataset_name": 3}, "must be text"),
        ({"num_tasks": None}, "how many tasks"),
        ({"sst": False}, "set --inference single"),
        ({"sst": False, "inference": "single"}, "--prototype_views 1"),
        ({"proto_aug": "none"}, "set --hardness false"),
        ({"model_name_or_path": "x.pth"}, "--model_architecture"),
        ({"model_architecture": "deit_small_patch16_224"}, "local checkpoint file"),
        ({"model_name_or_path": "passlora/resnet18"}, "--lora_r 0"),
        ({"model_name_or_path": "passlora/resnet18", "lora_r": 0}, "--pretrained false"),
        ({"lora_target_modules": "("}, "not a valid regex"),
        ({"seeds": [1, 1]}, "each one once"),
        ({"seeds": [1], "class_order_seeds": [2]}, "not both"),
        ({"class_order_seeds": [2], "class_order_seed": 1}, "leave out"),
        ({"compare": ["pass++"]}, "is the run itself"),
        ({"compare": ["ewc"]}, "one of"),
        ({"compare": ["pass", "pass"]}, "each one once"),
        ({"class_order_seed": -1}, "between 0"),
        ({"lora_r": float("inf")}, "whole number"),
        ({"learning_rate": 10**400}, "must be a number"),
        ({"hard_mixing": 1.5}, "between 0 and 1"),
        ({"gradient_accumulation_steps": 0}, "at least 1"),
        ({"test_fraction": 0}, "between 0 and 1"),
        ({"seed": -1}, "between 0"),
        ({"inference": "ncm"}, "inference ncm is called nearest_prototype since 0.2"),
        ({"extra_inference": ["single", "ncm"]}, "extra_inference ncm is called nearest_prototype since 0.2"),
        ({"classifier": "slda"}, "start from its --preset, or set --proto_aug none"),
        ({"classifier": "slad"}, "did you mean 'slda'"),
        ({"preset": ["pass"]}, "preset must be one of pass++, pass"),
        ({"preset": "slda", "sst": True}, "sst true has no effect"),
        ({"preset": "slda", "extra_inference": ["nearest_prototype"]}, "classifier slda has one way to answer"),
        ({"new_loss": "binary"}, "set --proto_aug none"),
        ({"preset": "lwf-kd", "new_loss": "binary"}, "set --kd_on logits, or --kd_weight 0"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(flat, says):
    with pytest.raises(PassloraError) as caught:
        make(**flat)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", "'key: value' lines"),
        ("a: [", "cannot be read as YAML"),
        ("", "'key: value' lines"),
        ("1: 2", "'key"),
    ],
)
def test_recipes_that_are_not_recipes(tmp_path, text, says):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(PassloraError, match=says):
        load(str(path), {})
    with pytest.raises(PassloraError, match="no recipe at"):
        load(str(tmp_path / "missing.yaml"), {})


@pytest.mark.parametrize("value", ["null", "none", "~"])
def test_a_configuration_of_an_older_version_names_a_knob_that_is_gone(tmp_path, value):
    path = tmp_path / "config.yaml"
    path.write_text(f"num_tasks: 2\ntorch_compile_backend: {value}\n")
    assert load(str(path), {}).flat() == make().flat()


def test_a_knob_that_is_gone_and_did_something(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("num_tasks: 2\ntorch_compile_backend: inductor\n")
    with pytest.raises(PassloraError, match=r"torch_compile_backend is gone since 0\.2: leave it out"):
        load(str(path), {})


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_recipes_are_valid_and_say_how_to_start_them(path):
    config = load(str(path), {})
    assert config.given
    header = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
    assert f"--config recipes/{path.parent.name}/{path.name}" in header


def test_the_recipes_asked_for_exist():
    names = {f"{p.parent.name}/{p.stem}" for p in RECIPES}
    assert names >= {"deit_s16_lora/cifar100_t10", "mini/digits", "mini/cifar100_t10"}
    assert names >= {f"deit_s16_lora/tinyimagenet_t{t}" for t in (5, 10)}
    scratch = ("cifar100", "tinyimagenet", "imagenet_subset")
    assert names >= {f"resnet18_scratch/{data}_t{t}" for data in scratch for t in (5, 10, 20, 25)}
    assert names >= {f"resnet18_scratch/{data}_equal_t5" for data in scratch}
    assert names >= {f"resnet18_scratch/imagenet_full_t{t}" for t in (10, 25)}


def test_the_embedded_default_is_the_digits_recipe():
    path = Path(__file__).parent.parent / "recipes/mini/digits.yaml"
    assert load(None, {}).flat() == load(str(path), {}).flat() == Config.make(**DEFAULT_RECIPE).flat()
    assert load(None, {}).training.compare == ["passlora", "finetune"]
    assert load(None, {"preset": "finetune"}).training.compare == ["passlora"], "no run beside itself"
    assert load(str(path), {"preset": "passlora"}).training.compare == ["finetune"]
    assert load(None, {"num_tasks": "5"}).scenario.task_sizes is None


def test_every_knob_has_help():
    assert all(knob.help and not knob.help.endswith(".") for knob in FIELDS.values())


@pytest.mark.parametrize("pattern", [r"((([a-z]+)+)+)+!", r".*.*.*.*.*x", r"(a|b){50}"])
def test_a_pattern_that_could_take_for_ever(pattern):
    with pytest.raises(PassloraError, match="too complicated"):
        Config.make(num_tasks=1, lora_target_modules=pattern)


def test_nothing_heavy_is_imported():
    code = "import sys, passlora.config; print({'torch', 'numpy', 'timm', 'yaml', 'peft'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# --- stored settings ---------------------------------------------------------------------------------------------

# A stored model names only what differs from these values. Changing one changes what stored models mean: it needs a
# new format_version, and a reader that still knows the old value.
PINNED = {
    "model_name_or_path": "passlora/vit-mini",
    "model_architecture": None,
    "pretrained": True,
    "image_size": None,
    "feature_dim": None,
    "feature_blocks": 1,
    "lora_r": 4,
    "lora_alpha": None,
    "lora_target_modules": "qkv",
    "preset": "pass++",
    "sst": True,
    "temperature": 1.0,
    "proto_aug": "explicit",
    "proto_aug_weight": 10.0,
    "prototype_draws": 1,
    "prototype_views": 4,
    "prototype_augmented": False,
    "radius": "first",
    "covariance": "radius",
    "gamma": 1.0,
    "hardness": True,
    "hard_mixing": 0.7,
    "hard_label": "hard",
    "kd_weight": 10.0,
    "kd_on": "features",
    "new_loss": "softmax",
    "drift": "none",
    "alignment": False,
    "classifier": "head",
    "ncm_metric": "cosine",
    "classifier_views": 1,
    "lift": "none",
    "lift_width": 2000,
    "shrinkage": "oas",
    "exact_forgetting": False,
    "adapt_tasks": "all",
    "kd_reduction": "mean",
    "inference": "multiview",
    "extra_inference": [],
    "crop_padding": 4,
    "horizontal_flip": True,
    "brightness": 63 / 255,
    "rrc_min_scale": 0.08,
    "num_train_epochs": 10,
    "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0.005,
    "lr_later_tasks": 1.0,
    "weight_decay": 0.0,
    "lr_scheduler_type": "multistep",
    "lr_milestones": [6],
    "lr_decay": 0.1,
    "keep_tasks": "all",
    "seed": 0,
}


def test_the_defaults_that_stored_models_rely_on():
    assert {name: FIELDS[name].default for name in SETTINGS} == PINNED


@pytest.mark.parametrize("preset", list(PRESETS))
def test_stored_settings_read_back_whatever_the_preset_means_later(preset, monkeypatch):
    config = make(preset=preset, seeds=[1, 2], lora_r=2, compare=["lwf-kd" if preset != "lwf-kd" else "pass"])
    stored = config.differing()
    assert stored["preset"] == preset and stored["lora_r"] == 2 and "learning_rate" not in stored
    assert Config.from_settings(stored).flat() == config.flat()
    monkeypatch.setitem(PRESETS, preset, {"kd_weight": 77.0})
    assert Config.from_settings(stored).flat() == config.flat()
    assert Config.from_settings(config.flat()).flat() == config.flat(), "as 0.1 wrote them: every key"


def test_stored_settings_under_a_preset_that_is_not_known_here():
    stored = make(preset="lwf").differing() | {"preset": "annas-method"}
    config = Config.from_settings(stored)
    assert config.method.preset == "annas-method" and config.method.kd_on == "logits"
    changed = config.replace(learning_rate=0.1)
    assert changed.training.learning_rate == 0.1 and changed.method == config.method
    with pytest.raises(PassloraError, match="gamma 3 has no effect"):
        config.replace(gamma=3)
    with pytest.raises(PassloraError, match="is no name"):
        Config.from_settings({**stored, "preset": "../up"})
    with pytest.raises(PassloraError, match=r"classifier must be one of head.*or a name that an installed plugin adds"):
        Config.from_settings({**stored, "classifier": "annas-classifier"})


def test_stored_settings_may_hold_a_value_without_effect():
    """0.1 let them pass, and a model must stay readable."""
    assert Config.from_settings({"num_tasks": 1, "gamma": 3.0}).method.gamma == 3


# --- for editors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "kind", "left_out"),
    [
        ("model", ModelSettings, set()),
        ("method", MethodSettings, set()),
        ("data", ReadingSettings, {"dataset_name"}),
        ("training", TrainingSettings, set()),
    ],
)
def test_typed_settings_are_the_knobs(group, kind, left_out):
    knobs = {name: knob.type for name, knob in FIELDS.items() if knob.group == group and name not in left_out}
    assert typing.get_type_hints(kind, include_extras=True) == knobs
    assert kind.__required_keys__ == frozenset()
    assert typing.get_type_hints(NewModelSettings, include_extras=True).items() >= knobs.items()
