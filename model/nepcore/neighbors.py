"""Neighbour search for ragged batches: any cell, any mix of periodic directions, any size.

Atoms are sorted into bins of about half the cutoff. The bins of a periodic direction wrap round, as often as the
cutoff asks: a cell thinner than the cutoff is no special case. Candidates of an atom are the atoms of all bins in
reach; they are made piece by piece, so that memory stays bounded whatever the density.

The pairs of an atom come in an order that depends on its structure alone: by neighbour, then by image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from .batch import Batch

_BINS_PER_CUTOFF = 2


@dataclass(frozen=True, eq=False)
class Pairs:
    """Directed pairs whose centres are the atoms ``start`` to ``stop`` − 1 of a batch, sorted by centre.

    Attributes:
        start, stop: Range of centre atoms.
        i: Centres, (P,) int64, numbered from ``start``.
        j: Neighbours, (P,) int64, numbered in the batch.
        vector: r_j − r_i, Å, (P, 3) float64.
        distance: |vector|, (P,) float64.
    """

    start: int
    stop: int
    i: Tensor
    j: Tensor
    vector: Tensor
    distance: Tensor

    def __len__(self) -> int:
        return len(self.i)


@dataclass(frozen=True, eq=False)
class Bins:
    """Atoms of a batch sorted into bins, ready to be asked for neighbours within ``cutoff``."""

    batch: Batch
    cutoff: float
    shape: Tensor  # (B, 3) bins per direction
    reach: Tensor  # (B, 3) bins to look at on either side
    first: Tensor  # (B,) number of a structure's first bin
    entries: Tensor  # (B,) bins in reach of an atom
    cells: Tensor  # (B, 3, 3)
    pbc: Tensor  # (B, 3)
    coordinates: Tensor  # (N, 3) bin of each atom
    order: Tensor  # (N,) atoms by bin
    bounds: Tensor  # (bins + 1,) where each bin starts in ``order``
    host_entries: NDArray[np.int64]

    @classmethod
    def of(cls, batch: Batch, cutoff: float) -> Bins:
        """Sort the atoms of a batch."""
        device = batch.positions.device
        B = len(batch)
        inverse = np.linalg.inv(batch.cells) if B else np.zeros((0, 3, 3))
        height = 1.0 / np.linalg.norm(inverse, axis=1)  # (B, 3): columns of the inverse are normals / height
        cells = torch.from_numpy(batch.cells).to(device)
        fractional = rows_times(batch.positions, torch.from_numpy(inverse).to(device)[batch.structure])
        # Extent in a non-periodic direction; a periodic one spans its cell.
        top = torch.zeros((B, 3), dtype=torch.float64, device=device)
        top.scatter_reduce_(0, batch.structure[:, None].expand(-1, 3), fractional, "amax")
        extent = np.where(batch.pbc, height, top.cpu().numpy() + 1e-6)
        shape = np.maximum(np.floor(extent * (_BINS_PER_CUTOFF / cutoff)), 1.0)
        # Few atoms in a large cell: no more bins than a few an atom, taken from the longest directions.
        limit = np.maximum(8.0, 4.0 * batch.counts)
        for _ in range(3):
            excess = np.prod(shape, axis=1) / limit
            widest = np.argmax(shape, axis=1)
            rows = np.arange(B)
            shape[rows, widest] = np.maximum(1.0, np.floor(shape[rows, widest] / np.maximum(excess, 1.0)))
        width = extent / shape
        reach = np.ceil(cutoff / width * (1.0 + 1e-12))
        reach = np.where(batch.pbc, reach, np.minimum(reach, shape - 1.0)).astype(np.int64)
        shape = shape.astype(np.int64)
        bins = np.prod(shape, axis=1)
        first = np.concatenate([[0], np.cumsum(bins)]).astype(np.int64)
        entries = np.prod(2 * reach + 1, axis=1)
        shape_t = torch.from_numpy(shape).to(device)
        scale = torch.from_numpy(shape / np.where(batch.pbc, 1.0, extent)).to(device)
        coordinates = torch.floor(fractional * scale[batch.structure]).to(torch.int64)
        coordinates = torch.minimum(coordinates.clamp_(min=0), (shape_t - 1)[batch.structure])
        first_t = torch.from_numpy(first).to(device)
        number = first_t[batch.structure] + _flat(coordinates, shape_t[batch.structure])
        sorted_number, order = torch.sort(number, stable=True)
        bounds = torch.searchsorted(sorted_number, torch.arange(int(first[-1]) + 1, device=device))
        return cls(
            batch, cutoff, shape_t, torch.from_numpy(reach).to(device), first_t[:-1],
            torch.from_numpy(entries).to(device), cells, torch.from_numpy(batch.pbc).to(device), coordinates, order,
            bounds, entries,
        )  # fmt: skip

    def pairs(self, budget: int) -> Iterator[Pairs]:
        """All pairs closer than the cutoff, in pieces of consecutive centres.

        Args:
            budget: Candidates that may be held at a time (a single atom may exceed it).
        """
        n = self.batch.n_atoms
        per_atom = np.repeat(self.host_entries, self.batch.counts)
        total = np.concatenate([[0], np.cumsum(per_atom)])
        start = 0
        while start < n:
            # Bins in reach first, cheap to count; then the candidates within them.
            stop = max(start + 1, int(np.searchsorted(total, total[start] + budget, side="right")) - 1)
            yield from self._within(start, stop, budget)
            start = stop

    def _within(self, start: int, stop: int, budget: int) -> Iterator[Pairs]:
        """Pairs of the centres ``start`` to ``stop`` − 1, cut by their number of candidates."""
        device = self.order.device
        system = self.batch.structure[start:stop]
        number = self.entries[system]
        i = torch.repeat_interleave(torch.arange(stop - start, device=device), number)
        ends = torch.cumsum(number, 0)
        local = torch.arange(len(i), device=device) - (ends - number)[i]
        s = system[i]
        shape, reach = self.shape[s], self.reach[s]
        span = 2 * reach + 1
        z = local % span[:, 2]
        rest = torch.div(local, span[:, 2], rounding_mode="floor")
        offset = torch.stack([torch.div(rest, span[:, 1], rounding_mode="floor"), rest % span[:, 1], z], dim=1) - reach
        target = self.coordinates[start:stop][i] + offset
        image = torch.div(target, shape, rounding_mode="floor")
        target = target - image * shape
        bin_number = self.first[s] + _flat(target, shape)
        count = self.bounds[bin_number + 1] - self.bounds[bin_number]
        count = count * ((image == 0) | self.pbc[s]).all(dim=1)
        kept = torch.nonzero(count).squeeze(1)
        i, image, count, s = i[kept], image[kept], count[kept], s[kept]
        begin = self.bounds[bin_number[kept]]
        shift = (
            torch.einsum("pi,pij->pj", image.to(torch.float64), self.cells[s]) if len(s) else image.to(torch.float64)
        )
        origin = shift - self.batch.positions[start:stop][i]
        home = (image == 0).all(dim=1)

        per_atom = torch.zeros(stop - start, dtype=torch.int64, device=device).index_add_(0, i, count).cpu().numpy()
        entry_ends = torch.searchsorted(i, torch.arange(stop - start, device=device), right=True).cpu().numpy()
        total = np.concatenate([[0], np.cumsum(per_atom)])
        a = 0
        while a < stop - start:
            b = max(a + 1, int(np.searchsorted(total, total[a] + budget, side="right")) - 1)
            rows = slice(int(entry_ends[a - 1]) if a else 0, int(entry_ends[b - 1]))
            yield self._candidates(
                start + a, start + b, i[rows] - a, count[rows], begin[rows], origin[rows], home[rows]
            )
            a = b

    def _candidates(
        self, start: int, stop: int, i: Tensor, count: Tensor, begin: Tensor, origin: Tensor, home: Tensor
    ) -> Pairs:
        """Measure the candidates of centres ``start`` to ``stop`` − 1 and keep those in range, in order."""
        entry = torch.repeat_interleave(torch.arange(len(i), device=i.device), count)
        ends = torch.cumsum(count, 0)
        j = self.order[torch.arange(len(entry), device=i.device) + (begin - ends + count)[entry]]
        vector = self.batch.positions[j] + origin[entry]
        square = squared_norm(vector)
        centre = i[entry]
        near = (square < self.cutoff**2) & ~(home[entry] & (j == centre + start))
        kept = torch.nonzero(near).squeeze(1)
        centre, j = centre[kept], j[kept]
        # For one pair of atoms the bins come in the order of the images: a stable sort by neighbour is enough.
        order = torch.sort(centre * self.batch.n_atoms + j, stable=True).indices
        kept = kept[order]
        return Pairs(start, stop, centre[order], j[order], vector[kept], torch.sqrt(square[kept]))


def _flat(coordinates: Tensor, shape: Tensor) -> Tensor:
    """Row-major number of bin coordinates, (..., 3) → (...)."""
    return (coordinates[..., 0] * shape[..., 1] + coordinates[..., 1]) * shape[..., 2] + coordinates[..., 2]


def rows_times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Row vectors times their own matrices, (P, 3) and (P, 3, 3) → (P, 3).

    Written out: a reduction's order of summation, and so its last bit, may depend on the number of rows.
    """
    return rows[:, 0, None] * matrices[:, 0] + rows[:, 1, None] * matrices[:, 1] + rows[:, 2, None] * matrices[:, 2]


def squared_norm(vectors: Tensor) -> Tensor:
    """|v|² of (P, 3), written out for the same reason."""
    x, y, z = vectors.unbind(dim=1)
    return x * x + y * y + z * z
