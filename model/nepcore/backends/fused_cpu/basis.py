"""Radial functions and harmonics of the neighbours of one atom; lanes run over the neighbours.

Rows of ``geo`` (``stride`` numbers each): 0–2 unit vector, 3 distance, 4 its inverse, 5 the inverse pair cutoff.
"""

from __future__ import annotations

from math import factorial, pi
from typing import TYPE_CHECKING, Any

from .inner import inner
from .simd import fma, load, root, spread, store, where_less, zeros

if TYPE_CHECKING:
    from .vec import Width

# sin(πy) = y Σ S_k y²ᵏ and cos(πy) = Σ C_k y²ᵏ for |y| ≤ 1/2, to 1e-17.
_SIN = tuple((-1) ** k * pi ** (2 * k + 1) / factorial(2 * k + 1) for k in range(12))
_COS = tuple((-1) ** k * pi ** (2 * k) / factorial(2 * k) for k in range(12))


@inner
def unit_vectors(geo: Any, stride: int, count: int, width: Width) -> None:
    """Rows 0–2 from edge vectors to unit vectors; rows 3 and 4 from them. ``count`` is a multiple of the width."""
    for j in range(0, count, len(width)):
        x = load(geo, j, width)
        y = load(geo, stride + j, width)
        z = load(geo, 2 * stride + j, width)
        r = root(fma(x, x, fma(y, y, z * z)))
        inverse = 1.0 / r
        store(geo, j, x * inverse)
        store(geo, stride + j, y * inverse)
        store(geo, 2 * stride + j, z * inverse)
        store(geo, 3 * stride + j, r)
        store(geo, 4 * stride + j, inverse)


@inner
def radial_functions(geo: Any, f: Any, df: Any, stride: int, count: int, size: int, grad: bool, width: Width) -> None:
    """f_k(r) and, if ``grad``, df_k/dr, k = 0 … size − 1, into rows of ``f`` and ``df``.

    Exactly zero at and beyond the cutoff, where padding sits.
    """
    for j in range(0, count, len(width)):
        inverse = load(geo, 5 * stride + j, width)
        u = load(geo, 3 * stride + j, width) * inverse
        y = u - 0.5
        w = y * y
        sine = fma(w, _SIN[11], _SIN[10])
        for k in range(9, -1, -1):
            sine = fma(w, sine, _SIN[k])
        # h = fc / 2
        h = where_less(u, 1.0, fma(y * sine, -0.25, 0.25), 0.0)
        v = u - 1.0
        x = fma(v * 2.0, v, -1.0)
        x2 = x + x
        before = zeros(geo, width) + 1.0
        now = x
        store(f, j, h + h)
        if not grad:
            for k in range(1, size):
                store(f, k * stride + j, fma(now, h, h))
                now, before = fma(x2, now, -before), now
        else:
            cosine = fma(w, _COS[11], _COS[10])
            for k in range(9, -1, -1):
                cosine = fma(w, cosine, _COS[k])
            dh = where_less(u, 1.0, cosine * inverse * (-0.25 * pi), 0.0)
            hx = h * v * inverse * 4.0
            d_before = zeros(geo, width)
            d_now = before
            store(df, j, dh + dh)
            for k in range(1, size):
                store(f, k * stride + j, fma(now, h, h))
                store(df, k * stride + j, fma(d_now, hx, fma(now, dh, dh)))
                d_now, d_before = fma(x2, d_now, fma(now, 2.0, -d_before)), d_now
                now, before = fma(x2, now, -before), now


@inner
def harmonics(geo: Any, y: Any, stride: int, count: int, l_max: int, table: Any, width: Width) -> None:
    """Y_b of the unit vectors into rows b of ``y``."""
    for j in range(0, count, len(width)):
        ux = load(geo, j, width)
        uy = load(geo, stride + j, width)
        uz = load(geo, 2 * stride + j, width)
        if l_max == 4:
            _harmonics_4(ux, uy, uz, y, stride, j)
            continue
        z2 = uz * uz
        a = ux
        b = uy
        for l in range(1, l_max + 1):
            store(y, (l * l - 1) * stride + j, _legendre(uz, z2, table, l, 0, width))
        for m in range(1, l_max + 1):
            for l in range(m, l_max + 1):
                p = _legendre(uz, z2, table, l, m, width)
                row = (l * l - 2 + 2 * m) * stride + j
                store(y, row, p * a)
                store(y, row + stride, p * b)
            a, b = fma(ux, a, -(uy * b)), fma(ux, b, uy * a)


