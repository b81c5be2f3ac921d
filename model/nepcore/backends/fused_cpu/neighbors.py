"""Neighbour search: atoms sorted into bins, one atom's neighbours at a time.

Any cell and any mix of periodic directions: a non-periodic direction is replaced by a unit vector across the periodic
ones and spans the extent of the atoms; bins of a periodic direction wrap round as often as the cutoff asks. Positions
are wrapped and differences formed in float64. An edge is (x_j − x_i) + shift, so that both ends see the same bits.

The neighbours of an atom come in an order that depends on its structure alone: by atom, then by image.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from .simd import Width, load, spread, store, where_less

COINCIDENT = 1e-5
"""Atoms closer than this, Å, count as being at one place: no model was made for it, and 1/r² overflows float32."""

_SLACK = 1e-6
"""Share of a bin by which coordinates may be wrong from rounding."""

_SMALL_SORT = 160
"""Up to so many neighbours are sorted by counting, for each, those before it."""

# Fields of a structure in ``Bins.grid``: atoms, bins, reach and periodicity in three directions, first atom, first bin.
_ATOMS, _SHAPE, _REACH, _PERIODIC, _FIRST, _FIRST_BIN, GRID = 0, 1, 4, 7, 10, 11, 12

_STRETCH = 128
"""Candidates whose distances are held at a time."""

_KEYS = (0,) * 16
"""Lanes of the sort."""


class Bins(NamedTuple):
    """Atoms of several structures sorted into bins. Atoms keep their order within a bin."""

    grid: Any  # int64, (B, GRID)
    cells: Any  # float64, (B, 9): vectors, non-periodic ones replaced
    types: Any  # int64, (N,)
    positions: Any  # float64, (N, 3), wrapped
    place: Any  # int64, (N,): bin within its structure
    bounds: Any  # int64, where each bin starts in the sorted arrays
    order: Any  # int64, (N,): atom of each sorted place, numbered in the block
    x: Any  # float64, (N + padding,): wrapped positions by sorted place
    y: Any
    z: Any


class Found(NamedTuple):
    """Room for the search of one atom: ``size`` neighbours, ``runs`` stretches of bins."""

    near: Any  # int64, (size + 64,): sorted places within reach
    run: Any  # int64, (size + 64,): stretch in which each was found
    key: Any  # int32, (size + 64,)
    rank: Any  # int32, (size + 64,)
    big: Any  # int64, (size,): keys of the sort of many
    sorted: Any  # int64, (size,)
    shift: Any  # float64, (runs, 3)
    square: Any  # float64, (_STRETCH + 64,)


def room(size: int, runs: int) -> Found:
    """Arrays for up to ``size`` neighbours and ``runs`` stretches of bins."""
    return Found(
        np.empty(size + 64, np.int64), np.empty(size + 64, np.int64), np.zeros(size + 64, np.int32),
        np.zeros(size + 64, np.int32), np.empty(size + 1, np.int64), np.empty(size + 1, np.int64),
        np.empty(3 * runs), np.empty(_STRETCH + 64),
    )  # fmt: skip


def sort_into_bins(counts: Any, types: Any, positions: Any, cells: Any, pbc: Any, cutoff: float) -> Bins:
    """Wrap and sort the atoms of some structures.

    Args:
        counts: (B,) int64.
        types: (N,) int64.
        positions: (N, 3) float64, finite.
        cells: (B, 3, 3) float64; vectors of periodic directions independent.
        pbc: (B, 3) bool.
        cutoff: Å.
    """
    B, N = len(counts), len(types)
    grid = np.zeros((B, GRID), np.int64)
    full = np.zeros((B, 9))
    wrapped = np.empty(3 * N)
    place = np.empty(N, np.int64)
    bins = int(_wrap(counts, positions.reshape(-1), cells.reshape(-1), pbc, cutoff, grid, full, wrapped, place))
    bounds = np.zeros(bins + B + 1, np.int64)
    order = np.empty(N, np.int64)
    x, y, z = np.zeros(N + 64), np.zeros(N + 64), np.zeros(N + 64)
    _count_into_bins(grid, wrapped, place, bounds, order, x, y, z)
    return Bins(grid.reshape(-1), full.reshape(-1), types, wrapped, place, bounds, order, x, y, z)


def most_runs(bins: Bins) -> int:
    """Largest number of stretches of bins that one atom looks at."""
    grid = bins.grid.reshape(-1, GRID)
    reach, shape = grid[:, _REACH : _REACH + 3], grid[:, _SHAPE : _SHAPE + 3]
    rows = (2 * reach[:, 0] + 1) * (2 * reach[:, 1] + 1)
    return int((rows * (2 * reach[:, 2] // shape[:, 2] + 2)).max()) if len(grid) else 0


@njit(error_model="numpy")
def _complete(cell: Any, pbc: Any) -> None:
    """Replace the vectors of non-periodic directions by unit vectors across the others."""
    periodic = pbc[0] + pbc[1] + pbc[2]
    if periodic == 3:
        return
    if periodic == 0:
        cell[:] = 0.0
        cell[0, 0] = cell[1, 1] = cell[2, 2] = 1.0
        return
    for d in range(3):
        a, b = (d + 1) % 3, (d + 2) % 3
        if periodic == 2 and not pbc[d]:
            _cross(cell[a], cell[b], cell[d])
        elif periodic == 1 and pbc[d]:
            # Across the one vector: start from the axis least along it.
            axis = np.zeros(3)
            axis[np.argmin(np.abs(cell[d]))] = 1.0
            _cross(cell[d], axis, cell[a])
            _cross(cell[d], cell[a], cell[b])


@njit(error_model="numpy")
def _cross(a: Any, b: Any, out: Any) -> None:
    """Unit vector along a × b."""
    la, lb = math.sqrt((a * a).sum()), math.sqrt((b * b).sum())
    for k in range(3):
        p, q = (k + 1) % 3, (k + 2) % 3
        out[k] = (a[p] / la) * (b[q] / lb) - (a[q] / la) * (b[p] / lb)
    out /= math.sqrt((out * out).sum())


@njit(error_model="numpy")
def _invert(cell: Any, inverse: Any) -> None:
    """Inverse of a cell with vectors as rows; columns of the inverse are the reciprocal vectors."""
    for d in range(3):
        a, b = (d + 1) % 3, (d + 2) % 3
        for k in range(3):
            p, q = (k + 1) % 3, (k + 2) % 3
            inverse[k, d] = cell[a, p] * cell[b, q] - cell[a, q] * cell[b, p]
    volume = (cell[0] * inverse[:, 0]).sum()
    inverse /= volume


@njit(error_model="numpy")
def _wrap(
    counts: Any, positions: Any, cells: Any, pbc: Any, cutoff: float, grid: Any, full: Any, wrapped: Any, place: Any
) -> int:
    """Fill grid, cells, wrapped positions and bins; the number of bins of all structures."""
    inverse = np.empty((3, 3))
    cell = np.empty((3, 3))
    low = np.empty(3)
    height = np.empty(3)
    first = 0
    first_bin = 0
    for s in range(len(counts)):
        n = counts[s]
        for d in range(9):
            cell[d // 3, d % 3] = cells[9 * s + d]
        _complete(cell, pbc[s])
        _invert(cell, inverse)
        for d in range(9):
            full[s, d] = cell[d // 3, d % 3]
        for d in range(3):
            height[d] = 1.0 / math.sqrt((inverse[:, d] ** 2).sum())
            low[d] = 0.0
        for i in range(first, first + n):
            for k in range(3):
                wrapped[3 * i + k] = positions[3 * i + k]
        for d in range(3):
            if pbc[s, d]:
                # Twice: after the first pass a coordinate far outside is only as good as its rounding.
                for _ in range(2):
                    for i in range(first, first + n):
                        turn = math.floor(_along(wrapped, i, inverse, d))
                        if turn != 0.0:
                            for k in range(3):
                                wrapped[3 * i + k] -= turn * cell[d, k]
            else:
                low[d] = math.inf
                high = -math.inf
                for i in range(first, first + n):
                    u = _along(wrapped, i, inverse, d)
                    low[d] = min(low[d], u)
                    high = max(high, u)
                height[d] = max(high - low[d], 0.0) if n else 0.0
        _choose_shape(grid[s], n, height, pbc[s], cutoff)
        grid[s, _ATOMS] = n
        grid[s, _FIRST] = first
        grid[s, _FIRST_BIN] = first_bin
        shape = grid[s, _SHAPE : _SHAPE + 3]
        for i in range(first, first + n):
            number = 0
            for d in range(3):
                u = _along(wrapped, i, inverse, d) - low[d]
                if not pbc[s, d]:
                    u = u / height[d] if height[d] > 0 else 0.0
                b = u * shape[d]
                # Not ``int(b)`` at once: what is not a number must not become an index.
                number = number * shape[d] + (min(int(b), shape[d] - 1) if b > 0 and b < 1e15 else 0)  # noqa: PLR1716
            place[i] = number
        first += n
        first_bin += shape[0] * shape[1] * shape[2]
    return first_bin


@njit(error_model="numpy")
def _along(positions: Any, i: int, inverse: Any, d: int) -> float:
    """Fractional coordinate of atom i in direction d."""
    return (
        positions[3 * i] * inverse[0, d] + positions[3 * i + 1] * inverse[1, d] + positions[3 * i + 2] * inverse[2, d]
    )


@njit(error_model="numpy")
def _choose_shape(grid: Any, n: int, height: Any, pbc: Any, cutoff: float) -> None:
    """Bins as wide as the cutoff, but not many more of them than atoms."""
    shape = np.empty(3)
    for d in range(3):
        shape[d] = max(1.0, math.floor(height[d] / (cutoff * (1.0 + 2.0 * _SLACK))))
    limit = max(27.0, 2.0 * n)
    while shape[0] * shape[1] * shape[2] > limit:
        widest = np.argmax(shape)
        excess = shape[0] * shape[1] * shape[2] / limit
        shape[widest] = max(1.0, math.floor(shape[widest] / min(excess, 2.0)))
    for d in range(3):
        bins = int(shape[d])
        grid[_SHAPE + d] = bins
        reach = 0
        if pbc[d]:
            reach = int(math.ceil(cutoff * shape[d] / height[d] + _SLACK))
        elif bins > 1:
            reach = min(bins - 1, int(math.ceil(cutoff * shape[d] / height[d] + _SLACK)))
        grid[_REACH + d] = reach
        grid[_PERIODIC + d] = pbc[d]


@njit(error_model="numpy")
def _count_into_bins(
    grid: Any, wrapped: Any, place: Any, bounds: Any, order: Any, x: Any, y: Any, z: Any
) -> None:  # fmt: skip
    """Counting sort of the atoms by bin; stable. ``bounds`` of structure s begin at its first bin plus s."""
    for s in range(len(grid)):
        first = grid[s, _FIRST]
        n = grid[s, _ATOMS]
        bins = grid[s, _SHAPE] * grid[s, _SHAPE + 1] * grid[s, _SHAPE + 2]
        begin = grid[s, _FIRST_BIN] + s
        for i in range(first, first + n):
            bounds[begin + place[i] + 1] += 1
        bounds[begin] = first
        for b in range(begin, begin + bins):
            bounds[b + 1] += bounds[b]
        # Filling moves each start to its end; shifted back below.
        for i in range(first, first + n):
            at = bounds[begin + place[i]]
            bounds[begin + place[i]] = at + 1
            order[at] = i
            x[at] = wrapped[3 * i]
            y[at] = wrapped[3 * i + 1]
            z[at] = wrapped[3 * i + 2]
        for b in range(begin + bins, begin, -1):
            bounds[b] = bounds[b - 1]
        bounds[begin] = first
        grid[s, _FIRST_BIN] = begin


@njit(error_model="numpy")
def find(bins: Bins, s: int, i: int, squared: float, found: Found, lanes: Width) -> int:
    """Find the neighbours of atom i within a squared distance; without the atom itself, with its images.

    Fills ``near``, ``run``, ``shift`` of ``found``, and ``sorted`` with their positions there in the order of the
    neighbours.

    Returns:
        Their number; if they do not fit into ``found``, minus the room that would do.
    """
    base = GRID * s
    cell = 9 * s
    begin = bins.grid[base + _FIRST_BIN]
    nx, ny, nz = bins.grid[base + _SHAPE], bins.grid[base + _SHAPE + 1], bins.grid[base + _SHAPE + 2]
    number = bins.place[i]
    bz = number % nz
    number //= nz
    px, mx, sx = _window(number // ny, nx, bins.grid[base + _REACH], bins.grid[base + _PERIODIC])
    py0, my, sy0 = _window(number % ny, ny, bins.grid[base + _REACH + 1], bins.grid[base + _PERIODIC + 1])
    pz0, mz, sz0 = _window(bz, nz, bins.grid[base + _REACH + 2], bins.grid[base + _PERIODIC + 2])
    n = 0
    missed = 0
    run = 0
    for _ in range(mx):
        py = py0
        sy = sy0
        for _ in range(my):
            row = begin + (px * ny + py) * nz
            pz = pz0
            sz = sz0
            left = mz
            while left > 0:
                take = min(left, nz - pz)
                first = bins.bounds[row + pz]
                last = bins.bounds[row + pz + take]
                if last > first:
                    for k in range(3):
                        found.shift[3 * run + k] = (
                            sx * bins.cells[cell + k] + sy * bins.cells[cell + 3 + k] + sz * bins.cells[cell + 6 + k]
                        )
                    n, missed = _within(bins, i, squared, found, first, last, run, n, missed, lanes)
                    run += 1
                left -= take
                pz = 0
                sz += 1
            py += 1
            if py == ny:
                py = 0
                sy += 1
        px += 1
        if px == nx:
            px = 0
            sx += 1
    if missed > 0:
        return -(n + missed)
    # Only now: the atom itself, one of those at distance zero.
    kept = 0
    for h in range(n):
        c = found.near[h]
        j = bins.order[c]
        t = 3 * found.run[h]
        if j != i or found.shift[t] != 0.0 or found.shift[t + 1] != 0.0 or found.shift[t + 2] != 0.0:
            found.near[kept] = c
            found.run[kept] = found.run[h]
            found.key[kept] = j - bins.grid[base + _FIRST]
            kept += 1
    _order(found, kept, bins.grid[base + _ATOMS])
    return kept


@njit(error_model="numpy")
def _window(at: int, bins: int, reach: int, periodic: int) -> tuple[int, int, int]:
    """First bin in reach of bin ``at``, how many are, and the image in which the first lies."""
    if periodic == 0:
        low = max(0, at - reach)
        return low, min(bins - 1, at + reach) - low + 1, 0
    low = at - reach
    image = 0
    if low < 0:
        image = -((bins - 1 - low) // bins)
        low -= image * bins
    return low, 2 * reach + 1, image


@njit(error_model="numpy")
def _within(
    bins: Bins, i: int, squared: float, found: Found, first: int, last: int, run: int, n: int, missed: int, lanes: Width
) -> tuple[int, int]:
    """Note which of the sorted places ``first`` to ``last`` − 1 are within reach."""
    x = bins.positions[3 * i]
    y = bins.positions[3 * i + 1]
    z = bins.positions[3 * i + 2]
    sx = found.shift[3 * run]
    sy = found.shift[3 * run + 1]
    sz = found.shift[3 * run + 2]
    square = found.square
    near = found.near
    runs = found.run
    room = len(found.sorted)
    for start in range(first, last, _STRETCH):
        stop = min(last, start + _STRETCH)
        for c in range(start, stop, len(lanes)):
            dx = (load(bins.x, c, lanes) - x) + sx
            dy = (load(bins.y, c, lanes) - y) + sy
            dz = (load(bins.z, c, lanes) - z) + sz
            store(square, c - start, dx * dx + dy * dy + dz * dz)
        if n + stop - start <= room and missed == 0:
            for c in range(start, stop):
                near[n] = c
                runs[n] = run
                n += square[c - start] < squared
        else:
            for c in range(start, stop):
                missed += square[c - start] < squared
            missed += _STRETCH
    return n, missed


@njit(error_model="numpy")
def _order(found: Found, n: int, atoms: int) -> None:
    """``sorted``: the neighbours by ``key``, those with one key as they come."""
    key = found.key
    bits = 0
    while 1 << bits < n:
        bits += 1
    if n > _SMALL_SORT or atoms << bits >= 1 << 31:
        for h in range(n):
            found.big[h] = (np.int64(key[h]) << 32) | h
        found.big[:n].sort()
        for h in range(n):
            found.sorted[h] = found.big[h] & 0xFFFFFFFF
        return
    rank = found.rank
    for h in range(n):
        key[h] = (key[h] << bits) | h
    for a in range(0, n, len(_KEYS)):
        mine = load(key, a, _KEYS)
        before = mine - mine
        for b in range(n):
            before = where_less(spread(key, b, _KEYS), mine, before + 1, before)
        store(rank, a, before)
    for h in range(n):
        found.sorted[rank[h]] = h
