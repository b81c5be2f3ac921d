"""One device against several behind one port: structures/s and latency, of single steps and of uploads.

    python bench/devices.py --devices 0 0,1 [--backend density] [--seconds 5]
    python bench/devices.py --devices cpu:1 cpu:2

For each of the sets of devices a server is started (`nepserve serve --devices SET`) and asked by clients with one
request in flight each, spread over processes of their own, with the crystals and bodies of bench/load.py: 256 clients
with one structure a body, 16 and 64 with 64 a body. The front is one process; what it used of a core stands beside.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its http.py would hide the library's

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from bench import systems
from bench.clients import bodies, closed_loop, quantiles
from bench.load import Server, _port, crystals, processor_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

POINTS = ((256, 1), (16, 64), (64, 64))
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
def serving(devices: str, backend: str) -> Iterator[Server]:
    """A server, ready on all devices."""
    words = [
        *("-c", "from nepserve.cli import main; main()", "serve", f"si={systems.MODELS['si5']}", "--port", "0"),
        *("--devices", devices, "--backend", backend),
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
            if status == 200 and all(each["ready"] for each in json.loads(document)["engine"]["devices"]):
                break
            if time.monotonic() > end or process.poll() is not None:
                sys.exit(f"the server was not ready within five minutes: {document.decode()}")
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--devices", nargs="+", required=True, help="sets of devices, as of nepserve serve")
    arguments.add_argument("--backend", default="auto")
    arguments.add_argument("--seconds", type=float, default=5.0, help="that a point is measured")
    arguments.add_argument("--processes", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)))
    options = arguments.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, {options.processes} generators")
    print(f"{'':<36} {'structures/s':>12} {'p50 ms':>9} {'p99 ms':>9} {'front, cores':>13}")
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for devices in options.devices:
            with serving(devices, options.backend) as server:
                for clients, each in POINTS:
                    begin = time.time() + 3.0
                    share = clients // options.processes
                    jobs = [
                        pool.submit(ask, server.port, share, each, options.seconds, begin)
                        for _ in range(options.processes)
                    ]
                    time.sleep(max(0.0, begin - time.time()))
                    used, began = processor_seconds(server.process.pid), time.monotonic()
                    found = [job.result() for job in jobs]
                    cores = (processor_seconds(server.process.pid) - used) / (time.monotonic() - began)
                    p50, p99 = quantiles([t for _, times, _ in found for t in times])
                    wrong = sum(differ for _, _, differ in found)
                    print(
                        f"{f'{devices}: {share * options.processes} clients, {each} a body':<36} "
                        f"{sum(rate for rate, _, _ in found):>12.1f} {1e3 * p50:>9.2f} {1e3 * p99:>9.2f} {cores:>13.2f}"
                        + (f"   {wrong} ANSWERS DIFFER" if wrong else ""),
                        flush=True,
                    )


if __name__ == "__main__":
    main()
