"""Kernels of the neighbour search in small structures: every atom looks at all atoms and their images.

Others are looked at in the order in which they are wanted (element, atom, image), so that a running count of those in
range is their place in the list.
"""

from __future__ import annotations

import triton
import triton.language as tl

COINCIDENT = 1
"""Bit of a structure's state: two of its atoms are at one place."""

SAME_PLACE = 1e-5
"""Atoms closer than this, Å, are at one place."""


@triton.jit
def position(rows, j):
    """Steps of the atoms of a tile (A, C), by one load of 16 bytes each."""
    A: tl.constexpr = j.shape[0]
    C: tl.constexpr = j.shape[1]
    row = tl.load(rows + 4 * j[:, :, None] + tl.arange(0, 4)[None, None, :])
    even, odd = tl.split(tl.reshape(row, (A, C, 2, 2)))
    x, z = tl.split(even)
    y, _ = tl.split(odd)
    return x, y, z


@triton.jit(do_not_specialize=["S"])
def find_neighbors(
    rows, order, structure, offsets, scaled, units, spans, state, most,
    radial_index, radial_image, radial_count, angular_index, angular_image, angular_count,
    S, MR, MA, radial_square, angular_square,
    SORTED: tl.constexpr, SPAN: tl.constexpr, COINCIDENT: tl.constexpr, SAME_SQUARE: tl.constexpr,
    A: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Neighbours of A atoms a program, C others at a time; ``most`` becomes the counts that do not fit.

    A lane is another atom, and goes through its images twice: it counts those in range, and when it knows how many
    there are of the atoms before it, it writes them. Both times by the same code, so that nothing is rounded otherwise.
    """
    i = tl.program_id(0) * A + tl.arange(0, A)
    there = i < tl.load(offsets + S)
    s = tl.load(structure + i, mask=there, other=0)
    first = tl.load(offsets + s, mask=there, other=0)[:, None]
    last = tl.load(offsets + s + 1, mask=there, other=0)[:, None]
    span = spans + SPAN * s
    ra = tl.load(span, mask=there, other=0)[:, None]
    rb = tl.load(span + 1, mask=there, other=0)[:, None]
    rc = tl.load(span + 2, mask=there, other=0)[:, None]
    da = tl.load(span + 3, mask=there, other=0)[:, None]
    db = tl.load(span + 4, mask=there, other=0)[:, None]
    dc = tl.load(span + 5, mask=there, other=0)[:, None]
    last = tl.where(tl.load(span + 6, mask=there, other=0)[:, None] > 0, last, first)
    ua = tl.load(units + 3 * s, mask=there, other=0)[:, None]
    ub = tl.load(units + 3 * s + 1, mask=there, other=0)[:, None]
    uc = tl.load(units + 3 * s + 2, mask=there, other=0)[:, None]
    cell = scaled + 9 * s
    ax = tl.load(cell, mask=there, other=0.0)[:, None]
    ay = tl.load(cell + 1, mask=there, other=0.0)[:, None]
    az = tl.load(cell + 2, mask=there, other=0.0)[:, None]
    bx = tl.load(cell + 3, mask=there, other=0.0)[:, None]
    by = tl.load(cell + 4, mask=there, other=0.0)[:, None]
    bz = tl.load(cell + 5, mask=there, other=0.0)[:, None]
    cx = tl.load(cell + 6, mask=there, other=0.0)[:, None]
    cy = tl.load(cell + 7, mask=there, other=0.0)[:, None]
    cz = tl.load(cell + 8, mask=there, other=0.0)[:, None]
    xi = tl.load(rows + 4 * i, mask=there, other=0)[:, None]
    yi = tl.load(rows + 4 * i + 1, mask=there, other=0)[:, None]
    zi = tl.load(rows + 4 * i + 2, mask=there, other=0)[:, None]
    base = i.to(tl.int64)[:, None]
    reach_a, reach_b, reach_c = tl.max(tl.max(ra, 1), 0), tl.max(tl.max(rb, 1), 0), tl.max(tl.max(rc, 1), 0)
    others = tl.max(tl.max(tl.where(there[:, None], last - first, 0), 1), 0)
    found_r = tl.zeros([A], tl.int32)
    found_a = tl.zeros([A], tl.int32)
    same = tl.zeros([A, C], tl.int32)
    lane = tl.arange(0, C)[None, :]
    start = 0
    while start < others:
        j = first + start + lane
        valid = (j < last) & there[:, None]
        if SORTED:
            j = tl.load(order + j, mask=valid, other=0)
        j = tl.where(valid, j, 0)
        x, y, z = position(rows, j)
        x, y, z = x - xi, y - yi, z - zi
        # Images are counted from the nearest one; where differences wrap there is no other.
        na = tl.where(ra > 0, -((x + (ua >> 1)) >> da), 0)
        nb = tl.where(rb > 0, -((y + (ub >> 1)) >> db), 0)
        nc = tl.where(rc > 0, -((z + (uc >> 1)) >> dc), 0)
        itself = j == i[:, None]
        at_r = tl.zeros([A, C], tl.int32)
        at_a = tl.zeros([A, C], tl.int32)
        writing = 0
        while writing < 2:
            ma = -reach_a
            while ma <= reach_a:
                fa = (x + (na + ma) * ua).to(tl.float32)
                xa, ya, za = fa * ax, fa * ay, fa * az
                in_a = valid & (tl.abs(ma) <= ra)
                mb = -reach_b
                while mb <= reach_b:
                    fb = (y + (nb + mb) * ub).to(tl.float32)
                    xb, yb, zb = xa + fb * bx, ya + fb * by, za + fb * bz
                    in_b = in_a & (tl.abs(mb) <= rb)
                    mc = -reach_c
                    while mc <= reach_c:
                        fc = (z + (nc + mc) * uc).to(tl.float32)
                        dx, dy, dz = xb + fc * cx, yb + fc * cy, zb + fc * cz
                        square = dx * dx + dy * dy + dz * dz
                        home = (ma == 0) & (mb == 0) & (mc == 0)
                        near = in_b & (tl.abs(mc) <= rc) & (square < radial_square) & ((itself & home) == 0)
                        close = near & (square < angular_square)
                        if writing == 1:
                            image = ((na + ma) & 1023) | (((nb + mb) & 1023) << 10) | (((nc + mc) & 1023) << 20)
                            tl.store(radial_index + base * MR + at_r, j, mask=near & (at_r < MR))
                            tl.store(radial_image + base * MR + at_r, image, mask=near & (at_r < MR))
                            tl.store(angular_index + base * MA + at_a, j, mask=close & (at_a < MA))
                            tl.store(angular_image + base * MA + at_a, image, mask=close & (at_a < MA))
                        same |= (near & (square < SAME_SQUARE)).to(tl.int32)
                        at_r += near.to(tl.int32)
                        at_a += close.to(tl.int32)
                        mc += 1
                    mb += 1
                ma += 1
            if writing == 0:
                total_r, total_a = tl.sum(at_r, 1), tl.sum(at_a, 1)
                at_r = found_r[:, None] + tl.cumsum(at_r, 1) - at_r
                at_a = found_a[:, None] + tl.cumsum(at_a, 1) - at_a
                found_r += total_r
                found_a += total_a
            writing += 1
        start += C
    tl.store(radial_count + i, tl.minimum(found_r, MR))
    tl.store(angular_count + i, tl.minimum(found_a, MA))
    if tl.max(found_r, 0) > MR:
        tl.atomic_max(most, tl.max(found_r, 0))
    if tl.max(found_a, 0) > MA:
        tl.atomic_max(most + 1, tl.max(found_a, 0))
    double = tl.max(same, 1)
    if tl.max(double, 0) > 0:
        tl.atomic_or(state + s, tl.where(double > 0, COINCIDENT, 0), mask=there & (double > 0))


@triton.jit(do_not_specialize=["N"])
def find_reverse(
    angular_index, angular_image, angular_count, angular_reverse, N, MA,
    IMAGES: tl.constexpr, A: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Where the pair from j to i stands, for the pairs from A atoms i: looked up in the rows of their neighbours j."""
    i = tl.program_id(0) * A + tl.arange(0, A)
    count = tl.load(angular_count + i, mask=i < N, other=0)
    most = tl.max(count, 0)
    base = (i * MA)[:, None]
    slot = tl.arange(0, G)[None, :]
    lane = tl.arange(0, C)[None, None, :]
    start = 0
    while start < most:
        there = start + slot < count[:, None]
        j = tl.load(angular_index + base + start + slot, mask=there, other=0)
        theirs = tl.where(there, tl.load(angular_count + j, mask=there, other=0), 0)
        back = tl.zeros([A, G], tl.int32)
        if IMAGES:
            image = tl.load(angular_image + base + start + slot, mask=there, other=0)
            back = (-image) & 1023
            back = back | (((-(image >> 10)) & 1023) << 10) | (((-(image >> 20)) & 1023) << 20)
        at = tl.zeros([A, G], tl.int32)
        row = (j * MA)[:, :, None]
        stop_c = tl.max(tl.max(theirs, 1), 0)
        c = 0
        while c < stop_c:
            valid = c + lane < theirs[:, :, None]
            same = valid & (tl.load(angular_index + row + c + lane, mask=valid, other=-1) == i[:, None, None])
            if IMAGES:
                same = same & (tl.load(angular_image + row + c + lane, mask=valid, other=0) == back[:, :, None])
            at += tl.sum(tl.where(same, c + lane, 0), 2)
            c += C
        tl.store(angular_reverse + base + start + slot, j * MA + at, mask=there)
        start += G
