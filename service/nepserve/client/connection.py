"""One HTTP/1.1 connection, kept alive, on a plain socket.

``http.client`` sends head and body apart and reads headers through the e-mail parser, which at a thousand atoms is
half of the call; and it bounds single reads by a time, not the whole answer. Here a request leaves in one piece and
its answer is read by the clock. Requests need no more of HTTP than this: a length on the way out, a length or chunks
on the way back.
"""

from __future__ import annotations

import os
import re
import select
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .address import Address

MAX_HEAD = 65_536
"""Bytes of status line and headers accepted."""

KEEP_ALIVE = tuple(
    (level, getattr(socket, name), value)
    for level, name, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 5),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 2),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
    )
    if hasattr(socket, name)
)
"""Socket options by which the end of a machine that lost its power or its network is noticed after 13 s, while its
answer is waited for."""

_UNTAKEN_MS = 13_000
"""The same while a request is sent. Not for large bodies, which a server may leave untaken while it is busy."""

_JOIN = 262_144
"""Bodies up to this many bytes are copied behind their head, so that one call sends both."""

_PIECE = 65_536
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}")


class Garbled(Exception):  # noqa: N818 - never leaves the client, which turns it into InvalidAnswer
    """What came back is not HTTP."""


class Broken(ConnectionError):  # noqa: N818 - as the standard library's own
    """The server closed the connection.

    Attributes:
        early: Whether not one byte of the answer had come: then a kept connection was just closed while idle.
    """

    def __init__(self, message: str, *, early: bool) -> None:
        super().__init__(message)
        self.early = early


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Attributes:
        status: HTTP status.
        headers: Values by lower-case name; the last one of a repeated header.
        body: The body, complete by its own account of its length.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes | bytearray


