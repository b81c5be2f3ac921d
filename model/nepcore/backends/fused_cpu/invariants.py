"""Rotational invariants of the angular sums and their derivatives, for all angular functions at once.

``sums`` holds s[b][n] with n contiguous: lanes run over n. The angular index b counts the harmonics l = 1 … L, the
block of l starting at l² − 1, in it m = 0, then the pair (Re, Im) of m = 1 … l.
"""

from __future__ import annotations

from fractions import Fraction
from math import factorial, gcd, lcm, pi
from typing import TYPE_CHECKING, Any

import numpy as np

from .inner import inner
from .simd import fma, load, spread, store, zeros

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .vec import Width

L_LIMIT = 8

SWITCHES = ("q222", "q1111", "q112", "q123", "q233", "q134")
"""Higher invariants in the order of the descriptor vector."""

Q222 = (-0.007499480826664, -0.134990654879954, 0.067495327439977, 0.404971964639861, -0.809943929279723)
Q1111 = (0.026596810706114, 0.053193621412227, 0.026596810706114)

# Products of three or four sums: (factor, b, b, b[, b]).
_Q112 = (
    (0.027493550848847, 0, 0, 3), (0.164961305093080, 0, 1, 4), (0.164961305093080, 0, 2, 5),
    (-0.013746775424423, 3, 1, 1), (-0.013746775424423, 3, 2, 2), (0.041240326273270, 6, 1, 1),
    (-0.041240326273270, 6, 2, 2), (0.082480652546540, 1, 2, 7),
)  # fmt: skip
_Q123 = tuple(
    (-0.008418146349617 * a, *b)
    for a, *b in (
        (20, 2, 4, 12), (-20, 2, 5, 11), (20, 1, 4, 11), (20, 1, 5, 12), (10, 0, 6, 11), (10, 0, 7, 12),
        (8, 0, 5, 10), (8, 0, 4, 9), (5, 2, 6, 14), (-5, 2, 7, 13), (5, 1, 6, 13), (5, 1, 7, 14),
        (-4, 2, 5, 8), (-4, 1, 4, 8), (2, 2, 3, 10), (2, 0, 3, 8), (2, 1, 3, 9),
        (1, 2, 6, 10), (-1, 1, 7, 10), (-1, 2, 7, 9), (-1, 1, 6, 9),
    )
)  # fmt: skip
_Q233 = tuple(
    (0.00107157757939825 * a, *b)
    for a, *b in (
        (8, 3, 8, 8), (9, 3, 9, 9), (9, 3, 10, 10), (18, 6, 9, 9), (-18, 6, 10, 10), (24, 8, 4, 9), (24, 8, 5, 10),
        (-25, 3, 13, 13), (-25, 3, 14, 14), (-30, 7, 9, 14), (-30, 6, 9, 13), (-30, 6, 10, 14), (30, 7, 10, 13),
        (36, 7, 9, 10), (-120, 8, 6, 11), (-120, 8, 7, 12), (180, 4, 9, 11), (180, 5, 9, 12), (180, 4, 10, 12),
        (-180, 5, 10, 11), (300, 4, 12, 14), (300, 5, 11, 14), (300, 4, 11, 13), (-300, 5, 12, 13),
    )
)  # fmt: skip
_Q134 = tuple(
    (0.00121505476525733 * a, *b)
    for a, *b in (
        (-3, 15, 2, 10), (-3, 15, 1, 9), (4, 0, 8, 15), (-5, 1, 13, 18), (-5, 1, 14, 19), (-5, 2, 14, 18),
        (5, 2, 13, 19), (-15, 2, 10, 18), (15, 1, 10, 19), (15, 1, 9, 18), (15, 2, 9, 19), (20, 8, 1, 16),
        (20, 8, 2, 17), (30, 0, 10, 17), (30, 0, 9, 16), (-30, 1, 11, 16), (-30, 1, 12, 17), (-30, 2, 12, 16),
        (30, 2, 11, 17), (35, 1, 13, 22), (35, 1, 14, 23), (-35, 2, 14, 22), (35, 2, 13, 23), (60, 0, 11, 18),
        (60, 0, 12, 19), (70, 0, 13, 20), (70, 0, 14, 21), (210, 1, 11, 20), (210, 1, 12, 21), (-210, 2, 12, 20),
        (210, 2, 11, 21),
    )
)  # fmt: skip
_TRIPLES = {"q112": _Q112, "q123": _Q123, "q233": _Q233, "q134": _Q134}


