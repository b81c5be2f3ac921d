"""What the energy of one atom owes to each of its edges; lanes run over the neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .basis import harmonic_gradient
from .inner import inner
from .simd import fma, load, spread, store, total, transpose, where_equal, zeros

if TYPE_CHECKING:
    from .site import Present
    from .vec import Width

_MASKED_TYPES = 8
"""Up to so many types are told apart by masks over all neighbours."""


@inner
def radial_gradient(
    model: Any, kind: int, site: Any, stride: int, count: int, present: Present, width: Width
) -> None:  # fmt: skip
    """∂U/∂r of the radial part into the first row of ``site.gradient``.

    Contracts with the coefficients once per type present, then one sum over k per neighbour.
    """
    w = len(width)
    K = model.k_row
    R = model.n_radial
    out = site.gradient
    for slot in range(present.number):
        base = (kind * model.n_types + present.types[slot]) * R * K
        for k in range(0, K, w):
            acc = zeros(out, width)
            for n in range(R):
                acc = fma(spread(site.u, n, width), load(model.c_radial_k, base + n * K + k, width), acc)
            store(site.by_f, slot * K + k, acc)
    if present.number <= _MASKED_TYPES:
        for j in range(0, count, w):
            acc = zeros(out, width)
            which = load(site.slot, j, width)
            for slot in range(present.number):
                part = zeros(out, width)
                for k in range(model.k_radial):
                    part = fma(spread(site.by_f, slot * K + k, width), load(site.df, k * stride + j, width), part)
                acc = where_equal(which, slot, part, acc)
            store(out, j, acc)
    else:
        # Rows of the neighbours' types side by side, then turned so that lanes run over the neighbours.
        for j in range(0, count, w):
            for k in range(0, K, w):
                for r in range(w):
                    slot = max(0, site.slot[j + r])
                    store(site.rows, r * w, load(site.by_f, slot * K + k, width))
                transpose(site.rows, 0, w, site.columns, k * w, w, width)
            part = zeros(out, width)
            for k in range(model.k_radial):
                part = fma(load(site.columns, k * w, width), load(site.df, k * stride + j, width), part)
            store(out, j, part)


@inner
def angular_gradient(model: Any, site: Any, geo: Any, stride: int, count: int, width: Width) -> None:
    """∂U/∂r_ij of the angular part into ``site.gradient_angular``."""
    w = len(width)
    row = model.rows_angular
    by_y = site.by_y
    out = site.gradient_angular
    zero = zeros(site.ds, width)
    for j in range(0, count, w):
        along = zero
        for b in range(0, model.n_harmonics, 4):
            p0 = zero
            p1 = zero
            p2 = zero
            p3 = zero
            r0 = zero
            r1 = zero
            r2 = zero
            r3 = zero
            at = b * row
            for n in range(model.n_angular):
                g = load(site.g_t, n * stride + j, width)
                dg = load(site.dg_t, n * stride + j, width)
                d0 = spread(site.ds, at + n, width)
                d1 = spread(site.ds, at + row + n, width)
                d2 = spread(site.ds, at + 2 * row + n, width)
                d3 = spread(site.ds, at + 3 * row + n, width)
                p0 = fma(d0, g, p0)
                p1 = fma(d1, g, p1)
                p2 = fma(d2, g, p2)
                p3 = fma(d3, g, p3)
                r0 = fma(d0, dg, r0)
                r1 = fma(d1, dg, r1)
                r2 = fma(d2, dg, r2)
                r3 = fma(d3, dg, r3)
            store(by_y, b * w, p0)
            store(by_y, b * w + w, p1)
            store(by_y, b * w + 2 * w, p2)
            store(by_y, b * w + 3 * w, p3)
            at = b * stride + j
            along = fma(r0, load(site.y, at, width), along)
            along = fma(r1, load(site.y, at + stride, width), along)
            along = fma(r2, load(site.y, at + 2 * stride, width), along)
            along = fma(r3, load(site.y, at + 3 * stride, width), along)
        ux = load(geo, j, width)
        uy = load(geo, stride + j, width)
        uz = load(geo, 2 * stride + j, width)
        tx, ty, tz = harmonic_gradient(ux, uy, uz, by_y, model.l_max, model.legendre, width)
        inverse = load(geo, 4 * stride + j, width)
        # The radial direction takes what is along it, the rest turns the edge.
        along = fma(-inverse, fma(tx, ux, fma(ty, uy, tz * uz)), along)
        store(out, j, fma(tx, inverse, along * ux))
        store(out, stride + j, fma(ty, inverse, along * uy))
        store(out, 2 * stride + j, fma(tz, inverse, along * uz))


@inner
def site_virial(site: Any, stride: int, count: int, width: Width) -> None:
    """−Σ_j r_ij ⊗ ∂U/∂r_ij into ``site.virial``; row: edge component, column: gradient component."""
    for row in range(3):
        sx = zeros(site.geo, width)
        sy = sx
        sz = sx
        for j in range(0, count, len(width)):
            r = load(site.geo, row * stride + j, width) * load(site.geo, 3 * stride + j, width)
            sx = fma(r, load(site.gradient, j, width), sx)
            sy = fma(r, load(site.gradient, stride + j, width), sy)
            sz = fma(r, load(site.gradient, 2 * stride + j, width), sz)
        site.virial[3 * row] = -total(sx)
        site.virial[3 * row + 1] = -total(sy)
        site.virial[3 * row + 2] = -total(sz)
