"""Solid-harmonic polynomials Y_b of a unit vector, as the angular descriptor sums them.

Y_b are unnormalised: for m = 0, P_l0(z); for m > 0 the pair P_lm(z) Re(x + iy)^m, P_lm(z) Im(x + iy)^m. The block of
degree l has 2l + 1 entries from b = l² − 1 on, m = 0 first.
"""

from __future__ import annotations

from math import factorial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

# fmt: off
POLYNOMIALS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((0, 1), (1,)),
    2: ((-1, 0, 3), (0, 1), (1,)),
    3: ((0, -3, 0, 5), (-1, 0, 5), (0, 1), (1,)),
    4: ((3, 0, -30, 0, 35), (0, -3, 0, 7), (-1, 0, 7), (0, 1), (1,)),
    5: ((0, 15, 0, -70, 0, 63), (1, 0, -14, 0, 21), (0, -1, 0, 3), (-1, 0, 9), (0, 1), (1,)),
    6: ((-5, 0, 105, 0, -315, 0, 231), (0, 5, 0, -30, 0, 33), (1, 0, -18, 0, 33), (0, -3, 0, 11), (-1, 0, 11),
        (0, 1), (1,)),
    7: ((0, -35, 0, 315, 0, -693, 0, 429), (-5, 0, 135, 0, -495, 0, 429), (0, 15, 0, -110, 0, 143),
        (3, 0, -66, 0, 143), (0, -3, 0, 13), (-1, 0, 13), (0, 1), (1,)),
    8: ((35, 0, -1260, 0, 6930, 0, -12012, 0, 6435), (0, -35, 0, 385, 0, -1001, 0, 715),
        (-1, 0, 33, 0, -143, 0, 143), (0, 3, 0, -26, 0, 39), (1, 0, -26, 0, 65), (0, -1, 0, 5), (-1, 0, 15),
        (0, 1), (1,)),
}
# fmt: on
"""Coefficients of P_lm(z) by ascending powers, for m = 0 to l."""

MAX_L = max(POLYNOMIALS)


def width(l_max: int) -> int:
    """Number of polynomials up to degree ``l_max``: l_max (l_max + 2)."""
    return l_max * (l_max + 2)


def weights(l_max: int) -> list[float]:
    """Weight C_b of s_b² in the three-body invariant of its degree, for every b.

    With ρ the ratio of the leading coefficients of d^m P_l/dz^m (Legendre) and of the stored polynomial, the
    addition theorem gives C = (2l+1)/(4π) (l−m)!/(l+m)! ρ², doubled for m > 0, where Re and Im stand for ±m.
    """
    values = []
    for l in range(1, l_max + 1):
        for m in range(l + 1):
            leading = factorial(2 * l) / (2**l * factorial(l) * factorial(l - m))
            rho = leading / POLYNOMIALS[l][m][-1]
            c = (2 * l + 1) / (4.0 * torch.pi) * factorial(l - m) / factorial(l + m) * rho * rho
            values += [c] if m == 0 else [2.0 * c, 2.0 * c]
    return values


def _horner(coefficients: tuple[int, ...], z: Tensor) -> Tensor | float:
    """Polynomial in z; a plain number where it is constant."""
    value: Tensor | float = float(coefficients[-1])
    for c in coefficients[-2::-1]:
        value = value * z
        if c:
            value = value + float(c)
    return value


def _derivative(coefficients: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(k * c for k, c in enumerate(coefficients))[1:]


def _powers(x: Tensor, y: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """(x + iy)^m for m = 1 to ``count`` as pairs of real and imaginary part."""
    out = [(x, y)]
    for _ in range(1, count):
        re, im = out[-1]
        out.append((re * x - im * y, re * y + im * x))
    return out


def harmonics(unit: Tensor, l_max: int) -> Tensor:
    """Y_b of unit vectors.

    Args:
        unit: (3, ...) components x, y, z.
        l_max: Highest degree, 1 to 8.

    Returns:
        (l_max (l_max + 2), ...).
    """
    x, y, z = unit[0], unit[1], unit[2]
    power = _powers(x, y, l_max)
    out = []
    for l in range(1, l_max + 1):
        for m in range(l + 1):
            p = _horner(POLYNOMIALS[l][m], z)
            if m == 0:
                out.append(p)
            else:
                out += [power[m - 1][0] * p, power[m - 1][1] * p]
    return torch.stack(out)  # type: ignore[arg-type]


def contracted_gradient(unit: Tensor, weight: Tensor, l_max: int) -> Tensor:
    """Σ_b weight_b ∇Y_b, the gradient of the polynomials with respect to x, y, z taken as independent.

    Args:
        unit: (3, ...) unit vectors.
        weight: (l_max (l_max + 2), ...).
        l_max: Highest degree.

    Returns:
        (3, ...); the caller projects out the radial part and divides by r.
    """
    x, y, z = unit[0], unit[1], unit[2]
    power = _powers(x, y, l_max)
    zero = torch.zeros_like(x)
    out = [zero, zero, zero]
    b = 0
    for l in range(1, l_max + 1):
        out[2] = out[2] + weight[b] * _horner(_derivative(POLYNOMIALS[l][0]), z)
        b += 1
        for m in range(1, l + 1):
            w_re, w_im = weight[b], weight[b + 1]
            b += 2
            p = _horner(POLYNOMIALS[l][m], z)
            slope = _derivative(POLYNOMIALS[l][m])
            if m == 1:
                out[0] = out[0] + w_re * p
                out[1] = out[1] + w_im * p
            else:
                re, im = power[m - 2]
                out[0] = out[0] + (w_re * re + w_im * im) * (p * float(m))
                out[1] = out[1] + (w_im * re - w_re * im) * (p * float(m))
            if slope:
                re, im = power[m - 1]
                out[2] = out[2] + (w_re * re + w_im * im) * _horner(slope, z)
    return torch.stack(out)
