"""All knobs together: one flat namespace in recipes and on the command line, groups by concern here."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from passlora.config.data import DataConfig, ReadingSettings, ScenarioConfig
from passlora.config.method import ROTATED_INFERENCE, MethodConfig, MethodSettings
from passlora.config.model import ModelConfig, ModelSettings
from passlora.config.presets import DEFAULT_PRESET, PRESETS
from passlora.config.registry import check_name
from passlora.config.training import TrainingConfig, TrainingSettings
from passlora.config.values import coerce, describe
from passlora.errors import PassloraError, nearest

GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "scenario": ScenarioConfig,
    "method": MethodConfig,
    "training": TrainingConfig,
}
HUB = ("push_to_hub", "hub_model_id", "hub_private_repo")


class NewModelSettings(ModelSettings, MethodSettings, ReadingSettings, TrainingSettings, total=False):
    """What a new model can be given."""


class LessonSettings(ReadingSettings, TrainingSettings, total=False):
    """What a lesson of a model that is there can be given."""

    model_name_or_path: str  # where the backbone lies, if it came from a file


@dataclass(frozen=True)
class Knob:
    group: str
    type: Any
    default: Any
    help: str


def _fields() -> dict[str, Knob]:
    knobs = {}
    for group, kind in GROUPS.items():
        hints = typing.get_type_hints(kind, include_extras=True)
        for f in dataclasses.fields(kind):
            default = f.default
            if f.default_factory is not dataclasses.MISSING:
                default = f.default_factory()
            knobs[f.name] = Knob(group, hints[f.name], default, f.metadata["help"])
    return knobs


FIELDS: dict[str, Knob] = _fields()


@dataclass
class Config:
    """The whole configuration. `Config.make(**flat_keys)` builds one, `flat()` writes it back."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    scenario: ScenarioConfig = field(default_factory=ScenarioConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    given: dict[str, Any] = field(default_factory=dict, repr=False)  # what was asked for, before defaults and preset
    from_stored: bool = field(default=False, repr=False)  # made by from_settings: the preset is only a label

    @classmethod
    def make(cls, **given: Any) -> Config:
        """Precedence: defaults < preset < `given`. A given value that cannot have an effect is refused."""
        given = coerced(given)
        usual = preset_values(given.get("preset", DEFAULT_PRESET))
        config = cls(**in_groups({**usual, **given}), given=given)
        config.refuse_idle(given, usual)
        config.check()
        return config

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Config:
        """As `make`, for stored settings: the preset is only a label, and what is not named is a knob's own default.

        So a stored model means the same whatever its preset means later, or if the preset is not known here.
        """
        label = settings.get("preset", DEFAULT_PRESET)
        check_name("preset", label)
        given = {"preset": label, **coerced({name: value for name, value in settings.items() if name != "preset"})}
        config = cls(**in_groups(given), given=given, from_stored=True)
        config.check()
        return config

    def flat(self) -> dict[str, Any]:
        return {name: getattr(getattr(self, knob.group), name) for name, knob in FIELDS.items()}

    def differing(self) -> dict[str, Any]:
        """The preset, and what differs from the knobs' own defaults: `from_settings` reads it back."""
        return {name: v for name, v in self.flat().items() if v != FIELDS[name].default or name == "preset"}

    def replace(self, **changes: Any) -> Config:
        """The same request with other values."""
        if not self.from_stored:
            return Config.make(**{**self.given, **changes})
        config = Config.from_settings({**self.given, **changes})
        config.refuse_idle(coerced(changes), self.flat())
        return config

    def settle(self, **decided: Any) -> Config:
        """The same configuration with values that were found out rather than asked for: nothing is idle for them."""
        given = {**self.given, **decided}
        config = dataclasses.replace(self, **in_groups({**self.flat(), **decided}), given=given)
        idle = config.method.idle()
        config.given = {name: value for name, value in given.items() if name not in idle}
        return config

    def as_preset(self, preset: str) -> Config:
        """The same request under another preset: a run to compare with, which is never pushed."""
        given = self.flat() if self.from_stored else self.given
        kept = {name: value for name, value in under_preset(given, preset).items() if name not in HUB}
        return Config.make(**{**kept, "compare": []})

    def refuse_idle(self, given: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
        """Refuse given values without effect; one that would be there anyway (see `usual`) was not a choice."""
        for name, needs in self.method.idle().items():
            if name in given and given[name] != usual.get(name, FIELDS[name].default):
                raise PassloraError(f"{name} {describe(given[name])} has no effect: it needs {needs}")

    def check(self) -> None:
        """Refuse combinations that cannot work, here and in every preset to compare with."""
        self.method.check()
        if self.scenario.task_sizes is None and self.scenario.num_tasks is None:
            raise PassloraError("how many tasks? give --num_tasks (with --protocol), or --task_sizes")
        orders = self.scenario.class_order or self.scenario.class_order_seed is not None
        if self.training.class_order_seeds and orders:
            raise PassloraError("class_order_seeds chooses the order: leave out class_order and class_order_seed")
        self.model.check()
        for preset in self.training.compare:
            if preset == self.method.preset:
                raise PassloraError(f"compare: {preset} is the run itself")
            try:
                self.as_preset(preset)
            except PassloraError as error:
                raise PassloraError(f"compare {preset}: {error}") from None


def coerced(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values as their knobs' types; unknown keys are refused."""
    for name in given:
        if name not in FIELDS:
            raise PassloraError(f"unknown key {name!r}{nearest(str(name), FIELDS)}")
    return {name: coerce(name, value, FIELDS[name].type) for name, value in given.items()}


def preset_values(preset: str) -> dict[str, Any]:
    """What a preset sets; one of a plugin is checked here, when it is used."""
    return coerced(PRESETS[preset])


def in_groups(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Flat values -> the groups' dataclasses, by their names."""
    return {
        group: kind(**{f.name: flat[f.name] for f in dataclasses.fields(kind) if f.name in flat})
        for group, kind in GROUPS.items()
    }


def applicable(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` without the values that have no effect beside the others: settings written for several methods."""
    given = coerced(given)
    method = in_groups({**preset_values(given.get("preset", DEFAULT_PRESET)), **given})["method"]
    return {name: value for name, value in given.items() if name not in method.idle()}


def under_preset(given: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """A request moved to another preset: what either preset decides goes, what the user chose beside them stays.

    A resolved configuration names every switch; those with the old preset's own value were not a choice. What has no
    effect under the new preset goes as well.
    """
    given = coerced(given)
    preset = coerce("preset", preset, FIELDS["preset"].type)
    old, new = preset_values(given.get("preset", DEFAULT_PRESET)), preset_values(preset)
    kept = {k: v for k, v in given.items() if k not in new and not (k in old and old[k] == v)}
    if "classifier" not in new:  # a trained head, whatever read the features before
        kept.pop("classifier", None)
        kept.pop("adapt_tasks", None)
        if "classifier" in old:
            kept.pop("sst", None)
    if "classifier" in new:
        kept.pop("extra_inference", None)
    elif "extra_inference" in kept and not new.get("sst", True):
        kept["extra_inference"] = [mode for mode in kept["extra_inference"] if mode not in ROTATED_INFERENCE]
    return applicable({**kept, "preset": preset})
