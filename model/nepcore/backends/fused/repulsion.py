"""Kernel of the ZBL repulsion: energies, forces and virials on top of those of the networks."""

from __future__ import annotations

import triton
import triton.language as tl

from .pairs import centres, cutoff_function, lanes_of, length, neighbour, over, zeros
from .radial import put_symmetric


@triton.jit(do_not_specialize=["N", "MA"])
def repulsion(
    rows, structure, cells, units, index, image, count, inverse_rc, table, energy, forces, virials,
    N, MA, P,
    WIDTH: tl.constexpr, IMAGES: tl.constexpr, FORCES: tl.constexpr, VIRIALS: tl.constexpr,
    A: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """V = K Z_i Z_j φ(x)/r · s(r) of the pairs within the angular cutoff: U_i += ½ Σ_j V, F_i += Σ_j V′ r̂_ij.

    A pair has its WIDTH parameters in ``table`` (P, P, WIDTH): see :data:`nepcore.backends.fused.model.Model.zbl`.
    """
    i, slot = lanes_of(A, G)
    inside = i < N
    centre, ti, s, cell = centres(rows, structure, cells, i, inside)
    n_slots = tl.load(count + i, mask=inside, other=0)
    first = i.to(tl.int64) * MA
    zero = tl.zeros([A * G], tl.float32)
    total = zero
    force = zeros(zero, 3)
    virial = zeros(zero, 6 if VIRIALS else 0)
    start = 0
    most = tl.max(n_slots, axis=0)
    while start < most:
        live = slot + start < n_slots
        at = first + slot + start
        j = tl.load(index + at, mask=live, other=0)
        rx, ry, rz, tj = neighbour(rows, units, image, at, j, live, centre, s, cell, IMAGES)
        r, inverse = length(rx, ry, rz, live)
        pair = ti * P + tj
        own = table + pair * WIDTH
        near = live & (r < tl.load(own + 1)) & (r * tl.load(inverse_rc + pair) < 1.0)
        r = tl.where(near, r, 1.0)
        # The switch falls from 1 at the inner to 0 at the outer radius as a cutoff function; see `cutoff_function`.
        half_s, half_ds, x, dx = cutoff_function(tl.maximum(r - tl.load(own), 0.0), tl.load(own + 4))
        rate = tl.load(own + 3)
        phi = zero
        dphi = zero
        for k in tl.static_range(4):
            decay = tl.load(own + 6 + 2 * k) * rate
            part = tl.load(own + 5 + 2 * k) * tl.exp(-decay * r)
            phi += part
            dphi -= decay * part
        scale = tl.load(own + 2) * inverse
        v = scale * phi * (2.0 * half_s)
        dv = scale * (dphi * (2.0 * half_s) + phi * (2.0 * half_ds)) - v * inverse
        total += tl.where(near, 0.5 * v, 0.0)
        a = tl.where(near, dv * inverse, 0.0)
        x = a * rx
        y = a * ry
        z = a * rz
        force = (force[0] + x, force[1] + y, force[2] + z)
        if VIRIALS:
            x = -0.5 * x
            y = -0.5 * y
            z = -0.5 * z
            virial = (
                virial[0] + x * rx, virial[1] + x * ry, virial[2] + x * rz,
                virial[3] + y * ry, virial[4] + y * rz, virial[5] + z * rz,
            )  # fmt: skip
        start += G
    i = tl.program_id(0) * A + tl.arange(0, A)
    inside = i < N
    u = tl.load(energy + i, mask=inside, other=0.0)
    tl.store(energy + i, u + over(total, A, G).to(tl.float64), mask=inside)
    wide = i.to(tl.int64)
    if FORCES:
        for d in tl.static_range(3):
            value = tl.load(forces + 3 * wide + d, mask=inside, other=0.0) + over(force[d], A, G)
            tl.store(forces + 3 * wide + d, value, mask=inside)
    if VIRIALS:
        put_symmetric(virials, wide, inside, virial, A, G, True)
