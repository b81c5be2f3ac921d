"""Site energy networks: one or two hidden layers of tanh, all biases subtracted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

ROW_MULTIPLE = 16
"""Rows of a matrix product are padded to this multiple: the bits of a row then do not depend on how many there are."""


def padded_rows(index: Tensor) -> Tensor:
    """The row indices with the last one repeated up to a multiple of :data:`ROW_MULTIPLE`."""
    short = -len(index) % ROW_MULTIPLE
    return torch.cat([index, index[-1:].expand(short)]) if short else index


def one_hidden(q: Tensor, w0: Tensor, b0: Tensor, w1: Tensor) -> tuple[Tensor, Tensor]:
    """U = w1·tanh(w0 q − b0), and dU/dq.

    Args:
        q: (rows, D); ``w0``: (H, D); ``b0``, ``w1``: (H,).

    Returns:
        (rows,) and (rows, D).
    """
    h = torch.tanh(q @ w0.T - b0)  # (rows, H)
    slope = (1.0 - h * h) * w1
    return (h * w1).sum(dim=1), slope @ w0


def two_hidden(q: Tensor, w0: Tensor, b0: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """U = w2·tanh(w1 tanh(w0 q − b0) − b1), and dU/dq.

    Args:
        q: (rows, D); ``w0``: (H, D); ``b0``: (H,); ``w1``: (H2, H); ``b1``, ``w2``: (H2,).

    Returns:
        (rows,) and (rows, D).
    """
    h = torch.tanh(q @ w0.T - b0)  # (rows, H)
    h2 = torch.tanh(h @ w1.T - b1)  # (rows, H2)
    slope2 = (1.0 - h2 * h2) * w2
    slope = (1.0 - h * h) * (slope2 @ w1)
    return (h2 * w2).sum(dim=1), slope @ w0
