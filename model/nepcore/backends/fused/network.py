"""Kernels of the site energy: atoms by element, and the network of each element with its slopes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N"])
def element_order(rows, structure, tally, order, N, P, A: tl.constexpr):
    """Put the atoms of element t into order[t] (P, N), and count them in ``tally`` (P,), zero before.

    In which order they come there is left to chance, and changes nothing: each has its own lane.
    """
    i = tl.program_id(0) * A + tl.arange(0, A)
    real = tl.load(structure + i, mask=i < N, other=-1) >= 0
    ti = tl.load(rows + 4 * i + 3, mask=real, other=-1)
    t = 0
    while t < P:
        mine = ((ti == t) & real).to(tl.int32)
        number = tl.sum(mine, axis=0)
        if number > 0:
            at = tl.atomic_add(tally + t, number) + tl.cumsum(mine, axis=0) - 1
            tl.store(order + t * N.to(tl.int64) + at, i, mask=mine > 0)
        t += 1


@triton.jit
def tanh(x):
    """Hyperbolic tangent; off by 1e−7 at most."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit(do_not_specialize=["N"])
def network(
    rows, structure, temperatures, order, tally, w0, b0, w1, b1, w2, bias, scaler, c, hidden,
    q, w, energy, descriptors,
    N, P, M,
    D: tl.constexpr, H: tl.constexpr, H2: tl.constexpr, TEMPERATURE: tl.constexpr, DESCRIPTORS: tl.constexpr,
    N_R: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, ORDERED: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Site energies U_i (N,) in float64, and their slopes, of A atoms of one element a program.

    ∂U_i/∂q replaces the angular rows of q (D, N). Those by the radial part come as coefficients of the basis functions:
    w[i, t, k] = Σ_n ∂U_i/∂q_n c[ti, t, n, k], (N, P, ROW). With two layers ``hidden`` (H + H2, N) is a scratch.
    """
    lane = tl.arange(0, A)
    if ORDERED:
        tile = tl.program_id(0)
        first = 0
        t = -1
        start = 0
        number = 0
        e = 0
        while e < P:
            atoms = tl.load(tally + e)
            tiles = (atoms + A - 1) // A
            if (tile >= first) & (tile < first + tiles):
                t = e
                start = (tile - first) * A
                number = atoms
            first += tiles
            e += 1
        if t < 0:
            return
        there = start + lane < number
        i = tl.load(order + t * N.to(tl.int64) + start + lane, mask=there, other=0)
    else:
        t = 0
        i = tl.program_id(0) * A + lane
        there = i < N
    net = t if M > 1 else 0
    wide = i.to(tl.int64)
    x = ()
    for d in tl.static_range(D - TEMPERATURE):
        x = x + (tl.load(q + d * N.to(tl.int64) + i, mask=there, other=0.0),)
    if TEMPERATURE:
        s = tl.maximum(tl.load(structure + i, mask=there, other=0), 0)
        x = x + (tl.load(temperatures + s),)
    if DESCRIPTORS:
        for d in tl.static_range(D):
            tl.store(descriptors + wide * D + d, x[d] * tl.load(scaler + d), mask=there)
    u = tl.zeros([A], tl.float32)
    slope = ()
    for _ in tl.static_range(D):
        slope = slope + (tl.zeros([A], tl.float32),)
    first_layer = w0 + net * (H * D)
    if H2 == 0:
        for h in range(H):
            value = neuron(x, first_layer + h * D, tl.load(b0 + net * H + h), D)
            weight = tl.load(w1 + net * H + h)
            u += weight * value
            slope = added(slope, first_layer + h * D, (1.0 - value * value) * weight, D)
    else:
        second_layer = w1 + net * (H2 * H)
        column = hidden + i
        slopes = hidden + H * N.to(tl.int64) + i
        for h in range(H):
            tl.store(
                column + h * N.to(tl.int64), neuron(x, first_layer + h * D, tl.load(b0 + net * H + h), D), mask=there
            )
        tl.debug_barrier()
        for h2 in range(H2):
            total = tl.zeros([A], tl.float32) - tl.load(b1 + net * H2 + h2)
            for h in range(H):
                total += tl.load(second_layer + h2 * H + h) * tl.load(
                    column + h * N.to(tl.int64), mask=there, other=0.0
                )
            value = tanh(total)
            weight = tl.load(w2 + net * H2 + h2)
            u += weight * value
            tl.store(slopes + h2 * N.to(tl.int64), (1.0 - value * value) * weight, mask=there)
        tl.debug_barrier()
        for h in range(H):
            total = tl.zeros([A], tl.float32)
            for h2 in range(H2):
                total += tl.load(second_layer + h2 * H + h) * tl.load(
                    slopes + h2 * N.to(tl.int64), mask=there, other=0.0
                )
            value = tl.load(column + h * N.to(tl.int64), mask=there, other=0.0)
            slope = added(slope, first_layer + h * D, (1.0 - value * value) * total, D)
    tl.store(energy + i, u.to(tl.float64) - tl.load(bias + t), mask=there)
    for d in tl.static_range(N_R, D - TEMPERATURE):
        tl.store(q + d * N.to(tl.int64) + i, slope[d], mask=there)
    e = 0
    while e < P:
        own = c + (t * P + e) * (N_R * ROW)
        target = w + (wide * P + e) * ROW
        for part in tl.static_range(ROW // 4):
            k0 = radial_weight(slope, own + 4 * part, N_R, ROW)
            k1 = radial_weight(slope, own + 4 * part + 1, N_R, ROW)
            k2 = radial_weight(slope, own + 4 * part + 2, N_R, ROW)
            k3 = radial_weight(slope, own + 4 * part + 3, N_R, ROW)
            four = tl.reshape(tl.join(tl.join(k0, k2), tl.join(k1, k3)), (A, 4))
            tl.store(target[:, None] + (4 * part + tl.arange(0, 4))[None, :], four, mask=there[:, None])
        e += 1


@triton.jit
def neuron(x, w, b, D: tl.constexpr):
    """tanh(w·x − b)."""
    total = tl.zeros_like(x[0]) - b
    for d in tl.static_range(D):
        total += tl.load(w + d) * x[d]
    return tanh(total)


@triton.jit
def added(slope, w, factor, D: tl.constexpr):
    """slope + factor w."""
    out = ()
    for d in tl.static_range(D):
        out = out + (slope[d] + factor * tl.load(w + d),)
    return out


@triton.jit
def radial_weight(slope, c, N_R: tl.constexpr, ROW: tl.constexpr):
    """Σ_n slope_n c[n]."""
    value = slope[0] * tl.load(c)
    for n in tl.static_range(1, N_R):
        value += slope[n] * tl.load(c + n * ROW)
    return value
