"""How many replicas there should be: a rule, without clock or memory of its own.

Atoms that wait call for more replicas. Fewer are enough when hardly any wait and what the devices were busy with would
leave those that stay a reserve. Both have to last, and the two bounds are far apart, so that the number does not
follow every wave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

FEW = 0.25
"""Share of the queue that calls for more, below which it may be that fewer are enough."""

BUSY = 0.7
"""Share of the time that the devices which stay may be busy."""


@dataclass(frozen=True)
class Policy:
    """Bounds and patience.

    Attributes:
        least, most: Replicas there may be.
        queue_atoms: Atoms that may wait for each replica; more call for another one. By default what one card does in a
            second, as docs/operate.md counts it.
        up_seconds, down_seconds: How long there have to be too few, or too many.
    """

    least: int
    most: int
    queue_atoms: float = 5.7e6
    up_seconds: float = 5.0
    down_seconds: float = 120.0

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.most:
            raise ValueError(f"from {self.least} to {self.most} replicas: wanted 1 or more, and the larger number last")
        if not self.queue_atoms > 0 or self.up_seconds < 0 or self.down_seconds < 0:
            raise ValueError("atoms must be positive, and times not negative")


class Seen(NamedTuple):
    """What was seen of all replicas.

    Attributes:
        ready: Replicas that answer.
        atoms: That wait for them.
        busy: Share of the time that their devices computed, added up: 1.5 of 2 replicas.
    """

    ready: int
    atoms: float
    busy: float


class Since(NamedTuple):
    """Clock since when there are too few replicas, or too many; None where that is not so."""

    few: float | None = None
    many: float | None = None


def decide(policy: Policy, now: float, wanted: int, seen: Seen, since: Since) -> tuple[int, Since]:
    """How many there should be from now on, and what to bring to the next call.

    Up goes as far as the queue asks for, to the double at a time; down goes one at a time.

    Args:
        policy: Bounds and patience.
        now: The clock, s.
        wanted: What the last call said.
        seen: What there is now.
        since: What the last call said.
    """
    wanted = min(max(wanted, policy.least), policy.most)
    # While some are about to come, no more are asked for: they come because of this very queue.
    if seen.atoms > policy.queue_atoms * wanted and seen.ready >= wanted and wanted < policy.most:
        few = now if since.few is None else since.few
        if now - few < policy.up_seconds:
            return wanted, Since(few=few)
        needed = math.ceil(seen.atoms / policy.queue_atoms)
        return min(needed, 2 * wanted, policy.most), Since()
    stay = wanted - 1
    if stay >= policy.least and seen.atoms <= FEW * policy.queue_atoms * stay and seen.busy <= BUSY * stay:
        many = now if since.many is None else since.many
        if now - many < policy.down_seconds:
            return wanted, Since(many=many)
        return stay, Since()
    return wanted, Since()
