"""Forces of a served model in OpenMM, through its ``PythonForce``.

    >>> system.addForce(force(topology, "http://127.0.0.1:8000"))

OpenMM's units are converted here: nm, kJ/mol, kJ/mol/nm. Needs OpenMM 8.4 or newer.

If no complete answer comes, OpenMM raises ``OpenMMException`` with the client's sentence, and the integrator does not
make that step. OpenMM asks for no virial: its barostats compare energies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.structures import atomic_numbers

from .forcefield import as_client, check_elements, evaluator
from .units import KJ_MOL, NM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .forcefield import Evaluator
    from .http import Client


def force(
    elements: Any,
    url: str | Client,
    model: str | None = None,
    *,
    periodic: bool = True,
    particles: Sequence[int] | None = None,
    temperature: float | None = None,
    **options: Any,
) -> Any:
    """A ``PythonForce`` that asks a server.

    Args:
        elements: An ``openmm.app.Topology``, or the chemical symbol (or atomic number) of each particle.
        url: Address of the nepserve server, or a client.
        model: Name of the model; None for the client's, or the server's only one.
        periodic: Whether the system's box counts, in all three directions.
        particles: Indices of the particles that the model is for; None for all. Symbols may be those of these
            particles, or of all.
        temperature: K, for temperature models.
        options: ``api_key``, ``timeout``, ``retries``, ``dtype``, ``priority``,
            ``verify``, ``steps``: of the client. A serialised
            force holds the key.

    Raises:
        ValueError: A particle without element, an element that the model lacks, or options that cannot be used.
        NepserveError: The server does not answer, or has no such model.
    """
    import openmm

    client = as_client(url, options)
    numbers = _numbers(elements, particles)
    check_elements(client, model, numbers.tolist())
    computation = Computation(client, numbers, periodic, model, temperature)
    found = openmm.PythonForce(computation, {}, [] if particles is None else [int(i) for i in particles])
    found.setUsesPeriodicBoundaryConditions(periodic)
    found.setName("nepserve")
    return found


class Computation:
    """What OpenMM calls: a state in, energy (kJ/mol) and forces (kJ/mol/nm) out. It can be pickled."""

    def __init__(
        self, client: Client, numbers: NDArray[np.uint8], periodic: bool, model: str | None, temperature: float | None
    ) -> None:
        self._client = client
        self._numbers = numbers
        self._periodic = periodic
        self._model = model
        self._temperature = temperature
        self._field: Evaluator | None = None

    def __call__(self, state: Any) -> tuple[float, NDArray[np.float64]]:
        """Energy and forces of a state; raises what the client raises."""
        # The numbers behind the quantities: nm are OpenMM's own unit, and a conversion costs more than the sum.
        positions = np.asarray(state.getPositions(asNumpy=True)._value, np.float64) * NM  # noqa: SLF001
        if len(positions) != len(self._numbers):
            raise ValueError(
                f"the force was made for {len(self._numbers)} particles, and the system has {len(positions)}"
            )
        cell = np.zeros((3, 3))
        if self._periodic:
            cell = np.asarray(state.getPeriodicBoxVectors(asNumpy=True)._value, np.float64) * NM  # noqa: SLF001
        if self._field is None:
            self._field = evaluator(
                self._client, self._numbers, self._periodic, model=self._model, temperature=self._temperature
            )
        found = self._field.one(positions, cell)
        return found.energy / KJ_MOL, found.forces * (NM / KJ_MOL)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_field": None}


def _numbers(elements: Any, particles: Sequence[int] | None) -> NDArray[np.uint8]:
    """Atomic numbers of the particles that the model is for."""
    if hasattr(elements, "atoms"):
        atoms = list(elements.atoms())
        chosen = range(len(atoms)) if particles is None else particles
        for i in chosen:
            if atoms[i].element is None:
                raise ValueError(f"particle {i + 1} of the topology has no element; name the others as particles")
        return np.array([atoms[i].element.atomic_number for i in chosen], np.uint8)
    numbers = atomic_numbers(elements)
    if particles is None or len(particles) == len(numbers):
        return numbers
    if max(particles, default=0) >= len(numbers):
        raise ValueError(f"{len(numbers)} elements for {len(particles)} particles up to index {max(particles)}")
    return numbers[list(particles)]
