"""Clients that leave, stall, lie or drip, beside one that behaves."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from nepcore.structures import Structure, Structures
from nepserve.wire import msgpack_format
from servers import running
from traffic import Link, Load, Request, answered_alone, blocks, count_right, metric, settled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from servers import ServerProcess

LIMIT_MB = 4
ATOM = {"symbols": ["Si"], "positions": [[0, 0, 0]]}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with running(models=[str(model)], max_body_mb=LIMIT_MB, receive_timeout=1.5, keep_alive=1) as made:
        yield made.ready()


@pytest.fixture(scope="module")
def requests(server: ServerProcess) -> list[Request]:
    return answered_alone(server, blocks(40, seed=11))


@pytest.fixture(autouse=True)
def sound_afterwards(server: ServerProcess, requests: list[Request]) -> Iterator[None]:
    """After each of them nothing is left in the queue, and the server answers as before."""
    yield
    settled(server)
    assert server.get("/readyz").status_code == 200
    outcome = Link(server).ask(requests[0])
    assert (outcome.status, outcome.fault) == (200, "")


def head(length: int | None, *more: str) -> bytes:
    lines = ["POST /v1/evaluate HTTP/1.1", "Host: x", "Content-Type: application/msgpack", *more]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


def answer(sock: socket.socket) -> tuple[int, str]:
    """Status and code of the answer on a connection; (0, "") if it ends without one."""
    sock.settimeout(30)
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65536):
            data += part
            top, end, body = data.partition(b"\r\n\r\n")
            lengths = [int(line[15:]) for line in top.split(b"\r\n") if line.lower().startswith(b"content-length:")]
            if end and lengths and len(body) >= lengths[0]:
                return int(data[9:12]), json.loads(body[: lengths[0]]).get("code", "") if body[:1] == b"{" else ""
    return 0, ""


def abort(sock: socket.socket) -> None:
    """Close with a reset, as a process that was killed does on some systems."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_one_in_ten_disconnects(server: ServerProcess, requests: list[Request]) -> None:
    """In the middle of the head, of the body, or while the answer is waited for, politely or not."""
    rng = np.random.default_rng(2)
    left = [0]

    def leave(number: int, request: Request) -> bool:
        if number % 10:
            return False
        sock = server.connect()
        whole = head(len(request.body)) + request.body
        sock.sendall(whole[: int(rng.integers(1, len(whole) + 1))] if number % 20 else whole)
        abort(sock) if number % 3 else sock.close()
        left[0] += 1
        return True

    before = metric(server, "nepserve_engine_restarts_total")
    with Load(server, requests, 8, between=leave) as load:
        load.wait_for_more(250)
    outcomes = load.stop()
    assert left[0] >= 20
    assert [o for o in outcomes if o.fault] == []
    assert count_right(outcomes) == len(outcomes) - left[0]
    assert metric(server, "nepserve_engine_restarts_total") == before


@pytest.mark.parametrize("share", [0.5, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.0, 0.99))], ids=str)
def test_half_sent_bodies(server: ServerProcess, requests: list[Request], share: float) -> None:
    """Who stops in the middle is told so after the stated time; the others do not notice."""
    body = requests[0].body
    with contextlib.ExitStack() as stack, Load(server, requests, 4) as load:
        half = [stack.enter_context(server.connect()) for _ in range(20)]
        for sock in half:
            sock.sendall(head(len(body)) + body[: int(share * len(body))])
        load.wait_for_more(20)
        assert {answer(sock) for sock in half} == {(408, "request_timeout")}
        load.wait_for_more(20)
    load.check()


