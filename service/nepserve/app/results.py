"""Putting the results of the structures that could be evaluated back among those that could not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.structures import PER_ATOM, PER_STRUCTURE, Predictions, ragged_arange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from nepcore.errors import StructureError
    from nepcore.structures import Structures


def scatter(
    found: Predictions | None,
    chosen: NDArray[np.int64] | None,
    structures: Structures,
    errors: Mapping[int, StructureError],
    properties: Sequence[str],
    descriptor_size: int,
) -> Predictions:
    """Results of all ``structures``.

    Args:
        found: Results of the structures at ``chosen``, in that order; None if there were none to evaluate.
        chosen: Indices of the structures that were evaluated; None for all.
        structures: The whole block.
        errors: What is wrong with the others, by index in the whole block.
        properties: Properties that were asked for.
        descriptor_size: Length of the model's descriptors, D.

    Returns:
        Rows of NaN for structures that failed, each of which is in ``errors``.
    """
    B, N = len(structures), structures.n_atoms
    offsets = np.concatenate([[0], np.cumsum(structures.counts)]).astype(np.int64)
    if chosen is None:
        chosen = np.arange(B)
    atoms = ragged_arange(offsets[chosen], structures.counts[chosen])
    values: dict[str, NDArray[Any]] = {}
    known = np.zeros(B, bool)
    all_errors = dict(errors)
    if found is not None:
        known[chosen] = found.stress_known
        all_errors.update({int(chosen[i]): error for i, error in found.errors.items()})
    for name in properties:
        rows, where = (N, atoms) if name in PER_ATOM else (B, chosen)
        if found is None:
            each = PER_ATOM[name] if name in PER_ATOM else PER_STRUCTURE[name]
            values[name] = np.full((rows, *(descriptor_size if n is None else n for n in each)), np.nan)
        elif name in found.values:
            array = found.values[name]
            values[name] = np.full((rows, *array.shape[1:]), np.nan, array.dtype)
            values[name][where] = array
    return Predictions(structures.counts, values, known, all_errors)
