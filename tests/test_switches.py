"""Which switches of the method go together."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passlora import Config, PassloraError
from passlora.config import FIELDS, NEEDS, PRESETS, applicable


def make(**flat):
    return Config.make(**{"num_tasks": 2, **flat})


FROZEN = {"preset": "slda"}
WITHOUT_EFFECT = {  # what is given, though nothing reads it
    "sst": ({**FROZEN, "sst": True}, "--adapt_tasks all, first or auto"),
    "new_loss": ({**FROZEN, "new_loss": "binary"}, "--adapt_tasks all, first or auto"),
    "temperature": ({"preset": "lwf-mc", "temperature": 0.5}, "--new_loss softmax"),
    "exact_forgetting": ({"preset": "ncm", "exact_forgetting": True}, "--classifier slda or ridge"),
    "drift": ({"preset": "fetril", "drift": "linear"}, "--adapt_tasks all"),
    "alignment": ({**FROZEN, "alignment": True}, "--classifier head"),
    "prototype_draws": ({"preset": "finetune", "prototype_draws": 4}, "--proto_aug explicit or implicit"),
    "proto_aug": ({**FROZEN, "proto_aug": "implicit"}, "--adapt_tasks all"),
    "kd_weight": ({"preset": "fetril", "kd_weight": 10.0}, "--adapt_tasks all"),
    "proto_aug_weight": ({"preset": "finetune", "proto_aug_weight": 3}, "--proto_aug explicit or implicit"),
    "radius": ({"preset": "lwf", "radius": "running"}, "--proto_aug explicit or implicit"),
    "covariance": ({**FROZEN, "covariance": "full"}, "--proto_aug explicit or implicit"),
    "prototype_views": ({"preset": "lwf-kd", "prototype_views": 4}, "--proto_aug explicit or implicit"),
    "hardness": ({"preset": "lwf", "hardness": True}, "--proto_aug explicit or implicit"),
    "gamma": ({"gamma": 2}, "--proto_aug implicit"),
    "hard_mixing": ({"preset": "pass", "hard_mixing": 0.5}, "--hardness true"),
    "hard_label": ({"hardness": False, "hard_label": "soft"}, "--hardness true"),
    "kd_on": ({"preset": "finetune", "kd_on": "logits"}, "a --kd_weight above 0"),
    "kd_reduction": ({"preset": "lwf", "kd_reduction": "batch"}, "--kd_on features"),
    "prototype_augmented": ({"preset": "ncm", "prototype_augmented": True}, "--classifier head"),
    "ncm_metric": ({**FROZEN, "ncm_metric": "euclidean"}, "--classifier ncm"),
    "shrinkage": ({"preset": "ncm", "shrinkage": "error"}, "--classifier slda"),
    "classifier_views": ({"preset": "ncm", "classifier_views": 4}, "a --classifier that is fitted on sums"),
    "lift": ({"lift": "relu"}, "a --classifier that is fitted on sums"),
    "lift_width": ({**FROZEN, "lift_width": 100}, "a --lift"),
}


@pytest.mark.parametrize("name", [name for names, _, _ in NEEDS for name in names])
def test_a_switch_without_effect_is_refused(name):
    flat, needs = WITHOUT_EFFECT[name]
    with pytest.raises(PassloraError, match=f"^{name} .* has no effect: it needs .*{needs}"):
        make(**flat)
    assert name not in applicable(flat)
    usual = PRESETS[flat.get("preset", "pass++")].get(name, FIELDS[name].default)
    make(**{**flat, name: usual})  # a resolved configuration names it too


def test_switches_that_do_go_together():
    assert make(kd_on="logits").method.proto_aug == "explicit", "the loss on old classes goes with any distillation"
    assert make(preset="lwf-mc", kd_weight=0).method.new_loss == "binary"
    assert make(preset="simplecil", ncm_metric="euclidean", temperature=0.5).method.adapt_tasks == "first"
    spelt_out = {"sst": False, "inference": "single", "prototype_views": 1, "proto_aug": "none", "hardness": False}
    assert make(classifier="slda", adapt_tasks="none", kd_weight=0, **spelt_out).method.kd_weight == 0


METHOD = {name: knob for name, knob in FIELDS.items() if knob.group == "method" and name != "extra_inference"}
CHOICES = {
    "preset": list(PRESETS),
    "classifier": ["head", "ncm", "slda", "ridge", "fecam", "fetril", "anacp", "rgda", "probe"],
    "lift_width": [100, 2000],
    "prototype_draws": [1, 4],
    **{name: [True, False] for name, knob in METHOD.items() if knob.type is bool},
    **{name: [0.0, 0.5, 1.0] for name, knob in METHOD.items() if knob.type is float and name != "temperature"},
    "temperature": [0.5, 1.0],
    **{name: typing.get_args(k.type) for name, k in METHOD.items() if typing.get_origin(k.type) is typing.Literal},
}


@settings(max_examples=500, deadline=None)
@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in CHOICES.items()}))
def test_what_has_no_effect_can_always_be_left_out(flat):
    """No circle: where the switches do not contradict each other, they still do not without the idle ones."""
    assert set(CHOICES) == set(METHOD)
    try:
        Config.from_settings({"num_tasks": 1, **PRESETS[flat.get("preset", "pass++")], **flat})
    except PassloraError:
        return
    config = make(**applicable(flat))
    assert Config.make(**config.flat()).flat() == config.flat(), "a resolved configuration loads"
