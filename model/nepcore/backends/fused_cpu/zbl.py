"""Ziegler-Biersack-Littmark repulsion of a pair, in float64: universal, typewise and flexible."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.elements import NUMBERS

from .inner import inner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nepcore.files.nep_txt import NepFile

COULOMB = 14.399645
"""Coulomb constant e²/(4πε0), eV Å."""

_UNIVERSAL = (0.18175, 3.1998, 0.50986, 0.94229, 0.28022, 0.4029, 0.02817, 0.20162)

# fmt: off
_RADII = (
    0.426667, 0.613333, 1.6, 1.25333, 1.02667, 1.0, 0.946667, 0.84, 0.853333, 0.893333, 1.86667, 1.66667, 1.50667,
    1.38667, 1.46667, 1.36, 1.32, 1.28, 2.34667, 2.05333, 1.77333, 1.62667, 1.61333, 1.46667, 1.42667, 1.38667,
    1.33333, 1.32, 1.34667, 1.45333, 1.49333, 1.45333, 1.53333, 1.46667, 1.52, 1.56, 2.52, 2.22667, 1.96, 1.85333,
    1.76, 1.65333, 1.53333, 1.50667, 1.50667, 1.44, 1.53333, 1.64, 1.70667, 1.68, 1.68, 1.64, 1.76, 1.74667, 2.78667,
    2.34667, 2.16, 1.96, 2.10667, 2.09333, 2.08, 2.06667, 2.01333, 2.02667, 2.01333, 2.0, 1.98667, 1.98667, 1.97333,
    2.04, 1.94667, 1.82667, 1.74667, 1.64, 1.57333, 1.54667, 1.48, 1.49333, 1.50667, 1.76, 1.73333, 1.73333, 1.81333,
    1.74667, 1.84, 1.89333, 2.68, 2.41333, 2.22667, 2.10667, 2.02667, 2.04, 2.05333, 2.06667,
)
# fmt: on

INNER, OUTER, CHARGE, RATE, TERMS = 0, 1, 2, 3, 4
WIDTH = 12
"""Numbers a pair of types: switch radii, K Z_i Z_j, 1/screening length, four times (amplitude, decay rate)."""


def pair_table(file: NepFile) -> NDArray[np.float64] | None:
    """Parameters of each pair of types, (T, T, WIDTH); None for a model without the repulsion."""
    if file.zbl == "none":
        return None
    T = len(file.elements)
    numbers = np.array([NUMBERS[symbol] for symbol in file.elements])
    table = np.zeros((T, T, WIDTH))
    table[..., CHARGE] = COULOMB * numbers[:, None] * numbers[None, :]
    power = numbers**0.23
    table[..., RATE] = (power[:, None] + power[None, :]) * 2.134563
    table[..., TERMS:] = _UNIVERSAL
    if file.zbl == "flexible":
        assert file.zbl_pairs is not None
        row = 0
        for a in range(T):
            for b in range(a, T):
                for i, j in ((a, b), (b, a)):
                    table[i, j, INNER:CHARGE] = file.zbl_pairs[row, :2]
                    table[i, j, TERMS:] = file.zbl_pairs[row, 2:]
                row += 1
    elif file.zbl == "typewise":
        assert file.zbl_factor is not None
        assert file.zbl_outer is not None
        radius = np.array([_RADII[z - 1] for z in numbers])
        table[..., OUTER] = np.minimum(file.zbl_factor * (radius[:, None] + radius[None, :]), file.zbl_outer)
    else:
        table[..., INNER] = file.zbl_inner
        table[..., OUTER] = file.zbl_outer
    return table


@inner
def repulsion(table: Any, at: int, r: float) -> tuple[float, float]:
    """V(r) in eV and dV/dr of the pair whose parameters begin at ``table[at]``; zero from its outer radius on."""
    inner = table[at + INNER]
    outer = table[at + OUTER]
    if not r < outer:
        return 0.0, 0.0
    rate = table[at + RATE]
    phi = 0.0
    slope = 0.0
    for k in range(at + TERMS, at + WIDTH, 2):
        part = table[k] * math.exp(-table[k + 1] * rate * r)
        phi += part
        slope -= table[k + 1] * rate * part
    if r >= inner:
        turn = math.pi / (outer - inner)
        angle = turn * (r - inner)
        s = 0.5 * math.cos(angle) + 0.5
        slope = slope * s - phi * 0.5 * turn * math.sin(angle)
        phi *= s
    scale = table[at + CHARGE] / r
    return scale * phi, scale * (slope - phi / r)
