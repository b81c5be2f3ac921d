"""A session: the same atoms at other places, step after step.

    >>> session = Session(client, numbers, pbc=True)
    >>> values = session.step(positions, cell, ("energy", "forces"))

Nothing is sent before the first step. The server may forget a session at any time; it is then opened again, unseen.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from nepserve.wire import frame
from nepserve.wire.request import WireError

from .errors import InvalidAnswer
from .ways import Absent, way_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from .http import Client
    from .ways import Way


class Session:
    """Steps of fixed species in fixed periodic directions. For one thread at a time; it can be pickled and forked.

    Args:
        client: Client of the server; its ``steps`` say how the steps travel.
        numbers: Atomic numbers, (n,).
        pbc: Periodic directions.
        model: Name of the model; None for the client's, or the server's only one.
        temperature: K, for temperature models.
    """

    def __init__(
        self,
        client: Client,
        numbers: ArrayLike,
        pbc: bool | Sequence[bool] | NDArray[np.bool_] = True,
        model: str | None = None,
        temperature: float | None = None,
    ) -> None:
        self._client = client
        self._numbers = np.array(numbers, np.uint8)
        self._pbc = np.broadcast_to(np.asarray(pbc, bool), 3).copy()
        self._model = model or client.model_name
        self._temperature = temperature
        self._sequence = 0
        self._way: Way | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_way": None}

    def step(
        self, positions: NDArray[np.floating[Any]], cell: NDArray[np.float64], properties: Sequence[str]
    ) -> dict[str, Any]:
        """Values by property: a float for the energy, arrays of float64 for the others, the caller's own.

        Args:
            positions: Å, (n, 3), wrapped or not.
            cell: Vectors as rows, Å, (3, 3).
            properties: Out of :data:`nepserve.wire.frame.PROPERTIES`; energy and forces come always, a stress only if
                it exists.

        Raises:
            Absent: The server is older than sessions.
            ValueError: Positions of another number of atoms.
            NepserveError: No complete and finite result came.
        """
        client = self._client
        n = len(self._numbers)
        if positions.shape != (n, 3):
            raise ValueError(f"positions must have shape ({n}, 3), not {positions.shape}")
        if not client.sessions and client.place.kind == "http":
            raise Absent
        flags = frame.flags_of(properties) | (frame.SINGLE if client.dtype == "float32" else 0)
        self._sequence += 1
        if self._way is None:
            self._way = way_of(client, self._opening(cell))
        body = frame.pack_request(positions, cell, flags, self._sequence)
        try:
            head, payload = self._way.step(body)
        except Absent:
            client.sessions = False
            raise
        try:
            values = frame.read_result(head, payload, n, flags, self._sequence)
        except WireError as error:
            raise InvalidAnswer(
                f"{client.url} answered, but not with the results asked for: {error}. Nothing of the answer is used.",
                url=client.url,
            ) from error
        self._check(values)
        return values

    def close(self) -> None:
        """Let go of the session; a later step opens it again."""
        way, self._way = self._way, None
        if way is not None:
            way.close()

    def _opening(self, cell: NDArray[np.float64]) -> dict[str, Any]:
        opening: dict[str, Any] = {"numbers": self._numbers.tolist(), "pbc": self._pbc.tolist()}
        if self._pbc.any() or cell.any():
            opening["cell"] = np.asarray(cell, np.float64).tolist()
        if self._model is not None:
            opening["model"] = self._model
        if self._temperature is not None:
            opening["temperature"] = float(self._temperature)
        return opening

    def _check(self, values: dict[str, Any]) -> None:
        """Make sure that all numbers are finite: a force that is not must stop the simulation."""
        for name, array in values.items():
            total = array if name == "energy" else float(np.add.reduce(array, axis=None))
            # What is not finite survives every sum; a sum may also overflow, so the numbers have the last word.
            if math.isfinite(total) or (name != "energy" and np.isfinite(array).all()):
                continue
            where = ""
            if name not in {"energy", "stress", "virial"}:
                bad = ~np.isfinite(array.reshape(len(array), -1)).all(axis=1)
                where = f" of atom {int(np.flatnonzero(bad)[0]) + 1}"
            raise InvalidAnswer(
                f"{self._client.url} answered, but with {name}{where} not finite. Nothing of the answer is used.",
                url=self._client.url,
            )
