"""What runs next, and what is refused: a pure data structure over the headers of requests.

It holds no positions and no clock (the time is passed in, in seconds of any clock), and it never waits: while work
is queued, :meth:`Scheduler.next_batch` gives some of it.

* A batch takes structures of one model up to a bound in atoms (memory) and one in time (as measured on others), and
  at least one structure. Work is atoms × (neighbours + 16). A structure over a bound runs alone, marked ``tiled``: it
  takes the engine as long as it takes, and interactive batches (``urgent_only``) run between its tiles.
* ``interactive`` goes before ``bulk``. A job that needs more than one batch is bulk whatever it says of itself, so
  nobody's upload stands before somebody's single step. While both wait, each interactive batch earns bulk its share
  of the time; once a whole batch is earned, one bulk batch goes first, never two in a row. So bulk does not starve, and
  an interactive job whose turn it is waits for one bulk batch at most, for none if the last to go was one.
* Within a priority models take turns, batch by batch; within a model the client that got least work goes first;
  within a client jobs run in their order (:mod:`nepserve.lanes`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf, isnan
from typing import NamedTuple

from .lanes import MOST_WORK, Job, Line, Load, Priority, Waiting
from .refusals import QueueFull, Refused, TooLarge
from .speed import Speed

_QUANTA = 8
"""A client among others gets an eighth of a batch before the next one's turn."""

_RAISE_AFTER = 10.0
"""Seconds after running out of memory, or after the last raise, until a learned limit is raised by a tenth."""


class Slice(NamedTuple):
    """Structures ``start`` to ``stop`` − 1 of the job whose id is ``job``."""

    job: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Batch:
    """What the engine gets at once.

    Attributes:
        model: Common to all its structures.
        priority: Whose turn it was; ``bulk`` for everything that needs more than one batch.
        slices: In the order in which they are packed; one job's in the order of its structures.
        structures, atoms, work: Sums over the slices.
        seconds: Expected duration, s.
        fill: The larger of atoms and work in parts of its bound; above 1 only if ``tiled``.
        tiled: One structure, alone because it is over a bound.
    """

    model: str
    priority: Priority
    slices: tuple[Slice, ...]
    structures: int
    atoms: int
    work: int
    seconds: float
    fill: float
    tiled: bool


