"""Start, change and end of a server under load: SIGTERM, SIGINT, kill -9, drain, models that come and go."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest

from servers import running, write_model
from traffic import (
    Link,
    Load,
    Request,
    answered_alone,
    blocks,
    difference,
    metric,
    no_orphans,
    settled,
    summary,
)

if TYPE_CHECKING:
    from pathlib import Path

    from servers import ServerProcess
    from traffic import Outcome

REAL = {"loader": "nepcore:load", "backend": "loop", "threads": 1, "device": "cpu"}
TOO_LATE = {"ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected", "BrokenPipeError"}
"""What a client sees that calls after the server has closed its door."""


def check_the_end(load: Load) -> None:
    """Nothing that was accepted is lost: right bits, a refusal, or no connection at all."""
    outcomes = load.stop()
    assert len(outcomes) == load.sent
    assert not [o for o in outcomes if o.fault][:3]
    assert {o.code for o in outcomes if o.status != 200} <= {"draining", *TOO_LATE}, summary(outcomes)


def post(server: ServerProcess, where: str, **body: object) -> httpx.Response:
    return httpx.post(server.url + where, json=body, timeout=60)


@pytest.mark.parametrize("kind", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=str)
def test_a_signal_under_load(model: Path, kind: signal.Signals) -> None:
    """What was accepted is answered, what comes later is refused, and the server ends with 0."""
    with running(models=[str(model)], stand_in={"seconds": 0.05}, shutdown_timeout=20) as server:
        server.ready()
        requests = answered_alone(server, blocks(10, seed=31))
        with no_orphans(server), Load(server, requests, 10, stop_on_refused_connections=True) as load:
            load.wait_for_more(30)
            server.process.send_signal(kind)
            assert server.wait(30) == 0
        check_the_end(load)
        assert "were not finished" not in server.log
        assert "Traceback" not in server.log


def test_sigterm_of_the_product_with_idle_half_sent_and_queued_work(model: Path) -> None:
    with running(models=[str(model)], shutdown_timeout=10, **REAL) as server:
        server.ready(60)
        requests = answered_alone(server, blocks(24, largest=30, seed=32))
        idle, half = server.connect(), server.connect()
        half.sendall(b"POST /v1/evaluate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        half.sendall(b"Content-Length: 500\r\n\r\n{")
        with no_orphans(server), Load(server, requests, 12, stop_on_refused_connections=True) as load:
            load.wait_for_more(30)
            started = time.monotonic()
            assert server.terminate(30) == 0
            assert time.monotonic() - started < 15
        check_the_end(load)
        half.settimeout(5)
        assert half.recv(4096).startswith(b"HTTP/1.1 503 ")
        idle.close()
        half.close()


def test_a_second_sigint_under_load(model: Path) -> None:
    """It ends at once: those in flight see the connection break, and nobody gets half an answer."""
    with running(models=[str(model)], stand_in={"seconds": 0.2}) as server:
        server.ready()
        requests = answered_alone(server, blocks(4, seed=33))
        with no_orphans(server), Load(server, requests, 10, stop_on_refused_connections=True) as load:
            load.wait_for_more(4)
            server.process.send_signal(signal.SIGINT)
            server.wait_for("SIGINT")
            time.sleep(0.1)
            server.process.send_signal(signal.SIGINT)
            assert server.wait(10) == 130
        check_the_end(load)


@pytest.mark.parametrize("what", ["load", pytest.param("idle", marks=pytest.mark.slow)])
def test_kill_of_the_front_leaves_nothing(model: Path, what: str) -> None:
    stand_in = {"seconds": 0.05} if what == "load" else {}
    with running(models=[str(model)], stand_in=stand_in) as server:
        server.ready()
        requests = answered_alone(server, blocks(4, seed=34))
        with no_orphans(server), Load(server, requests, 6, stop_on_refused_connections=True) as load:
            load.wait_for_more(20)
            if what == "idle":
                load.stop()
            server.process.kill()
            server.wait(10)
        assert not [o for o in load.stop() if o.fault]
        codes = {o.code for o in load.outcomes if o.status != 200}
        assert codes <= {*TOO_LATE, "IncompleteRead"}


def test_drain_under_load(model: Path) -> None:
    with running(models=[str(model)], stand_in={"seconds": 0.05}) as server:
        server.ready()
        requests = answered_alone(server, blocks(10, seed=35))
        with Load(server, requests, 10) as load:
            load.wait_for_more(30)
            drained = post(server, "/v1/drain")
            assert drained.json() == {"status": "drained", "requests": 0}
            before = len(load.outcomes)
            load.wait_for(lambda outcomes: len(outcomes) > before + 20)
        load.check("draining")
        # Once it has said so, no work is taken any more.
        assert Link(server).ask(requests[0]).code == "draining"
        assert server.get("/readyz").json()["code"] == "draining"
        assert server.get("/healthz").status_code == 200
        settled(server)
        assert post(server, "/v1/drain").json() == {"status": "drained", "requests": 0}
        assert server.terminate() == 0


def test_a_drain_that_does_not_wait(model: Path) -> None:
    with running(models=[str(model)], stand_in={"seconds": 0.5}) as server, ThreadPoolExecutor(1) as pool:
        server.ready()
        request = answered_alone(server, blocks(1, seed=36))[0]
        working = pool.submit(Link(server).ask, request)
        end = time.monotonic() + 10
        while not metric(server, "nepserve_requests_in_flight") and time.monotonic() < end:
            time.sleep(0.01)
        assert post(server, "/v1/drain?timeout=0").json() == {"status": "draining", "requests": 1}
        outcome = working.result()
        assert (outcome.status, outcome.fault) == (200, "")
        assert post(server, "/v1/drain").json() == {"status": "drained", "requests": 0}


def test_models_are_swapped_under_load(tmp_path: Path) -> None:
    """Every answer is that of the one model or of the other, whole; no request fails, a bad file changes nothing."""
    paths = {name: write_model(tmp_path / f"{name}.txt", "C", "Si", seed=seed) for name, seed in (("a", 1), ("b", 2))}
    (tmp_path / "bad.txt").write_text(paths["a"].read_text()[:200])
    some = blocks(16, seed=37)
    with running(models=[f"m={paths['a']}"], model_dir=str(tmp_path), dtype="float64", **REAL) as server:
        server.ready(60)
        right = {"a": answered_alone(server, some)}
        assert post(server, "/v1/models", name="m", path="b.txt").status_code == 201
        right["b"] = answered_alone(server, some)
        requests = [Request.of(block) for block in some]

        def is_whole(outcome: Outcome) -> bool:
            number = some.index(outcome.request.block)
            return any(not difference(outcome.found, each[number].wanted) for each in right.values())

        with no_orphans(server), Load(server, requests, 8) as load:
            names = {"a.txt": 201, "bad.txt": 422, "b.txt": 201, "nowhere.txt": 422}
            for name, status in [*names.items(), ("a.txt", 201)]:
                load.wait_for_more(20)
                answer = post(server, "/v1/models", name="m", path=name)
                assert answer.status_code == status, answer.text
            load.wait_for_more(20)
            load.check()
            assert all(is_whole(outcome) for outcome in load.outcomes)
            assert server.terminate() == 0


def test_aliases_move_under_load(tmp_path: Path) -> None:
    paths = [write_model(tmp_path / f"{name}.txt", "C", "Si", seed=i) for i, name in enumerate("ab")]
    with running(models=[str(path) for path in paths], stand_in={"seconds": 0.002}) as server:
        server.ready()
        put = {name: httpx.put(f"{server.url}/v1/aliases/now", json={"model": name}) for name in "ab"}
        assert {answer.status_code for answer in put.values()} == {200}
        requests = answered_alone(server, blocks(8, seed=38), "now")
        stop = threading.Event()

        def switch() -> None:
            while not stop.wait(0.01):
                for name in "ab":
                    httpx.put(f"{server.url}/v1/aliases/now", json={"model": name}).raise_for_status()

        switching = threading.Thread(target=switch)
        switching.start()
        try:
            with Load(server, requests, 6) as load:
                load.wait_for_more(100)
        finally:
            stop.set()
            switching.join()
        load.check()
        assert metric(server, "nepserve_structures_total", model="a")
        assert metric(server, "nepserve_structures_total", model="b")


def test_a_model_is_taken_away_under_load(tmp_path: Path) -> None:
    """Those that hold it get their answers, later ones are told that there is none; the other model goes on."""
    paths = [write_model(tmp_path / f"{name}.txt", "C", "Si", seed=i) for i, name in enumerate("ab")]
    with running(models=[str(path) for path in paths], stand_in={"seconds": 0.01}) as server:
        server.ready()
        requests = {name: answered_alone(server, blocks(8, seed=39), name) for name in "ab"}
        with Load(server, requests["a"], 6) as leaving, Load(server, requests["b"], 6) as staying:
            leaving.wait_for_more(30)
            assert httpx.delete(f"{server.url}/v1/models/a", timeout=30).status_code == 204
            leaving.wait_for(lambda outcomes: any(o.code == "unknown_model" for o in outcomes))
            staying.wait_for_more(30)
        leaving.check("unknown_model")
        staying.check()
        settled(server)
        assert server.get("/v1/status").json()["models"] == ["b"]


def test_the_engine_dies_while_a_model_is_loaded(tmp_path: Path) -> None:
    """The load is refused as one that may be tried again; the old model serves, and is there again by itself."""
    paths = [write_model(tmp_path / f"{name}.txt", "C", "Si", "Ge", seed=i) for i, name in enumerate("ab")]
    stand_in = {"faults": {"Ge": "kill"}, "load_seconds": 0.5}
    with (
        running(models=[f"m={paths[0]}"], model_dir=str(tmp_path), stand_in=stand_in) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        server.ready()
        requests = answered_alone(server, blocks(8, seed=40))
        digest = server.get("/v1/models/m").json()["sha256"]
        with Load(server, requests, 4) as load:
            load.wait_for_more(10)
            loading = pool.submit(post, server, "/v1/models", name="m", path="b.txt")
            time.sleep(0.2)
            assert server.evaluate(structure={"symbols": ["Ge"], "positions": [[0, 0, 0]]}).status_code == 503
            answer = loading.result()
            assert (answer.status_code, answer.json()["code"]) == (503, "engine_down"), answer.text
            load.wait_for_more(20)
        load.check("engine_down")
        assert server.get("/v1/models/m").json()["sha256"] == digest
        assert post(server, "/v1/models", name="m", path="b.txt").status_code == 201
        assert server.get("/v1/models/m").json()["sha256"] != digest


def test_restarts_leave_no_memory_and_no_files_behind(model: Path) -> None:
    """One engine after the other: descriptors and memory of the front stay as they are."""
    import psutil

    with running(models=[str(model)], stand_in={"faults": {"Ge": "kill"}}, engine_restarts=100) as server:
        server.ready()
        front = psutil.Process(server.process.pid)
        deadly = {"symbols": ["Ge"], "positions": [[0, 0, 0]]}
        sound = {"symbols": ["Si"], "positions": [[0, 0, 0]]}
        seen = []
        for _ in range(4):
            assert server.evaluate(structure=deadly).status_code == 503
            server.ready()
            assert server.evaluate(structure=sound).status_code == 200
            seen.append((front.num_fds(), front.memory_info().rss, len(front.children(recursive=True))))
        assert seen[-1][0] <= seen[0][0] + 2, seen
        assert seen[-1][1] < 1.1 * seen[0][1], seen
        assert {children for _, _, children in seen} == {1}
