"""Many clients against one server: structures/s and latency against the load offered, beside two yardsticks.

    python bench/load.py [--seconds 4] [--backend auto] [--device cpu] [--only closed,offered,urgent,overload]

All in one run, on rattled and strained silicon crystals of 32 to 256 atoms, prebuilt MessagePack bodies, float32:

ideal     the same model called in a process of its own, in batches as large as pay, no server at all; measured before
          and after everything else, since a machine that others use changes under one's hands
naive     the server that one writes in an afternoon: one request is one evaluation under a lock, same wire format
closed    1, 8, 64, 256 clients with one request in flight each, 1 and 64 structures a body
offered   requests by the clock, whether answers come or not, at 25 to 100 % of the best rate found
urgent    one client with 64 atoms a call and 2 ms between calls: alone, and while bulk requests flood the server
overload  three times the best rate against a queue that is bounded to about two seconds of work

On two cores the engine (one thread) has one of them, front and generator share the other; with more cores each has its
own. Every answer is compared with the first answer to the same body: on a CPU byte by byte, on a GPU by its length.

Beside the rates stand what other programs on the machine cannot change much: processor time for a structure, of the
library, of the engine and of the front with its share of decoding and encoding, and the share of the time in which the
engine had a batch to work on.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its http.py would hide the library's

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import systems
from nepcore import Structure, Structures
from nepserve.wire import msgpack_format

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROPERTIES = ("energy", "forces")
REPEATS = ((2, 2, 1), (2, 2, 2), (4, 2, 2), (4, 4, 2))
"""Of the cubic cell of 8 atoms: 32, 64, 128 and 256 atoms."""
CLIENTS = (1, 8, 64, 256)
OFFERED = (0.25, 0.5, 0.75, 0.9, 1.0)
SWEEPS = {"ideal", "naive", "closed", "offered", "urgent", "overload"}


def crystals(count: int, seed: int = 0) -> Structures:
    """Rattled and strained crystals of 32 to 256 atoms, the four sizes in turn."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        species, positions, cell = systems.cells.base("si5", REPEATS[i % 4], 0.1, int(rng.integers(1 << 30)))
        strain = np.eye(3) + rng.normal(0, 0.02, (3, 3))
        made.append(Structure.make(species, positions @ strain, cell @ strain))
    return Structures.pack(made)


# -- processes -----------------------------------------------------------------------------------------------------


def cores() -> tuple[set[int], set[int], set[int]]:
    """Cores of the engine, the front and the generator."""
    if not hasattr(os, "sched_getaffinity"):
        return set(), set(), set()
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        return set(mine), set(mine), set(mine)
    return {mine[0]}, {mine[1]}, {mine[2]} if len(mine) > 2 else {mine[1]}


