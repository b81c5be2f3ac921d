"""Contraction by a loop over pairs of types: one plain matrix product for each. Best for few types on a CPU."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from nepcore.physics import products

if TYPE_CHECKING:
    from torch import Tensor


def contract(coefficients: Tensor, basis: Tensor, centre: Tensor, neighbor: Tensor) -> Tensor:
    """See :class:`nepcore.backends.protocol.Contraction`."""
    T = coefficients.shape[2]
    if T == 1:
        return products.times_columns(coefficients[:, :, 0, 0], basis)
    if products.compiling():
        return _contract_masked(coefficients, basis, centre * T + neighbor)
    pair, order = torch.sort(centre * T + neighbor, stable=True)
    basis = basis.index_select(2, order)
    bounds = torch.searchsorted(pair, torch.arange(T * T + 1, device=pair.device)).tolist()
    parts = [
        products.times_columns(coefficients[:, :, number // T, number % T], basis[:, :, start:stop])
        for number, (start, stop) in enumerate(pairwise(bounds))
        if stop > start
    ]
    if not parts:
        return basis.new_zeros((basis.shape[0], coefficients.shape[0], 0))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return torch.cat(parts, dim=2).index_select(2, back)


def _contract_masked(coefficients: Tensor, basis: Tensor, pair: Tensor) -> Tensor:
    """Every pair by all coefficients, of which one is kept: sizes that depend on values cannot be compiled."""
    T = coefficients.shape[2]
    out = products.times_columns(coefficients[:, :, 0, 0], basis)
    for number in range(1, T * T):
        out = torch.where(
            pair == number, products.times_columns(coefficients[:, :, number // T, number % T], basis), out
        )
    return out
