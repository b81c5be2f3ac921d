"""Which structures a model can evaluate, and about how much work they are. Needs no torch: the front door asks it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from .cells import MAX_COORDINATE, triple_product
from .elements import NUMBERS, symbol_of
from .errors import StructureError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .structures import Structures

ALONE = 16.0
"""Work of an atom without neighbours (its network, its share of everything that is not a pair), in neighbours."""

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
    _good: list[tuple[bytes, ...]] = field(default_factory=list, init=False, repr=False, compare=False)
    """The last structure alone in its block that was let in: everything of it but its positions."""

    @cached_property
    def types(self) -> NDArray[np.int64]:
        """Type index by atomic number, (256,); −1 for elements the model does not know."""
        table = np.full(256, -1, np.int64)
        for t, symbol in enumerate(self.elements):
            table[NUMBERS[symbol]] = t
        return table

    @cached_property
    def _known(self) -> NDArray[np.bool_]:
        """Whether the model knows an element, by atomic number, (256,)."""
        return self.types >= 0

    def problems(self, structures: Structures) -> dict[int, StructureError]:
        """Why structures cannot be evaluated, by index; see also :meth:`Structures.problems`, which this includes."""
        if len(structures) != 1 or not structures.pbc.all():
            return self._problems(structures, self.neighbors(structures))
        # The step of a simulation: nothing but positions differs from the one before, on which, where all directions
        # are periodic, nothing else depends.
        s = structures
        atoms = (s.numbers.tobytes(), s.cells.tobytes(), s.temperatures.tobytes())
        # A NaN fails each of these comparisons.
        if self._good == [atoms] and (
            float(s.positions.min()) >= -MAX_COORDINATE and float(s.positions.max()) <= MAX_COORDINATE
        ):
            return {}
        found = self._problems(s, self.neighbors(s))
        if not found:
            self._good[:] = [atoms]
        return found

    def work(self, structures: Structures) -> NDArray[np.float64]:
        """Work of each structure, atoms × (neighbours + :data:`ALONE`), (B,)."""
        return _work(structures, self.neighbors(structures))

    def examine(self, structures: Structures) -> tuple[dict[int, StructureError], NDArray[np.float64]]:
        """:meth:`problems` and :meth:`work`, at less than the price of both."""
        neighbors = self.neighbors(structures)
        return self._problems(structures, neighbors), _work(structures, neighbors)

    def _problems(self, structures: Structures, neighbors: NDArray[np.float64]) -> dict[int, StructureError]:
        found = structures.problems()
        known = self._known[structures.numbers]
        if not known.all():
            self._note_unknown(structures, known, found)
        if self.temperature:
            for i in np.flatnonzero(np.isnan(structures.temperatures)).tolist():
                reason = "temperature (K) is missing; this model depends on it"
                found.setdefault(i, StructureError("missing_temperature", reason, field="temperature"))
        if len(neighbors) and neighbors.max() > MAX_NEIGHBORS:
            for i in np.flatnonzero(neighbors > MAX_NEIGHBORS).tolist():
                # Without a periodic direction there is no cell to blame.
                field, cause = (
                    ("cell", "the cell is too small")
                    if structures.pbc[i].any()
                    else ("positions", "the atoms are too close together")
                )
                reason = f"{field}: more than {MAX_NEIGHBORS:,} neighbours per atom within {self.cutoff:g} Å; {cause}"
                found.setdefault(i, StructureError("too_dense", reason, field=field))
        return found

    def _note_unknown(self, structures: Structures, known: NDArray[np.bool_], found: dict[int, StructureError]) -> None:
        for atom in np.flatnonzero(~known).tolist():
            i = int(np.searchsorted(structures.offsets, atom, side="right")) - 1
            if i in found:
                continue
            k = atom - int(structures.offsets[i])
            symbol = symbol_of(int(structures.numbers[atom]))
            elements = " ".join(self.elements)
            reason = f"atom {k + 1}: element {symbol} is not in the model, which knows: {elements}"
            found[i] = StructureError("unknown_element", reason, field="numbers", atoms=(k,))

    def neighbors(self, structures: Structures) -> NDArray[np.float64]:
        """Expected neighbours per atom from the density, (B,): exact for a uniform crystal, a guess elsewhere.

        The volume is that of the cell with non-periodic directions replaced by the extent of the atoms (at least 2 Å,
        about an atom), so that a molecule in a huge box is not taken for empty space.
        """
        B = len(structures)
        if not B or not structures.n_atoms:
            return np.zeros(B)
        sphere = 4.0 / 3.0 * np.pi * self.cutoff**3
        if B == 1 and structures.pbc.all():
            # The step of a simulation: on nine numbers Python is faster than NumPy.
            volume_of_one = triple_product(structures.cells[0].tolist())
            return np.array([structures.n_atoms * sphere / volume_of_one if 0 < volume_of_one < inf else 0.0])
        with np.errstate(all="ignore"):
            volume = triple_product(structures.cells.transpose(1, 2, 0))
            periodic = structures.pbc.sum(axis=1)
            self._fill(structures, periodic, volume)
            expected = structures.counts * sphere / volume
            expected[~(volume > 0)] = 0.0
        # Without periodic images nobody has more neighbours than there are other atoms.
        return np.where(periodic == 0, np.minimum(expected, structures.counts), expected)

    def _fill(self, structures: Structures, periodic: NDArray[np.int64], volume: NDArray[np.float64]) -> None:
        """Replace the volumes of structures that are not periodic in all directions by those that atoms occupy."""
        isolated = (periodic == 0) & (structures.counts > 0)
        if isolated.any():
            # Empty structures have no first atom; they are left out before the reduction.
            full = np.flatnonzero(structures.counts > 0)
            starts = structures.offsets[full]
            extent = np.maximum.reduceat(structures.positions, starts) - np.minimum.reduceat(
                structures.positions, starts
            )
            occupied = np.prod(np.maximum(extent, 2.0), axis=1)
            chosen = isolated[full]
            volume[full[chosen]] = np.where(np.isfinite(occupied[chosen]), occupied[chosen], 0.0)
        for i in np.flatnonzero((periodic > 0) & (periodic < 3)).tolist():
            volume[i] = _occupied_volume(structures.view(i).positions, structures.cells[i], structures.pbc[i])


def _work(structures: Structures, neighbors: NDArray[np.float64]) -> NDArray[np.float64]:
    return structures.counts * (np.minimum(neighbors, MAX_NEIGHBORS) + ALONE)


def _occupied_volume(positions: NDArray[np.float64], cell: NDArray[np.float64], pbc: NDArray[np.bool_]) -> float:
    """Volume that the atoms of a partly periodic structure fill, Å³."""
    periodic = np.where(np.isfinite(cell[pbc]), cell[pbc], 0.0)
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
