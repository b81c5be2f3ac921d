"""The neighbours of one atom.

An edge is (x_j − x_i) + shift in float64, so that both of its ends see the same bits. Which atoms are looked at more
closely is decided in float32, sixteen at a time.

The neighbours of an atom come in an order that depends on its structure alone: by atom, then by image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba.np.numpy_support import carray

from .bins import ATOMS, FIRST, FIRST_BIN, GRID, PERIODIC, REACH, SHAPE
from .inner import inner
from .lanes import and_less, but_lane, count_lanes, first_lanes, store_numbers
from .model import aligned
from .simd import fill, fma, load, spread, store, where_less

if TYPE_CHECKING:
    from .bins import Bins
    from .vec import Width
    from .words import Doubles, Ints, Ints32

COINCIDENT = 1e-5
"""Atoms closer than this, Å, count as being at one place: no model was made for it, and 1/r² overflows float32."""

_SMALL_SORT = 512
"""Up to so many neighbours are sorted by counting, for each, those before it."""


_KEYS = (0,) * 16
"""Lanes of the sort."""


class Found(NamedTuple):
    """Room for the search of one atom, for ``size`` neighbours."""

    size: int
    near: Ints32  # (size + 64,): sorted places about within reach
    run: Ints32  # (size + 64,): stretch of bins in which each was found
    shift: Doubles  # (room, 3): shift of each stretch
    key: Ints32  # (size + 64,)
    rank: Ints32  # (size + 64,)
    big: Ints  # (size,): keys of the sort of many
    sorted: Ints  # (size,): the neighbours in their order


def room(size: int, runs: int) -> Found:
    """Arrays for up to ``size`` neighbours and ``runs`` stretches of bins."""
    return Found(
        size, aligned(size + 64, "int32"), aligned(size + 64, "int32"), aligned(3 * runs + 64, "float64"),
        aligned(size + 64, "int32"), aligned(size + 64, "int32"), aligned(size + 64, "int64"),
        aligned(size + 64, "int64"),
    )  # fmt: skip


@inner
def find(bins: Bins, s: int, i: int, cutoff: float, found: Found, lanes: Width) -> int:
    """Find the neighbours of atom i within a cutoff; without the atom itself, with its images.

    Fills ``near``, ``run``, ``shift`` of ``found``, and ``sorted`` with their places there in the order of the
    neighbours. Distances are those of float32 coordinates: neighbours a little farther away may be among them.

    Returns:
        Their number. If it exceeds the room, only so many were noted.
    """
    base = GRID * s
    cell = 9 * s
    begin = bins.grid[base + FIRST_BIN]
    nx, ny, nz = bins.grid[base + SHAPE], bins.grid[base + SHAPE + 1], bins.grid[base + SHAPE + 2]
    number = bins.place[i]
    bz = number % nz
    number //= nz
    px, mx, sx = _window(number // ny, nx, bins.grid[base + REACH], bins.grid[base + PERIODIC])
    py0, my, sy0 = _window(number % ny, ny, bins.grid[base + REACH + 1], bins.grid[base + PERIODIC + 1])
    pz0, mz, sz0 = _window(bz, nz, bins.grid[base + REACH + 2], bins.grid[base + PERIODIC + 2])
    limit = np.float32((cutoff + bins.blur[s]) ** 2 * (1.0 + 1e-6))
    own = bins.rank[i]
    x = bins.fx[own]
    y = bins.fy[own]
    z = bins.fz[own]
    n = 0
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
                    itself = own if sx == 0 and sy == 0 and sz == 0 else -1
                    n = _within(bins, x, y, z, itself, limit, found, first, last, run, n, lanes)
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
    if n <= found.size:
        _order(found, bins.order, n, bins.grid[base + FIRST], bins.grid[base + ATOMS])
    return n


@inner
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


@inner
def _within(
    bins: Bins, x: float, y: float, z: float, itself: int, limit: float, found: Found, first: int, last: int,
    run: int, n: int, lanes: Width,
) -> int:  # fmt: skip
    """Note which of the sorted places ``first`` to ``last`` − 1, shifted, are about within reach of (x, y, z).

    Returns:
        n and their number.
    """
    sx = np.float32(found.shift[3 * run])
    sy = np.float32(found.shift[3 * run + 1])
    sz = np.float32(found.shift[3 * run + 2])
    label = fill(np.int32(run), lanes)
    for c in range(first, last, len(lanes)):
        dx = (load(bins.fx, c, lanes) - x) + sx
        dy = (load(bins.fy, c, lanes) - y) + sy
        dz = (load(bins.fz, c, lanes) - z) + sz
        near = and_less(first_lanes(last - c, dx), fma(dx, dx, fma(dy, dy, dz * dz)), limit)
        near = but_lane(near, itself - c)
        # What does not fit is counted only.
        at = min(n, found.size)
        store_numbers(found.near, at, c, near)
        store(found.run, at, label)
        n += count_lanes(near)
    return n


@inner
def _order(found: Found, atom: Any, n: int, first: int, atoms: int) -> None:
    """``sorted``: the neighbours by atom, those with one atom as they come. Atoms count from ``first``."""
    key = found.key
    bits = 0
    while 1 << bits < n:
        bits += 1
    if n > _SMALL_SORT or atoms << bits >= 1 << 31:
        big = carray(found.big, n)
        for h in range(n):
            big[h] = (np.int64(atom[found.near[h]]) << 32) | h
        big.sort()
        for h in range(n):
            found.sorted[h] = big[h] & 0xFFFFFFFF
        return
    rank = found.rank
    for h in range(n):
        key[h] = ((atom[found.near[h]] - first) << bits) | h
    for a in range(0, n, len(_KEYS)):
        mine = load(key, a, _KEYS)
        before = mine - mine
        for b in range(n):
            before = where_less(spread(key, b, _KEYS), mine, before + 1, before)
        store(rank, a, before)
    for h in range(n):
        found.sorted[rank[h]] = h