class Connection:
    """A connection to ``address``, open from the start.

    Args:
        address: Where to.
        tls: The context for ``https://``; None otherwise.
        deadline: ``time.monotonic()`` by which the connection must stand.

    Raises:
        OSError: It could not be opened (``TimeoutError``: not in time).
    """

    def __init__(self, address: Address, tls: ssl.SSLContext | None, deadline: float) -> None:
        self.process = os.getpid()
        self.used = False
        """Whether it has already carried an answer: only then a sudden end may mean that it had been idle too long."""
        self.keep = True
        """Whether the server will take another request on it."""
        self._rest = bytearray()
        self._watched = False
        self._socket = open_socket(address, tls, deadline)

    @classmethod
    def around(cls, connected: socket.socket) -> Connection:
        """A connection on a socket that is open already."""
        found = cls.__new__(cls)
        found.__dict__.update(
            process=os.getpid(), used=False, keep=True, _rest=bytearray(), _watched=False, _socket=connected
        )
        return found

    def switch(self, deadline: float) -> tuple[Answer, bytes]:
        """Read the answer to a request for another protocol, and what came behind its head if it was agreed to.

        Raises:
            Broken, TimeoutError, Garbled: As :meth:`receive`.
        """
        status, headers, _ = self._head(deadline)
        if status == 101:
            return Answer(status, headers, b""), bytes(self._rest)
        return Answer(status, headers, self._body(status, headers, deadline)), b""

    def send(self, head: bytes, body: bytes, deadline: float) -> None:
        """Send a request.

        Raises:
            OSError: The connection broke before the request was out. If the server gave its answer before it closed
                (it refuses a body without reading it), :meth:`receive` still has it, and nothing is raised.
        """
        self._socket.settimeout(wait_seconds(deadline))
        try:
            self._watch_sending(len(body) <= _JOIN)
            if len(body) <= _JOIN:
                self._socket.sendall(head + body)
            else:
                self._socket.sendall(head)
                self._send_watching(body, deadline)
        except (BrokenPipeError, ConnectionResetError):
            self.keep = False
            if not self._answered():
                raise Broken("the server closed the connection while the request was sent", early=True) from None

    def _watch_sending(self, watch: bool) -> None:
        if watch != self._watched and hasattr(socket, "TCP_USER_TIMEOUT") and self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNTAKEN_MS if watch else 0)
            self._watched = watch

    def _send_watching(self, body: bytes, deadline: float) -> None:
        """Send a large body, but stop when an answer comes before its end: it is refused, and nobody reads the rest."""
        if isinstance(self._socket, ssl.SSLSocket) or not hasattr(select, "poll"):
            # What can be read from a TLS socket need not be an answer.
            self._socket.settimeout(wait_seconds(deadline))
            self._socket.sendall(body)
            return
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLOUT)
        self._socket.setblocking(False)
        left = memoryview(body)
        while left:
            events = poll.poll(1000.0 * wait_seconds(deadline))
            if not events:
                raise TimeoutError("the time for the call is over")
            if events[0][1] & ~select.POLLOUT:
                self.keep = False
                return
            with suppress(BlockingIOError):
                left = left[self._socket.send(left[:_JOIN]) :]

    def receive(self, deadline: float) -> Answer:
        """Read the answer to the request sent last.

        Raises:
            Broken: The connection ended before the answer did.
            TimeoutError: The answer was not whole at ``deadline``.
            Garbled: It is not HTTP.
        """
        while True:
            status, headers, version = self._head(deadline)
            if status >= 200:
                break
            if status == 101:
                raise Garbled("the server switched to another protocol")
        tokens = {token.strip().lower() for token in headers.get("connection", "").split(",")}
        if "close" in tokens or (version == "HTTP/1.0" and "keep-alive" not in tokens):
            self.keep = False
        body = self._body(status, headers, deadline)
        self.used = True
        if self._rest:
            # Something came that nobody asked for: the next answer could be taken for another.
            self.keep = False
        return Answer(status, headers, body)

    @property
    def ready(self) -> bool:
        """Whether an answer (or the end) has begun to arrive."""
        return bool(self._rest) or _readable(self._socket)

    def fileno(self) -> int:
        """Number of its socket."""
        return self._socket.fileno()

    @property
    def stale(self) -> bool:
        """Whether it cannot be used again: closed by the server while idle, or inherited through a fork."""
        return not self.keep or self.process != os.getpid() or _readable(self._socket)

    def close(self) -> None:
        """Close it; a server that still works on a request sees that nobody waits."""
        self._socket.close()

    def _answered(self) -> bool:
        try:
            if not _readable(self._socket):
                return False
            self._rest += self._socket.recv(_PIECE)
        except OSError:
            return False
        return bool(self._rest)

    def _more(self, deadline: float, *, early: bool) -> None:
        """Read at least one more byte into the rest."""
        self._socket.settimeout(wait_seconds(deadline))
        try:
            piece = self._socket.recv(_PIECE)
        except (ConnectionError, ssl.SSLError) as error:
            raise Broken(f"the connection broke: {error}", early=early) from error
        if not piece:
            raise Broken(
                "the server closed the connection" + ("" if early else " in the middle of its answer"), early=early
            )
        self._rest += piece

    def _head(self, deadline: float) -> tuple[int, dict[str, str], str]:
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            if len(self._rest) > MAX_HEAD:
                raise Garbled(f"more than {MAX_HEAD} bytes came without an end of the headers")
            if not b"HTTP/1.".startswith(self._rest[:7]):
                raise Garbled(f"the answer starts with {bytes(self._rest[:40])!r}, which is not HTTP/1.1")
            self._more(deadline, early=not self._rest)
        first, *lines = self._rest[:end].decode("latin-1").split("\r\n")
        del self._rest[: end + 4]
        version, _, tail = first.partition(" ")
        code = tail[:3]
        if not (version in {"HTTP/1.1", "HTTP/1.0"} and len(code) == 3 and code.isascii() and code.isdigit()):
            raise Garbled(f"the answer starts with {first[:80]!r}, which is not HTTP/1.1")
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise Garbled(f"{line[:80]!r} is not a header")
            key, value = name.lower(), value.strip()
            if key == "content-length" and headers.get(key, value) != value:
                raise Garbled("two different lengths are announced")
            headers[key] = value
        return int(code), headers, version

    def _body(self, status: int, headers: Mapping[str, str], deadline: float) -> bytes | bytearray:
        if status in {204, 304}:
            return b""
        coding = headers.get("transfer-encoding", "").lower()
        if coding == "chunked":
            return self._chunks(deadline)
        if coding and coding != "identity":
            raise Garbled(f"transfer encoding {coding!r} was not asked for")
        length = headers.get("content-length")
        if length is None:
            return self._until_close(deadline)
        if not (length.isascii() and length.isdigit()):
            raise Garbled(f"{length[:40]!r} is not a length")
        return self._exactly(int(length), deadline)

    def _exactly(self, length: int, deadline: float) -> bytearray:
        if length <= len(self._rest):
            body = self._rest[:length]
            del self._rest[:length]
            return body
        try:
            body = bytearray(length)
        except (MemoryError, OverflowError):
            raise Garbled(f"an answer of {length} bytes does not fit into memory") from None
        have = len(self._rest)
        body[:have] = self._rest
        self._rest.clear()
        with memoryview(body) as view:
            while have < length:
                self._socket.settimeout(wait_seconds(deadline))
                try:
                    got = self._socket.recv_into(view[have:])
                except (ConnectionError, ssl.SSLError) as error:
                    raise Broken(
                        f"the connection broke after {have} of {length} bytes: {error}", early=False
                    ) from error
                if not got:
                    raise Broken(f"the answer ended after {have} of {length} bytes", early=False)
                have += got
        return body

    def _chunks(self, deadline: float) -> bytearray:
        body = bytearray()
        while True:
            line = self._line(deadline)
            size = line.partition(b";")[0].strip()
            # int() alone would take signs, blanks and underscores.
            if not _CHUNK_SIZE.fullmatch(size):
                raise Garbled(f"{bytes(line[:40])!r} is not the size of a chunk")
            length = int(size, 16)
            if not length:
                break
            body += self._exactly(length, deadline)
            if self._line(deadline):
                raise Garbled("a chunk is longer than announced")
        while self._line(deadline):
            pass
        return body

    def _line(self, deadline: float) -> bytearray:
        while (end := self._rest.find(b"\r\n")) < 0:
            if len(self._rest) > MAX_HEAD:
                raise Garbled("a line between two chunks does not end")
            self._more(deadline, early=False)
        line = self._rest[:end]
        del self._rest[: end + 2]
        return line

    def _until_close(self, deadline: float) -> bytearray:
        self.keep = False
        try:
            while True:
                self._more(deadline, early=True)
        except Broken as end:
            if not end.early or end.__cause__ is not None:
                raise
        body = self._rest
        self._rest = bytearray()
        return body


