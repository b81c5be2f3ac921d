"""A small evaluator for tests of everything around a model: Lennard-Jones-like, plain numpy, with faults to order.

The "file" it loads is JSON: the text of it, or the path of a file that holds it. All keys may be left out:

    elements, cutoff, temperature     as in a model; elements are C, Si and Ge, without those that have a fault, so
                                      that the warm-up goes well
    tile                              atoms of a tile (default 256)
    seconds, seconds_per_atom         time a tile takes, s
    nothing                           no arithmetic at all: energy is 0 and forces are the negative positions
    memory                            atoms a call may have before it raises ``memory_text``
    memory_text                       wording of that error; ``MemoryError`` raises one
    memory_from                       calls that are spared, so that a warm-up may go well
    load_seconds, load_error          loading is slow, or fails
    drift                             added to every energy from the second load or 20th call on
    faults                            {symbol: fault}: what an atom of that element does to its call

Faults: ``raise`` (an exception nobody expects), ``refuse`` (a StructureError in band), ``refuse_all`` (the same
raised), ``nan`` (a force that is not finite), ``nan_energy`` (an energy that is not), ``exit`` (the process ends with
code 13), ``kill`` (SIGKILL), ``abort`` (SIGABRT), ``hang`` (no tile ever ends), ``lost`` (a device error that stays),
``no_memory`` (out of memory whatever the size), ``slow`` (0.05 s a tile), ``chatter`` (a megabyte on stderr),
``model`` (a ModelError).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.admission import Admission
from nepcore.elements import NUMBERS
from nepcore.errors import ModelError, ModelFileError, StructureError
from nepcore.structures import PER_ATOM, PER_STRUCTURE, Predictions, Structure, Structures

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

SIGMA = 2.2
EPSILON = 0.1


@dataclass(frozen=True)
class ToyModel:
    elements: tuple[str, ...]
    cutoff: float
    temperature: bool

    @property
    def admission(self) -> Admission:
        return Admission(self.elements, self.temperature, self.cutoff)

    def describe(self) -> dict[str, Any]:
        return {"elements": list(self.elements), "cutoff": self.cutoff, "temperature": self.temperature}


class ToyCalculator:
    backend = "toy"

    def __init__(self, options: dict[str, Any], device: str, dtype: str) -> None:
        self.options = options
        self.device = "cpu" if device == "auto" else device
        self.dtype = dtype
        healthy = [symbol for symbol in ("C", "Si", "Ge") if symbol not in options.get("faults", {})]
        self.model = ToyModel(
            tuple(options.get("elements", healthy)),
            float(options.get("cutoff", 5.0)),
            bool(options.get("temperature", False)),
        )
        self._faults = {NUMBERS[symbol]: fault for symbol, fault in options.get("faults", {}).items()}
        self._calls = 0

    def run(self, structures: Structures, properties: Iterable[str]) -> Generator[int, None, Predictions]:
        self._calls += 1
        options = self.options
        if options.get("nothing"):
            yield structures.n_atoms
            energy = np.zeros(len(structures))
            if tuple(properties) == ("energy", "forces"):
                values = {"energy": energy, "forces": -structures.positions}
                return Predictions(structures.counts, values, energy < 0, {})
            return _predictions(structures, properties, np.zeros(structures.n_atoms), -structures.positions, {})
        present = {self._faults[z] for z in np.unique(structures.numbers).tolist() if z in self._faults}
        self._fail(structures, present)
        memory = options.get("memory") if self._calls > options.get("memory_from", 0) else None
        if memory is not None and structures.n_atoms > memory:
            self._out_of_memory(structures.n_atoms)
        tile = int(options.get("tile", 256))
        seconds = options.get("seconds", 0.0) + (0.05 if "slow" in present else 0.0)
        energies = np.zeros(structures.n_atoms)
        forces = np.zeros((structures.n_atoms, 3))
        errors: dict[int, StructureError] = {}
        waiting = 0
        for i, view in enumerate(structures):
            a, b = int(structures.offsets[i]), int(structures.offsets[i + 1])
            faults = {self._faults.get(z) for z in np.unique(view.numbers).tolist()}
            if "refuse" in faults:
                errors[i] = StructureError("unknown_element", "the toy refuses it", field="numbers", atoms=(0,))
                continue
            energies[a:b], forces[a:b] = _lennard_jones(view, self.model.cutoff)
            for atom in range(a, b):
                fault = self._faults.get(int(structures.numbers[atom]))
                if fault == "nan":
                    forces[atom, 1] = np.nan
                elif fault == "nan_energy":
                    energies[atom] = np.inf
            waiting += b - a
            # A tile is a run of whole structures, or a part of a large one.
            while waiting >= tile or (i + 1 == len(structures) and waiting > 0):
                step = min(tile, waiting)
                time.sleep(seconds + step * options.get("seconds_per_atom", 0.0))
                yield b - waiting + step
                waiting -= step
        if options.get("drift") and self._calls > 20:
            energies += options["drift"]
        return _predictions(structures, properties, energies, forces, errors)

    def _fail(self, structures: Structures, present: set[str]) -> None:
        if "raise" in present:
            raise ValueError("the toy trips over a poisoned atom")
        if "refuse_all" in present:
            raise StructureError("too_dense", "the toy refuses the whole batch", field="cell")
        if "model" in present:
            raise ModelError("the toy cannot do that")
        if "exit" in present:
            print("last words of the toy", file=sys.stderr, flush=True)
            os._exit(13)
        if "kill" in present:
            os.kill(os.getpid(), signal.SIGKILL)
        if "abort" in present:
            os.abort()
        if "hang" in present:
            time.sleep(1e6)
        if "lost" in present:
            raise RuntimeError("CUDA error: device-side assert triggered")
        if "no_memory" in present:
            self._out_of_memory(structures.n_atoms)
        if "chatter" in present:
            sys.stderr.write(("x" * 99 + "\n") * 10_000)

    def _out_of_memory(self, atoms: int) -> None:
        text = self.options.get("memory_text", "CUDA out of memory. Tried to allocate 2.00 GiB")
        if text == "MemoryError":
            raise MemoryError
        raise RuntimeError(f"{text} ({atoms} atoms)")


def _lennard_jones(view: Structure, cutoff: float) -> tuple[np.ndarray, np.ndarray]:
    """Site energies (n,) eV and forces (n, 3) eV/Å; images one cell away at most, smooth enough for tests."""
    n = len(view)
    energies, forces = np.zeros(n), np.zeros((n, 3))
    images = [np.arange(-1, 2) if p else np.zeros(1, int) for p in view.pbc]
    shifts = np.stack(np.meshgrid(*images, indexing="ij"), axis=-1).reshape(-1, 3) @ view.cell
    weight = 1.0 + 0.01 * view.numbers.astype(np.float64)
    for i in range(n):
        d = view.positions[None, :, :] + shifts[:, None, :] - view.positions[i]
        r2 = (d * d).sum(axis=2)
        near = (r2 < cutoff * cutoff) & (r2 > 0)
        s6 = np.where(near, (SIGMA * SIGMA / np.where(near, r2 + 0.5, 1.0)) ** 3, 0.0)
        pair = EPSILON * weight[i] * weight[None, :]
        energies[i] = 0.5 * (4.0 * pair * (s6 * s6 - s6)).sum()
        slope = np.where(near, 24.0 * pair * (s6 - 2.0 * s6 * s6) / np.where(near, r2 + 0.5, 1.0), 0.0)
        forces[i] = (slope[:, :, None] * d).sum(axis=(0, 1))
    return energies, forces


def _predictions(
    structures: Structures,
    properties: Iterable[str],
    energies: np.ndarray,
    forces: np.ndarray,
    errors: dict[int, StructureError],
) -> Predictions:
    B, N = len(structures), structures.n_atoms
    sums = np.array([energies[a:b].sum() for a, b in zip(structures.offsets, structures.offsets[1:], strict=False)])
    known = structures.pbc.all(axis=1)
    values: dict[str, np.ndarray] = {}
    for name in properties:
        if name in ("energy", "free_energy"):
            values[name] = sums.copy()
        elif name == "energies":
            values[name] = energies.copy()
        elif name == "forces":
            values[name] = forces.copy()
        elif name == "stress":
            values[name] = np.where(known[:, None], 0.001 * sums[:, None] * np.arange(1, 7), np.nan)
        elif name in PER_STRUCTURE:
            values[name] = np.broadcast_to(sums[:, None, None] * np.ones((3, 3)), (B, 3, 3)).copy()
        elif name == "descriptors":
            values[name] = np.outer(energies, np.arange(1, 5))
        elif name in PER_ATOM:
            values[name] = np.broadcast_to(energies[:, None, None] * np.ones((3, 3)), (N, 3, 3)).copy()
        else:
            raise ModelError(f"unknown property {name!r}")
    for i in errors:
        a, b = structures.offsets[i], structures.offsets[i + 1]
        for name, array in values.items():
            array[slice(a, b) if name in PER_ATOM else i] = np.nan
        known[i] = False
    return Predictions(structures.counts, values, known, errors)


def load(path: str, *, device: str = "auto", dtype: str = "float64", backend: str = "auto") -> ToyCalculator:
    """The loader: ``"/path/to/toy.py:load"`` for :class:`nepserve.engine.EngineLink`."""
    text = path if path.lstrip().startswith("{") else Path(path).read_text(encoding="utf-8")
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelFileError(path, error.lineno, f"not JSON: {error.msg}") from error
    time.sleep(options.get("load_seconds", 0.0))
    match options.get("load_error"):
        case "file":
            raise ModelFileError(path, 3, "found cutoff, wanted zbl")
        case "model":
            raise ModelError("no such backend")
        case "raise":
            raise RuntimeError("the toy does not load")
        case "exit":
            os._exit(14)
    if backend not in ("auto", "toy"):
        raise ModelError(f"no backend {backend!r}; there is: toy")
    return ToyCalculator(options, device, dtype)


TOY = f"{Path(__file__).resolve()}:load"
