"""Sessions: what stays the same from step to step of a simulation, kept so that a step sends positions alone.

A session is a cache. Results are a function of the step and of what the session was opened with, so losing one costs
its client one request that opens it again. The table holds no clock; the time is passed in, in seconds of any clock.
"""

from __future__ import annotations

import itertools
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nepcore.structures import MAX_COORDINATE, Structures

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from nepcore.errors import StructureError

    from .models import Version

MAX_ATOMS = 64_000_000
"""Atoms of all sessions together; an atom of a session is a byte."""

_numbers = itertools.count(1)


def number_from(first: int) -> None:
    """Give the sessions that are made in this process keys from ``first`` on, for others to make them, too."""
    global _numbers  # noqa: PLW0603
    _numbers = itertools.count(first)


class Opening(NamedTuple):
    """What a session is opened with.

    Attributes:
        model: Name of the model; None for the server's only one.
        properties: Of each step that asks for none by itself.
        numbers: Atomic numbers, (n,) uint8.
        cell: Of steps that bring none, Å, (3, 3) float64.
        pbc: Periodic directions, (3,) bool.
        temperature: K, NaN if there is none.
    """

    model: str | None
    properties: tuple[str, ...]
    numbers: NDArray[np.uint8]
    cell: NDArray[np.float64]
    pbc: NDArray[np.bool_]
    temperature: float


class Session:
    """The same atoms, step after step.

    Attributes:
        id: What its client calls it; cannot be guessed.
        key: Number in :attr:`.Structures.keys` of its steps.
        owner: Key or address of its client.
        opening: What it was opened with.
        used: Time of its last step, s.
        steps: Steps so far.
        lost: Whether it is no longer in its table.
    """

    __slots__ = ("_checked", "_counts", "_key", "_pbc", "_periodic", "_temperatures", "id", "key", "lost", "opening",
                 "owner", "steps", "used")  # fmt: skip

    def __init__(self, owner: str, opening: Opening, now: float, known_as: tuple[str, int] | None = None) -> None:
        """Make one, with a new id and key, or with those that it has elsewhere."""
        self.id, self.key = known_as or (secrets.token_urlsafe(16), next(_numbers))
        self.owner = owner
        self.opening = opening
        self.used = now
        self.steps = 0
        self.lost = False
        self._counts = np.array([len(opening.numbers)], np.int64)
        self._pbc = opening.pbc[None].copy()
        self._temperatures = np.array([opening.temperature])
        self._key = np.array([self.key], np.int64)
        self._periodic = bool(opening.pbc.all())
        # Model version and cell of a step that was found fit, and its work.
        self._checked: tuple[Version, bytes, NDArray[np.float64]] | None = None

    def __len__(self) -> int:
        return len(self.opening.numbers)

    @property
    def fully_periodic(self) -> bool:
        """Whether there is a stress."""
        return self._periodic

    def block(self, positions: NDArray[np.float64], cell: NDArray[np.float64] | None) -> Structures:
        """A block of one structure: the atoms at ``positions`` (n, 3), Å, in ``cell`` or in that of the opening."""
        # Shapes are those of the opening, or checked by whoever read the step.
        found = object.__new__(Structures)
        found.__dict__.update(
            counts=self._counts, numbers=self.opening.numbers, positions=positions,
            cells=(self.opening.cell if cell is None else cell)[None], pbc=self._pbc, temperatures=self._temperatures,
            keys=self._key,
        )  # fmt: skip
        return found

    def examine(self, version: Version, block: Structures) -> tuple[StructureError | None, NDArray[np.float64]]:
        """What is wrong with a step for a model, and its work, (1,).

        The same as :meth:`nepcore.admission.Admission.examine` says; but what was found fit in the last step is not
        looked at again.
        """
        cell = block.cells.tobytes()
        known = self._checked
        if self._periodic and known is not None and known[0] is version and known[1] == cell:
            flat = block.positions.reshape(-1)
            # One sum tells: no coordinate exceeds its root, and a NaN fails the comparison.
            if float(np.dot(flat, flat)) <= MAX_COORDINATE:
                return None, known[2]
        errors, work = version.admission.examine(block)
        if errors:
            return errors[0], work
        self._checked = version, cell, work
        return None, work


class Sessions:
    """All sessions of a server.

    Args:
        idle: Seconds without a step after which a session is dropped.
        limit: Sessions at most.
        limit_each: Sessions of one client at most. One more, and those of its own least lately used go.

    Attributes:
        on_drop: Called with each session that is dropped.
    """

    elsewhere = False

    def __init__(self, idle: float, limit: int, limit_each: int) -> None:
        self.idle = idle
        self.limit = limit
        self.limit_each = limit_each
        # Least lately used first: in all, and of each client.
        self._all: OrderedDict[str, Session] = OrderedDict()
        self._own: dict[str, OrderedDict[str, Session]] = {}
        self._by_key: dict[int, Session] = {}
        self._atoms = 0
        self.on_drop: Callable[[Session], None] = lambda session: None  # noqa: ARG005

    def __len__(self) -> int:
        return len(self._all)

    @property
    def atoms(self) -> int:
        """Atoms of all of them."""
        return self._atoms

    def open(self, owner: str, opening: Opening, now: float) -> Session:
        """A new session; others go if there are too many."""
        session = Session(owner, opening, now)
        self.add(session)
        return session

    def add(self, session: Session) -> None:
        """Keep a new session; others go if there are too many."""
        owner = session.owner
        own = self._own.setdefault(owner, OrderedDict())
        while len(own) >= self.limit_each:
            self.drop(next(iter(own.values())))
        while self._all and (len(self._all) >= self.limit or self._atoms + len(session) > MAX_ATOMS):
            self.drop(next(iter(self._all.values())))
        self._own.setdefault(owner, own)[session.id] = session
        self._all[session.id] = self._by_key[session.key] = session
        self._atoms += len(session)

    def met(self, id_: str) -> bool:
        """Whether there is a session of that id, whoever's it is."""
        return id_ in self._all

    async def find(self, id_: str, owner: str) -> Session | None:
        """As :meth:`get`: all there are are here."""
        return self.get(id_, owner)

    async def keep(self, session: Session, *, tied: bool = False) -> None:  # noqa: ARG002 (they end with the process)
        """As :meth:`add`."""
        self.add(session)

    def by_key(self, key: int) -> Session | None:
        """The session whose steps have that key."""
        return self._by_key.get(key)

    def get(self, id_: str, owner: str) -> Session | None:
        """The session of that id, if it is there and the owner's."""
        session = self._all.get(id_)
        return session if session is not None and session.owner == owner else None

    def touch(self, session: Session, now: float) -> None:
        """Note a step."""
        session.used = now
        session.steps += 1
        if not session.lost:
            self._all.move_to_end(session.id)
            self._own[session.owner].move_to_end(session.id)

    def drop(self, session: Session) -> None:
        """Forget a session; nothing if it is forgotten already."""
        if session.lost:
            return
        session.lost = True
        del self._all[session.id], self._by_key[session.key]
        own = self._own[session.owner]
        del own[session.id]
        if not own:
            del self._own[session.owner]
        self._atoms -= len(session)
        self.on_drop(session)

    def sweep(self, now: float) -> int:
        """Drop those that were idle for too long; how many."""
        dropped = 0
        while self._all and (oldest := next(iter(self._all.values()))).used + self.idle < now:
            self.drop(oldest)
            dropped += 1
        return dropped
