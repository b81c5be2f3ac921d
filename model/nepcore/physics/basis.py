"""Radial basis: Chebyshev polynomials times a cosine cutoff."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def radial_basis(r: Tensor, cutoff: Tensor, count: int, *, derivative: bool = True) -> Tensor:
    """Basis functions of distances and, on request, their derivatives.

    With x = 2(r/rc − 1)² − 1 and fc = ½ cos(π r/rc) + ½, the functions are f_k = ½ [T_k(x) + 1] fc for k = 0 to
    ``count`` − 1; all of them, and their first derivatives, vanish from rc on.

    Args:
        r: Distances, Å, any shape.
        cutoff: Pair cutoffs rc, Å, same shape.
        count: Number of functions, K + 1.
        derivative: Whether df_k/dr is wanted.

    Returns:
        (2, count, *r.shape) with values and derivatives (1/Å), or (1, count, *r.shape) with values alone.
    """
    out = r.new_empty((2 if derivative else 1, count, *r.shape))
    f = out[0]
    inside = (r < cutoff).to(r.dtype)
    u = r / cutoff - 1.0
    x = 2.0 * u * u - 1.0
    half_fc = (0.25 * torch.cos((math.pi / cutoff) * r) + 0.25) * inside  # ½ fc
    f[0] = 1.0
    if count > 1:
        f[1] = x
    two_x = 2.0 * x
    for k in range(2, count):
        torch.mul(two_x, f[k - 1], out=f[k])
        f[k] -= f[k - 2]
    if derivative:
        df = out[1]
        half_dfc = torch.sin((math.pi / cutoff) * r) * (-0.25 * math.pi / cutoff) * inside
        scale = (4.0 * half_fc / cutoff) * u  # ½ fc dx/dr
        df[0] = 2.0 * half_dfc
        if count > 1:
            # dT_k/dx = k U_{k−1}, by the recurrence of U
            previous, current = torch.zeros_like(x), torch.ones_like(x)
            for k in range(1, count):
                torch.mul(scale, current, out=df[k])
                df[k] *= float(k)
                df[k] += (f[k] + 1.0) * half_dfc
                previous, current = current, two_x * current - previous
    f += 1.0
    f *= half_fc
    return out
