"""Contraction by multiplying and summing over gathered coefficients, which compilers fuse into one kernel.

The coefficients of a pair are gathered from a table of types, either by a plain gather or by a product with one-hot
rows; the latter keeps gradients free of scattered additions. Both give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

ONE_HOT_TYPES = 32
"""Up to this many types the one-hot form is taken on CUDA; on ROCm always."""


def contract(coefficients: Tensor, basis: Tensor, centre: Tensor, neighbor: Tensor) -> Tensor:
    """See :class:`nepcore.backends.protocol.Contraction`; takes the form that suits the device and the types."""
    on_gpu = basis.device.type == "cuda"
    one_hot = on_gpu and (torch.version.hip is not None or coefficients.shape[2] <= ONE_HOT_TYPES)
    return contract_one_hot(coefficients, basis, centre, neighbor) if one_hot else contract_gather(
        coefficients, basis, centre, neighbor
    )  # fmt: skip


def contract_gather(coefficients: Tensor, basis: Tensor, centre: Tensor, neighbor: Tensor) -> Tensor:
    """The form with a plain gather."""
    n, k, T, _ = coefficients.shape
    table = coefficients.permute(2, 3, 0, 1).reshape(T * T, n * k)
    return _multiply_and_sum(table[centre * T + neighbor], basis, n)


def contract_one_hot(coefficients: Tensor, basis: Tensor, centre: Tensor, neighbor: Tensor) -> Tensor:
    """The form with one-hot rows. TF32 must be off: the product has to copy its operand."""
    n, k, T, _ = coefficients.shape
    table = coefficients.permute(2, 3, 0, 1).reshape(T * T, n * k)
    rows = torch.nn.functional.one_hot(centre * T + neighbor, T * T).to(table.dtype)
    return _multiply_and_sum(rows @ table, basis, n)


def _multiply_and_sum(gathered: Tensor, basis: Tensor, n: int) -> Tensor:
    """Σ_k of gathered (P, n k) times basis (S, k, P) → (S, n, P)."""
    P, k = gathered.shape[0], basis.shape[1]
    product = gathered.view(P, 1, n, k) * basis.permute(2, 0, 1)[:, :, None, :]  # (P, S, n, k)
    return product.sum(dim=3).permute(1, 2, 0)
