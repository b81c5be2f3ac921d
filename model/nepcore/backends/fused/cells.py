"""Kernels that turn cells and positions in float64 into whole numbers of steps along compact cell vectors.

One program a structure shortens the cell (a vector loses whole multiples of another while that helps), completes it by
unit vectors in directions that are not periodic, and chooses the steps; then one lane an atom rounds its position.
"""

from __future__ import annotations

import triton
import triton.language as tl

FRAME = 16
"""Columns of a frame, float64: three reciprocal vectors (9), origin (3), steps of a cell vector (3)."""

SPAN = 8
"""Columns of a span: images to look at on either side (3), binary digits of a cell's steps (3), images in all."""

ELSEWHERE = 2
"""Bit of a structure's state: steps would be too coarse, or images too many; it is left to another backend."""

COARSEST = 5e-7
"""Longest step, Å."""

MOST_CANDIDATES = 1 << 22
"""Most images of atoms that one atom looks at: up to here, quotients of them are exact in float32."""


@triton.jit
def _shorten(ax, ay, az, bx, by, bz, both):
    """A vector minus the whole multiple of another that leaves it shortest, and whether that is less than before."""
    along = ax * bx + ay * by + az * bz
    length = bx * bx + by * by + bz * bz
    times = tl.where(
        both & (tl.abs(along) > 0.500001 * length), tl.floor(along / tl.where(length > 0.0, length, 1.0) + 0.5), 0.0
    )
    return ax - times * bx, ay - times * by, az - times * bz, (times != 0.0).to(tl.int32)


@triton.jit
def _cross(ax, ay, az, bx, by, bz):
    return ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx


@triton.jit
def _unit(x, y, z):
    length = tl.sqrt(x * x + y * y + z * z)
    length = tl.where(length > 0.0, length, 1.0)
    return x / length, y / length, z / length


@triton.jit
def _steps(height, periodic, extent, cutoff):
    """Images on either side, binary digits of the steps of a cell vector, whether differences wrap by themselves."""
    reach = tl.where(periodic, tl.floor(cutoff / height + (0.5 + 1e-9)), 0.0)
    reach = tl.minimum(reach, 1000.0).to(tl.int32)
    digits = 30
    if periodic:
        room = 1
        while room < reach + 2:
            room = room * 2
            digits -= 1
    else:
        while (extent > 1.0) & (digits > 0):
            extent = extent * 0.5
            digits -= 1
    return reach, digits, periodic & (reach == 0)


