"""A model inside the engine: how it is loaded and warmed up, and the known answer that tells a sound device."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.errors import ModelError, ModelFileError, NepError
from nepcore.structures import DEFAULT_PROPERTIES, PROPERTIES, Structure, Structures

from .errors import DeviceLost, ProbeError, describe
from .evaluation import evaluate
from .memory import Limit, is_device_lost, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from nepcore.structures import Predictions

    from .evaluation import Calculator

logger = logging.getLogger("nepserve.engine")

TUNE_SECONDS = "NEPSERVE_TUNE_SECONDS"
"""Variable of the engine that says how long backends may be measured."""

_TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
"""How far a known answer may be off, × max(1, largest value): sums on a GPU are not taken in one order."""

_CROWDED = 0.45
"""Distance of neighbours in warm-up crystals as a share of the cutoff: some 46 neighbours an atom."""

_LARGE = 21
"""Edge, in atoms, of a crystal that counts as large everywhere: 9,261 atoms."""


@dataclass
class Served:
    """A loaded model that has been warmed up."""

    name: str
    calculator: Calculator
    limit: Limit
    known: KnownAnswer
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KnownAnswer:
    """A small structure, and what the model said of it right after it was loaded."""

    structures: Structures
    energy: float
    forces: NDArray[Any]

    def compare(self, found: Predictions, dtype: str) -> None:
        """Check a later answer.

        Raises:
            ProbeError: It is off, or there is none.
        """
        if found.errors:
            raise ProbeError(f"the known answer could not be computed again: {found.errors[0].reason}")
        for what, old, new in (
            ("energy", np.array([self.energy]), found.values["energy"]),
            ("forces", self.forces, found.values["forces"]),
        ):
            allowed = _TOLERANCE.get(dtype, 1e-5) * max(1.0, float(np.abs(old).max()))
            off = float(np.abs(np.asarray(new, np.float64) - np.asarray(old, np.float64)).max())
            if not off <= allowed:
                raise ProbeError(f"the {what} of the known structure is off by {off:.3g} (allowed {allowed:.3g})")


def resolve(loader: str) -> Callable[..., Calculator]:
    """The function that ``module:function`` or ``/path/to/file.py:function`` names.

    Raises:
        ModelError: There is none.
    """
    place, _, name = loader.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None:
                raise ImportError(f"{place} is not a Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        found: Callable[..., Calculator] = getattr(module, name)
    except (ImportError, OSError, AttributeError, ValueError) as error:
        raise ModelError(f"loader {loader!r} cannot be used: {describe(error)}") from error
    return found


def load(
    loader: str, name: str, path: str, *, device: str, dtype: str, backend: str, threads: int | None
) -> Generator[dict[str, Any], None, Served]:
    """Load and warm up a model; yields what has been done so far, JSON-able, before each longer step.

    Raises:
        ModelFileError: The file is no model.
        ModelError: The model cannot run here, or does not answer with finite numbers.
        DeviceLost: The device failed for good.
    """
    yield {"stage": "import"}
    try:
        function = resolve(loader)
        yield {"stage": "load"}
        started = time.perf_counter()
        calculator = function(path, device=device, dtype=dtype, backend=backend)
    except NepError:
        raise
    except Exception as error:
        raise _load_failure(error, path) from error
    _use_threads(threads)
    seconds = time.perf_counter() - started
    if (tune := getattr(calculator, "tune", None)) is not None:
        yield from tune(_tune_seconds(calculator.device))
    limit = Limit()
    if (keep := getattr(calculator, "keep_limit", None)) is not None:
        limit.recall(calculator.learned_limit())  # type: ignore[attr-defined]
        limit.keep = keep
    warmup = []
    blocks = _warmup_blocks(calculator.model, large=not calculator.device.startswith("cpu"))
    for done, (what, block, properties) in enumerate(blocks):
        yield {"stage": "warmup", "done": done, "total": len(blocks), "what": what}
        started = time.perf_counter()
        found = yield from _quietly(evaluate(calculator, block, properties, limit))
        warmup.append({"what": what, "atoms": block.n_atoms, "seconds": time.perf_counter() - started})
        for failure in found.errors.values():
            if failure.code != "out_of_memory":
                raise ModelError(f"{path}: the model fails on {what}: {failure.reason}")
    yield {"stage": "known_answer"}
    block = _pack(calculator.model, [_crystal(calculator.model, 2)])
    started = time.perf_counter()
    found = yield from _quietly(evaluate(calculator, block, ("energy", "forces"), limit))
    if found.errors:
        raise ModelError(f"{path}: the model gives no answer for a small crystal: {found.errors[0].reason}")
    known = KnownAnswer(block, float(found.values["energy"][0]), found.values["forces"].copy())
    info = {
        "name": name,
        "path": path,
        "device": calculator.device,
        "dtype": calculator.dtype,
        "backend": calculator.backend,
        "load_seconds": seconds,
        "warmup": warmup,
        "known_answer": {
            "atoms": block.n_atoms, "energy": known.energy, "seconds": time.perf_counter() - started
        },
        "limit_atoms": limit.atoms,
        "hardware": hardware(calculator.device),
    }  # fmt: skip
    if (describe_model := getattr(calculator.model, "describe", None)) is not None:
        info["model"] = describe_model()
    if (choice := getattr(calculator, "choice", None)) is not None:
        # How the backend was chosen, and the timings of those that were not.
        info["choice"] = choice
    return Served(name, calculator, limit, known, info)


def _tune_seconds(device: str) -> float:
    """Budget for measuring backends."""
    said = os.environ.get(TUNE_SECONDS)
    return float(said) if said else 180.0 if device.startswith("cuda") else 30.0


def _load_failure(error: Exception, path: str) -> Exception:
    if is_device_lost(error):
        return DeviceLost(describe(error))
    if is_out_of_memory(error):
        return ModelError(f"{path}: not enough memory to load the model: {describe(error)}")
    if isinstance(error, OSError) and str(error.filename) == path:
        return ModelFileError(path, None, error.strerror or describe(error))
    logger.error("loading %s failed", path, exc_info=error)
    return ModelError(f"{path}: loading failed: {describe(error)}")


def _quietly(steps: Generator[int, None, Predictions]) -> Generator[dict[str, Any], None, Predictions]:
    """The same steps, without saying how many atoms are done."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Predictions = end.value
            return found
        yield {}


