"""Blocks and results for the tests of the wire formats: results are plain functions of the input, so that rows can be
told apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from nepcore.structures import PER_ATOM, PROPERTIES, Predictions, Structures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

CELL = [[0.0, 2.72, 2.72], [2.72, 0.0, 2.72], [2.72, 2.72, 0.0]]
SILICON: dict[str, Any] = {
    "numbers": [14, 14],
    "positions": [[0.0, 0.0, 0.0], [1.36, 1.36, 1.36]],
    "cell": CELL,
    "pbc": [True, True, True],
}
WATER: dict[str, Any] = {
    "symbols": ["O", "H", "H"],
    "positions": [[0.0, 0.0, 0.119], [0.0, 0.763, -0.477], [0.0, -0.763, -0.477]],
}
DESCRIPTORS = 5


def silicon() -> Structures:
    return Structures.from_arrays([2], [14, 14], SILICON["positions"], [CELL], [[True] * 3])


def mixed() -> Structures:
    """A crystal, a molecule without a cell, a slab with a temperature."""
    return Structures.from_arrays(
        [2, 3, 1],
        [14, 14, 8, 1, 1, 29],
        [*SILICON["positions"], *WATER["positions"], [0.5, -0.25, 1e3]],
        [CELL, np.zeros((3, 3)), np.diag([3.0, 3.5, 20.0])],
        [[True] * 3, [False] * 3, [True, True, False]],
        [np.nan, np.nan, 300.0],
    )


def predict(structures: Structures, properties: Sequence[str] = PROPERTIES, dtype: Any = np.float64) -> Predictions:
    """Results that no physics gave: linear in the positions, numbered by structure."""
    B, N = len(structures), structures.n_atoms
    x = structures.positions
    known = structures.pbc.all(axis=1)
    index = np.arange(B, dtype=float)
    everything: dict[str, NDArray[Any]] = {
        "energy": index + 0.25,
        "free_energy": index + 0.25,
        "stress": np.where(known[:, None], index[:, None] + np.arange(6) / 8, np.nan),
        "virial": index[:, None, None] - np.arange(9.0).reshape(3, 3),
        "energies": x.sum(axis=1),
        "forces": -2 * x,
        "virials": x[:, :, None] * np.arange(1.0, 4.0),
        "descriptors": np.arange(N * DESCRIPTORS, dtype=float).reshape(N, DESCRIPTORS) / 16,
    }
    chosen = {name: everything[name].astype(dtype if name in PER_ATOM else np.float64) for name in properties}
    return Predictions(structures.counts, chosen, known)


def same(found: Structures, wanted: Structures) -> bool:
    """Whether two blocks hold the same bits."""
    return all(
        np.array_equal(getattr(found, name), getattr(wanted, name), equal_nan=name == "temperatures")
        for name in ("counts", "numbers", "positions", "cells", "pbc", "temperatures")
    )


_coordinate = st.floats(-1e4, 1e4, allow_subnormal=False)


@st.composite
def blocks(draw: Any, min_size: int = 0) -> Structures:
    """Blocks of up to five small structures with any mix of cells, periodic directions and temperatures."""
    counts = draw(st.lists(st.integers(1, 4), min_size=min_size, max_size=5))
    B, N = len(counts), sum(counts)
    floats = draw(st.lists(_coordinate, min_size=3 * N, max_size=3 * N))
    cells = np.zeros((B, 3, 3))
    pbc = np.zeros((B, 3), bool)
    for i in range(B):
        if draw(st.booleans()):
            cells[i] = np.array(draw(st.lists(_coordinate, min_size=9, max_size=9))).reshape(3, 3)
            pbc[i] = draw(st.lists(st.booleans(), min_size=3, max_size=3))
    heat = [draw(st.none() | st.floats(0, 1e4)) for _ in range(B)]
    return Structures.from_arrays(
        counts,
        draw(st.lists(st.integers(1, 94), min_size=N, max_size=N)),
        np.array(floats).reshape(N, 3),
        cells,
        pbc,
        [np.nan if t is None else t for t in heat],
    )
