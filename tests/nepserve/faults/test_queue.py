"""The queue under load: full, with deadlines, with clocks that jump; results have the bits of a lone request."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engines import structure
from nepcore.structures import Predictions, Structures
from nepserve.dispatch import Answer, DeadlinePassed, Dispatcher
from nepserve.engine import Evaluated
from nepserve.scheduler import Scheduler
from servers import running
from traffic import Link, Load, answered_alone, blocks, count_right, metric, settled, summary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

REAL = {"loader": "nepcore:load", "threads": 1, "device": "cpu"}


@pytest.mark.parametrize(
    "backend", ["loop", pytest.param("auto", marks=pytest.mark.slow), pytest.param("fused-cpu", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_results_under_load_have_the_bits_of_a_lone_request(model: Path, backend: str, dtype: str) -> None:
    """Bodies of one to five structures of 2 to 80 atoms, from 16 clients, in bulk and not."""
    with running(models=[str(model)], backend=backend, dtype=dtype, **REAL) as server:
        server.ready(120)
        requests = answered_alone(server, blocks(30, seed=21) + blocks(6, largest=80, seed=22))
        with Load(server, requests, 12) as steps, Load(server, requests, 4, X_Priority="bulk") as bulk:
            steps.wait_for_more(200, 120)
        steps.check()
        bulk.check()
        batches, structures = (metric(server, f"nepserve_{name}_total") for name in ("batches", "structures"))
        # They were in company, or this would say nothing.
        assert structures > 1.5 * batches
        settled(server)


def test_a_full_queue_is_told_and_empties_again(model: Path) -> None:
    with running(models=[str(model)], stand_in={"seconds": 0.02, "tile": 16}, max_queue_requests=6) as server:
        server.ready()
        requests = answered_alone(server, blocks(20, seed=23))
        with Load(server, requests, 24) as load:
            load.wait_for(lambda outcomes: sum(o.code == "queue_full" for o in outcomes) >= 30)
            load.wait_for_more(60)
        load.check("queue_full")
        assert metric(server, "nepserve_shed_total", reason="queue_full") == summary(load.outcomes)["429 queue_full"]
        settled(server)
        with Load(server, requests, 4) as quiet:
            quiet.wait_for_more(20)
        quiet.check()


def test_a_queue_full_of_atoms_takes_what_still_fits(model: Path) -> None:
    with running(models=[str(model)], stand_in={"seconds": 0.02, "tile": 16}, max_queue_atoms=60) as server:
        server.ready()
        requests = answered_alone(server, blocks(20, largest=8, seed=24))
        with Load(server, requests, 16) as load:
            load.wait_for(lambda outcomes: any(o.code == "queue_full" for o in outcomes))
            load.wait_for_more(40)
        load.check("queue_full")
        structure = {"symbols": ["Si"] * 61, "positions": (2.5 * np.arange(183).reshape(-1, 3)).tolist()}
        answer = server.evaluate(structure=structure)
        assert (answer.status_code, answer.json()["code"], answer.json()["max_atoms"]) == (413, "too_large", 60)
        settled(server)


def test_deadlines_that_pass_in_the_queue(model: Path) -> None:
    """Half of the clients have no time to wait: each of them is told so, about when it has passed."""
    with running(models=[str(model)], stand_in={"seconds": 0.05}) as server:
        server.ready()
        requests = answered_alone(server, blocks(6, seed=25))
        with Load(server, requests, 6) as patient, Load(server, requests, 6, X_Request_Timeout="0.02") as hasty:
            hasty.wait_for(lambda outcomes: sum(o.code == "deadline_passed" for o in outcomes) >= 20)
            patient.wait_for_more(20)
        patient.check()
        hasty.check("deadline_passed")
        settled(server)
        expired = summary(hasty.outcomes)["504 deadline_passed"]
        assert metric(server, "nepserve_shed_total", reason="deadline_passed") == expired
        link = Link(server)
        for value in ("0", "-1", "nan", "inf", "soon", "1e400"):
            outcome = link.ask(requests[0], X_Request_Timeout=value)
            assert (outcome.status, outcome.code) == (400, "bad_header")
        assert link.ask(requests[0], X_Request_Timeout="1e300").status == 200


# What a clock does when a machine sleeps, or is set: it must not be asked how late it is.
_JUMPY = """
import itertools, time
_real, _jumps = time.time, itertools.cycle([0.0, 3600.0, -3600.0, 1e9, -1e8])
time.time = lambda: _real() + next(_jumps)
"""


def test_a_wall_clock_that_jumps(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the front and in the engine alike."""
    (tmp_path / "sitecustomize.py").write_text(_JUMPY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with running(models=[str(model)], stand_in={"seconds": 0.002}, probe_interval=0.2) as server:
        server.ready()
        requests = answered_alone(server, blocks(12, seed=26))
        with Load(server, requests, 6, X_Request_Timeout="30") as load:
            load.wait_for_more(100)
        load.check()
        settled(server)
        for path in ("/v1/status", "/healthz", "/v1/models", "/metrics"):
            assert server.get(path).status_code == 200
        assert server.get("/readyz").status_code == 200
        assert metric(server, "nepserve_engine_restarts_total") == 0
        assert server.terminate() == 0


class Immediate:
    """An engine that answers at once with the number of atoms as energy."""

    async def evaluate(
        self, model: str, blocks: Sequence[Structures], properties: frozenset[str], *, urgent: bool = False
    ) -> Evaluated:
        await asyncio.sleep(0)
        together = Structures.concatenate(blocks)
        values: dict[str, Any] = {"energy": together.counts.astype(np.float64)}
        found = Predictions(together.counts, values, np.zeros(len(together), bool), {})
        return Evaluated(found, 1e-5, 1e-3, 1e-5, together.n_atoms)


@pytest.mark.parametrize("seed", range(8))
def test_a_steady_clock_that_is_not_steady(seed: int) -> None:
    """Back and forth by hours, or standing still: each request has one answer, and none is left."""
    rng = random.Random(seed)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += rng.choice([0.0, 1e-4, 1e-3, 5.0, 4000.0, -4000.0, -1e-3])
        return now

    async def main() -> None:
        dispatcher = Dispatcher(Scheduler(max_queue_requests=50), Immediate(), clock=clock)
        works = [Structures.pack([structure(rng.randrange(1, 5), i)] * rng.randrange(1, 4)) for i in range(200)]

        async def ask(work: Structures, timeout: float | None) -> Answer:
            return await dispatcher.evaluate("m", work, ["energy"], client=str(rng.randrange(3)), timeout=timeout)

        for start in range(0, 200, 40):
            asking = [ask(work, rng.choice([None, 600.0, 1e5])) for work in works[start : start + 40]]
            got = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 20)
            for work, one in zip(works[start : start + 40], got, strict=True):
                if isinstance(one, BaseException):
                    assert isinstance(one, DeadlinePassed)
                else:
                    assert one.predictions["energy"].tolist() == work.counts.tolist()
        assert dispatcher.scheduler.queued == 0
        assert dispatcher.waiting.atoms == dispatcher.waiting.work == 0
        assert dispatcher.in_flight == ()
        assert dispatcher.healthy
        await dispatcher.close()

    asyncio.run(main())


