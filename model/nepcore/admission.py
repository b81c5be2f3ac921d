"""Which structures a model can evaluate, and about how much work they are. Needs no torch: the front door asks it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .elements import NUMBERS, symbol_of
from .errors import StructureError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .structures import Structures

MAX_NEIGHBORS = 100_000
"""Expected neighbours per atom above which a structure is refused: such a cell is a mistake, and would take hours."""


@dataclass(frozen=True)
class Admission:
    """The door of one model.

    Attributes:
        elements: The model's elements, in its own order.
        temperature: Whether the model needs a temperature.
        cutoff: Largest radial cutoff, Å.
    """

    elements: tuple[str, ...]
    temperature: bool
    cutoff: float

    @cached_property
    def types(self) -> NDArray[np.int64]:
        """Type index by atomic number, (256,); −1 for elements the model does not know."""
        table = np.full(256, -1, np.int64)
        for t, symbol in enumerate(self.elements):
            table[NUMBERS[symbol]] = t
        return table

    def problems(self, structures: Structures) -> dict[int, StructureError]:
        """Why structures cannot be evaluated, by index; see also :meth:`Structures.problems`, which this includes."""
        found = structures.problems()
        unknown = np.flatnonzero(self.types[structures.numbers] < 0)
        for atom in unknown.tolist():
            i = int(np.searchsorted(structures.offsets, atom, side="right")) - 1
            k = atom - int(structures.offsets[i])
            symbol = symbol_of(int(structures.numbers[atom]))
            known = " ".join(self.elements)
            reason = f"atom {k + 1}: element {symbol} is not in the model, which knows: {known}"
            found.setdefault(i, StructureError("unknown_element", reason, field="numbers", atoms=(k,)))
        if self.temperature:
            for i in np.flatnonzero(np.isnan(structures.temperatures)).tolist():
                reason = "temperature (K) is missing; this model depends on it"
                found.setdefault(i, StructureError("missing_temperature", reason, field="temperature"))
        for i in np.flatnonzero(self.neighbors(structures) > MAX_NEIGHBORS).tolist():
            reason = (
                f"cell: more than {MAX_NEIGHBORS:,} neighbours per atom within {self.cutoff:g} Å; the cell is too small"
            )
            found.setdefault(i, StructureError("too_dense", reason, field="cell"))
        return found

    def neighbors(self, structures: Structures) -> NDArray[np.float64]:
        """Expected neighbours per atom from the density, (B,): exact for a uniform crystal, a guess elsewhere.

        The volume is that of the cell with non-periodic directions replaced by the extent of the atoms (at least 2 Å,
        about an atom), so that a molecule in a huge box is not taken for empty space.
        """
        B = len(structures)
        expected = np.zeros(B)
        if not B or not structures.n_atoms:
            return expected
        box = np.where(np.isfinite(structures.cells), structures.cells, 0.0)
        volume = np.abs(np.linalg.det(box))
        for i in np.flatnonzero(~structures.pbc.all(axis=1)).tolist():
            volume[i] = _occupied_volume(structures.view(i).positions, box[i], structures.pbc[i])
        sphere = 4.0 / 3.0 * np.pi * self.cutoff**3
        with np.errstate(divide="ignore", invalid="ignore"):
            expected = np.where(volume > 0, structures.counts * sphere / volume, 0.0)
        # Without periodic images nobody has more neighbours than there are other atoms.
        isolated = ~structures.pbc.any(axis=1)
        return np.where(isolated, np.minimum(expected, structures.counts), expected)

    def work(self, structures: Structures) -> NDArray[np.float64]:
        """Work of each structure, atoms × (neighbours + 1), (B,)."""
        return structures.counts * (np.minimum(self.neighbors(structures), MAX_NEIGHBORS) + 1.0)


def _occupied_volume(positions: NDArray[np.float64], cell: NDArray[np.float64], pbc: NDArray[np.bool_]) -> float:
    """Volume that the atoms of a partly periodic structure fill, Å³."""
    periodic = cell[pbc]
    if len(periodic):
        # Orthonormal basis whose first vectors span the periodic directions.
        basis, upper = np.linalg.qr(periodic.T, mode="complete")
        measure = float(np.abs(np.prod(np.diag(upper[: len(periodic)]))))
        across = positions @ basis[:, len(periodic) :]
    else:
        measure, across = 1.0, positions
    if not np.isfinite(across).all() or not len(across):
        return 0.0
    extent = np.ptp(across, axis=0)
    return measure * float(np.prod(np.maximum(extent, 2.0)))
