"""Ziegler-Biersack-Littmark repulsion: universal, typewise and flexible."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from .screening import COULOMB

if TYPE_CHECKING:
    from torch import Tensor


def pair_energy(
    r: Tensor, charge: Tensor, rate: Tensor, inner: Tensor, outer: Tensor, terms: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """V(r) and V'(r) of a screened Coulomb repulsion with a cosine switch.

    V = K Z_i Z_j φ(x)/r · s(r) with x = rate · r, φ = Σ a e^(−b x), and s going from 1 at ``inner`` to 0 at
    ``outer``; equal radii make a hard cutoff.

    Args:
        r: Distances, Å, any shape; the other tensors broadcast with it.
        charge: Z_i Z_j.
        rate: 1/Å.
        inner, outer: Switch radii, Å.
        terms: Amplitudes a and decay rates b.

    Returns:
        Energy (eV) and its derivative (eV/Å), both zero from ``outer`` on.
    """
    x = r * rate
    phi = torch.zeros_like(r)
    dphi = torch.zeros_like(r)
    for a, b in terms:
        part = a * torch.exp(-b * x)
        phi = phi + part
        dphi = dphi - (b * rate) * part
    width = outer - inner
    safe = torch.where(width > 0, width, torch.ones_like(width))
    phase = (math.pi / safe) * (r - inner)
    switching = (r >= inner) & (r < outer) & (width > 0)
    s = torch.where(switching, 0.5 * torch.cos(phase) + 0.5, (r < inner).to(r.dtype))
    ds = torch.where(switching, (-0.5 * math.pi / safe) * torch.sin(phase), torch.zeros_like(r))
    scale = COULOMB * charge / r
    energy = scale * phi * s
    slope = scale * (dphi * s + phi * ds - phi * s / r)
    return energy, slope