def test_many_small_and_one_large(model: Path) -> None:
    """While an upload of a thousand structures is worked on, single steps of others get through."""
    with running(models=[str(model)], stand_in={"seconds_per_atom": 2e-4, "tile": 64}, max_batch_ms=20) as server:
        server.ready()
        requests = answered_alone(server, blocks(8, seed=27))
        large = [{"symbols": ["Si", "Si"], "positions": [[0, 0, 0], [2.2, 0.01 * i, 0]]} for i in range(3000)]
        upload: list[Any] = []

        thread = threading.Thread(target=lambda: upload.append(server.evaluate(structures=large, timeout=120)))
        thread.start()
        time.sleep(0.2)
        with Load(server, requests, 2) as load:
            load.wait_for_more(20)
            # The upload takes more than a second of the engine's time; twenty steps did not wait for it.
            early = not upload
        thread.join()
        load.check()
        assert early
        assert upload[0].status_code == 200
        assert len(upload[0].json()["results"]) == 3000
        assert count_right(load.outcomes) >= 20


def test_a_full_queue_refuses_before_it_reads(model: Path) -> None:
    """The refusal comes while the body is still on its way, and the connection serves the next request."""
    with running(models=[str(model)], stand_in={"seconds": 1.0}, max_queue_requests=1) as server:
        server.ready()
        requests = answered_alone(server, blocks(1, seed=28))
        with Load(server, requests, 4):
            deadline = time.monotonic() + 30
            while metric(server, "nepserve_requests_waiting") < 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            with server.connect() as link:
                head = b"POST /v1/evaluate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
                size = 3_000_000
                codes = []
                for _ in range(3):
                    link.sendall(head + b"%d\r\n\r\n" % size + b"x" * 1000)
                    answer = http.client.HTTPResponse(link)
                    answer.begin()
                    problem = json.loads(answer.read())
                    codes.append((answer.status, problem.get("code")))
                    assert int(answer.headers["Retry-After"]) >= 1
                    link.sendall(b"x" * (size - 1000))
            assert codes == [(429, "queue_full")] * 3
        settled(server)
