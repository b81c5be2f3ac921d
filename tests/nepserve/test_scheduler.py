"""The scheduler against a plain account of what it was given, and its promises one by one."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nepserve.scheduler import Batch, Job, Load, Priority, QueueFull, Refused, Scheduler, Slice, TooLarge
from nepserve.speed import Speed


def job(
    id: int = 0,  # noqa: A002
    *,
    counts: list[int] | None = None,
    work: list[float] | None = None,
    model: str = "si",
    client: str = "",
    priority: Priority = "interactive",
    deadline: float | None = None,
) -> Job:
    atoms = np.array([1] if counts is None else counts, np.int64)
    return Job(id, model, client, priority, atoms, np.array(atoms if work is None else work, np.float64), deadline)


def make(**settings: float) -> Scheduler:
    """A scheduler whose batches hold 100 units of work, one unit taking 1 ms."""
    return Scheduler(**{"max_batch_seconds": 0.1, "prior_speed": 1000.0, **settings})  # type: ignore[arg-type]


def drain(scheduler: Scheduler) -> list[Batch]:
    batches = []
    while (batch := scheduler.next_batch(0.0)) is not None:
        batches.append(batch)
        scheduler.finished(batch, 0.0, None)
    return batches


class Account(RuleBasedStateMachine):
    """Any sequence of calls: each structure goes out once or is dropped, bounds hold, counters agree."""

    @initialize(
        batch_atoms=st.integers(1, 60), queue_atoms=st.integers(1, 400), requests=st.integers(1, 12),
        largest=st.integers(1, 100), share=st.floats(0.01, 0.5),
    )  # fmt: skip
    def start(self, batch_atoms: int, queue_atoms: int, requests: int, largest: int, share: float) -> None:
        self.scheduler = make(
            max_atoms=largest, max_batch_atoms=batch_atoms, max_queue_atoms=queue_atoms, max_queue_requests=requests,
            bulk_share=share,
        )  # fmt: skip
        self.now = 0.0
        self.ids = 0
        self.queued: dict[int, Job] = {}
        self.done: dict[int, int] = {}  # structures handed out
        self.running: list[Batch] = []
        self.told: list[int] = []
        self.bulk_was_last = False

    def left(self, id: int) -> tuple[int, int]:  # noqa: A002
        """Atoms and work not handed out of a job, counted afresh."""
        start = self.done[id]
        return (
            int(self.queued[id].counts[start:].sum()),
            sum(math.ceil(w) for w in self.queued[id].work[start:].tolist()),
        )

    def pass_deadlines(self) -> None:
        for id_, each in list(self.queued.items()):
            if each.deadline is not None and each.deadline <= self.now:
                del self.queued[id_]
                self.told.append(id_)

    @rule(
        structures=st.lists(st.tuples(st.integers(0, 40), st.floats(0, 130)), min_size=1, max_size=12),
        model=st.sampled_from(["si", "gesn"]), client=st.sampled_from("abc"),
        line=st.sampled_from(["interactive", "bulk"]),
        timeout=st.none() | st.floats(-1, 30),
    )  # fmt: skip
    def submit(self, structures: list, model: str, client: str, line: Priority, timeout: float | None) -> None:
        counts, work = [n for n, _ in structures], [w for _, w in structures]
        deadline = None if timeout is None else self.now + timeout
        new = job(
            self.ids, counts=counts, work=work, model=model, client=client, priority=line, deadline=deadline
        )  # fmt: skip
        self.ids += 1
        self.pass_deadlines()
        scheduler = self.scheduler
        full = (
            len(self.queued) + 1 > scheduler.max_queue_requests
            or sum(self.left(i)[0] for i in self.queued) + sum(counts) > scheduler.max_queue_atoms
        )
        if max(counts) > scheduler.max_atoms:
            with pytest.raises(TooLarge) as found:
                scheduler.submit(new, self.now)
            assert (found.value.max_atoms, found.value.atoms) == (scheduler.max_atoms, max(counts))
            assert counts[found.value.structure] == max(counts)
        elif sum(counts) > scheduler.max_queue_atoms:
            with pytest.raises(TooLarge) as found:
                scheduler.submit(new, self.now)
            assert (found.value.max_atoms, found.value.atoms) == (scheduler.max_queue_atoms, sum(counts))
            assert found.value.structure is None
        elif full:
            with pytest.raises(QueueFull) as refusal:
                scheduler.submit(new, self.now)
            assert refusal.value.retry_after == scheduler.retry_after()
        else:
            scheduler.submit(new, self.now)
            self.queued[new.id] = new
            self.done[new.id] = 0

    @rule(urgent=st.booleans())
    def next(self, urgent: bool) -> None:
        scheduler = self.scheduler
        self.pass_deadlines()
        interactive = scheduler.waiting("interactive").requests
        budget = {(m, p): scheduler._budget(m, p) for p in ("interactive", "bulk") for m in ("si", "gesn")}
        batch = scheduler.next_batch(self.now, urgent_only=urgent)
        if batch is None:
            assert not scheduler.waiting("interactive").requests
            assert urgent or not self.queued
            return
        assert batch.slices
        assert len({s.job for s in batch.slices}) <= len(batch.slices)
        atoms = work = structures = 0
        for id_, start, stop in batch.slices:
            each = self.queued[id_]
            assert each.model == batch.model
            assert batch.priority in {each.priority, "bulk"}
            assert start == self.done[id_] < stop <= len(each.counts)
            before = self.left(id_)
            self.done[id_] = stop
            after = self.left(id_)
            atoms, work, structures = (
                atoms + before[0] - after[0],
                work + before[1] - after[1],
                structures + stop - start,
            )
            if stop == len(each.counts):
                del self.queued[id_]
        assert (batch.atoms, batch.work, batch.structures) == (atoms, work, structures)
        over = work > budget[batch.model, batch.priority] or atoms > scheduler.batch_atoms(batch.model)
        assert batch.tiled == over == (batch.fill > 1)
        assert not batch.tiled or (batch.structures == 1 and batch.priority == "bulk")
        if urgent:
            assert batch.priority == "interactive"
        if batch.priority == "bulk" and interactive and scheduler.waiting("interactive").requests:
            assert not self.bulk_was_last
        self.bulk_was_last = batch.priority == "bulk"
        self.running.append(batch)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), seconds=st.none() | st.floats(0, 10) | st.sampled_from([math.nan, math.inf, -1.0]))
    def finish(self, data: st.DataObject, seconds: float | None) -> None:
        batch = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.scheduler.finished(batch, self.now, seconds)
        self.scheduler.finished(batch, self.now, seconds)
        assert 0 < self.scheduler.speed(batch.model) < math.inf

    @precondition(lambda self: self.running)
    @rule(memory=st.booleans())
    def fail(self, memory: bool) -> None:
        batch = self.running.pop()
        before = self.scheduler.batch_atoms(batch.model)
        self.scheduler.failed(batch)
        if memory:
            self.scheduler.ran_out(batch.model, batch.atoms, self.now)
            assert 1 <= self.scheduler.batch_atoms(batch.model) <= max(1, min(before, batch.atoms))

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id_ = data.draw(st.integers(0, self.ids - 1))
        assert self.scheduler.cancel(id_) == (id_ in self.queued)
        self.queued.pop(id_, None)

    @rule(step=st.floats(-20, 20))
    def pass_time(self, step: float) -> None:
        self.now += step

    @rule()
    def expire(self) -> None:
        self.pass_deadlines()
        found = self.scheduler.expire(self.now)
        assert len(found) == len(set(found))
        assert set(found) == set(self.told)
        self.told.clear()

    @rule(seconds=st.floats(0.001, 1), atoms=st.integers(1, 100))
    def set_bounds(self, seconds: float, atoms: int) -> None:
        self.scheduler.max_batch_seconds = seconds
        self.scheduler.max_batch_atoms = atoms

    @invariant()
    def counters(self) -> None:
        scheduler = self.scheduler
        left = [self.left(i) for i in self.queued]
        assert scheduler.waiting() == Load(len(left), sum(a for a, _ in left), sum(w for _, w in left))
        lines = [scheduler.waiting("interactive"), scheduler.waiting("bulk")]
        for name in ("requests", "atoms", "work"):
            assert sum(getattr(line, name) for line in lines) == getattr(scheduler.waiting(), name)
            assert all(getattr(line, name) >= 0 for line in lines)
        assert scheduler.jobs() == list(self.queued)
        deadlines = [j.deadline for j in self.queued.values() if j.deadline is not None]
        assert scheduler.next_deadline() == min(deadlines, default=None)
        seconds = sum(self.left(i)[1] / scheduler.speed(j.model) for i, j in self.queued.items())
        seconds += sum(b.work / scheduler.speed(b.model) for b in self.running)
        assert scheduler.retry_after() == pytest.approx(seconds)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.scheduler.waiting().requests:
            self.next(urgent=False)
        self.counters()
        assert not self.queued
        # Nothing is kept of what has gone.
        assert not self.scheduler._interactive.lanes
        assert not self.scheduler._bulk.lanes
        assert not self.scheduler._work


TestAccount = Account.TestCase
TestAccount.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- batches -------------------------------------------------------------------------------------------------------


def test_whatever_waits_goes_at_once() -> None:
    scheduler = make()
    scheduler.submit(job(7, counts=[2, 3], work=[20, 30]), 0.0)
    batch = scheduler.next_batch(0.0)
    assert batch is not None
    assert batch.slices == (Slice(7, 0, 2),)
    assert (batch.structures, batch.atoms, batch.work, batch.tiled) == (2, 5, 50, False)
    assert batch.seconds == pytest.approx(0.05)
    assert batch.fill == pytest.approx(0.5)
    assert scheduler.next_batch(0.0) is None


def test_an_empty_queue_gives_nothing() -> None:
    scheduler = make()
    assert scheduler.next_batch(0.0) is None
    assert scheduler.next_batch(0.0, urgent_only=True) is None
    assert scheduler.expire(1e9) == []
    assert scheduler.retry_after() == 0
    assert not scheduler.cancel(0)


def test_jobs_that_came_while_the_engine_was_busy_share_a_batch() -> None:
    scheduler = make()
    for i in range(10):
        scheduler.submit(job(i, client=str(i % 3), work=[10]), 0.0)
    (batch,) = drain(scheduler)
    assert sorted(s.job for s in batch.slices) == list(range(10))


@pytest.mark.parametrize(
    ("atoms", "sizes"),
    [pytest.param(1_000_000, [10, 10, 5], id="time"), pytest.param(7, [7, 7, 7, 4], id="memory")],
)
def test_a_job_is_cut_at_the_bounds(atoms: int, sizes: list[int]) -> None:
    scheduler = make(max_batch_atoms=atoms)
    scheduler.submit(job(counts=[1] * 25, work=[10] * 25), 0.0)
    batches = drain(scheduler)
    assert [b.structures for b in batches] == sizes
    assert [b.slices[0].start for b in batches] == np.cumsum([0, *sizes[:-1]]).tolist()


@pytest.mark.parametrize(
    ("counts", "work"),
    [
        pytest.param([1, 1, 1], [10, 101, 10], id="too much work"),
        pytest.param([1, 61, 1], [10, 10, 10], id="too many atoms"),
    ],
)
def test_a_structure_over_a_bound_runs_alone_and_tiled(counts: list[int], work: list[float]) -> None:
    scheduler = make(max_batch_atoms=60)
    scheduler.submit(job(counts=counts, work=work), 0.0)
    batches = drain(scheduler)
    assert [b.slices for b in batches] == [(Slice(0, 0, 1),), (Slice(0, 1, 2),), (Slice(0, 2, 3),)]
    assert [b.tiled for b in batches] == [False, True, False]


def test_a_batch_has_one_model_and_models_take_turns() -> None:
    scheduler = make()
    for i in range(3):
        for model in ("a", "b", "c"):
            scheduler.submit(job(len(scheduler.jobs()), model=model, work=[100], client=f"{i}"), 0.0)
    assert [b.model for b in drain(scheduler)] == ["a", "b", "c"] * 3


@given(st.lists(st.integers(1, 30), min_size=2, max_size=5), st.integers(0, 4))
def test_no_model_starves_under_constant_load_of_others(loads: list[int], patient: int) -> None:
    scheduler = make()
    scheduler.submit(job(0, model="patient", work=[50]), 0.0)
    ids = 1
    for turn in range(len(loads) + 1):
        for i, n in enumerate(loads):
            scheduler.submit(job(ids, model=str(i), counts=[1] * n, work=[3] * n, client=str(patient)), 0.0)
            ids += 1
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        if batch.model == "patient":
            assert turn <= len(loads)
            return
    pytest.fail("the patient model never had its turn")


# -- interactive and bulk ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", ["interactive", "bulk"])
@pytest.mark.parametrize("client", ["another", "uploader"])
def test_an_upload_delays_a_single_step_by_no_further_batch(declared: Priority, client: str) -> None:
    scheduler = make(max_queue_atoms=10**8)
    upload = job(0, counts=[64] * 100_000, work=[3] * 100_000, priority=declared, client="uploader")
    scheduler.submit(upload, 0.0)
    for _ in range(5):
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        assert batch.priority == "bulk"
    scheduler.submit(job(1, counts=[64], work=[3], client=client), 0.0)
    batch = scheduler.next_batch(0.0)
    assert batch is not None
    assert batch.slices == (Slice(1, 0, 1),)


@given(
    share=st.floats(0.05, 0.3),
    interactive=st.lists(st.integers(1, 100), min_size=1, max_size=20),
    bulk=st.lists(st.integers(1, 100), min_size=1, max_size=20),
)
@settings(max_examples=30, deadline=None)
def test_bulk_gets_its_share_while_interactive_work_never_ends(
    share: float, interactive: list[int], bulk: list[int]
) -> None:
    scheduler = make(bulk_share=share)
    time: Counter[str] = Counter()
    ids = in_a_row = 0
    for turn in range(300):
        for line, sizes in (("interactive", interactive), ("bulk", bulk)):
            while scheduler.waiting(line).work < 200:  # type: ignore[arg-type]
                scheduler.submit(job(ids, work=[sizes[ids % len(sizes)]], priority=line), 0.0)  # type: ignore[arg-type]
                ids += 1
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        time[batch.priority] += batch.work
        in_a_row = in_a_row + 1 if batch.priority == "bulk" else 0
        assert in_a_row <= 1
        # One batch is earned before it goes, and another may be on the way.
        assert time["bulk"] >= share * time.total() - 200
        assert time["bulk"] <= share * time.total() + 100, turn


@given(st.lists(st.integers(1, 99), min_size=1, max_size=30))
def test_one_small_bulk_job_is_reached_under_constant_interactive_load(sizes: list[int]) -> None:
    scheduler = make(bulk_share=0.25)
    scheduler.submit(job(0, work=[1], priority="bulk"), 0.0)
    waited = 0
    for i in range(1, 2000):
        scheduler.submit(job(i, work=[sizes[i % len(sizes)]]), 0.0)
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        if batch.priority == "bulk":
            break
        waited += batch.work
    # Three batches of interactive work earn one of bulk; the last one may overshoot.
    assert batch.priority == "bulk"
    assert waited <= 300 + 99


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_interactive_jobs_wait_for_one_bulk_batch_at_most(data: st.DataObject) -> None:
    """With two batches in the engine: those that were there, and one; two if both of them were bulk."""
    scheduler = make()
    scheduler.submit(job(0, counts=[1] * 10_000, work=[10] * 10_000, priority="bulk"), 0.0)
    engine: list[Batch] = []
    ids = 1
    for _ in range(40):
        while len(engine) < 2 and (batch := scheduler.next_batch(0.0)) is not None:
            engine.append(batch)
        if data.draw(st.booleans()):
            scheduler.submit(job(ids, work=[data.draw(st.integers(1, 100))]), 0.0)
            before = sum(b.priority == "bulk" for b in engine)
            while True:
                done = engine.pop(0)
                scheduler.finished(done, 0.0, None)
                batch = scheduler.next_batch(0.0)
                assert batch is not None
                engine.append(batch)
                if any(s.job == ids for s in batch.slices):
                    break
                before += batch.priority == "bulk"
            assert before <= 2
            ids += 1
        elif engine:
            scheduler.finished(engine.pop(0), 0.0, None)


def test_urgent_batches_are_interactive_only_and_earn_like_others() -> None:
    scheduler = make()
    scheduler.submit(job(0, counts=[5], work=[5000]), 0.0)
    scheduler.submit(job(1, counts=[5, 5], work=[60, 60], priority="bulk"), 0.0)
    large = scheduler.next_batch(0.0)
    assert large is not None
    assert large.tiled
    assert large.priority == "bulk"
    assert scheduler.next_batch(0.0, urgent_only=True) is None
    for i in range(2, 10):
        scheduler.submit(job(i, work=[100]), 0.0)
        urgent = scheduler.next_batch(0.0, urgent_only=True)
        assert urgent is not None
        assert urgent.slices == (Slice(i, 0, 1),)
    scheduler.submit(job(10, work=[100]), 0.0)
    assert [b.priority for b in drain(scheduler)] == ["bulk", "interactive", "bulk"]


def test_a_job_that_no_longer_fits_one_batch_moves_to_bulk() -> None:
    scheduler = make()
    scheduler.submit(job(0, work=[90]), 0.0)
    scheduler.submit(job(1, work=[40]), 0.0)
    assert scheduler.waiting("bulk") == Load()
    for work in (10, 50):
        scheduler.measured("si", work, 0.002 * work, "interactive")
    assert scheduler.next_batch(0.0, urgent_only=True).slices == (Slice(1, 0, 1),)  # type: ignore[union-attr]
    assert scheduler.waiting("bulk") == Load(1, 1, 90)
    assert scheduler.next_batch(0.0).tiled  # type: ignore[union-attr]


# -- clients -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=2, max_size=6), st.integers(40, 400)
)  # fmt: skip
def test_clients_get_equal_work_while_all_of_them_wait(sizes: list[list[int]], budget: int) -> None:
    """Of two clients that both have work, neither is ahead by more than one turn."""
    scheduler = make(prior_speed=10.0 * budget)
    for i, pattern in enumerate(sizes):
        work = (pattern * 200)[: 4000 // sum(pattern) + 1]
        scheduler.submit(job(i, counts=[1] * len(work), work=work, client=str(i), priority="bulk"), 0.0)
    turn = max(budget // 8, *(max(pattern) for pattern in sizes))
    got: Counter[int] = Counter()
    while len(scheduler.jobs()) == len(sizes):
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        for id_, start, stop in batch.slices:
            pattern = sizes[id_]
            got[id_] += sum(pattern[k % len(pattern)] for k in range(start, stop))
        if len(scheduler.jobs()) == len(sizes):
            each = [got[i] for i in range(len(sizes))]
            assert max(each) - min(each) <= turn


def test_many_requests_do_not_buy_more_than_few() -> None:
    scheduler = make()
    for i in range(200):
        scheduler.submit(job(i, client="many", work=[10], priority="bulk"), 0.0)
    scheduler.submit(job(200, counts=[1] * 200, work=[10] * 200, client="few", priority="bulk"), 0.0)
    got: Counter[bool] = Counter()
    for _ in range(10):
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        for each in batch.slices:
            got[each.job == 200] += each.stop - each.start
    assert got == {True: 50, False: 50}


def test_an_absent_client_saves_nothing_up() -> None:
    scheduler = make()
    scheduler.submit(job(0, counts=[1] * 1000, work=[10] * 1000, client="old", priority="bulk"), 0.0)
    for _ in range(20):
        scheduler.next_batch(0.0)
    scheduler.submit(job(1, counts=[1] * 1000, work=[10] * 1000, client="new", priority="bulk"), 0.0)
    got: Counter[int] = Counter()
    for _ in range(10):
        for each in scheduler.next_batch(0.0).slices:  # type: ignore[union-attr]
            got[each.job] += each.stop - each.start
    assert abs(got[0] - got[1]) <= 1


def test_who_comes_back_with_the_next_request_goes_on_where_he_left() -> None:
    """Closed loops of large and of small requests share the work, not the turns."""
    scheduler = make(max_batch_seconds=0.05)
    sizes = {"large": 40, "large too": 40, "small": 20, "small too": 20}
    owner: dict[int, str] = {}
    got: Counter[str] = Counter()
    ids = 0
    for _ in range(300):
        for name, size in sizes.items():
            if name not in owner.values():
                scheduler.submit(job(ids, client=name, work=[size], priority="bulk"), 0.0)
                owner[ids] = name
                ids += 1
        for id_, _, _ in scheduler.next_batch(0.0).slices:  # type: ignore[union-attr]
            name = owner.pop(id_)
            got[name] += sizes[name]
    assert max(got.values()) / min(got.values()) < 1.25


def test_a_flow_of_new_names_does_not_keep_the_old_ones_from_their_turn() -> None:
    scheduler = make()
    scheduler.submit(job(0, counts=[1] * 20, work=[50] * 20, client="old", priority="bulk"), 0.0)
    ids = 1
    batches = 0
    while 0 in scheduler.jobs():
        while scheduler.waiting().requests < 30:
            scheduler.submit(job(ids, client=f"new {ids}", work=[10], priority="bulk"), 0.0)
            ids += 1
        assert scheduler.next_batch(0.0) is not None
        batches += 1
        # An equal share among thirty of 100 a batch is one structure of 50 in fifteen batches.
        assert batches < 25 * 20


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_traces_of_clients_that_left_are_bounded(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scheduler = make()
    scheduler.submit(job(0, counts=[1] * 10_000, work=[10] * 10_000, client="steady", priority="bulk"), 0.0)
    for i in range(1, 2000):
        scheduler.submit(
            job(i, client=f"{i}", work=[float(rng.integers(1, 50))], priority="bulk", deadline=1e9), 0.0
        )  # fmt: skip
        if rng.random() < 0.5:
            scheduler.cancel(i)
        if rng.random() < 0.3:
            scheduler.next_batch(0.0)
    while len(scheduler.jobs()) > 1:
        scheduler.next_batch(0.0)
    lane = scheduler._bulk.lanes["si"]
    assert len(lane.clients) == 1
    assert len(lane._gone) <= 66
    scheduler.submit(job(10_000, deadline=5.0), 0.0)
    assert len(scheduler._deadlines) <= 70


# -- refusals ------------------------------------------------------------------------------------------------------


def test_retry_after_is_the_work_that_is_here_by_the_measured_speed() -> None:
    scheduler = make(max_queue_requests=2)
    scheduler.submit(job(0, work=[100]), 0.0)
    running = scheduler.next_batch(0.0)
    assert running is not None
    for i in (1, 2):
        scheduler.submit(job(i, work=[100]), 0.0)
    with pytest.raises(QueueFull) as refusal:
        scheduler.submit(job(3), 0.0)
    assert refusal.value.retry_after == pytest.approx(0.3)
    scheduler.finished(running, 0.0, 0.2)
    assert scheduler.retry_after() == pytest.approx(0.4)


def test_bounds_may_be_reached_but_not_passed() -> None:
    scheduler = make(max_atoms=10, max_queue_atoms=20, max_queue_requests=3)
    scheduler.submit(job(0, counts=[10, 10]), 0.0)
    with pytest.raises(QueueFull):
        scheduler.submit(job(1, counts=[1]), 0.0)
    scheduler.cancel(0)
    with pytest.raises(TooLarge):
        scheduler.submit(job(2, counts=[10, 11]), 0.0)
    with pytest.raises(TooLarge):
        scheduler.submit(job(3, counts=[10, 10, 1]), 0.0)
    for i in range(4, 7):
        scheduler.submit(job(i, counts=[1]), 0.0)
    with pytest.raises(QueueFull):
        scheduler.submit(job(7, counts=[1]), 0.0)
    assert scheduler.waiting() == Load(3, 3, 3)


def test_refusals_survive_pickling_and_say_the_numbers() -> None:
    full, large, all_of_it = QueueFull(2.5), TooLarge(1000, 2000, 4), TooLarge(1000, 2000, None)
    assert pickle.loads(pickle.dumps(full)).retry_after == 2.5
    assert pickle.loads(pickle.dumps(large)).structure == 4
    assert str(large) == "structure 5 has 2,000 atoms; at most 1,000 can be taken"
    assert str(all_of_it) == "the request has 2,000 atoms; at most 1,000 can be taken"
    assert all(isinstance(each, Refused) for each in (full, large, all_of_it))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        pytest.param(job(counts=[]), "needs structures", id="no structure"),
        pytest.param(job(counts=[1, 2], work=[1]), "work of each", id="work missing"),
        pytest.param(job(work=[math.nan]), "finite", id="NaN"),
        pytest.param(job(counts=[1, 1], work=[math.nan, 1]), "finite", id="NaN among others"),
        pytest.param(job(work=[math.inf]), "finite", id="infinity"),
        pytest.param(job(work=[1e300]), "finite", id="too much to count"),
        pytest.param(job(counts=[1, 1], work=[-1, 1]), "negative", id="negative work"),
        pytest.param(job(counts=[-1], work=[1]), "negative", id="negative count"),
        pytest.param(job(priority="soon"), "priority", id="priority"),  # type: ignore[arg-type]
        pytest.param(job(deadline=math.nan), "deadline", id="deadline"),
        pytest.param(job(7), "queued already", id="id twice"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_and_leaves_nothing_behind(bad: Job, message: str) -> None:
    scheduler = make()
    scheduler.submit(job(7), 0.0)
    with pytest.raises(ValueError, match=message):
        scheduler.submit(bad, 0.0)
    assert scheduler.waiting() == Load(1, 1, 1)
    assert [b.slices for b in drain(scheduler)] == [(Slice(7, 0, 1),)]


@pytest.mark.parametrize(
    "bad",
    [{"max_atoms": 0}, {"max_batch_seconds": 0.0}, {"prior_speed": math.nan}, {"bulk_share": 0.0}, {"bulk_share": 0.6}],
    ids=lambda bad: next(iter(bad)),
)
def test_bounds_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        make(**bad)


# -- deadlines -----------------------------------------------------------------------------------------------------


def test_what_has_expired_is_not_packed_and_told_once() -> None:
    scheduler = make()
    scheduler.submit(job(0, deadline=5.0), 0.0)
    scheduler.submit(job(1), 0.0)
    scheduler.submit(job(2, counts=[1] * 30, work=[10] * 30, deadline=6.0), 0.0)
    scheduler.submit(job(3, deadline=math.inf), 0.0)
    assert scheduler.next_deadline() == 5.0
    batch = scheduler.next_batch(5.0)
    assert batch is not None
    assert sorted(s.job for s in batch.slices) == [1, 3]
    assert scheduler.next_batch(5.5).slices == (Slice(2, 0, 10),)  # type: ignore[union-attr]
    # Partly handed out, it is of no use without the rest.
    assert scheduler.expire(6.0) == [0, 2]
    assert scheduler.expire(6.0) == []
    assert scheduler.next_batch(6.0) is None
    assert scheduler.waiting() == Load()


def test_a_clock_that_goes_back_harms_nothing() -> None:
    scheduler = make(max_batch_atoms=100)
    scheduler.submit(job(0, deadline=1000.0), 990.0)
    scheduler.ran_out("si", 100, 990.0)
    assert scheduler.expire(-1e9) == []
    scheduler.submit(job(1, counts=[70], work=[1.0], deadline=-1e9 + 5), -1e9)
    assert scheduler.next_deadline() == -1e9 + 5
    batch = scheduler.next_batch(-1e9)
    assert batch is not None
    scheduler.finished(batch, -1e9, 0.01)
    scheduler.submit(job(2, counts=[75], work=[1.0]), -1e9)
    scheduler.finished(scheduler.next_batch(-1e9), -1e9 + 10, 0.01)  # type: ignore[arg-type]
    # The limit is raised ten seconds after the jump, not when the old time comes again.
    assert scheduler.batch_atoms("si") == 83


# -- what is learned -----------------------------------------------------------------------------------------------


def test_a_memory_limit_of_an_earlier_start_is_where_it_begins() -> None:
    scheduler = make(max_batch_atoms=1000)
    scheduler.recall("si", 400, 0.0)
    scheduler.recall("gesn", 5000, 0.0)
    assert (scheduler.batch_atoms("si"), scheduler.batch_atoms("gesn")) == (400, 1000)
    scheduler.submit(job(0, counts=[100] * 8, work=[0.1] * 8), 0.0)
    assert scheduler.next_batch(0.0).atoms == 400  # type: ignore[union-attr]


def test_the_memory_limit_falls_at_once_and_is_raised_slowly() -> None:
    scheduler = make(max_batch_atoms=1000)
    scheduler.ran_out("si", 800, 0.0)
    assert scheduler.batch_atoms("si") == 600
    assert scheduler.batch_atoms("gesn") == 1000
    seen = []
    for now in range(100):
        scheduler.submit(job(now, counts=[10] * 200, work=[0.1] * 200), float(now))
        while (batch := scheduler.next_batch(float(now))) is not None:
            assert batch.atoms <= scheduler.batch_atoms("si")
            scheduler.finished(batch, float(now), 0.01)
        seen.append(scheduler.batch_atoms("si"))
    assert seen[9] == 600
    assert seen[10] == 661
    assert sorted(seen) == seen
    assert seen[-1] == 1000
    scheduler.ran_out("si", 1, 0.0)
    assert scheduler.batch_atoms("si") == 1
    scheduler.forget("si")
    assert scheduler.batch_atoms("si") == 1000


@pytest.mark.parametrize("prior", [1e2, 1e4, 1e6, 1e8])
def test_batches_settle_at_the_time_they_may_take(prior: float) -> None:
    """An engine with a fixed cost a batch: 2 ms + 1 µs a unit; after a few batches they take about 100 ms."""
    scheduler = Scheduler(prior_speed=prior, max_queue_atoms=10**9)
    scheduler.submit(job(counts=[1] * 1_000_000, work=[50] * 1_000_000, priority="bulk"), 0.0)
    seconds = []
    for _ in range(20):
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        seconds.append(0.002 + 1e-6 * batch.work)
        scheduler.finished(batch, 0.0, seconds[-1])
    assert all(0.05 < s < 0.15 for s in seconds[10:])


def test_small_steps_do_not_spoil_the_estimate_for_large_batches() -> None:
    scheduler = Scheduler(max_queue_atoms=10**9)
    for _ in range(10):
        scheduler.measured("si", 90_000, 0.1)
    for _ in range(10_000):
        scheduler.measured("si", 100, 0.002)
    assert scheduler.speed("si") == pytest.approx(900_000)
    assert scheduler.seconds("si", 100) == pytest.approx(0.002)


def test_one_slow_batch_changes_nothing() -> None:
    speed = Speed(1.0)
    for seconds in (0.1, 0.1, 30.0, 0.1):
        speed.note(100, seconds)
    assert speed.time(100) == pytest.approx(0.1)
    compiled = Speed(1e6)
    compiled.note(100, 30.0)
    compiled.note(100, 0.1)
    assert compiled.time(100) == pytest.approx(0.1)


def settled_sizes(overhead: float, each: float, limit: float, noise: float = 0.0, work: float = 3600.0) -> list[int]:
    """Structures of one batch after the other, of an engine with an overhead and a time for each structure."""
    scheduler = Scheduler(max_batch_seconds=limit, max_queue_atoms=10**9)
    chance = random.Random(0)
    scheduler.submit(job(counts=[120] * 100_000, work=[work] * 100_000, priority="bulk"), 0.0)
    sizes = []
    for _ in range(60):
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        sizes.append(batch.structures)
        seconds = (overhead + each * batch.structures) * (1.0 + noise * chance.random())
        scheduler.finished(batch, 0.0, seconds)
    return sizes


@pytest.mark.parametrize("noise", [0.0, 0.3, 0.6])
def test_a_large_overhead_does_not_keep_batches_small(noise: float) -> None:
    """12.5 ms a batch and 0.1 ms a structure, as of a GPU without graphs: 75 structures take 20 ms."""
    sizes = settled_sizes(0.0125, 0.0001, 0.02, noise)
    assert all(30 <= size <= 400 for size in sizes[10:])


@pytest.mark.parametrize("overhead", [0.02, 0.03, 0.035])
def test_an_overhead_above_the_bound_is_shared_by_many(overhead: float) -> None:
    """What no bound can make shorter is at least not paid by each structure alone."""
    sizes = settled_sizes(overhead, 0.0001, 0.02)
    for size in sizes[12:]:
        assert 0.2 * overhead < 0.0001 * size
        assert overhead + 0.0001 * size < 4 * 0.02


@pytest.mark.parametrize("each", [5.0, 0.03])
def test_structures_that_are_large_are_not_packed_for_that(each: float) -> None:
    """What takes its time for its work runs one by one, also after the first has been measured."""
    assert set(settled_sizes(0.001, each, 0.02, work=5e7)[4:]) == {1}


def test_one_accident_of_a_size_is_forgotten() -> None:
    speed = Speed(1e6)
    for _ in range(5):
        speed.note(10_000, 0.014)
    speed.note(40_000, 0.3)
    for _ in range(100):
        speed.note(10_000, 0.014)
    assert speed.most(0.02) > 14_000


def test_what_was_slow_long_ago_is_forgotten() -> None:
    """A machine that others used for a minute does not keep batches small for ever."""
    speed = Speed(1e6)
    for work in (1_000, 10_000, 100_000):
        for _ in range(5):
            speed.note(work, 1e-3 * work)
    assert speed.most(0.1) < 200
    for _ in range(2000):
        most = speed.most(0.1)
        speed.note(most, 1e-6 * most)
    assert speed.most(0.1) == pytest.approx(100_000, rel=0.3)


@given(
    notes=st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-5, 1e3)), min_size=1, max_size=30),
    seconds=st.floats(1e-3, 10),
)
def test_estimates_make_sense_whatever_was_measured(notes: list[tuple[float, float]], seconds: float) -> None:
    speed = Speed(1e6)
    for work, took in notes:
        speed.note(work, took)
    most = speed.most(seconds)
    assert 0 < most < math.inf
    assert 0 < speed.within(seconds) < math.inf
    times = [speed.time(work) for work in np.geomspace(1, 1e10, 50)]
    assert all(0 < time < math.inf for time in times)
    assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(times))
    # Never much beyond the bound, but for what a single structure takes.
    assert most <= max(speed._points[0].work, 1.0) or speed.time(most) <= 4.0 * seconds * (1 + 1e-9)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_times_that_are_none_teach_nothing(seconds: float) -> None:
    speed = Speed(123.0)
    speed.note(100, seconds)
    speed.note(0, 1.0)
    assert speed.time(100) == pytest.approx(100 / 123.0)
    assert speed.within(1.0) == pytest.approx(123.0)


def test_a_large_job_costs_no_step_for_each_structure() -> None:
    """Python calls, not seconds, are counted: 20,000 structures in one batch cost no more than 20."""

    def calls(structures: int) -> int:
        scheduler = make(prior_speed=1e9, max_queue_atoms=10**9)
        seen = 0

        def profile(frame: object, event: str, arg: object) -> None:
            nonlocal seen
            seen += event in {"call", "c_call"}

        new = job(counts=[1] * structures, work=[1] * structures)
        sys.setprofile(profile)
        try:
            scheduler.submit(new, 0.0)
            scheduler.next_batch(0.0)
        finally:
            sys.setprofile(None)
        return seen

    assert calls(20_000) <= calls(20) + 5


def test_the_scheduler_pulls_in_neither_torch_nor_asyncio() -> None:
    code = "import sys, nepserve.scheduler; print(sorted({'torch', 'asyncio', 'fastapi', 'ase'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
