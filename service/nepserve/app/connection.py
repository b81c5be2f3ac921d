"""uvicorn's HTTP/1.1 connection with bounds on what a slow or hostile peer can hold.

A request head has a size and a time; a body that is still on its way when its request was already answered is thrown
away for a short while, so that the peer can read the answer, and then cut off; an answer that nobody reads is dropped.
Nothing here sets a timer per request: :func:`sweep`, called about once a second, looks at all connections.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nepserve.wire.problem import CONTENT_TYPE, problem

from .direct import is_step
from .stream import HEAD_SECONDS, WRITE_SECONDS, Stream

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

MAX_HEAD = 64 * 1024
"""Largest request line and headers together, bytes."""

LINGER_SECONDS = 10.0
LINGER_BYTES = 32_000_000
LINGER_ANNOUNCED = 1_000_000_000
"""How long, and how much, a body is thrown away after its request was answered; more, where its length was said."""


class Connection(HttpToolsProtocol):
    """One client connection."""

    in_head = False
    in_body = False
    head_size = 0
    discarded = 0
    write_paused_at: float | None = None
    held: list[bytes] | None = None
    """Parts of the body of a step that may be answered from here, if all of it comes at once."""
    full = False
    """Whether it is one too many, whatever this process has."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse connections beyond the limit, and start the clock of the first request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.changed = self.loop.time()
        limit = self.config.limit_concurrency
        # uvicorn would count requests under this name and answer in plain text.
        self.limit_concurrency = None
        if self.full or (limit is not None and len(self.connections) > limit):
            self.refuse(503, "too_many_connections", f"The server holds {limit} connections already.")

    def data_received(self, data: bytes) -> None:
        """Feed the parser; a head that does not end is refused."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.held = None
            self.refuse(400, "bad_request", "this is not HTTP/1.1")
        if self.held is not None:
            # Its body is still on its way: nothing that the usual way would not do better.
            parts, self.held = self.held, None
            super().on_headers_complete()
            for part in parts:
                super().on_body(part)
        if self.in_head:
            self.head_size += len(data)
            if self.head_size > MAX_HEAD:
                self._head_too_large()

    def on_message_begin(self) -> None:
        """Note when a request begins."""
        self.in_head, self.head_size, self.discarded = True, 0, 0
        self.changed = self.loop.time()
        # An answer within the parser armed it, and this request may have come in the same bytes.
        self._unset_keepalive_if_required()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Hand the request over, unless its head is too large."""
        self.in_head, self.in_body = False, True
        if self.parser.should_upgrade():
            return
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEAD:
            self._head_too_large()
            return
        if self._direct():
            self.held = []
            return
        super().on_headers_complete()

    def _direct(self) -> bool:
        """Whether the request is one that is answered without ASGI, if its body comes with it."""
        return (
            is_step(self.parser.get_method(), self.url, self.headers)
            and (self.cycle is None or self.cycle.response_complete)
            and self.write_paused_at is None
            and not self.transport.is_closing()
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and hasattr(self.app, "direct")
            and self.app.takes(self.url)
        )

    def _stay(self, rest: bytes) -> None:
        """Read a request that offers another protocol as if it did not: its parser would drop the body.

        A session's websocket alone is taken up.
        """
        method = self.parser.get_method()
        upgrade = getattr(self.app, "upgrade", None)
        if upgrade is not None and method == b"GET":
            path = unquote(httptools.parse_url(self.url).path.decode("ascii", "replace"))
            if upgrade(self, {**self.scope, "method": "GET", "path": path}, rest):
                return
        if method == b"CONNECT":
            self.refuse(400, "bad_request", "this server is no proxy")
            return
        kept = [(name, value) for name, value in self.headers if name not in {b"upgrade", b"connection"}]
        head = b"".join([
            method, b" ", self.url, b" HTTP/1.1\r\n", *[b"%b: %b\r\n" % header for header in kept], b"\r\n",
        ])  # fmt: skip
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(head + rest)

    def hand_over(self) -> asyncio.Transport:
        """Give the transport to another protocol; this one is done with."""
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        self.in_head = self.in_body = False
        return self.transport

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body, or throw it away if its request was answered already."""
        if self.held is not None:
            self.held.append(body)
            return
        if self.cycle is not None and self.cycle.response_complete:
            self.discarded += len(body)
            if self.discarded > LINGER_BYTES and not self._ends():
                self.transport.abort()
            return
        super().on_body(body)

    def _ends(self) -> bool:
        """Whether the body has an end that is not too far: who sends it reads the answer only then."""
        announced = next((value for name, value in self.headers if name == b"content-length"), b"")
        return announced.isdigit() and int(announced) <= LINGER_ANNOUNCED

    def on_message_complete(self) -> None:
        """Note that the body is here."""
        if self.parser.should_upgrade():
            return
        self.in_body = False
        if self.held is not None:
            parts, self.held = self.held, None
            self.app.direct(self, parts[0] if len(parts) == 1 else b"".join(parts))
            return
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note when an answer was written."""
        self.changed = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Note that the peer does not read."""
        self.write_paused_at = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the peer reads again."""
        self.write_paused_at = None
        super().resume_writing()

    def refuse(self, status: int, code: str, detail: str) -> None:
        """Write a problem and close, without the application."""
        if self.transport.is_closing():
            return
        body = orjson.dumps(problem(status, code, None, detail))
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {CONTENT_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _head_too_large(self) -> None:
        self.in_head = False
        self.refuse(431, "headers_too_large", f"Request line and headers may be {MAX_HEAD} bytes in all.")

    def overdue(self, now: float) -> bool:
        """Whether the peer has used up its time in the present phase."""
        if self.write_paused_at is not None and now - self.write_paused_at > WRITE_SECONDS:
            return True
        age = now - self.changed
        if self.in_head or self.cycle is None:
            return age > HEAD_SECONDS
        return self.cycle.response_complete and self.in_body and age > LINGER_SECONDS


def sweep(connections: Iterable[Any], now: float) -> int:
    """Cut off the connections that are overdue; returns how many. ``now`` is the event loop's time."""
    late = [c for c in connections if isinstance(c, (Connection, Stream)) and c.overdue(now)]
    for connection in late:
        connection.transport.abort()
    return len(late)
