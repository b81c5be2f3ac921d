"""Sums over the neighbours of one atom; lanes run over the functions n."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .inner import inner
from .model import ANGULAR_TILE
from .simd import fma, load, spread, store, zeros

if TYPE_CHECKING:
    from .vec import Width


@inner
def radial_sums(model: Any, kind: int, alike: bool, site: Any, stride: int, count: int, width: Width) -> None:
    """Radial descriptors into ``site.q``; ``count`` is a multiple of 4. ``alike``: there is one type only."""
    w = len(width)
    row = model.rows_radial
    block = model.k_radial * row
    f = site.f
    base = kind * model.n_types * block
    for c in range(0, row, w):
        zero = zeros(f, width)
        a0 = zero
        a1 = zero
        a2 = zero
        a3 = zero
        for j in range(0, count, 4):
            p0 = base + site.kind[j] * block + c
            p1 = base + site.kind[j + 1] * block + c
            p2 = base + site.kind[j + 2] * block + c
            p3 = base + site.kind[j + 3] * block + c
            at = j
            for _ in range(model.k_radial):
                c0 = load(model.c_radial, p0, width)
                c1 = c0 if alike else load(model.c_radial, p1, width)
                c2 = c0 if alike else load(model.c_radial, p2, width)
                c3 = c0 if alike else load(model.c_radial, p3, width)
                a0 = fma(spread(f, at, width), c0, a0)
                a1 = fma(spread(f, at + 1, width), c1, a1)
                a2 = fma(spread(f, at + 2, width), c2, a2)
                a3 = fma(spread(f, at + 3, width), c3, a3)
                at += stride
                p0 += row
                p1 += row
                p2 += row
                p3 += row
        store(site.q, c, (a0 + a1) + (a2 + a3))


@inner
def expand(
    model: Any, kind: int, kinds: Any, f: Any, df: Any, stride: int, count: int, g: Any, dg: Any, grad: bool,
    alike: bool, width: Width,
) -> None:  # fmt: skip
    """g_n and, if ``grad``, its derivative for every angular neighbour, functions contiguous."""
    w = len(width)
    row = model.rows_angular
    block = model.k_angular * row
    base = kind * model.n_types * block
    zero = zeros(f, width)
    for c in range(0, row, w):
        for j in range(0, count, 4):
            p0 = base + kinds[j] * block + c
            p1 = base + kinds[j + 1] * block + c
            p2 = base + kinds[j + 2] * block + c
            p3 = base + kinds[j + 3] * block + c
            at = j
            a0 = zero
            a1 = zero
            a2 = zero
            a3 = zero
            d0 = zero
            d1 = zero
            d2 = zero
            d3 = zero
            for _ in range(model.k_angular):
                c0 = load(model.c_angular, p0, width)
                c1 = c0 if alike else load(model.c_angular, p1, width)
                c2 = c0 if alike else load(model.c_angular, p2, width)
                c3 = c0 if alike else load(model.c_angular, p3, width)
                a0 = fma(spread(f, at, width), c0, a0)
                a1 = fma(spread(f, at + 1, width), c1, a1)
                a2 = fma(spread(f, at + 2, width), c2, a2)
                a3 = fma(spread(f, at + 3, width), c3, a3)
                if grad:
                    d0 = fma(spread(df, at, width), c0, d0)
                    d1 = fma(spread(df, at + 1, width), c1, d1)
                    d2 = fma(spread(df, at + 2, width), c2, d2)
                    d3 = fma(spread(df, at + 3, width), c3, d3)
                at += stride
                p0 += row
                p1 += row
                p2 += row
                p3 += row
            at = j * row + c
            store(g, at, a0)
            store(g, at + row, a1)
            store(g, at + 2 * row, a2)
            store(g, at + 3 * row, a3)
            if grad:
                store(dg, at, d0)
                store(dg, at + row, d1)
                store(dg, at + 2 * row, d2)
                store(dg, at + 3 * row, d3)


@inner
def angular_sums(model: Any, site: Any, stride: int, count: int, width: Width) -> None:
    """s[b][n] = Σ_j Y_b g_n, eight harmonics in registers at a time."""
    w = len(width)
    row = model.rows_angular
    g = site.g
    y = site.y
    zero = zeros(g, width)
    for c in range(0, row, w):
        for b in range(0, model.n_harmonics, ANGULAR_TILE):
            a0 = zero
            a1 = zero
            a2 = zero
            a3 = zero
            a4 = zero
            a5 = zero
            a6 = zero
            a7 = zero
            at = b * stride
            for j in range(count):
                v = load(g, j * row + c, width)
                a0 = fma(spread(y, at + j, width), v, a0)
                a1 = fma(spread(y, at + stride + j, width), v, a1)
                a2 = fma(spread(y, at + 2 * stride + j, width), v, a2)
                a3 = fma(spread(y, at + 3 * stride + j, width), v, a3)
                a4 = fma(spread(y, at + 4 * stride + j, width), v, a4)
                a5 = fma(spread(y, at + 5 * stride + j, width), v, a5)
                a6 = fma(spread(y, at + 6 * stride + j, width), v, a6)
                a7 = fma(spread(y, at + 7 * stride + j, width), v, a7)
            at = b * row + c
            store(site.s, at, a0)
            store(site.s, at + row, a1)
            store(site.s, at + 2 * row, a2)
            store(site.s, at + 3 * row, a3)
            store(site.s, at + 4 * row, a4)
            store(site.s, at + 5 * row, a5)
            store(site.s, at + 6 * row, a6)
            store(site.s, at + 7 * row, a7)
