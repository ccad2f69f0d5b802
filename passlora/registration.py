"""Makes merged models known to transformers, whichever of the two is imported first, without importing it.

transformers' auto classes learn of ours at their first `from_pretrained`: before that nothing heavy is imported, and
by then all of transformers is.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

AUTO_CLASSES = {
    "transformers.models.auto.configuration_auto": "AutoConfig",
    "transformers.models.auto.image_processing_auto": "AutoImageProcessor",
}


def watch_transformers() -> None:
    """For the auto classes that are loaded now, and those that will be."""
    for name in AUTO_CLASSES:
        if name in sys.modules:
            register_at_first_use(sys.modules[name])
    sys.meta_path.insert(0, Watcher())


def register_at_first_use(module: ModuleType) -> None:
    auto_class: Any = getattr(module, AUTO_CLASSES[module.__name__])
    original = vars(auto_class)["from_pretrained"]

    @functools.wraps(original.__func__)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        auto_class.from_pretrained = original
        try:
            from passlora.serving import register

            register()
        except (AttributeError, ImportError, TypeError) as error:  # a transformers of another time: all else works
            warnings.warn(f"passlora could not register its classes with this transformers: {error}", stacklevel=2)
        return original.__func__(cls, *args, **kwargs)

    auto_class.from_pretrained = classmethod(from_pretrained)


class Watcher(MetaPathFinder):
    """Lets the import system find a module as ever, and prepares it right after it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in AUTO_CLASSES:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = ThenPrepare(spec.loader)
        return spec


class ThenPrepare(Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        register_at_first_use(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
