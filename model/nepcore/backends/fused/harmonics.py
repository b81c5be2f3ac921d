"""Polynomials Y_b of unit vectors and their gradients, in tiles; b as in :mod:`nepcore.physics.harmonics`."""

from __future__ import annotations

import triton
import triton.language as tl

from nepcore.physics.harmonics import POLYNOMIALS

from .tables import Fixed

_P = Fixed(POLYNOMIALS)


@triton.constexpr_function
def coefficient(l, m, power, derivative):  # type: ignore[no-untyped-def]
    """Coefficient of z^power in P_lm, or in its derivative."""
    if not derivative:
        return 1.0 * _P.value[l][m][power]
    return 1.0 * (power + 1) * _P.value[l][m][power + 1]


@triton.constexpr_function
def place(l, m):  # type: ignore[no-untyped-def]
    """Index b of a polynomial: of the real one, where there are two."""
    return l * l - 1 + (2 * m - 1 if m else 0)


@triton.jit
def legendre(z, z2, l: tl.constexpr, m: tl.constexpr):
    """P_lm(z), whose powers are all even or all odd; a polynomial of z² and perhaps one z."""
    top: tl.constexpr = l - m
    value = tl.full(z.shape, coefficient(l, m, top, False), tl.float32)
    for step in tl.static_range(top // 2):
        value = value * z2 + coefficient(l, m, top - 2 - 2 * step, False)
    if top % 2:
        value = value * z
    return value


@triton.jit
def legendre_slope(z, z2, l: tl.constexpr, m: tl.constexpr):
    """dP_lm/dz, for m < l."""
    top: tl.constexpr = l - m - 1
    value = tl.full(z.shape, coefficient(l, m, top, True), tl.float32)
    for step in tl.static_range(top // 2):
        value = value * z2 + coefficient(l, m, top - 2 - 2 * step, True)
    if top % 2:
        value = value * z
    return value


@triton.jit
def powers(x, y, count: tl.constexpr):
    """(x + iy)^m for m = 0 … count: real parts, imaginary parts."""
    re = (tl.full(x.shape, 1.0, tl.float32), x)
    im = (tl.zeros_like(x), y)
    for m in tl.static_range(1, count):
        re = re + (re[m] * x - im[m] * y,)
        im = im + (re[m] * y + im[m] * x,)
    return re, im


@triton.jit
def harmonics(x, y, z, L: tl.constexpr):
    """Y_b of unit vectors, a tuple of L (L + 2) tiles."""
    z2 = z * z
    re, im = powers(x, y, L)
    out = ()
    for l in tl.static_range(1, L + 1):
        out = out + (legendre(z, z2, l, 0),)
        for m in tl.static_range(1, l + 1):
            if m < l:
                p = legendre(z, z2, l, m)
                out = out + (re[m] * p, im[m] * p)
            else:
                out = out + (re[m], im[m])
    return out
