"""Steps by HTTP that arrive whole and small: answered from the connection, with no task and no ASGI between.

A force call of a small system is over in the time that a task, an event and two messages of ASGI take. What is special
about a request in any way (a body in pieces or compressed, a query, another request before it) goes the usual way;
keys, limits, errors, metrics and logs are the same on both, as both ask the same functions.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from nepserve.wire import frame

from .evaluate import LARGE_BODY, wish_of
from .limits import too_large
from .sessions import STEP_ROUTE, read_frame, result_flags

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from nepserve.dispatch import Answer
    from nepserve.sessions import Session

    from . import problems
    from .door import Call, Door
    from .sessions import Step

_URL = re.compile(rb"/v1/sessions/([A-Za-z0-9_-]{1,64})/positions")
_FRAME = frame.CONTENT_TYPE.encode()
_SPECIAL = frozenset({b"content-encoding", b"expect", b"transfer-encoding", b"upgrade"})


def is_step(method: bytes, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request is a step, a frame of known and small size, with nothing special about it."""
    if method != b"PUT" or _URL.fullmatch(url) is None:
        return False
    framed, size = False, b""
    for name, value in headers:
        if name == b"content-type":
            framed = value == _FRAME
        elif name == b"content-length":
            size = value
        elif name in _SPECIAL:
            return False
    return framed and size.isdigit() and int(size) <= LARGE_BODY


def session_of(url: bytes) -> str:
    """The id in the address of a step."""
    found = _URL.fullmatch(url)
    assert found is not None
    return found[1].decode()


class DirectStep:
    """One such request, from its last byte to its answer. For a connection it is what uvicorn calls a cycle.

    Attributes:
        response_complete: Whether the answer was written.
        disconnected: Whether the connection was lost before.
        keep_alive: Whether the connection stays open.
        message_event: Whose ``set`` tells that something happened to the connection.
    """

    def __init__(
        self,
        door: Door,
        call: Call,
        transport: asyncio.Transport,
        default_headers: list[tuple[bytes, bytes]],
        on_response: Callable[[], None],
    ) -> None:
        self.response_complete = False
        self.disconnected = False
        self.keep_alive = True
        self.message_event = self
        self._door = door
        self._call = call
        self._transport = transport
        self._default_headers = default_headers
        self._on_response = on_response
        self._step: Step | None = None
        self._session: Session
        self._head: frame.Head

    def begin(self, body: bytes) -> None:
        """Queue the step; its answer is written now or later."""
        call, stepping = self._call, self._door.stepping
        service = stepping.service
        call.route = STEP_ROUTE
        try:
            self._door.admit(call)
            service.refuse_unless_serving()
            wish = wish_of(call.headers, b"", service.settings.request_timeout)
            if len(body) > service.bodies.limit:
                raise too_large(service.bodies.limit)
            session = self._session = stepping.here(session_of(call.path.encode()), call.client)
            self._head, positions, cell = read_frame(body, len(session), service.limits.max_body)
            properties = frame.properties_of(self._head.flags)
            step = self._step = stepping.begin(session, positions, cell, properties, wish.priority, wish.timeout)
        except Exception as error:
            self._refuse(error)
            return
        call.model = step.model
        step.answer.add_done_callback(self._answered)

    def _answered(self, answer: asyncio.Future[Answer]) -> None:
        step, session, head = self._step, self._session, self._head
        if step is None or answer.cancelled():
            return
        try:
            values = self._door.stepping.values_of(step, answer.result())
            content = frame.pack_result(values, len(session), result_flags(head.flags, session), head.sequence)
        except Exception as error:
            self._refuse(error)
        else:
            headers = [(b"content-type", _FRAME), (b"content-length", b"%d" % len(content))]
            self._write(200, headers, content)

    def _refuse(self, error: Exception) -> None:
        self._write(*self._door.problem(self._call, error))

    def _write(self, status: int, headers: problems.Headers, content: bytes) -> None:
        """Send the answer, and let the connection go on."""
        call = self._call
        self._end()
        call.status = status
        parts = [STATUS_LINE[status]]
        for name, value in (*self._default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        parts += (b"x-request-id: ", call.id.encode(), b"\r\n" if self.keep_alive else b"\r\nconnection: close\r\n")
        parts += (b"\r\n", content)
        self.response_complete = True
        self._transport.write(b"".join(parts))
        self._door.note(call)
        if not self.keep_alive:
            self._transport.close()
        self._on_response()

    def _end(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            # Of no effect on a step that was answered.
            step.close()

    def set(self) -> None:
        """Take the step back if its client is gone."""
        if self.disconnected and not self.response_complete:
            self.response_complete = True
            self._end()
            self._door.abandon(self._call)


__all__ = ["DirectStep", "is_step", "session_of"]
