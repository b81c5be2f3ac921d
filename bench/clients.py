"""Clients for the load benchmark: prebuilt requests, one event loop, answers that are compared and not kept."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from nepserve.wire import msgpack_format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.load import Server
    from nepcore import Structures

PROPERTIES = ("energy", "forces")


@dataclass
class Body:
    """A request, head included, and what came back for it the first time."""

    data: bytes
    structures: int
    expected: bytes = b""


def body(block: Structures, priority: str = "") -> Body:
    content = msgpack_format.pack_request(block, PROPERTIES, None, "f4")
    head = f"POST /v1/evaluate HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\n{priority}"
    return Body(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content, len(block))


def bodies(block: Structures, each: int, priority: str = "") -> list[Body]:
    return [body(block.slice(a, a + each), priority) for a in range(0, len(block), each)]


class Client(asyncio.Protocol):
    """One kept connection with one request in flight."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._wanted = -1
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: Any = None

    @classmethod
    async def connect(cls, port: int) -> Client:
        _, client = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"the server closed the connection: {error}"))

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._wanted < 0:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            found = re.search(rb"content-length: (\d+)", self._data[:end], re.IGNORECASE)
            assert found is not None
            self._wanted = end + 4 + int(found[1])
            self._head = end + 4
        if len(self._data) >= self._wanted and self._answer is not None:
            answer, self._answer = self._answer, None
            answer.set_result((int(self._data[9:12]), bytes(self._data[self._head :])))
            self._data.clear()
            self._wanted = -1

    async def post(self, request: bytes) -> tuple[int, bytes]:
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        self._transport.close()


@dataclass
class Counts:
    """What came of a point of a sweep, in its window of time."""

    exact: bool
    structures: int = 0
    good: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    wrong: int = 0
    seconds: float = 0.0
    spent: str = ""
    engine_cpu: float = 0.0
    busy: float = 0.0

    def note(self, sent: Body, status: int, content: bytes, took: float) -> None:
        if status == 200:
            self.good.append(took)
            self.structures += sent.structures
            if not sent.expected:
                sent.expected = content
            elif content != sent.expected and (self.exact or len(content) != len(sent.expected)):
                self.wrong += 1
        elif status == 429:
            self.refused.append(took)
        else:
            raise RuntimeError(f"HTTP {status}: {content[:300]!r}")

    @property
    def rate(self) -> float:
        """Structures/s."""
        return self.structures / self.seconds if self.seconds else 0.0

    def row(self, name: str) -> str:
        p50, p99 = quantiles(self.good)
        text = f"{name:<34} {self.rate:>11.1f} {1e3 * p50:>10.2f} {1e3 * p99:>10.2f}"
        if self.refused:
            text += f"   refused {len(self.refused)}, answered after {1e3 * median(self.refused):.2f} ms (p50)"
        return text + self.spent + (f"   {self.wrong} ANSWERS DIFFER" if self.wrong else "")


def quantiles(seconds: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(seconds) or [float("nan")]
    return median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


HEADER = f"{'':<34} {'structures/s':>12} {'p50 ms':>9} {'p99 ms':>10}"


async def prime(port: int, requests: Sequence[Body]) -> None:
    """Ask for each body alone, so that there is something to compare with."""
    client = await Client.connect(port)
    for each in requests:
        status, each.expected = await client.post(each.data)
        if status != 200:
            raise RuntimeError(f"HTTP {status}: {each.expected[:300]!r}")
    client.close()


async def closed_loop(server: Server, requests: Sequence[Body], clients: int, seconds: float, *, exact: bool) -> Counts:
    """Clients with one request in flight each; counted after each of them had an answer."""
    counts = Counts(exact)
    port = server.port
    before: tuple[float, ...] = ()
    links = [await Client.connect(port) for _ in range(clients)]
    turn = itertools.cycle(requests)
    loop = asyncio.get_running_loop()
    warm = 0
    begin, end = 0.0, loop.time() + 20 * seconds

    async def work(link: Client) -> None:
        nonlocal warm, begin, end, before
        first = True
        while loop.time() < end:
            sent = next(turn)
            started = loop.time()
            status, content = await link.post(sent.data)
            now = loop.time()
            if begin and now <= end:
                counts.note(sent, status, content, now - started)
                counts.seconds = now - begin
            if first:
                first = False
                warm += 1
                if warm == clients:
                    # The queue is as long as it will be; time begins to count.
                    before = server.spent()
                    begin, end = loop.time(), loop.time() + seconds

    await asyncio.gather(*(work(link) for link in links))
    if before and counts.structures:
        # Until the last answer, which may have come after the window.
        passed = loop.time() - begin
        front, engine, busy = (now - then for now, then in zip(server.spent(), before, strict=True))
        done = max(1.0, counts.rate * passed)
        counts.spent = f"   front {1e3 * front / done:.3f}"
        if server.engine:
            counts.engine_cpu, counts.busy = 1e3 * engine / done, busy / passed
            counts.spent += f", engine {counts.engine_cpu:.3f} ms cpu a structure, busy {counts.busy:.0%}"
    for link in links:
        link.close()
    return counts


async def open_loop(
    server: Server, requests: Sequence[Body], per_second: float, seconds: float, *, exact: bool, most: int = 2000
) -> Counts:
    """Requests by the clock, each on a connection that is free, or a new one; the first fifth is not counted."""
    counts = Counts(exact)
    port, before = server.port, server.spent()
    free: list[Client] = []
    tasks: set[asyncio.Task[None]] = set()
    turn = itertools.cycle(requests)
    loop = asyncio.get_running_loop()
    begin = loop.time()
    counted = begin + seconds / 5

    async def one(sent: Body, due: float) -> None:
        link = free.pop() if free else await Client.connect(port)
        # A refusal is answered at once: its time counts from the sending. Work counts from when it was due.
        started = loop.time()
        status, content = await link.post(sent.data)
        now = loop.time()
        free.append(link)
        if counted <= now <= begin + seconds:
            counts.note(sent, status, content, now - (due if status == 200 else started))

    number = int(per_second * seconds)
    for i in range(number):
        due = begin + i / per_second
        if (pause := due - loop.time()) > 0:
            await asyncio.sleep(pause)
        if len(tasks) < most:
            task = asyncio.ensure_future(one(next(turn), due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    counts.seconds = seconds - seconds / 5
    passed = loop.time() - begin
    counts.spent = f"   engine busy {(server.spent()[2] - before[2]) / passed:.0%}"
    for link in free:
        link.close()
    return counts


async def steps(port: int, request: Body, calls: int, pause: float) -> list[float]:
    """Seconds of each call of one client that makes a pause between two, as an integrator does."""
    link = await Client.connect(port)
    took = []
    for _ in range(calls):
        await asyncio.sleep(pause)
        started = time.perf_counter()
        status, content = await link.post(request.data)
        took.append(time.perf_counter() - started)
        if status != 200:
            raise RuntimeError(f"HTTP {status}: {content[:300]!r}")
    link.close()
    return took


@contextlib.asynccontextmanager
async def flood(port: int, requests: Sequence[Body], clients: int) -> Any:
    """Clients that send without end; what they get is not looked at."""
    links = [await Client.connect(port) for _ in range(clients)]
    turn = itertools.cycle(requests)

    async def work(link: Client) -> None:
        while True:
            await link.post(next(turn).data)

    tasks = [asyncio.ensure_future(work(link)) for link in links]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in links:
            link.close()
