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
    form = contract_one_hot if takes_one_hot(basis.device.type, coefficients.shape[2]) else contract_gather
    return form(coefficients, basis, centre, neighbor)


def takes_one_hot(device_type: str, n_types: int) -> bool:
    """Whether one-hot rows suit the device: on ROCm always, on CUDA up to :data:`ONE_HOT_TYPES`, elsewhere never."""
    return device_type == "cuda" and (torch.version.hip is not None or n_types <= ONE_HOT_TYPES)


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
