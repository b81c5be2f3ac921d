"""Clients that load a server and write down the one answer that each of their requests got."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nepcore.structures import Predictions, Structure, Structures
from nepserve.wire import msgpack_format
from nepserve.wire.problem import CODES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from typing_extensions import Self

    from servers import ServerProcess

PROPERTIES = ("energy", "forces", "stress")
RETRYABLE = frozenset({"engine_down", "starting", "draining"})


def blocks(count: int, largest: int = 6, seed: int = 0, species: Sequence[str] = ("Si", "C")) -> list[Structures]:
    """Blocks of one to five structures, crystals and molecules, of two atoms or more each."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        items = []
        for _ in range(int(rng.integers(1, 6))):
            n = int(rng.integers(2, largest + 1))
            side = int(np.ceil(n ** (1 / 3)))
            sites = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)[:n]
            positions = 2.6 * sites + rng.uniform(-0.3, 0.3, (n, 3))
            cell = 2.6 * side * np.eye(3) if rng.random() < 0.6 else None
            items.append(Structure.make([species[i] for i in rng.integers(0, len(species), n)], positions, cell))
        made.append(Structures.pack(items))
    return made


@dataclass(frozen=True)
class Request:
    """What is sent, and what is right."""

    block: Structures
    body: bytes
    wanted: Predictions | None = None

    @classmethod
    def of(cls, block: Structures, wanted: Predictions | None = None, model: str | None = None) -> Request:
        return cls(block, msgpack_format.pack_request(block, PROPERTIES, model), wanted)


@dataclass(frozen=True)
class Outcome:
    """The end of a request.

    ``status`` is 0 where the connection broke before an answer came; ``fault`` says what is wrong with the answer.
    """

    request: Request
    status: int
    code: str
    fault: str
    seconds: float
    found: Predictions | None = None


def answered_alone(server: ServerProcess, some: Sequence[Structures], model: str | None = None) -> list[Request]:
    """Requests with what is right for them: each structure evaluated by itself, in quiet."""
    link = Link(server)
    made = []
    for block in some:
        parts = []
        for i in range(len(block)):
            one = Request.of(block.slice(i, i + 1), model=model)
            outcome = link.ask(one)
            assert outcome.status == 200, outcome
            assert not outcome.fault, outcome.fault
            assert outcome.found is not None
            parts.append(outcome.found)
        made.append(Request.of(block, Predictions.concatenate(parts), model))
    link.close()
    return made


def difference(found: Predictions, wanted: Predictions) -> str:
    """Where two results differ in a bit; empty if nowhere."""
    if found.errors.keys() != wanted.errors.keys():
        return f"errors {found.errors} in place of {wanted.errors}"
    for name in PROPERTIES:
        # On the wire per-atom results have the precision of the positions that were sent; nothing is lost by that.
        if found.values[name].astype(np.float64).tobytes() != wanted.values[name].astype(np.float64).tobytes():
            return f"the bits of {name} differ"
    if found.stress_known.tobytes() != wanted.stress_known.tobytes():
        return "another stress is known"
    return ""


class Link:
    """One client with one connection, which is opened again when it breaks."""

    def __init__(self, server: ServerProcess, timeout: float = 60.0) -> None:
        self._address = server.address
        self._timeout = timeout
        self._link: http.client.HTTPConnection | None = None

    def ask(self, request: Request, **headers: str) -> Outcome:
        """Send it once; whatever happens is the outcome."""
        started = time.monotonic()
        try:
            if self._link is None:
                self._link = http.client.HTTPConnection(*self._address, timeout=self._timeout)
                self._link.connect()
                self._link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            self._link.request(
                "POST", "/v1/evaluate", request.body, {"Content-Type": "application/msgpack", **names}
            )  # fmt: skip
            answer = self._link.getresponse()
            content = answer.read()
            if answer.will_close:
                self.close()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            silent = "no answer within the time" if isinstance(error, TimeoutError) else ""
            return Outcome(request, 0, type(error).__name__, silent, time.monotonic() - started)
        return _judge(request, answer, content, time.monotonic() - started)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def _judge(request: Request, answer: http.client.HTTPResponse, content: bytes, seconds: float) -> Outcome:
    status = answer.status
    if status == 200:
        try:
            found = msgpack_format.unpack_result(content, request.block.counts)
        except Exception as error:
            return Outcome(request, 200, "", f"not a result: {error}", seconds)
        fault = "" if request.wanted is None else difference(found, request.wanted)
        return Outcome(request, 200, "", fault, seconds, found)
    fault, code = "", ""
    try:
        document = json.loads(content)
        code = document["code"]
        row = CODES[code]
    except (ValueError, LookupError, TypeError):
        return Outcome(request, status, code, f"no documented error: {content[:200]!r}", seconds)
    if row.status != status or document["status"] != status:
        fault = f"{code} came with status {status}"
    elif answer.headers["content-type"] != "application/problem+json" or "detail" not in document:
        fault = "not a problem document"
    elif status in {429, 503} and not (answer.headers["retry-after"] or "").isdigit():
        fault = "no Retry-After"
    return Outcome(request, status, code, fault, seconds)


