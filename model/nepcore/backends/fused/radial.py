"""Kernels of the radial part: the descriptor q_n, and forces from its slopes."""

from __future__ import annotations

import triton
import triton.language as tl

from .pairs import basis, basis_slopes, centres, length, neighbour, quad, zeros


@triton.jit(do_not_specialize=["N", "MR"])
def radial_sums(
    rows, structure, cells, units, index, image, count, c, inverse_rc, q,
    N, MR, P,
    N_R: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, APART: tl.constexpr, IMAGES: tl.constexpr,
    A: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """q_n(i) = Σ_j g_n(r_ij) of A atoms, G neighbours at a time: q (n, N), not scaled.

    With APART elements kept apart, basis functions are summed over the neighbours of each, and coefficients come in
    once an atom; with 0 they come in for every pair.
    """
    i = tl.program_id(0) * A + tl.arange(0, A)
    inside = i < N
    centre, ti, s, cell = centres(rows, structure, cells, i, inside)
    number = tl.load(count + i, mask=inside, other=0)
    n_slots = number[None, :]
    first = i.to(tl.int64)[None, :] * MR
    slot = tl.arange(0, G)[:, None]
    zero = tl.zeros([G, A], tl.float32)
    total = zeros(zero, APART * K if APART else N_R)
    start = 0
    most = tl.max(number, axis=0)
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
    if APART:
        sums = ()
        for k in tl.static_range(APART * K):
            sums = sums + (tl.sum(total[k], axis=0),)
        own = c + tl.reshape(ti, (A,)) * (P * N_R * ROW)
        for n in tl.static_range(N_R):
            value = tl.zeros([A], tl.float32)
            for t in tl.static_range(APART):
                for k in tl.static_range(K):
                    value += tl.load(own + ((t * N_R + n) * ROW + k)) * sums[t * K + k]
            tl.store(q + n * N.to(tl.int64) + i, value, mask=inside)
    else:
        for n in tl.static_range(N_R):
            tl.store(q + n * N.to(tl.int64) + i, tl.sum(total[n], axis=0), mask=inside)


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
    i = tl.program_id(0) * A + tl.arange(0, A)
    inside = i < N
    centre, ti, s, cell = centres(rows, structure, cells, i, inside)
    number = tl.load(count + i, mask=inside, other=0)
    n_slots = number[None, :]
    wide = i.to(tl.int64)[None, :]
    first = wide * MR
    own = w + tl.minimum(wide, N - 1) * (P * ROW)
    slot = tl.arange(0, G)[:, None]
    zero = tl.zeros([G, A], tl.float32)
    force = zeros(zero, 3)
    virial = zeros(zero, 6 if VIRIALS else 0)
    start = 0
    most = tl.max(number, axis=0)
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
    wide = i.to(tl.int64)
    for d in tl.static_range(3):
        tl.store(forces + 3 * wide + d, tl.sum(force[d], axis=0), mask=inside)
    if VIRIALS:
        put_symmetric(virials, wide, inside, virial, False)


@triton.jit
def put_symmetric(virials, i, inside, virial, ADD: tl.constexpr):
    """Write the sums over G of xx xy xz yy yz zz as nine components, on top of what is there with ADD."""
    xx = tl.sum(virial[0], axis=0)
    xy = tl.sum(virial[1], axis=0)
    xz = tl.sum(virial[2], axis=0)
    yy = tl.sum(virial[3], axis=0)
    yz = tl.sum(virial[4], axis=0)
    zz = tl.sum(virial[5], axis=0)
    nine = (xx, xy, xz, xy, yy, yz, xz, yz, zz)
    for d in tl.static_range(9):
        value = nine[d]
        if ADD:
            value += tl.load(virials + 9 * i + d, mask=inside, other=0.0)
        tl.store(virials + 9 * i + d, value, mask=inside)
