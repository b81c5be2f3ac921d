"""The library's front: load a model, evaluate structures."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .backends import choices, resolve
from .backends.graphs import GraphBlock
from .errors import ModelError, StructureError
from .files import nep_txt
from .potential import DTYPES
from .structures import DEFAULT_PROPERTIES, PER_ATOM, PROPERTIES, Predictions, Structure, Structures

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from ase import Atoms

    from .backends.resolve import Resolved
    from .files.nep_txt import NepFile

_logger = logging.getLogger("nepcore")

_CPU_WORKING_SET = 48e6
"""Bytes of intermediate arrays on a CPU: about what stays in its caches; more is slower, not faster."""

_GPU_SHARE = 0.25
"""Share of a GPU's free memory for intermediate arrays."""


class Calculator:
    """A model that is ready to evaluate structures. Made by :func:`nepcore.load`.

    Attributes:
        model: What the file says.
        device: Where it computes, such as ``cpu`` or ``cuda:0``.
        dtype: ``float32`` or ``float64``.
        choice: How the backend came to be the one, JSON-able: ``how`` (``asked``, ``rule``, ``measured``, ``cached``,
            ``unmeasured``), ``backend`` and, where backends were measured, ``choice`` by size class and the table
            ``rows``.
    """

    def __init__(self, model: NepFile, resolved: Resolved, device: str, dtype: str, memory: float) -> None:
        self.model = model
        self.device = device
        self.dtype = dtype
        self._resolved = resolved
        self._memory = memory

    @classmethod
    def load(
        cls, path: str | Path, *, device: str = "auto", dtype: str = "float32", backend: str = "auto",
        memory: float | None = None,
    ) -> Calculator:  # fmt: skip
        """See :func:`nepcore.load`."""
        return cls.of(nep_txt.read(path), device=device, dtype=dtype, backend=backend, memory=memory)

    @classmethod
    def of(
        cls, model: NepFile, *, device: str = "auto", dtype: str = "float32", backend: str = "auto",
        memory: float | None = None,
    ) -> Calculator:  # fmt: skip
        """Make a calculator of a model that is in memory already; arguments as of :func:`nepcore.load`."""
        if dtype not in DTYPES:
            raise ModelError(f"dtype must be float32 or float64, not {dtype!r}")
        where = find_device(device)
        room = _memory(where) if memory is None else memory
        return cls(model, resolve.resolve(backend, model, where, dtype, room), str(where), dtype, room)

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        return self._resolved.backend.name

    @property
    def choice(self) -> dict[str, Any]:
        """How the backend came to be the one; see the class."""
        return {"how": self._resolved.how, "backend": self.backend, **self._resolved.report}

    @property
    def graphs(self) -> dict[str, dict[str, Any]]:
        """Graphs that are held and the memory they take, by backend; empty where none are captured."""
        return {name: block.report() for name, block in self._blocks().items() if isinstance(block, GraphBlock)}

    @property
    def faults(self) -> dict[str, str]:
        """Why backends do less than they should (compilation failed ...), by backend; empty where all is well."""
        faults = {name: str(getattr(block, "fault", "")) for name, block in self._blocks().items()}
        return {name: fault for name, fault in faults.items() if fault}

    def learned_limit(self) -> int | None:
        """Atoms that one call may hold, as :meth:`keep_limit` kept it for this device, backend and kind of model."""
        return choices.read_limit(self._limit_key())

    def keep_limit(self, atoms: int | None) -> None:
        """Keep on disk how many atoms one call may hold; None: there is no limit that is known."""
        choices.write_limit(self._limit_key(), atoms)

    def _limit_key(self) -> dict[str, Any]:
        return {**choices.key_of(self.model, torch.device(self.device), self.dtype), "backend": self.backend}

    def _blocks(self) -> dict[str, Any]:
        backend = self._resolved.backend
        members = getattr(backend, "backends", {"": backend}).values()
        return {member.name: getattr(member, "block", None) for member in members}

    def tune(self, seconds: float, *, again: bool = False) -> Generator[dict[str, Any], None, None]:
        """Measure which backend is the fastest for this model here, use it from now on, and keep the choice on disk.

        Does nothing where a backend was asked for, or the choice was made at an earlier start. Whatever goes wrong,
        the calculator stays usable. An interrupt (Ctrl-C) ends the measuring; what was measured until then decides,
        and is kept. Yields what is being done, JSON-able, before each longer step.

        Args:
            seconds: Budget; one candidate that began may take longer.
            again: Measure although the choice is known.
        """
        fresh = {"unmeasured", "measured", "cached"} if again else {"unmeasured"}
        if seconds <= 0.0 or self._resolved.how not in fresh:
            return
        _logger.info("measuring the backends for about %.0f s: once for this machine and kind of model", seconds)
        self._resolved = yield from resolve.tune(
            self._resolved, self.model, torch.device(self.device), self.dtype, self._memory, seconds
        )

    def evaluate(
        self,
        structures: Structures | Structure | Atoms | Sequence[Structure | Atoms] | str | Path,
        properties: Iterable[str] = DEFAULT_PROPERTIES,
        progress: Callable[[int], None] | None = None,
    ) -> Predictions:
        """Evaluate structures.

        Args:
            structures: A packed block, one structure or several (also ASE ``Atoms``), or an extended-XYZ file.
            properties: Names among :data:`nepcore.structures.PROPERTIES`.
            progress: Called with the number of atoms finished, again and again.

        Returns:
            Packed predictions in the order of the structures. Those that failed are in ``errors``.

        Raises:
            ModelError: An unknown property.
            InputFileError: The file cannot be read.
        """
        run = self.run(_pack(structures), properties)
        while True:
            try:
                done = next(run)
            except StopIteration as end:
                return end.value
            if progress is not None:
                progress(done)

    def run(
        self, structures: Structures, properties: Iterable[str] = DEFAULT_PROPERTIES
    ) -> Generator[int, None, Predictions]:
        """Evaluate piece by piece: yields the number of atoms finished after each, returns the predictions."""
        wanted = _known(properties)
        problems = self.model.admission.problems(structures)
        if not problems:
            predictions = yield from self._resolved.backend.run(structures, wanted)
        else:
            good = np.array([i for i in range(len(structures)) if i not in problems], np.int64)
            part = yield from self._resolved.backend.run(structures.select(good), wanted)
            predictions = part.among(structures.counts, good, problems)
        return _checked(predictions)

    def run_admitted(
        self, structures: Structures, properties: Iterable[str] = DEFAULT_PROPERTIES
    ) -> Generator[int, None, Predictions]:
        """As :meth:`run`, for structures that the model's admission let in already.

        Numbers of the result that are not finite are left for the caller to find.
        """
        predictions = yield from self._resolved.backend.run(structures, _known(properties))
        return _checked(predictions) if predictions.errors else predictions


