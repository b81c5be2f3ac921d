"""Kernels of the site energy: atoms by element, and the network of each element with its slopes."""

from __future__ import annotations

import triton
import triton.language as tl

from .pairs import put_quad, quad


@triton.jit(do_not_specialize=["N"])
def element_order(rows, structure, tally, order, N, P, EACH: tl.constexpr, A: tl.constexpr):
    """Put the atoms of element t into order[t] (P, N), and count them in ``tally`` (P,), zero before.

    In which order they come there is left to chance, and changes nothing: each has its own lane. With EACH every atom
    counts by itself, which is faster for a few.
    """
    i = tl.program_id(0) * A + tl.arange(0, A)
    real = tl.load(structure + i, mask=i < N, other=-1) >= 0
    ti = tl.load(rows + 4 * i + 3, mask=real, other=-1)
    if EACH:
        at = tl.atomic_add(tally + ti, 1, mask=real)
        tl.store(order + ti * N.to(tl.int64) + at, i, mask=real)
    else:
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
    structure, temperatures, order, tally, w0, b0, w1, b1, w2, bias, scaler, hidden,
    q, energy, descriptors,
    N, P, M,
    D: tl.constexpr, ROW: tl.constexpr, H: tl.constexpr, H2: tl.constexpr,
    TEMPERATURE: tl.constexpr, DESCRIPTORS: tl.constexpr, ORDERED: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Site energies U_i (N,) in float64, and ∂U_i/∂q in the place of q (D, N), of R · A atoms of one element a program.

    The inputs of an atom are dealt to S lanes, each of which works for R atoms: tiles are [R, S, A], input d = p S + s
    is tile p of lane s. Rows of w0 (M, H, ROW) are padded with zeros to a multiple of S. With two layers ``hidden``
    (H + H2, N) is a scratch.
    """
    lane = tl.arange(0, R)[:, None] * A + tl.arange(0, A)[None, :]  # (R, A)
    if ORDERED:
        tile = tl.program_id(0)
        first = 0
        t = -1
        start = 0
        number = 0
        e = 0
        while e < P:
            atoms = tl.load(tally + e)
            tiles = (atoms + R * A - 1) // (R * A)
            if (tile >= first) & (tile < first + tiles):
                t = e
                start = (tile - first) * (R * A)
                number = atoms
            first += tiles
            e += 1
        if t < 0:
            return
        there = start + lane < number
        i = tl.load(order + t * N.to(tl.int64) + start + lane, mask=there, other=0)
    else:
        t = 0
        i = tl.program_id(0) * (R * A) + lane
        there = i < N
    net = t if M > 1 else 0
    wide = N.to(tl.int64)
    s = tl.arange(0, S)[None, :, None]
    copy = s + tl.zeros([1, S, A], tl.int32)  # one address for each lane
    x = ()
    for p in tl.static_range(ROW // S):
        d = p * S + s
        here = there[:, None, :] & (d < D - TEMPERATURE)
        inputs = tl.load(q + d * wide + i[:, None, :], mask=here, other=0.0)
        if TEMPERATURE and p == (D - 1) // S:
            own = tl.maximum(tl.load(structure + i, mask=there, other=0), 0)
            inputs = tl.where(d == D - 1, tl.load(temperatures + own)[:, None, :], inputs)
        x = x + (inputs,)
    if DESCRIPTORS:
        for p in tl.static_range(ROW // S):
            d = p * S + s
            here = there[:, None, :] & (d < D)
            scaled = x[p] * tl.load(scaler + d, mask=d < D, other=0.0)
            tl.store(descriptors + i[:, None, :].to(tl.int64) * D + d, scaled, mask=here)
    slope = ()
    for _ in tl.static_range(ROW // S):
        slope = slope + (tl.zeros([R, S, A], tl.float32),)
    u = tl.zeros([R, A], tl.float32)
    layer = w0 + net * (H * ROW) + copy
    h = 0
    if H2 == 0:
        while h < H:
            for neuron in tl.static_range(2):  # two at a time: neither waits for the other
                w = weights_of(layer + (h + neuron) * ROW, ROW, S)
                value = tanh(product(x, w) - tl.load(b0 + net * H + h + neuron))
                weight = tl.load(w1 + net * H + h + neuron)
                u += weight * value
                slope = added(slope, w, (1.0 - value * value) * weight)
            h += 2
    else:
        second = w1 + net * (H2 * H)
        column = hidden + i
        slopes = hidden + H * wide + i
        while h < H:
            value = tanh(product(x, weights_of(layer + h * ROW, ROW, S)) - tl.load(b0 + net * H + h))
            tl.store(column + h * wide, value, mask=there)
            h += 1
        tl.debug_barrier()
        h2 = 0
        while h2 < H2:
            total = tl.zeros([R, A], tl.float32) - tl.load(b1 + net * H2 + h2)
            h = 0
            while h < H:
                total += tl.load(second + h2 * H + h) * tl.load(column + h * wide, mask=there, other=0.0)
                h += 1
            value = tanh(total)
            weight = tl.load(w2 + net * H2 + h2)
            u += weight * value
            tl.store(slopes + h2 * wide, (1.0 - value * value) * weight, mask=there)
            h2 += 1
        tl.debug_barrier()
        h = 0
        while h < H:
            total = tl.zeros([R, A], tl.float32)
            h2 = 0
            while h2 < H2:
                total += tl.load(second + h2 * H + h) * tl.load(slopes + h2 * wide, mask=there, other=0.0)
                h2 += 1
            value = tl.load(column + h * wide, mask=there, other=0.0)
            slope = added(slope, weights_of(layer + h * ROW, ROW, S), (1.0 - value * value) * total)
            h += 1
    tl.store(energy + i, u.to(tl.float64) - tl.load(bias + t), mask=there)
    for p in tl.static_range(ROW // S):
        d = p * S + s
        tl.store(q + d * wide + i[:, None, :], slope[p], mask=there[:, None, :] & (d < D))


@triton.jit
def weights_of(row, ROW: tl.constexpr, S: tl.constexpr):
    """A row of weights, each lane its own share."""
    w = ()
    for p in tl.static_range(ROW // S):
        w = w + (tl.load(row + p * S),)
    return w


@triton.jit
def product(x, w):
    """w·x: (R, A); two sums at a time, since each addition waits for the one before."""
    even = x[0] * w[0]
    odd = tl.zeros_like(even)
    for p in tl.static_range(1, len(x)):
        if p % 2:
            odd += x[p] * w[p]
        else:
            even += x[p] * w[p]
    return tl.sum(even + odd, axis=1)


@triton.jit
def added(slope, w, factor):
    """slope + factor w."""
    out = ()
    for p in tl.static_range(len(slope)):
        out = out + (slope[p] + factor[:, None, :] * w[p],)
    return out


@triton.jit(do_not_specialize=["N"])
def radial_weights(
    rows, f, c, w,
    N, P,
    N_R: tl.constexpr, ROW: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """w[i, t, k] = Σ_n ∂U_i/∂q_n c[ti, t, n, k], (N, P, ROW): radial slopes as coefficients of the basis functions.

    f (D, N) has the slopes by the descriptor, those of the radial part first. A lane has one i and t.
    """
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    i = lane // P
    t = lane % P
    there = i < N
    i = tl.minimum(i, N - 1)
    own = c + (tl.load(rows + 4 * i + 3) * P + t) * (N_R * ROW)
    f = f + i
    slope = ()
    for n in tl.static_range(N_R):
        slope = slope + (tl.load(f + n * N.to(tl.int64)),)
    for part in tl.static_range(ROW // 4):
        c4 = quad(own + 4 * part)
        k0 = slope[0] * c4[0]
        k1 = slope[0] * c4[1]
        k2 = slope[0] * c4[2]
        k3 = slope[0] * c4[3]
        for n in tl.static_range(1, N_R):
            c4 = quad(own + (n * ROW + 4 * part))
            k0 += slope[n] * c4[0]
            k1 += slope[n] * c4[1]
            k2 += slope[n] * c4[2]
            k3 += slope[n] * c4[3]
        put_quad(w + lane * ROW + 4 * part, k0, k1, k2, k3, there)