def first_ready(connections: Sequence[Connection | None]) -> int:
    """Index of the first whose answer (or end) has begun to arrive, which is waited for a second at most; else 0.

    None stands for a request that could not be sent, which is to be seen to at once.
    """
    for k, connection in enumerate(connections):
        if connection is None or connection.ready:
            return k
    if not hasattr(select, "poll"):
        return 0
    poll = select.poll()
    places = {}
    for k, connection in enumerate(connections):
        assert connection is not None
        places[connection.fileno()] = k
        poll.register(connection.fileno(), select.POLLIN)
    # An interpreter that waits here takes no longer than this to see that the time of a call is over.
    found = poll.poll(1000.0)
    return min((places[number] for number, _ in found), default=0)


def open_socket(address: Address, tls: ssl.SSLContext | None, deadline: float) -> socket.socket:
    """A connected socket.

    Raises:
        OSError: It could not be opened (``TimeoutError``: not in time).
    """
    if address.socket is not None:
        if not hasattr(socket, "AF_UNIX"):
            raise OSError("unix sockets do not exist on this platform")
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            plain.settimeout(wait_seconds(deadline))
            plain.connect(address.socket)
        except BaseException:
            plain.close()
            raise
        return plain
    plain = socket.create_connection((address.host, address.port), wait_seconds(deadline))
    try:
        # Without it the kernel may hold a small request back until the last answer is acknowledged.
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in KEEP_ALIVE:
            plain.setsockopt(*option)
        if tls is None:
            return plain
        plain.settimeout(wait_seconds(deadline))
        return tls.wrap_socket(plain, server_hostname=address.host)
    except BaseException:
        plain.close()
        raise


def wait_seconds(deadline: float) -> float:
    """Seconds until the deadline, for the next operation on a socket."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time for the call is over")
    # More does not fit into the operating system's numbers.
    return min(left, 1e6)


def _readable(open_socket: socket.socket) -> bool:
    """Whether a read would not wait; on an idle connection this means that the server closed it."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(open_socket, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([open_socket], [], [], 0)[0])
