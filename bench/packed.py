"""Large packed bodies through the server beside the library: MessagePack, 1,024 structures each, 8 connections.

    python bench/packed.py [--systems si5 pbte unep c24] [--backend fused] [--connections 8] [--seconds 4]

For each system: structures/s of the library, called again and again in this process with the same 1,024 rattled and
strained structures of 32 to 64 atoms; then of a server on this machine, which gets the same structures as a prebuilt
body from a process for each connection, one request in flight in each; then of the library again. Positions are sent
in single precision, energies and forces come back so. The answers are compared by their length with the first.

Beside the rates: processor seconds a second of front and engine, and the share of the time in which the engine had a
batch to work on. One JSON line a system.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its http.py would hide the library's

import argparse
import json
import multiprocessing
import os
import re
import socket
import time
from typing import TYPE_CHECKING, Any

from bench import systems
from bench.clients import PROPERTIES, body
from bench.load import serving

if TYPE_CHECKING:
    from nepcore import Structures


def post(link: socket.socket, request: bytes, room: bytearray) -> int:
    """Send a request, read the answer into ``room``, and return the length of its content."""
    link.sendall(request)
    view, have, wanted, head = memoryview(room), 0, -1, b""
    while wanted < 0 or have < wanted:
        count = link.recv_into(view[have:])
        if not count:
            raise ConnectionError("the server closed the connection")
        have += count
        if wanted < 0 and (end := room.find(b"\r\n\r\n", 0, have)) >= 0:
            head = bytes(room[:end])
            found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            if not head.startswith(b"HTTP/1.1 200") or found is None:
                raise ConnectionError(f"not an answer: {bytes(room[:have])[:300]!r}")
            wanted = end + 4 + int(found[1])
    return have - len(head) - 4


def client(port: int, request: bytes, seconds: float, together: Any, answers: Any) -> None:
    """Of one connection: how many answers came within the time, sent to ``answers``."""
    room = bytearray(len(request) * 4 + (1 << 20))
    link = socket.create_connection(("127.0.0.1", port))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    expected = post(link, request, room)
    together.wait()
    count, begun = 0, time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds:
        if post(link, request, room) != expected:
            raise RuntimeError("an answer has another length than the first one")
        count += 1
    answers.put(count / passed)


def of_server(options: argparse.Namespace, system: str, block: Structures) -> dict[str, float]:
    """Structures/s through a server, and what its processes spent."""
    request = body(block).data
    spawn = multiprocessing.get_context("spawn")
    together, answers = spawn.Barrier(options.connections + 1), spawn.Queue()
    with serving(options, system=system, pinned=False) as server:
        clients = [
            spawn.Process(target=client, args=(server.port, request, options.seconds, together, answers), daemon=True)
            for _ in range(options.connections)
        ]
        for each in clients:
            each.start()
        together.wait(120)
        begun, before = time.perf_counter(), server.spent()
        rate = sum(answers.get(timeout=options.seconds + 60) for _ in clients)
        passed = time.perf_counter() - begun
        front, engine, busy = ((now - then) / passed for now, then in zip(server.spent(), before, strict=True))
        for each in clients:
            each.join()
    return {
        "server": rate * len(block), "front_cores": front, "engine_cores": engine, "engine_busy": busy,
        "request_bytes": len(request),
    }  # fmt: skip


def of_library(calculator: Any, block: Structures, seconds: float) -> float:
    """Structures/s in this process."""
    for _ in range(3):
        calculator.evaluate(block, PROPERTIES)
    count, begun = 0, time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds:
        calculator.evaluate(block, PROPERTIES)
        count += len(block)
    return count / passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(systems.MODELS), choices=tuple(systems.MODELS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="fused")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--structures", type=int, default=1024, help="in a body")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    options = parser.parse_args()
    import nepcore

    for name in options.systems:
        block = systems.small(name, options.structures)
        calculator = nepcore.load(systems.MODELS[name], device=options.device, backend=options.backend)
        before = of_library(calculator, block, options.seconds / 2)
        found = of_server(options, name, block)
        after = of_library(calculator, block, options.seconds / 2)
        library = (before + after) / 2
        rounded = {key: float(f"{value:.4g}") for key, value in found.items()}
        print(json.dumps({
            "system": name, "structures": len(block), "atoms": block.n_atoms, "connections": options.connections,
            "cores": os.cpu_count(), "library": round(library),
            "library_before_and_after": [round(before), round(after)],
            **rounded, "share": round(found["server"] / library, 3),
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
