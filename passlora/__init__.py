"""passlora: a pretrained vision model keeps learning new classes, without keeping any old image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from passlora.config import Config
from passlora.config import load as load_config
from passlora.errors import PassloraError

if TYPE_CHECKING:
    from passlora.model.passlora import PassLora
    from passlora.runs.run import train
    from passlora.training.callbacks import Callback
    from passlora.training.learner import Learner

__version__ = "0.2.0.dev0"
__all__ = ["Callback", "Config", "Learner", "PassLora", "PassloraError", "__version__", "load_config", "train"]


def __getattr__(name: str) -> Any:
    """torch is imported with the first name that needs it."""
    if name == "train":
        from passlora.runs.run import train

        return train
    if name == "PassLora":
        from passlora.model.passlora import PassLora

        return PassLora
    if name == "Callback":
        from passlora.training.callbacks import Callback

        return Callback
    if name == "Learner":
        from passlora.training.learner import Learner

        return Learner
    raise AttributeError(f"module 'passlora' has no attribute {name!r}")
