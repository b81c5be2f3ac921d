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
    chosen: NDArray[np.int64],
    structures: Structures,
    errors: Mapping[int, StructureError],
    properties: Sequence[str],
    descriptor_size: int,
) -> Predictions:
    """Results of all ``structures``.

    Args:
        found: Results of the structures at ``chosen``, in that order; None if there were none to evaluate.
        chosen: Indices of the structures that were evaluated.
        structures: The whole block.
        errors: What is wrong with the others, by index in the whole block.
        properties: Properties that were asked for.
        descriptor_size: Length of the model's descriptors, D.

    Returns:
        Rows of NaN for structures that failed, each of which is in ``errors``.
    """
    B, N = len(structures), structures.n_atoms
    offsets = np.concatenate([[0], np.cumsum(structures.counts)]).astype(np.int64)
    atoms = ragged_arange(offsets[chosen], structures.counts[chosen])
    values: dict[str, NDArray[Any]] = {}
    known = np.zeros(B, bool)
    all_errors = dict(errors)
    if found is not None:
        known[chosen] = found.stress_known
        all_errors.update({int(chosen[i]): error for i, error in found.errors.items()})
    for name in properties:
        array = None if found is None else found.values.get(name)
        if name in PER_ATOM:
            shape: tuple[int, ...] = tuple(descriptor_size if n is None else n for n in PER_ATOM[name])
            rows, where = N, atoms
        else:
            shape, rows, where = PER_STRUCTURE[name], B, chosen
        whole = np.full((rows, *shape), np.nan, np.float64 if array is None else array.dtype)
        if array is not None:
            whole[where] = array
        values[name] = whole
    return Predictions(structures.counts, values, known, all_errors)
