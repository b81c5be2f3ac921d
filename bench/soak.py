"""A server under mixed load with faults, for a long time: nothing lost, nothing wrong, memory flat.

    python bench/soak.py [--minutes 20] [--backend auto] [--faults 20]

Clients send structures of 2 to 2,000 atoms, alone and in bodies of up to 64, as interactive and as bulk work, some of
them with deadlines. One request in a hundred carries a structure that cannot be evaluated, one in ten clients leaves
in the middle. Every ``--faults`` seconds, in turn: the engine is killed, stopped (so that it hangs), a model is
swapped, an alias moves, a body of blanks is sent in chunks over the limit, twenty clients drip. Every answer is
compared, bit by bit, with what the library said of the same structure alone before the start. The model is synthetic:
it needs no file.

In the second half the engine is left alive, so that its own memory can be judged, too.

Printed at the end, and every minute: requests by outcome, structures/s, and the memory of front and engine. The exit
code is 1 if an answer was wrong or missing, if an error was none of those documented, or if memory rose by more than
5 %: the front's from the second quarter to the last, the engine's from the seventh tenth to the last.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not this folder: its http.py would hide the library's
sys.path.insert(1, str(ROOT / "tests"))

import argparse
import contextlib
import os
import random
import signal
import socket
import struct
import tempfile
import threading
import time
from collections import Counter

import httpx
import numpy as np
import psutil

import nepcore
from nepcore import Structure, Structures
from nepcore.files import nep_txt
from nepcore.synthetic import make_model
from servers import ServerProcess
from traffic import PROPERTIES, Link, Request, difference

ALLOWED = {"engine_down", "queue_full", "deadline_passed"}
"""Errors that a request may get in this mixture; its client asks again."""


def mixture(seed: int) -> list[Structures]:
    """Bodies: many small, few large."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(150):
        many = int(rng.choice([1, 1, 1, 1, 4, 16, 64]))
        items = []
        for _ in range(many):
            n = int(rng.choice([2, 8, 32, 64, 128] if many > 1 else [2, 32, 64, 200, 500, 2000]))
            side = int(np.ceil(n ** (1 / 3)))
            sites = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)[:n]
            positions = 2.5 * sites + rng.uniform(-0.3, 0.3, (n, 3))
            cell = 2.5 * side * np.eye(3) if rng.random() < 0.7 else None
            items.append(Structure.make([("Si", "C")[i] for i in rng.integers(0, 2, n)], positions, cell))
        made.append(Structures.pack(items))
    return made


class Soak:
    """The clients, and what they saw."""

    def __init__(self, server: ServerProcess, requests: list[Request]) -> None:
        self.server = server
        self.requests = requests
        self.done = threading.Event()
        self.lock = threading.Lock()
        self.seen: Counter[str] = Counter()
        self.sent = self.left = self.structures = 0
        self.wrong: list[str] = []

    def work(self, seed: int) -> None:
        chance = random.Random(seed)
        link = Link(self.server, timeout=120)
        while not self.done.is_set():
            request = chance.choice(self.requests)
            with self.lock:
                self.sent += 1
            if chance.random() < 0.1:
                self.leave(request, chance)
                continue
            headers = {"X_Priority": "bulk"} if chance.random() < 0.3 else {}
            if chance.random() < 0.05:
                headers["X_Request_Timeout"] = "0.05"
            outcome = link.ask(request, **headers)
            fault = outcome.fault
            if outcome.status == 200 and outcome.found is not None and request.wanted is not None:
                fault = self.compare(request, outcome)
            if outcome.status == 0 or (outcome.status != 200 and outcome.code not in ALLOWED):
                fault = fault or f"status {outcome.status} {outcome.code}"
            with self.lock:
                self.seen[f"{outcome.status} {outcome.code}".strip()] += 1
                self.structures += len(request.block) if outcome.status == 200 else 0
                if fault:
                    self.wrong.append(fault)
            if outcome.status != 200:
                self.done.wait(0.1)
        link.close()

    @staticmethod
    def compare(request: Request, outcome: object) -> str:
        wanted, found = request.wanted, outcome.found  # type: ignore[attr-defined]
        bad = set(wanted.errors)
        if set(found.errors) != bad:
            return f"structures {sorted(found.errors)} failed, wanted {sorted(bad)}"
        good = [i for i in range(len(found)) if i not in bad]
        return next((d for i in good if (d := difference(found.slice(i, i + 1), wanted.slice(i, i + 1)))), "")

    def leave(self, request: Request, chance: random.Random) -> None:
        head = "POST /v1/evaluate HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\nContent-Length: "
        whole = f"{head}{len(request.body)}\r\n\r\n".encode() + request.body
        with contextlib.suppress(OSError), self.server.connect() as sock:
            sock.sendall(whole[: chance.randint(1, len(whole))] if chance.random() < 0.5 else whole)
            if chance.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with self.lock:
            self.left += 1


