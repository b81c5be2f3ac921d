"""Connections that carry frames, against peers that are silent, slow or do not read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from nepserve.app.stream import HEAD_SECONDS, FrameSocket, Stream
from nepserve.app.websocket import WebSocket, head
from nepserve.wire import frame

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from .conftest import Server

OPEN = frame.pack(frame.OPEN, orjson.dumps({"symbols": ["Si"], "cell": [[9, 0, 0], [0, 9, 0], [0, 0, 9]]}))


class Transport:
    """Takes what is written, and pauses its writer when told so."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.reading = True
        self.closed = False
        self.full: Stream | None = None

    def write(self, data: bytes) -> None:
        self.written.append(data)
        if self.full is not None:
            self.full.pause_writing()

    def get_extra_info(self, _: str) -> None:
        return None

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closed = True

    def kinds(self) -> list[int]:
        return [frame.read_head(each, 1 << 30).kind for each in self.written]


async def turns() -> None:
    """Let what was begun by a frame come to its end: an opening takes a turn of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)


def talk(server: Server, work: Callable[[FrameSocket, Transport], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        transport = Transport()
        stream = FrameSocket(server.app.stepping, set())
        stream.connection_made(transport)  # type: ignore[arg-type]
        await work(stream, transport)

    asyncio.run(main())


def test_who_never_opens_a_session_loses_the_connection(server: Server) -> None:
    async def work(stream: FrameSocket, transport: Transport) -> None:
        later = stream.loop.time() + HEAD_SECONDS + 1
        assert not stream.overdue(stream.loop.time())
        assert stream.overdue(later)
        stream.data_received(frame.pack(frame.OPEN, b"{}"))
        await turns()
        assert transport.kinds() == [frame.ERROR]
        assert stream.overdue(later)
        stream.data_received(OPEN)
        await turns()
        assert transport.kinds() == [frame.ERROR, frame.OPENED]
        assert not stream.overdue(later)
        (session,) = server.service.sessions._all.values()
        server.service.sessions.drop(session)
        assert stream.overdue(later)

    talk(server, work)


def test_who_does_not_read_answers_gets_no_more_of_them(server: Server) -> None:
    async def work(stream: FrameSocket, transport: Transport) -> None:
        transport.full = stream
        stream.data_received(3 * OPEN)
        await turns()
        assert transport.kinds() == [frame.OPENED]
        stream.data_received(bytes(2 << 20))
        await turns()
        assert not transport.reading
        del stream.buffer[-(2 << 20) :]
        stream.resume_writing()
        await turns()
        assert transport.kinds() == 2 * [frame.OPENED]
        assert transport.reading
        transport.full = None
        stream.resume_writing()
        await turns()
        assert transport.kinds() == 3 * [frame.OPENED]

    talk(server, work)


@pytest.mark.parametrize("first", [4, 24, 1000])
def test_a_long_frame_has_the_time_of_its_length_however_it_begins(server: Server, first: int) -> None:
    async def work(stream: FrameSocket, _: Transport) -> None:
        long = frame.pack(frame.OPEN, bytes(20_000_000))
        stream.data_received(long[:first])
        stream.data_received(long[first:2000])
        now = stream.loop.time()
        assert not stream.overdue(now + HEAD_SECONDS + 15)
        assert stream.overdue(now + HEAD_SECONDS + 25)

    talk(server, work)


@pytest.mark.parametrize(
    ("payload", "found"),
    [
        (b"{", "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b'{"api_key": "\\ud800"}', "bad_json"),
        (b'{"model": "a", "model": "b"}', "duplicate_key"),
        (b"[]", "bad_value"),
    ],
    ids=["half", "deep", "surrogate", "twice", "list"],
)
def test_openings_that_cannot_be_read(make: Callable[..., Server], payload: bytes, found: str) -> None:
    async def work(stream: FrameSocket, transport: Transport) -> None:
        stream.data_received(frame.pack(frame.OPEN, payload))
        await turns()
        assert orjson.loads(transport.written[0][frame.HEAD.size :])["code"] == found

    talk(make(api_keys=("one:0123456789abcdef",)), work)


@pytest.mark.parametrize("announced", [b"\x02\x84", b"\x02\xff" + 7 * b"\xff"], ids=["short", "endless"])
def test_a_message_in_pieces_has_its_time_like_any_other(server: Server, announced: bytes) -> None:
    async def main() -> None:
        stepping = server.app.stepping
        session = await stepping.open({"symbols": ["Si"]}, "one")
        transport: Any = Transport()
        stream = WebSocket(stepping, set(), transport, session)
        # The mask is of zeros, the end of the message does not come.
        stream.data_received(announced + bytes(8) if announced[1] == 0x84 else announced)
        now = stream.loop.time()
        longest = HEAD_SECONDS + stepping.service.limits.max_body / 1e6
        assert not stream.overdue(now)
        assert stream.overdue(now + longest + 1)

    asyncio.run(main())


def test_heads_of_messages() -> None:
    assert [len(head(2, size)) for size in (125, 126, 65535, 65536)] == [2, 4, 4, 10]
