"""Sum before contracting: the basis summed over the neighbours of each type, then the coefficients once per atom.

With M_tkb(i) = Σ f_k(r_ij) Y_b(ij) over the neighbours j of type t, the sums are s_bn = Σ_tk c[n, k, t_i, t] M_tkb, and
the way back is W_tkb = Σ_n ds_bn c[n, k, t_i, t] once per atom, then Σ_k f_k(r_ij) W_{t_j}kb for a pair. No table of
coefficients is gathered for a pair, and nothing of n · k numbers is written for one.

On a GPU both ways are batched matrix products, compiled or not: each f_k meets every Y_b, and loops that a compiler
makes of that take several times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nepcore.physics import products

if TYPE_CHECKING:
    from torch import Tensor


def sums(
    coefficients: Tensor, basis: Tensor, centre: Tensor, neighbor: Tensor, y: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :class:`nepcore.backends.protocol.Sums`."""
    T = coefficients.shape[3]
    if products.on_gpu(basis):
        return _sums_by_matrix(coefficients, basis, centre, neighbor, y)
    if products.compiling():
        return _moments_contracted(coefficients, centre, _compiled_moments(basis[0], neighbor, T, y)), basis
    f = basis[0]
    parts = []
    for t in range(T):
        of_type = f if T == 1 else f * (neighbor == t)
        parts += [(f_k if y is None else f_k * y).sum(dim=-1) for f_k in of_type]
    return _moments_contracted(coefficients, centre, torch.stack(parts).reshape(T, len(f), -1, centre.shape[0])), basis


def _compiled_moments(f: Tensor, neighbor: Tensor, n_types: int, y: Tensor | None) -> Tensor:
    """M (T, k, b, A) as one product and sum, which a compiler turns into one loop."""
    product = f[:, None] if y is None else f[:, None] * y  # (k, b, A, w)
    if n_types == 1:
        return product.sum(dim=-1)[None]
    of_type = neighbor == torch.arange(n_types, device=neighbor.device)[:, None, None]  # (T, A, w)
    return (product * of_type[:, None, None]).sum(dim=-1)


def _moments_contracted(coefficients: Tensor, centre: Tensor, moments: Tensor) -> Tensor:
    """s (b, A, n) of M (T, k, b, A), term by term: a type that an atom has no neighbours of adds exact zeros."""
    T, K = moments.shape[:2]
    own = coefficients.permute(3, 1, 2, 0)[:, :, centre]  # (T, k, A, n)
    if products.compiling():
        return (moments[..., None] * own[:, :, None]).flatten(0, 1).sum(dim=0)
    out: Tensor | None = None
    for t in range(T):
        for k in range(K):
            term = moments[t, k][:, :, None] * own[t, k]
            out = term if out is None else out + term
    assert out is not None
    return out


def spread(coefficients: Tensor, kept: Tensor, ds: Tensor, centre: Tensor, neighbor: Tensor) -> Tensor:
    """See :class:`nepcore.backends.protocol.Spread`."""
    T = coefficients.shape[3]
    if products.on_gpu(ds):
        return _spread_by_matrix(coefficients, kept, ds, centre, neighbor)
    own = coefficients.permute(1, 0, 2, 3)[:, :, centre]  # (k, n, A, T)
    if products.compiling():
        # As reductions, whose results are written down: loops unrolled here would be computed anew for every pair.
        weights = (own[:, :, None] * ds.permute(2, 0, 1)[None, ..., None]).sum(dim=1)  # (k, b, A, T)
        if T == 1:
            return (kept[:, :, None] * weights).sum(dim=1)
        return (kept[:, :, None] * weights.gather(3, neighbor.expand(*weights.shape[:2], *neighbor.shape))).sum(dim=1)
    out: Tensor | None = None
    for k in range(coefficients.shape[1]):
        weight = ds[:, :, 0, None] * own[k, 0]  # (b, A, T)
        for n in range(1, coefficients.shape[0]):
            weight = weight + ds[:, :, n, None] * own[k, n]
        if T > 1:
            weight = weight.gather(2, neighbor.expand(len(ds), *neighbor.shape))  # (b, A, w)
        term = kept[:, k, None] * weight
        out = term if out is None else out + term
    assert out is not None
    return out


def _rows(coefficients: Tensor, centre: Tensor) -> Tensor:
    """Coefficients of each atom as a matrix, (A, n, T k), or (1, n, k) where there is one type."""
    n, _, T, _ = coefficients.shape
    table = coefficients.permute(2, 0, 3, 1).reshape(T, n, -1)
    return table if T == 1 else table[centre]


def _sums_by_matrix(
    coefficients: Tensor, basis: Tensor, centre: Tensor, neighbor: Tensor, y: Tensor | None
) -> tuple[Tensor, Tensor]:
    _, K, T, _ = coefficients.shape
    S, _, A, w = basis.shape
    own = _rows(coefficients, centre)
    if T > 1:
        of_type = neighbor == torch.arange(T, device=neighbor.device)[:, None, None]  # (T, A, w)
    if y is None:
        # Few numbers come out: types times functions.
        if T == 1:
            moments = products.sum_rows(basis[0]).T[:, :, None]  # (A, k, 1)
        else:
            of_row = of_type.to(basis.dtype).permute(1, 0, 2)
            moments = torch.bmm(of_row, basis[0].permute(1, 2, 0)).reshape(A, T * K, 1)
        return torch.matmul(own, moments).permute(2, 0, 1), basis
    kept = basis if T == 1 else (basis[:, None] * of_type[:, None]).reshape(S, T * K, A, w)
    moments = torch.bmm(kept[0].permute(1, 0, 2), y.permute(1, 2, 0))  # (A, T k, b)
    return torch.matmul(own, moments).permute(2, 0, 1), kept


def _spread_by_matrix(coefficients: Tensor, kept: Tensor, ds: Tensor, centre: Tensor, neighbor: Tensor) -> Tensor:
    _, K, T, _ = coefficients.shape
    weight = torch.matmul(ds.permute(1, 0, 2), _rows(coefficients, centre))  # (A, b, T k)
    if len(ds) == 1:
        # Of the sums without Y only the values are kept: every pair looks up the weights of its type.
        table = weight.reshape(-1, T, K).permute(2, 0, 1)  # (k, A, T)
        wanted = table if T == 1 else table.gather(2, neighbor.expand(K, *neighbor.shape))
        return (kept * wanted).sum(dim=1)[:, None]
    return torch.stack([torch.bmm(weight, f.permute(1, 0, 2)).permute(1, 0, 2) for f in kept])