# -- faults --------------------------------------------------------------------------------------------------------


def kill_engine(server: ServerProcess) -> None:
    for pid in server.engines():
        os.kill(pid, signal.SIGKILL)


def stop_engine(server: ServerProcess) -> None:
    for pid in server.engines():
        os.kill(pid, signal.SIGSTOP)


def swap_model(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.url}/v1/models", json={"name": "m", "path": "m.txt"}, timeout=120)
    print(f"   model swapped: {answer.status_code}")


def move_alias(server: ServerProcess) -> None:
    httpx.put(f"{server.url}/v1/aliases/now", json={"model": "m"}, timeout=30).raise_for_status()


def too_large(server: ServerProcess) -> None:
    with contextlib.suppress(OSError), server.connect() as sock:
        sock.sendall(b"POST /v1/evaluate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                     b"Transfer-Encoding: chunked\r\n\r\n")  # fmt: skip
        for _ in range(100):
            sock.sendall(b"100000\r\n" + b" " * 0x100000 + b"\r\n")


def drip(server: ServerProcess) -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(server.connect()) for _ in range(20)]
        for sock in slow:
            sock.sendall(b"POST /v1/evaluate HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\n")
        for _ in range(30):
            for sock in slow:
                with contextlib.suppress(OSError):
                    sock.sendall(b" ")
            time.sleep(0.1)


FAULTS = (kill_engine, swap_model, too_large, stop_engine, move_alias, drip)
GENTLE = (swap_model, too_large, move_alias, drip)


# -- the run -------------------------------------------------------------------------------------------------------


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=20.0)
    arguments.add_argument("--backend", default="auto")
    arguments.add_argument("--clients", type=int, default=12)
    arguments.add_argument("--faults", type=float, default=20.0, help="seconds between two faults; 0 for none")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="nepserve-soak-"))
    path = folder / "m.txt"
    model = make_model(("C", "Si"), cutoff=(4.5, 3.5), n_max=(3, 3), basis_size=(6, 6), l_max=4, hidden=(16,), seed=3)
    path.write_text(nep_txt.dumps(model), encoding="utf-8")
    os.environ["OMP_NUM_THREADS"] = "1"
    calculator = nepcore.load(path, device="cpu", backend=options.backend)
    requests = []
    chance = np.random.default_rng(options.seed)
    for block in mixture(options.seed):
        parts = [calculator.evaluate(block.slice(i, i + 1), PROPERTIES) for i in range(len(block))]
        wanted = nepcore.structures.Predictions.concatenate(parts)
        if len(block) > 1 and chance.random() < 0.3:
            # Spoil one structure; its mates keep what is right for them.
            spoiled, at = list(block), int(chance.integers(len(block)))
            positions = spoiled[at].positions.copy()
            positions[0] = np.nan if at % 2 else positions[1]
            spoiled[at] = Structure.make(spoiled[at].symbols, positions, spoiled[at].cell, spoiled[at].pbc)
            wanted.errors[at] = nepcore.StructureError("bad_value", "spoiled")
            block = Structures.pack(spoiled)
        requests.append(Request.of(block, wanted, "m"))
    print(f"load of the machine {os.getloadavg()[0]:.1f}, backend {calculator.backend}", flush=True)
    server = ServerProcess(
        loader="nepcore:load", models=[f"m={path}"], model_dir=str(folder), backend=calculator.backend, device="cpu",
        threads=1, engine_timeout=5, engine_restarts=10_000, receive_timeout=3, max_body_mb=20, max_queue_requests=200,
    )  # fmt: skip
    try:
        return watch(server.ready(300), requests, options)
    finally:
        server.close()


