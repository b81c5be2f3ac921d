"""Neighbour search for ragged batches: any cell, any mix of periodic directions, any size.

Atoms are sorted into bins of half the cutoff or less. The bins of a periodic direction wrap round, as often as the
cutoff asks: a cell thinner than the cutoff is no special case. Candidates of an atom are the atoms of all bins in
reach; they are made piece by piece, so that memory stays bounded whatever the density.

The pairs of an atom come in an order that depends on its structure alone: by neighbour, then by image; on a GPU, where
sums have no order, as the bins have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .batch import of_atoms, rows_times

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from .batch import Batch

_BINS_PER_CUTOFF = (2.0, 2.0, 8.0)
"""By direction: thin ones in the third, where those in reach follow each other, hold fewer atoms that are too far."""

_MOST_WASTE = 2.0
"""Atoms that are looked at together may look at so many times the bins that they have to."""


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
    """Atoms of a batch sorted into bins, ready to be asked for neighbours within ``cutoff``.

    Bins that follow each other in the third direction hold atoms that follow each other in ``order``. An atom looks
    at stretches of them: one for each bin in reach in the first two directions and each image in the third.
    """

    batch: Batch
    cutoff: float
    shape: Tensor  # (B, 3) bins per direction
    reach: Tensor  # (B, 3) bins to look at on either side
    first: Tensor  # (B,) number of a structure's first bin
    cells: Tensor  # (B, 3, 3)
    pbc: Tensor  # (B, 3)
    coordinates: Tensor  # (N, 3) bin of each atom
    order: Tensor  # (N,) atoms by bin
    rough: Tensor  # (N, 3) positions in that order, float32
    bounds: Tensor  # (bins + 1,) where each bin starts in ``order``
    margin: float  # Å that a distance in float32 may be off
    spans: NDArray[np.int64]  # (B, 3) bins in the first two directions and images in the third that an atom looks at

    @classmethod
    def of(cls, batch: Batch, cutoff: float) -> Bins:
        """Sort the atoms of a batch."""
        device = batch.positions.device
        B = len(batch)
        inverse = np.linalg.inv(batch.cells) if B else np.zeros((0, 3, 3))
        height = 1.0 / np.linalg.norm(inverse, axis=1)  # (B, 3): columns of the inverse are normals / height
        cells = torch.from_numpy(batch.cells).to(device)
        fractional = rows_times(batch.positions, of_atoms(torch.from_numpy(inverse).to(device), batch.structure))
        # Extent in a non-periodic direction; a periodic one spans its cell.
        extent = height
        if not batch.pbc.all():
            top = torch.zeros((B, 3), dtype=torch.float64, device=device)
            top.scatter_reduce_(0, batch.structure[:, None].expand(-1, 3), fractional, "amax")
            extent = np.where(batch.pbc, height, top.cpu().numpy() + 1e-6)
        shape = np.maximum(np.floor(extent * (np.array(_BINS_PER_CUTOFF) / cutoff)), 1.0)
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
        spans = 2 * reach + 1
        spans[:, 2] = -(-2 * reach[:, 2] // shape[:, 2]) + 1
        shape_t = torch.from_numpy(shape).to(device)
        first_t = torch.from_numpy(first).to(device)
        scale = torch.from_numpy(shape / np.where(batch.pbc, 1.0, extent)).to(device)
        own = of_atoms(shape_t, batch.structure)
        coordinates = torch.floor(fractional * of_atoms(scale, batch.structure)).to(torch.int64)
        coordinates = torch.minimum(coordinates.clamp_(min=0), own - 1)
        number = first_t[batch.structure] + (coordinates[:, 0] * own[:, 1] + coordinates[:, 1]) * own[:, 2]
        number += coordinates[:, 2]
        sorted_number, order = torch.sort(number, stable=True)
        bounds = torch.searchsorted(sorted_number, torch.arange(int(first[-1]) + 1, device=device))
        # Numbers up to twice the diagonal and some cutoffs are rounded to float32 before they are subtracted.
        diagonal = (np.linalg.norm(batch.cells, axis=2) * np.where(batch.pbc, 1.0, extent)).sum(axis=1)
        margin = 2.0**-20 * (2.0 * float(diagonal.max(initial=0.0)) + 8.0 * cutoff)
        return cls(
            batch, cutoff, shape_t, torch.from_numpy(reach).to(device), first_t[:-1], cells,
            torch.from_numpy(batch.pbc).to(device), coordinates, order, batch.positions[order].to(torch.float32),
            bounds, margin, spans,
        )  # fmt: skip

    def pairs(self, budget: int) -> Iterator[Pairs]:
        """All pairs closer than the cutoff, in pieces of consecutive centres.

        Args:
            budget: Candidates that may be held at a time (a single atom may exceed it).
        """
        for start, stop, span in self._runs():
            step = max(1, budget // int(np.prod(span)))
            for a in range(start, stop, step):
                yield from self._within(a, min(a + step, stop), span, budget)

    def _runs(self) -> list[tuple[int, int, NDArray[np.int64]]]:
        """Ranges of atoms, and what all of them look at: more than one of its atoms has to does no harm but costs."""
        if not self.batch.n_atoms:
            return []
        counts, spans = self.batch.counts, self.spans
        largest = spans.max(axis=0)
        if float(np.prod(largest)) * self.batch.n_atoms <= _MOST_WASTE * float(counts @ np.prod(spans, axis=1)):
            return [(0, self.batch.n_atoms, largest)]
        runs: list[tuple[int, int, NDArray[np.int64]]] = []
        asked = 0.0
        for b, span in enumerate(spans):
            start, stop = int(self.batch.offsets[b]), int(self.batch.offsets[b + 1])
            work = float(np.prod(span)) * (stop - start)
            if runs:
                since, _, widest = runs[-1]
                both = np.maximum(widest, span)
                if float(np.prod(both)) * (stop - since) <= _MOST_WASTE * (asked + work):
                    runs[-1] = (since, stop, both)
                    asked += work
                    continue
            runs.append((start, stop, span))
            asked = work
        return runs

    def _within(self, start: int, stop: int, span: NDArray[np.int64], budget: int) -> Iterator[Pairs]:
        """Pairs of the centres ``start`` to ``stop`` − 1, cut by their number of candidates."""
        device = self.order.device
        A = stop - start
        system = self.batch.structure[start:stop]
        shape, pbc, cells = (of_atoms(table, system) for table in (self.shape, self.pbc, self.cells))
        x, y, z = self.coordinates[start:stop].unbind(1)

        def wrapped(axis: int, at: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
            """Bins in reach in one direction, (A, width): their numbers, images, and whether there are such."""
            bins = shape[:, axis, None]
            target = at[:, None] + torch.arange(-(width // 2), width // 2 + 1, device=device)
            image = torch.div(target, bins, rounding_mode="floor")
            return target - image * bins, image, (image == 0) | pbc[:, axis, None]

        bin_x, image_x, there_x = wrapped(0, x, int(span[0]))
        bin_y, image_y, there_y = wrapped(1, y, int(span[1]))
        # In the third direction the bins in reach within each image, (A, images): from ``low`` to before ``high``.
        bins = shape[:, 2, None]
        reach = of_atoms(self.reach, system)[:, 2, None]
        lowest, highest = z[:, None] - reach, z[:, None] + reach
        image_z = torch.div(lowest, bins, rounding_mode="floor") + torch.arange(int(span[2]), device=device)
        low = torch.clamp(lowest - image_z * bins, min=0)
        high = torch.minimum(highest - image_z * bins + 1, bins).clamp_(min=0)
        there = (high > low) & ((image_z == 0) | pbc[:, 2, None])
        row = (
            self.first[system][:, None, None]
            + (bin_x[:, :, None] * shape[:, 1, None, None] + bin_y[:, None, :]) * shape[:, 2, None, None]
        )  # (A, X, Y)
        begin = self.bounds[row[..., None] + low[:, None, None]]  # (A, X, Y, images)
        count = self.bounds[row[..., None] + high[:, None, None]] - begin
        count *= (there_x[:, :, None] & there_y[:, None])[..., None] & there[:, None, None]
        kept = torch.nonzero(count.view(-1)).squeeze(1)
        i = torch.div(kept, int(np.prod(span)), rounding_mode="floor")
        # From the centre to where the neighbours' cell begins, as the centre sees it.
        flat = _shift(image_x, cells[:, None, 0])[:, :, None] + _shift(image_y, cells[:, None, 1])[:, None]
        origin = flat[..., None, :] + _shift(image_z, cells[:, None, 2])[:, None, None]
        origin -= self.batch.positions[start:stop, None, None, None]
        home = ((image_x == 0)[:, :, None] & (image_y == 0)[:, None])[..., None] & (image_z == 0)[:, None, None]
        origin, home = origin.view(-1, 3)[kept], home.view(-1)[kept]
        begin, per_atom, count = begin.view(-1)[kept], count.view(A, -1).sum(dim=1), count.view(-1)[kept]

        total = np.concatenate([[0], np.cumsum(per_atom.cpu().numpy())])
        if total[-1] <= budget:
            yield self._candidates(start, stop, int(total[-1]), i, count, begin, origin, home)
            return
        ends = torch.searchsorted(i, torch.arange(A, device=device), right=True).cpu().numpy()
        a = 0
        while a < A:
            b = max(a + 1, int(np.searchsorted(total, total[a] + budget, side="right")) - 1)
            rows = slice(int(ends[a - 1]) if a else 0, int(ends[b - 1]))
            yield self._candidates(
                start + a, start + b, int(total[b] - total[a]), i[rows] - a, count[rows], begin[rows], origin[rows],
                home[rows],
            )  # fmt: skip
            a = b

    def _candidates(
        self, start: int, stop: int, total: int, i: Tensor, count: Tensor, begin: Tensor, origin: Tensor, home: Tensor
    ) -> Pairs:
        """Measure the ``total`` candidates of centres ``start`` to ``stop`` − 1 and keep those in range, in order."""
        positions = self.batch.positions
        # Most are too far by much: they are looked at in half the bytes.
        small = torch.int32 if max(total, self.batch.n_atoms) < 2**31 else torch.int64
        before = torch.cumsum(count, 0).sub_(count)
        entry = torch.repeat_interleave(count.to(small), output_size=total)
        place = torch.arange(total, device=i.device, dtype=small) + (begin - before).to(small).index_select(0, entry)
        apart = self.rough.index_select(0, place) + origin.to(torch.float32).index_select(0, entry)
        around = torch.nonzero(squared_norm(apart) < (self.cutoff + self.margin) ** 2).squeeze(1)
        entry, place = entry.index_select(0, around), place.index_select(0, around)

        j, centre = self.order.index_select(0, place), i.index_select(0, entry)
        vector = positions.index_select(0, j) + origin.index_select(0, entry)
        square = squared_norm(vector)
        near = (square < self.cutoff**2) & ~(home.index_select(0, entry) & (j == centre + start))
        kept = torch.nonzero(near).squeeze(1)
        if not near.is_cuda:
            # For one pair of atoms the stretches come in the order of the images: a stable sort by neighbour is
            # enough. On a GPU, where sums have no order, the order of the bins does.
            key = centre * self.batch.n_atoms + j
            kept = kept[torch.sort(key[kept], stable=True).indices]
        return Pairs(
            start, stop, centre.index_select(0, kept), j.index_select(0, kept), vector.index_select(0, kept),
            torch.sqrt(square.index_select(0, kept)),
        )  # fmt: skip


def _shift(image: Tensor, vector: Tensor) -> Tensor:
    """Images times a cell vector, (A, w) and (A, 1, 3) → (A, w, 3)."""
    return image[..., None].to(torch.float64) * vector


def squared_norm(vectors: Tensor) -> Tensor:
    """|v|² of (P, 3), written out for the same reason."""
    x, y, z = vectors.unbind(dim=1)
    return x * x + y * y + z * z
