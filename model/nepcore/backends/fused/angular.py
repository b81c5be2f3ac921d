"""Kernels of the angular part: sums s_nb and their invariants, slopes by the sums, and forces from those."""

from __future__ import annotations

import triton
import triton.language as tl

from .harmonics import harmonics, legendre, legendre_slope, place, powers
from .invariants import gradient, invariants
from .pairs import basis, basis_slopes, centres, lanes_of, length, neighbour, over, put_quad, quad, vector, zeros


@triton.jit
def contracted(f, c, N_A: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr):
    """g_n = Σ_k c_nk f_k for n = 0 … N_A − 1, with rows of coefficients from each pointer of a tile on."""
    g = ()
    for n in tl.static_range(N_A):
        value = tl.zeros_like(f[0])
        for part in tl.static_range(ROW // 4):
            c4 = quad(c + (n * ROW + 4 * part))
            for k in tl.static_range(4):
                if 4 * part + k < K:
                    value += c4[k] * f[4 * part + k]
        g = g + (value,)
    return g


@triton.jit
def contracted_both(f, df, c, K: tl.constexpr, ROW: tl.constexpr):
    """g_n and g_n′ of the function whose row of coefficients begins at each pointer of a tile."""
    g = tl.zeros_like(f[0])
    dg = tl.zeros_like(f[0])
    for part in tl.static_range(ROW // 4):
        c4 = quad(c + 4 * part)
        for k in tl.static_range(4):
            if 4 * part + k < K:
                g += c4[k] * f[4 * part + k]
                dg += c4[k] * df[4 * part + k]
    return g, dg


@triton.jit(do_not_specialize=["N", "MA"])
def angular_sums(
    rows, structure, cells, units, index, image, count, c, inverse_rc, sums, q,
    N, MA, P,
    N_A: tl.constexpr, N_ROW: tl.constexpr, K: tl.constexpr, C_FUNCTIONS: tl.constexpr, C_ROW: tl.constexpr,
    L: tl.constexpr, SWITCHES: tl.constexpr, FIRST: tl.constexpr, IMAGES: tl.constexpr,
    A: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """s_nb(i) = Σ_j g_n(r_ij) Y_b and the blocks of the descriptor, of A atoms and GROUP functions n a program.

    Writes sums (N, B, N_ROW), in whose rows each group of functions is padded to a multiple of four, and the
    descriptor's rows from FIRST on: q (D, N), not scaled.
    """
    i, slot = lanes_of(A, G)
    n_first = tl.program_id(1) * GROUP
    inside = i < N
    B: tl.constexpr = L * (L + 2)
    centre, ti, s, cell = centres(rows, structure, cells, i, inside)
    n_slots = tl.load(count + i, mask=inside, other=0)
    first = i.to(tl.int64) * MA
    total = zeros(tl.zeros([A * G], tl.float32), GROUP * B)
    # Few programs fit on a processor at a time: the next neighbours are fetched while these are worked on.
    at = first + slot
    j = tl.load(index + at, mask=slot < n_slots, other=0)
    code = tl.load(image + at, mask=slot < n_slots, other=0) if IMAGES else j
    row = quad(rows + 4 * j)
    j = tl.load(index + at + G, mask=slot + G < n_slots, other=0)
    start = 0
    most = tl.max(n_slots, axis=0)
    while start < most:
        live = slot + start < n_slots
        coming = slot + start + G < n_slots
        next_row = quad(rows + 4 * j)
        next_code = tl.load(image + at + (start + G), mask=coming, other=0) if IMAGES else j
        j = tl.load(index + at + (start + 2 * G), mask=slot + start + 2 * G < n_slots, other=0)
        rx, ry, rz, tj = vector(row, code, units, centre, s, cell, IMAGES)
        row = next_row
        code = next_code
        r, inverse = length(rx, ry, rz, live)
        pair = ti * P + tj
        f = basis(r, tl.load(inverse_rc + pair), K)
        g = contracted(f, c + (pair * C_FUNCTIONS + n_first) * C_ROW, GROUP, K, C_ROW)
        y = harmonics(rx * inverse, ry * inverse, rz * inverse, L)
        after = ()
        for n in tl.static_range(GROUP):
            for b in tl.static_range(B):
                after = after + (total[n * B + b] + g[n] * y[b],)
        total = after
        start += G
    i = tl.program_id(0) * A + tl.arange(0, A)
    inside = i < N
    wide = i.to(tl.int64)
    own = ()
    for at_once in tl.static_range(GROUP * B):
        own = own + (over(total[at_once], A, G),)
    nothing = tl.zeros([A], tl.float32)
    PAD: tl.constexpr = (GROUP + 3) // 4 * 4
    target = sums + wide * (B * N_ROW) + tl.program_id(1) * PAD
    for b in tl.static_range(B):
        for n in tl.static_range(0, GROUP, 4):
            put_quad(
                target + (b * N_ROW + n),
                own[n * B + b],
                own[(n + 1) * B + b] if n + 1 < GROUP else nothing,
                own[(n + 2) * B + b] if n + 2 < GROUP else nothing,
                own[(n + 3) * B + b] if n + 3 < GROUP else nothing,
                inside,
            )
    for n in tl.static_range(GROUP):
        blocks = invariants(own[n * B : (n + 1) * B], L, SWITCHES)
        for block in tl.static_range(len(blocks)):
            row = FIRST + block * N_A + n_first + n
            # Of all lanes: a condition of one number is no mask for every version of the interpreter.
            there = inside & (tl.full([A], n_first + n, tl.int32) < N_A)
            tl.store(q + row * N.to(tl.int64) + i, blocks[block], mask=there)


@triton.jit(do_not_specialize=["N"])
def angular_slopes(
    sums, f,
    N,
    N_A: tl.constexpr, N_ROW: tl.constexpr, L: tl.constexpr, SWITCHES: tl.constexpr, BLOCKS: tl.constexpr,
    FIRST: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """∂U_i/∂s_nb = Σ_blocks ∂U_i/∂q · ∂q/∂s_nb, in the place of the sums (N, B, N_ROW); a lane has one atom and n.

    f (D, N) has the slopes by the descriptor.
    """
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    i = lane // N_ROW
    column = (lane % N_ROW).to(tl.int32)
    PAD: tl.constexpr = (GROUP + 3) // 4 * 4
    n = column // PAD * GROUP + column % PAD
    there = (i < N) & (n < N_A) & (column % PAD < GROUP)
    B: tl.constexpr = L * (L + 2)
    place = sums + i * (B * N_ROW) + column
    s = ()
    for b in tl.static_range(B):
        s = s + (tl.load(place + b * N_ROW, mask=there, other=0.0),)
    slope = ()
    for block in tl.static_range(BLOCKS):
        row = (FIRST + block * N_A + n).to(tl.int64)
        slope = slope + (tl.load(f + row * N + i, mask=there, other=0.0),)
    d = gradient(s, slope, L, SWITCHES)
    for b in tl.static_range(B):
        tl.store(place + b * N_ROW, d[b], mask=there)


@triton.jit(do_not_specialize=["N", "MA"])
def angular_forces(
    rows, structure, cells, units, index, image, count, c, inverse_rc, slopes, push, pull,
    N, MA, P,
    N_A: tl.constexpr, N_ROW: tl.constexpr, K: tl.constexpr, C_FUNCTIONS: tl.constexpr, C_ROW: tl.constexpr,
    L: tl.constexpr, GROUP: tl.constexpr, IMAGES: tl.constexpr,
    A: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """G_ij = ∂U_i/∂r_ij of A atoms, G neighbours at a time: push (N, MA, 4), and their sum: pull (N, 4).

    With D_nb = ∂U_i/∂s_nb, P_b = Σ_n D_nb g_n and Q_b = Σ_n D_nb g_n′:
    G = r̂ Σ_b Q_b Y_b + (1/r) (1 − r̂ r̂ᵀ) Σ_b P_b ∇Y_b.
    """
    i, slot = lanes_of(A, G)
    inside = i < N
    B: tl.constexpr = L * (L + 2)
    centre, ti, s, cell = centres(rows, structure, cells, i, inside)
    n_slots = tl.load(count + i, mask=inside, other=0)
    wide = i.to(tl.int64)
    first = wide * MA
    zero = tl.zeros([A * G], tl.float32)
    own = slopes + tl.minimum(wide, N - 1) * (B * N_ROW)
    force = zeros(zero, 3)
    start = 0
    most = tl.max(n_slots, axis=0)
    while start < most:
        live = slot + start < n_slots
        at = first + slot + start
        j = tl.load(index + at, mask=live, other=0)
        rx, ry, rz, tj = neighbour(rows, units, image, at, j, live, centre, s, cell, IMAGES)
        r, inverse = length(rx, ry, rz, live)
        pair = ti * P + tj
        scale = tl.load(inverse_rc + pair)
        f = basis(r, scale, K)
        df = basis_slopes(r, scale, K)
        big_p = zeros(zero, B)
        big_q = zeros(zero, B)
        coefficients = c + pair * (C_FUNCTIONS * C_ROW)
        n = 0
        while n < N_A:
            g, dg = contracted_both(f, df, coefficients + n * C_ROW, K, C_ROW)
            column = own + (n // GROUP * ((GROUP + 3) // 4 * 4) + n % GROUP)
            after_p = ()
            after_q = ()
            for b in tl.static_range(B):
                d = tl.load(column + b * N_ROW)
                after_p = after_p + (big_p[b] + d * g,)
                after_q = after_q + (big_q[b] + d * dg,)
            big_p = after_p
            big_q = after_q
            n += 1
        x = rx * inverse
        y = ry * inverse
        z = rz * inverse
        z2 = z * z
        re, im = powers(x, y, L)
        along = zero  # Σ_b Q_b Y_b
        px = zero  # Σ_b P_b ∇Y_b
        py = zero
        pz = zero
        for m in tl.static_range(L + 1):
            # Over all l: Σ Q P_lm, Σ P P_lm, Σ P P_lm′, of the real and of the imaginary polynomials.
            q_re = zero
            q_im = zero
            p_re = zero
            p_im = zero
            t_re = zero
            t_im = zero
            for l in tl.static_range(m if m else 1, L + 1):
                v = legendre(z, z2, l, m)
                q_re += big_q[place(l, m)] * v
                p_re += big_p[place(l, m)] * v
                if m:
                    q_im += big_q[place(l, m) + 1] * v
                    p_im += big_p[place(l, m) + 1] * v
                if m < l:
                    dv = legendre_slope(z, z2, l, m)
                    t_re += big_p[place(l, m)] * dv
                    if m:
                        t_im += big_p[place(l, m) + 1] * dv
            if m == 0:
                along += q_re
                pz += t_re
            else:
                along += q_re * re[m] + q_im * im[m]
                pz += t_re * re[m] + t_im * im[m]
                px += m * (p_re * re[m - 1] + p_im * im[m - 1])
                py += m * (p_im * re[m - 1] - p_re * im[m - 1])
        along -= inverse * (px * x + py * y + pz * z)
        gx = tl.where(live, along * x + inverse * px, 0.0)
        gy = tl.where(live, along * y + inverse * py, 0.0)
        gz = tl.where(live, along * z + inverse * pz, 0.0)
        put_quad(push + 4 * at, gx, gy, gz, zero, live)
        force = (force[0] + gx, force[1] + gy, force[2] + gz)
        start += G
    i = tl.program_id(0) * A + tl.arange(0, A)
    inside = i < N
    wide = i.to(tl.int64)
    nothing = tl.zeros([A], tl.float32)
    put_quad(pull + 4 * wide, over(force[0], A, G), over(force[1], A, G), over(force[2], A, G), nothing, inside)


@triton.jit(do_not_specialize=["N", "MA"])
def angular_gather(
    rows, structure, cells, units, index, image, count, reverse, push, pull, forces, target, virials,
    N, MA,
    IMAGES: tl.constexpr, VIRIALS: tl.constexpr,
    A: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """F_i += Σ_j (G_ij − G_ji), W_i += Σ_j r_ij ⊗ G_ji, each G_ji found by its reverse pair.

    The forces of all other parts are read from ``forces``, and ``target`` gets the whole.
    """
    i, slot = lanes_of(A, G)
    inside = i < N
    n_slots = tl.load(count + i, mask=inside, other=0)
    first = i.to(tl.int64) * MA
    zero = tl.zeros([A * G], tl.float32)
    force = zeros(zero, 3)
    if VIRIALS:
        centre, ti, s, cell = centres(rows, structure, cells, i, inside)
    virial = zeros(zero, 9 if VIRIALS else 0)
    start = 0
    most = tl.max(n_slots, axis=0)
    while start < most:
        live = slot + start < n_slots
        at = first + slot + start
        back = tl.load(reverse + at, mask=live, other=0).to(tl.int64)
        gx, gy, gz, rest = quad(push + 4 * back)
        gx = tl.where(live, gx, 0.0)
        gy = tl.where(live, gy, 0.0)
        gz = tl.where(live, gz, 0.0)
        force = (force[0] - gx, force[1] - gy, force[2] - gz)
        if VIRIALS:
            j = tl.load(index + at, mask=live, other=0)
            rx, ry, rz, tj = neighbour(rows, units, image, at, j, live, centre, s, cell, IMAGES)
            virial = (
                virial[0] + rx * gx, virial[1] + rx * gy, virial[2] + rx * gz,
                virial[3] + ry * gx, virial[4] + ry * gy, virial[5] + ry * gz,
                virial[6] + rz * gx, virial[7] + rz * gy, virial[8] + rz * gz,
            )  # fmt: skip
        start += G
    i = tl.program_id(0) * A + tl.arange(0, A)
    inside = i < N
    wide = i.to(tl.int64)
    for d in tl.static_range(3):
        value = tl.load(forces + 3 * wide + d, mask=inside, other=0.0)
        value += tl.load(pull + 4 * wide + d, mask=inside, other=0.0)
        tl.store(target + 3 * wide + d, value + over(force[d], A, G), mask=inside)
    if VIRIALS:
        for d in tl.static_range(9):
            value = tl.load(virials + 9 * wide + d, mask=inside, other=0.0) + over(virial[d], A, G)
            tl.store(virials + 9 * wide + d, value, mask=inside)
