"""A structure on its way from JSON to the block: arrays of one structure, and how some of them are packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.errors import StructureError
from nepcore.structures import Structures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Item:
    """A structure as arrays.

    Attributes:
        numbers: (n,) uint8.
        positions: Å, (n, 3) float64.
        cell: Å, (3, 3) float64, vectors as rows; None without one.
        pbc: Periodic directions; None if it was left out.
        temperature: K, NaN if it was left out.
    """

    numbers: NDArray[np.uint8]
    positions: NDArray[np.float64]
    cell: NDArray[np.float64] | None
    pbc: list[bool] | None
    temperature: float


def missing(value: dict[str, Any], name: str, meaning: str) -> StructureError:
    """Complaint about a key that must be there."""
    what = "is null" if name in value else "is missing"
    return StructureError("missing_field", f"{name} {what}; wanted {meaning}", field=name)


NOTHING = Item(np.zeros(0, np.uint8), np.zeros((0, 3)), None, [False] * 3, np.nan)
"""Stands for a structure that could not be read: no atoms, so that nobody computes it by accident."""


def pack(items: Sequence[Item]) -> tuple[Structures, NDArray[np.bool_]]:
    """The block of some structures, and which of them left their periodicity to us, (B,) bool.

    A structure without ``pbc`` is periodic in all directions if it has a cell (not all zero), else in none.
    """
    if not items:
        return Structures.empty(), np.zeros(0, bool)
    zero = np.zeros((3, 3))
    cells = np.array([zero if item.cell is None else item.cell for item in items])
    assumed = np.array([item.pbc is None for item in items])
    given = np.array([item.pbc or [False] * 3 for item in items])
    has_cell = (cells != 0).any(axis=(1, 2))
    block = Structures(
        np.array([len(item.numbers) for item in items], np.int64),
        items[0].numbers if len(items) == 1 else np.concatenate([item.numbers for item in items]),
        items[0].positions if len(items) == 1 else np.concatenate([item.positions for item in items]),
        cells,
        np.where(assumed[:, None], has_cell[:, None], given),
        np.array([item.temperature for item in items]),
    )
    return block, assumed
