"""One evaluation, cut into pieces of some tens of milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.errors import StructureError
from nepcore.structures import PER_ATOM, PROPERTIES, Predictions

from . import neighbors
from .bins import FAULT, FAULTS, GRID
from .kernels import COINCIDENCES, JOB, MISFITS, Wanted
from .model import aligned
from .plan import ATOM_WORK, PIECE, Plan

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from nepcore.structures import Structures

    from .backend import FusedCPU

_SHARED_WORK = 8_000.0
"""Below this a piece is not worth waking other threads."""

_SHARED_PAIRS = 20_000
"""Likewise for the forces on neighbours."""

_PIECE_PAIRS = 4_000_000
"""Pairs of a piece, unless a single block has more."""


@dataclass(frozen=True, eq=False)
class _Group:
    """Structures that are in one set of bins.

    Attributes:
        first: Index of the first.
        counts: Their atoms.
        temperatures: K, in the compute dtype.
        runs: Stretches of bins that one atom looks at.
        plan: Blocks of their atoms.
        job: Words of the job.
        kept: What the job refers to.
    """

    first: int
    counts: NDArray[np.int64]
    temperatures: NDArray[Any]
    runs: int
    plan: Plan
    job: NDArray[np.int64]
    kept: list[Any]


class Task:
    """One evaluation: what was asked for, and what has come out so far."""

    def __init__(self, backend: FusedCPU, structures: Structures, properties: frozenset[str]) -> None:
        self.backend = backend
        self.model = backend.model
        self.functions = backend.functions
        self.structures = structures
        self.properties = properties
        B, N = len(structures), structures.n_atoms
        self.wanted = Wanted(
            gradient=bool(properties & {"forces", "stress", "virial", "virials"}),
            virial=bool(properties & {"stress", "virial"}),
            virials="virials" in properties,
            descriptors="descriptors" in properties,
        )
        dtype = backend.dtype
        self.energy = np.zeros(B)
        self.virial = np.zeros((B, 9))
        self.energies = np.zeros(N, dtype)
        self.forces = np.zeros((N, 3), dtype)
        self.virials = np.zeros((N if self.wanted.virials else 0, 9), dtype)
        self.descriptors = np.zeros((N if self.wanted.descriptors else 0, self.model.dim), dtype)
        self.nothing: NDArray[Any] = np.zeros(0, dtype)
        self.errors: dict[int, StructureError] = {}
        # The compiled functions take arrays of one kind: bytes from a socket may be read-only and out of line.
        self.counts = _plain(structures.counts, np.int64)
        self.positions = _plain(structures.positions, np.float64)
        self.cells = _plain(structures.cells, np.float64)
        self.pbc = _plain(structures.pbc, np.bool_)
        self.numbers = _plain(structures.numbers, np.uint8)
        self.density, _ = self.functions.expect(self.counts, self.cells.reshape(-1), self.pbc, self.model.cutoff)

    def run(self) -> Generator[int, None, None]:
        """Evaluate everything; yields atoms finished."""
        # Structures are sorted into bins together as long as they make about a piece; a large one stands alone.
        total = np.cumsum(self.counts * (self.density + ATOM_WORK))
        threads = self.backend.threads
        if threads > 1 and len(total) and _SHARED_WORK < total[-1] <= PIECE * threads:
            # They wake up while the first group is prepared.
            self.backend.crew.call(self.functions, threads)
        start = 0
        while start < len(total):
            done = total[start - 1] if start else 0.0
            stop = max(start + 1, int(np.searchsorted(total, done + PIECE * threads, side="right")))
            yield from self._group(start, stop)
            start = stop

    def _group(self, first: int, last: int) -> Generator[int, None, None]:
        """Evaluate the structures ``first`` to ``last`` − 1."""
        backend, wanted = self.backend, self.wanted
        atoms = slice(int(self.structures.offsets[first]), int(self.structures.offsets[last]))
        counts = self.counts[first:last]
        job = aligned(JOB, "int64")
        (runs, fault, rows, total, grid, kept), _ = self.functions.prepare(
            job, counts, self.numbers[atoms], backend.types, self.positions[atoms].reshape(-1),
            self.cells[first:last].reshape(-1), self.pbc[first:last], self.model.cutoff, self.model.n_types,
            self.density[first:last], wanted,
        )  # fmt: skip
        temperatures = self.structures.temperatures[first:last].astype(backend.dtype)
        group = _Group(first, counts, temperatures, runs, Plan(rows, total), job, [grid, kept])
        start = 0
        while start < len(group.plan):
            with backend.lock:
                stop = self._piece(group, start)
            yield int(rows[2, stop - 1] - rows[1, start])
            start = stop
        self.functions.sum_structures(
            job, counts, self.energy[first:last], self.virial[first:last].reshape(-1), self.energies[atoms],
            self.forces[atoms].reshape(-1), self.virials[atoms].reshape(-1),
        )  # fmt: skip
        if fault:
            for s in np.flatnonzero(grid[FAULT::GRID]).tolist():
                code, field, reason = FAULTS[grid[FAULT + GRID * s] - 1]
                self.errors[first + s] = StructureError(code, reason, field=field)

    def _piece(self, group: _Group, start: int) -> int:
        """Evaluate a piece, the blocks from ``start`` on; the block after its last."""
        backend, plan, gradient = self.backend, group.plan, self.wanted.gradient
        blocks = plan.blocks
        stop = plan.stop(start, PIECE * backend.threads)
        while True:
            hands = backend.threads if plan.work(start, stop) > _SHARED_WORK else 1
            pairs = plan.make_room(start, stop) if gradient else 0
            job = self._publish(group, start, stop, hands, pairs)
            backend.crew.share(self.functions, job, hands)
            if job[COINCIDENCES]:
                self._note_coincident(group, start, stop)
            if not job[MISFITS]:
                return stop
            # Denser than expected; now the numbers are known. What does not fit is left for the next piece.
            backend.crowd = max(backend.crowd, int(blocks.crowd[start:stop].max()))
            if gradient:
                blocks.room[start:stop] = np.maximum(blocks.found[start:stop], 1)
                fitting = int(np.searchsorted(np.cumsum(blocks.room[start:stop]), _PIECE_PAIRS, side="right"))
                stop = min(stop, start + max(1, fitting))

    def _publish(self, group: _Group, start: int, stop: int, hands: int, pairs: int) -> NDArray[np.int64]:
        """The job of the blocks ``start`` to ``stop`` − 1."""
        backend, wanted = self.backend, self.wanted
        desks = backend.desks(hands, group.runs)
        first = self.structures.offsets[group.first]
        descriptors = self.descriptors[first : first + int(group.counts.sum())] if wanted.descriptors else self.nothing
        room = backend.pairs(pairs, wanted, descriptors.reshape(-1))
        parts = 0 if not wanted.gradient else hands if pairs > _SHARED_PAIRS else 1
        targets, _ = self.functions.publish(
            group.job, group.counts, start, stop, parts, room, group.temperatures, backend.model_words, desks
        )
        group.kept[2:] = [room, targets, desks]
        return group.job

    def _note_coincident(self, group: _Group, start: int, stop: int) -> None:
        blocks = group.plan.blocks
        ends = np.cumsum(group.counts)
        for b in (start + np.flatnonzero(blocks.second[start:stop])).tolist():
            s = int(blocks.structure[b])
            low = int(ends[s] - group.counts[s])
            i, j = sorted((int(blocks.first[b]) - low, int(blocks.second[b]) - 1 - low))
            before = self.errors.get(s + group.first)
            if before is None or (i, j) < (before.atoms[0], before.atoms[-1]):
                self.errors[s + group.first] = _coincident(i, j)

    def predictions(self) -> Predictions:
        """What was asked for; rows of structures that failed are NaN."""
        structures = self.structures
        virial = self.virial.reshape(-1, 3, 3)
        everything: dict[str, NDArray[Any]] = {
            "energy": self.energy, "free_energy": self.energy, "energies": self.energies, "forces": self.forces,
            "virial": virial, "virials": self.virials.reshape(-1, 3, 3), "descriptors": self.descriptors,
        }  # fmt: skip
        if "stress" in self.properties:
            everything["stress"] = _stress(virial, structures)
        values = {name: everything[name] for name in PROPERTIES if name in self.properties}
        for i in self.errors:
            for name, array in values.items():
                rows = slice(structures.offsets[i], structures.offsets[i + 1]) if name in PER_ATOM else slice(i, i + 1)
                array[rows] = np.nan
        return Predictions(structures.counts, values, structures.fully_periodic, self.errors)


def _coincident(i: int, j: int) -> StructureError:
    whose = f"atoms {i + 1} and {j + 1} coincide" if i != j else f"atom {i + 1} coincides with its own image"
    reason = f"positions: {whose} (closer than {neighbors.COINCIDENT:g} Å)"
    return StructureError("coincident_atoms", reason, field="positions", atoms=(i, j) if i != j else (i,))


def _plain(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    if array.flags.carray and array.dtype == dtype:
        return array
    return np.require(array, dtype, ["C", "A", "W"])


def _stress(virial: NDArray[np.float64], structures: Structures) -> NDArray[np.float64]:
    """Stress −W/V in Voigt order, (B, 6); NaN without three periodic directions."""
    volume = np.where(structures.fully_periodic, structures.volumes, np.nan)
    symmetric = (virial + virial.transpose(0, 2, 1)) / 2.0
    return -symmetric[:, [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]] / volume[:, None]
