"""How fast a model runs, as measured on the batches that ran."""

from __future__ import annotations

from collections import deque
from math import inf


class Speed:
    """Work per second of one model, by size of batch: what small ones cost says little about large ones.

    A size is a factor of four in work. Of the last five batches of a size the median counts, of two the faster: one
    slow batch (a page fault, a compilation) changes nothing for long.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._recent: dict[int, deque[float]] = {}
        self._sizes: list[tuple[int, float]] = []  # (size, work/s), ascending

    def note(self, work: float, seconds: float) -> None:
        """A batch of ``work`` took ``seconds``; what says nothing (no work, no time, not a number) is left out."""
        if not (work > 0 and 0 < seconds < inf):
            return
        size = _size(work)
        recent = self._recent.setdefault(size, deque(maxlen=5))
        recent.append(work / max(seconds, 1e-6))
        found = sorted(recent)[len(recent) // 2]
        self._sizes = sorted([*((s, v) for s, v in self._sizes if s != size), (size, found)])

    def at(self, work: float) -> float:
        """Speed of a batch of ``work``; of the next smaller size where its own was not seen, which is safe."""
        wanted = _size(work)
        found = self._sizes[0][1] if self._sizes else self._prior
        for size, speed in self._sizes:
            if size <= wanted:
                found = speed
        return found

    def within(self, seconds: float) -> float:
        """Speed of the largest batches that take no more than ``seconds``."""
        found = self._sizes[0][1] if self._sizes else self._prior
        for size, speed in self._sizes:
            if 4**size <= speed * seconds:
                found = speed
        return found


def _size(work: float) -> int:
    return max(0, int(work).bit_length() - 1) // 2