@inner
def _harmonics_4(x: Any, y: Any, z: Any, out: Any, stride: int, j: int) -> None:
    """:func:`harmonics` of the usual l_max = 4, written out."""
    z2 = z * z
    a2 = fma(x, x, -(y * y))
    b2 = (x + x) * y
    a3 = fma(x, a2, -(y * b2))
    b3 = fma(x, b2, y * a2)
    p31 = fma(z2, 5.0, -1.0)
    p41 = fma(z2, 7.0, -3.0) * z
    p42 = fma(z2, 7.0, -1.0)
    store(out, j, z)
    store(out, stride + j, x)
    store(out, 2 * stride + j, y)
    store(out, 3 * stride + j, fma(z2, 3.0, -1.0))
    store(out, 4 * stride + j, z * x)
    store(out, 5 * stride + j, z * y)
    store(out, 6 * stride + j, a2)
    store(out, 7 * stride + j, b2)
    store(out, 8 * stride + j, fma(z2, 5.0, -3.0) * z)
    store(out, 9 * stride + j, p31 * x)
    store(out, 10 * stride + j, p31 * y)
    store(out, 11 * stride + j, z * a2)
    store(out, 12 * stride + j, z * b2)
    store(out, 13 * stride + j, a3)
    store(out, 14 * stride + j, b3)
    store(out, 15 * stride + j, fma(fma(z2, 35.0, -30.0), z2, 3.0))
    store(out, 16 * stride + j, p41 * x)
    store(out, 17 * stride + j, p41 * y)
    store(out, 18 * stride + j, p42 * a2)
    store(out, 19 * stride + j, p42 * b2)
    store(out, 20 * stride + j, z * a3)
    store(out, 21 * stride + j, z * b3)
    store(out, 22 * stride + j, fma(x, a3, -(y * b3)))
    store(out, 23 * stride + j, fma(x, b3, y * a3))


@inner
def _legendre(z: Any, z2: Any, table: Any, l: int, m: int, width: Width) -> Any:
    """P_lm(z)."""
    at = (l * 9 + m) * 9
    degree = l - m
    p = spread(table, at + degree, width)
    for k in range(degree - 2, -1, -2):
        p = fma(p, z2, spread(table, at + k, width))
    if degree & 1:
        p = p * z
    return p


@inner
def _legendre_slope(z: Any, z2: Any, table: Any, l: int, m: int, width: Width) -> Any:
    """dP_lm/dz."""
    at = (l * 9 + m) * 9
    degree = l - m
    p = spread(table, at + degree, width) * degree
    for k in range(degree - 2, 0, -2):
        p = fma(p, z2, spread(table, at + k, width) * k)
    if degree & 1 == 0:
        p = p * z
    return p


