"""Training of NEP models by gradients."""

from __future__ import annotations

from .progress import Errors, Progress, RunDirectory
from .settings import Settings, SettingsError, Stage

__all__ = ["Errors", "Progress", "RunDirectory", "Settings", "SettingsError", "Stage"]
