"""passlora: a pretrained vision model keeps learning new classes, without keeping any old image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import Config
from .config import load as load_config
from .errors import PassloraError
from .registration import watch_transformers

if TYPE_CHECKING:
    from .learner import Learner
    from .model import PassLora
    from .run import train

__version__ = "0.1.0"
__all__ = ["Config", "Learner", "PassLora", "PassloraError", "__version__", "load_config", "train"]


watch_transformers()  # after `import passlora`, transformers' auto classes and pipelines know merged models


def __getattr__(name: str) -> Any:
    """torch is imported with the first name that needs it."""
    if name == "train":
        from .run import train

        return train
    if name == "PassLora":
        from .model import PassLora

        return PassLora
    if name == "Learner":
        from .learner import Learner

        return Learner
    raise AttributeError(f"module 'passlora' has no attribute {name!r}")