@inner
def harmonic_gradient(ux: Any, uy: Any, uz: Any, p: Any, l_max: int, table: Any, width: Width) -> Any:
    """∇ Σ_b p_b Y_b as polynomials of the unit vector (not yet projected); ``p`` holds one vector a b.

    With A + iB = (x + iy)ᵐ the sum is Σ_m A_m u_m(z) + B_m v_m(z), u and v being sums over l of p_b P_lm(z).
    """
    if l_max == 4:
        return _harmonic_gradient_4(ux, uy, uz, p, width)
    w = len(width)
    z2 = uz * uz
    zero = zeros(p, width)
    gx = zero
    gy = zero
    gz = zero
    for l in range(1, l_max + 1):
        gz = fma(load(p, (l * l - 1) * w, width), _legendre_slope(uz, z2, table, l, 0, width), gz)
    a_before = zero + 1.0
    b_before = zero
    for m in range(1, l_max + 1):
        a = fma(ux, a_before, -(uy * b_before))
        b = fma(ux, b_before, uy * a_before)
        u = zero
        v = zero
        du = zero
        dv = zero
        for l in range(m, l_max + 1):
            row = (l * l - 2 + 2 * m) * w
            real = load(p, row, width)
            imaginary = load(p, row + w, width)
            value = _legendre(uz, z2, table, l, m, width)
            u = fma(real, value, u)
            v = fma(imaginary, value, v)
            if l > m:
                slope = _legendre_slope(uz, z2, table, l, m, width)
                du = fma(real, slope, du)
                dv = fma(imaginary, slope, dv)
        gz = fma(a, du, fma(b, dv, gz))
        gx = fma(fma(a_before, u, b_before * v), m, gx)
        gy = fma(fma(a_before, v, -(b_before * u)), m, gy)
        a_before = a
        b_before = b
    return gx, gy, gz


@inner
def _harmonic_gradient_4(x: Any, y: Any, z: Any, p: Any, width: Width) -> Any:
    """:func:`harmonic_gradient` of the usual l_max = 4, written out."""
    w = len(width)
    z2 = z * z
    a2 = fma(x, x, -(y * y))
    b2 = (x + x) * y
    a3 = fma(x, a2, -(y * b2))
    b3 = fma(x, b2, y * a2)
    p31 = fma(z2, 5.0, -1.0)
    p41 = fma(z2, 7.0, -3.0) * z
    p42 = fma(z2, 7.0, -1.0)
    slope_41 = fma(z2, 21.0, -3.0)
    # m = 0
    gz = fma(load(p, 3 * w, width), 6.0 * z, load(p, 0, width))
    gz = fma(load(p, 8 * w, width), fma(z2, 15.0, -3.0), gz)
    gz = fma(load(p, 15 * w, width), fma(z2, 140.0, -60.0) * z, gz)
    # m = 1
    p4 = load(p, 4 * w, width)
    p5 = load(p, 5 * w, width)
    p9 = load(p, 9 * w, width)
    p10 = load(p, 10 * w, width)
    p16 = load(p, 16 * w, width)
    p17 = load(p, 17 * w, width)
    gx = fma(p16, p41, fma(p9, p31, fma(p4, z, load(p, w, width))))
    gy = fma(p17, p41, fma(p10, p31, fma(p5, z, load(p, 2 * w, width))))
    gz = fma(x, fma(p16, slope_41, fma(p9, 10.0 * z, p4)), gz)
    gz = fma(y, fma(p17, slope_41, fma(p10, 10.0 * z, p5)), gz)
    # m = 2
    p11 = load(p, 11 * w, width)
    p12 = load(p, 12 * w, width)
    p18 = load(p, 18 * w, width)
    p19 = load(p, 19 * w, width)
    u = fma(p18, p42, fma(p11, z, load(p, 6 * w, width)))
    v = fma(p19, p42, fma(p12, z, load(p, 7 * w, width)))
    gx = fma(2.0, fma(x, u, y * v), gx)
    gy = fma(2.0, fma(x, v, -(y * u)), gy)
    gz = fma(a2, fma(p18, 14.0 * z, p11), gz)
    gz = fma(b2, fma(p19, 14.0 * z, p12), gz)
    # m = 3
    p20 = load(p, 20 * w, width)
    p21 = load(p, 21 * w, width)
    u = fma(p20, z, load(p, 13 * w, width))
    v = fma(p21, z, load(p, 14 * w, width))
    gx = fma(3.0, fma(a2, u, b2 * v), gx)
    gy = fma(3.0, fma(a2, v, -(b2 * u)), gy)
    gz = fma(a3, p20, fma(b3, p21, gz))
    # m = 4
    u = load(p, 22 * w, width)
    v = load(p, 23 * w, width)
    gx = fma(4.0, fma(a3, u, b3 * v), gx)
    gy = fma(4.0, fma(a3, v, -(b3 * u)), gy)
    return gx, gy, gz
