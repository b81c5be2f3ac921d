"""Atoms sorted into bins: any cell, any mix of periodic directions.

A non-periodic direction is replaced by a unit vector across the periodic ones and spans the extent of the atoms. Bins
of a periodic direction wrap round as often as the cutoff asks, so that a thin cell is no special case. Positions are
wrapped in float64.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .inner import inner

if TYPE_CHECKING:
    from .words import Doubles, Ints, Ints32, Singles

_SLACK = 1e-6
"""Share of a bin by which coordinates may be wrong from rounding."""

_FINE = 4
"""Bins per cutoff in the direction in which an atom looks at a stretch of bins as a whole."""

_FAR = 1e12
"""No coordinate or cell that is let in comes near this, Å."""

_MOST_BINS = 1e6
"""Bins in reach of one atom above which a cell is too thin to be meant."""

ATOMS, SHAPE, REACH, PERIODIC, FIRST, FIRST_BIN, FAULT, GRID = 0, 1, 4, 7, 10, 11, 12, 13
"""Where a structure's numbers stand in its row of ``Bins.grid``, and the length of a row."""

FAULTS = (
    ("non_finite", "positions", "positions: there are numbers that are not finite or far too large"),
    ("singular_cell", "cell", "cell: the vectors of the periodic directions are zero or not independent"),
    ("too_dense", "cell", "cell: it is so thin that its images cannot be counted"),
    ("unknown_element", "numbers", "numbers: there is an element that the model does not know"),
)
"""What ``FAULT`` counts from 1: code, field, reason. The model's admission says the same in more detail, earlier."""


class Bins(NamedTuple):
    """Atoms of several structures sorted into bins. Atoms keep their order within a bin."""

    grid: Ints  # (B, GRID)
    cells: Doubles  # (B, 9): vectors, non-periodic ones replaced
    types: Ints  # (N,)
    positions: Doubles  # (N, 3), wrapped
    place: Ints  # (N,): bin within its structure
    bounds: Ints  # where each bin starts in the sorted arrays; structure s begins at its first bin plus s
    order: Ints32  # (N + padding,): atom of each sorted place
    rank: Ints  # (N,): sorted place of each atom
    x: Doubles  # (N,): wrapped positions by sorted place
    y: Doubles
    z: Doubles
    fx: Singles  # (N + padding,): the same, relative to the first atom of each structure
    fy: Singles
    fz: Singles
    blur: Doubles  # (B,): by how much a float32 distance may be wrong, Å


@inner
def _complete(cell: Any, pbc: Any) -> None:
    """Replace the vectors of non-periodic directions by unit vectors across the others; (9,) and (3,)."""
    periodic = int(pbc[0]) + int(pbc[1]) + int(pbc[2])
    if periodic == 0:
        for k in range(9):
            cell[k] = 1.0 if k % 4 == 0 else 0.0
    for d in range(3):
        a, b = 3 * ((d + 1) % 3), 3 * ((d + 2) % 3)
        if periodic == 2 and not pbc[d]:
            _cross(cell, a, b, 3 * d)
        elif periodic == 1 and pbc[d]:
            # Across the one vector: start from the axis least along it.
            least = 0
            for k in range(1, 3):
                if abs(cell[3 * d + k]) < abs(cell[3 * d + least]):
                    least = k
            for k in range(3):
                cell[b + k] = 1.0 if k == least else 0.0
            _cross(cell, 3 * d, b, a)
            _cross(cell, 3 * d, a, b)


@inner
def _cross(cell: Any, a: int, b: int, out: int) -> None:
    """Unit vector along the product of the vectors at ``a`` and ``b``."""
    scale = _length(cell[a], cell[a + 1], cell[a + 2]) * _length(cell[b], cell[b + 1], cell[b + 2])
    x = (cell[a + 1] * cell[b + 2] - cell[a + 2] * cell[b + 1]) / scale
    y = (cell[a + 2] * cell[b] - cell[a] * cell[b + 2]) / scale
    z = (cell[a] * cell[b + 1] - cell[a + 1] * cell[b]) / scale
    length = _length(x, y, z)
    cell[out] = x / length
    cell[out + 1] = y / length
    cell[out + 2] = z / length


@inner
def _length(x: float, y: float, z: float) -> float:
    return math.sqrt(x * x + y * y + z * z)


