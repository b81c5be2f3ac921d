"""Reading request bodies: bounded in size before and after decompression, and in time."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING

from nepserve.wire.request import WireError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Receive

MIN_RATE = 1e6
"""Bytes per second that earn a slow sender more time."""


MAX_MEMBERS = 10_000
"""Gzip members in one body; programs write one, or one for every 64 kB. Each costs time, even if nothing is in it."""

_WINDOW = 64 * 1024


class ClientGone(Exception):  # noqa: N818 (nobody is told: there is no one left to tell)
    """The client went away while its request was read."""


class Bodies:
    """The bodies that are being read.

    Bodies are read without a timer each: :meth:`sweep`, called about once a second, finds those that take too long,
    and :meth:`cut` ends them all when the server stops.
    """

    def __init__(self, limit: int, timeout: float) -> None:
        self.limit = limit
        self.timeout = timeout
        self._reading: set[_Body] = set()

    def check(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the body that headers announce is compressed.

        Raises:
            WireError: 413 too large, 415 unknown encoding.
        """
        announced = headers.get(b"content-length")
        if announced is not None and (not announced.isdigit() or int(announced) > self.limit):
            raise too_large(self.limit)
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in {b"identity", b"gzip", b""}:
            raise WireError(
                None,
                "unsupported_media_type",
                f"Content-Encoding {encoding.decode('latin-1')!r} is not spoken here; wanted gzip or none",
                types=["gzip", "identity"],
            )
        return encoding == b"gzip"

    async def read(self, receive: Receive, headers: Mapping[bytes, bytes]) -> bytes | bytearray:
        """The whole body, decompressed.

        Raises:
            WireError: As :meth:`check`; 408 too slow, 400 not what its encoding says.
            ClientGone: The connection broke.
        """
        compressed = self.check(headers)
        body = await self._receive(receive)
        return await asyncio.to_thread(gunzip, body, self.limit) if compressed else body

    async def _receive(self, receive: Receive) -> bytes | bytearray:
        entry = _Body(asyncio.current_task(), asyncio.get_running_loop().time() + self.timeout)
        self._reading.add(entry)
        try:
            body: bytes | bytearray = b""
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                if len(body) + len(chunk) > self.limit:
                    raise too_large(self.limit)
                if not message.get("more_body", False) and not body:
                    return chunk
                if isinstance(body, bytes):
                    # One block that grows: a list of chunks and their sum would take the memory twice.
                    body = bytearray(body)
                body += chunk
                if not message.get("more_body", False):
                    return body
                entry.deadline += len(chunk) / MIN_RATE
        except asyncio.CancelledError:
            if entry.reason is None or entry.task is None:
                raise
            if hasattr(entry.task, "uncancel"):  # Python 3.11
                entry.task.uncancel()
            raise entry.reason from None
        finally:
            self._reading.discard(entry)

    def sweep(self, now: float) -> int:
        """End what is overdue at the event loop's time ``now``; returns how many."""
        late = [entry for entry in self._reading if entry.deadline < now and entry.reason is None]
        for entry in late:
            entry.end(WireError(None, "request_timeout", f"the body did not arrive within {self.timeout:g} s"))
        return len(late)

    def cut(self, reason: WireError) -> None:
        """End them all."""
        for entry in list(self._reading):
            entry.end(reason)


def too_large(limit: int) -> WireError:
    """Refusal of a body over the limit."""
    return WireError(
        None,
        "body_too_large",
        f"the body is larger than {limit:,} bytes, the most that is taken here (after decompression, if any)",
        max_bytes=limit,
    )


class _Body:
    """One body on its way: the task that reads it and until when."""

    __slots__ = ("deadline", "reason", "task")

    def __init__(self, task: asyncio.Task[object] | None, deadline: float) -> None:
        self.task = task
        self.deadline = deadline
        self.reason: WireError | None = None

    def end(self, reason: WireError) -> None:
        self.reason = reason
        if self.task is not None:
            self.task.cancel()


def gunzip(data: bytes | bytearray, limit: int) -> bytes:
    """Decompress; never holds more than ``limit`` bytes of the result.

    Raises:
        WireError: 413 if more would come out, 400 if it is not gzip, ends early or has too many members.
    """
    view = memoryview(data)
    parts: list[bytes] = []
    start, left, members = 0, limit, 0
    member = None
    while start < len(view):
        if member is None:
            members += 1
            if members > MAX_MEMBERS:
                raise WireError(None, "bad_encoding", f"the gzip body has more than {MAX_MEMBERS:,} members")
            member = zlib.decompressobj(wbits=31)
        # What follows the end of a member is handed back as a copy: of a window, not of all that is left.
        window = view[start : start + _WINDOW]
        try:
            part = member.decompress(window, left + 1)
        except zlib.error as error:
            raise WireError(None, "bad_encoding", f"the body is not gzip: {error}") from None
        left -= len(part)
        if left < 0:
            raise too_large(limit)
        parts.append(part)
        start += len(window) - len(member.unused_data)
        if member.eof:
            member = None
    if member is not None:
        raise WireError(None, "bad_encoding", "the gzip body ends early")
    return b"".join(parts)
