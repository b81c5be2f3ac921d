"""Site energy networks: one or two hidden layers of tanh, all biases subtracted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .products import rows_times

if TYPE_CHECKING:
    from torch import Tensor


def one_hidden(q: Tensor, w0: Tensor, b0: Tensor, w1: Tensor) -> tuple[Tensor, Tensor]:
    """U = w1·tanh(w0 q − b0), and dU/dq.

    Args:
        q: (R, D) inputs. The weights stand for each row, or once for all of them (R or 1 in front).
        w0: (R, H, D).
        b0: (R, H).
        w1: (R, H).

    Returns:
        (R,) and (R, D).
    """
    h = torch.tanh(rows_times(q, w0.transpose(1, 2)) - b0)  # (R, H)
    slope = (1.0 - h * h) * w1
    return (h * w1).sum(dim=1), rows_times(slope, w0)


def two_hidden(q: Tensor, w0: Tensor, b0: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """U = w2·tanh(w1 tanh(w0 q − b0) − b1), and dU/dq.

    Args:
        q: (R, D) inputs. The weights stand for each row, or once for all of them (R or 1 in front).
        w0: (R, H, D).
        b0: (R, H).
        w1: (R, H2, H).
        b1: (R, H2).
        w2: (R, H2).

    Returns:
        (R,) and (R, D).
    """
    h = torch.tanh(rows_times(q, w0.transpose(1, 2)) - b0)  # (R, H)
    h2 = torch.tanh(rows_times(h, w1.transpose(1, 2)) - b1)  # (R, H2)
    slope2 = (1.0 - h2 * h2) * w2
    slope = (1.0 - h * h) * rows_times(slope2, w1)
    return (h2 * w2).sum(dim=1), rows_times(slope, w0)
