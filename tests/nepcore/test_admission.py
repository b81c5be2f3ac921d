"""The door of a model: what it refuses, the work it announces, and that a batch is judged as its structures alone."""

from __future__ import annotations

import numpy as np
import pytest

from nepcore.admission import ALONE, MAX_NEIGHBORS, Admission
from nepcore.structures import Structure, Structures

DOOR = Admission(("C", "Si", "Ge"), temperature=False, cutoff=5.0)


def random_block(rng: np.random.Generator, size: int) -> Structures:
    counts = rng.integers(1, 7, size)
    n = int(counts.sum())
    return Structures.from_arrays(
        counts, rng.choice([6, 14, 32, 92], n, p=[0.3, 0.4, 0.28, 0.02]), rng.normal(0, 3, (n, 3)),
        rng.normal(0, 4, (size, 3, 3)), rng.random((size, 3)) < rng.choice([0.0, 0.6, 1.0], (size, 1)),
    )  # fmt: skip


def test_a_batch_is_judged_as_its_structures_alone() -> None:
    rng = np.random.default_rng(3)
    block = random_block(rng, 200)
    block.positions[7] = np.nan
    block.cells[11] = 0.0
    block.cells[12, 1] = 2.0 * block.cells[12, 0]
    errors, work = DOOR.examine(block)
    assert len(errors) > 4
    assert DOOR.problems(block).keys() == errors.keys()
    np.testing.assert_array_equal(DOOR.work(block), work)
    for i in range(len(block)):
        alone, alone_work = DOOR.examine(block.slice(i, i + 1))
        assert [(e.code, e.reason) for e in alone.values()] == [
            (e.code, e.reason) for k, e in errors.items() if k == i
        ]  # fmt: skip
        if not alone:
            assert alone_work[0] == work[i]


@pytest.mark.parametrize("pbc", [True, (True, True, False)], ids=["bulk", "slab"])
def test_a_step_is_judged_as_if_it_were_the_first(pbc: object) -> None:
    door = Admission(("Si",), temperature=True, cutoff=5.0)
    good = Structure.make(["Si", "Si"], [[0, 0, 0], [2, 2, 2]], np.eye(3) * 5.0, pbc, 300.0)
    changes: list[tuple[dict[str, object], str]] = [
        ({}, ""),
        ({"positions": good.positions + 1.0}, ""),
        ({"positions": np.array([[0.0, 0, 0], [np.nan, 0, 0]])}, "non_finite"),
        ({"positions": np.array([[0.0, 0, 0], [-1e300, 0, 0]])}, "out_of_range"),
        ({"numbers": np.array([14, 6], np.uint8)}, "unknown_element"),
        ({"cell": np.zeros((3, 3))}, "singular_cell"),
        ({"cell": np.eye(3) * 0.05}, "too_dense"),
        ({"temperature": None}, "missing_temperature"),
        ({}, ""),
    ]
    for change, code in changes:
        values = {name: getattr(good, name) for name in ("numbers", "positions", "cell", "pbc", "temperature")}
        block = Structures.pack([Structure(**{**values, **change})])  # type: ignore[arg-type]
        if not code:
            assert door.problems(block) == {}, change
            assert door.examine(block)[0] == {}
            continue
        assert [e.code for e in door.problems(block).values()] == [code], change
        assert [e.code for e in door.problems(Structures.pack([Structure(**values)])).values()] == []


@pytest.mark.parametrize("size", [1, 3], ids=["alone", "in a batch"])
@pytest.mark.parametrize("pbc", [(True, True, True), (True, True, False)], ids=["bulk", "slab"])
def test_dependent_vectors_are_always_found(size: int, pbc: tuple[bool, ...]) -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        cells = rng.normal(0, 4, (size, 3, 3))
        cells[-1, 1] = rng.normal() * cells[-1, 0]
        block = Structures.from_arrays([1] * size, [14] * size, np.zeros((size, 3)), cells, [pbc] * size)
        assert block.problems()[size - 1].code == "singular_cell"


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e5])
def test_skewed_cells_that_are_still_cells(scale: float) -> None:
    for angle in (1.0, 1e-3, 1e-6):
        cell = scale * np.array([[1.0, 0, 0], [np.cos(angle), np.sin(angle), 0], [0, 0, 1.0]])
        for count in (1, 2):
            block = Structures.from_arrays([1] * count, [14] * count, np.zeros((count, 3)), [cell] * count)
            assert block.problems() == {}


def test_work_follows_the_density() -> None:
    a = 5.431
    sites = a * np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    sites = np.vstack([sites, sites + 0.25 * a])
    bulk = Structure.make(["Si"] * 8, sites, a * np.eye(3))
    molecule = Structure.make(["Si"] * 8, sites)
    boxed = Structure.make(["Si"] * 8, sites, 300 * np.eye(3), pbc=False)
    neighbors = DOOR.neighbors(Structures.pack([bulk, molecule, boxed]))
    assert neighbors[0] == pytest.approx(8 / a**3 * 4 / 3 * np.pi * 125)
    # A box around a molecule changes nothing, and nobody has more neighbours than there are atoms.
    assert neighbors[1] == neighbors[2] == 8
    work = DOOR.work(Structures.pack([bulk, molecule]))
    np.testing.assert_allclose(work, [8 * (neighbors[0] + ALONE), 8 * (8 + ALONE)])


@pytest.mark.parametrize("count", [1, 2])
def test_crushed_cells_are_too_dense(count: int) -> None:
    block = Structures.from_arrays([4] * count, [14] * 4 * count, np.zeros((4 * count, 3)), [0.1 * np.eye(3)] * count)
    errors, work = DOOR.examine(block)
    assert {e.code for e in errors.values()} == {"too_dense"}
    assert len(errors) == count
    assert work.max() == 4 * (MAX_NEIGHBORS + ALONE)


def test_a_crowd_without_a_cell_is_the_fault_of_its_positions() -> None:
    count = MAX_NEIGHBORS + 2
    errors = DOOR.problems(Structures.from_arrays([count], [14] * count, np.zeros((count, 3)), None))
    assert (errors[0].code, errors[0].field) == ("too_dense", "positions")
    assert "cell" not in errors[0].reason


def test_nothing_at_all() -> None:
    errors, work = DOOR.examine(Structures.empty())
    assert errors == {}
    assert work.shape == (0,)
