"""The fused backend on a GPU (CUDA or HIP): right values, and the same bits in any company, order and run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import crystals
import nepcore
import references
from locations import needs_shared
from nepcore import Structure, Structures, synthetic
from nepcore.calculator import Calculator
from nepcore.structures import PROPERTIES, Predictions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or HIP device")]

MODEL = synthetic.make_model(("Si", "C"), switches=("q222", "q1111"), zbl="universal", seed=3)


def same_bits(a: Predictions, i: int, b: Predictions, k: int) -> list[str]:
    one, two = a.view(i).values, b.view(k).values
    return [name for name in one if not np.array_equal(np.asarray(one[name]), np.asarray(two[name]))]


@needs_shared
@pytest.mark.parametrize("name", references.names())
def test_reference_values(name: str) -> None:
    reference = references.load(name)
    calculator = nepcore.load(reference.path, device="cuda", backend="fused")
    predictions = calculator.evaluate(reference.structures, PROPERTIES)
    assert calculator.faults == {}
    assert predictions.errors == {}
    assert references.compare(predictions, reference, "float32") == []


def test_alone_in_a_batch_reversed_and_again() -> None:
    items = [
        crystals.random_structure(k, MODEL.elements, n=4 + k, pbc=crystals.PERIODICITIES[k % 8]) for k in range(65)
    ]
    items.append(crystals.diamond((5, 5, 5)))
    calculator = Calculator.of(MODEL, device="cuda", backend="fused")
    together = calculator.evaluate(items, PROPERTIES)
    for _ in range(3):  # launched one by one, captured, replayed
        again = calculator.evaluate(items[::-1], PROPERTIES)
        assert [same_bits(together, i, again, len(items) - 1 - i) for i in range(len(items))] == [[]] * len(items)
    for i in (0, 7, 31, 64, 65):
        for _ in range(3):
            assert same_bits(together, i, calculator.evaluate(items[i], PROPERTIES), 0) == [], i
    assert calculator.faults == {}


@pytest.mark.parametrize("pbc", [True, (True, False, True), False], ids=str)
def test_a_trajectory_of_a_large_structure(pbc: object) -> None:
    one = crystals.replace(crystals.diamond((11, 11, 11)), pbc=np.broadcast_to(np.asarray(pbc), 3).copy())
    rng = np.random.default_rng(0)
    calculator = Calculator.of(MODEL, device="cuda", backend="fused")
    positions = one.positions
    for step in range(8):
        moved = crystals.replace(one, positions=positions)
        found = calculator.evaluate(moved, PROPERTIES)
        # Another order of evaluation, another history: the same bits.
        fresh = Calculator.of(MODEL, device="cuda", backend="fused").evaluate(moved, PROPERTIES)
        assert same_bits(found, 0, fresh, 0) == [], step
        positions = positions + rng.normal(0, 0.06, positions.shape)
    wanted = Calculator.of(MODEL, device="cuda", dtype="float64", backend="density").evaluate(moved, PROPERTIES)
    for name in ("energy", "forces", "virial", "energies", "virials", "descriptors"):
        a, b = found.values[name], wanted.values[name]
        scale = max(1.0, float(np.abs(b).max()))
        assert np.abs(a - b).max() <= 1e-4 * scale, name
    assert calculator.faults == {}
    small_model = Calculator.of(MODEL, device="cuda", backend="fused")
    assert same_bits(small_model.evaluate([crystals.diamond(), moved], PROPERTIES), 1, found, 0) == []


@pytest.mark.parametrize("hidden", [(7,), (6, 5)], ids=["one layer", "two layers"])
def test_atoms_by_element_counted_one_by_one_and_in_blocks(hidden: tuple[int, ...]) -> None:
    from nepcore.backends.fused.forward import FEW_ATOMS

    elements = ("Si", "C", "O", "N", "B", "Al")
    model = synthetic.make_model(elements, cutoff=(4.5, 3.5), hidden=hidden, seed=5)
    few = [crystals.random_structure(k, elements[k % 3 : k % 3 + 3], n=5 + 4 * k) for k in range(12)]
    large = crystals.diamond((11, 11, 11))
    numbers = np.array([14, 6, 8, 7, 5, 13])[np.random.default_rng(2).integers(0, 6, len(large))]
    large = crystals.replace(large, numbers=numbers.astype(large.numbers.dtype))
    calculator = Calculator.of(model, device="cuda", backend="fused")
    plain = Calculator.of(model, device="cuda", dtype="float64", backend="density")
    found = calculator.evaluate(few, PROPERTIES)
    for items in (few, [large], [*few * 30]):
        some, wanted = calculator.evaluate(items, PROPERTIES), plain.evaluate(items, PROPERTIES)
        for name in PROPERTIES:
            a, b = some.values[name], wanted.values[name]
            assert np.abs(a - b).max() <= 1e-4 * max(1.0, float(np.abs(b).max())), (len(items), name)
    # 30 times the same, beyond the number up to which atoms are counted one by one.
    assert int(some.counts.sum()) > FEW_ATOMS
    assert [same_bits(found, i % 12, some, i) for i in range(360)] == [[]] * 360
    assert calculator.faults == {}


def test_failures_stay_alone_and_have_the_same_words() -> None:
    items = [crystals.random_structure(k, MODEL.elements, n=9, pbc=p) for k, p in enumerate(crystals.PERIODICITIES)]
    items.insert(3, crystals.replace(items[0], positions=items[0].positions[[0, 0, *range(2, 9)]]))
    items.append(Structure.make(["Si", "C"], [[0, 0, 0], [6e4, 0, 0]]))
    large = crystals.diamond((11, 11, 11))
    positions = large.positions.copy()
    positions[17] = positions[5]
    items.append(crystals.replace(large, positions=positions))
    wanted = Calculator.of(MODEL, device="cpu", dtype="float64", backend="loop").evaluate(items, PROPERTIES)
    found = Calculator.of(MODEL, device="cuda", backend="fused").evaluate(items, PROPERTIES)
    assert {i: str(e) for i, e in found.errors.items()} == {i: str(e) for i, e in wanted.errors.items()}
    assert sorted(found.errors) == [3, 10]
    # Energies and forces alone come back another way.
    calculator = Calculator.of(MODEL, device="cuda", backend="fused")
    for _ in range(3):  # launched one by one, captured, replayed
        some = calculator.evaluate(items, ("energy", "forces"))
        assert {i: str(e) for i, e in some.errors.items()} == {i: str(e) for i, e in wanted.errors.items()}
        for name, b in some.values.items():
            assert np.allclose(b, found.values[name], rtol=1e-5, atol=1e-3, equal_nan=True), name
    for name in PROPERTIES:
        a, b = found.values[name], wanted.values[name]
        scale = max(1.0, float(np.nanmax(np.abs(b))))
        assert np.allclose(a, b, rtol=0, atol=2e-4 * scale, equal_nan=True), name


def test_dense_and_tiny_cells() -> None:
    items = [Structure.make(["Si"], [[0.1, 0.2, 0.3]], np.eye(3) * a) for a in (0.9, 1.5, 2.5, 40.0)]
    items.append(Structure.make(["Si"] * 3, np.random.default_rng(0).random((3, 3)) * 2, np.eye(3) * 2.1))
    block = Structures.pack(items)
    wanted = Calculator.of(MODEL, device="cpu", dtype="float64", backend="loop").evaluate(block, PROPERTIES)
    found = Calculator.of(MODEL, device="cuda", backend="fused").evaluate(block, PROPERTIES)
    for i in range(len(items)):
        for name, b in wanted.view(i).values.items():
            scale = max(1.0, float(np.abs(b).max()))
            assert np.abs(np.asarray(found.view(i).values[name]) - b).max() <= 1e-4 * scale, (i, name)
