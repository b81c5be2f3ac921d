"""How work is cut: blocks of atoms that a thread takes at a time, pieces between which others may run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .inner import inner
from .kernels import Blocks, Targets

if TYPE_CHECKING:
    from numpy.typing import NDArray

ATOM_WORK = 30.0
"""What an atom costs beside its neighbours, in neighbours."""

PIECE = 0.3e6
"""Work (atoms × (neighbours + a constant)) of a piece: some tens of milliseconds on one core."""

_BLOCK = 4000.0
"""Work of a block: some hundred microseconds."""

_GUESS = 64.0
"""Neighbours per atom where the cell does not tell a density."""


@inner
def expect(counts: Any, cells: Any, pbc: Any, cutoff: float) -> Any:
    """Neighbours per atom, (B,): from the density of crystals, a guess elsewhere. Results do not depend on it."""
    out = np.empty(len(counts))
    sphere = 4.0 / 3.0 * math.pi * cutoff**3
    for s in range(len(counts)):
        a = cells[9 * s : 9 * s + 9]
        volume = abs(
            a[0] * (a[4] * a[8] - a[5] * a[7]) - a[1] * (a[3] * a[8] - a[5] * a[6]) + a[2] * (a[3] * a[7] - a[4] * a[6])
        )
        expected = _GUESS
        if pbc[s, 0] and pbc[s, 1] and pbc[s, 2]:
            expected = counts[s] * sphere / volume if volume > 0.0 else _GUESS
        elif not (pbc[s, 0] or pbc[s, 1] or pbc[s, 2]):
            expected = min(expected, np.float64(counts[s]))
        out[s] = min(max(expected, 1.0), 1e5)
    return out


@dataclass(frozen=True, eq=False)
class Plan:
    """Blocks of atoms of one structure each, consecutive in its bins, (b,) int64.

    Attributes:
        structure: Structure the atoms belong to.
        begin, end: Range of sorted places; those of a structure are numbered as its atoms are.
        pairs: Pairs to make room for.
        total: Work up to each block, (b + 1,) float64.
    """

    structure: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    pairs: NDArray[np.int64]
    total: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.structure)

    def stop(self, start: int, work: float) -> int:
        """First block behind a piece that begins with block ``start`` and has about that much work, or less.

        What is left is cut evenly: a small last piece would keep threads waiting for each other.
        """
        left = self.total[-1] - self.total[start]
        if left <= work:
            return len(self)
        share = left / math.ceil(left / work)
        return max(start + 1, int(np.searchsorted(self.total, self.total[start] + share)))

    def work(self, start: int, stop: int) -> float:
        """Work of blocks ``start`` to ``stop`` − 1."""
        return float(self.total[stop] - self.total[start])

    def blocks(self, start: int, stop: int, rooms: NDArray[np.int64]) -> Blocks:
        """Blocks ``start`` to ``stop`` − 1 for the kernels, their pairs one block after the other."""
        n = stop - start
        notes = np.zeros((5, n), np.int64)
        np.cumsum(rooms[:-1], out=notes[0, 1:])
        return Blocks(
            n, np.zeros(2, np.int64), self.structure[start:stop], self.begin[start:stop], self.end[start:stop],
            notes[0], rooms, notes[1], notes[2], notes[3], notes[4],
        )  # fmt: skip


@inner
def cut(counts: Any, expected: Any) -> Any:
    """The arrays of a :class:`Plan` for structures with that many atoms and expected neighbours an atom."""
    sizes = np.empty(len(counts), np.int64)
    n = 0
    for s in range(len(counts)):
        # Small enough for the threads to end together, large enough for atoms of one type to come one after the other.
        most = min(max(counts[s] // 64, 8), 64)
        sizes[s] = min(max(np.int64(_BLOCK / (expected[s] + ATOM_WORK)), 1), most)
        n += (counts[s] + sizes[s] - 1) // sizes[s]
    structure = np.empty(n, np.int64)
    begin = np.empty(n, np.int64)
    end = np.empty(n, np.int64)
    pairs = np.empty(n, np.int64)
    total = np.zeros(n + 1)
    b = 0
    first = 0
    for s in range(len(counts)):
        last = first + counts[s]
        for low in range(first, last, sizes[s]):
            structure[b] = s
            begin[b] = low
            end[b] = min(low + sizes[s], last)
            atoms = end[b] - low
            pairs[b] = np.int64(atoms * (1.3 * expected[s] + 16.0))
            total[b + 1] = total[b] + atoms * (expected[s] + ATOM_WORK)
            b += 1
        first = last
    return structure, begin, end, pairs, total


def targets(table: NDArray[np.int64]) -> Targets:
    """For the kernels, what :func:`aim` found."""
    return Targets(table.shape[1], np.zeros(2, np.int64), table[0], table[1], table[2], table[3], table[4])


@inner
def aim(counts: Any, structure: Any, begin: Any, end: Any, hands: int) -> Any:
    """Ranges of atoms that receive forces from blocks: a structure each, or, of a large one, a part a thread.

    Returns:
        Rows: first and last atom (exclusive), first and last place of centres (exclusive), whether that is all.
    """
    blocks = len(structure)
    atoms = end[blocks - 1] - begin[0]
    table = np.empty((5, (structure[blocks - 1] - structure[0] + 1) * hands), np.int64)
    rows = 0
    first = 0
    b = 0
    for s in range(structure[blocks - 1] + 1):
        last = first + counts[s]
        if b < blocks and structure[b] == s:
            low = begin[b]
            while b < blocks and structure[b] == s:
                b += 1
            high = end[b - 1]
            shares = hands if 2 * hands * (high - low) > atoms else 1
            for k in range(shares):
                table[0, rows] = first + counts[s] * k // shares
                table[1, rows] = first + counts[s] * (k + 1) // shares
                table[2, rows] = low
                table[3, rows] = high
                table[4, rows] = shares == 1
                rows += 1
        first = last
    return table[:, :rows].copy()


@inner
def mark_present(types: Any, n_types: int) -> Any:
    """The types that occur, ascending, and the place of each type among them (0 for the others)."""
    slots = np.zeros(n_types, np.int64)
    for i in range(len(types)):
        slots[types[i]] = 1
    present = np.empty(n_types, np.int64)
    n = 0
    for t in range(n_types):
        if slots[t]:
            present[n] = t
            slots[t] = n
            n += 1
    return present[:n], slots
