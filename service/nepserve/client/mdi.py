"""An MDI engine whose forces come from a served model, for drivers of the MolSSI Driver Interface.

    >>> run("-role ENGINE -name NEP -method TCP -hostname localhost -port 8021", "http://127.0.0.1:8000")

Needs the package ``pymdi`` (the one named plainly ``mdi`` is something else). Numbers travel in atomic units. The
stress is that of LAMMPS' ``fix mdi/qm`` and ``mdi engine``: W/V, hartree/bohr³, positive in compression. Without a
``>CELL`` the structure is a molecule, and a ``<STRESS`` of it an error.

If no complete answer comes, the engine raises and ends without having sent anything: the driver's receive fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .forcefield import as_client, check_elements, evaluator
from .units import BOHR, HARTREE, stress

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from .forcefield import Evaluator, Forces
    from .http import Client

COMMANDS = (
    "<CELL", ">CELL", "<CELL_DISPL", ">CELL_DISPL", "<COORDS", ">COORDS", "<ELEMENTS", ">ELEMENTS", "<ENERGY",
    "<FORCES", "<NATOMS", ">NATOMS", "<PE", "<STRESS", "EXIT",
)  # fmt: skip
"""What the engine understands, at its only node ``@DEFAULT``."""


class DriverError(Exception):
    """The driver asked for something that cannot be known yet, or that the engine does not offer."""


def run(
    options: str,
    url: str | Client,
    numbers: ArrayLike | None = None,
    *,
    model: str | None = None,
    temperature: float | None = None,
    **client_options: Any,
) -> int:
    """Serve a driver until it says ``EXIT``.

    Args:
        options: MDI's own: ``-role ENGINE -name NEP -method TCP -hostname HOST -port PORT``, or ``-method MPI``.
        url: Address of the nepserve server, or a client.
        numbers: Atomic numbers, (n,), for drivers that do not send ``>ELEMENTS``.
        model: Name of the model; None for the client's, or the server's only one.
        temperature: K, for temperature models.
        client_options: ``api_key``, ``timeout``, ``retries``, ``dtype``, ``priority``,
            ``verify``, ``steps``: of the client.

    Returns:
        How many structures were evaluated.

    Raises:
        DriverError: See there.
        ValueError: The model lacks an element.
        NepserveError: The server gave no forces.
    """
    import mdi

    client = as_client(url, client_options)
    check_elements(client, model, [] if numbers is None else np.asarray(numbers).tolist())
    mdi.MDI_Init(options)
    mdi.MDI_Register_Node("@DEFAULT")
    for command in COMMANDS:
        mdi.MDI_Register_Command("@DEFAULT", command)
    engine = Engine(client, numbers, model, temperature)
    comm = mdi.MDI_Accept_Communicator()
    while True:
        command = mdi.MDI_Recv_Command(comm)
        if command == "EXIT":
            return engine.evaluations
        if command.startswith("@"):
            continue
        wanted = engine.wants(command)
        if wanted is None:
            sent = engine.answer(command)
            kind = mdi.MDI_INT if sent.dtype == np.int32 else mdi.MDI_DOUBLE
            mdi.MDI_Send(sent, sent.size, kind, comm)
        else:
            size, dtype = wanted
            received = np.zeros(size, dtype)
            mdi.MDI_Recv(size, mdi.MDI_INT if dtype == np.int32 else mdi.MDI_DOUBLE, comm, received)
            engine.take(command, received)


class Engine:
    """What the driver has told, and what follows from it; without a word about how it travels.

    Attributes:
        evaluations: How many structures were evaluated.
    """

    def __init__(self, client: Client, numbers: ArrayLike | None, model: str | None, temperature: float | None) -> None:
        self.evaluations = 0
        self._client = client
        self._model = model
        self._temperature = temperature
        self._numbers = None if numbers is None else np.array(numbers, np.int32)
        self._n = 0 if self._numbers is None else len(self._numbers)
        self._cell: NDArray[np.float64] | None = None
        self._origin = np.zeros(3)
        self._positions: NDArray[np.float64] | None = None
        self._field: Evaluator | None = None
        self._found: Forces | None = None

    def wants(self, command: str) -> tuple[int, type[np.int32 | np.float64]] | None:
        """Count and type of the numbers that come with a command; None for one that is answered.

        Raises:
            DriverError: An unknown command, or one whose count depends on atoms that nobody has counted yet.
        """
        if command not in COMMANDS:
            raise DriverError(f"the driver sent {command!r}; the engine knows {', '.join(COMMANDS)}")
        if command == ">NATOMS":
            return 1, np.int32
        if command == ">ELEMENTS":
            return self._atoms(command), np.int32
        if command == ">COORDS":
            return 3 * self._atoms(command), np.float64
        return {">CELL": (9, np.float64), ">CELL_DISPL": (3, np.float64)}.get(command)

    def take(self, command: str, values: NDArray[Any]) -> None:
        """Numbers that the driver sent; whatever was computed before is forgotten."""
        self._found = None
        if command == ">NATOMS":
            n = int(values[0])
            if n < 1:
                raise DriverError(f"the driver announced {n} atoms")
            if n != self._n:
                self._n, self._numbers, self._positions, self._field = n, None, None, None
        elif command == ">ELEMENTS":
            check_elements(self._client, self._model, values.tolist())
            self._numbers, self._field = values.copy(), None
        elif command == ">COORDS":
            self._positions = values.reshape(-1, 3) * BOHR
        elif command == ">CELL":
            if self._cell is None:
                self._field = None
            self._cell = values.reshape(3, 3) * BOHR
        else:
            self._origin = values * BOHR

    def answer(self, command: str) -> NDArray[Any]:
        """The numbers that a command asks for, in atomic units.

        Raises:
            DriverError: They are not known.
            NepserveError: The server gave no forces.
        """
        if command == "<NATOMS":
            return np.array([self._atoms(command)], np.int32)
        if command == "<ELEMENTS":
            return self._known(self._numbers, command, ">ELEMENTS")
        if command == "<COORDS":
            return np.asarray(self._known(self._positions, command, ">COORDS").ravel() / BOHR)
        if command == "<CELL":
            return np.asarray(self._known(self._cell, command, ">CELL").ravel() / BOHR)
        if command == "<CELL_DISPL":
            return self._origin / BOHR
        if command in {"<ENERGY", "<PE"}:
            return np.array([self._result(command).energy / HARTREE])
        if command == "<FORCES":
            return self._result(command).forces.ravel() * (BOHR / HARTREE)
        cell = self._known(self._cell, command, ">CELL")
        return np.asarray(-stress(self._result(command).virial, cell).ravel() * (BOHR**3 / HARTREE))

    def _result(self, command: str) -> Forces:
        if self._found is None:
            numbers = self._known(self._numbers, command, ">ELEMENTS")
            positions = self._known(self._positions, command, ">COORDS")
            if self._field is None:
                self._field = evaluator(
                    self._client, numbers, self._cell is not None, model=self._model, temperature=self._temperature
                )
            self._found = self._field.one(positions, np.zeros((3, 3)) if self._cell is None else self._cell)
            self.evaluations += 1
        return self._found

    def _atoms(self, command: str) -> int:
        if not self._n:
            raise DriverError(f"the driver sent {command} before >NATOMS, and the engine was started without species")
        return self._n

    @staticmethod
    def _known(value: NDArray[Any] | None, command: str, first: str) -> NDArray[Any]:
        if value is None:
            raise DriverError(f"the driver sent {command} before {first}")
        return value
