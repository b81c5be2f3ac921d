"""The dispatcher with an engine that does what it is told, in a loop whose clock stands still while there is work."""

from __future__ import annotations

import asyncio
import gc
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nepcore.errors import ModelError, StructureError
from nepcore.structures import PER_ATOM, PER_STRUCTURE, Predictions, Structures
from nepserve.dispatch import Answer, Dispatcher
from nepserve.engine.errors import EngineDown, EngineError
from nepserve.refusals import DeadlinePassed, Draining, QueueFull, Refused, TooLarge
from nepserve.scheduler import Load, Scheduler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

WANTED = frozenset({"energy", "forces"})


class StillLoop(asyncio.SelectorEventLoop):
    """Time passes when nothing else can happen, and at once; a loop in which nothing can happen any more fails."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            times = [handle.when() for handle in self._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
            if not times:
                raise RuntimeError("everybody waits and nobody will come")
            self.now = max(self.now, *times[:1], min(times))
        super()._run_once()  # type: ignore[misc]


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test; nothing may be left over after it, no task and no exception that nobody looked at."""
    loop = StillLoop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    try:
        loop.run_until_complete(main())  # type: ignore[arg-type]
        left = asyncio.all_tasks(loop)
    finally:
        gc.collect()
        loop.close()
    assert not left
    assert not complaints


async def turn() -> None:
    """Let everything happen that can happen now."""
    for _ in range(8):
        await asyncio.sleep(0)


class Evaluated(NamedTuple):
    predictions: Predictions
    pack_seconds: float
    device_seconds: float
    unpack_seconds: float
    batch_atoms: int
    splits: int = 0


def toy(structures: Structures, properties: frozenset[str]) -> Predictions:
    """Energies and forces that depend on each atom and on nothing else; an atom at x < 0 fails its structure."""
    x = structures.positions
    bad = [i for i, s in enumerate(structures) if (s.positions[:, 0] < 0).any()]
    full = {
        "energy": np.array([math.fsum(s.positions.ravel().tolist()) for s in structures]),
        "stress": np.array([s.cell.ravel()[:6] for s in structures]).reshape(-1, 6),
        "energies": np.sin(x[:, 0]),
        "forces": -x * x,
    }
    for name, array in full.items():
        for i in bad:
            a, b = structures.offsets[i], structures.offsets[i + 1]
            array[slice(a, b) if name in PER_ATOM else i] = np.nan
    values = {name: array for name, array in full.items() if name in properties}
    errors = {i: StructureError("non_finite_result", f"structure {i} of its batch is bad") for i in bad}
    return Predictions(structures.counts, values, structures.pbc.all(axis=1), errors)


class Call:
    """A batch in the engine."""

    def __init__(self, model: str, blocks: Sequence[Structures], properties: frozenset[str], urgent: bool) -> None:
        self.model = model
        self.structures = Structures.concatenate(blocks)
        self.properties = properties
        self.urgent = urgent
        self.reply: asyncio.Future[Evaluated] = asyncio.get_running_loop().create_future()

    def finish(self, seconds: float = 0.0, **more: Any) -> None:
        found = toy(self.structures, self.properties)
        values = {"predictions": found, "pack_seconds": 0.0, "device_seconds": seconds, "unpack_seconds": 0.0,
                  "batch_atoms": self.structures.n_atoms}  # fmt: skip
        self.reply.set_result(Evaluated(**{**values, **more}))

    def fail(self, error: Exception) -> None:
        self.reply.set_exception(error)


