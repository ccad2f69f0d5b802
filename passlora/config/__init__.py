"""Every knob with its help, presets, YAML and command line; nothing heavy is imported."""

from passlora.config.config import (
    FIELDS,
    GROUPS,
    Config,
    Knob,
    LessonSettings,
    NewModelSettings,
    applicable,
    under_preset,
)
from passlora.config.data import DataConfig, ReadingSettings, ScenarioConfig
from passlora.config.load import LOCAL_DATA, is_local, load, read_yaml, without_data_path
from passlora.config.method import NEEDS, NUM_ROTATIONS, ROTATED_INFERENCE, MethodConfig, MethodSettings
from passlora.config.model import ModelConfig, ModelSettings
from passlora.config.presets import (
    DEFAULT_RECIPE,
    LEARN_PRESET,
    LEARN_SUMS,
    PRESETS,
    for_learning,
    register_preset,
)
from passlora.config.registry import CLASSIFIERS, load_plugins, register_classifier_name
from passlora.config.training import TrainingConfig, TrainingSettings
from passlora.config.values import describe, hub_id, is_list, is_repo_id, type_name

__all__ = [
    "CLASSIFIERS",
    "DEFAULT_RECIPE",
    "FIELDS",
    "GROUPS",
    "LEARN_PRESET",
    "LEARN_SUMS",
    "LOCAL_DATA",
    "NEEDS",
    "NUM_ROTATIONS",
    "PRESETS",
    "ROTATED_INFERENCE",
    "Config",
    "DataConfig",
    "Knob",
    "LessonSettings",
    "MethodConfig",
    "MethodSettings",
    "ModelConfig",
    "ModelSettings",
    "NewModelSettings",
    "ReadingSettings",
    "ScenarioConfig",
    "TrainingConfig",
    "TrainingSettings",
    "applicable",
    "describe",
    "for_learning",
    "hub_id",
    "is_list",
    "is_local",
    "is_repo_id",
    "load",
    "load_plugins",
    "read_yaml",
    "register_classifier_name",
    "register_preset",
    "type_name",
    "under_preset",
    "without_data_path",
]
