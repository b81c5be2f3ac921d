"""How long batches of one model take, as measured on those that ran, and how large the next may be."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from math import inf
from statistics import median_low
from typing import NamedTuple

STRETCH = 4.0
"""How many times its bound a batch may last where that pays: where most of its time is the same for any size."""

_GROW = 2.0
"""How much larger than all so far the next batch is that tells what of the time is due to the work."""

_FORGET_AFTER = 64
"""Batches after which a size that was seen once or twice is forgotten: what it said may have been an accident."""

_OLD = 256
"""Batches after which any size is forgotten: the machine may have been busy then."""


class _Point(NamedTuple):
    work: float
    seconds: float


class Speed:
    """Durations of batches by work.

    Sizes are told apart by factors of two in work. Of the last five batches of a size the median counts, of two the
    faster: one slow batch (a page fault, a compilation) changes nothing for long. Between sizes a duration is
    interpolated.

    Args:
        prior: Work per second taken as long as nothing was measured.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._recent: dict[int, deque[_Point]] = {}
        self._age: dict[int, int] = {}  # batches somewhat smaller than a size since the last of that size
        self._points: list[_Point] = []  # one for each size, both numbers ascending

    def note(self, work: float, seconds: float) -> None:
        """A batch of ``work`` took ``seconds``; what says nothing (no work, no time, not a number) is left out."""
        if not (work > 0 and 0 < seconds < inf):
            return
        size = int(work).bit_length()
        self._recent.setdefault(size, deque(maxlen=5)).append(_Point(work, max(seconds, 1e-6)))
        self._age[size] = 0
        for other in (size + 1, size + 2):
            # Had it been faster, a batch of that size might have been made instead.
            if other in self._age:
                self._age[other] += 1
                if self._age[other] > (_FORGET_AFTER if len(self._recent[other]) < 3 else _OLD):
                    del self._recent[other], self._age[other]
        self._points = []
        longest = 0.0
        for _, recent in sorted(self._recent.items()):
            mean = sum(point.work for point in recent) / len(recent)
            # A larger batch takes no less time; where it seems to, the smaller one was measured badly, or this one.
            longest = max(longest, mean * median_low(point.seconds / point.work for point in recent))
            self._points.append(_Point(mean, longest))

    def time(self, work: float) -> float:
        """Expected duration of a batch, s."""
        points = self._points
        if not points:
            return work / self._prior
        if work <= points[0].work:
            return points[0].seconds * work / points[0].work
        for low, high in pairwise(points):
            if work <= high.work:
                return low.seconds + (high.seconds - low.seconds) * (work - low.work) / (high.work - low.work)
        return points[-1].seconds * work / points[-1].work

    def most(self, seconds: float) -> float:
        """Work of the largest batch that lasts no longer than ``seconds``.

        Up to :data:`STRETCH` times longer, where at least half of that time is the same for any size: a bound below the
        cost of a batch would let each structure pay the whole of it.
        """
        points = self._points
        if not points:
            return self._prior * seconds
        last = 0
        while last + 1 < len(points) and (
            points[last + 1].seconds <= seconds
            or (points[last + 1].seconds <= STRETCH * seconds and _pays(points[last], points[last + 1]))
        ):
            last += 1
        low = points[last]
        if last + 1 == len(points) and 2.0 * low.seconds <= STRETCH * seconds:
            # Whether it is the work that takes the time, a larger batch will tell.
            grow = _GROW if last == 0 or _pays(points[last - 1], low) else 1.0
            return low.work * max(grow, seconds / low.seconds)
        if low.seconds > seconds:
            return low.work * (seconds / low.seconds if last == 0 else 1.0)
        if last + 1 == len(points):
            return low.work * seconds / low.seconds
        high = points[last + 1]
        return low.work + (high.work - low.work) * (seconds - low.seconds) / (high.seconds - low.seconds)

    def within(self, seconds: float) -> float:
        """Work per second in batches of :meth:`most` work."""
        work = self.most(seconds)
        return work / self.time(work)


def _pays(low: _Point, high: _Point) -> bool:
    """Whether at least half of the time of the larger batch is the same for any size, as far as two sizes tell."""
    slope = (high.seconds - low.seconds) / (high.work - low.work)
    return high.seconds - slope * high.work >= 0.5 * high.seconds
