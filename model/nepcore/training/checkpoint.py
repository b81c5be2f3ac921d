"""Checkpoints: tensors and JSON, read without running any code; a torn one is noticed, and the one before is used."""

from __future__ import annotations

import json
import logging
import os
import pickle
from typing import TYPE_CHECKING, Any

import torch

from nepcore.errors import NepError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

logger = logging.getLogger("nepcore")

KIND = "nep-training"
VERSION = 1


class CheckpointError(NepError):
    """A checkpoint that cannot be used.

    Attributes:
        path: The file.
        reason: Why.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = str(path)
        self.reason = reason
        super().__init__(f"{path}: {reason}")

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.path, self.reason)


def save(path: Path, previous: Path, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Write a checkpoint; the one that stood there becomes ``previous``. Readers never see half of one."""
    host = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    text = json.dumps({"kind": KIND, "version": VERSION, **values})
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with draft.open("wb") as file:
            torch.save({"values": text, "tensors": host}, file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            path.replace(previous)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint.

    Raises:
        CheckpointError: It cannot be read, is damaged, or holds anything but tensors and text.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        values = json.loads(content["values"])
        tensors = dict(content["tensors"])
    except FileNotFoundError as error:
        raise CheckpointError(path, "there is no such file") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(path, "is damaged, or holds more than tensors and text, which is not read") from error
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, ValueError, AttributeError, ImportError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(path, f"is damaged, or no checkpoint: {reason[:200]}") from error
    if not isinstance(values, dict) or values.get("kind") != KIND:
        raise CheckpointError(path, "is no checkpoint of a training")
    if values.get("version") != VERSION:
        raise CheckpointError(path, f"is a checkpoint of version {values.get('version')}; wanted {VERSION}")
    return tensors, values


def latest(path: Path, previous: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]] | None:
    """The checkpoint of a run, or the one before where the last one is damaged; None where there is none.

    Raises:
        CheckpointError: There are only damaged ones.
    """
    fault: CheckpointError | None = None
    for candidate in (path, previous):
        if not candidate.exists():
            continue
        try:
            tensors, values = load(candidate)
        except CheckpointError as error:
            logger.warning("%s", error)
            fault = fault or error
            continue
        if fault is not None:
            logger.warning("continuing from the checkpoint before, %s", candidate)
        return candidate, tensors, values
    if fault is not None:
        raise fault
    return None
