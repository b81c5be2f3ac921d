"""One atom: its descriptor, energy and the gradient of that energy by each of its edges."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from .basis import harmonic_gradient, harmonics, radial_functions, unit_vectors
from .bins import Bins
from .inner import inner
from .invariants import invariant_gradient, invariants
from .model import ANGULAR_TILE, Model, Widths, aligned, padded
from .neighbors import COINCIDENT, Found
from .network import site_energy
from .simd import Width, fma, load, spread, store, total, transpose, where_equal, zeros
from .zbl import WIDTH as _ZBL
from .zbl import repulsion

_MASKED_TYPES = 8

"""Up to so many types are told apart by masks over all neighbours."""


class Present(NamedTuple):
    """The types that occur. All int64."""

    count: int
    types: Any  # (count,)
    slots: Any  # (T,): place of each type among them


class Site(NamedTuple):
    """Intermediate arrays of one atom, flat, of the compute dtype unless noted.

    Rows over neighbours are ``stride`` long: as long as this atom needs, so that they lie close together.
    """

    geo: Any  # (6, stride), radial neighbours; see basis.py
    geo_angular: Any
    kind: Any  # int64, (stride,): types of the radial neighbours
    kind_angular: Any
    slot: Any  # int32, (stride,): place of the type among those present
    pair: Any  # int64, (stride,): radial neighbour that an angular one is
    neighbor: Any  # int64, (stride,): atom
    f: Any  # (K, stride)
    df: Any
    f_angular: Any
    df_angular: Any
    g: Any  # (stride, A padded): g_n, functions contiguous
    dg: Any
    g_t: Any  # (A padded, stride): g_n, neighbours contiguous
    dg_t: Any
    y: Any  # (harmonics, stride)
    s: Any  # (harmonics, A padded)
    ds: Any
    q: Any  # (D + slack,)
    u: Any
    hidden: Any  # (H padded,): neurons
    back: Any  # (H padded,): derivatives by their inputs
    hidden2: Any
    back2: Any
    by_y: Any  # (harmonics, full width)
    by_f: Any  # (T, K padded): ∂U/∂Σf_k of each type present
    rows: Any  # (full width, full width)
    columns: Any  # (K padded, full width)
    gradient: Any  # (3, stride): ∂U/∂r_ij
    gradient_angular: Any  # (3, stride), angular neighbours
    virial: Any  # (9,): −Σ_j r_ij ⊗ ∂U/∂r_ij


def room(model: Model, widths: Widths, neighbors: int, dtype: str) -> Site:
    """Arrays for up to ``neighbors`` neighbours."""
    full, functions = len(widths.full), len(widths.functions)
    stride = padded(neighbors + 1, max(full, functions, 16))

    def real(*shape: int) -> Any:
        # Room to read a whole vector past the end; zeros, so that what is read there is a number.
        return aligned(int(np.prod(shape)) + 64, dtype)

    def whole() -> Any:
        return np.zeros(stride, np.int64)

    k = max(model.k_radial, model.k_angular)
    rows = model.rows_angular
    dim = model.dim_row + model.rows_radial + rows
    return Site(
        geo=real(6, stride), geo_angular=real(6, stride), kind=whole(), kind_angular=whole(),
        slot=np.zeros(stride + 64, np.int32), pair=whole(), neighbor=whole(),
        f=real(k, stride), df=real(k, stride), f_angular=real(k, stride), df_angular=real(k, stride),
        g=real(stride, rows), dg=real(stride, rows), g_t=real(rows, stride), dg_t=real(rows, stride),
        y=real(model.n_harmonics, stride), s=real(model.n_harmonics, rows), ds=real(model.n_harmonics, rows),
        q=real(dim), u=real(dim), hidden=real(model.hidden_row), back=real(model.hidden_row),
        hidden2=real(model.hidden2_row), back2=real(model.hidden2_row),
        by_y=real(model.n_harmonics, full), by_f=real(model.n_types, model.k_row), rows=real(full, full), columns=real(model.k_row, full),
        gradient=real(3, stride), gradient_angular=real(3, stride), virial=real(9),
    )  # fmt: skip


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
    for slot in range(present.count):
        base = (kind * model.n_types + present.types[slot]) * R * K
        for k in range(0, K, w):
            acc = zeros(out, width)
            for n in range(R):
                acc = fma(spread(site.u, n, width), load(model.c_radial_k, base + n * K + k, width), acc)
            store(site.by_f, slot * K + k, acc)
    if present.count <= _MASKED_TYPES:
        for j in range(0, count, w):
            acc = zeros(out, width)
            which = load(site.slot, j, width)
            for slot in range(present.count):
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
def gather(
    model: Any, bins: Bins, i: int, count: int, found: Found, present: Present, site: Any, stride: int, align: int
) -> Any:
    """Edges of the neighbours found, in order, cut to the cutoffs of their pairs and padded with far ones.

    Returns:
        Radial neighbours, angular neighbours, and the first atom at the place of atom i, or −1.
    """
    geo = site.geo
    kind = bins.types[i]
    base = kind * model.n_types
    x = bins.positions[3 * i]
    y = bins.positions[3 * i + 1]
    z = bins.positions[3 * i + 2]
    n = 0
    angular = 0
    coincident = -1
    for k in range(count):
        h = found.sorted[k]
        c = found.near[h]
        t = 3 * found.run[h]
        dx = (bins.x[c] - x) + found.shift[t]
        dy = (bins.y[c] - y) + found.shift[t + 1]
        dz = (bins.z[c] - z) + found.shift[t + 2]
        square = dx * dx + dy * dy + dz * dz
        j = bins.order[c]
        if square < COINCIDENT * COINCIDENT and coincident < 0:
            coincident = j
        other = bins.types[j]
        pair = base + other
        if not square < model.squared_radial[pair]:
            continue
        geo[n] = dx
        geo[stride + n] = dy
        geo[2 * stride + n] = dz
        geo[5 * stride + n] = model.inverse_radial[pair]
        site.kind[n] = other
        site.slot[n] = present.slots[other]
        site.neighbor[n] = j
        if square < model.squared_angular[pair]:
            site.pair[angular] = n
            site.kind_angular[angular] = other
            site.geo_angular[5 * stride + angular] = model.inverse_angular[pair]
            angular += 1
        n += 1
    for j in range(n, up(n, align)):
        geo[j] = 2.0 * model.cutoff
        geo[stride + j] = 0.0
        geo[2 * stride + j] = 0.0
        geo[5 * stride + j] = 1.0 / model.cutoff
        site.kind[j] = 0
        site.slot[j] = -1
    return n, angular, coincident


@inner
def up(n: int, align: int) -> int:
    """The multiple of ``align``, a power of two, that is not less than n."""
    return (n + align - 1) & -align


@inner
def _angular_geometry(model: Any, site: Any, stride: int, count: int, align: int) -> None:
    """Rows 0–4 of the angular neighbours from those of the radial ones, and padding."""
    for a in range(count):
        p = site.pair[a]
        for row in range(5):
            site.geo_angular[row * stride + a] = site.geo[row * stride + p]
    for a in range(count, up(count, align)):
        site.kind_angular[a] = 0
        site.geo_angular[a] = 1.0
        site.geo_angular[stride + a] = 0.0
        site.geo_angular[2 * stride + a] = 0.0
        site.geo_angular[3 * stride + a] = 2.0 * model.cutoff
        site.geo_angular[4 * stride + a] = 0.5 / model.cutoff
        site.geo_angular[5 * stride + a] = 1.0 / model.cutoff


@inner
def evaluate(
    model: Model, kind: int, temperature: float, site: Site, stride: int, count: int, angular: int, present: Present,
    grad: bool, widths: Widths,
) -> float:  # fmt: skip
    """Energy of the atom whose edges :func:`gather` laid out, eV; its edges' gradients if ``grad``.

    Leaves the unscaled descriptors in ``site.q``.
    """
    full = widths.full
    w = len(full)
    functions = widths.functions
    lanes = len(functions)
    align = max(w, lanes)
    many = up(count, align)
    unit_vectors(site.geo, stride, many, full)
    radial_functions(site.geo, site.f, site.df, stride, many, model.k_radial, grad, full)
    radial_sums(model, kind, present.count == 1, site, stride, many, functions)
    geo, kinds, f, df = site.geo, site.kind, site.f, site.df
    few = many
    if not model.one_list:
        few = up(angular, align)
        geo, kinds, f, df = site.geo_angular, site.kind_angular, site.f_angular, site.df_angular
        _angular_geometry(model, site, stride, angular, align)
        radial_functions(geo, f, df, stride, few, model.k_angular, grad, full)
    harmonics(geo, site.y, stride, few, model.l_max, model.legendre, full)
    expand(model, kind, kinds, f, df, stride, few, site.g, site.dg, grad, present.count == 1, functions)
    angular_sums(model, site, stride, angular, functions)
    invariants(site.s, model.rows_angular, model, site.q, functions)
    if model.temperature:
        site.q[model.dim - 1] = temperature
    energy = np.float64(site_energy(model, kind, site.q, site.u, site, model.single, full)) - model.bias[kind]
    if grad:
        radial_gradient(model, kind, site, stride, many, present, full)
    if model.zbl:
        energy += _repel(model, kind, site, stride, angular, grad)
    if grad:
        for j in range(0, many, w):
            a = load(site.gradient, j, full)
            store(site.gradient, j, a * load(site.geo, j, full))
            store(site.gradient, stride + j, a * load(site.geo, stride + j, full))
            store(site.gradient, 2 * stride + j, a * load(site.geo, 2 * stride + j, full))
        invariant_gradient(site.s, model.rows_angular, model, site.u, site.ds, functions)
        for j in range(0, few, lanes):
            for c in range(0, model.rows_angular, lanes):
                at = j * model.rows_angular + c
                transpose(site.g, at, model.rows_angular, site.g_t, c * stride + j, stride, functions)
                transpose(site.dg, at, model.rows_angular, site.dg_t, c * stride + j, stride, functions)
        angular_gradient(model, site, geo, stride, few, full)
        if model.one_list:
            for j in range(0, many, w):
                for at in (j, stride + j, 2 * stride + j):
                    store(site.gradient, at, load(site.gradient, at, full) + load(site.gradient_angular, at, full))
        else:
            for a in range(angular):
                p = site.pair[a]
                for row in range(3):
                    site.gradient[row * stride + p] += site.gradient_angular[row * stride + a]
    return energy


@inner
def _repel(model: Any, kind: int, site: Any, stride: int, angular: int, grad: bool) -> float:
    """Half of the pairs' repulsion, eV; half of its derivative is added to the radial part of the gradient."""
    energy = 0.0
    for a in range(angular):
        p = site.pair[a]
        r = np.float64(site.geo[3 * stride + p])
        if r < model.zbl_outer:
            at = (kind * model.n_types + site.kind[p]) * _ZBL
            value, slope = repulsion(model.zbl_pairs, at, r)
            energy += 0.5 * value
            if grad:
                site.gradient[p] += 0.5 * slope
    return energy


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
