"""One evaluation, cut into pieces of some tens of milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.errors import StructureError
from nepcore.structures import PER_ATOM, PROPERTIES, Predictions

from . import neighbors
from .bins import FAULT, FAULTS, GRID, sort_into_bins
from .kernels import Results, Wanted
from .plan import ATOM_WORK, PIECE, Plan, targets
from .site import Present

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from nepcore.structures import Structures

    from .backend import Desk, FusedCPU
    from .bins import Bins
    from .kernels import Blocks

_SHARED_WORK = 20_000.0
"""Below this a piece is not worth waking other threads."""

_SHARED_PAIRS = 200_000
"""Likewise for the forces on neighbours."""

_PIECE_PAIRS = 4_000_000
"""Pairs of a piece, unless a single block has more."""


@dataclass(frozen=True, eq=False)
class _Group:
    """Structures that are in one set of bins."""

    counts: NDArray[np.int64]
    bins: Bins
    temperatures: NDArray[Any]
    present: Present
    runs: int
    results: Results


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
        self.errors: dict[int, StructureError] = {}
        # The compiled functions take arrays of one kind: bytes from a socket may be read-only and out of line.
        self.counts = _plain(structures.counts, np.int64)
        self.positions = _plain(structures.positions, np.float64)
        self.cells = _plain(structures.cells, np.float64)
        self.pbc = _plain(structures.pbc, np.bool_)
        self.density, _ = self.functions.expect(self.counts, self.cells.reshape(-1), self.pbc, self.model.cutoff)

    def run(self) -> Generator[int, None, None]:
        """Evaluate everything; yields atoms finished."""
        # Structures are sorted into bins together as long as they make about a piece; a large one stands alone.
        total = np.cumsum(self.structures.counts * (self.density + ATOM_WORK))
        start = 0
        while start < len(total):
            done = total[start - 1] if start else 0.0
            stop = max(start + 1, int(np.searchsorted(total, done + PIECE * self.backend.threads, side="right")))
            yield from self._group(start, stop)
            start = stop

    def _group(self, first: int, last: int) -> Generator[int, None, None]:
        """Evaluate the structures ``first`` to ``last`` − 1."""
        backend, model, wanted = self.backend, self.model, self.wanted
        dtype = backend.dtype
        atoms = slice(self.structures.offsets[first], self.structures.offsets[last])
        counts = self.counts[first:last]
        types = backend.types[self.structures.numbers[atoms]]
        N = len(types)
        bins, runs = sort_into_bins(
            self.functions, counts, types, self.positions[atoms], self.cells[first:last], self.pbc[first:last],
            model.cutoff,
        )  # fmt: skip
        (kinds, slots), _ = self.functions.mark_present(types, model.n_types)
        gradient = N if wanted.gradient else 0
        results = Results(
            energies=np.zeros(N), own=np.zeros(3 * gradient), pushed=np.zeros(3 * gradient),
            virial=np.zeros(9 * N if wanted.virial else 0), virials=np.zeros(9 * N if wanted.virials else 0),
            descriptors=self.descriptors[atoms].reshape(-1),
            pair_start=np.zeros(gradient, np.int64), pair_count=np.zeros(gradient, np.int64),
            neighbor=np.zeros(0, np.int32), gradient=np.zeros(0, dtype), edge=np.zeros(0, dtype),
        )  # fmt: skip
        group = _Group(
            counts, bins, self.structures.temperatures[first:last].astype(dtype), Present(len(kinds), kinds, slots),
            runs, results,
        )  # fmt: skip
        plan = Plan(*self.functions.cut(counts, self.density[first:last])[0])
        start = 0
        while start < len(plan):
            with backend.lock:
                stop = self._piece(group, plan, start, first)
            yield int(plan.end[stop - 1] - plan.begin[start])
            start = stop
        self.functions.sum_structures(
            counts, results, wanted, self.energy[first:last], self.virial[first:last].reshape(-1),
            self.forces[atoms].reshape(-1),
        )  # fmt: skip
        self.energies[atoms] = results.energies
        if wanted.virials:
            self.virials[atoms] = results.virials.reshape(-1, 9)
        for s in np.flatnonzero(bins.grid[FAULT::GRID]).tolist():
            code, field, reason = FAULTS[bins.grid[FAULT + GRID * s] - 1]
            self.errors[first + s] = StructureError(code, reason, field=field)

    def _piece(self, group: _Group, plan: Plan, start: int, offset: int) -> int:
        """Evaluate a piece, the blocks of ``plan`` from ``start`` on; the block after its last."""
        backend, wanted = self.backend, self.wanted
        stop = plan.stop(start, PIECE * backend.threads)
        rooms = plan.pairs[start:stop] if wanted.gradient else np.zeros(stop - start, np.int64)
        while True:
            hands = backend.threads if plan.work(start, stop) > _SHARED_WORK else 1
            blocks = plan.blocks(start, stop, rooms)
            results = backend.with_pairs(group.results, int(rooms.sum()), wanted)
            desks = [backend.desk(k, group.runs) for k in range(hands)]

            def work(k: int, blocks: Blocks = blocks, results: Results = results, desks: list[Desk] = desks) -> None:
                self.functions.evaluate_blocks(
                    blocks, group.bins, backend.model_words, group.temperatures, group.present, desks[k].found_words,
                    desks[k].site_words, results, wanted, backend.widths, k == 0,
                )  # fmt: skip

            backend.crew.share(work, hands, blocks.done)
            crowd = int(blocks.crowd.max())
            backend.crowd = max(backend.crowd, crowd)
            if wanted.gradient and (blocks.found > rooms).any():
                # Denser than expected; now the numbers are known. What does not fit is left for the next piece.
                rooms = np.maximum(blocks.found, 1)
                fitting = int(np.searchsorted(np.cumsum(rooms), _PIECE_PAIRS, side="right"))
                stop = min(stop, start + max(1, fitting))
                rooms = rooms[: stop - start]
            elif not crowd:
                break
        self._note_coincident(group, blocks, offset)
        if wanted.gradient:
            self._push(group, blocks, results, hands)
        return stop

    def _push(self, group: _Group, blocks: Blocks, results: Results, hands: int) -> None:
        """Add the forces on the neighbours of a piece's atoms."""
        hands = hands if int(blocks.found.sum()) > _SHARED_PAIRS else 1
        table, _ = self.functions.aim(group.counts, blocks.structure, blocks.begin, blocks.end, hands)
        aims = targets(table)
        self.backend.crew.share(
            lambda k: self.functions.push_neighbors(aims, results, self.wanted, k == 0),
            hands,
            aims.done,
        )

    def _note_coincident(self, group: _Group, blocks: Blocks, offset: int) -> None:
        if not blocks.second.any():
            return
        ends = np.cumsum(group.counts)
        for b in np.flatnonzero(blocks.second).tolist():
            s = int(blocks.structure[b])
            low = int(ends[s] - group.counts[s])
            i, j = sorted((int(blocks.first[b]) - low, int(blocks.second[b]) - 1 - low))
            before = self.errors.get(s + offset)
            if before is None or (i, j) < (before.atoms[0], before.atoms[-1]):
                self.errors[s + offset] = _coincident(i, j)

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
