"""Site energy networks: one or two hidden layers of tanh, all biases subtracted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .products import ALL_NETWORKS, dot_rows, on_gpu, rows_times

if TYPE_CHECKING:
    from torch import Tensor


def one_hidden(
    q: Tensor, w0: Tensor, b0: Tensor, w1: Tensor, which: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """U = w1·tanh(w0 q − b0), and dU/dq.

    Args:
        q: (R, D) inputs.
        w0: (M, H, D).
        b0: (M, H).
        w1: (M, H).
        which: Network of each row, (R,); left out, row r has network r, or all rows the only one.

    Returns:
        (R,) and (R, D).
    """
    b0, w1 = _own(b0, which), _own(w1, which)
    h = torch.tanh(rows_times(q, w0.transpose(1, 2), which) - b0)  # (R, H)
    slope = (1.0 - h * h) * w1
    return dot_rows(h, w1), _backwards(slope, w0, which)


def two_hidden(
    q: Tensor, w0: Tensor, b0: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, which: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """U = w2·tanh(w1 tanh(w0 q − b0) − b1), and dU/dq.

    Args:
        q: (R, D) inputs.
        w0: (M, H, D).
        b0: (M, H).
        w1: (M, H2, H).
        b1: (M, H2).
        w2: (M, H2).
        which: As of :func:`one_hidden`.

    Returns:
        (R,) and (R, D).
    """
    b0, b1, w2 = _own(b0, which), _own(b1, which), _own(w2, which)
    h = torch.tanh(rows_times(q, w0.transpose(1, 2), which) - b0)  # (R, H)
    h2 = torch.tanh(rows_times(h, w1.transpose(1, 2), which) - b1)  # (R, H2)
    slope2 = (1.0 - h2 * h2) * w2
    slope = (1.0 - h * h) * _backwards(slope2, w1, which)
    return dot_rows(h2, w2), _backwards(slope, w0, which)


def _own(table: Tensor, which: Tensor | None) -> Tensor:
    return table if which is None or len(table) == 1 else table[which]


def _backwards(slope: Tensor, w: Tensor, which: Tensor | None) -> Tensor:
    """Σ_h slope[r, h] w[m, h, d] with m = which[r]: (R, H) and (M, H, D) → (R, D)."""
    M, H, D = w.shape
    if not on_gpu(slope) or which is None or M == 1 or M > ALL_NETWORKS:
        return rows_times(slope, w, which)
    # One product with all networks, where the slopes of the others are zero.
    mine = which[:, None] == torch.arange(M, device=which.device)
    return (mine[:, :, None] * slope[:, None]).reshape(-1, M * H) @ w.reshape(M * H, D)