def watch(server: ServerProcess, requests: list[Request], options: argparse.Namespace) -> int:
    soak = Soak(server, requests)
    threads = [threading.Thread(target=soak.work, args=(i,), daemon=True) for i in range(options.clients)]
    for thread in threads:
        thread.start()
    front = psutil.Process(server.process.pid)
    begin = time.monotonic()
    end = begin + 60 * options.minutes
    next_fault, next_line, turn = begin + options.faults, begin + 60, 0
    samples: list[tuple[float, int]] = []
    engines: list[tuple[float, int]] = []
    while (now := time.monotonic()) < end and server.process.poll() is None:
        part = (now - begin) / (60 * options.minutes)
        samples.append((part, front.memory_info().rss))
        with contextlib.suppress(psutil.Error):
            engines += [(part, child.memory_info().rss) for child in front.children()]
        if options.faults and now >= next_fault:
            faults = FAULTS if part < 0.5 else GENTLE
            fault = faults[turn % len(faults)]
            turn += 1
            next_fault = now + options.faults
            with contextlib.suppress(httpx.HTTPError):
                fault(server)
        if now >= next_line:
            next_line += 60
            print(line(now - begin, soak, front), flush=True)
        time.sleep(1)
    soak.done.set()
    for thread in threads:
        thread.join(150)
    hung = sum(thread.is_alive() for thread in threads)
    answered = sum(soak.seen.values()) + soak.left
    front_early, front_late, growth = rise(samples, 0.25, 0.5, 0.75)
    engine_early, engine_late, engine_growth = rise(engines, 0.6, 0.7, 0.9)
    left = httpx.get(f"{server.url}/v1/status", timeout=30).json()["queue"] if server.process.poll() is None else {}
    code = server.terminate() if server.process.poll() is None else server.process.returncode
    print(line(time.monotonic() - begin, soak, None))
    print(f"faults: {turn}; sent {soak.sent}, left {soak.left}, answered {answered - soak.left}, without answer {hung}")
    print(f"wrong: {Counter(soak.wrong).most_common(5) or 'none'}")
    print(f"front: {front_early:.1f} MB in the second quarter, {front_late:.1f} MB in the last ({growth:+.1%})")
    spans = f"{engine_early:.1f} MB in the seventh tenth, {engine_late:.1f} MB in the last"
    print(f"engine: {spans} ({engine_growth:+.1%})")
    print(f"queue at the end {left}; exit code {code}")
    lost = hung or answered != soak.sent
    print(f"load of the machine {os.getloadavg()[0]:.1f}")
    return int(bool(soak.wrong or lost or max(growth, engine_growth) > 0.05 or code != 0))


def rise(samples: list[tuple[float, int]], start: float, stop: float, last: float) -> tuple[float, float, float]:
    """Median MB of an early and of the last part of the run, and the growth between them."""
    early = [rss for part, rss in samples if start <= part < stop]
    late = [rss for part, rss in samples if part >= last]
    if not early or not late:
        return 0.0, 0.0, 0.0
    return float(np.median(early)) / 1e6, float(np.median(late)) / 1e6, float(np.median(late) / np.median(early) - 1)


def line(seconds: float, soak: Soak, front: psutil.Process | None) -> str:
    text = f"{seconds / 60:5.1f} min  {soak.structures / seconds:8.1f} structures/s  {dict(soak.seen)}"
    if front is not None:
        with contextlib.suppress(psutil.Error):
            engines = [f"{child.memory_info().rss / 1e6:.0f}" for child in front.children()]
            text += f"  front {front.memory_info().rss / 1e6:.1f} MB, engine {' '.join(engines)} MB"
    return text


if __name__ == "__main__":
    sys.exit(main())
