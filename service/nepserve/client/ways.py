"""The ways on which the steps of a session travel: HTTP requests, a websocket, or a socket that speaks frames alone.

Each takes a frame to the server and brings its answer back, repeating what may be repeated, by the rules of
:mod:`.retry`. A session that the server no longer has is opened again on the way; its user does not see it.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from nepserve.wire import frame
from nepserve.wire.handshake import proof
from nepserve.wire.request import WireError

from .address import Address
from .answers import read_json
from .connection import Answer, Broken, Connection, Garbled, open_socket, wait_seconds
from .errors import ConnectionFailed, InvalidAnswer, NepserveError, Overloaded, ServerError, from_answer
from .exchange import CONNECT_SECONDS, Call
from .options import USER_AGENT, new_request_id, tls_context
from .replicas import Course, Replica
from .retry import Attempts, Retry

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from .http import Client

PATH = "/v1/sessions"

_PROBLEM = "application/problem+json"
_MOST = 1 << 32
_OPENINGS = 3
"""How often a session may be lost in one step."""

_STEP_HEADERS = {"Content-Type": frame.CONTENT_TYPE, "Accept": frame.CONTENT_TYPE}
_JSON_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}


class Absent(Exception):  # noqa: N818 - never leaves the client
    """The server is older than sessions."""


class Way(Protocol):
    """Takes frames of one session to the server."""

    def step(self, body: bytes) -> tuple[frame.Head, bytes | bytearray | memoryview]:
        """The answer to a frame, its head and what follows.

        Raises:
            Absent: The server knows no sessions.
            NepserveError: No answer came, or it was not success.
        """
        ...

    def close(self) -> None:
        """End the session."""
        ...


class Place(NamedTuple):
    """Where the frames of a client go, if not by HTTP: a websocket of its server, or an address of their own."""

    kind: str
    address: Address | None


def parse_steps(steps: str | None) -> Place:
    """Take the ``steps`` of a client apart.

    Raises:
        ValueError: It is none.
    """
    text = "http" if steps is None else steps.strip().rstrip("/")
    if text in {"http", "websocket"}:
        return Place(text, None)
    for scheme, tls in (("frames://", False), ("framess://", True)):
        if text.startswith(scheme):
            rest = text[len(scheme) :]
            if rest.startswith("/"):
                return Place("frames", Address(text, "", 0, False, "", rest))
            host, colon, port = rest.rpartition(":")
            if colon and host and port.isdigit() and 0 < int(port) < 65536:
                return Place("frames", Address(text, host.strip("[]"), int(port), tls, "", None))
    raise ValueError(
        f"steps is {steps!r}; wanted 'http', 'websocket', frames://host:port (framess:// with TLS) or frames:///path"
    )


def way_of(client: Client, opening: Mapping[str, Any]) -> Way:
    """The way of a client for a session that is opened with ``opening``."""
    place = client.place
    if place.kind == "http":
        return Requests(client, opening)
    return Stream(client, opening, place)


class Opener:
    """Opens a session by HTTP, again whenever it was lost."""

    def __init__(self, client: Client, opening: Mapping[str, Any]) -> None:
        self.client = client
        self.body = json.dumps(opening).encode()
        self.path: str | None = None
        """Of the session, while it is thought to be there."""
        self.replica: Replica | None = None
        """The server that has it."""

    def open(self, timeout: float) -> str:
        """The path of the session, opened if need be."""
        if self.path is None:
            client = self.client
            call = client.exchange.call("POST", PATH, _JSON_HEADERS, self.body, timeout=timeout, retries=client.retries)
            try:
                answer = client.exchange.finish(call)
            except ServerError as error:
                if error.status in {404, 405} and error.code in {"not_found", "method_not_allowed", ""}:
                    raise Absent from error
                raise
            described = read_json(answer, url=call.url, path=PATH)
            id_ = described.get("id") if isinstance(described, dict) else None
            if not isinstance(id_, str) or not id_.isascii() or not id_.replace("-", "").replace("_", "").isalnum():
                raise InvalidAnswer(f"{call.url}{PATH} answered without the id of a session", url=call.url)
            self.path = f"{PATH}/{id_}"
            self.replica = call.course.last
        return self.path

    def close(self) -> None:
        """Tell the server that it may forget the session; if it does not hear it, it will in time."""
        path, self.path = self.path, None
        if path is not None:
            exchange = self.client.exchange
            call = exchange.call(
                "DELETE", path, {}, b"", timeout=min(1.0, self.client.timeout), retries=Retry(limit=0), to=self.replica
            )
            try:
                exchange.finish(call, any_status=True)
            except NepserveError:
                # It is a courtesy: a session that nobody uses goes by itself.
                return


class Requests:
    """Each step a PUT on a kept connection."""

    def __init__(self, client: Client, opening: Mapping[str, Any]) -> None:
        self._client = client
        self._opener = Opener(client, opening)
        self._headers = _STEP_HEADERS if client.priority is None else {**_STEP_HEADERS, "X-Priority": client.priority}

    def step(self, body: bytes) -> tuple[frame.Head, bytes | bytearray | memoryview]:
        """See :class:`Way`."""
        client, opener = self._client, self._opener
        attempts = Attempts(client.retries, time.monotonic(), client.timeout)
        ends = attempts.started + client.timeout
        several = client.exchange.replicas.several
        openings = 0
        while True:
            path = opener.open(max(ends - time.monotonic(), 0.001))
            call = client.exchange.call(
                "PUT", path + "/positions", self._headers, body, timeout=max(ends - time.monotonic(), 0.001),
                retries=client.retries, to=opener.replica if several else None,
            )  # fmt: skip
            try:
                answer = client.exchange.finish(call)
            except (ConnectionFailed, Overloaded) as error:
                # The positions say all that there is to know: another server can go on with them.
                cut = isinstance(error, ConnectionFailed)
                wait = attempts.again(time.monotonic(), cut=cut) if several else None
                if wait is None:
                    raise
                opener.path = None
                time.sleep(0.0 if cut else wait)
                continue
            except ServerError as error:
                openings += 1
                if error.code != "session_lost" or openings > _OPENINGS:
                    raise
                opener.path = None
                continue
            return _take_apart(answer, call.url)

    def close(self) -> None:
        """See :class:`Way`."""
        self._opener.close()


def _take_apart(answer: Answer, url: str) -> tuple[frame.Head, memoryview]:
    kind = answer.headers.get("content-type", "")
    if kind != frame.CONTENT_TYPE or len(answer.body) < frame.HEAD.size:
        raise InvalidAnswer(
            f"{url} answered a step with {len(answer.body)} bytes of {kind or 'no content type'}: "
            f"{bytes(answer.body[:80])!r}. Is it nepserve?", url=url,
        )  # fmt: skip
    try:
        head = frame.read_head(answer.body, _MOST)
    except WireError as error:
        raise InvalidAnswer(f"{url} answered a step with what is no frame: {error}", url=url) from error
    return head, memoryview(answer.body)[frame.HEAD.size :]


class Stream:
    """Each step a frame on a connection of the session's own."""

    def __init__(self, client: Client, opening: Mapping[str, Any], place: Place) -> None:
        self._client = client
        self._opening = dict(opening)
        self._opener = Opener(client, opening) if place.kind == "websocket" else None
        # The socket of frames is one, whatever the client has for the rest.
        self._home = None if place.address is None else Replica(place.address)
        self._replica = self._home
        self._wire: _Wire | None = None
        self._process = os.getpid()

    def step(self, body: bytes) -> tuple[frame.Head, bytes | bytearray | memoryview]:
        """See :class:`Way`."""
        client = self._client
        attempts = Attempts(client.retries, time.monotonic(), client.timeout)
        course = Course(client.exchange.replicas, attempts, len(body) // 24, self._home)
        call = Call("GET", "/" + client.place.kind, "", body, course, new_request_id())
        openings = 0
        while True:
            under_way = used = False
            try:
                wire = self._connected(call)
                used, under_way = wire.used, True
                wire.send(body, call.ends)
                head, payload = wire.receive(call.ends)
            except _RefusedError as refusal:
                self._drop()
                answer = refusal.answer
            except Garbled as error:
                self._drop()
                raise InvalidAnswer(
                    f"{call.url} does not speak frames: {error}. Is the address right?", url=call.url,
                    request_id=call.request_id,
                ) from error  # fmt: skip
            except OSError as error:
                self._drop()
                if isinstance(error, Broken) and error.early and used and not call.attempts.renewed:
                    # The server closed the connection while it was idle, or ended: nobody's fault, and no attempt.
                    call.attempts.renewed = True
                    continue
                client.exchange.pause(call, error, cut=under_way)
                self._leave()
                continue
            except BaseException:
                # What arrives later must not be taken for the answer to another step.
                self._drop()
                raise
            else:
                if head.kind != frame.ERROR:
                    return head, payload
                answer = _as_answer(payload)
            if _code(answer) == "session_lost":
                openings += 1
                if openings <= _OPENINGS:
                    self._drop()
                    if self._opener is not None:
                        self._opener.path = None
                    continue
            client.exchange.pause_or_raise(call, answer)
            self._leave()

    def close(self) -> None:
        """See :class:`Way`."""
        self._drop()
        if self._opener is not None:
            self._opener.close()

    def _leave(self) -> None:
        """Open the session anew, perhaps at another server, if there are several."""
        if self._opener is not None and self._client.exchange.replicas.several:
            self._drop()
            self._opener.path = None

    def _drop(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _connected(self, call: Call) -> _Wire:
        """The open connection, with its session; made anew after a fork, too."""
        if self._wire is not None and self._process == os.getpid():
            call.course.replica = call.course.last = self._replica
            return self._wire
        self._drop()
        self._process = os.getpid()
        client = self._client
        path = None
        if self._opener is not None:
            path = self._opener.open(max(call.ends - time.monotonic(), 0.001))
            self._replica = self._opener.replica
        assert self._replica is not None
        call.course.replica = call.course.last = self._replica
        address = self._replica.address
        context = tls_context(address, client.exchange.verify)
        deadline = min(call.ends, time.monotonic() + CONNECT_SECONDS)
        raw = open_socket(address, context, deadline)
        try:
            if path is not None:
                wire: _Wire = _WebSocketWire(raw)
                wire.upgrade(address, path, client.exchange.key, deadline)  # type: ignore[attr-defined]
            else:
                wire = _Wire(raw)
                for document in _openings(self._opening, client.exchange.key):
                    wire.send(frame.pack(frame.OPEN, document), call.ends)
                    head, payload = wire.receive(call.ends)
                    if head.kind == frame.ERROR:
                        raise _RefusedError(_as_answer(payload))
                    if head.kind != frame.OPENED:
                        raise Garbled(f"a frame of kind {head.kind} came where the session was to be opened")
        except BaseException:
            raw.close()
            raise
        client.exchange.reached()
        self._wire = wire
        return wire


def _openings(opening: Mapping[str, Any], key: str | None) -> list[bytes]:
    """The documents that open a session on the frame socket: a large one follows its key, and has it, too."""
    if key is None:
        return [json.dumps(opening).encode()]
    whole = json.dumps({**opening, "api_key": key}).encode()
    return [whole] if len(whole) <= frame.MAX_OPENING else [json.dumps({"api_key": key}).encode(), whole]


class _RefusedError(Exception):
    """The server did not let a connection in."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


class _Wire:
    """Frames on a socket."""

    def __init__(self, raw: socket.socket) -> None:
        self._socket = raw
        self._buffer = bytearray()
        self.used = False

    def send(self, body: bytes, deadline: float) -> None:
        """Send a frame."""
        self._socket.settimeout(wait_seconds(deadline))
        try:
            self._socket.sendall(body)
        except ConnectionError as error:
            raise Broken(f"the connection broke: {error}", early=True) from error

    def receive(self, deadline: float) -> tuple[frame.Head, bytes | bytearray]:
        """Read a frame."""
        size = frame.HEAD.size
        first = self._socket_read(deadline, early=True) if not self._buffer else b""
        self._buffer += first
        while len(self._buffer) < size:
            self._buffer += self._socket_read(deadline)
        try:
            head = frame.read_head(self._buffer, _MOST)
        except WireError as error:
            raise Garbled(str(error)) from error
        end = size + head.size
        payload = self._exactly(size, end, deadline)
        self.used = True
        return head, payload

    def _exactly(self, start: int, end: int, deadline: float) -> bytes | bytearray:
        """The buffer from ``start`` to ``end``, read as far as it is missing; nothing of it stays."""
        buffer = self._buffer
        while len(buffer) < end:
            buffer += self._socket_read(deadline)
        found = bytes(memoryview(buffer)[start:end])
        del buffer[:end]
        return found

    def _socket_read(self, deadline: float, *, early: bool = False) -> bytes:
        self._socket.settimeout(wait_seconds(deadline))
        try:
            piece = self._socket.recv(1 << 18)
        except ConnectionError as error:
            raise Broken(f"the connection broke: {error}", early=early) from error
        if not piece:
            raise Broken(
                "the server closed the connection" + ("" if early else " in the middle of its answer"), early=early
            )
        return piece

    def close(self) -> None:
        """Close it."""
        self._socket.close()


class _WebSocketWire(_Wire):
    """Frames as binary messages of a websocket (RFC 6455)."""

    def upgrade(self, address: Address, path: str, key: str | None, deadline: float) -> None:
        """Ask for the change of protocols."""
        nonce = base64.b64encode(os.urandom(16))
        lines = [
            f"GET {address.prefix}{path}/stream HTTP/1.1", f"Host: {address.authority}", f"User-Agent: {USER_AGENT}",
            "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {nonce.decode()}",
        ]  # fmt: skip
        if key is not None:
            lines.append(f"Authorization: Bearer {key}")
        self.send("\r\n".join([*lines, "", ""]).encode("latin-1"), deadline)
        plain = Connection.around(self._socket)
        answer, rest = plain.switch(deadline)
        if answer.status != 101:
            raise _RefusedError(answer)
        if answer.headers.get("sec-websocket-accept") != proof(nonce).decode():
            raise Garbled("the server changed to a protocol that was not asked for")
        self._buffer += rest

    def send(self, body: bytes, deadline: float) -> None:
        """Send a frame, as a message once the protocol is changed."""
        super().send(body if body.startswith(b"GET ") else _message(2, body), deadline)

    def receive(self, deadline: float) -> tuple[frame.Head, bytes | bytearray]:
        """Read the next binary message."""
        parts: list[bytes | bytearray] = []
        first = True
        while True:
            start = self._need(2, deadline, early=first and not self._buffer)
            first = False
            kind, final, size, at = start[0] & 15, bool(start[0] & 128), start[1] & 127, 2
            if start[0] & 0x70 or start[1] & 128:
                raise Garbled("a websocket frame is masked, or of an extension")
            if size > 125:
                at = 4 if size == 126 else 10
                size = int.from_bytes(self._need(at, deadline)[2:at], "big")
            if size > _MOST:
                raise Garbled(f"a websocket frame announces {size} bytes")
            payload = self._exactly(at, at + size, deadline)
            if kind == 9:
                super().send(_message(10, bytes(payload)), deadline)
            elif kind == 8:
                raise Broken(f"the server closed the websocket: {bytes(payload[2:])!r}", early=not parts)
            elif kind in {0, 2}:
                parts.append(payload)
                if final:
                    break
            elif kind != 10:
                raise Garbled(f"a websocket frame of kind {kind} came")
        message = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(message) < frame.HEAD.size:
            raise Garbled(f"a message of {len(message)} bytes came")
        try:
            head = frame.read_head(message, _MOST)
        except WireError as error:
            raise Garbled(str(error)) from error
        self.used = True
        return head, message[frame.HEAD.size :]

    def _need(self, size: int, deadline: float, *, early: bool = False) -> bytearray:
        while len(self._buffer) < size:
            self._buffer += self._socket_read(deadline, early=early)
            early = False
        return self._buffer


def _message(kind: int, payload: bytes) -> bytes:
    """A masked websocket frame."""
    size = len(payload)
    if size <= 125:
        head = bytes((128 | kind, 128 | size))
    elif size < 1 << 16:
        head = struct.pack(">BBH", 128 | kind, 254, size)
    else:
        head = struct.pack(">BBQ", 128 | kind, 255, size)
    mask = os.urandom(4)
    words = np.zeros((size + 3) // 4, np.uint32)
    words.view(np.uint8)[:size] = np.frombuffer(payload, np.uint8)
    words ^= np.frombuffer(mask, np.uint32)
    return head + mask + words.tobytes()[:size]


def _as_answer(payload: bytes | bytearray) -> Answer:
    """An error frame as the HTTP answer it stands for."""
    try:
        document = json.loads(payload)
        status = int(document["status"])
    except (ValueError, TypeError, LookupError):
        raise Garbled(f"an error came without a problem document: {bytes(payload[:80])!r}") from None
    headers = {"content-type": _PROBLEM}
    if isinstance(document.get("retry_after"), (int, float)):
        headers["retry-after"] = str(document["retry_after"])
    return Answer(status, headers, bytes(payload))


def _code(answer: Answer) -> str:
    error = from_answer(answer.status, answer.headers, bytes(answer.body), url="", path="", request_id=None)
    return getattr(error, "code", "")


__all__ = ["Absent", "Place", "Requests", "Stream", "Way", "parse_steps", "way_of"]
