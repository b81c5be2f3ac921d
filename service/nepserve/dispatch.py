"""From requests to batches to answers: the asyncio side of :mod:`nepserve.scheduler`, with one engine behind it.

A batch is formed when the engine has a place for it, out of all that has come by then. The engine has two places: for
the batch that runs, and for the next one. The second is taken shortly before the first batch is expected to end: late
enough for company, early enough that the device does not wait. While a bulk batch runs, interactive work takes the
second place at any time, and the engine lets it pass between two tiles. While nothing runs, nothing waits.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from math import inf
from typing import TYPE_CHECKING, Protocol

import numpy as np

from nepcore.admission import ALONE
from nepcore.errors import ModelError, NepError
from nepcore.structures import PROPERTIES

from .answer import Answer, Request, nothing
from .engine.errors import EngineDown, EngineError
from .refusals import DeadlinePassed, Draining, QueueFull, Refused
from .scheduler import Batch, Job, Load, Priority, Scheduler
from .totals import Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from nepcore.structures import Structures

    from .engine import Evaluated

log = logging.getLogger("nepserve")

_PROPERTIES = frozenset(PROPERTIES)

GUESSED_NEIGHBORS = 64
"""Neighbours of an atom where nobody says what the work of a structure is."""


class Engine(Protocol):
    """What does the work; :class:`nepserve.engine.EngineLink` is one."""

    async def evaluate(
        self, model: str, blocks: Sequence[Structures], properties: frozenset[str], *, urgent: bool = False
    ) -> Evaluated:
        """Evaluate blocks as one batch, batches in the order of the calls; ``urgent`` ones between tiles of others.

        A cancelled call takes its batch back.

        Raises:
            EngineDown: The engine is gone.
        """
        ...


class Dispatcher:
    """Takes requests, keeps the engine busy, and gives each request its one answer. For one event loop.

    Args:
        scheduler: The queue, not shared with anybody else.
        engine: Who evaluates; may be attached later, and another one may be attached in its place.
        lead: Seconds before the expected end of a batch at which the next is sent, beside the time that packing takes.
        clock: Seconds, monotonic.

    Attributes:
        scheduler: Whose bounds may be set at any time.
        totals: What was done so far.
        on_batch: Called with each batch that was evaluated, for metrics.
        draining: Whether no more work is taken.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine | None = None,
        *,
        lead: float = 0.002,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.totals = Totals()
        self.on_batch: Callable[[Batch, Evaluated], None] | None = None
        self.draining = False
        self._engine = engine
        self._down = "the engine is starting"
        self._lead = lead
        self._clock = clock
        self._pack_seconds = 0.0
        self._requests: dict[int, Request] = {}
        self._last_id = 0
        self._flights: list[_Flight] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._forming = False  # a task is about to form a batch out of what has come by then
        self._urgent_from = -inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._idle: list[asyncio.Future[None]] = []
        self._broken: Exception | None = None

    async def evaluate(
        self,
        model: str,
        structures: Structures,
        properties: Collection[str],
        *,
        client: str = "",
        priority: Priority = "interactive",
        timeout: float | None = None,
        work: NDArray[np.float64] | None = None,
    ) -> Answer:
        """Evaluate a block of structures, in company or in pieces, with the bits of a call of its own.

        Structures that fail are entries of ``predictions.errors``. A cancelled call takes its work back.

        Args:
            model: The engine's name for the model.
            structures: Found fit for the model (:meth:`nepcore.admission.Admission.problems`).
            properties: Names of properties.
            client: Whose it is; clients share the engine by work.
            priority: ``interactive`` goes before ``bulk``.
            timeout: Seconds after which it is answered with :class:`DeadlinePassed`, be it waiting or in the engine.
            work: Of each structure, (B,), :meth:`nepcore.admission.Admission.work`; left out, a guess by atoms, which
                is good as long as all structures are about equally dense.

        Raises:
            QueueFull, TooLarge, DeadlinePassed, Draining: It was not taken, or not done in time.
            EngineDown: The engine is not there, or ended; ask again.
            ModelError: No such model or property.
            EngineError: A batch failed in a way that nobody foresaw.
            ValueError: ``work``, ``priority`` or ``timeout`` make no sense.
        """
        job_id, answer = self.submit(
            model, structures, properties, client=client, priority=priority, timeout=timeout, work=work
        )
        try:
            return await answer
        except asyncio.CancelledError:
            self.withdraw(job_id)
            raise

    def submit(
        self,
        model: str,
        structures: Structures,
        properties: Collection[str],
        *,
        client: str = "",
        priority: Priority = "interactive",
        timeout: float | None = None,
        work: NDArray[np.float64] | None = None,
    ) -> tuple[int, asyncio.Future[Answer]]:
        """:meth:`evaluate` without a task that waits: an id for :meth:`withdraw`, and where the answer comes.

        What :meth:`evaluate` raises at once is raised; the rest is the future's exception.
        """
        now = self._clock()
        try:
            if self.draining:
                raise Draining("the server is about to stop")
            if self._engine is None:
                raise EngineDown(self._down)
            if not len(structures):
                empty = asyncio.get_running_loop().create_future()
                empty.set_result(nothing(properties))
                return 0, empty
            request = self._accept(model, structures, properties, client, priority, timeout, work, now)
        except (Refused, EngineDown) as refusal:
            self.totals.count_error(refusal)
            raise
        self._wake(now)
        return request.id, request.answer

    def withdraw(self, job_id: int) -> None:
        """Take back a request that nobody waits for; nothing if it was answered."""
        if self._requests.pop(job_id, None) is not None:
            self.totals.shed["cancelled"] += 1
            self._let_go(job_id)

    def refuse_if_full(self, atoms: float) -> None:
        """Refuse a request of about so many atoms before it is read, which costs more than to refuse it.

        Raises:
            QueueFull: No room at present.
        """
        now = self._clock()
        if self.scheduler.full(atoms):
            self._expire(now)
            if self.scheduler.full(atoms):
                refusal = QueueFull(self.scheduler.retry_after())
                self.totals.count_error(refusal)
                raise refusal

    def _accept(
        self,
        model: str,
        structures: Structures,
        properties: Collection[str],
        client: str,
        priority: Priority,
        timeout: float | None,
        work: NDArray[np.float64] | None,
        now: float,
    ) -> Request:
        """Queue a request."""
        if self._broken is not None:
            raise RuntimeError("the queue is broken; the log says how") from self._broken
        if timeout is not None and timeout <= 0:
            raise DeadlinePassed(timeout)
        wanted = frozenset(properties)
        if not wanted <= _PROPERTIES:
            # In the engine it would fail those who share the batch, too.
            raise ModelError(f"unknown properties: {', '.join(sorted(wanted - _PROPERTIES))}")
        if work is None:
            work = structures.counts.astype(np.float64) * (GUESSED_NEIGHBORS + ALONE)
        self._last_id += 1
        request = Request(self._last_id, structures, wanted, now, timeout)
        deadline = None if timeout is None else now + timeout
        self.scheduler.submit(Job(request.id, model, client, priority, structures.counts, work, deadline), now)
        self._requests[request.id] = request
        return request

    # -- when, and what ------------------------------------------------------------------------------------------

    def _wake(self, now: float) -> None:
        """See that what waits is begun when it may be, and that deadlines are kept."""
        try:
            self._expire(now)
            if self.scheduler.queued and not self._forming:
                begin, _ = self._place(now)
                if begin > now:
                    self._look_at(begin, now)
                else:
                    self._forming = True
                    task = asyncio.get_running_loop().create_task(self._work())
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            deadline = self.scheduler.next_deadline()
            if deadline is not None:
                self._look_at(deadline, now)
            for flight in self._flights:
                if flight.deadline < self._timer_at:
                    self._look_at(flight.deadline, now)
        except Exception as error:
            self._give_up(error)

    def _place(self, now: float) -> tuple[float, bool]:
        """From when on the engine takes what comes next, and whether that has to be urgent work."""
        if self._engine is None or len(self._flights) > 1:
            return inf, False
        if not self._flights:
            return now, False
        ahead = self._flights[0]
        # Nobody knows when a tiled batch ends, and what stands behind it keeps urgent work out.
        due = inf if ahead.batch.tiled else ahead.ends - self._lead - self._pack_seconds
        interactive = ahead.batch.priority == "bulk" and self.scheduler.waiting("interactive").requests > 0
        if interactive and self._urgent_from <= max(now, due):
            return self._urgent_from, True
        return due, False

    def _look_at(self, when: float, now: float) -> None:
        """Wake at a time, or earlier."""
        if when >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = asyncio.get_running_loop().call_later(max(0.0, when - now), self._look)

    def _look(self) -> None:
        self._timer, self._timer_at = None, inf
        self._wake(self._clock())

    def expire(self) -> None:
        """Refuse what waited for too long, now."""
        self._expire(self._clock())

    def _expire(self, now: float) -> None:
        for job_id in self.scheduler.expire(now):
            request = self._requests.get(job_id)
            if request is not None:
                self._settle(job_id, DeadlinePassed(request.timeout or 0.0))
        for flight in list(self._flights):
            if flight.deadline > now:
                continue
            for job_id in sorted(flight.jobs):
                request = self._requests.get(job_id)
                if request is not None and request.deadline <= now:
                    self._settle(job_id, DeadlinePassed(request.timeout or 0.0))
            flight.deadline = self._earliest(flight)

    def _earliest(self, flight: _Flight) -> float:
        """When the first of those who wait for a batch waits no longer: one look a batch, no timer a request."""
        return min((self._requests[id_].deadline for id_ in flight.jobs if id_ in self._requests), default=inf)

    def _next(self, task: asyncio.Task[None]) -> _Flight | None:
        """Form the batch that may be sent now, if there is one."""
        try:
            now = self._clock()
            begin, urgent = self._place(now)
            batch = self.scheduler.next_batch(now, urgent_only=urgent) if begin <= now else None
            if batch is not None:
                flight = _Flight(batch, task, urgent=urgent, ends=now + batch.seconds)
                flight.deadline = self._earliest(flight)
                self._flights.append(flight)
        except Exception as error:
            self._give_up(error)
            return None
        self._wake(now)
        return None if batch is None else flight

    # -- one batch -----------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Fill one place of the engine as long as there is work for it."""
        task = asyncio.current_task()
        assert task is not None
        while True:
            self._forming = False
            # Nothing is awaited between this and the call of the engine: what was formed is sent.
            flight = self._next(task)
            if flight is None:
                return
            try:
                await self._fly(flight)
            except asyncio.CancelledError:
                # Nobody waits for this batch, or the loop ends. Others go on in a task that is not cancelled.
                self._fail(flight, EngineDown("the batch was taken back"))
                asyncio.get_running_loop().call_soon(lambda: self._wake(self._clock()))
                raise
            finally:
                self._land(flight)

    async def _fly(self, flight: _Flight) -> None:
        """One batch from blocks to answers; whatever goes wrong is the answer to its requests, and to no others."""
        batch = flight.batch
        try:
            if self._engine is None:
                raise EngineDown(self._down)
            properties = frozenset[str]().union(*(self._requests[id_].properties for id_ in flight.jobs))
            blocks = [self._requests[id_].block(start, stop) for id_, start, stop in batch.slices]
            evaluated = await self._engine.evaluate(batch.model, blocks, properties, urgent=flight.urgent)
            if len(evaluated.predictions) != batch.structures:
                raise RuntimeError(f"{len(evaluated.predictions)} results came for {batch.structures} structures")
            self._deliver(flight, evaluated)
        except (EngineDown, EngineError, NepError) as error:
            self._fail(flight, error)
        except Exception as error:
            log.exception("a batch of %d structures failed", batch.structures)
            self._fail(flight, error)
        else:
            if not self.scheduler.queued and not flight.urgent:
                # Nobody waits for the engine: the answers go out before the books are kept.
                await asyncio.sleep(0)
            self._learn(flight, evaluated)

    def _deliver(self, flight: _Flight, evaluated: Evaluated) -> None:
        now = self._clock()
        whole = evaluated.predictions
        row = 0
        for job_id, start, stop in flight.batch.slices:
            first, row = row, row + stop - start
            request = self._requests.get(job_id)
            if request is None:
                continue
            try:
                part = whole if stop - start == len(whole) else whole.slice(first, row)
                answer = request.take(start, part, evaluated, now)
            except Exception as error:
                log.exception("the results of a request could not be put together")
                self._settle(job_id, error)
                continue
            if answer is not None:
                self.totals.count_answer(request, answer)
                self._settle(job_id, answer)

    def _learn(self, flight: _Flight, evaluated: Evaluated) -> None:
        """Let the scheduler know how it went, and count it."""
        batch, now = flight.batch, self._clock()
        try:
            seconds = evaluated.pack_seconds + evaluated.device_seconds + evaluated.unpack_seconds
            self.scheduler.finished(batch, now, seconds - flight.gave_way)
            failures = evaluated.predictions.errors.values()
            # What does not fit when alone says nothing about how much fits together.
            if evaluated.splits and not any(failure.code == "out_of_memory" for failure in failures):
                self.scheduler.ran_out(batch.model, batch.atoms, now)
            self._pack_seconds += 0.2 * (evaluated.pack_seconds - self._pack_seconds)
            if flight.urgent:
                ahead = self._flights[0]
                ahead.gave_way += evaluated.device_seconds
                ahead.ends += evaluated.device_seconds
                # Between urgent batches, too, bulk has its share of the time.
                share = self.scheduler.bulk_share
                self._urgent_from = now + evaluated.device_seconds * share / (1.0 - share)
            self.totals.count_batch(batch, evaluated)
            if self.on_batch is not None:
                self.on_batch(batch, evaluated)
        except Exception:
            # The answers are out already; the next batch must go on its way all the same.
            log.exception("a batch could not be counted")

    def _fail(self, flight: _Flight, error: Exception) -> None:
        """Fail the requests that have a part in a batch."""
        self.totals.failed += bool(flight.jobs)
        for job_id in sorted(flight.jobs):
            self._settle(job_id, _own(error))

    def _land(self, flight: _Flight) -> None:
        """Give its place free."""
        self.scheduler.failed(flight.batch)  # it is of no effect after finished()
        begun = flight is self._flights[0]
        self._flights.remove(flight)
        if begun and self._flights:
            ahead = self._flights[0]
            ahead.ends = self._clock() + ahead.batch.seconds

    # -- the end of a request ------------------------------------------------------------------------------------

    def _settle(self, job_id: int, outcome: Answer | Exception) -> None:
        """Give a request its one answer, and forget about it."""
        request = self._requests.pop(job_id, None)
        if request is not None and not request.answer.done():
            if isinstance(outcome, Answer):
                request.answer.set_result(outcome)
            else:
                self.totals.count_error(outcome)
                request.answer.set_exception(outcome)
        self._let_go(job_id)

    def _let_go(self, job_id: int) -> None:
        """Drop what a request that has gone has in the queue, and batches that nobody else waits for."""
        self.scheduler.cancel(job_id)
        for flight in self._flights:
            if job_id in flight.jobs:
                flight.jobs.remove(job_id)
                if not flight.jobs and flight.task is not asyncio.current_task():
                    flight.task.cancel()
        if not self._requests:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle.clear()

    def _give_up(self, error: Exception) -> None:
        """No batch can be formed: fail all that waits, so that what comes later has a queue without the cause."""
        log.critical("no batch can be formed; all that waits fails", exc_info=error)
        try:
            self._fail_waiting(error)
        except Exception as worse:
            log.critical("the queue is broken", exc_info=worse)
            self._broken = worse
            for request in self._requests.values():
                if not request.answer.done():
                    self.totals.count_error(error)
                    request.answer.set_exception(_own(error))
            self._requests.clear()

    def _fail_waiting(self, error: Exception) -> None:
        for job_id in self.scheduler.jobs():
            self._settle(job_id, _own(error))

    # -- life ----------------------------------------------------------------------------------------------------

    def attach(self, engine: Engine) -> None:
        """Send work to this engine from now on."""
        self._engine = engine
        self._wake(self._clock())

    def detach(self, reason: str = "the engine is being started again") -> None:
        """Send no more work. What waits fails with :class:`EngineDown`, as what is in the engine does by itself."""
        self._engine = None
        self._down = reason
        self._fail_waiting(EngineDown(reason))

    def forget(self, model: str) -> None:
        """Drop what was learned about a model that is no longer served."""
        self.scheduler.forget(model)

    async def drain(self, timeout: float) -> int:
        """Take no more work and wait until all is answered, at most ``timeout`` seconds; how many requests are left."""
        self.draining = True
        if self._requests:
            idle = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await asyncio.wait([idle], timeout=timeout)
        return len(self._requests)

    async def close(self) -> None:
        """Take no more work, and fail what there is; the engine is left alone."""
        self.draining = True
        for job_id in list(self._requests):
            self._settle(job_id, Draining("the server is stopping"))
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- sight ---------------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """Whether requests have their turn: false once the queue is broken, or waits for an engine that is idle."""
        idle = self._engine is not None and not self._flights and not self._forming
        return self._broken is None and not (idle and self.scheduler.queued)

    @property
    def attached(self) -> bool:
        """Whether there is an engine."""
        return self._engine is not None

    @property
    def waiting(self) -> Load:
        """Requests with structures that are not in the engine yet, and atoms and work of these structures."""
        return self.scheduler.waiting()

    @property
    def device_seconds(self) -> float:
        """Time that batches took on the device so far."""
        return self.totals.device_seconds

    @property
    def running(self) -> int:
        """Requests of which all is in the engine."""
        return max(0, len(self._requests) - self.scheduler.queued)

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        """The batches that are in the engine."""
        return tuple(flight.batch for flight in self._flights)

    @property
    def retry_after(self) -> float:
        """Seconds until what is queued and running now will be done."""
        return self.scheduler.retry_after()

    @property
    def max_atoms(self) -> int:
        """Atoms of the largest structure that is taken."""
        return self.scheduler.max_atoms

    @property
    def speeds(self) -> dict[str, float]:
        """Measured work per second, by model."""
        return {model: self.scheduler.speed(model) for model in self.scheduler.measured_models}


class _Flight:
    """A batch in the engine."""

    __slots__ = ("batch", "deadline", "ends", "gave_way", "jobs", "task", "urgent")

    def __init__(self, batch: Batch, task: asyncio.Task[None], *, urgent: bool, ends: float) -> None:
        self.batch = batch
        self.task = task
        self.urgent = urgent
        self.ends = ends  # expected
        self.deadline = inf  # the earliest of its jobs, or a little before that
        self.gave_way = 0.0  # seconds for urgent work
        self.jobs = {each.job for each in batch.slices}  # those that somebody waits for


def _own(error: Exception) -> Exception:
    """A copy for each request: an exception collects the traceback of everybody who raises it."""
    try:
        return copy.copy(error).with_traceback(error.__traceback__)
    except Exception:
        return error


__all__ = ["Answer", "DeadlinePassed", "Dispatcher", "Draining", "Engine", "EngineDown", "Refused", "Totals"]
