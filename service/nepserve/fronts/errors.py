"""How a refusal travels from the lead to the front that asked."""

from __future__ import annotations

import logging
from typing import Any

from nepserve.engine.errors import EngineDown, pack_error, unpack_error
from nepserve.refusals import DeadlinePassed, Draining, QueueFull, TooLarge
from nepserve.wire.request import WireError

log = logging.getLogger("nepserve")

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (DeadlinePassed, Draining, EngineDown, QueueFull, TooLarge)
}


class SessionLost(Exception):  # noqa: N818 -- a state of affairs
    """There is no such session, or it is somebody else's."""


_KINDS["SessionLost"] = SessionLost


def pack(error: Exception) -> dict[str, Any]:
    """An exception as plain values; one that nobody foresaw is logged here, and is an :class:`EngineError` there."""
    name = type(error).__name__
    if name in _KINDS:
        reduced = error.__reduce__()
        return {"type": name, "arguments": list(reduced[1])}
    if isinstance(error, WireError):
        return {"type": "WireError", "arguments": [error.status, error.code, error.detail]}
    packed = pack_error(error)
    if packed["type"] == "EngineError":
        log.error("a request failed: %s", error, exc_info=error)
    return packed


def unpack(fields: dict[str, Any]) -> Exception:
    """Inverse of :func:`pack`."""
    kind = _KINDS.get(fields["type"])
    if kind is not None:
        return kind(*fields["arguments"])
    if fields["type"] == "WireError":
        status, code, detail = fields["arguments"]
        return WireError(status, code, detail)
    return unpack_error(fields)
