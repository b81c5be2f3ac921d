"""One device against several, and one front against several, behind one port: structures/s and latency.

    python bench/devices.py --devices 0 0,1 [--fronts 1 2 4] [--backend density] [--seconds 5] [--ideal cuda]
    python bench/devices.py --devices cpu:1 cpu:2

For each of the sets of devices with each number of fronts a server is started (`nepserve serve --devices SET --fronts
N`) and asked by clients with one request in flight each, spread over processes of their own, with the crystals and
bodies of bench/load.py: 256 clients with one structure a body, 16 and 64 with 64 a body. What the server's own process
used of a core stands beside, and what its fronts used together; with --ideal the same model called on one device in the
best batches, without a server, is measured first.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its http.py would hide the library's

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from bench import systems
from bench.clients import bodies, closed_loop, quantiles
from bench.load import Server, _port, crystals, ideal, processor_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

POINTS = ("256x1", "16x64", "64x64")
"""Clients, and structures in a body."""


class Asked:
    """What a loop of clients needs of a server that runs elsewhere."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.engine = 0

    def spent(self) -> tuple[float, float, float]:
        """Nothing: the process that started it counts."""
        return 0.0, 0.0, 0.0


def ask(port: int, clients: int, each: int, seconds: float, begin: float) -> tuple[float, list[float], int]:
    """One process of clients: rate, times of answers, answers that differ from the first of the same body."""
    requests = bodies(crystals(512), each)
    # All processes begin together.
    time.sleep(max(0.0, begin - time.time()))
    server: Any = Asked(port)
    counts = asyncio.run(closed_loop(server, requests, clients, seconds, exact=False))
    return counts.rate, counts.good, counts.wrong


@contextlib.contextmanager
def serving(devices: str, fronts: int, backend: str) -> Iterator[tuple[Server, list[int]]]:
    """A server, ready on all devices, and the processes of its fronts, if they are others than its own."""
    words = [
        *("-c", "from nepserve.cli import main; main()", "serve", f"si={systems.MODELS['si5']}", "--port", "0"),
        *("--devices", devices, "--backend", backend, "--fronts", str(fronts)),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    try:
        server = Server(process, _port(process))
        end = time.monotonic() + 300
        while True:
            status, document = server.get("/v1/status")
            said = json.loads(document) if status == 200 else {}
            parts = [*said["engine"]["devices"], *said.get("fronts", [])] if said else []
            if parts and all(each["ready"] for each in parts):
                break
            if time.monotonic() > end or process.poll() is not None:
                sys.exit(f"the server was not ready within five minutes: {document.decode()}")
            time.sleep(0.1)
        yield server, [each["pid"] for each in said.get("fronts", [])]
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--devices", nargs="+", required=True, help="sets of devices, as of nepserve serve")
    arguments.add_argument("--fronts", nargs="+", type=int, default=[1], help="numbers of fronts")
    arguments.add_argument("--points", nargs="+", default=POINTS, help="CLIENTSxSTRUCTURES in a body")
    arguments.add_argument("--ideal", metavar="DEVICE", help="measure the library on this device, too")
    arguments.add_argument("--backend", default="auto")
    arguments.add_argument("--seconds", type=float, default=5.0, help="that a point is measured")
    arguments.add_argument("--processes", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)))
    options = arguments.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, {options.processes} generators")
    if options.ideal:
        with_library = argparse.Namespace(device=options.ideal, backend=options.backend, seconds=options.seconds)
        rate, size, _, name = ideal(with_library)
        print(f"{f'ideal, {name}, {size} a batch':<44} {rate:>12.1f}", flush=True)
    print(f"{'':<44} {'structures/s':>12} {'p50 ms':>9} {'p99 ms':>9} {'cores: own':>11} {'of fronts':>10}")
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for devices, fronts in itertools.product(options.devices, options.fronts):
            with serving(devices, fronts, options.backend) as (server, others):
                for point in options.points:
                    clients, each = map(int, point.split("x"))
                    measure(pool, server, others, clients, each, f"{devices}, {fronts} fronts", options)


def measure(
    pool: ProcessPoolExecutor, server: Server, others: list[int], clients: int, each: int, name: str,
    options: argparse.Namespace,
) -> None:  # fmt: skip
    """Measure one point and print its line."""
    begin = time.time() + 2.5
    share = clients // options.processes
    jobs = [pool.submit(ask, server.port, share, each, options.seconds, begin) for _ in range(options.processes)]
    time.sleep(max(0.0, begin - time.time()))
    began = time.monotonic()
    used = [processor_seconds(server.process.pid), sum(map(processor_seconds, others))]
    found = [job.result() for job in jobs]
    used = [processor_seconds(server.process.pid) - used[0], sum(map(processor_seconds, others)) - used[1]]
    own, of_fronts = (seconds / (time.monotonic() - began) for seconds in used)
    p50, p99 = quantiles([t for _, times, _ in found for t in times])
    wrong = sum(differ for _, _, differ in found)
    print(
        f"{f'{name}: {share * options.processes} clients, {each} a body':<44} "
        f"{sum(rate for rate, _, _ in found):>12.1f} {1e3 * p50:>9.2f} {1e3 * p99:>9.2f} {own:>11.2f} "
        + (f"{of_fronts:>10.2f}" if others else f"{'':>10}")
        + (f"   {wrong} ANSWERS DIFFER" if wrong else ""),
        flush=True,
    )


if __name__ == "__main__":
    main()
