"""What both sides of a websocket's handshake compute (RFC 6455, 1.3)."""

from __future__ import annotations

import base64
import hashlib

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def proof(key: bytes) -> bytes:
    """The ``Sec-WebSocket-Accept`` that belongs to a ``Sec-WebSocket-Key``."""
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())


__all__ = ["proof"]