def _known(properties: Iterable[str]) -> frozenset[str]:
    wanted = frozenset(properties)
    unknown = wanted - frozenset(PROPERTIES)
    if unknown:
        raise ModelError(f"unknown property {sorted(unknown)[0]!r}; there are: {', '.join(PROPERTIES)}")
    return wanted


def _pack(structures: object) -> Structures:
    if isinstance(structures, Structures):
        return structures
    if isinstance(structures, (str, Path)):
        from .files.xyz import read

        return read(structures).structures
    if isinstance(structures, Structure) or hasattr(structures, "get_positions"):
        return Structures.pack([structures])  # type: ignore[list-item]
    if isinstance(structures, Sequence):
        return Structures.pack(structures)
    raise TypeError(
        f"structures must be Structures, Structure, Atoms, a list of them or a path, not {type(structures)}"
    )


def _checked(predictions: Predictions) -> Predictions:
    """Turn results that are not finite into errors of their structures, and blank the rows of failed ones."""
    B = len(predictions)
    system: np.ndarray | None = None
    errors = dict(predictions.errors)
    # One value that is not finite makes the sum so: nearly every array passes here, in one pass.
    with np.errstate(all="ignore"):
        doubtful = [name for name, array in predictions.values.items() if not isfinite(array.sum())]
    for name in doubtful:
        array = predictions.values[name]
        finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1) if len(array) else np.ones(0, bool)
        if name == "stress":
            finite |= ~predictions.stress_known
        atoms: tuple[int, ...]
        for row in np.flatnonzero(~finite).tolist():
            if name in PER_ATOM:
                if system is None:
                    system = np.repeat(np.arange(B), predictions.counts)
                i = int(system[row])
                atom = row - int(predictions.offsets[i])
                reason, atoms = f"the model gives {name} that are not finite for atom {atom + 1}", (atom,)
            else:
                i, reason, atoms = row, f"the model gives a {name} that is not finite", ()
            if i not in errors or (atoms and errors[i].code == "non_finite_result" and not errors[i].atoms):
                errors[i] = StructureError("non_finite_result", reason, atoms=atoms)
    for i in errors:
        a, b = predictions.offsets[i], predictions.offsets[i + 1]
        for name, array in predictions.values.items():
            if name in PER_ATOM:
                array[a:b] = np.nan
            else:
                array[i] = np.nan
    return Predictions(predictions.counts, predictions.values, predictions.stress_known, errors)


def find_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ModelError: It is not there; says what is, and which variables hide devices.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"there is no device {name!r}; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ModelError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N (cuda also means ROCm)")
    index = device.index or 0
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        variables = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        hidden = "".join(f"; {v}={os.environ[v]!r}" for v in variables if v in os.environ)
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ModelError(f"device {name!r} is not there: torch {torch.__version__} sees {found} GPU(s){hidden}")
    return torch.device("cuda", index)


def _memory(device: torch.device) -> float:
    """Bytes for intermediate arrays on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return _GPU_SHARE * free
    return _CPU_WORKING_SET
