"""Sums of products whose results for one atom do not feel the other atoms.

A matrix library picks its kernel by the shape of the whole product and treats edges apart, so that the last bits of a
row depend on how many rows there are and where it stands among them. On a CPU the sums are therefore written out:
elementwise operations, and reductions along contiguous rows, do the same to every row. On a GPU, where the order of
additions is not fixed anyway, they are matrix products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def times_columns(matrix: Tensor, columns: Tensor) -> Tensor:
    """Σ_k matrix[n, k] columns[s, k, p]: (n, k) and (S, k, P) → (S, n, P)."""
    if columns.device.type != "cpu":
        return matrix @ columns
    out = matrix[:, 0, None] * columns[:, 0, None]
    for k in range(1, matrix.shape[1]):
        out = out + matrix[:, k, None] * columns[:, k, None]
    return out


def rows_times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Σ_d rows[r, d] matrices[r, d, h]: (R, D) and (R, D, H), or one (1, D, H) for all rows → (R, H)."""
    if rows.device.type != "cpu":
        return rows @ matrices[0] if len(matrices) == 1 else torch.bmm(rows[:, None], matrices).squeeze(1)
    out = rows[:, 0, None] * matrices[:, 0]
    for d in range(1, rows.shape[1]):
        out = out + rows[:, d, None] * matrices[:, d]
    return out


def sum_over_neighbors(g: Tensor, y: Tensor) -> Tensor:
    """Σ_w g[n, a, w] y[b, a, w]: (n, A, w) and (b, A, w) → (b, A, n)."""
    if g.device.type != "cpu":
        return torch.bmm(g.permute(1, 0, 2), y.permute(1, 2, 0)).permute(2, 0, 1)
    return torch.stack([(y * g_n).sum(dim=2) for g_n in g], dim=2)


def sum_over_functions(s: Tensor, g: Tensor) -> Tensor:
    """Σ_n s[b, a, n] g[n, a, w]: (b, A, n) and (n, A, w) → (b, A, w)."""
    if g.device.type != "cpu":
        return torch.bmm(s.permute(1, 0, 2), g.permute(1, 0, 2)).permute(1, 0, 2)
    out = s[:, :, 0, None] * g[0]
    for n in range(1, len(g)):
        out = out + s[:, :, n, None] * g[n]
    return out


def sum_over_components(a: Tensor, b: Tensor) -> Tensor:
    """Σ_c a[c] b[c]: (c, ...) and (c, ...) → (...)."""
    out = a[0] * b[0]
    for c in range(1, len(a)):
        out = out + a[c] * b[c]
    return out
