"""Dense blocks of atoms with random neighbours, and parameter gradients of a loss over one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nepcore.backends import forms
from nepcore.backends.rows import Results, Rows, Shape, Tables, evaluate

if TYPE_CHECKING:
    from collections.abc import Callable

    from nepcore.potential import NEP


def blocks_of_rows(nep: NEP, elements: tuple[str, ...], seed: int) -> tuple[Tables, Rows]:
    """A dense block of atoms with random neighbours, some slots of which are empty."""
    rng = torch.Generator().manual_seed(seed)
    A, w, T = 12, 16, len(elements)
    r = 1.5 + 3.5 * torch.rand((A, w), generator=rng, dtype=torch.float64)
    r[torch.rand((A, w), generator=rng) < 0.3] = 2.0 * nep.max_cutoff
    unit = torch.nn.functional.normalize(torch.randn((3, A, w), generator=rng, dtype=torch.float64), dim=0)
    rows = Rows(
        torch.randint(T, (A,), generator=rng), r, torch.randint(T, (A, w), generator=rng), r.flip(1),
        torch.randint(T, (A, w), generator=rng), unit, torch.full((A,), 300.0, dtype=torch.float64),
    )  # fmt: skip
    return Tables.of(nep, torch.arange(T)), rows


def loss_gradients(
    form: str, nep: NEP, elements: tuple[str, ...], function: Callable[..., Results] = evaluate
) -> list[torch.Tensor]:  # fmt: skip
    for p in nep.parameters():
        p.grad = None
        p.requires_grad_(True)
    tables, rows = blocks_of_rows(nep, elements, 3)
    out = function(Shape.of(nep), forms.FORMS[form], tables, rows)
    weight = torch.linspace(-1.0, 1.0, out.along.numel(), dtype=torch.float64).reshape(out.along.shape)
    loss = (out.energies**2).sum() + (weight * out.along).sum() + (weight * out.push).sum()
    loss.backward()
    return [p.grad for p in nep.parameters() if p.grad is not None]
