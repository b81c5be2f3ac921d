"""A dense block of atoms, one row an atom: from distances to site energies and to their derivatives by every pair.

The shapes follow from the numbers of rows and slots alone and nothing is read back from the device, so that this part
can be compiled, and captured as a graph. It is differentiable by the parameters in :class:`Tables`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nepcore.physics import harmonics, invariants, network, products
from nepcore.physics.basis import radial_basis

if TYPE_CHECKING:
    from nepcore.backends.protocol import Form
    from nepcore.potential import NEP

COINCIDENT = 1e-5
"""Atoms closer than this, Å, count as being at one place: no model was made for it, and 1/r² overflows float32."""


class Shape(NamedTuple):
    """What the code depends on: the same for all fine-tunes of a model."""

    l_max: int
    switches: tuple[str, ...]
    two_layers: bool
    temperature: bool

    @classmethod
    def of(cls, nep: NEP) -> Shape:
        """Of a model."""
        return cls(nep.l_max, nep.switches, nep.two_layers, nep.temperature)


class Tables(NamedTuple):
    """Parameters, cut down to the T types that occur: a model of 89 elements meets a handful of them at a time."""

    c_radial: Tensor  # (n, k, T, T)
    c_angular: Tensor
    cutoff_radial: Tensor  # (T, T), Å, in the dtype of the rest
    cutoff_angular: Tensor
    w0: Tensor  # (M, H, D), M = 1 or T; the others as in NEP
    b0: Tensor
    w1: Tensor
    b1: Tensor | None
    w2: Tensor | None
    bias: Tensor
    type_bias: Tensor  # (T,)
    q_scaler: Tensor
    monomials: tuple[invariants.Monomials | None, ...]

    @classmethod
    def of(cls, nep: NEP, present: Tensor) -> Tables:
        """Of the types with the indices ``present``."""
        both = (present[:, None], present[None, :])

        def networks(table: Tensor) -> Tensor:
            return table if len(nep.w0) == 1 else table[present]

        return cls(
            nep.c_radial[:, :, both[0], both[1]], nep.c_angular[:, :, both[0], both[1]],
            nep.cutoff_radial[both].to(nep.dtype), nep.cutoff_angular[both].to(nep.dtype),
            networks(nep.w0), networks(nep.b0), networks(nep.w1),
            networks(nep.b1) if nep.two_layers else None, networks(nep.w2) if nep.two_layers else None,
            nep.bias, nep.type_bias[present], nep.q_scaler,
            invariants.tables(nep.switches, nep.l_max, nep.dtype, nep.q_scaler.device),
        )  # fmt: skip


class Rows(NamedTuple):
    """Atoms and their neighbours: A rows with w slots for the radial and v slots for the angular part.

    A slot that no neighbour fills has a distance beyond every cutoff, and the direction zero.
    """

    types: Tensor  # (A,) indices in the tables
    r_radial: Tensor  # (A, w) Å
    types_radial: Tensor  # (A, w)
    r_angular: Tensor  # (A, v) Å
    types_angular: Tensor  # (A, v)
    unit: Tensor  # (3, A, v)
    temperature: Tensor  # (A,) K


class Results(NamedTuple):
    """What comes out of a block; derivatives are those of an atom's own energy by its own pairs."""

    energies: Tensor  # (A,) eV
    descriptors: Tensor  # (A, D), scaled
    along: Tensor  # (A, w): ∂U_i/∂r_ij of the radial part, eV/Å
    push: Tensor  # (3, A, v): ∂U_i/∂r_ij of the angular part


class _Forward(NamedTuple):
    q: Tensor  # (A, D), scaled
    kept_radial: Tensor
    kept_angular: Tensor
    y: Tensor  # (b, A, v)
    s: Tensor  # (b, A, n)
    monomials: tuple[invariants.Monomials | None, ...]


