"""One evaluation, cut into pieces of some tens of milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.errors import StructureError
from nepcore.structures import PER_ATOM, PROPERTIES, Predictions

from . import kernels, neighbors
from .kernels import Results, Targets, Wanted
from .plan import ATOM_WORK, PIECE, Plan, expected_neighbors

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from nepcore.structures import Structures

    from .backend import Desk, FusedCPU
    from .kernels import Blocks
    from .neighbors import Bins

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
    slots: NDArray[np.int64]
    present: NDArray[np.int64]
    runs: int
    results: Results


class Task:
    """One evaluation: what was asked for, and what has come out so far."""

    def __init__(self, backend: FusedCPU, structures: Structures, properties: frozenset[str]) -> None:
        self.backend = backend
        self.model = backend.model
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
        self.density = expected_neighbors(structures, self.model.cutoff)

    def run(self) -> Generator[int, None, None]:
        """Evaluate everything; yields atoms finished."""
        # Structures are sorted into bins together as long as they make about a piece; a large one stands alone.
        work = self.structures.counts * (self.density + ATOM_WORK)
        start, total = 0, 0.0
        for i, w in enumerate(work.tolist()):
            if i > start and total + w > PIECE:
                yield from self._group(start, i)
                start, total = i, 0.0
            total += w
        if len(self.structures) > start:
            yield from self._group(start, len(self.structures))

    def _group(self, first: int, last: int) -> Generator[int, None, None]:
        """Evaluate the structures ``first`` to ``last`` − 1."""
        backend, model, wanted = self.backend, self.model, self.wanted
        part = self.structures.slice(first, last)
        N, dtype = part.n_atoms, backend.dtype
        types = backend.types[part.numbers]
        bins = neighbors.sort_into_bins(part.counts, types, part.positions, part.cells, part.pbc, model.cutoff)
        present = np.flatnonzero(np.bincount(types, minlength=model.n_types))
        slots = np.zeros(model.n_types, np.int64)
        slots[present] = np.arange(len(present))
        gradient = N if wanted.gradient else 0
        atoms = slice(self.structures.offsets[first], self.structures.offsets[last])
        results = Results(
            energies=np.zeros(N), own=np.zeros(3 * gradient), pushed=np.zeros(3 * gradient),
            virial=np.zeros(9 * N if wanted.virial else 0), virials=np.zeros(9 * N if wanted.virials else 0),
            descriptors=self.descriptors[atoms].reshape(-1),
            pair_start=np.zeros(gradient, np.int64), pair_count=np.zeros(gradient, np.int64),
            neighbor=np.zeros(0, np.int32), gradient=np.zeros(0, dtype), edge=np.zeros(0, dtype),
        )  # fmt: skip
        group = _Group(
            part.counts, bins, part.temperatures.astype(dtype), slots, present, neighbors.most_runs(bins), results
        )
        plan = Plan.of(part.counts, self.density[first:last])
        start = 0
        while start < len(plan):
            with backend.lock:
                stop = self._piece(group, plan, start, first)
            yield int(plan.end[stop - 1] - plan.begin[start])
            start = stop
        kernels.sum_structures(
            part.counts, results, wanted, self.energy[first:last], self.virial[first:last].reshape(-1),
            self.forces[atoms].reshape(-1),
        )  # fmt: skip
        self.energies[atoms] = results.energies
        if wanted.virials:
            self.virials[atoms] = results.virials.reshape(-1, 9)

    def _piece(self, group: _Group, plan: Plan, start: int, offset: int) -> int:
        """Evaluate a piece, the blocks of ``plan`` from ``start`` on; the block after its last."""
        backend, wanted = self.backend, self.wanted
        stop = plan.stop(start, PIECE)
        rooms = plan.pairs[start:stop] if wanted.gradient else np.zeros(stop - start, np.int64)
        while True:
            hands = backend.threads if plan.work(start, stop) > _SHARED_WORK else 1
            blocks = plan.blocks(start, stop, rooms)
            results = backend.with_pairs(group.results, int(rooms.sum()), wanted)
            desks = [backend.desk(k, group.runs) for k in range(hands)]
            counter = np.zeros(1, np.int64)

            def work(
                k: int, blocks: Blocks = blocks, results: Results = results, desks: list[Desk] = desks,
                counter: NDArray[np.int64] = counter,
            ) -> None:  # fmt: skip
                kernels.evaluate_blocks(
                    counter, blocks, group.bins, self.model, group.temperatures, group.slots, group.present,
                    desks[k].found, desks[k].site, results, wanted, backend.widths,
                )  # fmt: skip

            backend.crew.share(work, hands)
            crowd = int(blocks.crowd.max())
            if crowd:
                backend.crowd = max(backend.crowd, crowd)
            if (blocks.found > rooms).any() and wanted.gradient:
                # Denser than expected; now the numbers are known. What does not fit is left for the next piece.
                rooms = np.maximum(blocks.found, 1)
                fitting = int(np.searchsorted(np.cumsum(rooms), _PIECE_PAIRS, side="right"))
                stop = min(stop, start + max(1, fitting))
                rooms = rooms[: stop - start]
            elif not crowd:
                break
        self._note_coincident(group, blocks, offset)
        if wanted.gradient:
            self._push(group.counts, blocks, results, hands)
        return stop

    def _push(self, counts: NDArray[np.int64], blocks: Blocks, results: Results, hands: int) -> None:
        """Add the forces of a piece to the neighbours."""
        structures, at = np.unique(blocks.structure, return_index=True)
        last = np.append(at[1:], len(blocks.structure)) - 1
        ends = np.cumsum(counts)
        if len(results.neighbor) < _SHARED_PAIRS:
            hands = 1
        rows = []
        for s, begin, end in zip(
            structures.tolist(), blocks.begin[at].tolist(), blocks.end[last].tolist(), strict=True
        ):
            high = int(ends[s])
            low = high - int(counts[s])
            share = hands if (end - begin) * 2 * hands > blocks.end[-1] - blocks.begin[0] else 1
            cuts = [low + (high - low) * k // share for k in range(share + 1)]
            rows += [(a, b, begin, end, share == 1) for a, b in zip(cuts, cuts[1:], strict=False)]
        targets = Targets(*np.array(rows, np.int64).T.copy())
        counter = np.zeros(1, np.int64)
        self.backend.crew.share(lambda _: kernels.push_neighbors(counter, targets, results, self.wanted), hands)

    def _note_coincident(self, group: _Group, blocks: Blocks, offset: int) -> None:
        ends = np.cumsum(group.counts)
        for b in np.flatnonzero(blocks.first >= 0).tolist():
            s = int(blocks.structure[b])
            low = int(ends[s] - group.counts[s])
            i, j = sorted((int(blocks.first[b]) - low, int(blocks.second[b]) - low))
            whose = f"atoms {i + 1} and {j + 1} coincide" if i != j else f"atom {i + 1} coincides with its own image"
            reason = f"positions: {whose} (closer than {neighbors.COINCIDENT:g} Å)"
            atoms = (i, j) if i != j else (i,)
            self.errors.setdefault(
                s + offset, StructureError("coincident_atoms", reason, field="positions", atoms=atoms)
            )

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


def _stress(virial: NDArray[np.float64], structures: Structures) -> NDArray[np.float64]:
    """Stress −W/V in Voigt order, (B, 6); NaN without three periodic directions."""
    volume = np.where(structures.fully_periodic, structures.volumes, np.nan)
    symmetric = (virial + virial.transpose(0, 2, 1)) / 2.0
    return -symmetric[:, [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]] / volume[:, None]
