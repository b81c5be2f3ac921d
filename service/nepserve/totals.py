"""What was done since the start, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .engine.errors import EngineDown
from .refusals import Refused

if TYPE_CHECKING:
    from .answer import Answer, Request
    from .engine import Evaluated
    from .scheduler import Batch


@dataclass(eq=False)
class Totals:
    """Counts and sums.

    Attributes:
        requests, structures, atoms: Answered.
        queue_seconds: Time that answered requests were not worked on.
        batches: Evaluated.
        sizes: These by size: the smallest power of two that is not below their atoms.
        pack_seconds, device_seconds, unpack_seconds: Time that they took.
        splits: How often they were cut because memory ran out.
        failed: Batches without results.
        shed: Requests without results by reason: a code of :mod:`nepserve.refusals`, ``engine_down``, ``internal``,
            or ``cancelled`` where nobody waited any more.
    """

    requests: int = 0
    structures: int = 0
    atoms: int = 0
    queue_seconds: float = 0.0
    batches: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    pack_seconds: float = 0.0
    device_seconds: float = 0.0
    unpack_seconds: float = 0.0
    splits: int = 0
    failed: int = 0
    shed: Counter[str] = field(default_factory=Counter)

    def count_answer(self, request: Request, answer: Answer) -> None:
        """A request has its results."""
        self.requests += 1
        self.structures += len(request.structures)
        self.atoms += request.structures.n_atoms
        self.queue_seconds += answer.queue_seconds

    def count_error(self, error: Exception) -> None:
        """A request gets an exception."""
        match error:
            case Refused():
                self.shed[error.code] += 1
            case EngineDown():
                self.shed["engine_down"] += 1
            case _:
                self.shed["internal"] += 1

    def count_batch(self, batch: Batch, evaluated: Evaluated) -> None:
        """A batch has its results."""
        self.batches += 1
        self.sizes[1 << max(0, batch.atoms - 1).bit_length()] += 1
        self.pack_seconds += evaluated.pack_seconds
        self.device_seconds += evaluated.device_seconds
        self.unpack_seconds += evaluated.unpack_seconds
        self.splits += evaluated.splits
