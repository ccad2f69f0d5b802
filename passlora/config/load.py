"""Reading recipes, and writing settings without telling where local data lies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from passlora.config.config import Config, under_preset
from passlora.config.presets import DEFAULT_RECIPE
from passlora.config.recipes import find_recipe
from passlora.errors import PassloraError

LOCAL_DATA = "local:"  # how a saved configuration names data that lay on the machine it ran on
# Knobs that are gone, with the value that meant what is done now: the config.yaml of an old run names them all.
REMOVED = {"torch_compile_backend": None}


def load(path: str | None, overrides: Mapping[str, Any]) -> Config:
    """A recipe with the command line on top; without recipe and dataset, the embedded default run."""
    if path is not None:
        base = read_yaml(path)
        if "preset" in overrides:
            base = under_preset(base, overrides["preset"])
    elif "dataset_name" in overrides:
        base = {}
    else:
        base = dict(DEFAULT_RECIPE)
        if "num_tasks" in overrides or "base_classes" in overrides:
            base.pop("task_sizes")  # the command line chose another split
    if base.get("compare"):  # no run beside itself
        base["compare"] = [preset for preset in base["compare"] if preset != overrides.get("preset")]
    return Config.make(**{**base, **overrides})


def read_yaml(path: str) -> dict[str, Any]:
    """The keys and values of a recipe, or of a run's config.yaml."""
    import yaml

    file = Path(path) if Path(path).exists() or Path(path).is_absolute() else find_recipe(path)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PassloraError(f"no recipe at {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PassloraError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise PassloraError(f"{path} must hold 'key: value' lines, such as 'dataset_name: digits'")
    for name in REMOVED.keys() & content.keys():
        value = content.pop(name)
        if value != REMOVED[name] and value != "none":
            raise PassloraError(f"{path}: {name} is gone since 0.2: leave it out")
    return content


def is_local(dataset_name: str) -> bool:
    """Whether the data lies in a file or folder here, rather than on the Hub or in the package."""
    return dataset_name != "digits" and (dataset_name.startswith((".", "/", "~")) or Path(dataset_name).exists())


def without_data_path(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Settings fit to lie in a model's folder: of local data a fingerprint of its path, which tells that it changed."""
    name = flat["dataset_name"]
    if not is_local(name):
        return dict(flat)
    path = str(Path(name).expanduser().resolve())
    return {**flat, "dataset_name": f"{LOCAL_DATA}{hashlib.sha256(path.encode()).hexdigest()[:12]}"}
