"""What every kernel over pairs begins with: where the neighbour is, and the radial basis there."""

from __future__ import annotations

import triton
import triton.language as tl

COINCIDENT = tl.constexpr(1e-5)
"""Atoms closer than this, Å, count as being at one place; distances are taken to be no smaller."""

FAR = tl.constexpr(1e9)
"""Distance of a slot that no neighbour fills, Å: beyond every cutoff."""


@triton.jit
def lanes_of(A: tl.constexpr, G: tl.constexpr):
    """The lanes of a program that gives G lanes each to A atoms: atom i and place among its lanes, both (A · G,)."""
    lane = tl.arange(0, A * G)
    return tl.program_id(0) * A + lane // G, lane % G


@triton.jit
def over(x, A: tl.constexpr, G: tl.constexpr):
    """Sum over the G lanes of an atom: (A · G,) → (A,)."""
    return tl.sum(tl.reshape(x, (A, G)), axis=1)


@triton.jit
def quad(pointer):
    """Four consecutive numbers from each pointer on; addresses are multiples of 16."""
    v = tl.load(pointer[:, None] + tl.arange(0, 4)[None, :])  # (lanes, 4)
    even, odd = tl.split(tl.reshape(v, (pointer.shape[0], 2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


@triton.jit
def put_quad(pointer, v0, v1, v2, v3, mask):
    """Write four consecutive numbers from each pointer on."""
    v = tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), (pointer.shape[0], 4))
    tl.store(pointer[:, None] + tl.arange(0, 4)[None, :], v, mask=mask[:, None])


@triton.jit
def centres(rows, structure, cells, i, inside):
    """Position in steps, element, structure and cell (Å a step) of the centre of each lane."""
    x = tl.load(rows + 4 * i, mask=inside, other=0)
    y = tl.load(rows + 4 * i + 1, mask=inside, other=0)
    z = tl.load(rows + 4 * i + 2, mask=inside, other=0)
    ti = tl.load(rows + 4 * i + 3, mask=inside, other=0)
    s = tl.maximum(tl.load(structure + i, mask=inside, other=0), 0)
    cell = ()
    for d in tl.static_range(9):
        cell = cell + (tl.load(cells + 9 * s + d),)
    return (x, y, z), ti, s, cell


@triton.jit
def neighbour(rows, units, image, at, j, live, centre, s, cell, IMAGES: tl.constexpr):
    """Vector r_j − r_i of the pair of each lane in Å, and the element of j; its image code stands at ``image + at``."""
    code = j
    if IMAGES:
        code = tl.load(image + at, mask=live, other=0)
    return vector(quad(rows + 4 * j), code, units, centre, s, cell, IMAGES)


@triton.jit
def vector(row, code, units, centre, s, cell, IMAGES: tl.constexpr):
    """Vector r_j − r_i of the pair of each lane in Å, and the element of j, whose row of four numbers is ``row``.

    Differences of positions are whole numbers of steps and wrap, which makes them those to the nearest image. With
    images, ``code`` is the pair's own shift in cell vectors, three signed numbers of 10 bits.
    """
    xj, yj, zj, tj = row
    x, y, z = centre
    x = xj - x
    y = yj - y
    z = zj - z
    if IMAGES:
        x += ((code << 22) >> 22) * tl.load(units + 3 * s)
        y += ((code << 12) >> 22) * tl.load(units + 3 * s + 1)
        z += ((code << 2) >> 22) * tl.load(units + 3 * s + 2)
    u = x.to(tl.float32)
    v = y.to(tl.float32)
    w = z.to(tl.float32)
    rx = u * cell[0] + v * cell[3] + w * cell[6]
    ry = u * cell[1] + v * cell[4] + w * cell[7]
    rz = u * cell[2] + v * cell[5] + w * cell[8]
    return rx, ry, rz, tj


@triton.jit
def length(rx, ry, rz, live):
    """Distance (Å) and its inverse; of an empty slot, a distance beyond every cutoff."""
    square = tl.maximum(rx * rx + ry * ry + rz * rz, COINCIDENT * COINCIDENT)
    inverse = tl.rsqrt(square)
    return tl.where(live, square * inverse, FAR), inverse


@triton.jit
def cutoff_function(r, inverse_rc):
    """½ fc, ½ fc′, x = 2(r/rc − 1)² − 1 and dx/dr, all zero but x from rc on.

    fc = ½ cos(π r/rc) + ½ = sin²(π p/2) with p = 1 − r/rc, and fc′ = −(π/rc) sin(π p/2) cos(π p/2). Both are
    polynomials in p², fitted at Chebyshev nodes of 0 to 1; they are off by less than 1e−8.
    """
    p = tl.maximum(1.0 - r * inverse_rc, 0.0)
    p2 = p * p
    sine = -3.4318293e-06 * p2 + 1.60254691e-04
    sine = sine * p2 - 4.6816578e-03
    sine = sine * p2 + 7.96926037e-02
    sine = sine * p2 - 6.45964096e-01
    sine = (sine * p2 + 1.57079633e00) * p
    cosine = -2.38245355e-05 * p2 + 9.17723882e-04
    cosine = cosine * p2 - 2.08626875e-02
    cosine = cosine * p2 + 2.53669322e-01
    cosine = cosine * p2 - 1.23370053e00
    cosine = cosine * p2 + 1.0
    half_fc = 0.5 * sine * sine
    half_dfc = (-1.57079633 * inverse_rc) * sine * cosine
    return half_fc, half_dfc, 2.0 * p2 - 1.0, -4.0 * p * inverse_rc


@triton.jit
def basis(r, inverse_rc, K: tl.constexpr):
    """½ fc T_k(x), k = 0 … K − 1, at distances r: a tuple of K tiles.

    The functions of the format are f_k = ½ fc (T_k + 1) = ½ fc (T_k + T_0): their coefficients are turned into those
    of these functions when a model is prepared.
    """
    half_fc, _, x, _ = cutoff_function(r, inverse_rc)
    f = (half_fc,)
    if K > 1:
        f = f + (x * half_fc,)
    for k in tl.static_range(2, K):
        f = f + (2.0 * x * f[k - 1] - f[k - 2],)
    return f


@triton.jit
def basis_slopes(r, inverse_rc, K: tl.constexpr):
    """Derivatives of :func:`basis` by r: ½ (fc′ T_k + fc k U_{k−1} dx/dr), a tuple of K tiles."""
    half_fc, half_dfc, x, dx = cutoff_function(r, inverse_rc)
    t_before = half_dfc  # ½ fc′ T_k
    t = x * half_dfc
    u_before = half_fc * 0.0  # ½ fc dx/dr U_{k−1}
    u = half_fc * dx
    df = (half_dfc,)
    for k in tl.static_range(1, K):
        df = df + (t + k * u,)
        t_next = 2.0 * x * t - t_before
        t_before = t
        t = t_next
        u_next = 2.0 * x * u - u_before
        u_before = u
        u = u_next
    return df


@triton.jit
def zeros(like, n: tl.constexpr):
    """A tuple of n tiles of zeros."""
    out = ()
    for _ in tl.static_range(n):
        out = out + (tl.zeros_like(like),)
    return out
