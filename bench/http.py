"""What a call over HTTP costs beyond the model: one client, one call in flight, a pause between calls.

    python bench/http.py [--calls 200] [--pause 0.002] [--threads 1]

For 64, 1000 and 10,648 silicon atoms and every wire format: the median time of a call seen by the client, the median
time the engine spent in the model (from the answer's Server-Timing header), the difference, and the same evaluation
called in this process, measured before the server starts. The pause is what an integrator does between two force
calls; without it the event loop never sleeps and the figures flatter.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its http.py would hide the library's

import argparse
import http.client
import io
import json
import os
import re
import subprocess
import time
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

import nepcore
from bench import systems
from nepcore.files import xyz
from nepserve.wire import msgpack_format

if TYPE_CHECKING:
    from collections.abc import Callable

    from nepcore import Structures

PROPERTIES = ("energy", "forces")


def json_body(s: Structures) -> tuple[bytes, str, str]:
    view = s.view(0)
    structure = {
        "numbers": view.numbers.tolist(), "positions": view.positions.tolist(), "cell": view.cell.tolist(),
        "pbc": view.pbc.tolist(),
    }  # fmt: skip
    body = json.dumps({"structure": structure, "properties": PROPERTIES}).encode()
    return body, "application/json", ""


def msgpack_body(s: Structures) -> tuple[bytes, str, str]:
    return msgpack_format.pack_request(s, PROPERTIES, None, "f8"), "application/msgpack", ""


def xyz_body(s: Structures) -> tuple[bytes, str, str]:
    text = io.StringIO()
    xyz.write(text, s)
    return text.getvalue().encode(), "chemical/x-extxyz", "?properties=energy,forces"


def npz_body(s: Structures) -> tuple[bytes, str, str]:
    data = io.BytesIO()
    np.savez(data, n_atoms=s.counts, numbers=s.numbers, positions=s.positions, cell=s.cells, pbc=s.pbc)
    return data.getvalue(), "application/x-npz", "?properties=energy,forces"


FORMATS: dict[str, Callable[[Structures], tuple[bytes, str, str]]] = {
    "json": json_body, "msgpack": msgpack_body, "xyz": xyz_body, "npz": npz_body,
}  # fmt: skip


def start_server(threads: int, backend: str) -> tuple[subprocess.Popen[bytes], int, float]:
    """Serve the silicon model on a free port; returns the process, the port and the seconds until it was ready."""
    command = [
        *(sys.executable, "-c", "from nepserve.cli import main; main()"),
        *("serve", f"si={systems.MODELS['si5']}", "--port", "0", "--device", "cpu"),
        "--threads", str(threads), "--backend", backend,
    ]  # fmt: skip
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    port = None
    for line in process.stdout:
        found = re.search(rb"127\.0\.0\.1:(\d+)", line)
        if found and port is None:
            port = int(found[1])
            break
    if port is None:
        sys.exit(f"the server did not start (exit code {process.wait()})")
    while time.perf_counter() - begin < 60:
        try:
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            link.request("GET", "/readyz")
            if link.getresponse().status == 200:
                return process, port, time.perf_counter() - begin
        except OSError:
            pass
        time.sleep(0.02)
    process.terminate()
    sys.exit("the server was not ready within a minute")


def timed_calls(
    port: int, body: bytes, kind: str, query: str, calls: int, pause: float
) -> tuple[list[float], list[float]]:
    """Seconds of each call as the client sees it, and seconds on the device as the server reports it."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    seen, device = [], []
    for n in range(calls + 10):
        time.sleep(pause)
        begin = time.perf_counter()
        link.request("POST", "/v1/evaluate" + query, body, {"Content-Type": kind})
        answer = link.getresponse()
        content = answer.read()
        took = time.perf_counter() - begin
        if answer.status != 200:
            sys.exit(f"HTTP {answer.status}: {content[:300]!r}")
        found = re.search(r"device;dur=([\d.]+)", answer.getheader("Server-Timing", ""))
        assert found is not None
        if n >= 10:
            seen.append(took)
            device.append(float(found[1]) / 1e3)
    link.close()
    return seen, device


def in_process(s: Structures, calls: int, pause: float, backend: str) -> float:
    """Median seconds of the same evaluation by the library in this process."""
    calculator = nepcore.load(systems.MODELS["si5"], device="cpu", backend=backend)
    times = []
    for n in range(calls + 3):
        time.sleep(pause)
        begin = time.perf_counter()
        calculator.evaluate(s, PROPERTIES)["forces"]
        if n >= 3:
            times.append(time.perf_counter() - begin)
    return median(times)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--calls", type=int, default=200)
    arguments.add_argument("--pause", type=float, default=0.002)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--backend", default="auto")
    options = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    blocks = {n: systems.crystal("si5", n) for n in (64, 1000, 10648)}
    calls = {64: options.calls, 1000: options.calls, 10648: max(20, options.calls // 5)}
    alone = {n: in_process(s, max(5, calls[n] // 10), options.pause, options.backend) for n, s in blocks.items()}
    process, port, ready = start_server(options.threads, options.backend)
    try:
        print(f"start to ready: {ready:.2f} s")
        print("atoms, format, bytes; in ms: call p50, call p99, model p50, rest p50, library p50")
        for n, s in blocks.items():
            for name, make in FORMATS.items():
                body, kind, query = make(s)
                seen, device = timed_calls(port, body, kind, query, calls[n], options.pause)
                rest = [a - b for a, b in zip(seen, device, strict=True)]
                row = (median(seen), sorted(seen)[int(0.99 * len(seen))], median(device), median(rest), alone[n])
                print(f"{n:>6} {name:>8} {len(body):>9}", *(f"{1e3 * x:>9.2f}" for x in row))
    finally:
        process.terminate()
        process.wait(20)


if __name__ == "__main__":
    main()
