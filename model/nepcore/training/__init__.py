"""Training of NEP models by gradients.

    >>> from nepcore.files import xyz
    >>> from nepcore.training import Settings, train
    >>> models = train(Settings(("Pb", "Te"), epochs=100), xyz.read("train.xyz"), directory="out")

Importing this package does not import torch; :func:`train` and :class:`Training` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .progress import Errors, Progress, RunDirectory
from .settings import Settings, SettingsError, Stage

if TYPE_CHECKING:
    from .checkpoint import CheckpointError
    from .preparation import TrainingError
    from .training import Models, Training, train

_LATER = {
    "CheckpointError": "checkpoint",
    "Models": "training",
    "Training": "training",
    "TrainingError": "preparation",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CheckpointError",
    "Errors",
    "Models",
    "Progress",
    "RunDirectory",
    "Settings",
    "SettingsError",
    "Stage",
    "Training",
    "TrainingError",
    "train",
]
