"""Contraction by a batched matrix product, one small matrix gathered for each pair. Cost does not grow with types."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def contract(coefficients: Tensor, basis: Tensor, centre: Tensor, neighbor: Tensor) -> Tensor:
    """See :class:`nepcore.backends.protocol.Contraction`."""
    n, k, T, _ = coefficients.shape
    table = coefficients.permute(2, 3, 0, 1).reshape(T * T, n, k)
    gathered = table[centre * T + neighbor]  # (P, n, k)
    return torch.bmm(gathered, basis.permute(2, 1, 0)).permute(2, 1, 0)