def pin(pid: int, where: set[int]) -> None:
    """Keep a process and all its threads on these cores."""
    if where:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), where)


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen[bytes]
    port: int
    engine: int = 0

    def spent(self) -> tuple[float, float, float]:
        """Processor seconds of front and engine so far, and seconds that batches took."""
        if not self.engine:
            return processor_seconds(self.process.pid), 0.0, 0.0
        return (
            processor_seconds(self.process.pid), processor_seconds(self.engine),
            self.metric("nepserve_batch_device_seconds_sum"),
        )  # fmt: skip

    def get(self, path: str) -> tuple[int, bytes]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            link.request("GET", path)
            answer = link.getresponse()
            return answer.status, answer.read()
        finally:
            link.close()

    def metric(self, name: str) -> float:
        """Sum of a series of /metrics over its labels."""
        lines = self.get("/metrics")[1].decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}(\{{|\s)", line))


def processor_seconds(pid: int) -> float:
    """Processor time of a process and all its threads, where the system says."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(options: argparse.Namespace, *flags: str, naive: bool = False) -> Iterator[Server]:
    """A ready server; ended afterwards."""
    on_engine, on_front, _ = cores()
    if naive:
        where = on_engine | on_front
        words = [str(Path(__file__).resolve()), "--be-naive", options.device, options.backend]
    else:
        where = on_front
        program = "from nepserve.cli import main; main()"
        words = [
            *("-c", program, "serve", f"si={systems.MODELS['si5']}", "--port", "0", "--device", options.device),
            *("--threads", "1", "--backend", options.backend, "--log-level", "info", *flags),
        ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env=environment)  # fmt: skip
    try:
        if where:
            os.sched_setaffinity(process.pid, where)
        server = Server(process, _port(process))
        end = time.monotonic() + 300
        while server.get("/readyz")[0] != 200:
            if time.monotonic() > end or process.poll() is not None:
                sys.exit("the server was not ready within five minutes")
            time.sleep(0.05)
        pin(process.pid, where)
        if not naive:
            server.engine = int(json.loads(server.get("/v1/status")[1])["engine"]["pid"])
            pin(server.engine, on_engine)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line.decode(errors="replace"))
        found = re.search(r"127\.0\.0\.1:(\d+)", said[-1])
        if found:
            # What it says from here on is not read: it must not block the server once the pipe is full.
            os.set_blocking(process.stdout.fileno(), False)
            return int(found[1])
    sys.exit(f"the server did not start (exit code {process.wait()}):\n{''.join(said)}")


# -- the generator -------------------------------------------------------------------------------------------------


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
            counts.spent += f", engine {1e3 * engine / done:.3f} ms cpu a structure, busy {busy / passed:.0%}"
    for link in links:
        link.close()
    return counts


async def open_loop(
    port: int, requests: Sequence[Body], per_second: float, seconds: float, *, exact: bool, most: int = 2000
) -> Counts:
    """Requests by the clock, each on a connection that is free, or a new one; the first fifth is not counted."""
    counts = Counts(exact)
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


# -- the yardsticks ------------------------------------------------------------------------------------------------


def library(device: str, backend: str) -> Any:
    """The model in this process; with ``auto`` it measures as the server does, and so finds what the server takes."""
    import nepcore

    calculator = nepcore.load(systems.MODELS["si5"], device=device, backend=backend)
    for _ in calculator.tune(30.0 if device == "cpu" else 180.0):
        pass
    return calculator


def be_ideal(device: str, backend: str, seconds: float) -> None:
    """Print structures/s of the library in batches of the size that pays most."""
    calculator = library(device, backend)
    block = crystals(512)
    best: tuple[float, int, float] = (0.0, 0, 0.0)
    for size in (64, 256, 512, 2048, 8192):
        batch = Structures.concatenate([block] * (size // 512)) if size > 512 else block.slice(0, size)
        calculator.evaluate(batch, PROPERTIES)["forces"]
        done, begin, cpu = 0, time.perf_counter(), time.process_time()
        while (passed := time.perf_counter() - begin) < seconds / 2 or done == 0:
            calculator.evaluate(batch, PROPERTIES)["forces"]
            done += size
        passed = time.perf_counter() - begin
        best = max(best, (done / passed, size, 1e3 * (time.process_time() - cpu) / done))
        if size > 4 * best[1] or passed > 4 * seconds:
            break
    print(json.dumps([*best, calculator.backend]))


def be_naive(device: str, backend: str) -> None:
    """Serve: one request is one evaluation in a thread, one after the other."""
    import uvicorn

    from nepserve import wire
    from nepserve.wire.request import Limits

    calculator = library(device, backend)
    calculator.evaluate(crystals(64), PROPERTIES)
    turn = asyncio.Lock()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        content = b""
        while True:
            message = await receive()
            content += message.get("body", b"")
            if not message.get("more_body"):
                break
        answer = b"ok"
        if scope["path"] == "/v1/evaluate":
            request = wire.decode("application/msgpack", content, limits=Limits(1 << 30, 100_000, 4_000_000), query={})
            async with turn:
                found = await asyncio.to_thread(calculator.evaluate, request.structures, request.properties)
            answer = wire.encode(request, found, "application/msgpack", "si")[1]
        headers = [(b"content-length", b"%d" % len(answer)), (b"content-type", b"application/msgpack")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    uvicorn.run(app, host="127.0.0.1", port=0, log_level="info", access_log=False)


def ideal(options: argparse.Namespace) -> tuple[float, int, float, str]:
    """Structures/s, the batch they came in, processor time of a structure in ms, and the name of the backend."""
    on_engine = cores()[0]
    words = ["--be-ideal", options.device, options.backend, str(options.seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), *words], stdout=subprocess.PIPE, text=True, env=environment
    )
    if on_engine:
        os.sched_setaffinity(process.pid, on_engine)
    output, _ = process.communicate(timeout=600)
    if process.returncode:
        sys.exit("the library could not be measured")
    rate, size, cpu, name = json.loads(output.splitlines()[-1])
    return rate, size, cpu, name


# -- the sweeps ----------------------------------------------------------------------------------------------------


async def closed(server: Server, block: Structures, options: argparse.Namespace, name: str) -> dict[int, float]:
    """Best rate by structures in a body."""
    best = {}
    for each in (1, 64):
        requests = bodies(block, each)
        await prime(server.port, requests)
        best[each] = 0.0
        for clients in CLIENTS:
            if clients * each > 10 * options.seconds * max(best.values()) > 0:
                print(f"{name}, {clients} clients, {each} a body: left out, each would wait too long", flush=True)
                continue
            found = await closed_loop(server, requests, clients, options.seconds, exact=options.exact)
            best[each] = max(best[each], found.rate)
            print(found.row(f"{name}, {clients} clients, {each} a body"), flush=True)
    return best


async def offered(server: Server, block: Structures, best: float, options: argparse.Namespace) -> None:
    requests = bodies(block, 64)
    await prime(server.port, requests)
    for share in OFFERED:
        rate = share * best / 64
        found = await open_loop(server.port, requests, rate, 3 * options.seconds, exact=options.exact)
        print(found.row(f"offered {share * best:.0f}/s ({share:.0%})"), flush=True)


async def urgent(server: Server, block: Structures, options: argparse.Namespace) -> None:
    """A lone client's calls, in quiet and during a flood."""
    one = body(Structures.pack([Structure.make(*systems.cells.base("si5", (2, 2, 2), 0.1, 5))]))
    calls = max(50, int(40 * options.seconds))
    await steps(server.port, one, 20, 0.002)
    quiet = quantiles(await steps(server.port, one, calls, 0.002))
    print(f"{'64 atoms, alone':<34} {'':>11} {1e3 * quiet[0]:>10.2f} {1e3 * quiet[1]:>10.2f}")
    bulk = bodies(block, 64, "X-Priority: bulk\r\n")
    whole = [body(Structures.concatenate([block] * max(1, 4096 // len(block))))]
    for what, requests, clients in (("64 clients of bulk bodies", bulk, 64), ("two uploads of 4,096", whole, 2)):
        count, total = server.metric("nepserve_batches_total"), server.metric("nepserve_batch_device_seconds_sum")
        async with flood(server.port, requests, clients):
            await asyncio.sleep(options.seconds / 2)
            took = quantiles(await steps(server.port, one, calls, 0.002))
        batch = (server.metric("nepserve_batch_device_seconds_sum") - total) / (
            server.metric("nepserve_batches_total") - count
        )
        print(
            f"{'64 atoms, ' + what:<34} {'':>11} {1e3 * took[0]:>10.2f} {1e3 * took[1]:>10.2f}"
            f"   p50 + {1e3 * (took[0] - quiet[0]):.1f} ms; a batch takes {1e3 * batch:.1f} ms on average",
            flush=True,
        )


async def overload(server: Server, block: Structures, each: int, options: argparse.Namespace) -> None:
    requests = bodies(block, each)
    await prime(server.port, requests[:64])
    peak = await closed_loop(server, requests, 32 if each > 1 else 64, options.seconds, exact=options.exact)
    print(peak.row(f"peak before, {each} a body"), flush=True)
    found = await open_loop(server.port, requests, 3 * peak.rate / each, 3 * options.seconds, exact=options.exact)
    print(found.row("three times that"), flush=True)
    again = await closed_loop(server, requests, 32 if each > 1 else 64, options.seconds, exact=options.exact)
    print(again.row("peak after"), flush=True)
    best = (peak.rate + again.rate) / 2
    print(f"goodput under overload: {found.rate / best:.1%} of the peak (mean of before and after)", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=4.0, help="that a point of a sweep is measured")
    arguments.add_argument("--backend", default="auto")
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--only", default="", help=f"of {', '.join(sorted(SWEEPS))}; with commas between")
    options = arguments.parse_args()
    wanted = set(options.only.split(",")) if options.only else SWEEPS
    if not wanted <= SWEEPS:
        arguments.error(f"--only takes {', '.join(sorted(SWEEPS))}")
    options.exact = options.device == "cpu"
    block = crystals(512)
    load = os.getloadavg()[0]
    print(f"{options.device}, {os.cpu_count()} cores, load of the machine {load:.1f} at the start, "
          f"{block.n_atoms / len(block):.0f} atoms a structure on average")  # fmt: skip
    print(HEADER)
    before = ideal(options)
    print(f"{f'ideal, {before[3]}, {before[1]} a batch':<34} {before[0]:>11.1f} {before[2]:>43.3f} ms cpu a structure",
          flush=True)  # fmt: skip
    on_generator = cores()[2]
    if on_generator:
        os.sched_setaffinity(0, on_generator)
    best = {64: before[0]}
    if "naive" in wanted:
        with serving(options, naive=True) as server:
            asyncio.run(closed(server, block, options, "naive"))
    if wanted & {"closed", "offered", "urgent"}:
        with serving(options) as server:
            if "closed" in wanted:
                best = asyncio.run(closed(server, block, options, "nepserve"))
            if "offered" in wanted:
                asyncio.run(offered(server, block, best[64], options))
            if "urgent" in wanted:
                asyncio.run(urgent(server, block, options))
    if "overload" in wanted:
        for each in (64, 1):
            # Two seconds of work: what waits longer than that had better be told so.
            depth = max(64, int(2 * before[0] / each))
            with serving(options, "--max-queue-requests", str(depth)) as server:
                asyncio.run(overload(server, block, each, options))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(range(os.cpu_count() or 1)))
    after = ideal(options)
    print(f"{f'ideal, again, {after[1]} a batch':<34} {after[0]:>11.1f} {after[2]:>43.3f} ms cpu a structure")
    if "closed" in wanted:
        share = best[64] / ((before[0] + after[0]) / 2)
        print(f"64 structures a body: {share:.1%} of the ideal (mean of before and after)")
    print(f"load of the machine at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--be-naive"]:
        be_naive(*sys.argv[2:4])
    elif sys.argv[1:2] == ["--be-ideal"]:
        be_ideal(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        main()
