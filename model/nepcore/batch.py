"""A slice of packed structures as tensors on a device, in cells that are ready for the neighbour search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from .structures import Structures


@dataclass(frozen=True, eq=False)
class Batch:
    """Structures on a device: the same object for serving and for training.

    Attributes:
        counts: Atoms per structure, (B,) int64, on the host.
        offsets: First atom of each structure and, last, N, (B + 1,) int64, on the host.
        cells: Compact cells of the same lattices, (B, 3, 3) float64, on the host; vectors of non-periodic directions
            are replaced by unit vectors orthogonal to the periodic ones.
        pbc: (B, 3) bool, on the host.
        positions: Atoms folded into their cells, Å, (N, 3) float64. In non-periodic directions they are counted from
            the lowest atom, so that a structure far from the origin loses no digits and takes no space.
        types: Type index of each atom in the model, (N,) int64.
        structure: Structure of each atom, (N,) int64.
        temperatures: K, (B,) float64.
    """

    counts: NDArray[np.int64]
    offsets: NDArray[np.int64]
    cells: NDArray[np.float64]
    pbc: NDArray[np.bool_]
    positions: Tensor
    types: Tensor
    structure: Tensor
    temperatures: Tensor

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def n_atoms(self) -> int:
        """Atoms in the batch."""
        return len(self.positions)

    @classmethod
    def of(cls, structures: Structures, types: NDArray[np.int64], device: torch.device) -> Batch:
        """Put structures on a device.

        Args:
            structures: Finite, with independent cell vectors in periodic directions.
            types: Type index by atomic number, (256,), as :attr:`nepcore.admission.Admission.types`.
            device: Where the tensors go.
        """
        cells = complete_cells(compact_cells(structures.cells, structures.pbc), structures.pbc)
        system = np.repeat(np.arange(len(structures)), structures.counts)
        structure = torch.from_numpy(system).to(device)
        positions = torch.from_numpy(np.require(structures.positions, requirements="W")).to(device)
        return cls(
            structures.counts,
            structures.offsets,
            cells,
            structures.pbc,
            fold(positions, cells, structures.pbc, structure),
            torch.from_numpy(types[structures.numbers]).to(device),
            structure,
            torch.from_numpy(structures.temperatures.copy()).to(device),
        )


def compact_cells(cells: NDArray[np.float64], pbc: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Cells of the same lattices whose periodic vectors are not skewed, (B, 3, 3).

    A vector is shortened by whole multiples of another as long as that helps (Lagrange and Gauss). A strongly skewed
    cell is thin, and would ask for images far beyond those that matter.
    """
    out = cells.copy()
    for _ in range(100):
        before = out
        for a in range(3):
            for b in range(3):
                if a == b:
                    continue
                along = np.einsum("bi,bi->b", out[:, a], out[:, b])
                length = np.einsum("bi,bi->b", out[:, b], out[:, b])
                both = pbc[:, a] & pbc[:, b] & (np.abs(along) > (0.5 + 1e-6) * length)
                if both.any():
                    out = out.copy() if out is before else out
                    out[both, a] -= np.round(along[both] / length[both])[:, None] * out[both, b]
        if out is before:
            break
    return out


def complete_cells(cells: NDArray[np.float64], pbc: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Cells whose vectors in non-periodic directions are orthonormal to everything else, (B, 3, 3).

    The volume and the heights over the periodic faces are then those of the periodic part alone.
    """
    out = np.where(pbc[:, :, None], cells, 0.0)
    for d in range(3):
        e, f = (d + 1) % 3, (d + 2) % 3
        two = pbc[:, e] & pbc[:, f] & ~pbc[:, d]  # the one direction missing is the normal of the plane
        if two.any():
            normal = np.cross(out[two, e], out[two, f])
            out[two, d] = normal / np.linalg.norm(normal, axis=1, keepdims=True)
        one = pbc[:, d] & ~pbc[:, e] & ~pbc[:, f]  # two directions missing: any orthonormal pair will do
        if one.any():
            axis = out[one, d] / np.linalg.norm(out[one, d], axis=1, keepdims=True)
            helper = np.eye(3)[np.argmin(np.abs(axis), axis=1)]
            first = np.cross(axis, helper)
            first /= np.linalg.norm(first, axis=1, keepdims=True)
            out[one, e] = first
            out[one, f] = np.cross(axis, first)
    out[~pbc.any(axis=1)] = np.eye(3)
    return out


def fold(positions: Tensor, cells: NDArray[np.float64], pbc: NDArray[np.bool_], structure: Tensor) -> Tensor:
    """Positions moved by lattice vectors into their cells, in float64.

    In non-periodic directions they are moved so that the lowest atom is at zero.

    Args:
        positions: (N, 3) float64.
        cells: (B, 3, 3), as of :func:`complete_cells`.
        pbc: (B, 3).
        structure: Structure of each atom, (N,).

    Returns:
        (N, 3).
    """
    if not len(positions):
        return positions.clone()
    own, inverse, periodic = (
        of_atoms(torch.from_numpy(table).to(positions.device), structure)
        for table in (cells, np.linalg.inv(cells), pbc)
    )
    fractional = rows_times(positions, inverse)
    moved = torch.floor(fractional)
    if not pbc.all():
        lowest = torch.full((len(cells), 3), torch.inf, dtype=torch.float64, device=positions.device)
        lowest.scatter_reduce_(0, structure[:, None].expand(-1, 3), fractional, "amin")
        moved = torch.where(periodic, moved, of_atoms(lowest, structure))
    return positions - rows_times(moved, own)


def of_atoms(table: Tensor, structure: Tensor) -> Tensor:
    """Rows of a table of structures, one for each atom: (B, ...) → (A, ...); not written down where B is 1."""
    return table.expand(len(structure), *table.shape[1:]) if len(table) == 1 else table[structure]


def rows_times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Row vectors times their own matrices, (P, 3) and (P, 3, 3) → (P, 3).

    Written out: a reduction's order of summation, and so its last bit, may depend on the number of rows.
    """
    return rows[:, 0, None] * matrices[:, 0] + rows[:, 1, None] * matrices[:, 1] + rows[:, 2, None] * matrices[:, 2]
