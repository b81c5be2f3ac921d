"""Several HTTP processes before one queue: what clients see is what one process would have told them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest

from bridges import crystal
from nepserve.client import Client
from nepserve.client.session import Session
from servers import is_gone, running, write_model
from traffic import Load, answered_alone, blocks, metric, no_orphans, settled, summary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from servers import ServerProcess

REAL = {"loader": "nepcore:load", "backend": "loop", "threads": 1, "device": "cpu"}
FRONTS = 3
SI2 = {"symbols": ["Si", "Si"], "positions": [[0.0, 0, 0], [0, 0, 2.4]]}


def fronts(server: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/v1/status").json()["fronts"]
    return found


def up(server: ServerProcess, seconds: float = 60) -> ServerProcess:
    """Wait until all fronts take connections."""
    server.ready(seconds)
    end = time.monotonic() + seconds
    while len(found := fronts(server)) < FRONTS or not all(each["ready"] for each in found):
        assert time.monotonic() < end, server.log
        time.sleep(0.05)
    return server


@contextlib.contextmanager
def one_connection_to_each(server: ServerProcess) -> Iterator[list[httpx.Client]]:
    """Kept connections, one to each of the fronts."""
    with contextlib.ExitStack() as stack:
        found: dict[str, httpx.Client] = {}
        for _ in range(20 * FRONTS):
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
            # Ids begin with what a process drew at its start.
            found.setdefault(client.get("/healthz").headers["x-request-id"][:8], client)
            if len(found) == FRONTS:
                break
        assert len(found) == FRONTS
        yield list(found.values())


def energy(client: httpx.Client, model: str | None = None) -> float:
    answer = client.post("/v1/evaluate", json={"structure": SI2, **({} if model is None else {"model": model})})
    assert answer.status_code == 200, answer.text
    return float(answer.json()["energy"])


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[ServerProcess]:
    """For tests that leave it as it was."""
    with running(
        models=[f"si={model}"], fronts=FRONTS, frame_socket=0, dtype="float64", max_connections=40, **REAL
    ) as server:
        yield up(server)


def test_the_bits_of_one_front(model: Path, shared: ServerProcess) -> None:
    rng = np.random.default_rng(1)
    block = [
        {"symbols": ["Si"] * k, "positions": rng.random((k, 3)) * 6 + 12 * np.arange(k)[:, None] / k,
         "cell": np.eye(3) * 14.0}
        for k in rng.integers(2, 12, 120)
    ]  # fmt: skip
    # Beyond what goes through a socket, too: 128 kB.
    block.append(
        dict(block[0], symbols=["Si"] * 12_000, positions=rng.random((12_000, 3)) * 14 * 12, cell=np.eye(3) * 170.0)
    )
    with running(models=[f"si={model}"], dtype="float64", **REAL) as one:
        one.ready(60)
        wanted = Client(one.url).evaluate_many(block, chunk_atoms=60)
        assert "fronts" not in one.get("/v1/status").json()
    found = Client(shared.url).evaluate_many(block, chunk_atoms=60)
    for name in ("energy", "forces"):
        np.testing.assert_array_equal(found[name], wanted[name])


def test_connections_are_dealt_evenly(shared: ServerProcess) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(4 * FRONTS):
            stack.enter_context(httpx.Client(base_url=shared.url)).get("/healthz")
        counts = [each["connections"] for each in fronts(shared)]
    assert min(counts) >= 4
    assert max(counts) <= 5  # one of them is that of the question


def test_connections_over_the_limit_of_all_are_told(shared: ServerProcess) -> None:
    held = [shared.connect() for _ in range(45)]
    try:
        answers = []
        for sock in held:
            sock.settimeout(2.0)
            sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                answers.append(sock.recv(12))
        assert answers.count(b"HTTP/1.1 200") == 40
        assert answers.count(b"HTTP/1.1 503") == 5
    finally:
        for sock in held:
            sock.close()
    end = time.monotonic() + 20
    while sum(each["connections"] for each in fronts(shared)) > 1:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_counters_add_up_and_are_the_same_everywhere(shared: ServerProcess) -> None:
    with one_connection_to_each(shared) as clients:
        before = metric(shared, "nepserve_structures_total")
        for k, client in enumerate(clients):
            for _ in range(k + 1):
                energy(client)
        for client in clients:
            text = client.get("/metrics").text
            line = next(each for each in text.splitlines() if each.startswith("nepserve_structures_total"))
            assert float(line.split()[-1]) == before + sum(range(1, FRONTS + 1))
            assert f"nepserve_fronts {float(FRONTS)}" in text
        assert len({client.get("/v1/status").json()["engine"]["pid"] for client in clients}) == 1


def test_errors_and_ids_are_those_of_one_front(shared: ServerProcess) -> None:
    with one_connection_to_each(shared) as clients:
        for client in clients:
            body = {"structure": SI2, "model": "none"}
            answer = client.post("/v1/evaluate", json=body, headers={"x-request-id": "my"})
            assert (answer.status_code, answer.json()["code"]) == (404, "unknown_model")
            assert answer.headers["x-request-id"] == answer.json()["request_id"] == "my"
            answer = client.get("/v1/models/none", headers={"x-request-id": "mine"})
            assert (answer.status_code, answer.json()["code"]) == (404, "unknown_model")
            assert answer.headers["x-request-id"] == answer.json()["request_id"] == "mine"
            assert client.head("/healthz").content == b""
            assert client.put("/v1/models").headers["allow"] == "GET"
            assert client.get("/docs").status_code == 200
            assert "/v1/evaluate" in client.get("/openapi.json").json()["paths"]


def test_models_that_come_and_go_are_known_to_all_at_once(model: Path, tmp_path: Path) -> None:
    one, two = (write_model(tmp_path / f"{k}.txt", "Si", seed=k) for k in (1, 2))
    with (
        running(models=[f"si={model}"], fronts=FRONTS, **REAL) as server,
        one_connection_to_each(up(server)) as clients,
    ):
        found = []
        for k, path in enumerate((one, two)):
            answer = clients[k].post(
                "/v1/models?name=new", content=path.read_bytes(), headers={"content-type": "text/plain"}
            )
            assert answer.status_code == 201, answer.text
            energies = {energy(client, "new") for client in clients}
            assert len(energies) == 1
            found += energies
        assert found[0] != found[1]
        assert clients[2].put("/v1/aliases/other", json={"model": "new"}).status_code == 200
        assert {energy(client, "other") for client in clients} == {found[1]}
        assert clients[0].delete("/v1/models/new").status_code == 204
        for client in clients:
            assert client.post("/v1/evaluate", json={"structure": SI2, "model": "new"}).status_code == 404
            assert client.post("/v1/evaluate", json={"structure": SI2, "model": "other"}).status_code == 404
        # The engine forgets what no front holds.
        end = time.monotonic() + 30
        while set(server.get("/v1/status").json()["engine"]["models"]) != {"si@1"}:
            assert time.monotonic() < end, server.get("/v1/status").text
            time.sleep(0.1)
        bad = clients[1].post("/v1/models?name=new", content=b"nep9", headers={"content-type": "text/plain"})
        assert (bad.status_code, bad.json()["code"]) == (422, "bad_model")


def test_a_model_is_replaced_under_load_on_all_fronts(model: Path, tmp_path: Path) -> None:
    texts = [write_model(tmp_path / f"{k}.txt", "Si", "C", seed=k).read_bytes() for k in (1, 2)]
    header = {"content-type": "text/plain"}
    with running(models=[f"si={model}"], fronts=FRONTS, **REAL) as server:
        up(server)

        def put(k: int) -> None:
            answer = httpx.post(f"{server.url}/v1/models?name=m", content=texts[k], headers=header, timeout=60)
            assert answer.status_code == 201, answer.text

        put(0)
        right = {energy(httpx.Client(base_url=server.url), "m")}
        put(1)
        right.add(energy(httpx.Client(base_url=server.url), "m"))
        wrong: list[object] = []
        stop = threading.Event()

        def ask() -> None:
            with httpx.Client(base_url=server.url, timeout=60) as client:
                try:
                    while not stop.is_set():
                        if (found := energy(client, "m")) not in right:
                            wrong.append(found)
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for k in (0, 1, 0, 1):
            put(k)
        stop.set()
        for thread in threads:
            thread.join(30)
        assert wrong == []
        assert len(right) == 2


# -- the queue -----------------------------------------------------------------------------------------------------


def test_the_bound_of_the_queue_is_that_of_all_fronts(model: Path) -> None:
    flags = {"stand_in": {"seconds": 0.02, "tile": 16}, "max_queue_requests": 6}
    with running(models=[str(model)], fronts=FRONTS, **flags) as server:
        up(server)
        requests = answered_alone(server, blocks(20, seed=23))
        with Load(server, requests, 24) as load:
            most = 0
            end = time.monotonic() + 60
            while sum(o.code == "queue_full" for o in load.outcomes) < 30:
                most = max(most, server.get("/v1/status").json()["queue"]["requests"])
                assert time.monotonic() < end
            load.wait_for_more(60)
        load.check("queue_full")
        assert 0 < most <= 6
        assert metric(server, "nepserve_shed_total", reason="queue_full") == summary(load.outcomes)["429 queue_full"]
        settled(server)


def test_clients_share_the_engine_whatever_fronts_they_come_to(model: Path, tmp_path: Path) -> None:
    """One client beside twelve of somebody else's: its key gets its share, not its connection."""
    keys = tmp_path / "keys"
    keys.write_text("many 0123456789abcdef\nfew fedcba9876543210\n", encoding="utf-8")
    flags = {"stand_in": {"seconds": 0.01}, "max_batch_ms": 1, "api_key_file": str(keys)}
    with running(models=[str(model)], fronts=FRONTS, **flags) as server:
        server.ready()
        answered = {"many": 0, "few": 0}
        stop = threading.Event()
        lock = threading.Lock()

        def ask(name: str, key: str) -> None:
            structure = {"symbols": ["Si"] * 40, "positions": (2.5 * np.arange(120).reshape(-1, 3)).tolist()}
            with httpx.Client(base_url=server.url, timeout=60, headers={"authorization": f"Bearer {key}"}) as client:
                while not stop.is_set():
                    assert client.post("/v1/evaluate", json={"structure": structure}).status_code == 200
                    with lock:
                        answered[name] += 1

        threads = [threading.Thread(target=ask, args=("many", "0123456789abcdef")) for _ in range(12)]
        threads.append(threading.Thread(target=ask, args=("few", "fedcba9876543210")))
        for thread in threads:
            thread.start()
        end = time.monotonic() + 60
        while answered["many"] < 240 and time.monotonic() < end:
            time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join(30)
        # By connections it would be a twelfth of the others; by keys it is as much as all of them, if it asks in time.
        assert answered["few"] > 3 * answered["many"] / 12