class Load:
    """Clients in threads, each with one request in flight, for the time of a ``with`` block.

    Attributes:
        outcomes: One for each request that was sent, in the order of the answers.
        sent: Requests that were begun.
    """

    def __init__(
        self,
        server: ServerProcess,
        requests: Sequence[Request],
        clients: int = 8,
        *,
        between: Callable[[int, Request], bool] | None = None,
        stop_on_refused_connections: bool = False,
        **headers: str,
    ) -> None:
        self._server = server
        self._requests = requests
        self._between = between
        self._stop_when_gone = stop_on_refused_connections
        self._headers = headers
        self._done = threading.Event()
        self._lock = threading.Lock()
        self.sent = 0
        self.outcomes: list[Outcome] = []
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, seconds: float = 90.0) -> list[Outcome]:
        """Let every client finish its request; the outcomes."""
        self._done.set()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads), "a request has no answer"
        return self.outcomes

    def _work(self) -> None:
        link = Link(self._server)
        while not self._done.is_set():
            with self._lock:
                number = self.sent
                self.sent += 1
            request = self._requests[number % len(self._requests)]
            if self._between is not None and self._between(number, request):
                outcome = Outcome(request, 0, "left", "", 0.0)
            else:
                outcome = link.ask(request, **self._headers)
            with self._lock:
                self.outcomes.append(outcome)
            if outcome.code == "ConnectionRefusedError" and self._stop_when_gone:
                break
            if outcome.status != 200:
                self._done.wait(0.02)
        link.close()

    def wait_for(self, what: Callable[[list[Outcome]], bool], seconds: float = 60.0) -> None:
        """Go on until the outcomes are as wanted."""
        end = time.monotonic() + seconds
        while not what(list(self.outcomes)):
            assert time.monotonic() < end, f"it did not come to that: {summary(self.outcomes)}\n{self._server.log}"
            time.sleep(0.02)

    def wait_for_more(self, right: int, seconds: float = 60.0) -> None:
        """Go on until that many more right answers came."""
        start = count_right(self.outcomes)
        self.wait_for(lambda outcomes: count_right(outcomes) >= start + right, seconds)

    def check(self, *codes: str) -> None:
        """Every request has one answer: right bits, or an error with one of these codes."""
        outcomes = self.stop()
        assert len(outcomes) == self.sent
        assert not [o for o in outcomes if o.fault][:3]
        assert {o.code for o in outcomes if o.status != 200} <= set(codes), summary(outcomes)


def count_right(outcomes: Collection[Outcome]) -> int:
    return sum(o.status == 200 and not o.fault for o in outcomes)


def summary(outcomes: Collection[Outcome]) -> dict[str, int]:
    """Outcomes by status and code."""
    found: dict[str, int] = {}
    for o in outcomes:
        key = f"{o.status} {o.code} {o.fault}".strip()
        found[key] = found.get(key, 0) + 1
    return found


def metric(server: ServerProcess, name: str, **labels: str) -> float:
    """Sum of a series over the labels that are not given."""
    total = 0.0
    for line in server.get("/metrics").text.splitlines():
        series, _, value = line.rpartition(" ")
        stem, _, rest = series.partition("{")
        if stem == name and all(f'{key}="{text}"' in rest for key, text in labels.items()):
            total += float(value)
    return total


def settled(server: ServerProcess, seconds: float = 15.0) -> None:
    """Wait until nothing is left of any request."""
    names = ("requests_waiting", "requests_running", "queue_atoms", "requests_in_flight")
    end = time.monotonic() + seconds
    while (left := {n: metric(server, f"nepserve_{n}") for n in names}) and any(left.values()):
        assert time.monotonic() < end, f"never empty again: {left}"
        time.sleep(0.05)


@contextlib.contextmanager
def no_orphans(server: ServerProcess) -> Iterator[list[int]]:
    """Engines seen so far, all of which must be gone at the end."""
    from servers import is_gone

    seen = list(server.engines())
    yield seen
    for pid in seen:
        assert is_gone(pid, 10), f"the engine {pid} is left"
