"""Neighbour lists that outlive a call, for structures that come again with their atoms moved.

A list holds the pairs within the cutoff and a skin, found once. While no atom has moved more than half the skin, the
pairs within the cutoff are among them: they are measured anew in each step, and come in the same order and with the
same bits as from a search. A list is for one cell; where the cell changes from step to step there is none.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .batch import Batch, of_atoms, rows_times
from .neighbors import Bins, Pairs, squared_norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from .structures import Structures

SKIN = 1.0
"""Å; an atom of a hot solid moves half of that in some dozens of steps."""

MAX_PAIRS = 30_000_000
"""Pairs of all lists together, of eleven bytes each; the least lately used go first."""

_HOPELESS = 3
"""Lists in a row that were of no use before one stops to make them: the steps are not those of a trajectory."""


@dataclass(eq=False)
class _Kept:
    """What is known of one structure.

    Attributes:
        cell: Compact and completed, (3, 3).
        positions: Folded, when the list was made, (n, 3) float64; None without a list.
        i, j: Centre and neighbour of each pair, (P,) int32, by i, then j, then image.
        image: Cell vectors from the folded neighbour to the one that is meant, (P, 3) int8.
        used: Steps that the list was good for.
        wasted: Lists in a row that were good for none.
    """

    cell: NDArray[np.float64]
    positions: Tensor | None = None
    i: Tensor | None = None
    j: Tensor | None = None
    image: Tensor | None = None
    used: int = 0
    wasted: int = 0

    @property
    def pairs(self) -> int:
        return 0 if self.i is None else len(self.i)


class Lists:
    """The lists of one model on one device.

    Args:
        cutoff: Of the pairs, Å.
        types: Type index by atomic number, as :attr:`nepcore.admission.Admission.types`.
        device: Where they are.
        skin: Å.
    """

    def __init__(self, cutoff: float, types: NDArray[np.int64], device: torch.device, skin: float = SKIN) -> None:
        self.cutoff = cutoff
        self.skin = skin
        self._types = types
        self._device = device
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._total = 0
        self.made = 0
        """Lists made so far."""

    def pairs(self, structures: Structures, batch: Batch, budget: int) -> Iterator[Pairs]:
        """As :meth:`nepcore.neighbors.Bins.pairs`: from lists where all structures have one, else by a search."""
        keys = structures.keys
        if keys is not None and keys.all() and len(set(keys.tolist())) == len(keys):
            ready = [self._ready(structures, batch, b, int(key), budget) for b, key in enumerate(keys)]
            if all(turns is not None for turns in ready):
                return self._measured(batch, [self._kept[int(key)] for key in keys], ready, budget)
        return Bins.of(batch, self.cutoff).pairs(budget)

    def _ready(self, structures: Structures, batch: Batch, b: int, key: int, budget: int) -> Tensor | None:
        """Whole cells that atoms crossed since the list of structure b was made, (n, 3); None if it has no list."""
        cell = batch.cells[b]
        rows = slice(int(batch.offsets[b]), int(batch.offsets[b + 1]))
        kept = self._kept.get(key)
        if kept is None or not np.array_equal(kept.cell, cell):
            self._forget(key)
            self._kept[key] = _Kept(cell.copy())
            return None
        self._kept.move_to_end(key)
        positions = batch.positions[rows]
        if kept.positions is not None and len(kept.positions) == len(positions):
            turns = self._turns(kept, positions, batch, b)
            if turns is not None:
                kept.used += 1
                return turns
            kept.wasted = 0 if kept.used else kept.wasted + 1
        if kept.wasted >= _HOPELESS:
            return None
        self._make(kept, structures.slice(b, b + 1), budget)
        return torch.zeros_like(positions)

    def _turns(self, kept: _Kept, positions: Tensor, batch: Batch, b: int) -> Tensor | None:
        assert kept.positions is not None
        cell = torch.from_numpy(batch.cells[b]).to(self._device)
        inverse = torch.from_numpy(np.linalg.inv(batch.cells[b])).to(self._device)
        moved = positions - kept.positions
        turns = -torch.round(_times(moved, inverse)) * torch.from_numpy(batch.pbc[b]).to(self._device)
        moved = moved + _times(turns, cell)
        # A NaN fails the comparison.
        return turns if float(squared_norm(moved).max()) <= (0.5 * self.skin) ** 2 else None

    def _make(self, kept: _Kept, alone: Structures, budget: int) -> None:
        self.made += 1
        self._total -= kept.pairs
        batch = Batch.of(alone, self._types, self._device)
        inverse = torch.from_numpy(np.linalg.inv(batch.cells[0])).to(self._device)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for pairs in Bins.of(batch, self.cutoff + self.skin).pairs(budget):
            i = pairs.i + pairs.start
            apart = pairs.vector - (batch.positions[pairs.j] - batch.positions[i])
            image = torch.round(_times(apart, inverse)).to(torch.int8)
            found.append((i.to(torch.int32), pairs.j.to(torch.int32), image))
        kept.i, kept.j, kept.image = (torch.cat(column) for column in zip(*found, strict=True))
        kept.positions = batch.positions
        kept.used = 0
        self._total += kept.pairs
        while self._total > MAX_PAIRS and len(self._kept) > 1:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: int) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._total -= kept.pairs

    def _measured(self, batch: Batch, lists: list[_Kept], turns: list[Tensor | None], budget: int) -> Iterator[Pairs]:
        """The pairs of lists that are within the cutoff now, in pieces of consecutive centres."""
        first = batch.offsets[:-1].tolist()
        i = torch.cat([kept.i.to(torch.int64) + a for kept, a in zip(lists, first, strict=True) if kept.i is not None])
        j = torch.cat([kept.j.to(torch.int64) + a for kept, a in zip(lists, first, strict=True) if kept.j is not None])
        image = torch.cat([kept.image for kept in lists if kept.image is not None])
        turned = torch.cat([turn for turn in turns if turn is not None])
        cells = torch.from_numpy(batch.cells).to(self._device)
        n = batch.n_atoms
        edges = torch.searchsorted(i, torch.arange(n + 1, device=self._device)).cpu().numpy()
        start = 0
        while start < n:
            stop = max(start + 1, int(np.searchsorted(edges, edges[start] + budget, side="right")) - 1)
            rows = slice(int(edges[start]), int(edges[stop]))
            centre, neighbor = i[rows], j[rows]
            whole = image[rows].to(torch.float64) + turned[neighbor] - turned[centre]
            shift = rows_times(whole, of_atoms(cells, batch.structure[centre]))
            # The same operations as those of a search, in the same order.
            vector = batch.positions[neighbor] + (shift - batch.positions[centre])
            square = squared_norm(vector)
            near = torch.nonzero(square < self.cutoff**2).squeeze(1)
            yield Pairs(start, stop, centre[near] - start, neighbor[near], vector[near], torch.sqrt(square[near]))
            start = stop


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    return rows_times(rows, matrix.expand(len(rows), 3, 3))
