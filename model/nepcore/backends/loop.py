"""Contraction by a loop over pairs of types: one plain matrix product for each. Best for few types on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nepcore.physics.products import times_columns

if TYPE_CHECKING:
    from torch import Tensor


def contract(coefficients: Tensor, basis: Tensor, centre: Tensor, neighbor: Tensor) -> Tensor:
    """See :class:`nepcore.backends.protocol.Contraction`."""
    n, _, T, _ = coefficients.shape
    if T == 1:
        return times_columns(coefficients[:, :, 0, 0], basis)
    out = basis.new_zeros((basis.shape[0], n, basis.shape[2]))
    pair = centre * T + neighbor
    for number in range(T * T):
        index = torch.nonzero(pair == number).squeeze(1)
        if len(index):
            part = times_columns(coefficients[:, :, number // T, number % T], basis.index_select(2, index))
            out = out.index_copy(2, index, part)
    return out
