"""The order of jobs within one priority: models take turns, clients by the work they got, jobs as they came."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from math import ceil
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Priority = Literal["interactive", "bulk"]

MOST_WORK = 2**61
"""Work of a job stays below this, so that sums fit int64."""


@dataclass(frozen=True, eq=False)
class Job:
    """The header of a request.

    Attributes:
        id: Unique among the jobs that are queued.
        model: What a batch must have in common: the model's name (and dtype, where one model serves several).
        client: Whose it is: the name of the key, else the address.
        priority: The line it asks for.
        counts: Atoms per structure, (B,) with B ≥ 1.
        work: Work per structure, (B,), atoms × (neighbours + 16): finite, not negative.
        deadline: When it is of no use any more, on the caller's clock; None: never.
    """

    id: int
    model: str
    client: str
    priority: Priority
    counts: NDArray[np.int64]
    work: NDArray[np.float64]
    deadline: float | None = None


@dataclass
class Load:
    """What waits: requests with structures that were not handed out, and the atoms and work of those structures."""

    requests: int = 0
    atoms: int = 0
    work: int = 0

    def add(self, requests: int, atoms: int, work: int) -> None:
        """Count more (or, negative, less)."""
        self.requests += requests
        self.atoms += atoms
        self.work += work


class Waiting:
    """A queued job, and how far it was handed out.

    Attributes:
        start: The first structure that was not handed out.
        atoms, work: What was not handed out. Work is rounded up to whole numbers: sums are exact, and counters come
            back to zero.
        largest: Atoms of the largest structure.
        line, client: Where it stands; ``line`` is None when it stands nowhere any more.

    Raises:
        ValueError: A header that makes no sense.
    """

    __slots__ = ("_ends", "atoms", "client", "job", "largest", "line", "start", "work")

    client: Client

    def __init__(self, job: Job) -> None:
        B = len(job.counts)
        if not B or len(job.work) != B:
            raise ValueError(f"a job needs structures, and the work of each: {B} counts and {len(job.work)} works came")
        self.job = job
        self.line: Line | None = None
        self.start = 0
        self._ends: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None  # work and atoms before each structure
        if B == 1:
            self.atoms = self.largest = least = int(job.counts[0])
            most, low = float(job.work[0]), float(job.work[0])
        else:
            least, self.largest = int(job.counts.min()), int(job.counts.max())
            most, low = float(job.work.sum()), float(job.work.min())
        # A NaN fails the comparison, too.
        if not (low >= 0 and most < MOST_WORK and least >= 0):
            raise ValueError("atoms and work must be finite and not negative")
        if B == 1:
            self.work = ceil(most)
        else:
            works, atoms = np.zeros(B + 1, np.int64), np.zeros(B + 1, np.int64)
            np.cumsum(np.ceil(job.work).astype(np.int64), out=works[1:])
            np.cumsum(job.counts, out=atoms[1:])
            self._ends = works, atoms
            self.work, self.atoms = int(works[-1]), int(atoms[-1])

    def reach(self, work: int, atoms: int) -> int:
        """Where to stop so that no more than ``work`` and ``atoms`` are taken; ``start`` if nothing fits."""
        if self.work <= work and self.atoms <= atoms:
            return len(self.job.counts)
        if self._ends is None:
            return self.start
        stops = [
            int(ends.searchsorted(min(int(ends[self.start]) + most, int(ends[-1])), side="right"))
            for ends, most in zip(self._ends, (work, atoms), strict=True)
        ]
        return min(stops) - 1

    def take(self, stop: int) -> tuple[int, int]:
        """Hand out the structures before ``stop``; their atoms and work."""
        if stop == len(self.job.counts) or self._ends is None:
            atoms, work = self.atoms, self.work
        else:
            works, ends = self._ends
            atoms, work = int(ends[stop] - ends[self.start]), int(works[stop] - works[self.start])
        self.start = stop
        self.atoms -= atoms
        self.work -= work
        return atoms, work


class Client:
    """The queued jobs of one client in one lane, and the work it got there."""

    __slots__ = ("jobs", "name", "served")

    def __init__(self, name: str, served: float) -> None:
        self.name = name
        self.served = served
        # Ordered, since the first of a plain dictionary is slow to find after many removals at its front.
        self.jobs: OrderedDict[int, Waiting] = OrderedDict()

    def head(self) -> Waiting:
        """The job whose turn it is."""
        return next(iter(self.jobs.values()))


class Lane:
    """The clients that wait for one model in one line; the one that got least work is first.

    This is start-time fair queueing. The lane's clock runs with the work that each client would have got, had all had
    their turn at once. A client that comes starts at the clock, or where it left if that is later: neither idle time
    nor a new name is worth anything, and a flow of ever new names cannot keep the old ones from their turn.
    """

    def __init__(self) -> None:
        self.clients: dict[str, Client] = {}
        self._clock = 0.0
        self._gone: dict[str, float] = {}  # where clients left, if ahead of the clock
        self._heap: list[tuple[float, int, Client]] = []  # one entry a client; those without jobs are dead
        self._turn = 0

    def add(self, waiting: Waiting) -> None:
        """Let a job wait behind those of its client."""
        name = waiting.job.client
        client = self.clients.get(name)
        if client is None:
            client = self.clients[name] = Client(name, max(self._clock, self._gone.pop(name, 0.0)))
            self._turn += 1
            heappush(self._heap, (client.served, self._turn, client))
        client.jobs[waiting.job.id] = waiting
        waiting.client = client

    def first(self) -> Client:
        """The client whose turn it is."""
        while not self._heap[0][2].jobs:
            heappop(self._heap)
        return self._heap[0][2]

    def charge(self, work: int) -> None:
        """Count work for the :meth:`first` client."""
        client = self.first()
        self._clock = max(self._clock + work / len(self.clients), client.served)
        client.served += work
        self._turn += 1
        heapreplace(self._heap, (client.served, self._turn, client))

    def remove(self, waiting: Waiting) -> None:
        """Forget a job, and its client if that was its last."""
        client = waiting.client
        del client.jobs[waiting.job.id]
        if client.jobs:
            return
        del self.clients[client.name]
        if client.served > self._clock:
            self._gone[client.name] = client.served
        if len(self._gone) > 2 * len(self.clients) + 64:
            self._gone = {name: served for name, served in self._gone.items() if served > self._clock}


class Line:
    """One priority: a lane for each model that waits, the one whose turn it is first."""

    def __init__(self, name: Priority) -> None:
        self.name = name
        self.lanes: OrderedDict[str, Lane] = OrderedDict()
        self.load = Load()

    def add(self, waiting: Waiting) -> None:
        """Let a job wait here."""
        lane = self.lanes.get(waiting.job.model)
        if lane is None:
            lane = self.lanes[waiting.job.model] = Lane()
        lane.add(waiting)
        waiting.line = self
        self.load.add(1, waiting.atoms, waiting.work)

    def remove(self, waiting: Waiting) -> None:
        """Forget a job with all that was not handed out of it."""
        lane = self.lanes[waiting.job.model]
        lane.remove(waiting)
        if not lane.clients:
            del self.lanes[waiting.job.model]
        waiting.line = None
        self.load.add(-1, -waiting.atoms, -waiting.work)

    def turn(self) -> tuple[str, Lane]:
        """The model whose turn it is; it goes to the end."""
        model = next(iter(self.lanes))
        self.lanes.move_to_end(model)
        return model, self.lanes[model]
