"""Kernels of the radial part: the descriptor q_n, and forces from its slopes."""

from __future__ import annotations

import triton
import triton.language as tl

from .pairs import basis, basis_slopes, centres, lanes_of, length, neighbour, over, quad, zeros


@triton.jit(do_not_specialize=["N", "MR"])
def radial_sums(
    rows, structure, cells, units, index, image, count, c, inverse_rc, q, tally,
    N, MR, P,
    N_R: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, APART: tl.constexpr, IMAGES: tl.constexpr,
    A: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """q_n(i) = Σ_j g_n(r_ij) of A atoms, G neighbours at a time: q (n, N), not scaled. ``tally`` (P,) becomes zero.

    With APART elements kept apart, basis functions are summed over the neighbours of each, and coefficients come in
    once an atom; with 0 they come in for every pair.
    """
    if tl.program_id(0) == 0:
        t = 0
        while t < P:
            tl.store(tally + t, 0)
            t += 1
    i, slot = lanes_of(A, G)
    inside = i < N
    centre, ti, s, cell = centres(rows, structure, cells, i, inside)
    n_slots = tl.load(count + i, mask=inside, other=0)
    first = i.to(tl.int64) * MR
    zero = tl.zeros([A * G], tl.float32)
    total = zeros(zero, APART * K if APART else N_R)
    start = 0
    most = tl.max(n_slots, axis=0)
    while start < most:
        live = slot + start < n_slots
        at = first + slot + start
        j = tl.load(index + at, mask=live, other=0)
        rx, ry, rz, tj = neighbour(rows, units, image, at, j, live, centre, s, cell, IMAGES)
        r, inverse = length(rx, ry, rz, live)
        pair = ti * P + tj
        f = basis(r, tl.load(inverse_rc + pair), K)
        after = ()
        if APART:
            for t in tl.static_range(APART):
                for k in tl.static_range(K):
                    after = after + (total[t * K + k] + (f[k] if APART == 1 else tl.where(tj == t, f[k], 0.0)),)
        else:
            own = c + pair * (N_R * ROW)
            for n in tl.static_range(N_R):
                g = total[n]
                for part in tl.static_range(ROW // 4):
                    c4 = quad(own + (n * ROW + 4 * part))
                    for k in tl.static_range(4):
                        if 4 * part + k < K:
                            g += c4[k] * f[4 * part + k]
                after = after + (g,)
        total = after
        start += G
    i = tl.program_id(0) * A + tl.arange(0, A)
    inside = i < N
    if APART:
        sums = ()
        for k in tl.static_range(APART * K):
            sums = sums + (over(total[k], A, G),)
        own = c + tl.load(rows + 4 * i + 3, mask=inside, other=0) * (P * N_R * ROW)
        for n in tl.static_range(N_R):
            value = tl.zeros([A], tl.float32)
            for t in tl.static_range(APART):
                for k in tl.static_range(K):
                    value += tl.load(own + ((t * N_R + n) * ROW + k)) * sums[t * K + k]
            tl.store(q + n * N.to(tl.int64) + i, value, mask=inside)
    else:
        for n in tl.static_range(N_R):
            tl.store(q + n * N.to(tl.int64) + i, over(total[n], A, G), mask=inside)


@triton.jit(do_not_specialize=["N", "MR"])
def radial_forces(
    rows, structure, cells, units, index, image, count, w, inverse_rc, forces, virials,
    N, MR, P,
    K: tl.constexpr, ROW: tl.constexpr, IMAGES: tl.constexpr, VIRIALS: tl.constexpr,
    A: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Forces of the radial part, both halves of each pair: F_i = Σ_j (a_ij + a_ji) r̂_ij, W_i = −Σ_j a_ji r_ij ⊗ r̂_ij.

    a_ij = Σ_n (∂U_i/∂q_n) g_n′(r_ij) = Σ_k w[i, tj, k] f_k′(r_ij), with w (N, P, ROW) of :mod:`.network`.
    """
    i, slot = lanes_of(A, G)
    inside = i < N
    centre, ti, s, cell = centres(rows, structure, cells, i, inside)
    n_slots = tl.load(count + i, mask=inside, other=0)
    wide = i.to(tl.int64)
    first = wide * MR
    own = w + tl.minimum(wide, N - 1) * (P * ROW)
    zero = tl.zeros([A * G], tl.float32)
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
        df = basis_slopes(r, tl.load(inverse_rc + ti * P + tj), K)
        theirs = w + (j.to(tl.int64) * P + ti) * ROW
        a_ij = zero
        a_ji = zero
        for part in tl.static_range(ROW // 4):
            w_i = quad(own + tj * ROW + 4 * part)
            w_j = quad(theirs + 4 * part)
            for k in tl.static_range(4):
                if 4 * part + k < K:
                    if VIRIALS:
                        a_ij += df[4 * part + k] * w_i[k]
                        a_ji += df[4 * part + k] * w_j[k]
                    else:
                        a_ij += df[4 * part + k] * (w_i[k] + w_j[k])
        a_ij = tl.where(live, (a_ij + a_ji) * inverse, 0.0)
        force = (force[0] + a_ij * rx, force[1] + a_ij * ry, force[2] + a_ij * rz)
        if VIRIALS:
            a_ji = tl.where(live, -a_ji * inverse, 0.0)
            x = a_ji * rx
            y = a_ji * ry
            z = a_ji * rz
            virial = (
                virial[0] + x * rx, virial[1] + x * ry, virial[2] + x * rz,
                virial[3] + y * ry, virial[4] + y * rz, virial[5] + z * rz,
            )  # fmt: skip
        start += G
    i = tl.program_id(0) * A + tl.arange(0, A)
    inside = i < N
    wide = i.to(tl.int64)
    for d in tl.static_range(3):
        tl.store(forces + 3 * wide + d, over(force[d], A, G), mask=inside)
    if VIRIALS:
        put_symmetric(virials, wide, inside, virial, A, G, False)


@triton.jit
def put_symmetric(virials, i, inside, virial, A: tl.constexpr, G: tl.constexpr, ADD: tl.constexpr):
    """Write the sums over G of xx xy xz yy yz zz as nine components, on top of what is there with ADD."""
    xx = over(virial[0], A, G)
    xy = over(virial[1], A, G)
    xz = over(virial[2], A, G)
    yy = over(virial[3], A, G)
    yz = over(virial[4], A, G)
    zz = over(virial[5], A, G)
    nine = (xx, xy, xz, xy, yy, yz, xz, yz, zz)
    for d in tl.static_range(9):
        value = nine[d]
        if ADD:
            value += tl.load(virials + 9 * i + d, mask=inside, other=0.0)
        tl.store(virials + 9 * i + d, value, mask=inside)
