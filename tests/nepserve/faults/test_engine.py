"""The engine dies, hangs, runs out of memory or meets poison, under load: one answer each, and ready again."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nepcore
from nepcore.structures import Structure, Structures
from servers import is_gone, running
from traffic import (
    PROPERTIES,
    Link,
    Load,
    Request,
    answered_alone,
    blocks,
    count_right,
    difference,
    metric,
    settled,
    summary,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REAL = {"loader": "nepcore:load", "backend": "loop", "threads": 1, "device": "cpu"}


def test_killed_and_stopped_engines_of_the_product(model: Path) -> None:
    """SIGKILL, then SIGSTOP, of the real engine while clients work."""
    with running(models=[str(model)], engine_timeout=2, **REAL) as server:
        server.ready(60)
        some = blocks(24)
        requests = answered_alone(server, some)
        # What is right is also what the library says in this process.
        calculator = nepcore.load(model, device="cpu", dtype="float32", backend="loop")
        for request in requests:
            assert not difference(calculator.evaluate(request.block, PROPERTIES), request.wanted)
        with Load(server, requests) as load:
            load.wait_for_more(30)
            engine = server.engines()[0]
            os.kill(engine, signal.SIGKILL)
            load.wait_for(lambda outcomes: any(o.code == "engine_down" for o in outcomes))
            load.wait_for_more(30)
            assert is_gone(engine)
            hung = server.engines()[0]
            assert hung != engine
            before = len(load.outcomes)
            os.kill(hung, signal.SIGSTOP)
            load.wait_for(lambda outcomes: any(o.code == "engine_down" for o in outcomes[before:]))
            load.wait_for_more(30)
            assert is_gone(hung)
        load.check("engine_down")
        settled(server)
        assert server.get("/readyz").status_code == 200
        assert metric(server, "nepserve_engine_restarts_total") == 2
        assert metric(server, "nepserve_requests_total", route="/v1/evaluate") == load.sent + sum(map(len, some))
        assert server.terminate() == 0


@pytest.mark.parametrize(
    "fault", ["kill", "hang", "lost", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("exit", "abort"))]
)
def test_a_structure_that_ends_its_engine(model: Path, fault: str) -> None:
    """Those in flight beside it are told to ask again, once, and do so with success."""
    with running(models=[str(model)], stand_in={"faults": {"Ge": fault}}, engine_timeout=1) as server:
        server.ready()
        requests = answered_alone(server, blocks(16))
        deadly = Request.of(Structures.pack([Structure.make(["Ge"], np.zeros((1, 3)))]))
        with Load(server, requests) as load:
            load.wait_for_more(20)
            engine = server.engines()[0]
            outcome = Link(server).ask(deadly)
            assert (outcome.status, outcome.code, outcome.fault) == (503, "engine_down", "")
            load.wait_for_more(20)
        load.check("engine_down")
        assert is_gone(engine)
        server.ready()
        settled(server)
        assert server.terminate() == 0


def test_failures_without_end_end_the_server(model: Path) -> None:
    with running(models=[str(model)], stand_in={"faults": {"Ge": "exit"}}, engine_restarts=2) as server:
        server.ready()
        requests = answered_alone(server, blocks(8))
        deadly = Request.of(Structures.pack([Structure.make(["Ge"], np.zeros((1, 3)))]))
        with Load(server, requests, 4, stop_on_refused_connections=True) as load:
            end = time.monotonic() + 60
            while server.process.poll() is None and time.monotonic() < end:
                Link(server).ask(deadly)
                time.sleep(0.05)
            assert server.wait() == 1
        assert "failed 3 times" in server.log
        assert "Traceback" not in server.log
        outcomes = load.stop()
        assert not [o for o in outcomes if o.fault]
        # The last moment of a server that gives up: who came too late finds nobody.
        gone = {"ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected", "BrokenPipeError"}
        assert {o.code for o in outcomes if o.status != 200} <= {"engine_down", *gone}, summary(outcomes)
        assert sum(o.code in gone - {"ConnectionRefusedError"} for o in outcomes) <= 8


WORDINGS = {
    "CUDA": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB",
    "HIP": "HIP out of memory. Tried to allocate 14.00 MiB",
    "HIP name": "hipErrorOutOfMemory",
    "own kernel": "cudaMalloc failed: error 2",
    "host": "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 B",
    "library": "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
    "C++": "std::bad_alloc",
    "Python": "MemoryError",
    "warp": "Failed to allocate 123456 bytes on device 'cuda:0'",
}


@pytest.fixture(scope="module")
def easy(model: Path) -> list[Request]:
    """Requests that were answered where there was memory enough."""
    with running(models=[str(model)]) as server:
        return answered_alone(server.ready(), blocks(12, largest=6, seed=8))


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (5, "CUDA"),
        (7, "HIP"),
        (16, "Python"),
        *(pytest.param(n, "CUDA", marks=pytest.mark.slow) for n in (2, 3, 6, 9, 40, 100)),
        *(pytest.param(6, w, marks=pytest.mark.slow) for w in WORDINGS),
    ],
)
def test_out_of_memory_at_any_depth(model: Path, easy: list[Request], memory: int, text: str) -> None:
    """What fits alone is answered, with the bits it has alone; what does not says so by itself."""
    large = Structures.pack([Structure.make(["Si"] * (memory + 1), 2.5 * np.arange(3 * memory + 3).reshape(-1, 3))])
    stand_in = {"memory": memory, "memory_from": 6, "memory_text": WORDINGS[text]}
    with running(models=[str(model)], stand_in=stand_in, probe_interval=600) as server:
        server.ready()
        with Load(server, easy, 12) as load:
            load.wait_for(lambda outcomes: len(outcomes) >= 100)
            outcome = Link(server).ask(Request.of(large))
        assert all(_only_too_large(o, memory) for o in load.stop())
        assert {o.status for o in load.outcomes} == {200}
        assert outcome.found is not None
        assert [e.code for e in outcome.found.errors.values()] == ["out_of_memory"]
        settled(server)
        if memory < 10:
            assert metric(server, "nepserve_oom_splits_total") > 0
        assert metric(server, "nepserve_engine_restarts_total") == 0
        # The one structure alone is refused as a whole.
        structure = {"symbols": ["Si"] * (memory + 1), "positions": large.positions.tolist()}
        answer = server.evaluate(structure=structure)
        assert (answer.status_code, answer.json()["code"]) == (413, "out_of_memory")
        assert server.get("/readyz").status_code == 200


def _only_too_large(outcome: Any, memory: int) -> bool:
    """Whether structures over the limit failed, and all others are right to the bit."""
    found, block = outcome.found, outcome.request.block
    over = {int(i) for i in np.flatnonzero(block.counts > memory)}
    if found is None or set(found.errors) != over or any(e.code != "out_of_memory" for e in found.errors.values()):
        return False
    return all(not difference(found.slice(i, i + 1), outcome.request.wanted.slice(i, i + 1))
               for i in range(len(block)) if i not in over)  # fmt: skip


def coincident() -> Structure:
    return Structure.make(["Si", "Si", "C"], [[0, 0, 0], [0, 0, 0], [2, 2, 2]])


def not_a_number() -> Structure:
    return Structure.make(["Si", "Si"], [[0, 0, 0], [2.0, 2.0, np.nan]])


def foreign() -> Structure:
    return Structure.make(["U", "Si"], [[0, 0, 0], [3, 0, 0]])


def poison_at_one_percent(requests: list[Request], make: Callable[[], Structure], seed: int) -> dict[int, list[int]]:
    """Put a bad structure beside one in a hundred of the good ones; where, by request."""
    rng = np.random.default_rng(seed)
    total = sum(len(r.block) for r in requests)
    places: dict[int, list[int]] = {}
    for place in rng.choice(total, max(3, total // 100), replace=False).tolist():
        i = 0
        while place >= len(requests[i].block):
            place -= len(requests[i].block)
            i += 1
        places.setdefault(i, []).append(place)
    for i, where in places.items():
        good = list(requests[i].block)
        for at in sorted(where, reverse=True):
            good.insert(at, make())
        block = Structures.pack(good)
        requests[i] = Request.of(block, requests[i].wanted)
        places[i] = [at + n for n, at in enumerate(sorted(where))]
    return places


def check_poisoned(outcomes: list[Any], requests: list[Request], places: dict[int, list[int]], code: str) -> None:
    """The bad ones are named, the good ones have the bits they have alone."""
    bad = {requests[i].body: where for i, where in places.items()}
    seen = 0
    for outcome in outcomes:
        assert outcome.status == 200, outcome
        where = bad.get(outcome.request.body, [])
        found, wanted = outcome.found, outcome.request.wanted
        assert sorted(found.errors) == where
        assert {e.code for e in found.errors.values()} <= {code}
        seen += len(where)
        for n, i in enumerate(i for i in range(len(found)) if i not in where):
            assert not difference(found.slice(i, i + 1), wanted.slice(n, n + 1))
    assert seen


@pytest.mark.parametrize(
    ("make", "code"),
    [(coincident, "coincident_atoms"), (not_a_number, "non_finite"), (foreign, "unknown_element")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_poison_at_the_door_of_the_product(real: Any, make: Callable[[], Structure], code: str) -> None:
    requests = answered_alone(real, blocks(64, seed=3))
    places = poison_at_one_percent(requests, make, 3)
    with Load(real, requests, 8) as load:
        load.wait_for(lambda outcomes: len(outcomes) >= 2 * len(requests))
    assert count_right(load.stop()) < len(load.outcomes)
    check_poisoned(load.outcomes, requests, places, code)
    settled(real)
    assert real.get("/readyz").status_code == 200


@pytest.fixture(scope="module")
def real(model: Path) -> Any:
    with running(models=[str(model)], **REAL) as server:
        yield server.ready(60)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("raise", "internal"),
        ("refuse_all", "too_dense"),
        ("nan", "non_finite_result"),
        pytest.param("refuse", "unknown_element", marks=pytest.mark.slow),
        pytest.param("nan_energy", "non_finite_result", marks=pytest.mark.slow),
        pytest.param("no_memory", "out_of_memory", marks=pytest.mark.slow),
    ],
)
def test_poison_that_only_the_engine_finds(model: Path, fault: str, code: str) -> None:
    with running(models=[str(model)], stand_in={"faults": {"Ge": fault}}) as server:
        server.ready()
        requests = answered_alone(server, blocks(64, seed=4))
        places = poison_at_one_percent(requests, lambda: Structure.make(["Ge", "Si"], [[0, 0, 0], [3, 0, 0]]), 4)
        with Load(server, requests, 8) as load:
            load.wait_for(lambda outcomes: len(outcomes) >= 2 * len(requests))
        check_poisoned(load.stop(), requests, places, code)
        settled(server)
        assert metric(server, "nepserve_engine_restarts_total") == 0
        assert server.get("/readyz").status_code == 200
