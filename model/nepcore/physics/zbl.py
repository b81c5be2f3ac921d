"""Ziegler-Biersack-Littmark repulsion: universal, typewise and flexible."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

COULOMB = 14.399645
"""Coulomb constant e²/(4πε0), eV Å."""

SCREENING = 2.134563
"""Inverse screening length factor, 1/Å: x = r (Z_i^0.23 + Z_j^0.23) times this."""

UNIVERSAL: tuple[tuple[float, float], ...] = (
    (0.18175, 3.1998),
    (0.50986, 0.94229),
    (0.28022, 0.4029),
    (0.02817, 0.20162),
)
"""Amplitudes and decay rates of the universal screening function."""

# fmt: off
RADII: tuple[float, ...] = (
    0.426667, 0.613333, 1.6, 1.25333, 1.02667, 1.0, 0.946667, 0.84, 0.853333, 0.893333, 1.86667, 1.66667, 1.50667,
    1.38667, 1.46667, 1.36, 1.32, 1.28, 2.34667, 2.05333, 1.77333, 1.62667, 1.61333, 1.46667, 1.42667, 1.38667,
    1.33333, 1.32, 1.34667, 1.45333, 1.49333, 1.45333, 1.53333, 1.46667, 1.52, 1.56, 2.52, 2.22667, 1.96, 1.85333,
    1.76, 1.65333, 1.53333, 1.50667, 1.50667, 1.44, 1.53333, 1.64, 1.70667, 1.68, 1.68, 1.64, 1.76, 1.74667, 2.78667,
    2.34667, 2.16, 1.96, 2.10667, 2.09333, 2.08, 2.06667, 2.01333, 2.02667, 2.01333, 2.0, 1.98667, 1.98667, 1.97333,
    2.04, 1.94667, 1.82667, 1.74667, 1.64, 1.57333, 1.54667, 1.48, 1.49333, 1.50667, 1.76, 1.73333, 1.73333, 1.81333,
    1.74667, 1.84, 1.89333, 2.68, 2.41333, 2.22667, 2.10667, 2.02667, 2.04, 2.05333, 2.06667,
)
# fmt: on
"""Covalent-type radii by atomic number − 1, Å (4/3 of single-bond radii), of the typewise cutoffs."""


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
