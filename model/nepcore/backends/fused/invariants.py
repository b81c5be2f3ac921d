"""Invariants of the angular sums and their gradients, in tiles; monomials as in :mod:`nepcore.physics.invariants`."""

from __future__ import annotations

import triton
import triton.language as tl

from nepcore.files.nep_layout import SWITCHES
from nepcore.physics.harmonics import MAX_L, weights
from nepcore.physics.invariants import gradient_terms, monomials

from .tables import Fixed

N_SWITCHES = tl.constexpr(len(SWITCHES))
_DEGREES = range(1, MAX_L + 1)
_WEIGHTS = Fixed({L: weights(L) for L in _DEGREES})
_TERMS = Fixed({(bit, L): monomials(name, L) for bit, name in enumerate(SWITCHES) for L in _DEGREES})
_SLOPES = Fixed({(bit, L): dict(gradient_terms(name, L)) for bit, name in enumerate(SWITCHES) for L in _DEGREES})


@triton.constexpr_function
def weight(L, b):  # type: ignore[no-untyped-def]
    """C_b."""
    return _WEIGHTS.value[L][b]


@triton.constexpr_function
def is_on(switches, bit):  # type: ignore[no-untyped-def]
    """Whether a higher invariant is on."""
    return (switches >> bit) & 1 == 1


@triton.constexpr_function
def block_of(switches, bit, L):  # type: ignore[no-untyped-def]
    """Block of a higher invariant that is on, among the angular ones."""
    return L + (switches & ((1 << bit) - 1)).bit_count()


@triton.constexpr_function
def terms(bit, L):  # type: ignore[no-untyped-def]
    """Number of monomials of a higher invariant."""
    return len(_TERMS.value[bit, L])


@triton.constexpr_function
def factor(bit, L, term):  # type: ignore[no-untyped-def]
    """Factor of a monomial."""
    return _TERMS.value[bit, L][term][0]


@triton.constexpr_function
def order(bit, L, term):  # type: ignore[no-untyped-def]
    """Number of sums in a monomial."""
    return len(_TERMS.value[bit, L][term][1])


@triton.constexpr_function
def index(bit, L, term, place):  # type: ignore[no-untyped-def]
    """A sum in a monomial."""
    return _TERMS.value[bit, L][term][1][place]


@triton.constexpr_function
def slopes(bit, L, b):  # type: ignore[no-untyped-def]
    """Number of monomials of the derivative by s_b."""
    return len(_SLOPES.value[bit, L].get(b, ()))


@triton.constexpr_function
def slope_factor(bit, L, b, term):  # type: ignore[no-untyped-def]
    """Factor of one of them."""
    return _SLOPES.value[bit, L][b][term][0]


@triton.constexpr_function
def slope_index(bit, L, b, term, place):  # type: ignore[no-untyped-def]
    """A sum in one of them."""
    return _SLOPES.value[bit, L][b][term][1][place]


@triton.jit
def invariants(s, L: tl.constexpr, SWITCHES_ON: tl.constexpr):
    """Angular blocks of the descriptor: of a tuple of sums s_b, a tuple of blocks."""
    q = ()
    for l in tl.static_range(1, L + 1):
        value = weight(L, l * l - 1) * (s[l * l - 1] * s[l * l - 1])
        for b in tl.static_range(l * l, (l + 1) * (l + 1) - 1):
            value += weight(L, b) * (s[b] * s[b])
        q = q + (value,)
    for bit in tl.static_range(N_SWITCHES):
        if is_on(SWITCHES_ON, bit):
            value = tl.zeros_like(s[0])
            for term in tl.static_range(terms(bit, L)):
                product = s[index(bit, L, term, 0)] * factor(bit, L, term)
                for place in tl.static_range(1, order(bit, L, term)):
                    product = product * s[index(bit, L, term, place)]
                value += product
            q = q + (value,)
    return q


@triton.jit
def gradient(s, f, L: tl.constexpr, SWITCHES_ON: tl.constexpr):
    """Σ_B f_B ∂q_B/∂s_b: of tuples of sums and of slopes by the blocks, a tuple over b."""
    d = ()
    for l in tl.static_range(1, L + 1):
        for b in tl.static_range(l * l - 1, (l + 1) * (l + 1) - 1):
            value = (2.0 * weight(L, b)) * s[b] * f[l - 1]
            for bit in tl.static_range(N_SWITCHES):
                if is_on(SWITCHES_ON, bit) and slopes(bit, L, b) > 0:
                    total = tl.zeros_like(s[0])
                    for term in tl.static_range(slopes(bit, L, b)):
                        product = s[slope_index(bit, L, b, term, 0)] * slope_factor(bit, L, b, term)
                        for place in tl.static_range(1, order(bit, L, 0) - 1):
                            product = product * s[slope_index(bit, L, b, term, place)]
                        total += product
                    value += f[block_of(SWITCHES_ON, bit, L)] * total
            d = d + (value,)
    return d
