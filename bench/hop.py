"""What the way from the front to the engine and back costs, beside the bare socket between two processes.

    python bench/hop.py [--calls 300] [--pause 0.002]

For blocks of 1 to 1,000,000 atoms: the median time of `EngineLink.evaluate` with an engine that computes nothing (its
forces are the negative positions), with and without shared memory, and the median time in which as many bytes go there
and back between an event loop and a process that does nothing else. The pause between two calls is what an integrator
does: it lets both processes fall asleep and the caches forget them, as in life; without it all figures halve.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.structures import Predictions, Structures
from nepserve.engine import EngineLink

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

SIZES = (1, 64, 1000, 10_000, 100_000, 1_000_000)
PROPERTIES = frozenset({"energy", "forces"})

ECHO = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
buffer = bytearray(1 << 20)
while got := sock.recv_into(buffer):
    sock.sendall(memoryview(buffer)[:got])
"""


class Nothing:
    """A calculator that computes nothing."""

    model = SimpleNamespace(elements=("Si",), cutoff=5.0, temperature=False)
    device, dtype, backend = "cpu", "float64", "nothing"

    def run(self, structures: Structures, properties: tuple[str, ...]) -> Generator[int, None, Predictions]:
        yield structures.n_atoms
        B = len(structures)
        values: dict[str, Any] = {"energy": np.zeros(B), "forces": -structures.positions}
        for name in set(properties) - set(values):
            rows = structures.n_atoms if name in {"energies", "virials", "descriptors"} else B
            values[name] = np.zeros((rows, {"stress": 6, "virial": 9, "virials": 9}.get(name, 1)))
        return Predictions(structures.counts, values, np.zeros(B, bool), {})


def load(path: str, **_: str) -> Nothing:  # noqa: ARG001 -- as the engine calls a loader
    return Nothing()


async def timed(call: Callable[[], Awaitable[object]], calls: int, pause: float) -> float:
    """Median time of a call, ms."""
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - started)
        if pause:
            await asyncio.sleep(pause)
    return 1e3 * median(seconds)


async def bare(sizes: tuple[int, ...], calls: int, pause: float) -> list[float]:
    """The same bytes through a socket to a process that sends them back."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    with subprocess.Popen([sys.executable, "-c", ECHO, str(theirs.fileno())], pass_fds=[theirs.fileno()]):
        theirs.close()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        found = []
        buffer = bytearray(1 << 20)
        for size in sizes:
            message = bytes(24 * size)

            async def call(message: bytes = message) -> None:
                sending = asyncio.ensure_future(loop.sock_sendall(ours, message))
                left = len(message)
                while left:
                    left -= await loop.sock_recv_into(ours, buffer)
                await sending

            await call()
            found.append(await timed(call, max(10, min(calls, calls * 20_000 // size)), pause))
        ours.close()
    return found


async def linked(sizes: tuple[int, ...], calls: int, pause: float, *, arenas: bool) -> list[float]:
    """Through an engine that computes nothing."""
    link = EngineLink(device="cpu", loader=f"{Path(__file__).resolve()}:load", threads=1, arenas=arenas)
    await link.start()
    found = []
    try:
        await link.load("nothing", "nothing", dtype="float64", backend="auto")
        for size in sizes:
            positions = np.random.default_rng(0).uniform(-9, 9, (size, 3))
            block = Structures.from_arrays([size], np.full(size, 14), positions, 20.0 * np.eye(3)[None])

            async def call(block: Structures = block) -> None:
                await link.evaluate("nothing", [block], PROPERTIES)

            await call()
            found.append(await timed(call, max(10, min(calls, calls * 20_000 // size)), pause))
    finally:
        await link.stop(5.0)
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--pause", type=float, default=0.002, help="seconds between two calls")
    options = parser.parse_args()
    columns = [
        await bare(SIZES, options.calls, options.pause),
        await linked(SIZES, options.calls, options.pause, arenas=True),
        await linked(SIZES, options.calls, options.pause, arenas=False),
    ]
    print(f"p50 of a round trip, ms, {options.pause * 1e3:g} ms pause")
    print(f"{'atoms':>9} {'bare socket':>12} {'engine':>9} {'without shared memory':>22}")
    for i, size in enumerate(SIZES):
        print(f"{size:>9} {columns[0][i]:>12.3f} {columns[1][i]:>9.3f} {columns[2][i]:>22.3f}")


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
