"""A request between its arrival and its answer: the results it has so far, and where its time went."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from nepcore.structures import PER_ATOM, PER_STRUCTURE, PROPERTIES, Predictions

if TYPE_CHECKING:
    from collections.abc import Collection

    from nepcore.structures import Structures

    from .engine import Evaluated


@dataclass(frozen=True, eq=False)
class Answer:
    """The results of one request.

    Attributes:
        predictions: Of the request's structures, in their order, with the properties that were asked for.
        queue_seconds: From arrival to answer, without the three below.
        pack_seconds, device_seconds, unpack_seconds: Sums over the batches that the request had a part in.
        batch_atoms: Atoms of the largest of these batches.
        batches: How many they were.
    """

    predictions: Predictions
    queue_seconds: float
    pack_seconds: float
    device_seconds: float
    unpack_seconds: float
    batch_atoms: int
    batches: int


class Request:
    """A block of structures on its way.

    Attributes:
        id: Of its job in the queue.
        structures, properties: What was asked for.
        arrived: Time of arrival, s.
        timeout: Seconds it was given; None for any.
        deadline: When that is over.
        answer: Done with the one answer, be it results or an exception.
    """

    __slots__ = ("_batch_atoms", "_left", "_parts", "_seconds", "answer", "arrived", "deadline", "id", "properties",
                 "structures", "timeout")  # fmt: skip

    def __init__(
        self, id_: int, structures: Structures, properties: frozenset[str], arrived: float, timeout: float | None
    ) -> None:
        self.id = id_
        self.structures = structures
        self.properties = properties
        self.arrived = arrived
        self.timeout = timeout
        self.deadline = inf if timeout is None else arrived + timeout
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._left = len(structures)
        self._parts: list[tuple[int, Predictions]] = []
        self._seconds = (0.0, 0.0, 0.0)
        self._batch_atoms = 0

    def block(self, start: int, stop: int) -> Structures:
        """Structures ``start`` to ``stop`` − 1."""
        structures = self.structures
        return structures if stop - start == len(structures) else structures.slice(start, stop)

    def take(self, start: int, part: Predictions, evaluated: Evaluated, now: float) -> Answer | None:
        """Take the results of structures from ``start`` on, out of a batch; the answer, if they were the last."""
        if part.values.keys() != self.properties:
            # Others of the batch asked for more.
            values = {name: array for name, array in part.values.items() if name in self.properties}
            part = Predictions(part.counts, values, part.stress_known, part.errors)
        self._parts.append((start, part))
        self._left -= len(part)
        pack, device, unpack = self._seconds
        pack += evaluated.pack_seconds
        device += evaluated.device_seconds
        unpack += evaluated.unpack_seconds
        self._seconds = pack, device, unpack
        self._batch_atoms = max(self._batch_atoms, evaluated.batch_atoms)
        if self._left:
            return None
        self._parts.sort(key=lambda each: each[0])
        whole = Predictions.concatenate([each for _, each in self._parts])
        waited = max(0.0, now - self.arrived - pack - device - unpack)
        return Answer(whole, waited, pack, device, unpack, self._batch_atoms, len(self._parts))


def nothing(properties: Collection[str]) -> Answer:
    """The answer to a request of no structures."""
    shapes = {**PER_STRUCTURE, **PER_ATOM}
    values = {name: np.zeros((0, *(n or 0 for n in shapes[name]))) for name in PROPERTIES if name in properties}
    return Answer(Predictions(np.zeros(0, np.int64), values, np.zeros(0, bool)), 0.0, 0.0, 0.0, 0.0, 0, 0)
