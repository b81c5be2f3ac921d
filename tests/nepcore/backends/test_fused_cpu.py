"""The compiled CPU backend: reference values, torch, derivatives; the same bits whatever is evaluated beside."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("numba")

import crystals
import references
from locations import needs_shared
from nepcore import Structure, Structures, synthetic
from nepcore.backends.fused_cpu import FusedCPU
from nepcore.calculator import Calculator
from nepcore.elements import SYMBOLS
from nepcore.files import nep_txt
from nepcore.files.nep_layout import SWITCHES
from nepcore.structures import PROPERTIES, Predictions

if TYPE_CHECKING:
    from collections.abc import Generator

    from nepcore.files.nep_txt import NepFile

DTYPES = ["float64", "float32"]
SWITCH_SETS = [(), SWITCHES, *((name,) for name in SWITCHES)]


def evaluate(backend: FusedCPU, items: Any, properties: Any = PROPERTIES) -> Predictions:
    structures = items if isinstance(items, Structures) else Structures.pack(items)
    out: list[Predictions] = []
    assert sum(kept(backend.run(structures, frozenset(properties)), out)) == structures.n_atoms
    return out[0]


def kept(run: Generator[int, None, Predictions], out: list[Predictions]) -> Generator[int, None, None]:
    """The run, its result appended to ``out``."""
    out.append((yield from run))


def by_torch(model: NepFile, items: Any) -> Predictions:
    return Calculator.of(model, device="cpu", dtype="float64", backend="loop").evaluate(items, PROPERTIES)


def assert_close(found: Predictions, wanted: Predictions, bound: float = 1e-10) -> None:
    assert found.errors == {}
    assert set(found.values) == set(wanted.values)
    for name in wanted.values:
        a, b = found[name], wanted[name]
        scale = max(1.0, float(np.nanmax(np.abs(b)))) if b.size else 1.0
        assert np.allclose(a, b, rtol=0, atol=bound * scale, equal_nan=True), name


def same_bits(found: Predictions, i: int, wanted: Predictions) -> bool:
    """Whether structure i of one block has the bits of the only structure of another."""
    view, only = found.view(i), wanted.view(0)
    return view.unavailable == only.unavailable and all(
        np.asarray(view[name]).tobytes() == np.asarray(only[name]).tobytes() for name in view.values
    )


@needs_shared
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", references.names())
def test_reference_values(name: str, dtype: str) -> None:
    reference = references.load(name)
    backend = FusedCPU(nep_txt.read(reference.path), dtype, 1)
    predictions = evaluate(backend, reference.structures)
    assert predictions.errors == {}
    assert references.compare(predictions, reference, dtype) == []


@pytest.mark.parametrize("n_max", [(0, 0), (4, 4), (8, 7), (9, 8), (15, 3), (3, 18), (2, 34)], ids=str)
def test_any_number_of_functions(n_max: tuple[int, int]) -> None:
    model = synthetic.make_model(("Si", "C"), n_max=n_max, basis_size=(n_max[0] + 1, 7), seed=1)
    items = [crystals.random_structure(k, model.elements, pbc=p) for k, p in enumerate(crystals.PERIODICITIES)]
    assert_close(evaluate(FusedCPU(model, "float64", 1), items), by_torch(model, items))


@pytest.mark.parametrize("l_max", range(1, 9))
def test_any_l(l_max: int) -> None:
    model = synthetic.make_model(("Si", "C"), l_max=l_max, switches=(), n_max=(3, 4), seed=l_max)
    items = [crystals.random_structure(k, model.elements) for k in range(2)]
    assert_close(evaluate(FusedCPU(model, "float64", 1), items), by_torch(model, items))


@pytest.mark.parametrize("l_max", [4, 5])
@pytest.mark.parametrize("switches", SWITCH_SETS, ids="+".join)
def test_any_invariants(switches: tuple[str, ...], l_max: int) -> None:
    model = synthetic.make_model(("Si", "C"), l_max=l_max, switches=switches, n_max=(3, 2), seed=3)
    items = [crystals.random_structure(k, model.elements) for k in range(2)]
    assert_close(evaluate(FusedCPU(model, "float64", 1), items), by_torch(model, items))


@pytest.mark.parametrize("n_types", [1, 2, 9, 40, 94])
def test_any_number_of_types(n_types: int) -> None:
    model = synthetic.make_model(SYMBOLS[1 : n_types + 1], n_max=(3, 2), basis_size=(5, 4), hidden=(7,), seed=n_types)
    items = [crystals.random_structure(k, model.elements, n=25) for k in range(2)]
    assert_close(evaluate(FusedCPU(model, "float64", 1), items), by_torch(model, items))


@pytest.mark.parametrize(
    "options",
    [
        {"version": 3},
        {"version": 5},
        {"temperature": True},
        {"hidden": (6, 5)},
        {"hidden": (65, 33)},
        {"zbl": "universal"},
        {"zbl": "typewise"},
        {"zbl": "flexible"},
        {"cutoff": ((5.0, 4.0), (6.0, 3.5), (4.5, 4.5))},
        {"cutoff": (5.0, 5.0), "basis_size": (6, 6)},
        {"cutoff": (5.0, 5.0), "basis_size": (6, 7)},
    ],
    ids=lambda o: " ".join(f"{k} {v}" for k, v in o.items()),
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_model(options: dict[str, Any], dtype: str) -> None:
    model = synthetic.make_model(("Si", "C", "O"), n_max=(4, 3), seed=7, **options)
    items = [crystals.random_structure(k, model.elements, pbc=p) for k, p in enumerate(crystals.PERIODICITIES)]
    items += [Structure.make(["C", "O"], [[0, 0, 0], [0, 0, r]], temperature=200.0) for r in (0.4, 1.1, 3.0, 50.0)]
    bound = 1e-10 if dtype == "float64" else 2e-5
    assert_close(evaluate(FusedCPU(model, dtype, 1), items), by_torch(model, items), bound)


@pytest.mark.parametrize("seed", range(4))
def test_forces_and_stress_are_derivatives(seed: int) -> None:
    model = synthetic.make_model(("Si", "C"), zbl="universal", switches=SWITCHES, seed=seed)
    backend = FusedCPU(model, "float64", 1)
    structure = crystals.random_structure(seed, model.elements, n=8)
    step, shifted, strained = 1e-4, [], []
    for atom, axis, sign in product(range(3), range(3), (1, -1)):
        positions = structure.positions.copy()
        positions[atom, axis] += sign * step
        shifted.append(crystals.replace(structure, positions=positions))
    voigt = [(0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)]
    for (a, b), sign in product(voigt, (1, -1)):
        strain = np.eye(3)
        strain[a, b] += sign * step / 2
        strain[b, a] += sign * step / 2
        strained.append(
            crystals.replace(structure, positions=structure.positions @ strain, cell=structure.cell @ strain)
        )
    result = evaluate(backend, [structure])
    energy = evaluate(backend, shifted, ["energy"])["energy"].reshape(3, 3, 2)
    assert np.allclose(result["forces"][:3], (energy[..., 1] - energy[..., 0]) / (2 * step), rtol=0, atol=1e-5)
    energy = evaluate(backend, strained, ["energy"])["energy"].reshape(6, 2)
    slope = (energy[:, 0] - energy[:, 1]) / (2 * step)
    assert np.allclose(result["stress"][0], slope / structure.volume, rtol=0, atol=1e-6)
    assert np.allclose(result["virials"].sum(axis=0), result["virial"][0], rtol=0, atol=1e-10)


def test_invariances() -> None:
    model = synthetic.make_model(("Si", "C"), seed=2)
    backend = FusedCPU(model, "float64", 1)
    structure = crystals.random_structure(5, model.elements)
    q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))
    n = len(structure)
    order = np.random.default_rng(1).permutation(n)
    moved = structure.positions + np.random.default_rng(2).integers(-3, 4, (n, 3)) @ structure.cell
    skewed = structure.cell.copy()
    skewed[2] += 3 * skewed[0] - 2 * skewed[1]
    doubled = np.vstack([structure.positions, structure.positions + structure.cell[1]])
    items = [
        structure,
        crystals.replace(structure, positions=structure.positions @ q, cell=structure.cell @ q),
        crystals.replace(structure, positions=structure.positions + np.array([0.3, -7.0, 1e3])),
        crystals.replace(structure, positions=structure.positions[order], numbers=structure.numbers[order]),
        crystals.replace(structure, positions=moved),
        crystals.replace(structure, cell=skewed),
        crystals.replace(structure, cell=structure.cell[[1, 0, 2]]),
        crystals.replace(structure, positions=-structure.positions, cell=-structure.cell),
        crystals.replace(
            structure, positions=doubled, numbers=np.tile(structure.numbers, 2), cell=structure.cell * [[1], [2], [1]]
        ),
    ]
    result = evaluate(backend, items)
    energy = result["energy"].copy()
    energy[-1] /= 2
    assert np.allclose(energy, energy[0], rtol=1e-11)
    forces = [result.view(i)["forces"] for i in range(len(items))]
    for found, wanted in [
        (forces[1], forces[0] @ q), (forces[2], forces[0]), (forces[3], forces[0][order]), (forces[4], forces[0]),
        (forces[5], forces[0]), (forces[6], forces[0]), (forces[7], -forces[0]),
        (forces[8], np.tile(forces[0], (2, 1))),
    ]:  # fmt: skip
        assert np.allclose(found, wanted, rtol=0, atol=1e-9)


def awkward(model: NepFile) -> list[Structure]:
    """Structures of many sizes and shapes."""
    rng = np.random.default_rng(9)
    items = [
        crystals.random_structure(k, model.elements, n=n, pbc=p)
        for k, (n, p) in enumerate([(1, True), (2, True), (5, False), (17, True), (30, (True, False, True))])
    ]
    big = crystals.diamond((4, 4, 4), rattle=0.1, seed=3)
    items.append(crystals.replace(big, numbers=rng.choice([6, 14], len(big)).astype(np.uint8)))
    items.append(Structure.make(["Si"], [[0.0, 0.0, 0.0]], np.eye(3) * 2.2))
    items.append(Structure.make(["Si"] * 120, rng.random((120, 3)) * 3.8 + 1e6))
    return items


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_batch_or_threads(dtype: str) -> None:
    model = synthetic.make_model(("Si", "C"), zbl="universal", seed=4)
    items = awkward(model)
    alone = [evaluate(FusedCPU(model, dtype, 1), [item]) for item in items]
    for threads in (1, 2, 3):
        backend = FusedCPU(model, dtype, threads)
        for order in (range(len(items)), [*reversed(range(len(items)))], [3, 5, 3, 0, 5, 7, 2, 1, 4, 6] * 3):
            together = evaluate(backend, [items[i] for i in order])
            assert together.errors == {}
            assert all(same_bits(together, k, alone[i]) for k, i in enumerate(order))


@pytest.mark.parametrize(
    "wanted", [["energy"], ["forces"], ["stress"], ["descriptors"], ["energies", "virials"]], ids=str
)
def test_properties_do_not_change_each_other(wanted: list[str]) -> None:
    model = synthetic.make_model(("Si", "C"), seed=4)
    backend = FusedCPU(model, "float32", 1)
    everything = evaluate(backend, awkward(model))
    some = evaluate(backend, awkward(model), wanted)
    assert set(some.values) == set(wanted)
    for name in wanted:
        assert some[name].tobytes() == everything[name].tobytes()


def test_compiled_once() -> None:
    """No request makes the compiler run again: every call passes arguments of the same types."""
    model = synthetic.make_model(("Si", "C"), seed=4)
    backend = FusedCPU(model, "float32", 2)
    backend.warm_up()
    before = {name: len(f.signatures) for name, f in vars(backend.functions).items()}
    block = Structures.pack(awkward(model))
    fields = [getattr(block, name) for name in ("counts", "numbers", "positions", "cells", "pbc", "temperatures")]
    frozen = Structures(*(np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape) for a in fields))
    for structures, properties in product((block, frozen), (PROPERTIES, ["energy"], ["forces", "virials"])):
        evaluate(backend, structures, properties)
    assert {name: len(f.signatures) for name, f in vars(backend.functions).items()} == before


def test_runs_may_alternate() -> None:
    model = synthetic.make_model(("Si",), seed=4)
    backend = FusedCPU(model, "float64", 2)
    block = Structures.pack([crystals.diamond((10, 10, 10), rattle=0.1, seed=s) for s in range(2)])
    wanted = evaluate(backend, block)["forces"]
    done: list[Predictions] = []
    runs = [kept(backend.run(block, frozenset(PROPERTIES)), done) for _ in range(3)]
    pieces = list(zip(*runs, strict=True))
    assert len(pieces) > 1
    assert len(done) == len(runs)
    assert all(p["forces"].tobytes() == wanted.tobytes() for p in done)


def test_a_run_that_is_given_up_leaves_nothing_behind() -> None:
    model = synthetic.make_model(("Si",), seed=4)
    backend = FusedCPU(model, "float64", 2)
    block = Structures.pack([crystals.diamond((10, 10, 10), rattle=0.1, seed=s) for s in range(2)])
    wanted = evaluate(backend, block)["forces"]
    run = backend.run(block, frozenset(PROPERTIES))
    next(run)
    run.close()
    assert evaluate(backend, block)["forces"].tobytes() == wanted.tobytes()


def test_nothing_to_do() -> None:
    backend = FusedCPU(synthetic.make_model(("Si",), seed=4), "float32", 1)
    predictions = evaluate(backend, Structures.empty())
    assert len(predictions) == 0
    assert predictions["forces"].shape == (0, 3)
    assert predictions["descriptors"].shape == (0, backend.model.dim)


_PLAIN_PROCESSOR = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import crystals
from nepcore import Structures, synthetic
from nepcore.backends.fused_cpu import FusedCPU
from nepcore.backends.fused_cpu.vec import REGISTER
from nepcore.calculator import Calculator
assert REGISTER == 32
model = synthetic.make_model(("Si", "C"), zbl="universal", seed=4)
items = [crystals.random_structure(k, model.elements, pbc=p) for k, p in enumerate(crystals.PERIODICITIES)]
wanted = Calculator.of(model, device="cpu", dtype="float64", backend="loop").evaluate(items, ("forces",))["forces"]
run = FusedCPU(model, "float64", 1).run(Structures.pack(items), frozenset(("forces",)))
while True:
    try:
        next(run)
    except StopIteration as end:
        assert np.allclose(end.value["forces"], wanted, rtol=0, atol=1e-9)
        break
"""


@pytest.mark.slow
def test_a_processor_without_wide_vectors() -> None:
    """As for any x86-64: other code for packing lanes, vectors split into many registers."""
    if platform.machine() not in {"x86_64", "AMD64"}:
        pytest.skip("the features are those of x86-64")
    environment = {**os.environ, "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse,+sse2"}
    subprocess.run(
        [sys.executable, "-c", _PLAIN_PROCESSOR, str(Path(crystals.__file__).parent)], env=environment, check=True
    )
