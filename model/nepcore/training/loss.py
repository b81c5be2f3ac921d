"""The loss of a batch, term by term, and the sums that errors and the energy offset are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .dataset import SIX

if TYPE_CHECKING:
    from torch import Tensor

    from .batches import Arrays
    from .forward import Found

TERMS = ("energy", "forces", "virial")


class Sums(NamedTuple):
    """Sums over a batch, float64: they add up over parts of a batch and over processes.

    Attributes:
        weighted: Σ weight · error² of energy, forces and virial, (3,).
        plain: The same without weights, (3,).
        labels: Labels in them: frames, three for an atom, six for a frame, (3,).
        offset: Σ weight · energy error per atom, and Σ weight, (2,).
    """

    weighted: Tensor
    plain: Tensor
    labels: Tensor
    offset: Tensor


def sums(arrays: Arrays, found: Found, bias: Tensor, shear: float) -> Sums:
    """Errors of a batch.

    Args:
        arrays: References.
        found: Predictions.
        bias: Common energy offset, subtracted from every atom, eV, () float64.
        shear: ``lambda_shear``.
    """
    B = len(arrays.atoms)
    total = torch.zeros(B, dtype=torch.float64, device=bias.device)
    total = total.index_add(0, arrays.frame, found.energies.to(torch.float64))
    e = (total / arrays.atoms - bias - arrays.energy) * arrays.has_energy
    e2 = e * e
    f2 = (found.forces - arrays.forces).square().sum(dim=1)
    # Column by column: a list of indices would be copied to the device at every step.
    virial = torch.stack([found.virial[:, 3 * row + column] for row, column in zip(*SIX, strict=True)], dim=1)
    virial = virial / arrays.atoms[:, None].to(virial.dtype)
    v2 = (virial - arrays.virial).square()
    straight, off = v2[:, :3].sum(dim=1), v2[:, 3:].sum(dim=1)

    def added(*values: Tensor) -> Tensor:
        return torch.stack(values, dim=1).sum(dim=0, dtype=torch.float64)

    e_sums = added(e2 * arrays.energy_weight, e2, arrays.has_energy, e * arrays.offset_weight, arrays.offset_weight)
    f_sums = added(f2 * arrays.force_weight, f2 * arrays.has_forces, 3.0 * arrays.has_forces)
    v_sums = added(
        (straight + shear * shear * off) * arrays.virial_weight, (straight + off) * arrays.has_virial,
        6.0 * arrays.has_virial,
    )  # fmt: skip
    weighted, plain, labels = torch.stack([e_sums[:3], f_sums, v_sums], dim=1)
    return Sums(weighted, plain, labels, e_sums[3:])


def terms(weighted: Tensor, labels: Tensor, lambdas: Tensor, form: str) -> Tensor:
    """λ M, or λ √M, of the three terms, (3,); 0 where there are no labels."""
    mean = weighted / labels.clamp(min=1.0)
    return lambdas * (mean if form == "mse" else torch.sqrt(mean))


def factors(weighted: Tensor, labels: Tensor, lambdas: Tensor, form: str) -> Tensor:
    """Derivatives of :func:`terms` by the weighted sums, (3,); 0 where an error is exactly zero."""
    n = labels.clamp(min=1.0)
    if form == "mse":
        return lambdas / n
    root = torch.sqrt(weighted / n)
    return torch.where(root > 0.0, lambdas / (2.0 * root.clamp(min=1e-300) * n), 0.0)


def regularisation(vector: Tensor, lambda_1: float, lambda_2: float) -> tuple[Tensor, Tensor, Tensor]:
    """λ₁ Σ|z|/N, λ₂ √(Σz²/N) and the gradient of both, (N,)."""
    n = vector.numel()
    root = torch.sqrt((vector * vector).sum() / n)
    l1, l2 = lambda_1 * vector.abs().sum() / n, lambda_2 * root
    slope = (lambda_1 / n) * torch.sign(vector) + (lambda_2 / n) * vector / root.clamp(min=1e-30)
    return l1, l2, slope
