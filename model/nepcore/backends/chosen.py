"""One backend for each size class of structures; a structure's class follows from its own number of atoms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nepcore.structures import PER_ATOM, Predictions

from .measure import classes_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from nepcore.structures import Structures

    from .protocol import Backend


class ChosenBackend:
    """Sends every structure to the backend of its size class.

    Args:
        backends: By the name of the size class.
    """

    def __init__(self, backends: dict[str, Backend]) -> None:
        self.backends = backends

    @property
    def name(self) -> str:
        """Name of the only backend, or those of all classes."""
        names = {where: backend.name for where, backend in self.backends.items()}
        if len(set(names.values())) == 1:
            return next(iter(names.values()))
        return ", ".join(f"{name} ({where})" for where, name in names.items())

    def run(self, structures: Structures, properties: frozenset[str]) -> Generator[int, None, Predictions]:
        """See :class:`nepcore.backends.protocol.Backend`."""
        whose = classes_of(structures.counts)
        members: dict[int, tuple[Backend, list[int]]] = {}
        for i, name in enumerate(whose):
            backend = self.backends[name]
            members.setdefault(id(backend), (backend, []))[1].append(i)
        if len(members) <= 1:
            backend = next(iter(members.values()))[0] if members else next(iter(self.backends.values()))
            return (yield from backend.run(structures, properties))
        parts = []
        for backend, indices in members.values():
            chosen = np.array(indices, np.int64)
            parts.append((chosen, (yield from backend.run(structures.select(chosen), properties))))
        return _together(structures, parts)


def _together(structures: Structures, parts: list[tuple[np.ndarray, Predictions]]) -> Predictions:
    values: dict[str, np.ndarray] = {}
    errors = {}
    for chosen, part in parts:
        mask = np.zeros(len(structures), bool)
        mask[chosen] = True
        atoms = np.repeat(mask, structures.counts)
        for name, array in part.values.items():
            rows = structures.n_atoms if name in PER_ATOM else len(structures)
            if name not in values:
                values[name] = np.full((rows, *array.shape[1:]), np.nan, array.dtype)
            elif array.dtype.itemsize > values[name].dtype.itemsize:
                values[name] = values[name].astype(array.dtype)
            values[name][atoms if name in PER_ATOM else mask] = array
        errors.update({int(chosen[i]): e for i, e in part.errors.items()})
    return Predictions(structures.counts, values, structures.fully_periodic, errors)
