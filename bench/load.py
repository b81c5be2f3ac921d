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
import json
import os
import re
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import systems
from bench.clients import (
    HEADER,
    PROPERTIES,
    Counts,
    bodies,
    body,
    closed_loop,
    flood,
    open_loop,
    prime,
    quantiles,
    steps,
)
from nepcore import Structure, Structures

if TYPE_CHECKING:
    from collections.abc import Iterator

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
def serving(
    options: argparse.Namespace, *flags: str, naive: bool = False, system: str = "si5", pinned: bool = True
) -> Iterator[Server]:
    """A ready server; ended afterwards."""
    on_engine, on_front, _ = cores() if pinned else (set(), set(), set())
    if naive:
        where = on_engine | on_front
        words = [str(Path(__file__).resolve()), "--be-naive", options.device, options.backend]
    else:
        where = on_front
        program = "from nepserve.cli import main; main()"
        words = [
            *("-c", program, "serve", f"{system}={systems.MODELS[system]}", "--port", "0", "--device", options.device),
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


async def closed(server: Server, block: Structures, options: argparse.Namespace, name: str) -> dict[int, Counts]:
    """The best point by structures in a body."""
    best: dict[int, Counts] = {}
    for each in (1, 64):
        requests = bodies(block, each)
        await prime(server.port, requests)
        best[each] = Counts(options.exact)
        for clients in CLIENTS:
            if clients * each > 10 * options.seconds * max(found.rate for found in best.values()) > 0:
                print(f"{name}, {clients} clients, {each} a body: left out, each would wait too long", flush=True)
                continue
            found = await closed_loop(server, requests, clients, options.seconds, exact=options.exact)
            best[each] = max(best[each], found, key=lambda counts: counts.rate)
            print(found.row(f"{name}, {clients} clients, {each} a body"), flush=True)
    return best


async def offered(server: Server, block: Structures, best: float, options: argparse.Namespace) -> None:
    requests = bodies(block, 64)
    await prime(server.port, requests)
    for share in OFFERED:
        rate = share * best / 64
        found = await open_loop(server, requests, rate, 3 * options.seconds, exact=options.exact)
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
        async with flood(server.port, requests, clients):
            await asyncio.sleep(options.seconds / 2)
            count, total = server.metric("nepserve_batches_total"), server.metric("nepserve_batch_device_seconds_sum")
            await asyncio.sleep(options.seconds)
            # Of the flood alone: the steps are batches, too, and short ones.
            batch = (server.metric("nepserve_batch_device_seconds_sum") - total) / max(
                1.0, server.metric("nepserve_batches_total") - count
            )
            took = quantiles(await steps(server.port, one, calls, 0.002))
        print(
            f"{'64 atoms, ' + what:<34} {'':>11} {1e3 * took[0]:>10.2f} {1e3 * took[1]:>10.2f}"
            f"   p50 + {1e3 * (took[0] - quiet[0]):.1f} ms; a bulk batch takes {1e3 * batch:.1f} ms",
            flush=True,
        )


async def overload(server: Server, block: Structures, each: int, options: argparse.Namespace) -> None:
    requests = bodies(block, each)
    await prime(server.port, requests[:64])
    peak = await closed_loop(server, requests, 32 if each > 1 else 64, options.seconds, exact=options.exact)
    print(peak.row(f"peak before, {each} a body"), flush=True)
    found = await open_loop(server, requests, 3 * peak.rate / each, 3 * options.seconds, exact=options.exact)
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
    best = Counts(options.exact, int(before[0]), seconds=1.0)
    if "naive" in wanted:
        with serving(options, naive=True) as server:
            asyncio.run(closed(server, block, options, "naive"))
    if wanted & {"closed", "offered", "urgent"}:
        with serving(options) as server:
            if "closed" in wanted:
                best = asyncio.run(closed(server, block, options, "nepserve"))[64]
            if "offered" in wanted:
                asyncio.run(offered(server, block, best.rate, options))
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
        share = best.rate / ((before[0] + after[0]) / 2)
        print(f"64 structures a body: {share:.1%} of the ideal (mean of before and after)")
        if best.engine_cpu:
            # What others do on the machine meanwhile has less to do with this one.
            share = (before[2] + after[2]) / 2 / best.engine_cpu * best.busy
            print(f"by processor time: {share:.1%} (of the library ÷ of the engine × its share of busy time)")
    print(f"load of the machine at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--be-naive"]:
        be_naive(*sys.argv[2:4])
    elif sys.argv[1:2] == ["--be-ideal"]:
        be_ideal(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        main()
