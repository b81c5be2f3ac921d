"""How long batches of one model take, as measured on those that ran, and how large the next may be."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from math import inf
from statistics import median_low
from typing import NamedTuple

_FORGET_AFTER = 64
"""Batches after which a size that was seen once or twice is forgotten: what it said may have been an accident."""

_GROW = 4.0
"""How much larger than any batch so far the next one may be, and how much larger one is to learn what size costs."""


class _Point(NamedTuple):
    work: float
    seconds: float


class Speed:
    """Durations of batches by work: a cost of each batch, whatever its size, and one that grows with it.

    Sizes are told apart by factors of four in work. Of the last five batches of a size the median counts, of two the
    faster: one slow batch (a page fault, a compilation) changes nothing for long. Between two sizes a duration is
    interpolated, beyond them it is extrapolated.

    Args:
        prior: Work per second taken as long as nothing was measured.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._recent: dict[int, deque[_Point]] = {}
        self._last: dict[int, int] = {}  # which note was the last of a size
        self._notes = 0
        self._points: list[_Point] = []  # one for each size, both numbers ascending

    def note(self, work: float, seconds: float) -> None:
        """A batch of ``work`` took ``seconds``; what says nothing (no work, no time, not a number) is left out."""
        if not (work > 0 and 0 < seconds < inf):
            return
        size = max(0, int(work).bit_length() - 1) // 2
        self._notes += 1
        self._last[size] = self._notes
        self._recent.setdefault(size, deque(maxlen=5)).append(_Point(work, max(seconds, 1e-6)))
        for other, last in list(self._last.items()):
            if len(self._recent[other]) < 3 and self._notes - last > _FORGET_AFTER:
                del self._recent[other], self._last[other]
        self._points = []
        longest = 0.0
        for _, recent in sorted(self._recent.items()):
            work = sum(point.work for point in recent) / len(recent)
            seconds = work * median_low(point.seconds / point.work for point in recent)
            # A larger batch takes no less time; where it seems to, the smaller one was measured badly, or this one.
            longest = max(longest, seconds)
            self._points.append(_Point(work, longest))

    @property
    def overhead(self) -> float:
        """Seconds that a batch takes whatever its size, as far as two sizes tell."""
        if len(self._points) < 2:
            return 0.0
        low, high = self._points[:2]
        return min(max(0.0, low.seconds - low.work * _slope(low, high)), low.seconds)

    def time(self, work: float) -> float:
        """Expected duration of a batch, s."""
        points = self._points
        if not points:
            return work / self._prior
        if work <= points[0].work:
            return self.overhead + (points[0].seconds - self.overhead) * work / points[0].work
        for low, high in pairwise(points):
            if work <= high.work:
                return low.seconds + _slope(low, high) * (work - low.work)
        last = points[-1]
        slope = _slope(*points[-2:]) if len(points) > 1 else last.seconds / last.work
        return last.seconds + slope * (work - last.work)

    def most(self, seconds: float) -> float:
        """Work of the largest batch that takes no more than ``seconds``, or than twice the overhead if that is longer.

        A bound below the overhead would let every structure pay the whole of it.
        """
        points = self._points
        if not points:
            return self._prior * seconds
        allowed = max(seconds, 2.0 * self.overhead)
        first, last = points[0], points[-1]
        if len(points) == 1:
            found = first.work * allowed / first.seconds
            if found < 2.0 * first.work < _GROW * self._prior * seconds and first.seconds < _GROW * seconds:
                # Is it the size that takes its time, or the overhead? Another size will tell.
                found = max(found, _GROW * first.work)
            return found
        if allowed < first.seconds:
            return first.work * allowed / first.seconds
        for low, high in pairwise(points):
            if allowed < high.seconds:
                return low.work + (allowed - low.seconds) / _slope(low, high)
        slope = _slope(*points[-2:])
        further = last.work + (allowed - last.seconds) / slope if slope > 0 else inf
        return min(max(further, last.work * allowed / last.seconds), _GROW * last.work)

    def within(self, seconds: float) -> float:
        """Work per second in batches of :meth:`most` work."""
        work = self.most(seconds)
        return work / self.time(work)


def _slope(low: _Point, high: _Point) -> float:
    return (high.seconds - low.seconds) / (high.work - low.work)
