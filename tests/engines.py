"""Engines for tests: real processes that evaluate with the toy of ``nepserve/toy.py``."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.structures import PER_ATOM, Predictions, Structure, Structures
from nepserve.engine import EngineLink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

_PATH = Path(__file__).parent / "nepserve" / "toy.py"
_spec = importlib.util.spec_from_file_location("nepserve_toy", _PATH)
assert _spec is not None
assert _spec.loader is not None
toy = importlib.util.module_from_spec(_spec)
sys.modules["nepserve_toy"] = toy
_spec.loader.exec_module(toy)

TOY = f"{_PATH}:load"
USUAL = frozenset({"energy", "forces", "stress"})


def file(**options: Any) -> str:
    """A toy's "model file": the JSON text of its options."""
    return json.dumps(options)


@contextlib.asynccontextmanager
async def engine(model: str | None = None, **arguments: Any) -> AsyncIterator[EngineLink]:
    """A started engine, with ``model`` loaded as "toy" if given; ended afterwards whatever happens."""
    link = EngineLink(**{"device": "cpu", "loader": TOY, "threads": 1, **arguments})
    try:
        await link.start()
        if model is not None:
            await link.load("toy", model, dtype="float64", backend="auto")
        yield link
    finally:
        if link.pid is not None:
            await link.stop(5.0)


def run(main: Callable[[], Coroutine[Any, Any, None]], loop: str = "asyncio") -> None:
    """Run ``main`` to its end on the event loop of that name."""
    if loop == "uvloop":
        import uvloop

        uvloop.run(main())
    else:
        asyncio.run(main())


def structure(n: int, seed: int = 0, species: Sequence[str] = ("Si",), *, periodic: bool = True) -> Structure:
    """``n`` atoms at random on a jittered grid, 2.5 Å apart, of elements taken in turn."""
    rng = np.random.default_rng(seed)
    side = int(np.ceil(n ** (1 / 3)))
    sites = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)[:n]
    positions = 2.5 * sites + rng.uniform(-0.2, 0.2, (n, 3))
    symbols = [species[i % len(species)] for i in range(n)]
    return Structure.make(symbols, positions, cell=2.5 * side * np.eye(3) if periodic else None)


def block(*sizes: int, seed: int = 0) -> Structures:
    """A block of structures of these sizes, every third a molecule."""
    return Structures.pack([structure(n, seed + i, periodic=i % 3 != 2) for i, n in enumerate(sizes)])


def cloud(n: int) -> Structures:
    """One structure of many atoms that only a toy that computes nothing should get."""
    positions = np.random.default_rng(n).uniform(-50, 50, (n, 3))
    return Structures.from_arrays([n], np.full(n, 14), positions, 100.0 * np.eye(3)[None])


def directly(structures: Structures, properties: Sequence[str], **options: Any) -> Predictions:
    """What the toy says of a block in this process, in one call."""
    return finish(toy.load(file(**options)).run(structures, tuple(properties)))


def finish(steps: Any) -> Any:
    """What a generator returns at its end."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value


def assert_same_bits(found: Predictions, wanted: Predictions, structures: Sequence[int] | None = None) -> None:
    """All values of ``found`` are those of ``wanted`` bit for bit; of ``structures`` alone if given."""
    assert set(found.values) == set(wanted.values)
    chosen = range(len(wanted)) if structures is None else structures
    for i in chosen:
        a, b = int(wanted.offsets[i]), int(wanted.offsets[i + 1])
        for name, values in wanted.values.items():
            rows = slice(a, b) if name in PER_ATOM else slice(i, i + 1)
            assert found.values[name].dtype == values.dtype
            assert found.values[name][rows].tobytes() == values[rows].tobytes(), f"{name} of structure {i}"
        assert found.stress_known[i] == wanted.stress_known[i]
