"""Kernels of the neighbour search in one large structure: bins, a list with a skin, and the exact lists of a step.

Atoms are sorted into bins; the list of all pairs within cutoff and skin is made once in many steps. At every step one
kernel rounds the new positions and notes whether an atom moved further than half the skin, another picks the pairs that
are in range now: sums never see the skin, and results do not depend on when the list was made.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cells import step
from .search import position


@triton.jit(do_not_specialize=["N"])
def refresh(
    positions, order, element, frame, scaled, reference, rows, moved, N, limit_square,
    CHECK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows from the caller's positions in the order of the bins; with CHECK, ``moved`` is set by one beyond limit."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = k < N
    i = tl.load(order + k, mask=there, other=0).to(tl.int64)
    x = tl.load(positions + 3 * i, mask=there, other=0.0)
    y = tl.load(positions + 3 * i + 1, mask=there, other=0.0)
    z = tl.load(positions + 3 * i + 2, mask=there, other=0.0)
    fx = tl.zeros([BLOCK], tl.float32)
    fy = tl.zeros([BLOCK], tl.float32)
    fz = tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(3):
        u = x * tl.load(frame + 3 * c) + y * tl.load(frame + 3 * c + 1) + z * tl.load(frame + 3 * c + 2)
        now = step(u, 0.0, tl.load(frame + 12 + c), True)
        tl.store(rows + 4 * k + c, now, mask=there)
        if CHECK:
            d = (now - tl.load(reference + 4 * k + c, mask=there, other=0)).to(tl.float32)
            fx += d * tl.load(scaled + 3 * c)
            fy += d * tl.load(scaled + 3 * c + 1)
            fz += d * tl.load(scaled + 3 * c + 2)
    tl.store(rows + 4 * k + 3, tl.load(element + i, mask=there, other=0), mask=there)
    if CHECK:
        far = there & (fx * fx + fy * fy + fz * fz > limit_square)
        if tl.max(far.to(tl.int32), 0) > 0:
            tl.store(moved, 1)


@triton.jit(do_not_specialize=["na", "nb", "nc", "wide_a", "wide_b", "wide_c"])
def find_within_skin(
    rows, order, bounds, scaled, keys, count_r, count_a, MR, na, nb, nc, wide_a, wide_b, wide_c,
    radial_square, angular_square, C: tl.constexpr,
):  # fmt: skip
    """Neighbours of one atom a program: bins next to its own, those along c as one run, or two where it wraps.

    ``keys`` become element and caller's number, in which order :func:`sort_row` puts them. ``wide`` are bins on the
    lower side: 1, or 0 where two bins are all there are.
    """
    k = tl.program_id(0)
    lane = tl.arange(0, C)
    xi, yi, zi = tl.load(rows + 4 * k), tl.load(rows + 4 * k + 1), tl.load(rows + 4 * k + 2)
    ax, ay, az = tl.load(scaled), tl.load(scaled + 1), tl.load(scaled + 2)
    bx, by, bz = tl.load(scaled + 3), tl.load(scaled + 4), tl.load(scaled + 5)
    cx, cy, cz = tl.load(scaled + 6), tl.load(scaled + 7), tl.load(scaled + 8)
    mask = tl.full([], 0xFFFFFFFF, tl.int64)
    ba = (((xi.to(tl.int64) & mask) * na) >> 32).to(tl.int32)
    bb = (((yi.to(tl.int64) & mask) * nb) >> 32).to(tl.int32)
    bc = (((zi.to(tl.int64) & mask) * nc) >> 32).to(tl.int32)
    low = bc - wide_c
    high = tl.minimum(bc + 1, low + nc - 1)
    base = k.to(tl.int64) * MR
    found_a = tl.zeros([C], tl.int32)
    total = 0
    pa = -wide_a
    while pa < 2:
        qa = ba + pa
        qa = tl.where(qa < 0, qa + na, tl.where(qa >= na, qa - na, qa))
        pb = -wide_b
        while pb < 2:
            qb = bb + pb
            qb = tl.where(qb < 0, qb + nb, tl.where(qb >= nb, qb - nb, qb))
            column = (qa * nb + qb) * nc
            part = 0
            while part < 2:
                # The run within the column, and what of it comes out at the other end.
                begin = tl.where(part == 0, tl.maximum(low, 0), tl.where(low < 0, low + nc, 0))
                end = tl.where(part == 0, tl.minimum(high, nc - 1), tl.where(low < 0, nc - 1, high - nc))
                first = tl.load(bounds + column + begin)
                last = tl.where(end >= begin, tl.load(bounds + column + end + 1, mask=end >= begin, other=0), first)
                start = first
                while start < last:
                    j = start + lane
                    valid = (j < last) & (j != k)
                    fx = (tl.load(rows + 4 * j, mask=valid, other=0) - xi).to(tl.float32)
                    fy = (tl.load(rows + 4 * j + 1, mask=valid, other=0) - yi).to(tl.float32)
                    fz = (tl.load(rows + 4 * j + 2, mask=valid, other=0) - zi).to(tl.float32)
                    dx = fx * ax + fy * bx + fz * cx
                    dy = fx * ay + fy * by + fz * cy
                    dz = fx * az + fy * bz + fz * cz
                    square = dx * dx + dy * dy + dz * dz
                    near = valid & (square < radial_square)
                    found_a += (near & (square < angular_square)).to(tl.int32)
                    place = total + tl.cumsum(near.to(tl.int32), 0) - 1
                    fits = near & (place < MR)
                    key = (tl.load(rows + 4 * j + 3, mask=fits, other=0) << 24) | tl.load(
                        order + j, mask=fits, other=0)  # fmt: skip
                    tl.store(keys + base + place, key, mask=fits)
                    total += tl.sum(near.to(tl.int32), 0)
                    start += C
                part += 1
            pb += 1
        pa += 1
    tl.store(count_r + k, total)
    tl.store(count_a + k, tl.sum(found_a, 0))


@triton.jit
def sort_row(keys, place, count, index, MR, C: tl.constexpr, W: tl.constexpr):
    """Sort one atom's neighbours by their keys, by counting those that come before; one program an atom."""
    k = tl.program_id(0)
    n = tl.minimum(tl.load(count + k), MR)
    base = k.to(tl.int64) * MR
    lane = tl.arange(0, C)
    other = tl.arange(0, W)
    start = 0
    while start < n:
        mine = start + lane
        key = tl.load(keys + base + mine, mask=mine < n, other=0)
        before = tl.zeros([C], tl.int32)
        next_ = 0
        while next_ < n:
            theirs = tl.load(keys + base + next_ + other, mask=next_ + other < n, other=2147483647)
            before += tl.sum((theirs[None, :] < key[:, None]).to(tl.int32), 1)
            next_ += W
        j = tl.load(place + (key & 0xFFFFFF), mask=mine < n, other=0)
        tl.store(index + base + before, j, mask=mine < n)
        start += C