class Scheduler:
    """The queue; see the module's text for its rules.

    Attributes:
        max_atoms: Largest structure that is taken at all.
        max_batch_atoms: Atoms of a batch that fit the memory; for a model a smaller limit may have been learned.
        max_batch_seconds: Duration of a batch, s; up to four times that where its time hardly depends on its size.
        max_queue_atoms, max_queue_requests: What may wait.
        bulk_share: Share of the time, above 0 and up to a half, that bulk gets while interactive work never ends.
        prior_speed: Work per second taken for a model that was never measured: rather too small, since the first
            batch corrects it, and a first batch that is too large keeps everybody waiting.

    All of them may be set at any time; ``prior_speed`` counts for models that were not seen before.
    """

    def __init__(
        self,
        *,
        max_atoms: int = 10_000_000,
        max_batch_atoms: int = 1_000_000,
        max_batch_seconds: float = 0.1,
        max_queue_atoms: int = 8_000_000,
        max_queue_requests: int = 10_000,
        bulk_share: float = 0.25,
        prior_speed: float = 1e6,
    ) -> None:
        bounds = (max_atoms, max_batch_atoms, max_batch_seconds, max_queue_atoms, max_queue_requests, prior_speed)
        if not all(bound > 0 for bound in bounds) or not 0 < bulk_share <= 0.5:
            raise ValueError("bounds and speed must be positive, and bulk_share above 0 and up to a half")
        self.max_atoms = max_atoms
        self.max_batch_atoms = max_batch_atoms
        self.max_batch_seconds = max_batch_seconds
        self.max_queue_atoms = max_queue_atoms
        self.max_queue_requests = max_queue_requests
        self.bulk_share = bulk_share
        self.prior_speed = prior_speed
        self._interactive = Line("interactive")
        self._bulk = Line("bulk")
        self._total = Load()
        self._work: Counter[str] = Counter()  # queued, by model
        self._jobs: dict[int, Waiting] = {}
        self._deadlines: list[tuple[float, int, Waiting]] = []
        self._turns = count()
        self._expired: list[int] = []
        self._running: set[Batch] = set()
        self._speeds: dict[str, dict[Priority, Speed]] = {}
        self._limits: dict[str, tuple[int, float]] = {}  # learned atoms of a batch, and when they changed
        self._earned = 0.0  # seconds that bulk has earned by letting interactive batches pass
        self._bulk_was_last = False

    def submit(self, job: Job, now: float) -> None:
        """Queue a job.

        Raises:
            QueueFull: No room at present.
            TooLarge: No room ever.
            ValueError: A header that makes no sense.
        """
        self._sweep(now)
        if job.id in self._jobs:
            raise ValueError(f"job {job.id} is queued already")
        if job.priority not in {"interactive", "bulk"}:
            raise ValueError(f"priority must be interactive or bulk, not {job.priority!r}")
        if job.deadline is not None and isnan(job.deadline):
            raise ValueError("the deadline is not a number")
        waiting = Waiting(job)
        if waiting.largest > self.max_atoms:
            raise TooLarge(self.max_atoms, waiting.largest, int(job.counts.argmax()))
        if waiting.atoms > self.max_queue_atoms:
            raise TooLarge(self.max_queue_atoms, waiting.atoms, None)
        if self.full(waiting.atoms):
            raise QueueFull(self.retry_after())
        alone = waiting.work <= self._budget(job.model, job.priority) and waiting.atoms <= self.batch_atoms(job.model)
        (self._interactive if job.priority == "interactive" and alone else self._bulk).add(waiting)
        self._count(job.model, 1, waiting.atoms, waiting.work)
        self._jobs[job.id] = waiting
        if job.deadline is not None and job.deadline < inf:
            if len(self._deadlines) > 2 * len(self._jobs) + 64:
                self._deadlines = [entry for entry in self._deadlines if entry[2].line is not None]
                heapify(self._deadlines)
            heappush(self._deadlines, (job.deadline, next(self._turns), waiting))

    def full(self, atoms: float) -> bool:
        """Whether there is no room for a job of ``atoms`` at present."""
        queued = self._total
        return queued.requests >= self.max_queue_requests or queued.atoms + atoms > self.max_queue_atoms

    def cancel(self, job_id: int) -> bool:
        """Drop what was not handed out of a job; whether there was anything."""
        waiting = self._jobs.get(job_id)
        if waiting is None:
            return False
        self._drop(waiting)
        return True

    def expire(self, now: float) -> list[int]:
        """Ids of the jobs whose deadline passed while structures of theirs were queued, each once; they are dropped."""
        self._sweep(now)
        expired, self._expired = self._expired, []
        return expired

    def next_batch(self, now: float, *, urgent_only: bool = False) -> Batch | None:
        """The next batch, or None if nothing waits. What has expired is not in it, but for :meth:`expire` to tell.

        With ``urgent_only`` it is an interactive one, to run between the tiles of a bulk batch, or None. Every batch is
        to be given back to :meth:`finished` or :meth:`failed`.
        """
        self._sweep(now)
        batch = None
        if self._earned >= self.max_batch_seconds and not (self._bulk_was_last or urgent_only):
            batch = self._fill(self._bulk)
        if batch is None:
            batch = self._fill(self._interactive)
        if batch is None and not urgent_only:
            # Asked again, because what no longer fits one batch has just gone from the other line to this one.
            batch = self._fill(self._bulk)
        if batch is None:
            return None
        self._running.add(batch)
        self._bulk_was_last = batch.priority == "bulk"
        if self._bulk_was_last:
            self._earned = max(0.0, self._earned - batch.seconds)
        elif self._bulk.lanes:
            earned = batch.seconds * self.bulk_share / (1.0 - self.bulk_share)
            self._earned = min(self._earned + earned, 2.0 * self.max_batch_seconds)
        return batch

    def finished(self, batch: Batch, now: float, seconds: float | None) -> None:
        """A batch is done; it kept the engine for ``seconds`` (None: not measured)."""
        if batch not in self._running:
            return
        self._running.remove(batch)
        if seconds is not None:
            self.measured(batch.model, batch.work, seconds, batch.priority)
        if batch.model in self._limits:
            limit, changed = self._limits[batch.model]
            changed = min(changed, now)
            if batch.atoms >= 0.8 * limit and now >= changed + _RAISE_AFTER:
                limit, changed = limit + limit // 10 + 1, now
            self._limits[batch.model] = limit, changed

    def failed(self, batch: Batch) -> None:
        """A batch gave no results."""
        self._running.discard(batch)

    def measured(self, model: str, work: float, seconds: float, priority: Priority = "bulk") -> None:
        """Learn a speed: from each batch that finished, and from a warm-up.

        The priorities learn apart. Work is not quite what takes time (atoms with few neighbours cost more of it than
        others), and somebody's upload of molecules must not make the steps of a crystal look long.
        """
        speeds = self._speeds.setdefault(model, {})
        if priority not in speeds:
            speeds[priority] = Speed(self.prior_speed)
        speeds[priority].note(work, seconds)

    def ran_out(self, model: str, atoms: int, now: float) -> None:
        """Learn that memory ran out in a batch of ``atoms``: stay below, and try more again after a while."""
        self._limits[model] = max(1, min(self.batch_atoms(model), atoms * 3 // 4)), now

    def recall(self, model: str, atoms: int, now: float) -> None:
        """Begin with a limit that was learned at an earlier start."""
        self._limits[model] = max(1, min(atoms, self.max_batch_atoms)), now

    def forget(self, model: str) -> None:
        """Drop what was learned about a model."""
        self._speeds.pop(model, None)
        self._limits.pop(model, None)

    def batch_atoms(self, model: str) -> int:
        """Bound of a batch of this model, atoms."""
        return min(self._limits[model][0], self.max_batch_atoms) if model in self._limits else self.max_batch_atoms

    @property
    def measured_models(self) -> list[str]:
        """Models of which a speed was measured."""
        return list(self._speeds)

    def speed(self, model: str, priority: Priority = "bulk") -> float:
        """Work per second in batches that last about as long as they may."""
        speed = self._speed(model, priority)
        return self.prior_speed if speed is None else speed.within(self.max_batch_seconds)

    def seconds(self, model: str, work: float, priority: Priority = "bulk") -> float:
        """Expected duration of a batch, s."""
        speed = self._speed(model, priority)
        return work / self.prior_speed if speed is None else speed.time(work)

    def retry_after(self) -> float:
        """Seconds until what is queued and running now will be done."""
        work = self._work.copy()
        for batch in self._running:
            work[batch.model] += batch.work
        return sum(w / self.speed(model) for model, w in work.items())

    @property
    def queued(self) -> int:
        """Jobs with structures that were not handed out."""
        return len(self._jobs)

    def waiting(self, priority: Priority | None = None) -> Load:
        """What waits, in all or at one priority (where jobs that need more than one batch count as bulk)."""
        if priority is None:
            return replace(self._total)
        return replace((self._interactive if priority == "interactive" else self._bulk).load)

    def jobs(self) -> list[int]:
        """Ids of the jobs with queued structures, in the order in which they came."""
        return list(self._jobs)

    def next_deadline(self) -> float | None:
        """The earliest deadline of a queued job."""
        while self._deadlines and self._deadlines[0][2].line is None:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _speed(self, model: str, priority: Priority) -> Speed | None:
        """What was learned of a priority, or of the other one."""
        speeds = self._speeds.get(model, {})
        return speeds.get(priority) or next(iter(speeds.values()), None)

    def _budget(self, model: str, priority: Priority) -> int:
        """Bound of a batch in work."""
        seconds = self.max_batch_seconds
        speeds = self._speeds.get(model, {})
        if priority in speeds:
            most = speeds[priority].most(seconds)
        elif not speeds:
            most = self.prior_speed * seconds
        else:
            # What was learned of the other priority is a hint: bulk begins carefully, and a step is taken for one.
            other = next(iter(speeds.values())).most(seconds)
            most = (min if priority == "bulk" else max)(other, self.prior_speed * seconds)
        return max(1, int(min(most, MOST_WORK)))

    def _fill(self, line: Line) -> Batch | None:
        while line.lanes:
            model, lane = line.turn()
            budget, most = self._budget(model, line.name), self.batch_atoms(model)
            slices: list[Slice] = []
            structures = atoms = work = 0
            tiled = False
            while lane.clients and not tiled:
                waiting = lane.first().head()
                start, room = waiting.start, budget - work
                share = room if len(lane.clients) == 1 else min(room, budget // _QUANTA)
                stop = waiting.reach(share, most - atoms)
                if stop == start:
                    # The first structure of a turn may take more than the share, if there is room.
                    stop = min(start + 1, waiting.reach(room, most - atoms))
                if stop == start and slices:
                    break
                if stop == start and line is self._interactive:
                    line.remove(waiting)
                    self._bulk.add(waiting)
                    continue
                if stop == start:
                    stop, tiled = start + 1, True
                if slices and slices[-1].job == waiting.job.id:
                    start = slices.pop().start
                slices.append(Slice(waiting.job.id, start, stop))
                structures += stop - waiting.start
                taken = self._take(waiting, stop)
                atoms, work = atoms + taken[0], work + taken[1]
            if slices:
                fill = max(work / budget, atoms / most)
                seconds = self.seconds(model, work, line.name)
                return Batch(model, line.name, tuple(slices), structures, atoms, work, seconds, fill, tiled)
        return None

    def _take(self, waiting: Waiting, stop: int) -> tuple[int, int]:
        """Hand out, up to ``stop``, the job whose turn it is; the atoms and the work of that."""
        line, model = waiting.line, waiting.job.model
        assert line is not None
        atoms, work = waiting.take(stop)
        line.load.add(0, -atoms, -work)
        self._count(model, 0, -atoms, -work)
        line.lanes[model].charge(max(work, 1))
        if stop == len(waiting.job.counts):
            self._drop(waiting)
        return atoms, work

    def _drop(self, waiting: Waiting) -> None:
        assert waiting.line is not None
        waiting.line.remove(waiting)
        self._count(waiting.job.model, -1, -waiting.atoms, -waiting.work)
        del self._jobs[waiting.job.id]

    def _count(self, model: str, requests: int, atoms: int, work: int) -> None:
        self._total.add(requests, atoms, work)
        self._work[model] += work
        if not self._work[model]:
            del self._work[model]

    def _sweep(self, now: float) -> None:
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            waiting = heappop(self._deadlines)[2]
            self._expired.append(waiting.job.id)
            self._drop(waiting)


__all__ = ["Batch", "Job", "Load", "Priority", "QueueFull", "Refused", "Scheduler", "Slice", "TooLarge"]
