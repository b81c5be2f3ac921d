"""Cells: their volume, and which of them cannot be computed with."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_COORDINATE = 1e9
"""Largest coordinate and cell component accepted, Å: beyond it float64 no longer resolves 1e-7 Å."""

MIN_SPAN = 1e-9
"""Periodic cell vectors whose unit vectors span less than this (length, area or volume) count as singular."""


def sound(cell: list[list[float]], pbc: list[bool]) -> bool:
    """Whether one cell is well within the limits of :meth:`nepcore.structures.Structures.problems`; quick, one way."""
    (ax, ay, az), (bx, by, bz), (cx, cy, cz) = cell
    # A NaN or an infinity survives the sum.
    if not abs(ax) + abs(ay) + abs(az) + abs(bx) + abs(by) + abs(bz) + abs(cx) + abs(cy) + abs(cz) <= MAX_COORDINATE:
        return False
    if pbc == [False, False, False]:
        return True
    edges = sqrt(ax * ax + ay * ay + az * az) * sqrt(bx * bx + by * by + bz * bz) * sqrt(cx * cx + cy * cy + cz * cz)
    volume = triple_product(cell)
    # Far from where rounding and zero vectors matter; if the three vectors are independent, so are any two.
    return edges > 1e-3 and volume > 1e-3 * edges


def singular(cells: NDArray[np.float64], pbc: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether the periodic vectors of each cell are zero or dependent, (B,)."""
    bad = np.zeros(len(cells), bool)
    if not pbc.any():
        return bad
    # What is beyond the limit is told as such; clipped, it does not overflow here.
    box = np.clip(np.where(np.isfinite(cells), cells, 0.0), -MAX_COORDINATE, MAX_COORDINATE)
    length = np.linalg.norm(box, axis=2)
    bad |= ((length < MIN_SPAN) & pbc).any(axis=1)
    unit = box / np.maximum(length, 1e-300)[:, :, None]
    # Volume or area that the unit vectors span: a Gram determinant, its square, would drown in rounding.
    periodic = pbc.sum(axis=1)
    if (three := np.flatnonzero(periodic == 3)).size:
        bad[three] |= triple_product(unit[three].transpose(1, 2, 0)) < MIN_SPAN
    if (two := np.flatnonzero(periodic == 2)).size:
        free = np.argmin(pbc[two], axis=1)
        across = np.cross(unit[two, (free + 1) % 3], unit[two, (free + 2) % 3])
        bad[two] |= np.linalg.norm(across, axis=1) < MIN_SPAN
    return bad


def triple_product(vectors: Any) -> Any:
    """|a · (b × c)| of three vectors, of floats or of arrays alike: the volume of a cell, in the same bits for both."""
    (ax, ay, az), (bx, by, bz), (cx, cy, cz) = vectors
    return abs(ax * (by * cz - bz * cy) + ay * (bz * cx - bx * cz) + az * (bx * cy - by * cx))