@triton.jit(do_not_specialize=["N"])
def pick_in_range(
    rows, scaled, skin_index, skin_count, radial_index, radial_count, angular_index, angular_count, state,
    N, MS, MR, MA, radial_square, angular_square, COINCIDENT: tl.constexpr, SAME_SQUARE: tl.constexpr,
    A: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The pairs that are in range now, in the order of the list with the skin; A atoms a program."""
    k = tl.program_id(0) * A + tl.arange(0, A)
    there = k < N
    count = tl.load(skin_count + k, mask=there, other=0)
    ax, ay, az = tl.load(scaled), tl.load(scaled + 1), tl.load(scaled + 2)
    bx, by, bz = tl.load(scaled + 3), tl.load(scaled + 4), tl.load(scaled + 5)
    cx, cy, cz = tl.load(scaled + 6), tl.load(scaled + 7), tl.load(scaled + 8)
    xi = tl.load(rows + 4 * k, mask=there, other=0)[:, None]
    yi = tl.load(rows + 4 * k + 1, mask=there, other=0)[:, None]
    zi = tl.load(rows + 4 * k + 2, mask=there, other=0)[:, None]
    base = k.to(tl.int64)[:, None]
    lane = tl.arange(0, C)[None, :]
    # Two counts in one number: neighbours in the lower half, those of the angular list in the upper one.
    found = tl.zeros([A], tl.int32)
    same = tl.zeros([A, C], tl.int32)
    most = tl.max(count, 0)
    start = 0
    while start < most:
        slot = start + lane
        valid = slot < count[:, None]
        j = tl.load(skin_index + base * MS + slot, mask=valid, other=0)
        x, y, z = position(rows, j)
        fx = (x - xi).to(tl.float32)
        fy = (y - yi).to(tl.float32)
        fz = (z - zi).to(tl.float32)
        dx = fx * ax + fy * bx + fz * cx
        dy = fx * ay + fy * by + fz * cy
        dz = fx * az + fy * bz + fz * cz
        square = dx * dx + dy * dy + dz * dz
        near = valid & (square < radial_square)
        close = near & (square < angular_square)
        both = near.to(tl.int32) + (close.to(tl.int32) << 16)
        place = found[:, None] + tl.cumsum(both, 1) - both
        tl.store(radial_index + base * MR + (place & 0xFFFF), j, mask=near)
        tl.store(angular_index + base * MA + (place >> 16), j, mask=close)
        found += tl.sum(both, 1)
        same |= (near & (square < SAME_SQUARE)).to(tl.int32)
        start += C
    found_r, found_a = found & 0xFFFF, found >> 16
    tl.store(radial_count + k, found_r, mask=there)
    tl.store(angular_count + k, found_a, mask=there)
    if tl.max(tl.max(same, 1), 0) > 0:
        tl.store(state, COINCIDENT)