def _forward(shape: Shape, form: Form, t: Tables, rows: Rows, *, derivative: bool) -> _Forward:
    """Descriptors; with ``derivative`` what is kept of the pairs has both values and derivatives."""
    ti = rows.types
    A = ti.shape[0]
    # On a CPU the polynomials are written out: sums along another dimension may depend on the number of atoms.
    monomials = t.monomials if products.on_gpu(ti) or products.compiling() else ()
    cut_r, cut_a = t.cutoff_radial[ti[:, None], rows.types_radial], t.cutoff_angular[ti[:, None], rows.types_angular]
    basis_r = radial_basis(rows.r_radial, cut_r, t.c_radial.shape[1], derivative=derivative)
    s_r, kept_r = form.sums(t.c_radial, basis_r, ti, rows.types_radial, None)  # (1, A, n)
    basis_a = radial_basis(rows.r_angular, cut_a, t.c_angular.shape[1], derivative=derivative)
    y = harmonics.harmonics(rows.unit, shape.l_max)  # (b, A, v)
    s_a, kept_a = form.sums(t.c_angular, basis_a, ti, rows.types_angular, y)
    s_a = s_a.contiguous()  # (b, A, n)
    q_a = invariants.invariants(s_a, shape.l_max, shape.switches, monomials)  # (blocks, A, n)
    q = torch.cat([s_r[0], q_a.permute(1, 0, 2).reshape(A, -1)], dim=1)  # (A, D)
    if shape.temperature:
        q = torch.cat([q, rows.temperature[:, None]], dim=1)
    return _Forward(q * t.q_scaler, kept_r, kept_a, y, s_a, monomials)


def evaluate(shape: Shape, form: Form, tables: Tables, rows: Rows) -> Results:
    """Evaluate a block; derivatives by formula."""
    t, ti = tables, rows.types
    n_r, n_a = len(t.c_radial), len(t.c_angular)
    blocks = shape.l_max + len(shape.switches)
    found = _forward(shape, form, t, rows, derivative=True)
    energies, slope = _site_energies(shape, t, found.q, ti)
    slope = slope * t.q_scaler
    f_r = slope[:, :n_r]
    f_a = slope[:, n_r : n_r + blocks * n_a].reshape(ti.shape[0], blocks, n_a).permute(1, 0, 2)  # (blocks, A, n)
    along = form.spread(t.c_radial, found.kept_radial[1:], f_r[None], ti, rows.types_radial)[0, 0]  # (A, w)
    ds = invariants.gradient(found.s, f_a, shape.l_max, shape.switches, found.monomials)  # (b, A, n)
    # ∂U/∂Y_b and ∂U/∂r by Y_b, (b, A, v)
    by_y, by_r = form.spread(t.c_angular, found.kept_angular, ds, ti, rows.types_angular)
    turn = harmonics.contracted_gradient(rows.unit, by_y, shape.l_max)  # (3, A, v)
    outward = products.sum_over_components(by_r, found.y)
    return Results(energies, found.q, along, _push(rows, outward, turn))


def evaluate_by_autograd(shape: Shape, form: Form, tables: Tables, rows: Rows) -> Results:
    """Evaluate a block; derivatives by automatic differentiation, and themselves differentiable."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (rows.r_radial, rows.r_angular, rows.unit)]
        own = rows._replace(r_radial=leaves[0], r_angular=leaves[1], unit=leaves[2])
        found = _forward(shape, form, tables, own, derivative=False)
        energies, _ = _site_energies(shape, tables, found.q, rows.types)
        along, outward, turn = torch.autograd.grad(energies.sum(), leaves, create_graph=True)
        return Results(energies, found.q, along, _push(rows, outward, turn))


def _push(rows: Rows, outward: Tensor, turn: Tensor) -> Tensor:
    """∂U_i/∂r_ij, (3, A, v), of derivatives by the distance (A, v) and by the direction's components (3, A, v)."""
    radial_part = products.sum_over_components(turn, rows.unit)
    return outward * rows.unit + (turn - radial_part * rows.unit) / rows.r_angular


def _site_energies(shape: Shape, t: Tables, q: Tensor, types: Tensor) -> tuple[Tensor, Tensor]:
    """Site energies (A,) and their derivatives by the network's inputs (A, D)."""
    which = types if len(t.w0) > 1 else None
    if shape.two_layers:
        assert t.b1 is not None
        assert t.w2 is not None
        energy, slope = network.two_hidden(q, t.w0, t.b0, t.w1, t.b1, t.w2, which)
    else:
        energy, slope = network.one_hidden(q, t.w0, t.b0, t.w1, which)
    return energy - t.bias - t.type_bias[types], slope
