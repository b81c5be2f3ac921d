"""Neighbour lists for the kernels of the fused backend, made by :mod:`nepcore.neighbors` on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from nepcore.backends.fused.lists import Lists
from nepcore.batch import Batch
from nepcore.neighbors import Bins

if TYPE_CHECKING:
    from nepcore import Structures
    from nepcore.files.nep_txt import NepFile

_STRETCH = 64.0
"""A direction that is not periodic is described by a cell vector of that length, Å."""


def lists_of(
    structures: Structures,
    model: NepFile,
    present: list[int],
    device: torch.device,
    *,
    images: bool = True,
    spare: int = 0,
    skin: float = 0.0,
) -> Lists:
    """Lists of all pairs within the model's largest cutoffs and a skin; ``spare`` rows behind the last atom.

    Without images, every difference must wrap to the nearest image: cells wider than two cutoffs.
    """
    batch = Batch.of(structures, model.admission.types, torch.device("cpu"))
    N, S = batch.n_atoms, len(batch)
    place = np.zeros(len(model.elements), np.int32)
    place[present] = np.arange(len(present))
    element = place[batch.types.numpy()]
    structure = batch.structure.numpy()
    cells = np.where(batch.pbc[:, :, None], batch.cells, _STRETCH * batch.cells)
    inverse = np.linalg.inv(cells)
    bits = 28 if images else 32
    fraction = np.einsum("ni,nij->nj", batch.positions.numpy(), inverse[structure])
    position = np.rint(fraction * 2.0**bits).astype(np.int64).astype(np.uint32).view(np.int32)

    columns: list[list[np.ndarray]] = [[], [], [], []]
    for pairs in Bins.of(batch, float(model.cutoff_radial.max()) + skin).pairs(1 << 20):
        for column, value in zip(columns, (pairs.i + pairs.start, pairs.j, pairs.vector, pairs.distance), strict=True):
            column.append(value.numpy())
    i, j, vector, distance = (np.concatenate(c) for c in columns)
    home = np.einsum("pi,pij->pj", batch.positions.numpy()[j] - batch.positions.numpy()[i], inverse[structure[i]])
    image = np.rint(np.einsum("pi,pij->pj", vector, inverse[structure[i]]) - home).astype(np.int64)  # (P, 3)
    order = np.lexsort((*image.T[::-1], j, element[j], i))
    i, j, image, distance = i[order], j[order], image[order], distance[order]

    near = distance < float(model.cutoff_angular.max()) + skin
    radial = _rows(i, j, image, N, spare)
    angular = _rows(i[near], j[near], image[near], N, spare)
    reverse = _reverse(i[near], j[near], image[near], angular[0].shape[1])
    reverse = _table(i[near], reverse, N, spare)
    rows = np.zeros((N + spare, 4), np.int32)
    rows[:N, :3], rows[:N, 3] = position, element
    units = np.full((S, 3), 2**bits if images else 0, np.int64).astype(np.int32)
    owner = np.concatenate([structure, np.full(spare, -1)])

    def tensor(value: np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(value)).to(device=device, dtype=dtype)

    return Lists(
        images, tensor(rows), tensor(owner), tensor((cells * 2.0**-bits).reshape(S, 9), torch.float32), tensor(units),
        tensor(batch.temperatures.numpy(), torch.float32),
        tensor(radial[0]), tensor(radial[1]), tensor(radial[2]) if images else None,
        tensor(angular[0]), tensor(angular[1]), tensor(angular[2]) if images else None, tensor(reverse),
    )  # fmt: skip


def _slots(i: np.ndarray) -> np.ndarray:
    """Place of each pair among those of its centre; pairs are sorted by centre."""
    start = np.concatenate([[0], np.flatnonzero(np.diff(i)) + 1]) if len(i) else np.zeros(0, np.int64)
    return np.arange(len(i)) - np.repeat(start, np.diff(np.append(start, len(i))))


def _table(i: np.ndarray, value: np.ndarray, n: int, spare: int) -> np.ndarray:
    slot = _slots(i)
    out = np.zeros((n + spare, int(slot.max() + 3) if len(slot) else 1), np.int64)
    out[i, slot] = value
    return out


def _rows(
    i: np.ndarray, j: np.ndarray, image: np.ndarray, n: int, spare: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Index, count and image code by atom and slot."""
    count = np.bincount(i, minlength=n + spare)
    code = (image & 1023) @ np.array([1, 1 << 10, 1 << 20])
    return _table(i, j, n, spare), count, _table(i, code, n, spare)


def _reverse(i: np.ndarray, j: np.ndarray, image: np.ndarray, width: int) -> np.ndarray:
    """Flat position (j · width + slot) of the pair from j to i."""
    flat = i * width + _slots(i)
    forth = np.lexsort((*image.T, j, i))
    back = np.lexsort((*-image.T, i, j))
    out = np.empty(len(i), np.int64)
    out[back] = flat[forth]
    return out
