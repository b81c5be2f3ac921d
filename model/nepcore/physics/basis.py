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
    inside = (r < cutoff).to(r.dtype)
    u = r / cutoff - 1.0
    x = 2.0 * u * u - 1.0
    half_fc = (0.25 * torch.cos((math.pi / cutoff) * r) + 0.25) * inside  # ½ fc
    two_x = 2.0 * x
    t = [torch.ones_like(x), x]  # T_k
    for k in range(2, count):
        t.append(two_x * t[k - 1] - t[k - 2])
    f = [(t[k] + 1.0) * half_fc for k in range(count)]
    if not derivative:
        return torch.stack(f)[None]
    half_dfc = torch.sin((math.pi / cutoff) * r) * (-0.25 * math.pi / cutoff) * inside
    scale = (4.0 * half_fc / cutoff) * u  # ½ fc dx/dr
    df = [2.0 * half_dfc]
    # dT_k/dx = k U_{k−1}, by the recurrence of U
    previous, current = torch.zeros_like(x), torch.ones_like(x)
    for k in range(1, count):
        df.append((scale * current) * float(k) + (t[k] + 1.0) * half_dfc)
        previous, current = current, two_x * current - previous
    # Stacked once: compilers make one kernel of it, where writing into slices makes one select a slice.
    return torch.stack(f + df).view(2, count, *r.shape)
