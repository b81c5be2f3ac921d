"""Sums of products whose results for one atom do not feel the other atoms.

A matrix library picks its kernel by the shape of the whole product and treats edges apart, so that the last bits of a
row depend on how many rows there are and where it stands among them. On a CPU the sums are therefore written out:
elementwise operations, and reductions along contiguous rows, do the same to every row. On a GPU, where the order of
additions is not fixed anyway, they are matrix products. Inside a compiled function they are products and sums, which
the compiler fuses with what makes the factors; where a factor is used many times, matrix products are faster there too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

ALL_NETWORKS = 16
"""Up to this many matrices, rows are multiplied by all of them at once: one large product beats many tiny ones."""


class _Recording:
    on = False


def compiling() -> bool:
    """Whether this runs for a compiler, which fuses operations."""
    return _Recording.on or torch.compiler.is_compiling()


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """What runs inside is recorded, to be compiled afterwards."""
    before, _Recording.on = _Recording.on, True
    try:
        yield
    finally:
        _Recording.on = before


def on_gpu(tensor: Tensor) -> bool:
    """Whether the tensor is where sums need not have one order."""
    return tensor.device.type != "cpu"


def by_matrix(tensor: Tensor) -> bool:
    """Whether small matrix products are to be used for tensors like this one."""
    return on_gpu(tensor) and not compiling()


def times_columns(matrix: Tensor, columns: Tensor) -> Tensor:
    """Σ_k matrix[n, k] columns[s, k, p]: (n, k) and (S, k, P) → (S, n, P)."""
    if by_matrix(columns):
        return matrix @ columns
    if compiling():
        return (matrix[:, :, None] * columns[:, None]).sum(dim=2)
    out = matrix[:, 0, None] * columns[:, 0, None]
    for k in range(1, matrix.shape[1]):
        out = out + matrix[:, k, None] * columns[:, k, None]
    return out


def rows_times(rows: Tensor, matrices: Tensor, which: Tensor | None = None) -> Tensor:
    """Σ_d rows[r, d] matrices[m, d, h] with m = which[r]: (R, D) and (M, D, H) → (R, H).

    Without ``which``, matrix r is that of row r, or the only one that of all rows.
    """
    M, D, H = matrices.shape
    if on_gpu(rows):
        if M == 1:
            return rows @ matrices[0]
        if which is None or M > ALL_NETWORKS:
            own = matrices if which is None else matrices[which]
            return torch.bmm(rows[:, None], own).squeeze(1)
        every = (rows @ matrices.transpose(0, 1).reshape(D, M * H)).view(-1, M, H)
        return every.gather(1, which[:, None, None].expand(-1, 1, H)).squeeze(1)
    own = matrices if which is None or M == 1 else matrices[which]
    if compiling():
        return (rows[:, :, None] * own).sum(dim=1)
    out = rows[:, 0, None] * own[:, 0]
    for d in range(1, D):
        out = out + rows[:, d, None] * own[:, d]
    return out


def dot_rows(a: Tensor, b: Tensor) -> Tensor:
    """Σ_h a[r, h] b[r, h]: (R, H) and (R or 1, H) → (R,)."""
    if not by_matrix(a):
        return (a * b).sum(dim=1)
    # Reductions of short rows are slow on GPUs, products with a vector are not.
    return a @ b[0] if len(b) == 1 else (a * b) @ b.new_ones(b.shape[1])


def sum_rows(a: Tensor) -> Tensor:
    """Σ_w a[..., w]: (..., w) → (...)."""
    return a @ a.new_ones(a.shape[-1]) if by_matrix(a) else a.sum(dim=-1)


def sum_over_neighbors(g: Tensor, y: Tensor) -> Tensor:
    """Σ_w g[n, a, w] y[b, a, w]: (n, A, w) and (b, A, w) → (b, A, n)."""
    if by_matrix(g):
        return torch.bmm(g.permute(1, 0, 2), y.permute(1, 2, 0)).permute(2, 0, 1)
    if compiling():
        return (y[:, :, None] * g.permute(1, 0, 2)).sum(dim=3)
    return torch.stack([(y * g_n).sum(dim=2) for g_n in g], dim=2)


def sum_over_functions(s: Tensor, g: Tensor) -> Tensor:
    """Σ_n s[b, a, n] g[n, a, w]: (b, A, n) and (n, A, w) → (b, A, w)."""
    if by_matrix(g):
        return torch.bmm(s.permute(1, 0, 2), g.permute(1, 0, 2)).permute(1, 0, 2)
    if compiling():
        return (s.permute(2, 0, 1)[..., None] * g[:, None]).sum(dim=0)
    out = s[:, :, 0, None] * g[0]
    for n in range(1, len(g)):
        out = out + s[:, :, n, None] * g[n]
    return out


def sum_over_components(a: Tensor, b: Tensor) -> Tensor:
    """Σ_c a[c] b[c]: (c, ...) and (c, ...) → (...)."""
    if by_matrix(a):
        return (a * b).sum(dim=0)
    if compiling() and len(a) > 3:
        return (a * b).sum(dim=0)
    out = a[0] * b[0]
    for c in range(1, len(a)):
        out = out + a[c] * b[c]
    return out
