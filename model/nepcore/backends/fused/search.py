"""Kernels of the neighbour search in small structures: every atom looks at all atoms and their images.

Candidates are looked at in the order in which they are wanted (element, atom, image), so that a running count of those
in range is their place in the list.
"""

from __future__ import annotations

import triton
import triton.language as tl

COINCIDENT = 1
"""Bit of a structure's state: two of its atoms are at one place."""

SAME_PLACE = 1e-5
"""Atoms closer than this, Å, are at one place."""


@triton.jit(do_not_specialize=["S"])
def find_neighbors(
    rows, order, structure, offsets, scaled, units, spans, state, most,
    radial_index, radial_image, radial_count, angular_index, angular_image, angular_count,
    S, MR, MA, radial_square, angular_square,
    SORTED: tl.constexpr, SPAN: tl.constexpr, COINCIDENT: tl.constexpr, SAME_SQUARE: tl.constexpr,
    A: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Neighbours of A atoms a program, C candidates at a time; ``most`` becomes the counts that do not fit."""
    i = tl.program_id(0) * A + tl.arange(0, A)
    there = i < tl.load(offsets + S)
    s = tl.load(structure + i, mask=there, other=0)
    first = tl.load(offsets + s, mask=there, other=0)
    last = tl.load(offsets + s + 1, mask=there, other=0)
    span = spans + SPAN * s
    ra = tl.load(span, mask=there, other=0)[:, None]
    rb = tl.load(span + 1, mask=there, other=0)[:, None]
    rc = tl.load(span + 2, mask=there, other=0)[:, None]
    da = tl.load(span + 3, mask=there, other=0)[:, None]
    db = tl.load(span + 4, mask=there, other=0)[:, None]
    dc = tl.load(span + 5, mask=there, other=0)[:, None]
    images = tl.load(span + 6, mask=there, other=0)[:, None]
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
    across = 2 * rc + 1
    plane = (2 * rb + 1) * across
    # Half a part more and a quotient in float32 falls on the right side: candidates are fewer than 2^22.
    per_images = 1.0 / tl.maximum(images, 1).to(tl.float32)
    per_plane = 1.0 / plane.to(tl.float32)
    per_across = 1.0 / across.to(tl.float32)
    candidates = tl.where(there[:, None], (last - first)[:, None] * images, 0)
    base = i.to(tl.int64)[:, None]
    found_r = tl.zeros([A], tl.int32)
    found_a = tl.zeros([A], tl.int32)
    same = tl.zeros([A], tl.int32)
    lane = tl.arange(0, C)[None, :]
    stop = tl.max(tl.max(candidates, 1), 0)
    start = 0
    while start < stop:
        q = start + lane
        valid = q < candidates
        place = ((q.to(tl.float32) + 0.5) * per_images).to(tl.int32)
        m = q - place * images
        ma = ((m.to(tl.float32) + 0.5) * per_plane).to(tl.int32)
        m = m - ma * plane
        mb = ((m.to(tl.float32) + 0.5) * per_across).to(tl.int32)
        mc = m - mb * across
        j = first[:, None] + place
        if SORTED:
            j = tl.load(order + j, mask=valid, other=0)
        x = tl.load(rows + 4 * j, mask=valid, other=0) - xi
        y = tl.load(rows + 4 * j + 1, mask=valid, other=0) - yi
        z = tl.load(rows + 4 * j + 2, mask=valid, other=0) - zi
        # Images are counted from the nearest one; where differences wrap there is no other.
        na = tl.where(ra > 0, ma - ra - ((x + (ua >> 1)) >> da), 0)
        nb = tl.where(rb > 0, mb - rb - ((y + (ub >> 1)) >> db), 0)
        nc = tl.where(rc > 0, mc - rc - ((z + (uc >> 1)) >> dc), 0)
        fx = (x + na * ua).to(tl.float32)
        fy = (y + nb * ub).to(tl.float32)
        fz = (z + nc * uc).to(tl.float32)
        dx = fx * ax + fy * bx + fz * cx
        dy = fx * ay + fy * by + fz * cy
        dz = fx * az + fy * bz + fz * cz
        square = dx * dx + dy * dy + dz * dz
        itself = (j == i[:, None]) & (na == 0) & (nb == 0) & (nc == 0)
        near = valid & (square < radial_square) & (itself == 0)
        close = near & (square < angular_square)
        image = (na & 1023) | ((nb & 1023) << 10) | ((nc & 1023) << 20)
        slot = found_r[:, None] + tl.cumsum(near.to(tl.int32), 1) - 1
        tl.store(radial_index + base * MR + slot, j, mask=near & (slot < MR))
        tl.store(radial_image + base * MR + slot, image, mask=near & (slot < MR))
        slot = found_a[:, None] + tl.cumsum(close.to(tl.int32), 1) - 1
        tl.store(angular_index + base * MA + slot, j, mask=close & (slot < MA))
        tl.store(angular_image + base * MA + slot, image, mask=close & (slot < MA))
        found_r += tl.sum(near.to(tl.int32), 1)
        found_a += tl.sum(close.to(tl.int32), 1)
        same += tl.sum((near & (square < SAME_SQUARE)).to(tl.int32), 1)
        start += C
    tl.store(radial_count + i, tl.minimum(found_r, MR))
    tl.store(angular_count + i, tl.minimum(found_a, MA))
    if tl.max(found_r, 0) > MR:
        tl.atomic_max(most, tl.max(found_r, 0))
    if tl.max(found_a, 0) > MA:
        tl.atomic_max(most + 1, tl.max(found_a, 0))
    if tl.sum(same, 0) > 0:
        tl.atomic_or(state + s, tl.where(same > 0, COINCIDENT, 0), mask=there & (same > 0))


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