def hardware(device: str) -> dict[str, Any]:
    """What computes: ``device`` as given, and torch's version and the GPU's name once torch is there."""
    found: dict[str, Any] = {"device": device}
    torch = sys.modules.get("torch")
    if torch is None:
        return found
    found["torch"] = torch.__version__
    found["threads"] = torch.get_num_threads()
    for platform in ("cuda", "hip"):
        if (version := getattr(torch.version, platform, None)) is not None:
            found[platform] = version
    if device.startswith("cuda"):
        found["name"] = torch.cuda.get_device_name(device)
    return found


def _use_threads(threads: int | None) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and threads is not None:
        torch.set_num_threads(threads)


def _warmup_blocks(model: Any, *, large: bool) -> list[tuple[str, Structures, tuple[str, ...]]]:
    """Structures of every kind that the code treats in its own way, and what to ask of each; small ones if not large.

    What is compiled for a large structure, on a GPU, is not to be waited for by the first who sends one.
    """
    atom = _molecule(model, 1)
    pair = _molecule(model, 2)
    crystals = [_crystal(model, n) for n in (1, 2, 4)]
    blocks = [
        ("an isolated atom", _pack(model, [atom]), DEFAULT_PROPERTIES),
        ("a pair of atoms", _pack(model, [pair]), DEFAULT_PROPERTIES),
        ("a crystal of 8 atoms", _pack(model, crystals[1:2]), tuple(PROPERTIES)),
        ("a crystal of 64 atoms", _pack(model, crystals[2:]), DEFAULT_PROPERTIES),
        ("a mixed batch", _pack(model, [atom, crystals[0], pair, *crystals]), DEFAULT_PROPERTIES),
    ]
    if large:
        crystal = _pack(model, [_crystal(model, _LARGE)])
        what = f"a crystal of {crystal.n_atoms:,} atoms"
        blocks += [(what, crystal, properties) for properties in (DEFAULT_PROPERTIES, ("energy", "forces"))]
    return blocks


def _pack(model: Any, items: list[Structure]) -> Structures:
    block = Structures.pack(items)
    if model.temperature:
        block.temperatures[:] = 300.0
    return block


def _species(model: Any, n: int) -> list[str]:
    return [model.elements[i % len(model.elements)] for i in range(n)]


def _spacing(model: Any) -> float:
    return max(1.8, _CROWDED * float(model.cutoff))


def _molecule(model: Any, n: int) -> Structure:
    positions = np.zeros((n, 3))
    positions[:, 0] = _spacing(model) * np.arange(n)
    return Structure.make(_species(model, n), positions)


def _crystal(model: Any, n: int) -> Structure:
    """A simple cubic crystal of n³ atoms, each a little off its place so that no force vanishes, Å."""
    a = _spacing(model)
    sites = np.stack(np.meshgrid(*[np.arange(n)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    shift = 0.05 * a * np.sin(np.arange(3 * len(sites)) * 2.4 + 1.0).reshape(-1, 3)
    return Structure.make(_species(model, len(sites)), a * sites + shift, cell=n * a * np.eye(3))
