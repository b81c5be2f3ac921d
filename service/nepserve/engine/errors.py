"""What can go wrong between a front and its engine, and how errors of the model travel from one to the other."""

from __future__ import annotations

from typing import Any

from nepcore.errors import ModelError, ModelFileError, StructureError


class EngineError(Exception):
    """The engine failed at what it was asked, and lives on. The message says at what."""


class ProbeError(EngineError):
    """A model no longer gives the answer it gave right after it was loaded: its device is not to be trusted."""


class EngineDown(Exception):  # noqa: N818 -- a state of affairs
    """The engine process is gone, hangs, or is not there yet. Nothing was lost but time: ask again.

    Attributes:
        reason: Why, in one sentence.
        retryable: Always true: an evaluation leaves nothing behind, it may be repeated elsewhere or later.
    """

    retryable = True

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.reason,)


class DeviceLost(Exception):  # noqa: N818 -- the state of the device, not a mistake
    """The device reports an error that stays until its process ends; raised inside the engine only."""


def pack_structure_error(error: StructureError) -> list[Any]:
    """The fields of ``error``, for the header of a message."""
    return [error.code, error.reason, error.field, list(error.atoms)]


def unpack_structure_error(fields: list[Any]) -> StructureError:
    """Inverse of :func:`pack_structure_error`."""
    code, reason, field, atoms = fields
    return StructureError(code, reason, field=field, atoms=tuple(atoms))


def pack_error(error: BaseException) -> dict[str, Any]:
    """An exception as plain values. What is not of the family of :mod:`nepcore.errors` becomes an EngineError."""
    match error:
        case ModelFileError():
            return {"type": "ModelFileError", "path": str(error.path), "line": error.line, "reason": error.reason}
        case ModelError():
            return {"type": "ModelError", "reason": str(error)}
        case ProbeError():
            return {"type": "ProbeError", "reason": str(error)}
        case StructureError():
            return {"type": "StructureError", "fields": pack_structure_error(error)}
    return {"type": "EngineError", "reason": describe(error)}


def unpack_error(fields: dict[str, Any]) -> Exception:
    """Inverse of :func:`pack_error`."""
    match fields["type"]:
        case "ModelFileError":
            return ModelFileError(fields["path"], fields["line"], fields["reason"])
        case "ModelError":
            return ModelError(fields["reason"])
        case "ProbeError":
            return ProbeError(fields["reason"])
        case "StructureError":
            return unpack_structure_error(fields["fields"])
    return EngineError(fields["reason"])


def describe(error: BaseException) -> str:
    """Type and text of an exception on at most a few lines (some device errors bring pages of advice)."""
    text = " ".join(str(error).split())
    if len(text) > 500:
        text = f"{text[:500]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
