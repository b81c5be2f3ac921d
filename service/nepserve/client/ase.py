"""An ASE calculator whose energies and forces come from a nepserve server.

    >>> from nepserve.client.ase import NEPCalculator
    >>> atoms.calc = NEPCalculator("http://127.0.0.1:8000")
    >>> atoms.get_forces()

Units are ASE's: eV, Å, eV/Å, eV/Å³.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from ase.calculators.calculator import (
    Calculator,
    CalculatorSetupError,
    PropertyNotImplementedError,
    all_changes,
    all_properties,
)
from ase.outputs import Properties

from nepcore.structures import DEFAULT_PROPERTIES, PROPERTIES
from nepserve.wire import frame

from .bodies import check_properties
from .http import Client
from .session import Session
from .ways import Absent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ase import Atoms

    from nepcore.structures import Prediction

    from .replicas import Servers


class NEPCalculator(Calculator):
    """Energies, forces and stresses of a served model, for everything that ASE can do with a calculator.

    A request is sent when, and only when, something has changed that the result depends on: positions, cell, periodic
    directions, species, order or number of atoms, ``atoms.info["temperature"]`` (K, for temperature models), or a
    property is asked for that has not been computed. Each request asks for everything known so far, so that what
    ``results`` holds is of one answer.

    From the second request about the same atoms on, steps go through a session of the server: positions and cell
    travel alone. Nothing else changes; a session that is lost is opened again.

    If no complete answer comes, the error of :mod:`nepserve.client.errors` is raised and ``results`` is empty: a
    simulation stops, it never goes on with old or partial forces. A server that restarts is waited for within the
    ``timeout``.

    ``results`` has ``energy`` and ``free_energy`` (equal, a float, eV), ``forces`` (N, 3) eV/Å and, with three
    periodic directions, ``stress`` (6,) eV/Å³ in ASE's sign and order (tension positive, xx yy zz yz xz xy). On
    request, by ``calc.get_property(name, atoms)`` or with ``properties`` below: ``energies`` (N,) eV; ``virial``
    (3, 3) eV, W = −V σ; ``virials`` (N, 3, 3) eV, whose sum is ``virial``: ``virials[j, r, c]`` is the part of atom
    j, row r the direction of the pair vector, column c that of the gradient, booked on the neighbour;
    ``descriptors`` (N, D).

    The calculator can be pickled and copied deeply. Like every ASE calculator it belongs to one thread at a time; the
    ``client`` under it serves any number.

    Attributes:
        client: The client under it.
    """

    # Shared by all objects, as ASE declares them.
    implemented_properties = list(PROPERTIES)  # noqa: RUF012
    default_parameters = {"model": None, "properties": DEFAULT_PROPERTIES}  # noqa: RUF012
    discard_results_on_any_change = True

    def __init__(
        self,
        url: Servers | Sequence[str] | Client,
        model: str | None = None,
        *,
        properties: Iterable[str] = DEFAULT_PROPERTIES,
        atoms: Atoms | None = None,
        **options: Any,
    ) -> None:
        """Prepare a calculator; nothing is sent yet.

        Args:
            url: Address of the server, or of several (see :class:`nepserve.client.Client`), or a client.
            model: Name of the model; None for the client's, or the server's only one.
            properties: What every request asks for. More is fetched when it is needed.
            atoms: An ``Atoms`` to attach the calculator to.
            options: ``api_key``, ``timeout``, ``retries``, ``dtype``, ``priority``,
                ``verify``, ``steps``: of the client.

        Raises:
            ValueError: An argument that cannot be used.
        """
        if isinstance(url, Client):
            if options:
                raise ValueError(f"{', '.join(options)}: given to the client, not to its calculator")
            self.client = url
        else:
            self.client = Client(url, **options)
        # Results fetched ahead by calculate_many, until a structure comes that is not among them.
        self._ahead: dict[tuple[Any, ...], dict[str, Any]] = {}
        # What atoms the last request was about, and their session once there was a second one.
        self._kind: tuple[Any, ...] | None = None
        self._session: Session | None = None
        super().__init__(model=model, properties=check_properties(properties), atoms=atoms)

    def _get_name(self) -> str:
        return "nep"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.client.url!r}, model={self.parameters['model']!r})"

    def set(self, **kwargs: Any) -> dict[str, Any]:
        """Change ``model`` or ``properties``; results are forgotten.

        Raises:
            TypeError: Another parameter.
        """
        unknown = kwargs.keys() - self.default_parameters.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no parameter {min(unknown)!r}; it has: model, properties")
        if "properties" in kwargs:
            kwargs["properties"] = check_properties(kwargs["properties"])
        changed: dict[str, Any] = super().set(**kwargs)
        if changed:
            self._ahead = {}
        return changed

    def todict(self, skip_default: bool = True) -> dict[str, Any]:
        """Parameters and address, for databases; no key."""
        found: dict[str, Any] = super().todict(skip_default=skip_default)
        return {**found, "url": self.client.url}

    def check_state(self, atoms: Atoms, tol: float = 0.0) -> list[str]:  # noqa: ARG002 - ASE's signature
        """What differs from the structure that ``results`` are of; exactly, whatever ``tol`` is."""
        return list(all_changes) if self.atoms is None else _differences(self.atoms, atoms)

    def get_property(self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True) -> Any:
        """A property of ``atoms``, the caller's own copy.

        Raises:
            PropertyNotImplementedError: No such property; or the stress of a structure that is not periodic in three
                directions, which does not exist.
            NepserveError: No complete answer came.
        """
        structure = self.atoms if atoms is None else atoms
        if name == "stress" and allow_calculation and structure is not None and not structure.pbc.all():
            raise PropertyNotImplementedError("a structure that is not periodic in three directions has no stress")
        return super().get_property(name, atoms, allow_calculation)

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(all_changes),  # noqa: ARG002 - ASE's signature
    ) -> None:
        """Fetch ``properties``, and those known or asked for in general; ``results`` is replaced as a whole.

        Raises:
            CalculatorSetupError: There is no structure.
            NepserveError: No complete answer came; ``results`` is empty then.
        """
        structure = self.atoms if atoms is None else atoms
        if structure is None:
            raise CalculatorSetupError("there is no structure to calculate")
        names = self._names([*properties, *self.results], structure)
        self.reset()
        found = self._from_ahead(structure, names)
        if found is None:
            self._ahead = {}
            found = self._fetch(structure, names)
        self._take(structure, found)

    def evaluate_many(
        self,
        images: Iterable[Atoms],
        properties: Iterable[str] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Results of any number of structures in as few requests as they fit in: one dictionary for each.

        ``results`` and the structures' own calculators are left alone. Suits displaced supercells of phonon codes,
        data sets, and scans.

        Args:
            images: The structures; they need no calculator.
            properties: Names; left out, those of the calculator.
            progress: Called with (structures done, structures in all) now and then.

        Raises:
            NepserveError: One could not be evaluated (``StructureRejected``, whose ``index`` says which), or no
                complete answer came.
        """
        names = self.parameters["properties"] if properties is None else check_properties(properties)
        found = self.client.evaluate_many(images, names, model=self.parameters["model"], progress=progress)
        return [_results(found.view(i)) for i in range(len(found))]

    def calculate_many(self, images: Iterable[Atoms]) -> None:
        """Fetch the results of all ``images`` in one go, so that asking for them one by one sends nothing.

        Only those that have moved since the last time are fetched.

        For the images of a nudged elastic band, whether they share this calculator or have their own of the same
        server and model; see ``docs/client.md``.

        Raises:
            NepserveError: As :meth:`evaluate_many`; nothing is kept then.
        """
        images = list(images)
        known: dict[tuple[Any, ...], dict[str, Any]] = {}
        missing: dict[tuple[Any, ...], Atoms] = {}
        for image in images:
            found = self._from_ahead(image, self._names((), image))
            if found is None:
                missing[_key(image)] = image
            else:
                known[_key(image)] = found
        self.reset()
        self._ahead = {}
        fetched = self.evaluate_many(missing.values())
        self._ahead = {**known, **dict(zip(missing, fetched, strict=True))}
        for image in images:
            if isinstance(image.calc, NEPCalculator) and image.calc is not self:
                image.calc.accept(self)

    def accept(self, source: NEPCalculator) -> None:
        """Have results that ``source`` fetched ahead at hand, too; nothing if it is of another server or model."""
        if self._source() == source._source():
            self._ahead = source._ahead

    def export_properties(self) -> Properties:
        """The results that ASE has a name for."""
        return Properties({name: value for name, value in self.results.items() if name in all_properties})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": {}, "_session": None}

    def _names(self, wanted: Iterable[str], structure: Atoms) -> tuple[str, ...]:
        """Properties to ask for: those of the calculator, and ``wanted``, as far as they exist."""
        names = dict.fromkeys([*self.parameters["properties"], *wanted])
        if not structure.pbc.all():
            names.pop("stress", None)
        if "free_energy" in names:
            # The same number: no need to send it twice.
            del names["free_energy"]
            names["energy"] = None
        return tuple(names)

    def _fetch(self, structure: Atoms, names: Sequence[str]) -> dict[str, Any]:
        """Results from the server: a step of a session from the second time on that the same atoms come."""
        model = self.parameters["model"]
        kind = (structure.numbers.tobytes(), structure.pbc.tobytes(), structure.info.get("temperature"), model)
        if kind == self._kind and frame.PROPERTIES.issuperset(names):
            if self._session is None:
                self._session = Session(self.client, structure.numbers, structure.pbc, model, kind[2])
            try:
                values = self._session.step(structure.positions, structure.cell.array, names)
            except Absent:
                pass
            else:
                return _completed({name: values[name] for name in names})
        elif kind != self._kind:
            self._leave()
        found = _results(self.client.evaluate(structure, names, model=model))
        self._kind = kind
        return found

    def _leave(self) -> None:
        """Close the session of the atoms that were."""
        session, self._session, self._kind = self._session, None, None
        if session is not None:
            session.close()

    def _from_ahead(self, structure: Atoms, names: Iterable[str]) -> dict[str, Any] | None:
        found = self._ahead.get(_key(structure)) if self._ahead else None
        return _copy(found) if found is not None and all(name in found for name in names) else None

    def _take(self, structure: Atoms, found: dict[str, Any]) -> None:
        self.atoms = structure.copy()
        self.results = found

    def _source(self) -> tuple[Any, ...]:
        return self.client.url, self.client.dtype, self.parameters["model"] or self.client.model_name


def _differences(before: Atoms, now: Atoms) -> list[str]:
    """What of a structure has changed that its energy depends on, in ASE's words."""
    found = [name for name in ("positions", "numbers") if not np.array_equal(before.arrays[name], now.arrays[name])]
    if not np.array_equal(before.cell.array, now.cell.array):
        found.append("cell")
    if not np.array_equal(before.pbc, now.pbc):
        found.append("pbc")
    if before.info.get("temperature") != now.info.get("temperature"):
        found.append("temperature")
    return found


def _key(atoms: Atoms) -> tuple[Any, ...]:
    """What the energy of a structure depends on, bit for bit."""
    arrays = atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc
    return (*(array.tobytes() for array in arrays), atoms.info.get("temperature"))


def _results(prediction: Prediction) -> dict[str, Any]:
    """A result in ASE's types: floats, and arrays of float64."""
    return _completed(
        {k: float(v) if np.ndim(v) == 0 else np.asarray(v, np.float64) for k, v in prediction.values.items()}
    )


def _completed(found: dict[str, Any]) -> dict[str, Any]:
    if "energy" in found:
        found["free_energy"] = found["energy"]
    elif "free_energy" in found:
        found["energy"] = found["free_energy"]
    return found


def _copy(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in found.items()}
