"""Ziegler-Biersack-Littmark repulsion of a pair, in float64: universal, typewise and flexible."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.elements import NUMBERS
from nepcore.physics.screening import COULOMB, RADII, SCREENING, UNIVERSAL

from .inner import inner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nepcore.files.nep_txt import NepFile

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
    table[..., RATE] = (power[:, None] + power[None, :]) * SCREENING
    table[..., TERMS:] = np.ravel(UNIVERSAL)
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
        radius = np.array([RADII[z - 1] for z in numbers])
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