@inner
def _invert(cell: Any, inverse: Any) -> None:
    """Reciprocal vectors of a cell as rows, (9,): fractional coordinate d is their row d times the position."""
    for d in range(3):
        a, b = 3 * ((d + 1) % 3), 3 * ((d + 2) % 3)
        for k in range(3):
            p, q = (k + 1) % 3, (k + 2) % 3
            inverse[3 * d + k] = cell[a + p] * cell[b + q] - cell[a + q] * cell[b + p]
    volume = cell[0] * inverse[0] + cell[1] * inverse[1] + cell[2] * inverse[2]
    for k in range(9):
        inverse[k] /= volume


@inner
def wrap(
    counts: Any, types: Any, positions: Any, cells: Any, pbc: Any, cutoff: float, grid: Any, full: Any, wrapped: Any,
    place: Any,
) -> tuple[int, int]:  # fmt: skip
    """Fill grid, cells, wrapped positions and bins of atoms.

    Returns:
        The number of bins of all structures; the largest number of stretches of bins that one atom looks at.
    """
    inverse = np.empty(9)
    cell = np.empty(9)
    low = np.empty(3)
    height = np.empty(3)
    first = 0
    first_bin = 0
    runs = 0
    for s in range(len(counts)):
        n = counts[s]
        row = grid[GRID * s : GRID * s + GRID]
        for k in range(9):
            cell[k] = cells[9 * s + k]
        _complete(cell, pbc[s])
        _invert(cell, inverse)
        for k in range(9):
            full[9 * s + k] = cell[k]
        for d in range(3):
            height[d] = 1.0 / _length(inverse[3 * d], inverse[3 * d + 1], inverse[3 * d + 2])
        fault = _fault(types, positions, first, first + n, height)
        for k in range(3 * first, 3 * (first + n)):
            # Not a number is nobody's neighbour.
            wrapped[k] = positions[k] if fault == 0 else math.nan
        for d in range(3):
            low[d] = 0.0
            if fault != 0:
                height[d] = 0.0
            elif pbc[s, d]:
                _into_cell(wrapped, first, first + n, inverse, cell, d)
            else:
                low[d] = math.inf
                high = -math.inf
                for i in range(first, first + n):
                    u = _along(wrapped, i, inverse, d)
                    low[d] = min(low[d], u)
                    high = max(high, u)
                height[d] = max(high - low[d], 0.0)
        if fault == 0 and not _choose_shape(row, n, height, pbc[s], cutoff):
            fault = 3
            for k in range(3 * first, 3 * (first + n)):
                wrapped[k] = math.nan
        if fault != 0:
            for k in range(GRID):
                row[k] = SHAPE <= k < SHAPE + 3
        row[ATOMS] = n
        row[FIRST] = first
        row[FIRST_BIN] = first_bin
        row[FAULT] = fault
        for i in range(first, first + n):
            number = 0
            for d in range(3):
                bins = row[SHAPE + d]
                u = _along(wrapped, i, inverse, d) - low[d]
                if row[PERIODIC + d] == 0:
                    u = u / height[d] if height[d] > 0.0 else 0.0
                # Not a number must not become an index: it fails the comparison.
                number = number * bins + (min(int(u * bins), bins - 1) if 0.0 < u < 2.0 else 0)
            place[i] = number
        first += n
        first_bin += row[SHAPE] * row[SHAPE + 1] * row[SHAPE + 2]
        stretches = 2 * row[REACH + 2] // row[SHAPE + 2] + 2
        runs = max(runs, (2 * row[REACH] + 1) * (2 * row[REACH + 1] + 1) * stretches)
    return first_bin, runs


@inner
def _fault(types: Any, positions: Any, first: int, last: int, height: Any) -> int:
    """What is wrong with a structure, as :data:`FAULTS` counts; 0 if nothing is."""
    fault = 0
    for d in range(3):
        if not 0.0 < height[d] < _FAR:
            fault = 2
    for k in range(3 * first, 3 * last):
        if not abs(positions[k]) < _FAR:
            fault = 1
    for i in range(first, last):
        if types[i] < 0:
            types[i] = 0
            fault = 4
    return fault