def test_200_dripping_clients_and_one_that_behaves(server: ServerProcess, requests: list[Request]) -> None:
    alone = [Link(server).ask(requests[0]).seconds for _ in range(5)]
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(server.connect()) for _ in range(200)]

        def drip() -> None:
            for i in range(1000):
                for sock in slow:
                    with contextlib.suppress(OSError):
                        sock.sendall(head(1000)[i : i + 1] if i < len(head(1000)) else b" ")
                if stop.wait(0.01):
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            with Load(server, requests, 1) as load:
                load.wait_for_more(30)
            load.check()
            found = {answer(sock) for sock in slow}
        finally:
            stop.set()
            dripping.join()
        assert found == {(408, "request_timeout")}
    # Slower by much more than the sending of bytes here explains would mean that it waits for them.
    assert np.median([o.seconds for o in load.outcomes]) < 1.0 + 10 * max(alone)


def resident(server: ServerProcess) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


def test_two_gigabytes_of_blanks_in_chunks(server: ServerProcess) -> None:
    """Refused soon after the limit, with memory for no more than the limit."""
    before, most, sent = resident(server), 0, 0
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    with server.connect() as sock:
        sock.sendall(head(None, "Transfer-Encoding: chunked"))
        sock.settimeout(20)
        with contextlib.suppress(ConnectionError):
            while sent < 2_000_000_000:
                sock.sendall(chunk)
                sent += len(chunk)
                most = max(most, resident(server))
        assert sent < 80_000_000
        assert answer(sock) in {(413, "body_too_large"), (0, "")}
    assert most - before < 2 * LIMIT_MB * 1_000_000 + 20_000_000


def test_a_gzip_bomb(server: ServerProcess) -> None:
    """A megabyte that would be a gigabyte, and one bomb in another."""
    before = resident(server)
    bomb = gzip.compress(b" " * 1_000_000_000, 6)
    assert len(bomb) < LIMIT_MB * 1_000_000
    for body in (bomb, gzip.compress(bomb), bomb[: len(bomb) // 2]):
        with server.connect() as sock:
            sock.sendall(head(len(body), "Content-Encoding: gzip") + body)
            status, code = answer(sock)
            assert (status, code) in {(413, "body_too_large"), (400, "bad_msgpack")}, (status, code)
    assert resident(server) - before < 3 * LIMIT_MB * 1_000_000 + 20_000_000


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        (lambda n: n - 7, {400}, {"bad_msgpack", "bad_request"}),
        (lambda n: n + 7, {408}, {"request_timeout"}),
        (lambda _: -1, {400}, {"bad_request"}),
        (lambda _: "twelve", {400}, {"bad_request"}),
        (lambda _: 10**30, {400, 413}, {"bad_request", "body_too_large"}),
        (lambda _: 0, {400}, {"bad_msgpack", "bad_request"}),
    ],
    ids=["short", "long", "negative", "no number", "absurd", "zero"],
)
def test_wrong_content_lengths(
    server: ServerProcess, requests: list[Request], said: Any, status: set[int], code: set[str]
) -> None:
    body = requests[0].body
    with server.connect() as sock:
        sock.sendall(head(said(len(body))) + body)
        found = answer(sock)
        assert found[0] in status, found
        assert found[1] in code, found


def test_two_lengths_and_a_length_beside_chunks(server: ServerProcess, requests: list[Request]) -> None:
    """What proxies and servers may read in two ways is refused, or read as the standard says: never as two requests."""
    body = requests[0].body
    for more in (("Content-Length: 3",), ("Transfer-Encoding: chunked",)):
        with server.connect() as sock:
            sock.sendall(head(len(body), *more) + body)
            assert answer(sock) == (400, "bad_request")


