"""When a failed attempt is repeated: full jitter, the server's Retry-After, and an end.

Nothing here sleeps or looks at a clock by itself, so that both clients share it and tests need no time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

RETRIED_STATUS = frozenset({429, 502, 503})
"""Answers worth another attempt: queue full, a proxy whose server restarts, a server that starts or drains."""


@dataclass(frozen=True)
class Retry:
    """How often an attempt is repeated, and after what wait.

    The wait before repetition k (from 0) is drawn evenly from 0 to min(longest, first · 2^k), on top of what the
    server asks for with ``Retry-After``: many clients that were refused together do not come back together. All
    attempts of a call share its ``timeout``; a wait that would outlast it is not begun.

    Attributes:
        limit: Repetitions at most; 0 turns repeating off.
        first: Upper bound of the first wait, s.
        longest: Upper bound of every later wait, s.
        unreached: Repetitions at most for a client that never had an answer from its server: a wrong address should
            fail soon, while a server that was there and restarts is waited for.
        cut: Repetitions at most after connections that broke with the request under way: what breaks them may be the
            request.
    """

    limit: int = 20
    first: float = 0.05
    longest: float = 5.0
    unreached: int = 2
    cut: int = 3

    def __post_init__(self) -> None:
        if min(self.limit, self.unreached, self.cut) < 0:
            raise ValueError("limit, unreached and cut must not be negative")
        if not 0 <= self.first <= self.longest:
            raise ValueError(f"waits must rise from first to longest, not from {self.first} s to {self.longest} s")

    def wait(self, repetition: int, retry_after: float | None, draw: Callable[[], float] = random.random) -> float:
        """Seconds to wait before repetition number ``repetition`` (from 0); ``draw`` gives numbers from 0 to 1."""
        # The exponent is bounded so that a limit of thousands does not overflow a float.
        longest = min(self.longest, self.first * 2.0 ** min(repetition, 60))
        return (retry_after or 0.0) + draw() * longest


@dataclass
class Attempts:
    """The attempts of one call.

    Attributes:
        policy: What may be repeated.
        started: Clock at the first attempt, s.
        timeout: Seconds that all attempts and waits together may take.
        repeated: Repetitions so far.
        cuts: Connections that broke with the request under way.
        renewed: Whether the call already moved to a new connection because a kept one had been closed.
        draw: Source of the jitter.
    """

    policy: Retry
    started: float
    timeout: float
    repeated: int = 0
    cuts: int = 0
    renewed: bool = False
    draw: Callable[[], float] = field(default=random.random, repr=False)

    def left(self, now: float) -> float:
        """Seconds until the call must end; negative when it should have."""
        return self.started + self.timeout - now

    def again(
        self, now: float, *, retry_after: float | None = None, reached: bool = True, cut: bool = False
    ) -> float | None:
        """Count one repetition and return the wait before it, or None if there is to be none.

        Args:
            now: The clock, s.
            retry_after: What the server asked for, s.
            reached: Whether this client ever had an answer from the server.
            cut: Whether the connection broke with the request under way.
        """
        limit = self.policy.limit if reached else min(self.policy.limit, self.policy.unreached)
        self.cuts += cut
        if self.repeated >= limit or self.cuts > self.policy.cut:
            return None
        wait = self.policy.wait(self.repeated, retry_after, self.draw)
        if wait >= self.left(now):
            return None
        self.repeated += 1
        return wait


def retry_after(value: str | None, now: datetime | None = None) -> float | None:
    """Seconds of a ``Retry-After`` header, given as a number or as a date; None where it is absent or unreadable."""
    if value is None:
        return None
    text = value.strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = parsedate_to_datetime(text)
        except (TypeError, ValueError):
            return None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        seconds = (moment - (now or datetime.now(timezone.utc))).total_seconds()
        return max(seconds, 0.0)
    return seconds if 0.0 <= seconds < float("inf") else None
