"""The systems that every figure is measured on: rattled crystals of the fixture models.

The definitions stand beside the checkout (``shared/bench/cells.py``), so that other programs can be measured on the
same atoms; ``NEPSERVE_REFERENCE_DATA`` says where if they are elsewhere.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nepcore import Structure, Structures

if TYPE_CHECKING:
    import numpy as np

SHARED = Path(os.environ.get("NEPSERVE_REFERENCE_DATA") or Path(__file__).resolve().parents[2] / "shared")
if not (SHARED / "bench" / "cells.py").is_file():
    sys.exit(f"the benchmark systems are not at {SHARED}/bench; set NEPSERVE_REFERENCE_DATA to their folder")
sys.path.insert(0, str(SHARED / "bench"))

import cells

MODELS = {
    "si5": SHARED / "fixtures/models/Si_2022_NEP4_5body.txt",
    "pbte": SHARED / "fixtures/models/PbTe_NEP4.txt",
    "unep": SHARED / "fixtures/models/Song-2024-UNEP-v1-AgAlAuCrCuMgMoNiPbPdPtTaTiVWZr.txt",
    "c24": SHARED / "fixtures/models/C_2024_NEP4.txt",
}
"""Model files by the name of the system."""

SIZES = {
    ("si5", 64): (2, 2, 2), ("si5", 1000): (5, 5, 5), ("si5", 8000): (10, 10, 10), ("si5", 10648): (11, 11, 11),
    ("unep", 108): (3, 3, 3), ("unep", 2048): (8, 8, 8), ("pbte", 64): (2, 2, 2), ("pbte", 4096): (8, 8, 8),
}  # fmt: skip
"""Repeats of the unit cell by system and number of atoms."""


def raw(name: str, repeat: tuple[int, int, int]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Species, positions (n, 3) and cell (3, 3) of one rattled crystal."""
    return cells.base(name, repeat)


def pbte250() -> tuple[list[str], np.ndarray, np.ndarray]:
    """The first frame of the PbTe training set: 250 atoms."""
    from nepcore.files import xyz

    frame = next(iter(xyz.read(SHARED / "data/PbTe/train.xyz").structures))
    return frame.symbols, frame.positions, frame.cell


def crystal(name: str, atoms: int) -> Structures:
    """One crystal of about that many atoms, as a block."""
    species, positions, cell = pbte250() if (name, atoms) == ("pbte", 250) else raw(name, SIZES[name, atoms])
    return Structures.pack([Structure.make(species, positions, cell)])


def small(name: str, count: int) -> Structures:
    """Many rattled and strained cells of 32 to 64 atoms."""
    return Structures.pack([Structure.make(*s) for s in cells.small_structures(name, count)])
