"""How work is cut: blocks of atoms that a thread takes at a time, pieces between which others may run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nepcore.structures import ragged_arange

from .kernels import Blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nepcore.structures import Structures

ATOM_WORK = 30.0
"""What an atom costs beside its neighbours, in neighbours."""

PIECE = 0.6e6
"""Work (atoms × (neighbours + a constant)) of a piece: some tens of milliseconds on one core."""

_BLOCK = 4000.0
"""Work of a block: some hundred microseconds."""


def expected_neighbors(structures: Structures, cutoff: float) -> NDArray[np.float64]:
    """Neighbours per atom, (B,): from the density of crystals, a guess elsewhere. Results do not depend on it."""
    sphere = 4.0 / 3.0 * np.pi * cutoff**3
    with np.errstate(divide="ignore", invalid="ignore"):
        crystal = structures.counts * sphere / structures.volumes
    crystal = np.where(structures.fully_periodic, crystal, 64.0)
    few = np.where(structures.pbc.any(axis=1), np.inf, structures.counts)
    return np.clip(np.minimum(np.nan_to_num(crystal, nan=64.0), few), 1.0, 1e5)


@dataclass(frozen=True, eq=False)
class Plan:
    """Blocks of consecutive atoms, (b,) int64 each.

    Attributes:
        structure: Structure the atoms belong to.
        begin, end: Range of atoms.
        pairs: Pairs to make room for.
        total: Work up to each block, (b + 1,) float64.
    """

    structure: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    pairs: NDArray[np.int64]
    total: NDArray[np.float64]

    @classmethod
    def of(cls, counts: NDArray[np.int64], expected: NDArray[np.float64]) -> Plan:
        """Cut structures with that many atoms and expected neighbours an atom."""
        size = np.clip(_BLOCK / (expected + ATOM_WORK), 1, 64).astype(np.int64)
        blocks = -(-counts // size)
        structure = np.repeat(np.arange(len(counts)), blocks)
        ends = np.cumsum(counts)
        begin = (ends - counts)[structure] + size[structure] * ragged_arange(np.zeros_like(blocks), blocks)
        end = np.minimum(begin + size[structure], ends[structure])
        atoms = end - begin
        pairs = (atoms * (1.3 * expected[structure] + 16.0)).astype(np.int64)
        work = atoms * (expected[structure] + ATOM_WORK)
        return cls(structure, begin, end, pairs, np.concatenate([[0.0], np.cumsum(work)]))

    def __len__(self) -> int:
        return len(self.structure)

    def stop(self, start: int, work: float) -> int:
        """First block behind a piece that begins with block ``start`` and has about that much work."""
        return min(len(self), max(start + 1, int(np.searchsorted(self.total, self.total[start] + work))))

    def work(self, start: int, stop: int) -> float:
        """Work of blocks ``start`` to ``stop`` − 1."""
        return float(self.total[stop] - self.total[start])

    def blocks(self, start: int, stop: int, rooms: NDArray[np.int64]) -> Blocks:
        """Blocks ``start`` to ``stop`` − 1 for the kernels, their pairs one block after the other."""
        n = stop - start
        return Blocks(
            structure=self.structure[start:stop], begin=self.begin[start:stop], end=self.end[start:stop],
            start=np.cumsum(rooms) - rooms, room=rooms, found=np.zeros(n, np.int64), crowd=np.zeros(n, np.int64),
            first=np.full(n, -1, np.int64), second=np.full(n, -1, np.int64),
        )  # fmt: skip