def legendre_tables() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The polynomials P_lm(z) and the weights of their squares.

    P_lm is the m-th derivative of the Legendre polynomial P_l, scaled to coprime whole coefficients.

    Returns:
        Coefficients (9, 9, 9): l, m, power of z; weights C_lm (9, 9): with them
        Σ_b C s_b² (twice for m > 0) is (2l+1)/4π times the Legendre sum over pairs of neighbours.
    """
    table = np.zeros((L_LIMIT + 1,) * 3)
    weight = np.zeros((L_LIMIT + 1,) * 2)
    for l in range(1, L_LIMIT + 1):
        exact = [Fraction(0)] * (l + 1)
        for k in range(l // 2 + 1):
            exact[l - 2 * k] = Fraction(
                (-1) ** k * factorial(2 * l - 2 * k), 2**l * factorial(k) * factorial(l - k) * factorial(l - 2 * k)
            )
        for m in range(l + 1):
            scale = lcm(*(c.denominator for c in exact))
            whole = [int(c * scale) for c in exact]
            common = gcd(*whole)
            table[l, m, : len(whole)] = [c // common for c in whole]
            ratio = float(exact[-1] / (whole[-1] // common))
            weight[l, m] = (2 * l + 1) / (4 * pi) * factorial(l - m) / factorial(l + m) * ratio**2
            exact = [k * c for k, c in enumerate(exact)][1:]
    return table, weight


def square_weights(l_max: int) -> NDArray[np.float64]:
    """Factor of s_b² in the invariant of its l, (l_max² + 2 l_max,)."""
    _, weight = legendre_tables()
    return np.array([weight[l, (k + 1) // 2] * (2 if k else 1) for l in range(1, l_max + 1) for k in range(2 * l + 1)])


def product_terms(switches: dict[str, bool]) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Terms of the switched-on invariants q112, q123, q233, q134.

    Returns:
        Factors (terms,), sums (terms, 3), and where the terms of each of the four begin and end, (5,).
    """
    factors: list[float] = []
    sums: list[Any] = []
    ends = [0]
    for name, terms in _TRIPLES.items():
        if switches[name]:
            factors += [t[0] for t in terms]
            sums += [t[1:] for t in terms]
        ends.append(len(factors))
    return np.array(factors), np.array(sums, np.int64).reshape(-1, 3), np.array(ends, np.int64)


@inner
def invariants(s: Any, stride: int, model: Any, q: Any, width: Width) -> None:
    """Write the angular part of the descriptor vector, unscaled, into ``q``.

    Args:
        s: Sums s[b][n], flat; ``stride`` numbers a row.
        stride: Length of a row, a multiple of the width.
        model: The packed model.
        q: Descriptor vector; slots behind the last of a block are overwritten and belong to the next block, or to
            nobody.
        width: Lanes over n.
    """
    w = len(width)
    # Backwards: what a vector writes behind the end of its block is then written again, by the block it belongs to.
    for c in range(stride - w, -1, -w):
        at = model.n_radial + c
        for l in range(1, model.l_max + 1):
            v = load(s, (l * l - 1) * stride + c, width)
            acc = v * v * model.squares[l * l - 1]
            for b in range(l * l, l * l + 2 * l):
                v = load(s, b * stride + c, width)
                acc = fma(v * v, model.squares[b], acc)
            store(q, at, acc)
            at += model.n_angular
        if model.q222:
            s3 = load(s, 3 * stride + c, width)
            s4 = load(s, 4 * stride + c, width)
            s5 = load(s, 5 * stride + c, width)
            s6 = load(s, 6 * stride + c, width)
            s7 = load(s, 7 * stride + c, width)
            a = s4 * s4
            b5 = s5 * s5
            acc = s3 * (Q222[0] * (s3 * s3) + Q222[1] * (a + b5) + Q222[2] * fma(s6, s6, s7 * s7))
            store(q, at, acc + (Q222[3] * s6) * (b5 - a) + (Q222[4] * s4) * (s5 * s7))
            at += model.n_angular
        if model.q1111:
            s0 = load(s, c, width)
            s1 = load(s, stride + c, width)
            s2 = load(s, 2 * stride + c, width)
            a = s0 * s0
            o = fma(s1, s1, s2 * s2)
            store(q, at, a * (Q1111[0] * a + Q1111[1] * o) + Q1111[2] * (o * o))
            at += model.n_angular
        for kind in range(4):
            first = model.term_ends[kind]
            last = model.term_ends[kind + 1]
            if last > first:
                acc = zeros(q, width)
                for t in range(first, last):
                    x = load(s, model.term_sums[3 * t] * stride + c, width)
                    y = load(s, model.term_sums[3 * t + 1] * stride + c, width)
                    z = load(s, model.term_sums[3 * t + 2] * stride + c, width)
                    acc = fma(x * y, z * model.term_factors[t], acc)
                store(q, at, acc)
                at += model.n_angular


