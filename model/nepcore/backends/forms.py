"""The forms of the torch backends by name. Others join by :func:`register`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nepcore.physics import products

from . import bmm, density, loop, mulsum
from .protocol import Form

if TYPE_CHECKING:
    from torch import Tensor

    from .protocol import Contraction


def contracted(contract: Contraction) -> Form:
    """The form that contracts coefficients and basis for every pair, and sums over neighbours afterwards."""

    def sums(
        coefficients: Tensor, basis: Tensor, centre: Tensor, neighbor: Tensor, y: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        S, _, A, w = basis.shape
        centres = centre[:, None].expand(A, w).reshape(-1)
        g = contract(coefficients, basis.reshape(S, -1, A * w), centres, neighbor.reshape(-1))
        g = g.reshape(S, -1, A, w).contiguous()
        if y is None:
            return products.sum_rows(g[0]).T[None], g
        return products.sum_over_neighbors(g[0], y), g

    def spread(coefficients: Tensor, kept: Tensor, ds: Tensor, centre: Tensor, neighbor: Tensor) -> Tensor:
        del coefficients, centre, neighbor  # the pairs have them in already
        return torch.stack([products.sum_over_functions(ds, g) for g in kept])

    return Form(sums, spread)


FORMS: dict[str, Form] = {
    "loop": contracted(loop.contract),
    "bmm": contracted(bmm.contract),
    "mulsum": contracted(mulsum.contract),
    "density": Form(density.sums, density.spread),
}


def register(name: str, form: Form) -> None:
    """Add a form: it is then a backend of that name, compiled too, and one of those that are measured."""
    FORMS[name] = form