class FakeEngine:
    """Keeps what it is asked until the test says what comes of it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.taken_back: list[Call] = []
        self.seen = 0
        self.down: Exception | None = None

    async def evaluate(
        self, model: str, blocks: Sequence[Structures], properties: frozenset[str], *, urgent: bool = False
    ) -> Evaluated:
        if self.down is not None:
            raise self.down
        call = Call(model, blocks, properties, urgent)
        self.calls.append(call)
        self.seen += 1
        assert len(self.calls) <= 2, "more than two batches in the engine"
        try:
            return await call.reply
        except asyncio.CancelledError:
            self.taken_back.append(call)
            raise
        finally:
            self.calls.remove(call)

    async def finish_all(self, seconds: float = 0.0) -> None:
        await turn()
        while self.calls:
            self.calls[0].finish(seconds)
            await turn()


def block(*counts: int, seed: int = 0, bad: Sequence[int] = ()) -> Structures:
    rng = np.random.default_rng(seed)
    N = sum(counts)
    made = Structures.from_arrays(
        np.array(counts), np.full(N, 14), rng.random((N, 3)), rng.random((len(counts), 3, 3)), np.ones((len(counts), 3))
    )  # fmt: skip
    for i in bad:
        made.positions[made.offsets[i], 0] = -1.0
    return made


def make(engine: FakeEngine | None = None, **settings: Any) -> Dispatcher:
    """A dispatcher whose batches hold 100 units of work, one unit taking 1 ms."""
    lead = settings.pop("lead", 0.002)
    scheduler = Scheduler(**{"max_batch_seconds": 0.1, "prior_speed": 1000.0, **settings})
    return Dispatcher(scheduler, engine, lead=lead, clock=lambda: asyncio.get_running_loop().time())


def ask(dispatcher: Dispatcher, structures: Structures, work: Sequence[float] | float = 10.0, **more: Any) -> Any:
    """A task that evaluates; ``work`` is that of each structure."""
    sizes = np.full(len(structures), work) if isinstance(work, int | float) else np.array(work, float)
    properties = more.pop("properties", WANTED)
    model = more.pop("model", "si")
    return asyncio.ensure_future(dispatcher.evaluate(model, structures, properties, work=sizes, **more))


def same(answer: Answer, structures: Structures, properties: frozenset[str] = WANTED) -> None:
    """The answer has, bit by bit, what a call of its own gives."""
    wanted = toy(structures, properties)
    found = answer.predictions
    assert found.counts.tolist() == wanted.counts.tolist()
    assert set(found.values) == set(properties)
    for name, array in wanted.values.items():
        assert found.values[name].tobytes() == array.tobytes(), name
    assert found.stress_known.tolist() == wanted.stress_known.tolist()
    assert sorted(found.errors) == sorted(wanted.errors)


# -- one request ---------------------------------------------------------------------------------------------------


def test_a_lone_request_is_sent_at_once_as_it_came() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        structures = block(2, 3)
        task = ask(dispatcher, structures)
        await asyncio.sleep(0)
        assert dispatcher.healthy
        await asyncio.sleep(0)
        (call,) = engine.calls
        assert call.structures is structures
        assert (call.model, call.properties, call.urgent) == ("si", WANTED, False)
        await asyncio.sleep(3.0)
        call.finish(1.0, pack_seconds=0.5, unpack_seconds=0.25)
        answer = await task
        same(answer, structures)
        assert answer.queue_seconds == pytest.approx(1.25)
        assert (answer.pack_seconds, answer.device_seconds, answer.unpack_seconds) == (0.5, 1.0, 0.25)
        assert (answer.batch_atoms, answer.batches) == (5, 1)
        assert dispatcher.waiting == Load()
        assert dispatcher.running == 0
        assert dispatcher.healthy

    run(main)


def test_no_structures_are_answered_without_the_engine() -> None:
    async def main() -> None:
        engine = FakeEngine()
        everything = frozenset({*PER_STRUCTURE, *PER_ATOM})
        answer = await make(engine).evaluate("si", Structures.empty(), everything)
        assert len(answer.predictions) == 0
        assert set(answer.predictions.values) == everything
        assert answer.predictions.values["forces"].shape == (0, 3)
        assert answer.predictions.values["virial"].shape == (0, 3, 3)
        assert engine.seen == 0

    run(main)


def test_work_is_guessed_from_the_atoms_if_nobody_knows_better() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        first = asyncio.ensure_future(dispatcher.evaluate("si", block(1), WANTED))
        second = asyncio.ensure_future(dispatcher.evaluate("si", block(2), WANTED))
        await turn()
        assert dispatcher.waiting.work + sum(b.work for b in dispatcher.in_flight) == 3 * 80
        await engine.finish_all()
        same(await first, block(1))
        same(await second, block(2))

    run(main)


# -- batches -------------------------------------------------------------------------------------------------------


def test_requests_that_come_in_one_turn_share_a_batch() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        blocks = [block(n + 1, seed=n) for n in range(8)]
        tasks = [ask(dispatcher, b, client=str(i)) for i, b in enumerate(blocks)]
        await turn()
        (call,) = engine.calls
        assert call.structures.counts.tolist() == list(range(1, 9))
        assert dispatcher.running == 8
        call.finish()
        for task, structures in zip(tasks, blocks, strict=True):
            answer = await task
            same(answer, structures)
            assert answer.batch_atoms == 36

    run(main)


def test_what_comes_while_the_engine_is_busy_forms_the_next_batch_shortly_before_the_end() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine, lead=0.002)
        first = ask(dispatcher, block(1), 80)  # 80 ms by the measure of the scheduler
        await turn()
        later = [ask(dispatcher, block(i + 2, seed=i)) for i in range(3)]
        await asyncio.sleep(0.077)
        assert len(engine.calls) == 1
        later.append(ask(dispatcher, block(9)))
        await turn()
        assert len(engine.calls) == 1
        await asyncio.sleep(0.0015)
        assert len(engine.calls) == 2
        assert engine.calls[1].structures.counts.tolist() == [2, 3, 4, 9]
        more = ask(dispatcher, block(5), 1)
        await asyncio.sleep(1.0)
        assert len(engine.calls) == 2
        await engine.finish_all()
        for task in (first, *later, more):
            await task
        assert engine.seen == 3

    run(main)


def test_a_batch_that_ends_early_makes_nobody_wait() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        first, second = ask(dispatcher, block(1), 100), ask(dispatcher, block(2), 100)
        await turn()
        engine.calls[0].finish()
        await first
        await turn()
        assert asyncio.get_running_loop().time() == 0
        assert engine.calls[0].structures.counts.tolist() == [2]
        await engine.finish_all()
        await second

    run(main)


def test_the_expected_end_of_the_second_batch_counts_from_the_end_of_the_first() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine, lead=0.002)
        tasks = [ask(dispatcher, block(i + 1), 100) for i in range(3)]
        await asyncio.sleep(0.15)  # the first is late
        assert len(engine.calls) == 2
        engine.calls[0].finish()
        await asyncio.sleep(0.097)
        assert len(engine.calls) == 1
        await asyncio.sleep(0.002)
        assert len(engine.calls) == 2
        await engine.finish_all()
        await asyncio.gather(*tasks)

    run(main)


def test_a_large_request_runs_in_several_batches_and_comes_back_whole() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        structures = block(*([1, 2, 3] * 20), bad=[0, 17, 59])
        task = ask(dispatcher, structures, 7)
        await engine.finish_all(0.05)
        answer = await task
        same(answer, structures)
        assert answer.batches >= 3
        assert answer.device_seconds == pytest.approx(0.05 * answer.batches)
        assert dispatcher.totals.structures == 60
        assert dispatcher.totals.batches == answer.batches

    run(main)


def test_batches_that_end_in_another_order_are_put_together_in_the_right_one() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        structures = block(*([1, 2, 3, 4] * 5), bad=[3, 12])
        task = ask(dispatcher, structures, 10)
        await asyncio.sleep(0.5)
        assert [len(c.structures) for c in engine.calls] == [10, 10]
        engine.calls[1].finish()
        await turn()
        assert not task.done()
        engine.calls[0].finish()
        answer = await task
        same(answer, structures)
        assert answer.batches == 2

    run(main)


def test_everybody_gets_his_own_properties_and_nothing_else() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        wanted = [frozenset({"energy"}), frozenset({"forces", "stress"}), frozenset({"energies"})]
        tasks = [ask(dispatcher, block(i + 1), properties=w) for i, w in enumerate(wanted)]
        await turn()
        assert engine.calls[0].properties == {"energy", "forces", "stress", "energies"}
        await engine.finish_all()
        for i, (task, w) in enumerate(zip(tasks, wanted, strict=True)):
            same(await task, block(i + 1), w)

    run(main)


def test_a_structure_that_fails_does_so_alone_and_under_its_own_number() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        blocks = [block(2, 2), block(1, 2, 3, bad=[1], seed=1), block(4, seed=2)]
        tasks = [ask(dispatcher, b, 1, client=str(i)) for i, b in enumerate(blocks)]
        await engine.finish_all()
        answers = [await task for task in tasks]
        assert engine.seen == 1
        assert [sorted(a.predictions.errors) for a in answers] == [[], [1], []]
        for answer, structures in zip(answers, blocks, strict=True):
            same(answer, structures)

    run(main)


def test_models_are_not_mixed() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        tasks = [ask(dispatcher, block(i + 1), model="ab"[i % 2]) for i in range(4)]
        await turn()
        seen = []
        while engine.calls:
            seen.append((engine.calls[0].model, engine.calls[0].structures.counts.tolist()))
            engine.calls[0].finish()
            await turn()
        assert sorted(seen) == [("a", [1, 3]), ("b", [2, 4])]
        await asyncio.gather(*tasks)

    run(main)


# -- priorities ----------------------------------------------------------------------------------------------------


def test_a_single_step_does_not_wait_for_an_upload() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        upload = ask(dispatcher, block(*[1] * 100), 10)
        await asyncio.sleep(0.05)
        step = ask(dispatcher, block(7), 3)
        await turn()
        assert [(len(c.structures), c.urgent) for c in engine.calls] == [(10, False), (1, True)]
        assert asyncio.get_running_loop().time() == 0.05
        engine.calls[1].finish(0.003)
        same(await step, block(7))
        # The running batch lasts longer by what it gave way to, and the next one follows then.
        await asyncio.sleep(0.0505)
        assert len(engine.calls) == 1
        await asyncio.sleep(0.001)
        assert [(len(c.structures), c.urgent) for c in engine.calls] == [(10, False), (10, False)]
        # What comes now goes first as soon as there is a place.
        step = ask(dispatcher, block(8), 3)
        await turn()
        assert len(engine.calls) == 2
        engine.calls[0].finish(0.1)
        await turn()
        assert [(len(c.structures), c.urgent) for c in engine.calls] == [(10, False), (1, True)]
        engine.calls[1].finish()
        same(await step, block(8))
        await engine.finish_all()
        same(await upload, block(*[1] * 100))

    run(main)


def test_interactive_work_waits_for_interactive_work() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        first, second = ask(dispatcher, block(1), 90), ask(dispatcher, block(2), 90)
        await asyncio.sleep(0.05)
        assert [c.urgent for c in engine.calls] == [False]
        await asyncio.sleep(0.05)
        assert [c.urgent for c in engine.calls] == [False, False]
        await engine.finish_all()
        await asyncio.gather(first, second)

    run(main)


@pytest.mark.parametrize("work", [pytest.param(5000, id="tiled"), pytest.param(100, id="an ordinary batch")])
def test_bulk_keeps_its_share_of_the_time_between_urgent_batches(work: float) -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine, bulk_share=0.25)
        large = ask(dispatcher, block(50), work, priority="bulk")
        await turn()
        step = ask(dispatcher, block(7), 3)
        await turn()
        assert [c.urgent for c in engine.calls] == [False, True]
        other = ask(dispatcher, block(8), 3)
        engine.calls[1].finish(0.03)
        same(await step, block(7))
        await turn()
        assert len(engine.calls) == 1
        await asyncio.sleep(0.0099)
        assert len(engine.calls) == 1
        await asyncio.sleep(0.0002)
        assert [c.urgent for c in engine.calls] == [False, True]
        engine.calls[1].finish(0.03)
        same(await other, block(8))
        engine.calls[0].finish(0.06 + work / 2000)
        same(await large, block(50))
        assert dispatcher.scheduler.seconds("si", work) == pytest.approx(work / 2000), "without what it gave way to"

    run(main)


def test_nothing_but_urgent_work_stands_behind_a_tiled_batch() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        large, bulk = ask(dispatcher, block(50), 5000), ask(dispatcher, block(3), priority="bulk")
        await asyncio.sleep(10.0)
        assert len(engine.calls) == 1
        step = ask(dispatcher, block(7), 3)
        await turn()
        assert [c.urgent for c in engine.calls] == [False, True]
        await engine.finish_all()
        for task, structures in ((large, block(50)), (bulk, block(3)), (step, block(7))):
            same(await task, structures)

    run(main)


def test_speed_is_learned_from_batches() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        task = ask(dispatcher, block(1), 100)
        await engine.finish_all(0.05)
        await task
        assert dispatcher.speeds == {"si": pytest.approx(2000.0)}
        dispatcher.forget("si")
        assert dispatcher.speeds == {}

    run(main)


@pytest.mark.parametrize(
    ("code", "limit"),
    [pytest.param(None, 30, id="too many"), pytest.param("out_of_memory", 1_000_000, id="one too large")],
)
def test_batches_shrink_when_memory_ran_out_for_many_but_not_for_one(code: str | None, limit: int) -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        structures = block(20, 20)
        task = ask(dispatcher, structures)
        await turn()
        found = toy(structures, WANTED)
        if code is not None:
            found.errors[0] = StructureError(code, "too large")
        engine.calls[0].finish(predictions=found, splits=2)
        await task
        assert dispatcher.totals.splits == 2
        assert dispatcher.scheduler.batch_atoms("si") == limit

    run(main)


# -- requests that go away -----------------------------------------------------------------------------------------


def test_a_queued_request_that_is_cancelled_leaves_at_once() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        first, gone, other = ask(dispatcher, block(1), 100), ask(dispatcher, block(2), 100), ask(dispatcher, block(3))
        await turn()
        assert dispatcher.waiting.requests == 2
        gone.cancel()
        await turn()
        assert dispatcher.waiting.requests == 1
        await engine.finish_all()
        same(await first, block(1))
        same(await other, block(3))
        assert gone.cancelled()
        assert engine.seen == 2
        assert dispatcher.totals.shed == {"cancelled": 1}

    run(main)


def test_a_running_batch_is_taken_back_when_nobody_waits_for_it_any_more() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        gone = [ask(dispatcher, block(1)), ask(dispatcher, block(2))]
        await turn()
        other = ask(dispatcher, block(3))
        gone[0].cancel()
        await turn()
        assert not engine.taken_back
        gone[1].cancel()
        await turn()
        assert len(engine.taken_back) == 1
        await engine.finish_all()
        same(await other, block(3))
        assert dispatcher.totals.failed == 0

    run(main)


def test_the_results_of_a_request_that_has_gone_are_thrown_away() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        gone, stays = ask(dispatcher, block(*[1] * 5), client="a"), ask(dispatcher, block(2), client="b")
        await turn()
        assert len(dispatcher.in_flight[0].slices) > 1
        gone.cancel()
        await engine.finish_all()
        same(await stays, block(2))
        assert engine.seen == 1
        assert dispatcher.waiting == Load()

    run(main)


def test_a_cancellation_that_meets_the_answer_halfway_leaves_no_trace() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        for error in (None, EngineError("it failed")):
            task = ask(dispatcher, block(1))
            await turn()
            call = engine.calls[0]
            call.finish() if error is None else call.fail(error)
            await asyncio.sleep(0)  # the answer is there, and its task is about to take it
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await turn()
        assert dispatcher.waiting == Load()
        assert dispatcher.running == 0

    run(main)


def test_abandoned_requests_do_not_poison_the_queue() -> None:
    """Case 54: 500 requests with a time-out of their own, then 100 patient ones."""

    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine, max_queue_requests=1000)
        hurried = [asyncio.ensure_future(asyncio.wait_for(ask(dispatcher, block(1), 10), 0.05)) for _ in range(500)]
        await asyncio.wait(hurried)
        assert dispatcher.waiting == Load()
        assert all(isinstance(task.exception(), asyncio.TimeoutError) for task in hurried)
        patient = [ask(dispatcher, block(i + 1), 10, timeout=30) for i in range(100)]
        await engine.finish_all()
        for i, task in enumerate(patient):
            same(await task, block(i + 1))
        assert dispatcher.waiting == Load()
        assert dispatcher.running == 0
        assert dispatcher.totals.shed == {"cancelled": 500}

    run(main)


# -- deadlines -----------------------------------------------------------------------------------------------------


def test_a_request_that_is_not_reached_in_time_is_told_so_in_time() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        running = ask(dispatcher, block(1), 5000, timeout=4.0)
        await turn()
        late = [ask(dispatcher, block(2), timeout=t, priority="bulk") for t in (3.0, 2.0)]
        with pytest.raises(DeadlinePassed) as found:
            await late[1]
        assert asyncio.get_running_loop().time() == 2.0
        assert found.value.timeout == 2.0
        with pytest.raises(DeadlinePassed):
            await late[0]
        assert asyncio.get_running_loop().time() == 3.0
        await engine.finish_all()
        same(await running, block(1))
        assert engine.seen == 1
        assert dispatcher.totals.shed == {"deadline_passed": 2}

    run(main)


def test_a_request_that_computes_for_too_long_is_told_so_in_time_and_the_others_of_its_batch_are_answered() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        hasty = ask(dispatcher, block(1), timeout=0.5)
        patient = ask(dispatcher, block(2), timeout=5.0)
        await turn()
        with pytest.raises(DeadlinePassed):
            await hasty
        assert asyncio.get_running_loop().time() == 0.5
        assert engine.taken_back == []
        await engine.finish_all()
        same(await patient, block(2))
        assert dispatcher.totals.shed == {"deadline_passed": 1}

    run(main)


def test_a_structure_alone_in_the_engine_is_given_up_at_its_time() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        task = ask(dispatcher, block(1), timeout=0.5)
        with pytest.raises(DeadlinePassed):
            await task
        assert asyncio.get_running_loop().time() == 0.5
        await turn()
        assert len(engine.taken_back) == 1

    run(main)


def test_a_request_whose_time_ends_halfway_is_not_gone_on_with() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        task = ask(dispatcher, block(*[1] * 100), 10, timeout=0.5)
        await turn()
        with pytest.raises(DeadlinePassed):
            await task
        await turn()
        assert engine.calls == []
        assert len(engine.taken_back) == 2

    run(main)


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_no_time_at_all_is_over_at_once(timeout: float) -> None:
    async def main() -> None:
        engine = FakeEngine()
        with pytest.raises(DeadlinePassed):
            await make(engine).evaluate("si", block(1), WANTED, timeout=timeout)
        assert engine.seen == 0

    run(main)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_refusals_reach_the_caller_and_are_counted() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine, max_queue_requests=1, max_atoms=10)
        tasks = [ask(dispatcher, block(1), 100)]
        await turn()
        tasks.append(ask(dispatcher, block(1), 100))
        await turn()
        with pytest.raises(QueueFull) as full:
            await dispatcher.evaluate("si", block(1), WANTED)
        assert full.value.retry_after == pytest.approx(0.2)
        with pytest.raises(TooLarge) as large:
            await dispatcher.evaluate("si", block(3, 11), WANTED)
        assert (large.value.max_atoms, large.value.structure) == (10, 1)
        assert dispatcher.max_atoms == 10
        await engine.finish_all()
        await asyncio.gather(*tasks)
        assert dispatcher.totals.shed == {"queue_full": 1, "too_large": 1}

    run(main)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        pytest.param({"work": np.array([1.0, 2.0])}, ValueError, id="work of another block"),
        pytest.param({"work": np.array([math.nan])}, ValueError, id="work that is no number"),
        pytest.param({"work": np.array([None])}, TypeError, id="work that is nothing"),
        pytest.param({"priority": "at once"}, ValueError, id="priority"),
        pytest.param({"timeout": math.nan}, ValueError, id="timeout"),
    ],
)
def test_a_request_of_no_known_size_stops_nobody(more: dict[str, Any], error: type[Exception]) -> None:
    """Case 52: valid, malformed, valid."""

    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        first = ask(dispatcher, block(1), 100)
        await turn()
        with pytest.raises(error):
            await dispatcher.evaluate("si", block(1), WANTED, **more)
        last = ask(dispatcher, block(2), 100)
        await engine.finish_all()
        same(await first, block(1))
        same(await last, block(2))
        assert dispatcher.healthy
        assert dispatcher.running == 0

    run(main)


def test_an_unknown_property_is_refused_before_it_meets_others() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        task = ask(dispatcher, block(1))
        with pytest.raises(ModelError, match="charm"):
            await dispatcher.evaluate("si", block(1), {"energy", "charm"})
        await engine.finish_all()
        same(await task, block(1))

    run(main)


# -- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [EngineError("the batch failed"), ModelError("no such model"), RuntimeError("nobody foresaw it"), KeyError(1)],
    ids=lambda e: type(e).__name__,
)  # fmt: skip
def test_a_batch_that_fails_fails_its_requests_and_no_others(error: Exception) -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        # One request is wholly in the first batch, one has parts in the first and in later ones, one comes later.
        small = ask(dispatcher, block(1), client="a", priority="bulk")
        large = ask(dispatcher, block(*[1] * 100), client="b", priority="bulk")
        await turn()
        assert {s.job for s in dispatcher.in_flight[0].slices} == {1, 2}
        other = ask(dispatcher, block(2), client="c", priority="bulk")
        engine.calls[0].fail(error)
        await turn()
        await engine.finish_all()
        outcomes = await asyncio.gather(small, large, other, return_exceptions=True)
        failed = [o for o in outcomes if isinstance(o, Exception)]
        assert failed == outcomes[:2]
        assert all(type(o) is type(error) and o.args == error.args for o in failed)
        assert len({id(o) for o in failed}) == len(failed), "each has a copy of its own"
        same(outcomes[2], block(2))
        assert dispatcher.waiting == Load()
        assert dispatcher.healthy
        again = ask(dispatcher, block(3))
        await engine.finish_all()
        same(await again, block(3))

    run(main)


def test_an_answer_of_another_size_is_an_error_and_not_an_answer() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        task = ask(dispatcher, block(1, 2))
        await turn()
        engine.calls[0].finish(predictions=toy(block(1), WANTED))
        with pytest.raises(RuntimeError, match="1 results came for 2 structures"):
            await task
        assert dispatcher.totals.failed == 1

    run(main)


def test_the_engine_goes_down_and_comes_back() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make()
        with pytest.raises(EngineDown, match="starting"):
            await dispatcher.evaluate("si", block(1), WANTED)
        dispatcher.attach(engine)
        running, waiting = ask(dispatcher, block(1), 100), ask(dispatcher, block(2), 100)
        await turn()
        dispatcher.detach("the engine hung")
        engine.calls[0].fail(EngineDown("the engine ended by SIGKILL"))
        for task, text in ((running, "SIGKILL"), (waiting, "hung")):
            with pytest.raises(EngineDown, match=text):
                await task
        with pytest.raises(EngineDown, match="hung"):
            await dispatcher.evaluate("si", block(1), WANTED)
        assert dispatcher.healthy
        other = FakeEngine()
        dispatcher.attach(other)
        task = ask(dispatcher, block(3))
        await other.finish_all()
        same(await task, block(3))
        assert engine.seen == 1
        assert dispatcher.totals.shed == {"engine_down": 4}

    run(main)


def test_a_dead_engine_that_is_still_attached_empties_the_queue_without_recursion() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine, max_queue_requests=5000)
        tasks = [ask(dispatcher, block(1), 100) for _ in range(3000)]
        await turn()
        engine.down = EngineDown("gone")
        engine.calls[0].fail(EngineDown("gone"))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(o, EngineDown) for o in outcomes)
        assert dispatcher.waiting == Load()
        engine.down = None
        task = ask(dispatcher, block(2))
        await engine.finish_all()
        same(await task, block(2))

    run(main)


def test_a_fault_in_forming_a_batch_fails_what_waits_and_the_next_request_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        running = ask(dispatcher, block(1), 100)
        await turn()
        waiting = ask(dispatcher, block(2), 100)
        await turn()

        def broken(now: float, *, urgent_only: bool = False) -> None:
            monkeypatch.undo()
            raise TypeError("a size is None")

        monkeypatch.setattr(dispatcher.scheduler, "next_batch", broken)
        engine.calls[0].finish()
        same(await running, block(1))
        with pytest.raises(TypeError, match="a size is None"):
            await waiting
        assert dispatcher.healthy
        task = ask(dispatcher, block(3))
        await engine.finish_all()
        same(await task, block(3))

    run(main)


def test_a_queue_that_is_broken_for_good_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)

        def broken(*_: Any, **__: Any) -> None:
            raise TypeError("nothing works")

        for name in ("next_batch", "cancel"):
            monkeypatch.setattr(dispatcher.scheduler, name, broken)
        with pytest.raises(TypeError, match="nothing works"):
            await ask(dispatcher, block(1))
        assert not dispatcher.healthy
        with pytest.raises(RuntimeError, match="broken"):
            await ask(dispatcher, block(1))

    run(main)


def test_work_that_nobody_is_about_to_send_is_not_healthy() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        task = ask(dispatcher, block(1))
        await asyncio.sleep(0)
        dispatcher._forming = False
        for each in list(dispatcher._tasks):
            each.cancel()
        assert not dispatcher.healthy
        dispatcher._wake(0.0)
        assert dispatcher.healthy
        await engine.finish_all()
        same(await task, block(1))

    run(main)


def test_a_listener_that_fails_costs_nobody_an_answer() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        heard = []

        def listen(batch: Any, evaluated: Any) -> None:
            heard.append((batch.model, batch.atoms, evaluated.device_seconds))
            raise OSError("no metrics today")

        dispatcher.on_batch = listen
        tasks = [ask(dispatcher, block(i + 1), 100) for i in range(2)]
        await engine.finish_all(0.25)
        for i, task in enumerate(tasks):
            same(await task, block(i + 1))
        assert heard == [("si", 1, 0.25), ("si", 2, 0.25)]

    run(main)


# -- the end -------------------------------------------------------------------------------------------------------


def test_draining_answers_what_is_there_and_takes_nothing_new() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        tasks = [ask(dispatcher, block(i + 1), 100) for i in range(3)]
        await turn()
        drained = asyncio.ensure_future(dispatcher.drain(60))
        await turn()
        with pytest.raises(Draining):
            await dispatcher.evaluate("si", block(1), WANTED)
        assert not drained.done()
        await engine.finish_all()
        assert await drained == 0
        for i, task in enumerate(tasks):
            same(await task, block(i + 1))
        assert await dispatcher.drain(60) == 0

    run(main)


def test_draining_ends_at_its_bound_and_closing_answers_the_rest() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        tasks = [ask(dispatcher, block(1), 100), ask(dispatcher, block(2), 100)]
        await turn()
        assert await dispatcher.drain(5.0) == 2
        assert asyncio.get_running_loop().time() == 5.0
        await dispatcher.close()
        for task in tasks:
            with pytest.raises(Draining):
                await task
        assert len(engine.taken_back) == 2
        await dispatcher.close()

    run(main)


def test_a_loop_that_ends_in_the_middle_leaves_no_task_behind() -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine)
        for i in range(5):
            ask(dispatcher, block(i + 1), 100)
        await turn()
        everybody = asyncio.all_tasks() - {asyncio.current_task()}
        for task in everybody:
            task.cancel()
        await asyncio.wait(everybody)
        await turn()
        assert engine.calls == []
        assert dispatcher.waiting == Load()

    run(main)


# -- all together --------------------------------------------------------------------------------------------------

ACTIONS = st.one_of(
    st.tuples(
        st.just("ask"),
        st.lists(st.tuples(st.integers(1, 5), st.floats(0, 160), st.booleans()), min_size=1, max_size=12),
        st.sampled_from(["interactive", "bulk"]), st.sampled_from("ab"), st.sampled_from(["si", "gesn"]),
        st.none() | st.floats(0.01, 1.0),
        st.sets(st.sampled_from(["energy", "forces", "stress", "energies"]), min_size=1),
    ),
    st.tuples(st.just("finish"), st.integers(0, 1), st.floats(0, 0.3)),
    st.tuples(
        st.just("fail"), st.integers(0, 1), st.sampled_from([EngineError("e"), RuntimeError("r"), EngineDown("d")])
    ),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("wait"), st.floats(0, 0.5)),
    st.tuples(st.just("turn")),
    st.tuples(st.just("restart")),
)  # fmt: skip


@given(st.lists(ACTIONS, max_size=30), st.integers(1, 8), st.sampled_from([0.0, 0.002, math.inf]))
@settings(max_examples=80, deadline=None)
def test_every_request_gets_exactly_one_answer_and_the_right_one(
    actions: list[tuple[Any, ...]], requests: int, lead: float
) -> None:
    async def main() -> None:
        engine = FakeEngine()
        dispatcher = make(engine, max_queue_requests=requests, max_queue_atoms=60, max_batch_atoms=12, lead=lead)
        asked: list[tuple[asyncio.Task[Answer], Structures, frozenset[str]]] = []
        for kind, *details in actions:
            if kind == "ask":
                sizes, priority, client, model, timeout, names = details
                structures = block(
                    *[n for n, _, _ in sizes], seed=len(asked), bad=[i for i, (_, _, b) in enumerate(sizes) if b]
                )  # fmt: skip
                properties = frozenset(names)
                task = ask(
                    dispatcher, structures, [w for _, w, _ in sizes], priority=priority, client=client, model=model,
                    timeout=timeout, properties=properties,
                )  # fmt: skip
                asked.append((task, structures, properties))
            elif kind in {"finish", "fail"} and len(engine.calls) > details[0]:
                call = engine.calls[details[0]]
                if not call.reply.done():
                    call.finish(details[1]) if kind == "finish" else call.fail(details[1])
            elif kind == "cancel" and len(asked) > details[0]:
                asked[details[0]][0].cancel()
            elif kind == "wait":
                await asyncio.sleep(details[0])
            elif kind == "turn":
                await turn()
            elif kind == "restart":
                dispatcher.detach()
                for call in engine.calls:
                    if not call.reply.done():
                        call.fail(EngineDown("killed"))
                await turn()
                engine = FakeEngine()
                dispatcher.attach(engine)
            assert dispatcher.healthy
        await engine.finish_all()
        while any(not task.done() for task, _, _ in asked):
            # What cannot be sent yet has its time: the end of a batch, or of bulk's share between tiles.
            await asyncio.sleep(0.01)
            await engine.finish_all()
        for task, structures, properties in asked:
            if task.cancelled():
                continue
            error = task.exception()
            if error is None:
                same(task.result(), structures, properties)
            else:
                assert isinstance(error, Refused | EngineDown | EngineError | RuntimeError)
        totals = dispatcher.totals
        assert totals.requests + totals.shed.total() >= sum(not t.cancelled() for t, _, _ in asked)
        assert dispatcher.waiting == Load()
        assert dispatcher.running == 0
        assert dispatcher.in_flight == ()
        assert dispatcher.scheduler.retry_after() == 0
        await dispatcher.close()

    run(main)


def test_the_dispatcher_pulls_in_neither_torch_nor_a_web_framework() -> None:
    code = "import sys, nepserve.dispatch; print(sorted({'torch', 'fastapi', 'pydantic', 'ase'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
