"""Units and orders of components in which MD codes speak, converted once and in one place.

Everything here is in eV and Å on our side. The constants are CODATA 2014, those of ``ase.units``, so that a number
that went through two codes comes back as it was.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BOHR = 0.5291772105638411
"""Å: atomic unit of length (i-PI, MDI)."""

HARTREE = 27.211386024367243
"""eV: atomic unit of energy (i-PI, MDI)."""

KCAL_MOL = 0.04336410390059322
"""eV: LAMMPS ``real``."""

KJ_MOL = 0.010364269574711572
"""eV: OpenMM."""

NM = 10.0
"""Å: OpenMM."""

LAMMPS_ENERGY = {"metal": 1.0, "real": KCAL_MOL}
"""eV in one unit of energy of a LAMMPS unit style whose length is Å."""

LAMMPS_ORDER = ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))
"""Components of a symmetric tensor as LAMMPS lists them: xx yy zz xy xz yz."""

ASE_ORDER = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))
"""Components of a symmetric tensor as ASE, and this package, list them: xx yy zz yz xz xy."""


def components(tensor: NDArray[np.float64], order: tuple[tuple[int, int], ...]) -> NDArray[np.float64]:
    """The six components of the symmetric part of (..., 3, 3) tensors, (..., 6)."""
    flat = tensor.reshape(*tensor.shape[:-2], 9)
    above, below = _places(order)
    return np.asarray(0.5 * (flat.take(above, -1) + flat.take(below, -1)))


@cache
def _places(order: tuple[tuple[int, int], ...]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where the components and their mirror images are among the nine."""
    rows, columns = np.array(order).T
    return 3 * rows + columns, 3 * columns + rows


def stress(virial: NDArray[np.float64], cell: NDArray[np.float64]) -> NDArray[np.float64]:
    """The stress σ = −W/V, eV/Å³ with tension positive, (3, 3), of a virial W (eV) in a cell (rows, Å)."""
    return np.asarray(-virial / abs(np.linalg.det(cell)))