@triton.jit
def prepare_cells(
    cells, pbc, positions, offsets, frames, scaled, units, spans, state, most, cutoff,
    COARSEST: tl.constexpr, MOST_CANDIDATES: tl.constexpr, ELSEWHERE: tl.constexpr,
    FRAME: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Frames, scaled cells, units and spans of S structures, one program each; clears their state."""
    s = tl.program_id(0)
    if s == 0:
        tl.store(most, 0)
        tl.store(most + 1, 0)
    first = tl.load(offsets + s)
    last = tl.load(offsets + s + 1)
    ax, ay, az = tl.load(cells + 9 * s), tl.load(cells + 9 * s + 1), tl.load(cells + 9 * s + 2)
    bx, by, bz = tl.load(cells + 9 * s + 3), tl.load(cells + 9 * s + 4), tl.load(cells + 9 * s + 5)
    cx, cy, cz = tl.load(cells + 9 * s + 6), tl.load(cells + 9 * s + 7), tl.load(cells + 9 * s + 8)
    bits = tl.load(pbc + s)
    pa, pb, pc = (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0
    periodic = (bits & 1) + ((bits >> 1) & 1) + ((bits >> 2) & 1)

    moved = 1
    rounds = 0
    while (moved > 0) & (rounds < 100):
        ax, ay, az, m0 = _shorten(ax, ay, az, bx, by, bz, pa & pb)
        ax, ay, az, m1 = _shorten(ax, ay, az, cx, cy, cz, pa & pc)
        bx, by, bz, m2 = _shorten(bx, by, bz, ax, ay, az, pb & pa)
        bx, by, bz, m3 = _shorten(bx, by, bz, cx, cy, cz, pb & pc)
        cx, cy, cz, m4 = _shorten(cx, cy, cz, ax, ay, az, pc & pa)
        cx, cy, cz, m5 = _shorten(cx, cy, cz, bx, by, bz, pc & pb)
        moved = m0 + m1 + m2 + m3 + m4 + m5
        rounds += 1

    if periodic == 2:
        # The missing vector is the normal of the plane of the others.
        ex, ey, ez = tl.where(pa, ax, bx), tl.where(pa, ay, by), tl.where(pa, az, bz)
        fx, fy, fz = tl.where(pc, cx, bx), tl.where(pc, cy, by), tl.where(pc, cz, bz)
        nx, ny, nz = _cross(ex, ey, ez, fx, fy, fz)
        nx, ny, nz = _unit(nx, ny, nz)
        ax, ay, az = tl.where(pa, ax, nx), tl.where(pa, ay, ny), tl.where(pa, az, nz)
        bx, by, bz = tl.where(pb, bx, nx), tl.where(pb, by, ny), tl.where(pb, bz, nz)
        cx, cy, cz = tl.where(pc, cx, nx), tl.where(pc, cy, ny), tl.where(pc, cz, nz)
    if periodic == 1:
        # Any orthonormal pair will do; it begins with the direction that the axis has least of.
        dx = tl.where(pa, ax, tl.where(pb, bx, cx))
        dy = tl.where(pa, ay, tl.where(pb, by, cy))
        dz = tl.where(pa, az, tl.where(pb, bz, cz))
        dx, dy, dz = _unit(dx, dy, dz)
        hx = tl.where((tl.abs(dx) <= tl.abs(dy)) & (tl.abs(dx) <= tl.abs(dz)), 1.0, 0.0)
        hy = tl.where((hx == 0.0) & (tl.abs(dy) <= tl.abs(dz)), 1.0, 0.0)
        hz = 1.0 - hx - hy
        ex, ey, ez = _cross(dx, dy, dz, hx, hy, hz)
        ex, ey, ez = _unit(ex, ey, ez)
        fx, fy, fz = _cross(dx, dy, dz, ex, ey, ez)
        ax, ay, az = tl.where(pa, ax, ex), tl.where(pa, ay, ey), tl.where(pa, az, ez)
        bx, by, bz = tl.where(pb, bx, tl.where(pa, ex, fx)), tl.where(pb, by, tl.where(pa, ey, fy)), tl.where(
            pb, bz, tl.where(pa, ez, fz))  # fmt: skip
        cx, cy, cz = tl.where(pc, cx, fx), tl.where(pc, cy, fy), tl.where(pc, cz, fz)
    if periodic == 0:
        ax, ay, az = ax * 0.0 + 1.0, ay * 0.0, az * 0.0
        bx, by, bz = bx * 0.0, by * 0.0 + 1.0, bz * 0.0
        cx, cy, cz = cx * 0.0, cy * 0.0, cz * 0.0 + 1.0

    ux, uy, uz = _cross(bx, by, bz, cx, cy, cz)
    vx, vy, vz = _cross(cx, cy, cz, ax, ay, az)
    wx, wy, wz = _cross(ax, ay, az, bx, by, bz)
    volume = ax * ux + ay * uy + az * uz
    volume = tl.where(volume == 0.0, 1.0, volume)
    ux, uy, uz = ux / volume, uy / volume, uz / volume
    vx, vy, vz = vx / volume, vy / volume, vz / volume
    wx, wy, wz = wx / volume, wy / volume, wz / volume

    low_u, low_v, low_w = volume * 0.0, volume * 0.0, volume * 0.0
    top_u, top_v, top_w = low_u, low_v, low_w
    if periodic < 3:
        lane = tl.arange(0, BLOCK)
        lu, lv, lw = tl.full([BLOCK], 1e30, tl.float64), tl.full([BLOCK], 1e30, tl.float64), tl.full(
            [BLOCK], 1e30, tl.float64)  # fmt: skip
        hu, hv, hw = -lu, -lv, -lw
        start = first
        while start < last:
            there = start + lane < last
            x = tl.load(positions + 3 * (start + lane), mask=there, other=0.0)
            y = tl.load(positions + 3 * (start + lane) + 1, mask=there, other=0.0)
            z = tl.load(positions + 3 * (start + lane) + 2, mask=there, other=0.0)
            u, v, w = x * ux + y * uy + z * uz, x * vx + y * vy + z * vz, x * wx + y * wy + z * wz
            lu, hu = tl.where(there, tl.minimum(lu, u), lu), tl.where(there, tl.maximum(hu, u), hu)
            lv, hv = tl.where(there, tl.minimum(lv, v), lv), tl.where(there, tl.maximum(hv, v), hv)
            lw, hw = tl.where(there, tl.minimum(lw, w), lw), tl.where(there, tl.maximum(hw, w), hw)
            start += BLOCK
        low_u, low_v, low_w = tl.min(lu, 0), tl.min(lv, 0), tl.min(lw, 0)
        top_u, top_v, top_w = tl.max(hu, 0), tl.max(hv, 0), tl.max(hw, 0)

    length_a = tl.sqrt(ax * ax + ay * ay + az * az)
    length_b = tl.sqrt(bx * bx + by * by + bz * bz)
    length_c = tl.sqrt(cx * cx + cy * cy + cz * cz)
    reach_a, digits_a, wraps_a = _steps(1.0 / tl.sqrt(ux * ux + uy * uy + uz * uz), pa, top_u - low_u, cutoff)
    reach_b, digits_b, wraps_b = _steps(1.0 / tl.sqrt(vx * vx + vy * vy + vz * vz), pb, top_v - low_v, cutoff)
    reach_c, digits_c, wraps_c = _steps(1.0 / tl.sqrt(wx * wx + wy * wy + wz * wz), pc, top_w - low_w, cutoff)
    one = tl.full([], 1, tl.int64)
    steps_a = tl.where(wraps_a, one << 32, one << digits_a.to(tl.int64)).to(tl.float64)
    steps_b = tl.where(wraps_b, one << 32, one << digits_b.to(tl.int64)).to(tl.float64)
    steps_c = tl.where(wraps_c, one << 32, one << digits_c.to(tl.int64)).to(tl.float64)
    images = (2 * reach_a + 1) * (2 * reach_b + 1) * (2 * reach_c + 1)
    candidates = images.to(tl.float64) * (last - first).to(tl.float64)
    coarse = tl.maximum(tl.maximum(length_a / steps_a, length_b / steps_b), length_c / steps_c) > COARSEST
    far = tl.maximum(tl.maximum(reach_a, reach_b), reach_c) > 500
    elsewhere = coarse | far | (candidates > MOST_CANDIDATES)

    tl.store(state + s, tl.where(elsewhere & (last > first), ELSEWHERE, 0))
    frame = frames + FRAME * s
    tl.store(frame, ux)
    tl.store(frame + 1, uy)
    tl.store(frame + 2, uz)
    tl.store(frame + 3, vx)
    tl.store(frame + 4, vy)
    tl.store(frame + 5, vz)
    tl.store(frame + 6, wx)
    tl.store(frame + 7, wy)
    tl.store(frame + 8, wz)
    # Only directions that are not periodic have an origin; positions along the others are folded.
    tl.store(frame + 9, tl.where(pa, 0.0, low_u))
    tl.store(frame + 10, tl.where(pb, 0.0, low_v))
    tl.store(frame + 11, tl.where(pc, 0.0, low_w))
    tl.store(frame + 12, steps_a)
    tl.store(frame + 13, steps_b)
    tl.store(frame + 14, steps_c)
    cell = scaled + 9 * s
    tl.store(cell, (ax / steps_a).to(tl.float32))
    tl.store(cell + 1, (ay / steps_a).to(tl.float32))
    tl.store(cell + 2, (az / steps_a).to(tl.float32))
    tl.store(cell + 3, (bx / steps_b).to(tl.float32))
    tl.store(cell + 4, (by / steps_b).to(tl.float32))
    tl.store(cell + 5, (bz / steps_b).to(tl.float32))
    tl.store(cell + 6, (cx / steps_c).to(tl.float32))
    tl.store(cell + 7, (cy / steps_c).to(tl.float32))
    tl.store(cell + 8, (cz / steps_c).to(tl.float32))
    tl.store(units + 3 * s, tl.where(reach_a > 0, 1 << digits_a, 0))
    tl.store(units + 3 * s + 1, tl.where(reach_b > 0, 1 << digits_b, 0))
    tl.store(units + 3 * s + 2, tl.where(reach_c > 0, 1 << digits_c, 0))
    span = spans + SPAN * s
    tl.store(span, reach_a)
    tl.store(span + 1, reach_b)
    tl.store(span + 2, reach_c)
    tl.store(span + 3, digits_a)
    tl.store(span + 4, digits_b)
    tl.store(span + 5, digits_c)
    tl.store(span + 6, tl.where(elsewhere, 0, images))


@triton.jit
def step(u, origin, steps, periodic):
    """Whole steps of a fractional coordinate, counted from the origin or, if periodic, folded into the cell."""
    u = tl.where(periodic, u - tl.floor(u), u - origin)
    return tl.floor(u * steps + 0.5).to(tl.int64).to(tl.int32)


@triton.jit(do_not_specialize=["S"])
def place_atoms(
    positions, numbers, table, structure, offsets, pbc, frames, rows, order, S,
    SORT: tl.constexpr, FRAME: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows of the atoms, one lane each; with SORT also the order of a structure's atoms by element, stable."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < tl.load(offsets + S)
    s = tl.load(structure + i, mask=there, other=0)
    x = tl.load(positions + 3 * i, mask=there, other=0.0)
    y = tl.load(positions + 3 * i + 1, mask=there, other=0.0)
    z = tl.load(positions + 3 * i + 2, mask=there, other=0.0)
    bits = tl.load(pbc + s, mask=there, other=0)
    element = tl.load(table + tl.load(numbers + i, mask=there, other=0).to(tl.int32), mask=there, other=0)
    frame = frames + FRAME * s
    for k in tl.static_range(3):
        u = (
            x * tl.load(frame + 3 * k, mask=there, other=0.0)
            + y * tl.load(frame + 3 * k + 1, mask=there, other=0.0)
            + z * tl.load(frame + 3 * k + 2, mask=there, other=0.0)
        )
        origin = tl.load(frame + 9 + k, mask=there, other=0.0)
        steps = tl.load(frame + 12 + k, mask=there, other=1.0)
        tl.store(rows + 4 * i + k, step(u, origin, steps, ((bits >> k) & 1) != 0), mask=there)
    tl.store(rows + 4 * i + 3, element, mask=there)
    if SORT:
        first = tl.load(offsets + s, mask=there, other=0)
        last = tl.load(offsets + s + 1, mask=there, other=0)
        before = tl.zeros([BLOCK], tl.int32)
        lane = tl.arange(0, WIDTH)
        stop = tl.max(last, 0)
        start = tl.min(tl.where(there, first, 2147483647), 0)
        while start < stop:
            j = start + lane
            other = tl.load(table + tl.load(numbers + j, mask=j < tl.max(last, 0), other=0).to(tl.int32))
            mate = (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
            lower = (other[None, :] < element[:, None]) | (
                (other[None, :] == element[:, None]) & (j[None, :] < i[:, None])
            )
            before += tl.sum((mate & lower).to(tl.int32), 1)
            start += WIDTH
        tl.store(order + first + before, i, mask=there)
