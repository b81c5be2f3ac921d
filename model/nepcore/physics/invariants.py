"""Rotational invariants of the angular sums s_b, and their gradients.

The three-body invariant of degree l is Σ_b C_b s_b² over the block of l. The higher ones are polynomials of three or
four factors, written here as tables of monomials; gradients follow from the same tables.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import harmonics

Monomial = tuple[float, tuple[int, ...]]


def _scaled(unit: float, text: str) -> tuple[Monomial, ...]:
    """Monomials of a table row: ``"20: 2 4 12, -2 5 11"`` means 20 (s2 s4 s12 − s2 s5 s11), times ``unit``."""
    out = []
    for group in text.split(";"):
        factor, terms = group.split(":")
        for term in terms.split(","):
            sign, body = (-1.0, term.strip()[1:]) if term.strip().startswith("-") else (1.0, term)
            out.append((sign * float(factor) * unit, tuple(int(b) for b in body.split())))
    return tuple(out)


def _q222() -> tuple[Monomial, ...]:
    a = (-0.007499480826664, -0.134990654879954, 0.067495327439977, 0.404971964639861, -0.809943929279723)
    return (
        (a[0], (3, 3, 3)), (a[1], (3, 4, 4)), (a[1], (3, 5, 5)), (a[2], (3, 6, 6)), (a[2], (3, 7, 7)),
        (a[3], (6, 5, 5)), (-a[3], (6, 4, 4)), (a[4], (4, 5, 7)),
    )  # fmt: skip


def _q1111() -> tuple[Monomial, ...]:
    c = (0.026596810706114, 0.053193621412227, 0.026596810706114)
    return (
        (c[0], (0, 0, 0, 0)), (c[1], (0, 0, 1, 1)), (c[1], (0, 0, 2, 2)),
        (c[2], (1, 1, 1, 1)), (2.0 * c[2], (1, 1, 2, 2)), (c[2], (2, 2, 2, 2)),
    )  # fmt: skip


def _q112() -> tuple[Monomial, ...]:
    d = (0.027493550848847, 0.164961305093080, -0.013746775424423, 0.041240326273270, 0.082480652546540)
    return (
        (d[0], (0, 0, 3)), (d[1], (0, 1, 4)), (d[1], (0, 2, 5)), (d[2], (3, 1, 1)), (d[2], (3, 2, 2)),
        (d[3], (6, 1, 1)), (-d[3], (6, 2, 2)), (d[4], (1, 2, 7)),
    )  # fmt: skip


_TABLES: dict[str, tuple[Monomial, ...]] = {
    "q222": _q222(),
    "q1111": _q1111(),
    "q112": _q112(),
    "q123": _scaled(
        -0.008418146349617,
        "20: 2 4 12, -2 5 11, 1 4 11, 1 5 12; 10: 0 6 11, 0 7 12; 8: 0 5 10, 0 4 9;"
        "5: 2 6 14, -2 7 13, 1 6 13, 1 7 14; -4: 2 5 8, 1 4 8; 2: 2 3 10, 0 3 8, 1 3 9;"
        "1: 2 6 10, -1 7 10, -2 7 9, -1 6 9",
    ),
    "q233": _scaled(
        0.00107157757939825,
        "8: 3 8 8; 9: 3 9 9, 3 10 10; 18: 6 9 9, -6 10 10; 24: 8 4 9, 8 5 10; -25: 3 13 13, 3 14 14;"
        "30: -7 9 14, -6 9 13, -6 10 14, 7 10 13; 36: 7 9 10; -120: 8 6 11, 8 7 12;"
        "180: 4 9 11, 5 9 12, 4 10 12, -5 10 11; 300: 4 12 14, 5 11 14, 4 11 13, -5 12 13",
    ),
    "q134": _scaled(
        0.00121505476525733,
        "-3: 15 2 10, 15 1 9; 4: 0 8 15; 5: -1 13 18, -1 14 19, -2 14 18, 2 13 19;"
        "15: -2 10 18, 1 10 19, 1 9 18, 2 9 19; 20: 8 1 16, 8 2 17;"
        "30: 0 10 17, 0 9 16, -1 11 16, -1 12 17, -2 12 16, 2 11 17;"
        "35: 1 13 22, 1 14 23, -2 14 22, 2 13 23; 60: 0 11 18, 0 12 19; 70: 0 13 20, 0 14 21;"
        "210: 1 11 20, 1 12 21, -2 12 20, 2 11 21",
    ),
}


@cache
def monomials(switch: str, l_max: int) -> tuple[Monomial, ...]:
    """Monomials (factor, indices b) of a higher invariant; those with sums of degree above ``l_max`` are zero."""
    top = harmonics.width(l_max)
    return tuple((c, idx) for c, idx in _TABLES[switch] if max(idx) < top)


@cache
def gradient_terms(switch: str, l_max: int) -> tuple[tuple[int, tuple[Monomial, ...]], ...]:
    """Derivative of the invariant by each b: (b, monomials), equal ones gathered."""
    by_index: dict[int, dict[tuple[int, ...], float]] = {}
    for factor, indices in monomials(switch, l_max):
        for position, b in enumerate(indices):
            rest = tuple(sorted(indices[:position] + indices[position + 1 :]))
            terms = by_index.setdefault(b, {})
            terms[rest] = terms.get(rest, 0.0) + factor
    return tuple((b, tuple((c, rest) for rest, c in terms.items())) for b, terms in sorted(by_index.items()))


def _depends_on(switch: str, l_max: int) -> tuple[int, int]:
    every = [b for b, _ in gradient_terms(switch, l_max)]
    return (min(every), max(every) + 1) if every else (0, 0)


_DEPENDS_ON = {
    (switch, l_max): _depends_on(switch, l_max) for switch in _TABLES for l_max in range(1, harmonics.MAX_L + 1)
}
"""Range of b, first and behind the last, that a higher invariant is made of: plain numbers, for compilers."""


class Monomials(NamedTuple):
    """A higher invariant and its gradient as tables of monomials: M in the invariant, G by b (slower) and term.

    The gradient's are those of b in :data:`_DEPENDS_ON`.
    """

    factors: Tensor  # (M,)
    indices: Tensor  # (order, M)
    gradient_factors: Tensor  # (G,)
    gradient_indices: Tensor  # (order − 1, G)


@cache
def tables(
    switches: tuple[str, ...], l_max: int, dtype: torch.dtype, device: torch.device
) -> tuple[Monomials | None, ...]:  # fmt: skip
    """Tables of higher invariants, for :func:`invariants` and :func:`gradient`; None for those that are zero."""
    out: list[Monomials | None] = []
    for switch in switches:
        terms = monomials(switch, l_max)
        if not terms:
            out.append(None)
            continue
        by_index = dict(gradient_terms(switch, l_max))
        longest = max(map(len, by_index.values()))
        rest = (0,) * (len(terms[0][1]) - 1)
        flat: list[Monomial] = []
        for b in range(*_DEPENDS_ON[switch, l_max]):
            own = by_index.get(b, ())
            flat += [*own, *[(0.0, rest)] * (longest - len(own))]
        pairs = []
        for table in (terms, flat):
            factors = torch.tensor([c for c, _ in table], dtype=dtype, device=device)
            pairs += [factors, torch.tensor([idx for _, idx in table], device=device).T.contiguous()]
        out.append(Monomials(*pairs))
    return tuple(out)


def _terms(s: Tensor, factors: Tensor, indices: Tensor) -> Tensor:
    """Values of all monomials of a table, (monomials, ...)."""
    value = factors.reshape(-1, *[1] * (s.ndim - 1))
    for index in indices:
        value = value * s.index_select(0, index)
    return value


def _product(s: Tensor, indices: tuple[int, ...]) -> Tensor:
    value = s[indices[0]]
    for b in indices[1:]:
        value = value * s[b]
    return value


def _polynomial(s: Tensor, terms: tuple[Monomial, ...]) -> Tensor:
    value = torch.zeros_like(s[0])
    for factor, indices in terms:
        value = value + factor * _product(s, indices)
    return value


def invariants(
    s: Tensor, l_max: int, switches: tuple[str, ...], by_tables: tuple[Monomials | None, ...] = ()
) -> Tensor:  # fmt: skip
    """Angular descriptor components of the sums.

    Args:
        s: (l_max (l_max + 2), ...) sums over neighbours.
        l_max: Highest degree.
        switches: Higher invariants that are on, in the order of
            :data:`nepcore.files.nep_layout.SWITCHES`.
        by_tables: :func:`tables` of them: few operations, where each costs a launch, or time to compile. Left out,
            the polynomials are written out: the order in which a sum is taken may depend on the number of atoms.

    Returns:
        (l_max + len(switches), ...), before the scaler.
    """
    blocks = []
    square = s * s
    c = harmonics.weights(l_max)
    for l in range(1, l_max + 1):
        value = c[l * l - 1] * square[l * l - 1]
        for b in range(l * l, (l + 1) ** 2 - 1):
            value = value + c[b] * square[b]
        blocks.append(value)
    if by_tables:
        zero = torch.zeros_like(s[0])
        blocks += [zero if t is None else _terms(s, t.factors, t.indices).sum(dim=0) for t in by_tables]
    else:
        blocks += [_polynomial(s, monomials(name, l_max)) for name in switches]
    return torch.stack(blocks)


def gradient(
    s: Tensor, slope: Tensor, l_max: int, switches: tuple[str, ...], by_tables: tuple[Monomials | None, ...] = ()
) -> Tensor:  # fmt: skip
    """Σ_B slope_B ∂q_B/∂s_b.

    Args:
        s: (l_max (l_max + 2), ...) sums.
        slope: (l_max + len(switches), ...) derivative of the energy by each component.
        l_max: Highest degree.
        switches: Higher invariants that are on.
        by_tables: As of :func:`invariants`.

    Returns:
        (l_max (l_max + 2), ...).
    """
    c = harmonics.weights(l_max)
    degree = [l for l in range(1, l_max + 1) for _ in range(2 * l + 1)]
    out = [(2.0 * c[b]) * s[b] * slope[degree[b] - 1] for b in range(len(c))]
    if by_tables:
        total = torch.stack(out)
        for position, t in enumerate(by_tables):
            if t is not None:
                first, behind = _DEPENDS_ON[switches[position], l_max]
                terms = _terms(s, t.gradient_factors, t.gradient_indices).unflatten(0, (behind - first, -1))
                total[first:behind] += slope[l_max + position] * terms.sum(dim=1)
        return total
    for position, name in enumerate(switches):
        f = slope[l_max + position]
        for b, terms in gradient_terms(name, l_max):
            out[b] = out[b] + f * _polynomial(s, terms)
    return torch.stack(out)
