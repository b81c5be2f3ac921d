"""What an MD code asks of a served model, step after step: forces of the same atoms in new places.

The bridges to MD codes know nothing of the way to the server but :class:`Evaluator`. Each of them makes one with
:func:`evaluator` for its atoms, and a new one when species, their order or periodic directions change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nepcore.elements import symbol_of
from nepcore.structures import Structures

from .http import Client
from .session import Session
from .ways import Absent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from .replicas import Servers


@dataclass(frozen=True, eq=False)
class Forces:
    """Result of one step; the arrays are the caller's own.

    Attributes:
        energy: eV.
        forces: eV/Å, (n, 3).
        virial: W = −∂E/∂ε, eV, (3, 3).
        energies: Share of each atom, eV, (n,); None if not asked for.
        virials: Share of each atom, eV, (n, 3, 3), row the direction of the pair vector, column that of the gradient;
            None if not asked for.
    """

    energy: float
    forces: NDArray[np.float64]
    virial: NDArray[np.float64]
    energies: NDArray[np.float64] | None = None
    virials: NDArray[np.float64] | None = None


class Evaluator(Protocol):
    """The forces of fixed species, in fixed periodic directions, at any positions.

    Every method raises :class:`~nepserve.client.NepserveError` where no complete and finite result came.
    """

    def one(self, positions: NDArray[np.float64], cell: NDArray[np.float64], *, per_atom: bool | None = None) -> Forces:
        """The result at ``positions`` (n, 3), wrapped or not, in ``cell`` (3, 3) of rows; Å.

        ``per_atom`` says whether this step needs ``energies`` and ``virials``; None leaves it to the evaluator.
        """
        ...

    def many(self, positions: NDArray[np.float64], cells: NDArray[np.float64]) -> list[Forces]:
        """The results at ``positions`` (B, n, 3) in ``cells`` (B, 3, 3) from one request; Å."""
        ...

    def close(self) -> None:
        """Let go of what is kept for these atoms."""
        ...


class OneShot:
    """An evaluator whose every step is a request that says everything."""

    def __init__(
        self,
        client: Client,
        numbers: NDArray[np.uint8],
        pbc: NDArray[np.bool_],
        model: str | None,
        temperature: float | None,
        per_atom: bool,
    ) -> None:
        self._client = client
        self._numbers = np.array(numbers, np.uint8)
        self._pbc = np.array(pbc, bool)
        self._model = model
        self._temperature = np.nan if temperature is None else float(temperature)
        self._per_atom = per_atom

    def one(self, positions: NDArray[np.float64], cell: NDArray[np.float64], *, per_atom: bool | None = None) -> Forces:
        """See :class:`Evaluator`."""
        block = self._block(positions[None], cell[None])
        names = _names(self._per_atom if per_atom is None else per_atom)
        return _forces(self._client.evaluate(block, names, model=self._model).values)

    def many(self, positions: NDArray[np.float64], cells: NDArray[np.float64]) -> list[Forces]:
        """See :class:`Evaluator`."""
        if len(positions) == 1:
            return [self.one(positions[0], cells[0])]
        block = self._block(positions, cells)
        # One body, unless the server cannot hold that many atoms.
        names = _names(self._per_atom)
        found = self._client.evaluate_many(block, names, model=self._model, chunk_atoms=max(block.n_atoms, 1))
        return [_forces(found.view(i).values) for i in range(len(found))]

    def close(self) -> None:
        """See :class:`Evaluator`: there is nothing to let go of."""

    def _block(self, positions: NDArray[np.float64], cells: NDArray[np.float64]) -> Structures:
        B, n = len(positions), len(self._numbers)
        return Structures(
            np.full(B, n, np.int64),
            self._numbers if B == 1 else np.tile(self._numbers, B),
            np.ascontiguousarray(positions, np.float64).reshape(B * n, 3),
            np.ascontiguousarray(cells, np.float64),
            np.tile(self._pbc, (B, 1)),
            np.full(B, self._temperature),
        )


class InSession:
    """An evaluator whose steps send positions and cell alone, in a session of the server.

    A server that knows no sessions is sent everything with each step.
    """

    def __init__(
        self,
        client: Client,
        numbers: NDArray[np.uint8],
        pbc: NDArray[np.bool_],
        model: str | None,
        temperature: float | None,
        per_atom: bool,
    ) -> None:
        self._whole = OneShot(client, numbers, pbc, model, temperature, per_atom)
        self._per_atom = per_atom
        self._session = Session(client, numbers, pbc, model, temperature)

    def one(self, positions: NDArray[np.float64], cell: NDArray[np.float64], *, per_atom: bool | None = None) -> Forces:
        """See :class:`Evaluator`."""
        try:
            return _forces(
                self._session.step(positions, cell, _names(self._per_atom if per_atom is None else per_atom))
            )
        except Absent:
            return self._whole.one(positions, cell, per_atom=per_atom)

    def many(self, positions: NDArray[np.float64], cells: NDArray[np.float64]) -> list[Forces]:
        """See :class:`Evaluator`; several structures travel as one request, outside the session."""
        if len(positions) == 1:
            return [self.one(positions[0], cells[0])]
        return self._whole.many(positions, cells)

    def close(self) -> None:
        """See :class:`Evaluator`."""
        self._session.close()


def evaluator(
    client: Client,
    numbers: ArrayLike,
    pbc: bool | Sequence[bool] | NDArray[np.bool_] = True,
    *,
    model: str | None = None,
    temperature: float | None = None,
    per_atom: bool = False,
) -> Evaluator:
    """The way to the forces of these atoms.

    Args:
        client: Client of the server.
        numbers: Atomic numbers, (n,).
        pbc: Periodic directions.
        model: Name of the model; None for the client's, or the server's only one.
        temperature: K, for temperature models.
        per_atom: Whether results have ``energies`` and ``virials``.
    """
    z = np.asarray(numbers, np.uint8)
    directions = np.broadcast_to(np.asarray(pbc, bool), 3)
    return InSession(client, z, directions, model, temperature, per_atom)


def as_client(url: Servers | Sequence[str] | Client, options: dict[str, Any]) -> Client:
    """A client of ``url`` with ``options``, or the client that was given.

    Raises:
        ValueError: Options for a client that stands, or options that cannot be used.
    """
    if isinstance(url, Client):
        if options:
            raise ValueError(f"{', '.join(options)}: given where the client is made, not to what uses it")
        return url
    return Client(url, **options)


def check_elements(client: Client, model: str | None, numbers: Iterable[int]) -> None:
    """Make sure, before a simulation starts, that the server is there and its model has these elements.

    Raises:
        ValueError: The model lacks one, or the server has several models and none was named.
        NepserveError: The server does not answer, or has no such model.
    """
    name = model or client.model_name
    if name is None:
        models = client.models()
        if len(models) != 1:
            names = ", ".join(str(entry.get("name")) for entry in models) or "none"
            raise ValueError(f"which model of {client.url}? Name one; it has: {names}")
        found = models[0]
    else:
        found = client.model(name)
    elements = found.get("elements")
    if isinstance(elements, list):
        missing = sorted({symbol_of(int(z)) for z in numbers} - set(elements))
        if missing:
            raise ValueError(
                f"model {found.get('name', name)!r} of {client.url} has no {', '.join(missing)}; "
                f"it has {', '.join(elements)}"
            )


def _names(per_atom: bool) -> tuple[str, ...]:
    return ("energy", "forces", "virial", "energies", "virials") if per_atom else ("energy", "forces", "virial")


def _forces(values: Mapping[str, Any]) -> Forces:
    energies, virials = values.get("energies"), values.get("virials")
    return Forces(
        float(values["energy"]),
        np.asarray(values["forces"], np.float64),
        np.asarray(values["virial"], np.float64),
        None if energies is None else np.asarray(energies, np.float64),
        None if virials is None else np.asarray(virials, np.float64),
    )