@inner
def _into_cell(wrapped: Any, first: int, last: int, inverse: Any, cell: Any, d: int) -> None:
    """Move atoms by whole vectors of direction d into the cell."""
    # Twice: after the first pass a coordinate far outside is only as good as its rounding.
    moved = True
    for _ in range(2):
        if not moved:
            break
        moved = False
        for i in range(first, last):
            turn = math.floor(_along(wrapped, i, inverse, d))
            if turn != 0.0:
                moved = True
                for k in range(3):
                    wrapped[3 * i + k] -= turn * cell[3 * d + k]


@inner
def _along(positions: Any, i: int, inverse: Any, d: int) -> float:
    """Fractional coordinate of atom i in direction d."""
    return (
        positions[3 * i] * inverse[3 * d]
        + positions[3 * i + 1] * inverse[3 * d + 1]
        + positions[3 * i + 2] * inverse[3 * d + 2]
    )


@inner
def _choose_shape(row: Any, n: int, height: Any, pbc: Any, cutoff: float) -> bool:
    """Bins as wide as the cutoff, narrower in the direction of the stretches, but not many more than atoms.

    Returns:
        Whether the bins in reach can be counted.
    """
    shape = np.empty(3)
    for d in range(3):
        width = cutoff / _FINE if d == 2 else cutoff
        shape[d] = max(1.0, math.floor(height[d] / (width * (1.0 + 2.0 * _SLACK))))
    limit = max(64.0, 4.0 * n)
    while shape[0] * shape[1] * shape[2] > limit:
        widest = 0
        for d in range(1, 3):
            if shape[d] > shape[widest]:
                widest = d
        excess = shape[0] * shape[1] * shape[2] / limit
        shape[widest] = max(1.0, math.floor(shape[widest] / min(excess, 2.0)))
    visits = 1.0
    for d in range(3):
        reach = 0.0
        if pbc[d] or shape[d] > 1.0:
            reach = math.ceil(cutoff * shape[d] / height[d] + _SLACK)
        if not pbc[d]:
            reach = min(reach, shape[d] - 1.0)
        visits *= 2.0 * reach + 1.0
        if not visits < _MOST_BINS:
            return False
        row[SHAPE + d] = int(shape[d])
        row[REACH + d] = int(reach)
        row[PERIODIC + d] = pbc[d]
    return True


@inner
def count_into_bins(bins: Bins) -> None:
    """Counting sort of the atoms by bin; stable."""
    bounds = bins.bounds
    wrapped = bins.positions
    full = bins.cells
    for s in range(len(bins.blur)):
        row = bins.grid[GRID * s : GRID * s + GRID]
        first = row[FIRST]
        n = row[ATOMS]
        begin = row[FIRST_BIN] + s
        end = begin + row[SHAPE] * row[SHAPE + 1] * row[SHAPE + 2]
        for i in range(first, first + n):
            bounds[begin + bins.place[i] + 1] += 1
        bounds[begin] = first
        for b in range(begin, end):
            bounds[b + 1] += bounds[b]
        # Filling moves each start to its end; shifted back below.
        largest = 0.0
        for i in range(first, first + n):
            at = bounds[begin + bins.place[i]]
            bounds[begin + bins.place[i]] = at + 1
            bins.order[at] = i
            bins.rank[i] = at
            bins.x[at] = wrapped[3 * i]
            bins.y[at] = wrapped[3 * i + 1]
            bins.z[at] = wrapped[3 * i + 2]
            dx = wrapped[3 * i] - wrapped[3 * first]
            dy = wrapped[3 * i + 1] - wrapped[3 * first + 1]
            dz = wrapped[3 * i + 2] - wrapped[3 * first + 2]
            bins.fx[at] = dx
            bins.fy[at] = dy
            bins.fz[at] = dz
            largest = max(largest, abs(dx), abs(dy), abs(dz))
        for b in range(end, begin, -1):
            bounds[b] = bounds[b - 1]
        bounds[begin] = first
        row[FIRST_BIN] = begin
        for d in range(3):
            # The largest shift: as many images as the reach asks for.
            images = row[PERIODIC + d] * (row[REACH + d] // row[SHAPE + d] + 1)
            largest += images * (abs(full[9 * s + 3 * d]) + abs(full[9 * s + 3 * d + 1]) + abs(full[9 * s + 3 * d + 2]))
        bins.blur[s] = 16.0 * 2.0**-24 * largest
