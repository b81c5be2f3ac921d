"""One atom: its descriptor, energy and the gradient of that energy by each of its edges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .basis import harmonics, radial_functions, unit_vectors
from .edges import angular_geometry, up
from .gradients import angular_gradient, radial_gradient
from .inner import inner
from .invariants import invariant_gradient, invariants
from .model import aligned, padded
from .network import site_energy
from .simd import load, store, transpose
from .sums import angular_sums, expand, radial_sums
from .zbl import WIDTH as _ZBL
from .zbl import repulsion

if TYPE_CHECKING:
    from .model import Model, Widths
    from .words import Ints, Ints32, Reals


class Present(NamedTuple):
    """The types that occur."""

    number: int
    types: Ints  # (number,)
    slots: Ints  # (T,): place of each type among them


class Site(NamedTuple):
    """Intermediate arrays of one atom.

    Rows over neighbours are ``stride`` long: as long as this atom needs, so that they lie close together.
    """

    geo: Reals  # (6, stride), radial neighbours; see basis.py
    geo_angular: Reals
    kind: Ints  # (stride,): types of the radial neighbours
    kind_angular: Ints
    slot: Ints32  # (stride,): place of the type among those present
    pair: Ints  # (stride,): radial neighbour that an angular one is
    neighbor: Ints  # (stride,): atom
    f: Reals  # (K, stride)
    df: Reals
    f_angular: Reals
    df_angular: Reals
    g: Reals  # (stride, A padded): g_n, functions contiguous
    dg: Reals
    g_t: Reals  # (A padded, stride): g_n, neighbours contiguous
    dg_t: Reals
    y: Reals  # (harmonics, stride)
    s: Reals  # (harmonics, A padded)
    ds: Reals
    q: Reals  # (D + slack,)
    u: Reals
    hidden: Reals  # (H padded,): neurons
    back: Reals  # (H padded,): derivatives by their inputs
    hidden2: Reals
    back2: Reals
    by_y: Reals  # (harmonics, full width)
    by_f: Reals  # (T, K padded): ∂U/∂Σf_k of each type present
    rows: Reals  # (full width, full width)
    columns: Reals  # (K padded, full width)
    gradient: Reals  # (3, stride): ∂U/∂r_ij
    gradient_angular: Reals  # (3, stride), angular neighbours
    virial: Reals  # (9,): −Σ_j r_ij ⊗ ∂U/∂r_ij


def room(model: Model, widths: Widths, neighbors: int, dtype: str) -> Site:
    """Arrays for up to ``neighbors`` neighbours."""
    full, functions = len(widths.full), len(widths.functions)
    stride = padded(neighbors + 1, max(full, functions, 16))

    def real(*shape: int) -> Any:
        # Room to read a whole vector past the end; zeros, so that what is read there is a number. The room also keeps
        # other threads off the last cache line.
        return aligned(int(np.prod(shape)) + 64, dtype)

    def whole() -> Any:
        return aligned(stride + 64, "int64")

    k = max(model.k_radial, model.k_angular)
    rows = model.rows_angular
    dim = model.dim_row + model.rows_radial + rows
    return Site(
        geo=real(6, stride), geo_angular=real(6, stride), kind=whole(), kind_angular=whole(),
        slot=aligned(stride + 64, "int32"), pair=whole(), neighbor=whole(),
        f=real(k, stride), df=real(k, stride), f_angular=real(k, stride), df_angular=real(k, stride),
        g=real(stride, rows), dg=real(stride, rows), g_t=real(rows, stride), dg_t=real(rows, stride),
        y=real(model.n_harmonics, stride), s=real(model.n_harmonics, rows), ds=real(model.n_harmonics, rows),
        q=real(dim), u=real(dim), hidden=real(model.hidden_row), back=real(model.hidden_row),
        hidden2=real(model.hidden2_row), back2=real(model.hidden2_row),
        by_y=real(model.n_harmonics, full), by_f=real(model.n_types, model.k_row),
        rows=real(full, full), columns=real(model.k_row, full),
        gradient=real(3, stride), gradient_angular=real(3, stride), virial=real(9),
    )  # fmt: skip


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
    radial_sums(model, kind, present.number == 1, site, stride, many, functions)
    geo, kinds, f, df = site.geo, site.kind, site.f, site.df
    few = many
    if not model.one_list:
        few = up(angular, align)
        geo, kinds, f, df = site.geo_angular, site.kind_angular, site.f_angular, site.df_angular
        angular_geometry(model, site, stride, angular, align)
        radial_functions(geo, f, df, stride, few, model.k_angular, grad, full)
    harmonics(geo, site.y, stride, few, model.l_max, model.legendre, full)
    expand(model, kind, kinds, f, df, stride, few, site.g, site.dg, grad, present.number == 1, functions)
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