def test_abandoned_requests_do_not_stand_in_the_way(model: Path) -> None:
    """500 requests with a time-out of 50 ms, then 100 with 30 s: all of these succeed."""
    with running(models=[str(model)], stand_in={"seconds": 0.02}) as server:
        server.ready()
        requests = answered_alone(server, blocks(20, seed=12))
        given_up = 0
        lock = threading.Lock()

        def impatient() -> None:
            nonlocal given_up
            for i in range(50):
                outcome = Link(server, timeout=0.05).ask(requests[i % 20])
                with lock:
                    given_up += outcome.status == 0

        threads = [threading.Thread(target=impatient) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert given_up
        with Load(server, requests, 10) as load:
            load.wait_for(lambda outcomes: len(outcomes) >= 100)
        load.check()
        settled(server)
        evaluated = metric(server, "nepserve_structures_total")
        sent = sum(len(o.request.block) for o in load.outcomes)
        # Dead ones were skipped: had all been computed, there would be at least so many more.
        assert evaluated < sent + 500 * np.mean([len(r.block) for r in requests]) + sum(len(r.block) for r in requests)


@pytest.mark.parametrize("kind", ["msgpack", pytest.param("json", marks=pytest.mark.slow)])
def test_large_posts_on_one_connection_with_a_short_keep_alive(model: Path, kind: str) -> None:
    """The timer of an idle connection must not fire during an upload."""
    n = 400 if kind == "json" else 3200
    positions = 2.6 * np.stack(np.meshgrid(*[np.arange(40)] * 3, indexing="ij"), -1).reshape(-1, 3)[:n].astype(float)
    block = Structures.pack([Structure.make(["Si"] * n, positions)] * 40)
    if kind == "msgpack":
        body, media = msgpack_format.pack_request(block, ["energy"]), "application/msgpack"
    else:
        items = [{"numbers": s.numbers.tolist(), "positions": s.positions.tolist()} for s in block]
        body, media = json.dumps({"structures": items, "properties": ["energy"]}).encode(), "application/json"
    limit = (len(body) + 1000) / 1e6
    assert len(body) > 200_000
    with running(models=[str(model)], stand_in={"nothing": True}, keep_alive=1, max_body_mb=limit) as server:
        server.ready()
        lines = head(len(body)).replace(b"application/msgpack", media.encode())
        with server.connect() as sock:
            for i in range(20):
                half = len(body) // 2
                sock.sendall(lines + body[:half])
                if i in {3, 7}:
                    time.sleep(1.5)  # longer than an idle connection is kept
                sock.sendall(body[half:])
                assert _status(sock) == 200
                if i == 11:
                    time.sleep(0.3)


def _status(sock: socket.socket) -> int:
    """Status of one answer, read to its end."""
    sock.settimeout(30)
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(65536)
        assert part, "the connection was closed"
        data += part
    top, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in top.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    left = length - len(body)
    while left > 0:
        left -= len(sock.recv(65536))
    return int(data[9:12])


MALFORMED = {
    "species null": {"structure": {"symbols": None, "positions": [[0, 0, 0]]}},
    "positions null": {"structure": {"symbols": ["Si"], "positions": None}},
    "null": {"structure": None},
    "structures null": {"structures": None},
    "an entry null": {"structures": [ATOM, None]},
    "nothing": {"structure": {}},
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_sizes_that_cannot_be_told(server: ServerProcess, body: dict[str, Any]) -> None:
    """Valid, malformed, valid: each has its answer."""
    assert server.evaluate(structure=ATOM).status_code == 200
    answer = server.evaluate(**body)
    if body.get("structures"):
        assert answer.status_code == 200
        assert "error" in answer.json()["results"][1]
    else:
        assert answer.status_code == 422
        assert answer.json()["code"]
    assert server.evaluate(structure=ATOM).status_code == 200


@pytest.mark.parametrize("atoms", [10**9, 2**31 - 1, -1, 0])
def test_atoms_that_are_announced_and_do_not_come(server: ServerProcess, atoms: int) -> None:
    import msgpack

    message = {"n_atoms": np.array([atoms], "<i4").tobytes(), "numbers": b"\x0e", "positions": bytes(24)}
    outcome = Link(server).ask(Request(blocks(1)[0], msgpack.packb(message)))
    assert outcome.status in {413, 422}, outcome
    assert not outcome.fault
