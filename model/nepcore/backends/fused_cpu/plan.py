"""How work is cut: blocks of atoms that a thread takes at a time, pieces between which others may run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .bins import FAULT, GRID, Bins, count_into_bins, wrap
from .inner import inner
from .kernels import (
    BINS,
    BLOCKS,
    DESKS,
    FIRST,
    LAST,
    MODEL,
    NEXT,
    PAIRS,
    PRESENT,
    RANGES,
    RESULTS,
    TARGETS,
    TEMPERATURES,
    WANTED,
    Blocks,
    Pairs,
    Results,
    Targets,
    Wanted,
)
from .site import Present
from .words import address_of, first_of, note, unpack

if TYPE_CHECKING:
    from numpy.typing import NDArray

ATOM_WORK = 30.0
"""What an atom costs beside its neighbours, in neighbours."""

PIECE = 0.3e6
"""Work (atoms × (neighbours + a constant)) of a piece: some tens of milliseconds on one core."""

_BLOCK = 4000.0
"""Work of a block: some hundred microseconds."""

_FEW = 1000
"""Blocks up to which a list is quicker than an array."""

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


class Plan:
    """Blocks of atoms of one structure each, consecutive in its bins, and how they are taken in pieces.

    Attributes:
        blocks: All blocks; sorted places of a structure are numbered as its atoms are.
    """

    def __init__(self, rows: NDArray[np.int64], total: NDArray[np.float64]) -> None:
        """Takes the blocks as rows, and the work up to each block, (b + 1,)."""
        self.blocks = Blocks(*rows)
        self._total = total.tolist() if len(total) < _FEW else total
        self._all = len(total) - 1

    def __len__(self) -> int:
        return self._all

    def stop(self, start: int, work: float) -> int:
        """First block behind a piece that begins with block ``start`` and has about that much work, or less.

        What is left is cut evenly: a small last piece would keep threads waiting for each other.
        """
        left = self._total[-1] - self._total[start]
        if left <= work:
            return len(self)
        share = left / math.ceil(left / work)
        return max(start + 1, int(np.searchsorted(self._total, self._total[start] + share)))

    def work(self, start: int, stop: int) -> float:
        """Work of blocks ``start`` to ``stop`` − 1."""
        return float(self._total[stop] - self._total[start])

    def make_room(self, start: int, stop: int) -> int:
        """Lay the pairs of blocks ``start`` to ``stop`` − 1 one block after the other; how many there is room for."""
        ends = np.cumsum(self.blocks.room[start:stop])
        self.blocks.start[start] = 0
        self.blocks.start[start + 1 : stop] = ends[:-1]
        return int(ends[-1])


@inner
def prepare(
    job: Any, counts: Any, numbers: Any, table: Any, positions: Any, cells: Any, pbc: Any, cutoff: float, n_types: int,
    expected: Any, wanted: Wanted,
) -> Any:  # fmt: skip
    """Note in a job what is known of some structures before the first neighbour is looked for.

    Args:
        job: Words of the job.
        counts: (B,) int64.
        numbers: Atomic numbers, (N,) uint8.
        table: Type by atomic number, (256,).
        positions: (N, 3) float64, flat.
        cells: (B, 3, 3) float64, flat.
        pbc: (B, 3) bool.
        cutoff: Å.
        n_types: Types of the model.
        expected: Neighbours per atom, (B,), see :func:`expect`.
        wanted: What is computed.

    Returns:
        Stretches of bins that one atom looks at; whether a structure is at fault; rows of the blocks; work up to each
        block; numbers of the structures in bins; and arrays that must be kept as long as the job.
    """
    B, N = len(counts), len(numbers)
    G = N if wanted.gradient else 0
    V = 9 * N if wanted.virial else 0
    W = 9 * N if wanted.virials else 0
    # Few arrays, for each is an object that costs as much as binning an atom or ten.
    real = np.zeros(10 * B + 7 * N + 6 * G + V + W)
    whole = np.zeros(3 * N + 2 * G + 2 * n_types, np.int64)
    grid = np.zeros(GRID * B, np.int64)
    short = np.zeros(3 * (N + 64), np.float32)
    order = np.zeros(N + 64, np.int32)
    full = real[: 9 * B]
    blur = real[9 * B : 10 * B]
    a = 10 * B
    wrapped = real[a : a + 3 * N]
    x = real[a + 3 * N : a + 4 * N]
    y = real[a + 4 * N : a + 5 * N]
    z = real[a + 5 * N : a + 6 * N]
    energies = real[a + 6 * N : a + 7 * N]
    a += 7 * N
    own = real[a : a + 3 * G]
    pushed = real[a + 3 * G : a + 6 * G]
    a += 6 * G
    virial = real[a : a + V]
    virials = real[a + V : a + V + W]
    types = whole[:N]
    place = whole[N : 2 * N]
    rank = whole[2 * N : 3 * N]
    a = 3 * N + 2 * G
    present = whole[a : a + n_types]
    slots = whole[a + n_types : a + 2 * n_types]
    M = N + 64
    for i in range(N):
        types[i] = table[numbers[i]]
    n_bins, runs = wrap(counts, types, positions, cells, pbc, cutoff, grid, full, wrapped, place)
    bounds = np.zeros(n_bins + B + 1, np.int64)
    bins = Bins(
        grid, full, types, wrapped, place, bounds, order, rank, x, y, z, short[:M], short[M : 2 * M],
        short[2 * M :], blur,
    )  # fmt: skip
    count_into_bins(bins)
    fault = False
    for s in range(B):
        fault = fault or grid[GRID * s + FAULT] != 0
    rows, total = cut(counts, expected)
    row = first_of(job)
    note(row, BINS, bins)
    note(row, PRESENT, Present(mark_present(types, present, slots), present, slots))
    note(row, BLOCKS, Blocks(rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], rows[6], rows[7], rows[8]))
    note(row, WANTED, wanted)
    start = whole[3 * N : 3 * N + G]
    count = whole[3 * N + G : 3 * N + 2 * G]
    note(row, RESULTS, Results(energies, own, pushed, virial, virials, start, count))
    return runs, fault, rows, total, grid, (real, whole, short, order, bounds)


@inner
def cut(counts: Any, expected: Any) -> Any:
    """Blocks of structures with that many atoms and expected neighbours an atom.

    Returns:
        The fields of :class:`Blocks` as rows, (9, b); work up to each block, (b + 1,).
    """
    sizes = np.empty(len(counts), np.int64)
    n = 0
    for s in range(len(counts)):
        # Small enough for the threads to end together, large enough for atoms of one type to come one after the other.
        most = min(max(counts[s] // 100, 8), 64)
        sizes[s] = min(max(np.int64(_BLOCK / (expected[s] + ATOM_WORK)), 1), most)
        n += (counts[s] + sizes[s] - 1) // sizes[s]
    rows = np.zeros((9, n), np.int64)
    total = np.zeros(n + 1)
    b = 0
    first = 0
    first_pair = 0
    for s in range(len(counts)):
        last = first + counts[s]
        for low in range(first, last, sizes[s]):
            high = min(low + sizes[s], last)
            pairs = np.int64((high - low) * (1.3 * expected[s] + 16.0))
            rows[0, b] = s
            rows[1, b] = low
            rows[2, b] = high
            rows[3, b] = first_pair
            rows[4, b] = pairs
            total[b + 1] = total[b] + (high - low) * (expected[s] + ATOM_WORK)
            first_pair += pairs
            b += 1
        first = last
    return rows, total


@inner
def aim(job: Any, counts: Any, start: int, stop: int, hands: int) -> Any:
    """Ranges of atoms that receive forces from blocks ``start`` to ``stop`` − 1: a structure each, or a part a thread.

    Returns:
        Their number; the fields of :class:`Targets` as rows.
    """
    blocks = unpack(first_of(job), BLOCKS, Blocks, job)
    structure = blocks.structure
    atoms = blocks.end[stop - 1] - blocks.begin[start]
    rows = np.empty((5, (structure[stop - 1] - structure[start] + 1) * hands), np.int64)
    n = 0
    first = 0
    b = start
    for s in range(structure[stop - 1] + 1):
        last = first + counts[s]
        if b < stop and structure[b] == s:
            low = blocks.begin[b]
            while b < stop and structure[b] == s:
                b += 1
            high = blocks.end[b - 1]
            shares = hands if 2 * hands * (high - low) > atoms else 1
            for k in range(shares):
                rows[0, n] = first + counts[s] * k // shares
                rows[1, n] = first + counts[s] * (k + 1) // shares
                rows[2, n] = low
                rows[3, n] = high
                rows[4, n] = shares == 1
                n += 1
        first = last
    return n, rows


@inner
def publish(
    job: Any, counts: Any, start: int, stop: int, hands: int, pairs: Pairs, temperatures: Any, model: Any, desks: Any
) -> Any:  # fmt: skip
    """Make a job of the blocks ``start`` to ``stop`` − 1 of prepared structures.

    Args:
        job: Words of the job.
        counts: Atoms of the structures.
        start: First block.
        stop: Block after the last.
        hands: Into how many parts to cut the adding of forces; 0 if none are wanted.
        pairs: Room for pairs and descriptors.
        temperatures: (B,), in the compute dtype.
        model: The model's words.
        desks: Addresses of the desks' words.

    Returns:
        An array that must be kept as long as the job.
    """
    ranges = 0
    rows = np.empty((5, 0), np.int64)
    if hands > 0:
        ranges, rows = aim(job, counts, start, stop, hands)
    row = first_of(job)
    for k in range(BLOCKS):
        job[k] = 0
    job[NEXT] = start
    job[FIRST] = start
    job[LAST] = stop
    job[RANGES] = ranges
    job[TEMPERATURES] = address_of(temperatures)
    job[MODEL] = address_of(model)
    job[DESKS] = address_of(desks)
    note(row, TARGETS, Targets(rows[0], rows[1], rows[2], rows[3], rows[4]))
    note(row, PAIRS, pairs)
    return rows


@inner
def mark_present(types: Any, present: Any, slots: Any) -> int:
    """Note the types that occur, ascending, and the place of each type among them (0 for the others), (T,) each.

    Returns:
        How many occur.
    """
    for i in range(len(types)):
        slots[types[i]] = 1
    n = 0
    for t in range(len(slots)):
        if slots[t]:
            present[n] = t
            slots[t] = n
            n += 1
    return n
