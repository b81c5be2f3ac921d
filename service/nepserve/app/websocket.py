"""The websocket of a session (RFC 6455), as much of it as frames need: binary messages, pings and an orderly end.

``GET /v1/sessions/{id}/stream`` changes an HTTP connection into one whose every binary message is a frame. It is
written here because a general library spends more time on a step than the rest of the front does.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
import orjson

from nepserve.wire import frame
from nepserve.wire.handshake import proof
from nepserve.wire.request import WireError

from .sessions import ROUTE
from .stream import STREAM_ROUTE, Desk, Held, Stream

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from nepserve.sessions import Session

    from .sessions import Stepping

_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")

_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_LARGEST_CONTROL = 125

# Codes of the close frame.
_GOING, _PROTOCOL, _UNSUPPORTED, _TOO_BIG = 1001, 1002, 1003, 1009


def session_of(path: str) -> str | None:
    """The id in the path of a session's websocket; None for any other path."""
    if not path.startswith(ROUTE + "/") or not path.endswith("/stream"):
        return None
    id_ = path[len(ROUTE) + 1 : -len("/stream")]
    return id_ if id_ and "/" not in id_ else None


def accept(headers: Mapping[bytes, bytes]) -> bytes:
    """The head of the answer that changes protocols.

    Raises:
        WireError: The request is no such handshake, or a page of another site sent it.
    """
    origin, host = headers.get(b"origin"), headers.get(b"host", b"")
    if origin is not None and urlsplit(origin).netloc != host:
        # A browser would let any page do this, with whatever rights the address of this machine gives.
        raise WireError(None, "forbidden", "pages of other sites may not open a session's stream")
    if headers.get(b"sec-websocket-version", b"").strip() != b"13":
        raise WireError(None, "bad_header", "Sec-WebSocket-Version must be 13", field="Sec-WebSocket-Version")
    key = headers.get(b"sec-websocket-key", b"").strip()
    if not _KEY.fullmatch(key):
        raise WireError(None, "bad_header", "Sec-WebSocket-Key must be 16 bytes in base64", field="Sec-WebSocket-Key")
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: "
        + proof(key)
        + b"\r\n\r\n"
    )


class WebSocket(Stream):
    """A session's websocket after the handshake."""

    def __init__(self, stepping: Stepping, connections: Held, transport: asyncio.Transport, session: Session) -> None:
        super().__init__(stepping, connections)
        self.transport = transport
        self.desk = Desk(stepping, self._send, self.go_on, STREAM_ROUTE, session.owner, session)
        self._parts: list[bytes] = []  # of a message that comes in fragments
        self._size = 0
        self.connections.add(self)

    def cut(self) -> bool:
        """See :meth:`Stream.cut`."""
        buffer = self.buffer
        if len(buffer) < 2:
            return False
        first, second = buffer[0], buffer[1]
        kind, size, at = first & 15, second & 127, 2
        if first & 0x70:
            raise WireError(None, "bad_frame", "reserved bits of the websocket are set; no extension is spoken here")
        if not second & 128:
            raise WireError(None, "bad_frame", "a client's websocket frames must be masked")
        if kind >= _CLOSE and (size > _LARGEST_CONTROL or not first & 128):
            raise WireError(None, "bad_frame", "a control frame is too long or in pieces")
        if size > _LARGEST_CONTROL:
            at = 4 if size == 126 else 10
            if len(buffer) < at:
                return False
            size = int.from_bytes(buffer[2:at], "big")
        if self._size + size > self.most + frame.HEAD.size:
            raise WireError(
                None, "body_too_large", f"a message of {self._size + size:,} bytes; at most {self.most:,} are taken",
                max_bytes=self.most,
            )  # fmt: skip
        end = at + 4 + size
        if len(buffer) < end:
            return False
        payload = unmask(memoryview(buffer)[at + 4 : end], bytes(buffer[at : at + 4]))
        if len(buffer) == end:
            self.buffer = bytearray()
        else:
            del self.buffer[:end]
        self._take(kind, bool(first & 128), payload)
        return True

    def _take(self, kind: int, final: bool, payload: bytes) -> None:
        if kind == _PING:
            self.transport.write(head(_PONG, len(payload)) + payload)
        elif kind == _CLOSE:
            self.transport.write(head(_CLOSE, len(payload[:2])) + payload[:2])
            self.end()
        elif kind == _TEXT:
            self._close(_UNSUPPORTED, "frames are binary messages")
        elif kind == _PONG:
            pass
        elif kind not in {_BINARY, _CONTINUATION} or (kind == _CONTINUATION) != bool(self._parts):
            raise WireError(None, "bad_frame", f"a websocket frame of kind {kind} came where it cannot stand")
        elif final:
            message = b"".join([*self._parts, payload]) if self._parts else payload
            self._parts, self._size = [], 0
            self._message(message)
        else:
            self._parts.append(payload)
            self._size += len(payload)
            if len(self._parts) > 100_000:
                raise WireError(None, "bad_frame", "a message comes in more than 100,000 pieces")

    def _message(self, message: bytes) -> None:
        if len(message) < frame.HEAD.size:
            raise frame.bad_frame(f"a message of {len(message)} bytes; the head of a frame has {frame.HEAD.size}")
        self.desk.take(frame.read_head(message, self.most), memoryview(message)[frame.HEAD.size :])

    @property
    def partial(self) -> bool:
        """See :attr:`Stream.partial`."""
        return bool(self._parts)

    def expected(self) -> int:
        """See :meth:`Stream.expected`."""
        size = self.buffer[1] & 127 if len(self.buffer) > 1 else 0
        if size > _LARGEST_CONTROL:
            size = int.from_bytes(self.buffer[2 : 4 if size == 126 else 10], "big")
        return self._size + size

    def _send(self, content: bytes) -> None:
        self.transport.write(head(_BINARY, len(content)) + content)

    def refuse(self, error: WireError) -> None:
        """See :meth:`Stream.refuse`."""
        self.stepping.service.metrics.answered("", STREAM_ROUTE, error.status, 0.0)
        self._send(frame.pack(frame.ERROR, orjson.dumps(error.problem())))
        self._close(_TOO_BIG if error.code == "body_too_large" else _PROTOCOL, error.detail)

    def _close(self, code: int, reason: str) -> None:
        # No more than 123 bytes, cut between two letters.
        payload = struct.pack(">H", code) + reason.encode()[:120].decode(errors="ignore").encode()
        self.transport.write(head(_CLOSE, len(payload)) + payload)
        self.end()

    def shutdown(self) -> None:
        """The server ends."""
        self._close(_GOING, "the server stops")


def head(kind: int, size: int) -> bytes:
    """The first bytes of a frame that is not masked."""
    if size <= _LARGEST_CONTROL:
        return bytes((128 | kind, size))
    if size < 1 << 16:
        return struct.pack(">BBH", 128 | kind, 126, size)
    return struct.pack(">BBQ", 128 | kind, 127, size)


def unmask(data: memoryview, mask: bytes) -> bytes:
    """``data`` combined with the repeated mask of four bytes; the same call puts a mask on."""
    size = len(data)
    if mask == b"\0\0\0\0":
        return bytes(data)
    padded = np.zeros((size + 3) // 4 * 4, np.uint8)
    padded[:size] = np.frombuffer(data, np.uint8)
    words = padded.view(np.uint32)
    words ^= np.frombuffer(mask, np.uint32)
    return padded.tobytes()[:size]
