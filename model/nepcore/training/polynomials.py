"""Harmonics, their gradients and the invariants as tables, so that each of them is a few matrix products.

On a GPU a step is as long as the number of its operations: a polynomial written out term by term is hundreds of them.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from nepcore.physics import harmonics, invariants

Polynomial = dict[tuple[int, int, int], float]
"""Coefficients by the powers of x, y and z."""


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    out: Polynomial = defaultdict(float)
    for p, u in a.items():
        for q, v in b.items():
            out[p[0] + q[0], p[1] + q[1], p[2] + q[2]] += u * v
    return dict(out)


def _slope(a: Polynomial, axis: int) -> Polynomial:
    out: Polynomial = {}
    for p, u in a.items():
        if p[axis]:
            lower = list(p)
            lower[axis] -= 1
            out[lower[0], lower[1], lower[2]] = u * p[axis]
    return out


def _outward(a: Polynomial) -> Polynomial:
    """x · ∇."""
    return {p: u * sum(p) for p, u in a.items()}


def _harmonics(l_max: int) -> list[Polynomial]:
    out: list[Polynomial] = []
    for l in range(1, l_max + 1):
        real: Polynomial = {(0, 0, 0): 1.0}
        imaginary: Polynomial = {}
        for m in range(l + 1):
            p: Polynomial = {(0, 0, k): float(c) for k, c in enumerate(harmonics.POLYNOMIALS[l][m]) if c}
            out += [_times(p, real)] if m == 0 else [_times(p, real), _times(p, imaginary)]
            x: Polynomial = {(1, 0, 0): 1.0}
            y: Polynomial = {(0, 1, 0): 1.0}
            minus: Polynomial = {(0, 1, 0): -1.0}
            re, im = _times(real, x), _times(imaginary, x)
            for source, factor, target in ((imaginary, minus, re), (real, y, im)):
                for power, u in _times(source, factor).items():
                    target[power] = target.get(power, 0.0) + u
            real, imaginary = re, im
    return out


class Harmonics(NamedTuple):
    """Tables of :func:`values`."""

    powers: Tensor  # (l_max + 1,)
    x: Tensor  # (M,) power of x in each monomial; y and z alike
    y: Tensor
    z: Tensor
    matrix: Tensor  # (M, 5 b): Y, its three derivatives, and x · ∇Y


@cache
def harmonics_tables(l_max: int, dtype: torch.dtype, device: torch.device) -> Harmonics:
    """Tables of the harmonics up to a degree."""
    all_ = _harmonics(l_max)
    columns = [*all_, *(_slope(p, axis) for axis in range(3) for p in all_), *map(_outward, all_)]
    monomials = sorted({power for p in columns for power in p})
    row = {power: i for i, power in enumerate(monomials)}
    matrix = torch.zeros((len(monomials), len(columns)), dtype=torch.float64)
    for j, p in enumerate(columns):
        for power, u in p.items():
            matrix[row[power], j] = u
    exponents = torch.tensor(monomials, device=device).T.contiguous()
    powers = torch.arange(l_max + 1, dtype=dtype, device=device)
    return Harmonics(powers, exponents[0], exponents[1], exponents[2], matrix.to(device, dtype))


def values(unit: Tensor, tables: Harmonics) -> Tensor:
    """Y, ∂Y/∂x, ∂Y/∂y, ∂Y/∂z and x · ∇Y of unit vectors, (R, 3) → (R, 5, b)."""
    power = unit[:, :, None] ** tables.powers  # (R, 3, l_max + 1)
    monomials = power[:, 0].index_select(1, tables.x) * power[:, 1].index_select(1, tables.y)
    monomials = monomials * power[:, 2].index_select(1, tables.z)
    return (monomials @ tables.matrix).view(len(unit), 5, -1)


class Higher(NamedTuple):
    """A higher invariant and its gradient: products of sums that one-hot columns choose."""

    chosen: tuple[Tensor, ...]  # each (b, M)
    factors: Tensor  # (M, 1)
    rest: tuple[Tensor, ...]  # each (b, U)
    gradient: Tensor  # (U, b)


class Invariants(NamedTuple):
    """Tables of :func:`invariants_of` and :func:`gradient_of`."""

    squares: Tensor  # (b, l_max)
    slopes: Tensor  # (l_max, b): twice the weights
    higher: tuple[Higher, ...]


@cache
def invariants_tables(switches: tuple[str, ...], l_max: int, dtype: torch.dtype, device: torch.device) -> Invariants:
    """Tables of the invariants of a kind of model."""
    weights = harmonics.weights(l_max)
    b = len(weights)
    squares = torch.zeros((b, l_max), dtype=torch.float64)
    degree = [l for l in range(1, l_max + 1) for _ in range(2 * l + 1)]
    for i, c in enumerate(weights):
        squares[i, degree[i] - 1] = c
    higher = []
    for switch in switches:
        terms = invariants.monomials(switch, l_max)
        order = len(terms[0][1]) if terms else 2
        factors = torch.tensor([[c] for c, _ in terms], dtype=torch.float64).reshape(-1, 1)
        chosen = [_one_hot([indices[o] for _, indices in terms], b) for o in range(order)]
        slope: dict[tuple[int, ...], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for factor, indices in terms:
            for position, index in enumerate(indices):
                slope[tuple(sorted(indices[:position] + indices[position + 1 :]))][index] += factor
        rest = sorted(slope)
        gradient = torch.zeros((len(rest), b), dtype=torch.float64)
        for u, key in enumerate(rest):
            for index, factor in slope[key].items():
                gradient[u, index] = factor
        others = [_one_hot([key[o] for key in rest], b) for o in range(order - 1)]
        higher.append(Higher(
            tuple(t.to(device, dtype) for t in chosen), factors.to(device, dtype),
            tuple(t.to(device, dtype) for t in others), gradient.to(device, dtype),
        ))  # fmt: skip
    return Invariants(squares.to(device, dtype), (2.0 * squares.T).contiguous().to(device, dtype), tuple(higher))


def _one_hot(rows: list[int], width: int) -> Tensor:
    out = torch.zeros((width, len(rows)), dtype=torch.float64)
    for column, row in enumerate(rows):
        out[row, column] = 1.0
    return out


def invariants_of(s: Tensor, tables: Invariants) -> Tensor:
    """Angular components of sums, (R, b) → (R, blocks); see :func:`nepcore.physics.invariants.invariants`."""
    parts = [(s * s) @ tables.squares]
    parts += [_product(s, h.chosen) @ h.factors for h in tables.higher]
    return torch.cat(parts, dim=1) if tables.higher else parts[0]


def gradient_of(s: Tensor, slope: Tensor, tables: Invariants) -> Tensor:
    """Σ_B slope_B ∂q_B/∂s_b, (R, b) and (R, blocks) → (R, b)."""
    l_max = tables.squares.shape[1]
    out = (slope[:, :l_max] @ tables.slopes) * s
    for position, h in enumerate(tables.higher):
        out = out + slope[:, l_max + position, None] * (_product(s, h.rest) @ h.gradient)
    return out


def _product(s: Tensor, chosen: tuple[Tensor, ...]) -> Tensor:
    out = s @ chosen[0]
    for matrix in chosen[1:]:
        out = out * (s @ matrix)
    return out


def radial_functions(r: Tensor, cutoff: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The basis of :func:`nepcore.physics.basis.radial_basis` and its derivatives, (...) → (..., count) each.

    With cos φ = 1 − r/rc, T_k(2(r/rc − 1)² − 1) = cos 2kφ: no recurrence, and no cancellation but at r = 0.
    """
    inside = (r < cutoff).to(r.dtype)
    x = (r / cutoff).clamp(max=1.0)
    phi = torch.acos(1.0 - x)
    half = (0.25 * torch.cos(torch.pi * x) + 0.25) * inside  # ½ fc
    half_slope = (-0.25 * torch.pi) * torch.sin(torch.pi * x) * inside / cutoff
    k = 2.0 * torch.arange(count, dtype=r.dtype, device=r.device)
    angle = phi[..., None] * k
    t = torch.cos(angle) + 1.0
    turn = (half / (cutoff * torch.sin(phi)))[..., None] * k
    return half[..., None] * t, half_slope[..., None] * t - turn * torch.sin(angle)