# -- death ---------------------------------------------------------------------------------------------------------


def test_a_front_may_be_killed_under_load_and_nothing_is_lost(model: Path) -> None:
    with running(models=[f"si={model}"], fronts=FRONTS, **REAL) as server:
        up(server)
        structures = [
            {"symbols": ["Si"] * k, "positions": (2.5 * np.arange(3 * k).reshape(-1, 3)).tolist()} for k in range(2, 12)
        ]
        wanted = Client(server.url).evaluate_many(structures)["energy"]
        wrong: list[object] = []
        answered = [0]
        stop = threading.Event()

        def ask(k: int) -> None:
            client = Client(server.url)
            while not stop.is_set():
                i = (answered[0] + k) % len(structures)
                try:
                    if client.evaluate(structures[i])["energy"] != wanted[i]:
                        wrong.append(i)
                except Exception as error:
                    wrong.append(error)
                answered[0] += 1

        threads = [threading.Thread(target=ask, args=(k,)) for k in range(9)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        before = {each["pid"] for each in fronts(server)}
        counted = metric(server, "nepserve_structures_total")
        killed = max(before)
        os.kill(killed, signal.SIGKILL)
        assert is_gone(killed)
        seen = answered[0]
        end = time.monotonic() + 30
        while len(fronts(server)) < FRONTS or not all(each["ready"] for each in fronts(server)):
            assert time.monotonic() < end, server.log
            time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join(30)
        assert wrong == []
        assert answered[0] > seen
        after = {each["pid"] for each in fronts(server)}
        assert len(after & before) == FRONTS - 1
        assert killed not in after
        assert metric(server, "nepserve_front_restarts_total") == 1
        assert metric(server, "nepserve_structures_total") >= counted
        settled(server)
        assert server.terminate() == 0


def test_work_of_a_dead_front_is_taken_out_of_the_queue(model: Path) -> None:
    with running(models=[str(model)], fronts=FRONTS, stand_in={"seconds": 0.5}, max_batch_ms=1) as server, \
            one_connection_to_each(up(server)) as clients:  # fmt: skip
        found = {client.get("/healthz").headers["x-request-id"][:8]: client for client in clients}
        assert len(found) == FRONTS

        def ask(client: httpx.Client) -> None:
            with contextlib.suppress(httpx.HTTPError):
                client.post("/v1/evaluate", json={"structures": [SI2] * 200})

        threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 20
        while server.get("/v1/status").json()["queue"]["requests"] < 2:
            assert time.monotonic() < end
        for each in fronts(server):
            os.kill(each["pid"], signal.SIGKILL)
        up(server)
        status = server.get("/v1/status").json()
        assert status["queue"]["requests"] == 0
        assert energy(httpx.Client(base_url=server.url, timeout=60)) is not None
        for thread in threads:
            thread.join(30)


def test_nothing_outlives_the_lead(model: Path) -> None:
    with running(models=[str(model)], fronts=FRONTS) as server:
        up(server)
        children = server.engines()
        assert len(children) == FRONTS + 1
        server.process.kill()
        server.wait()
        assert all(is_gone(pid) for pid in children)


def test_a_front_that_hangs_does_not_keep_the_others(model: Path) -> None:
    with running(models=[str(model)], fronts=FRONTS) as server, one_connection_to_each(up(server)) as clients:
        pids = [each["pid"] for each in fronts(server)]
        os.kill(pids[0], signal.SIGSTOP)
        try:
            answered = 0
            for client in clients:
                with contextlib.suppress(httpx.ReadTimeout):
                    answered += client.post("/v1/evaluate", json={"structure": SI2}, timeout=3).status_code == 200
            assert answered == FRONTS - 1
        finally:
            os.kill(pids[0], signal.SIGCONT)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_signal_under_load(model: Path, kind: signal.Signals) -> None:
    with running(models=[str(model)], fronts=FRONTS, stand_in={"seconds": 0.05}, shutdown_timeout=20) as server:
        up(server)
        requests = answered_alone(server, blocks(10, seed=31))
        with no_orphans(server), Load(server, requests, 10, stop_on_refused_connections=True) as load:
            load.wait_for_more(30)
            server.process.send_signal(kind)
            assert server.wait(30) == 0
        outcomes = load.stop()
        assert len(outcomes) == load.sent
        assert not [o for o in outcomes if o.fault][:3]
        late = {"ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected", "BrokenPipeError"}
        assert {o.code for o in outcomes if o.status != 200} <= {"draining", *late}, summary(outcomes)


def test_drain_waits_for_all_fronts(model: Path) -> None:
    with running(models=[str(model)], fronts=FRONTS, stand_in={"seconds": 1.0}) as server, \
            one_connection_to_each(up(server)) as clients:  # fmt: skip
        found: list[int] = []

        def ask(client: httpx.Client) -> None:
            found.append(client.post("/v1/evaluate", json={"structures": [SI2] * 3}).status_code)

        threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 30
        while metric(server, "nepserve_requests_in_flight") < FRONTS:
            assert time.monotonic() < end
        answer = httpx.post(f"{server.url}/v1/drain", timeout=60)
        assert answer.json() == {"status": "drained", "requests": 0}
        for thread in threads:
            thread.join(30)
        assert found == [200] * FRONTS
        for client in clients:
            assert client.post("/v1/evaluate", json={"structure": SI2}).json()["code"] == "draining"
            assert client.get("/readyz").status_code == 503
        # One that is started again knows it, too.
        os.kill(fronts(server)[0]["pid"], signal.SIGKILL)
        with one_connection_to_each(server) as others:
            for client in others:
                assert client.post("/v1/evaluate", json={"structure": SI2}).json()["code"] == "draining"


# -- sessions ------------------------------------------------------------------------------------------------------


def opened(client: httpx.Client) -> str:
    answer = client.post("/v1/sessions", json={"symbols": SI2["symbols"], "pbc": False, "properties": ["energy"]})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def step(client: httpx.Client, id_: str) -> httpx.Response:
    return client.put(f"/v1/sessions/{id_}/positions", json={"positions": SI2["positions"]})


def test_a_session_may_be_stepped_through_any_front(shared: ServerProcess) -> None:
    with one_connection_to_each(shared) as clients:
        wanted = energy(clients[0])
        id_ = opened(clients[0])
        for client in [*clients, *clients]:
            assert step(client, id_).json()["energy"] == wanted
        assert metric(shared, "nepserve_sessions") >= 1
        assert clients[1].delete(f"/v1/sessions/{id_}").status_code == 204
        for client in clients:
            answer = step(client, id_)
            assert (answer.status_code, answer.json()["code"]) == (404, "session_lost")
            assert client.delete(f"/v1/sessions/{id_}").status_code == 404


def test_sessions_of_all_fronts_are_bounded_together(model: Path) -> None:
    with running(models=[str(model)], fronts=FRONTS, max_sessions=4) as server, \
            one_connection_to_each(up(server)) as clients:  # fmt: skip
        ids = [opened(clients[k % FRONTS]) for k in range(6)]
        codes = [step(clients[(k + 1) % FRONTS], id_).status_code for k, id_ in enumerate(ids)]
        assert codes == [404, 404, 200, 200, 200, 200]
        assert metric(server, "nepserve_sessions") == 4


def test_sessions_outlive_a_front_but_for_those_of_its_connections(model: Path) -> None:
    with running(models=[f"si={model}"], fronts=FRONTS, frame_socket=0, dtype="float64", **REAL) as server:
        up(server)
        place = server.wait_for("frames on").rpartition("frames on ")[2]
        one = crystal()
        framed = Session(Client(server.url, steps=place), one.numbers, True)
        first = framed.step(one.positions, one.cell, ("energy", "forces"))
        with httpx.Client(base_url=server.url, timeout=60) as client:
            id_ = opened(client)
        assert metric(server, "nepserve_sessions") == 2
        for each in fronts(server):
            os.kill(each["pid"], signal.SIGKILL)
        up(server)
        assert metric(server, "nepserve_sessions") == 1
        with one_connection_to_each(server) as clients:
            assert {step(client, id_).status_code for client in clients} == {200}
        # The client opens it again by itself.
        again = framed.step(one.positions, one.cell, ("energy", "forces"))
        np.testing.assert_array_equal(again["forces"], first["forces"])
        framed.close()


@pytest.mark.parametrize("way", ["http", "websocket", "frames"])
def test_steps_by_every_way(shared: ServerProcess, way: str) -> None:
    one = crystal()
    steps = shared.wait_for("frames on").rpartition("frames on ")[2] if way == "frames" else way
    client = Client(shared.url, steps=steps)
    symbols = one.symbols
    sessions = [Session(client, one.numbers, True) for _ in range(4)]
    for k, session in enumerate(sessions):
        moved = one.positions + 0.01 * k
        wanted = client.evaluate({"symbols": symbols, "positions": moved, "cell": one.cell})
        found = session.step(moved, one.cell, ("energy", "forces"))
        np.testing.assert_array_equal(found["forces"], wanted["forces"])
        assert found["energy"] == wanted["energy"]
    for session in sessions:
        session.close()


# -- sockets -------------------------------------------------------------------------------------------------------


def test_unix_sockets(model: Path, tmp_path: Path) -> None:
    path, frames = tmp_path / "s", tmp_path / "f"
    with running(models=[str(model)], fronts=FRONTS, uds=str(path), frame_socket=str(frames)) as server:
        server.wait_for("ready after")
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=30) as client:
            assert energy(client) is not None
            assert len(client.get("/v1/status").json()["fronts"]) == FRONTS
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(frames))
        assert server.terminate() == 0
    assert not path.exists()
    assert not frames.exists()
