"""The structure-of-arrays form that the binary formats share: arrays checked against the announced counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.structures import Structures

from .request import WireError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .request import Limits

FIELDS = ("n_atoms", "numbers", "positions", "cell", "pbc", "temperature")
"""Arrays of a block, by name."""


def check_count(counts: NDArray[np.integer[Any]], limits: Limits) -> int:
    """Atoms that ``n_atoms`` announces, within the limits.

    Raises:
        WireError: ``bad_value`` for a negative count, ``too_many_structures``, ``too_large``.
    """
    if len(counts) > limits.max_structures:
        raise too_many_structures(len(counts), limits)
    if len(counts) == 1:
        lowest = total = int(counts[0])
    else:
        lowest = int(counts.min(initial=0))
        total = int(counts.sum(dtype=np.int64))
    if lowest < 0:
        i = int(counts.argmin())
        raise WireError(
            None, "bad_value", f"n_atoms of structure {i + 1} is {counts[i]}; it must not be negative",
            field="n_atoms", structure=i,
        )  # fmt: skip
    if total > limits.max_atoms:
        raise too_many_atoms(total, limits)
    return total


def too_many_structures(found: int, limits: Limits, *, more: bool = False) -> WireError:
    """Refusal of a request that carries too many structures; ``more`` if they were not counted to the end."""
    return WireError(
        None, "too_many_structures",
        f"{'at least ' * more}{found:,} structures; one request may carry {limits.max_structures:,}",
        max_structures=limits.max_structures,
    )  # fmt: skip


def too_many_atoms(found: int, limits: Limits, *, more: bool = False) -> WireError:
    """Refusal of a request that carries too many atoms; ``more`` if they were not counted to the end."""
    return WireError(
        None, "too_large", f"{'at least ' * more}{found:,} atoms; one request may carry {limits.max_atoms:,}",
        max_atoms=limits.max_atoms,
    )  # fmt: skip


def assemble(
    counts: NDArray[np.integer[Any]] | None,
    numbers: NDArray[np.uint8],
    positions: NDArray[np.floating[Any]],
    cell: NDArray[np.floating[Any]] | None,
    pbc: NDArray[np.uint8] | None,
    temperature: NDArray[np.floating[Any]] | None,
    limits: Limits,
) -> tuple[Structures, NDArray[np.bool_] | None]:
    """Pack arrays of any shape but of the right size; views stay views where the types allow it.

    Args:
        counts: Atoms per structure, (B,); None for one structure of all the atoms there are.
        numbers: Atomic numbers, N of them.
        positions: 3 N numbers, Å, row after row.
        cell: 9 B numbers, Å, row after row; None if there are only molecules.
        pbc: 3 B flags, 0 or 1; None for periodic where a cell is given (not all zero).
        temperature: B numbers, K, NaN where there is none.
        limits: How much is taken.

    Returns:
        The block, and the structures whose periodicity was assumed, (B,) bool; None if none was.

    Raises:
        WireError: ``bad_shape`` saying which array has how many entries and how many were announced.
    """
    if counts is None:
        total = numbers.size
        if total > limits.max_atoms:
            raise too_many_atoms(total, limits)
        counts = np.array([total], np.int64)
    else:
        total = check_count(counts, limits)
        if numbers.size != total:
            raise _wrong_size("numbers", numbers, total, f"n_atoms announces {total} atoms")
    B = len(counts)
    if positions.size != 3 * total:
        raise _wrong_size("positions", positions, 3 * total, f"there are {total} atoms, shape ({total}, 3)")
    if cell is None:
        box = np.zeros((B, 3, 3))
    else:
        if cell.size != 9 * B:
            raise _wrong_size("cell", cell, 9 * B, f"there are {B} structures, shape ({B}, 3, 3)")
        box = _as_float64(cell).reshape(B, 3, 3)
    assumed = None
    if pbc is None:
        periodic = np.repeat((box != 0).any(axis=(1, 2))[:, None], 3, axis=1)
        assumed = np.ones(B, bool)
    else:
        if pbc.size != 3 * B:
            raise _wrong_size("pbc", pbc, 3 * B, f"there are {B} structures, shape ({B}, 3)")
        # Far cheaper than a reduction for the few bytes there usually are.
        if pbc.tobytes().translate(None, b"\0\1"):
            at = int(np.flatnonzero(pbc.reshape(-1) > 1)[0])
            raise WireError(
                None, "bad_value", f"pbc of structure {at // 3 + 1} has the entry {pbc.reshape(-1)[at]}; wanted 0 or 1",
                field="pbc", structure=at // 3,
            )  # fmt: skip
        periodic = pbc.view(np.bool_).reshape(B, 3)
    if temperature is None:
        heat = np.full(B, np.nan)
    else:
        if temperature.size != B:
            raise _wrong_size("temperature", temperature, B, f"there are {B} structures")
        heat = _as_float64(temperature).reshape(B)
    block = Structures(
        counts.astype(np.int64, copy=False),
        numbers.reshape(total),
        _as_float64(positions).reshape(total, 3),
        box,
        periodic,
        heat,
    )
    return block, assumed


def _as_float64(array: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    if array.dtype == np.float64:
        return array.astype(np.float64, copy=False)
    # A signalling NaN would make the conversion warn; whoever checks the numbers finds it.
    with np.errstate(invalid="ignore"):
        return array.astype(np.float64)


def _wrong_size(name: str, found: NDArray[Any], wanted: int, reason: str) -> WireError:
    return WireError(None, "bad_shape", f"{name} has {found.size} entries; wanted {wanted}: {reason}", field=name)