@inner
def invariant_gradient(s: Any, stride: int, model: Any, u: Any, d: Any, width: Width) -> None:
    """∂U/∂s[b][n] from the derivatives ``u`` of U by the unscaled descriptors; laid out as ``s``."""
    w = len(width)
    for c in range(0, stride, w):
        at = model.n_radial + c
        for l in range(1, model.l_max + 1):
            f = load(u, at, width)
            f = f + f
            for b in range(l * l - 1, l * l + 2 * l):
                store(d, b * stride + c, load(s, b * stride + c, width) * f * model.squares[b])
            at += model.n_angular
        if model.q222:
            f = load(u, at, width)
            s3 = load(s, 3 * stride + c, width)
            s4 = load(s, 4 * stride + c, width)
            s5 = load(s, 5 * stride + c, width)
            s6 = load(s, 6 * stride + c, width)
            s7 = load(s, 7 * stride + c, width)
            a = s4 * s4
            b5 = s5 * s5
            g3 = (3.0 * Q222[0]) * (s3 * s3) + Q222[1] * (a + b5) + Q222[2] * fma(s6, s6, s7 * s7)
            g4 = s4 * ((2.0 * Q222[1]) * s3 - (2.0 * Q222[3]) * s6) + Q222[4] * (s5 * s7)
            g5 = s5 * ((2.0 * Q222[1]) * s3 + (2.0 * Q222[3]) * s6) + Q222[4] * (s4 * s7)
            g6 = (2.0 * Q222[2]) * (s3 * s6) + Q222[3] * (b5 - a)
            g7 = (2.0 * Q222[2]) * (s3 * s7) + Q222[4] * (s4 * s5)
            store(d, 3 * stride + c, fma(f, g3, load(d, 3 * stride + c, width)))
            store(d, 4 * stride + c, fma(f, g4, load(d, 4 * stride + c, width)))
            store(d, 5 * stride + c, fma(f, g5, load(d, 5 * stride + c, width)))
            store(d, 6 * stride + c, fma(f, g6, load(d, 6 * stride + c, width)))
            store(d, 7 * stride + c, fma(f, g7, load(d, 7 * stride + c, width)))
            at += model.n_angular
        if model.q1111:
            f = load(u, at, width)
            s0 = load(s, c, width)
            s1 = load(s, stride + c, width)
            s2 = load(s, 2 * stride + c, width)
            a = s0 * s0
            o = fma(s1, s1, s2 * s2)
            g0 = s0 * ((4.0 * Q1111[0]) * a + (2.0 * Q1111[1]) * o)
            g = (2.0 * Q1111[1]) * a + (4.0 * Q1111[2]) * o
            store(d, c, fma(f, g0, load(d, c, width)))
            store(d, stride + c, fma(f, s1 * g, load(d, stride + c, width)))
            store(d, 2 * stride + c, fma(f, s2 * g, load(d, 2 * stride + c, width)))
            at += model.n_angular
        for kind in range(4):
            first = model.term_ends[kind]
            last = model.term_ends[kind + 1]
            if last > first:
                f = load(u, at, width)
                for t in range(first, last):
                    bx = model.term_sums[3 * t] * stride + c
                    by = model.term_sums[3 * t + 1] * stride + c
                    bz = model.term_sums[3 * t + 2] * stride + c
                    x = load(s, bx, width)
                    y = load(s, by, width)
                    z = load(s, bz, width)
                    g = f * spread(model.term_factors, t, width)
                    # One after the other: two of the three may be the same sum.
                    store(d, bx, fma(g, y * z, load(d, bx, width)))
                    store(d, by, fma(g, x * z, load(d, by, width)))
                    store(d, bz, fma(g, x * y, load(d, bz, width)))
                at += model.n_angular
