"""Frames without HTTP around each of them: on a socket of their own, and as messages of a websocket.

A :class:`Desk` takes one frame after the other and gives each its one answer, without a task of its own; around it
stands what cuts a stream of bytes into frames. Frames that arrive while one is being answered wait in the connection,
so that a client that sends faster than it is served is slowed down by its own socket.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from nepserve.wire import frame, json_text
from nepserve.wire.request import WireError, describe

from . import problems
from .limits import MIN_RATE
from .sessions import lost, result_flags

if TYPE_CHECKING:
    from collections.abc import Callable

    from nepserve.dispatch import Answer
    from nepserve.sessions import Session

    from .sessions import Step, Stepping

log = logging.getLogger("nepserve")

HEAD_SECONDS = 10.0
"""Time from the first byte of a frame, or of the head of an HTTP request, to its end; the length of a frame earns more.

A connection without a session has no longer than that to be silent, either."""

WRITE_SECONDS = 60.0
"""Time that an answer may wait for its reader to take the next part of it."""

_HELD = 1 << 20
"""Bytes that may wait behind a frame before no more are read."""

FRAME_ROUTE = "frames"
STREAM_ROUTE = "/v1/sessions/{id}/stream"


class Desk:
    """Takes frames, one at a time, and answers them.

    Args:
        stepping: The sessions of the server.
        send: Called with each answer, a frame.
        done: Called after each answer.
        route: Name of this way in, for metrics.
        client: Whose frames they are; None for a connection that has to say so when it opens a session.
        session: The session; None for a connection that opens it by a frame.

    Attributes:
        busy: Whether a frame is being answered.
        known: Whether the client has shown a key, if one is needed.
    """

    def __init__(
        self,
        stepping: Stepping,
        send: Callable[[bytes], None],
        done: Callable[[], None],
        route: str,
        client: str,
        session: Session | None = None,
    ) -> None:
        self.busy = False
        self._stepping = stepping
        self._send = send
        self._done = done
        self._route = route
        self._client = client
        self._session = session
        self._opens = session is None
        self.known = session is not None or not len(stepping.service.keys)
        self._step: Step | None = None
        self._closed = False
        self._head = frame.Head(0, 0, 0, 0, 0)
        self._started = 0.0
        self._opening: asyncio.Task[None] | None = None

    @property
    def serving(self) -> bool:
        """Whether there is a session, or an answer on its way."""
        return self.busy or (self._session is not None and not self._session.lost)

    def take(self, head: frame.Head, payload: bytes | memoryview) -> None:
        """Begin with a frame; its answer comes by ``send``, now or later."""
        self.busy = True
        self._head = head
        self._started = time.perf_counter()
        try:
            if head.kind == frame.OPEN and self._opens:
                self._opening = asyncio.get_running_loop().create_task(self._open(bytes(payload)))
                return
            session = self._session
            if session is None:
                raise WireError(None, "session_lost", "there is no session yet: send a frame of kind 3 first")
            if session.lost:
                raise lost()
            positions, cell = frame.read_request(head, payload, len(session))
            step = self._step = self._stepping.begin(session, positions, cell, frame.properties_of(head.flags))
        except Exception as error:
            self._fail(error)
        else:
            step.answer.add_done_callback(self._answered)

    async def _open(self, payload: bytes) -> None:
        try:
            described = await self._opened(payload)
        except Exception as error:
            self._fail(error)
        else:
            content = orjson.dumps(described)
            atoms = described.get("n_atoms", 0)
            self._finish(frame.pack(frame.OPENED, content, atoms=atoms, sequence=self._head.sequence), 200)

    async def _opened(self, payload: bytes) -> dict[str, Any]:
        """Open a session, in the place of one that there may be, or take a key; what its client is told."""
        message = json_text.parse(payload)
        if not isinstance(message, dict):
            raise WireError(None, "bad_value", f"a session is opened by an object, not by {describe(message)}")
        keys = self._stepping.service.keys
        given = message.pop("api_key", None)
        if len(keys):
            key = keys.match(b"Bearer " + given.encode()) if isinstance(given, str) else None
            if key is None:
                raise WireError(
                    None, "unauthorized", "a key is needed: send it as api_key" if given is None
                    else "this key is not known here",
                )  # fmt: skip
            if self._session is not None and key.name != self._client:
                # What one key opened is not another's.
                self._stepping.sessions.drop(self._session)
                self._session = None
            self._client, self.known = key.name, True
        if given is not None and not message:
            return {}
        session = await self._stepping.open(message, self._client, self._session, tied=True)
        if self._closed:
            self._stepping.sessions.drop(session)
        self._session = session
        return self._stepping.describe(session)

    def _answered(self, answer: asyncio.Future[Answer]) -> None:
        if answer.cancelled() or self._step is None:
            return
        try:
            session = self._session
            assert session is not None
            values = self._stepping.values_of(self._step, answer.result())
            head = self._head
            content = frame.pack_result(values, len(session), result_flags(head.flags, session), head.sequence)
        except Exception as error:
            self._fail(error)
        else:
            self._finish(content, 200)

    def _fail(self, error: Exception) -> None:
        wire_error = problems.as_wire_error(error)
        if wire_error is None:
            log.error("a frame of %s could not be answered: %s", self._client, error, exc_info=error)
            wire_error = problems.internal()
        document = orjson.dumps(wire_error.problem())
        self._finish(frame.pack(frame.ERROR, document, sequence=self._head.sequence), wire_error.status)

    def _finish(self, content: bytes, status: int) -> None:
        step, self._step = self._step, None
        self.busy = False
        self._send(content)
        model = ""
        if step is not None:
            model = step.model
            step.close()
        self._stepping.service.metrics.answered(model, self._route, status, time.perf_counter() - self._started)
        self._done()

    def close(self) -> None:
        """The connection is gone: take back what is under way, and drop a session that was opened here."""
        self._closed = True
        step, self._step = self._step, None
        if step is not None:
            step.close()
            self._stepping.service.metrics.abandoned.add()
        if self._opens and self._session is not None:
            self._stepping.sessions.drop(self._session)


class Held(Protocol):
    """The set of connections of a server."""

    def add(self, item: Any, /) -> None:
        """Put one in."""

    def discard(self, item: Any, /) -> None:
        """Take one out."""

    def __len__(self) -> int: ...


class Stream(asyncio.Protocol):
    """A connection that carries frames: what the plain socket and the websocket have in common.

    Args:
        stepping: The sessions of the server.
        connections: Where the server keeps its connections.
    """

    desk: Desk
    transport: asyncio.Transport

    def __init__(self, stepping: Stepping, connections: Held) -> None:
        self.stepping = stepping
        self.connections = connections
        self.loop = asyncio.get_running_loop()
        self.most = stepping.service.limits.max_body
        self.buffer = bytearray()
        self._reading = True
        self._closing = False
        self._begun: float | None = None  # when the frame began that is not whole yet
        self._allowed = HEAD_SECONDS
        self._write_paused_at: float | None = None
        self._heard = self.loop.time()

    @property
    def engaged(self) -> bool:
        """Whether the next frame has to wait: for an answer, or for the peer to read the last one."""
        return self.desk.busy or self._write_paused_at is not None

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        self._heard = self.loop.time()
        self.buffer += data
        self.go_on()

    def go_on(self) -> None:
        """Answer the next frame, if it is here and none is being answered."""
        if self._closing:
            return
        try:
            while self.buffer and not self.engaged and self.cut():
                pass
        except WireError as error:
            # The place where the next frame begins is lost.
            self.refuse(error)
            return
        waiting, engaged = len(self.buffer), self.engaged
        if engaged or not (waiting or self.partial):
            self._begun = None
        else:
            if self._begun is None:
                self._begun, self._allowed = self.loop.time(), HEAD_SECONDS
            # What is announced may be too much; that is told when its head is whole.
            self._allowed = max(self._allowed, HEAD_SECONDS + min(self.expected(), self.most) / MIN_RATE)
        too_much = engaged and waiting > _HELD
        if too_much and self._reading:
            self.transport.pause_reading()
        elif not too_much and not self._reading:
            self.transport.resume_reading()
        self._reading = not too_much

    def cut(self) -> bool:
        """Take one frame out of the buffer and begin with it; whether one was whole.

        Raises:
            WireError: What came is no frame, and what follows cannot be made out.
        """
        raise NotImplementedError

    @property
    def partial(self) -> bool:
        """Whether a part of a frame was taken out of the buffer already."""
        return False

    def expected(self) -> int:
        """Bytes of the frame that is arriving, as far as is known."""
        return frame.HEAD.size

    def refuse(self, error: WireError) -> None:
        """Say what is wrong and close."""
        raise NotImplementedError

    def end(self) -> None:
        """Close after what was written is out."""
        self._closing = True
        self.buffer.clear()
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's signature)
        """Let go of everything."""
        self._closing = True
        self.connections.discard(self)
        self.desk.close()

    def pause_writing(self) -> None:
        """Note that the peer does not read."""
        self._write_paused_at = self.loop.time()

    def resume_writing(self) -> None:
        """Note that the peer reads again."""
        self._write_paused_at = None
        self.go_on()

    def overdue(self, now: float) -> bool:
        """Whether the peer has used up its time for a frame, or for reading an answer."""
        if self._write_paused_at is not None and now - self._write_paused_at > WRITE_SECONDS:
            return True
        if self._begun is not None:
            return now - self._begun > self._allowed
        # Who has no session holds a place that others may want; a client that comes back opens another one anyway.
        return not self.desk.serving and now - self._heard > HEAD_SECONDS

    def shutdown(self) -> None:
        """The server ends."""
        self.end()


class FrameSocket(Stream):
    """A connection of the frame socket: frame after frame, the first of which opens a session.

    Args:
        stepping, connections: See :class:`Stream`.
        full: Whether it is one too many, which is all that it is told.
    """

    def __init__(self, stepping: Stepping, connections: Held, *, full: bool = False) -> None:
        super().__init__(stepping, connections)
        self._full = full

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = transport  # type: ignore[assignment]
        peer = transport.get_extra_info("peername")
        client = str(peer[0]) if isinstance(peer, tuple) and peer else "local"
        self.desk = Desk(self.stepping, self.transport.write, self.go_on, FRAME_ROUTE, client)
        full = self._full or len(self.connections) >= self.stepping.service.settings.max_connections
        self.connections.add(self)
        if full:
            self.refuse(WireError(None, "too_many_connections", "the server holds as many connections as it may"))

    def cut(self) -> bool:
        """See :meth:`Stream.cut`."""
        size = frame.HEAD.size
        have = len(self.buffer)
        if have < size:
            if not frame.MAGIC.startswith(bytes(self.buffer[:4])):
                frame.read_head(bytes(self.buffer).ljust(size, b"\0"), self.most)
            return False
        head = frame.read_head(self.buffer, self.most if self.desk.known else min(self.most, frame.MAX_OPENING))
        end = size + head.size
        if have < end:
            return False
        payload = bytes(memoryview(self.buffer)[size:end])
        if have == end:
            self.buffer = bytearray()
        else:
            del self.buffer[:end]
        self.desk.take(head, payload)
        return True

    def expected(self) -> int:
        """See :meth:`Stream.expected`."""
        if len(self.buffer) < frame.HEAD.size:
            return frame.HEAD.size
        return frame.HEAD.size + frame.read_head(self.buffer, self.most).size

    def refuse(self, error: WireError) -> None:
        """See :meth:`Stream.refuse`."""
        self.stepping.service.metrics.answered("", FRAME_ROUTE, error.status, 0.0)
        self.transport.write(frame.pack(frame.ERROR, orjson.dumps(error.problem())))
        self.end()
