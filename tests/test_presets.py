"""Presets and classifiers of a user's own package."""

from __future__ import annotations

import sys

import pytest

from passlora import Config, PassloraError
from passlora.cli.main import main
from passlora.config import CLASSIFIERS, FIELDS, PRESETS, register_classifier_name, register_preset, registry, type_name

PLUGIN = """
from passlora.config import register_classifier_name, register_preset
register_classifier_name("annas-means")
register_preset("annas", {"classifier": "annas-means", "adapt_tasks": "none", "sst": False, "inference": "single",
                          "prototype_views": 1, "proto_aug": "none", "hardness": False, "kd_weight": "0"})
"""


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Nothing that a test registers stays, and plugins are looked for anew."""
    presets, classifiers = dict(PRESETS), list(CLASSIFIERS)
    registry.load_plugins.cache_clear()
    yield
    PRESETS.clear(), PRESETS.update(presets)
    CLASSIFIERS[:] = classifiers
    registry.load_plugins.cache_clear()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A package with an entry point, as pip would leave it."""

    def make(package, module, code):
        (tmp_path / f"{module}.py").write_text(code)
        about = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[passlora.plugins]\n{module} = {module}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return make


def test_a_plugin_is_looked_for_when_its_name_is_asked_for(install):
    install("annas-plugin", "annas_plugin", PLUGIN)
    Config.make(num_tasks=1)
    assert "annas" not in PRESETS, "nobody asked"
    config = Config.make(num_tasks=1, preset="annas")
    assert config.method.classifier == "annas-means" and config.method.kd_weight == 0.0
    assert Config.make(num_tasks=1, compare=["annas"]).as_preset("annas").method == config.method
    assert Config.from_settings(config.differing()).flat() == config.flat()


def test_a_plugins_classifier_under_a_preset_of_ours(install):
    install("annas-plugin", "annas_plugin", PLUGIN)
    config = Config.make(num_tasks=1, preset="slda", classifier="annas-means")
    assert config.method.classifier == "annas-means"


def test_a_plugins_preset_in_a_comparison_and_on_the_command_line(install, tmp_path, capsys):
    install("annas-plugin", "annas_plugin", PLUGIN)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("num_tasks: 2\nextra_inference: [vanilla]\n")
    main(["validate", str(recipe), "--preset", "annas", "--compare", "slda"])
    out = capsys.readouterr().out
    assert "preset: annas" in out and "compare: slda" in out and "is valid" in out


def test_a_plugin_that_cannot_be_imported_is_named(install, monkeypatch):
    monkeypatch.setattr(sys, "bobs_attempts", 0, raising=False)
    install("bobs-plugin", "bobs_plugin", "import sys\nsys.bobs_attempts += 1\nimport a_package_that\n")
    for _ in range(2):
        with pytest.raises(PassloraError) as caught:
            Config.make(num_tasks=1, preset="bobs")
        assert "plugin bobs_plugin of the package bobs-plugin cannot be imported" in str(caught.value)
        assert "a_package_that" in str(caught.value) and "\n" not in str(caught.value)
    assert sys.bobs_attempts == 1, "plugins are imported once"


def test_a_broken_plugin_stops_no_other(install):
    install("bobs-plugin", "bobs_plugin", "import a_package_that\n")
    install("annas-plugin", "annas_plugin", PLUGIN)
    assert Config.make(num_tasks=1, preset="annas").method.preset == "annas"
    with pytest.raises(PassloraError, match=r"passlora, annas, or.*did you mean 'annas'"):
        Config.make(num_tasks=1, preset="anna")


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("pass", {}, "preset pass is taken"),
        ("mine", {"kd_wieght": 1}, "'kd_wieght' is no knob.*did you mean 'kd_weight'"),
        ("mine", {"preset": "pass"}, "'preset' is no knob that a preset can set"),
        ("../mine", {}, "is no name"),
        ("", {}, "is no name"),
    ],
)
def test_presets_that_cannot_be_registered(name, settings, says):
    with pytest.raises(PassloraError, match=says):
        register_preset(name, settings)
    assert "mine" not in PRESETS


def test_a_preset_of_a_script():
    settings = {"proto_aug": "implicit", "gamma": 0.5, "learning_rate": "1e-3"}
    register_preset("mine", settings)
    settings["gamma"] = 9
    config = Config.make(num_tasks=1, preset="mine")
    assert (config.method.gamma, config.training.learning_rate) == (0.5, 0.001)
    register_preset("wrong", {"gamma": "much"})
    with pytest.raises(PassloraError, match="gamma must be a number"):
        Config.make(num_tasks=1, preset="wrong")


def test_help_and_errors_list_the_names():
    assert type_name(FIELDS["classifier"].type) == "head|ncm|slda|ridge|fecam|fetril|anacp|rgda|probe"
    assert type_name(FIELDS["preset"].type).startswith("pass++|pass|lwf-kd|")
    register_classifier_name("mine")
    register_classifier_name("mine")
    assert CLASSIFIERS.count("mine") == 1
    with pytest.raises(
        PassloraError,
        match="rgda, probe, mine, or a name that an installed plugin adds",
    ):
        Config.make(num_tasks=1, classifier="nothing")
    with pytest.raises(PassloraError, match="is no name"):
        register_classifier_name("a/b")
