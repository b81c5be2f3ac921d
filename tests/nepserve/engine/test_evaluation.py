from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import assert_same_bits, block, directly, file, finish, structure, toy
from nepcore.errors import ModelError
from nepcore.structures import PER_ATOM, PROPERTIES, Predictions, Structures
from nepserve.engine.errors import DeviceLost
from nepserve.engine.evaluation import evaluate
from nepserve.engine.memory import Limit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

USUAL = ("energy", "forces", "stress")
FAULTS = {"Ge": "raise", "Ga": "refuse", "As": "nan", "Se": "refuse_all", "Br": "no_memory", "P": "nan_energy"}
CODES = {
    "Ge": "internal",
    "Ga": "unknown_element",
    "As": "non_finite_result",
    "Se": "too_dense",
    "Br": "out_of_memory",
    "P": "non_finite_result",
}


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    """Memory that runs out makes the engine collect garbage, which here would look at all of pytest each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def outcome(
    structures: Structures, properties: Sequence[str] = USUAL, limit: Limit | None = None, **options: Any
) -> Predictions:
    found: Predictions = finish(evaluate(toy.load(file(**options)), structures, tuple(properties), limit or Limit()))
    return found


def assert_failed_rows_are_nan(found: Predictions) -> None:
    for i in found.errors:
        a, b = found.offsets[i], found.offsets[i + 1]
        for name, values in found.values.items():
            assert np.isnan(values[a:b] if name in PER_ATOM else values[i]).all()
        assert not found.stress_known[i]


def test_a_batch_without_faults_is_what_the_model_says() -> None:
    structures = block(1, 5, 30, 2, 8)
    assert_same_bits(outcome(structures, PROPERTIES), directly(structures, PROPERTIES))


def test_nothing_in_nothing_out() -> None:
    found = outcome(Structures.empty(), PROPERTIES)
    assert len(found) == 0
    assert {name: values.shape for name, values in found.values.items()} == {
        "energy": (0,), "free_energy": (0,), "stress": (0, 6), "virial": (0, 3, 3), "energies": (0,),
        "forces": (0, 3), "virials": (0, 3, 3), "descriptors": (0, 0),
    }  # fmt: skip
    assert found.errors == {}


@given(
    items=st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from([None, None, None, *FAULTS])), min_size=1, max_size=20
    ),
    memory=st.sampled_from([None, 1, 3, 11, 12, 40]),
    limit=st.sampled_from([None, 1, 9, 30]),
)
@settings(max_examples=60)
def test_whatever_fails_fails_alone(items: list[tuple[int, str | None]], memory: int | None, limit: int | None) -> None:
    singles = [
        structure(n, i, ["Si"] if fault is None else [fault, "Si"], periodic=i % 3 != 0)
        for i, (n, fault) in enumerate(items)
    ]
    structures = Structures.pack(singles)
    options: dict[str, Any] = {"faults": FAULTS}
    if memory is not None:
        options["memory"] = memory
    found = outcome(structures, limit=Limit(limit), **options)
    codes = {}
    for i, (n, fault) in enumerate(items):
        # The toy counts memory last, after exceptions and before errors in band.
        if fault in {"Ge", "Se", "Br"}:
            codes[i] = CODES[fault]
        elif memory is not None and n > memory:
            codes[i] = "out_of_memory"
        elif fault is not None:
            codes[i] = CODES[fault]
    assert {i: error.code for i, error in found.errors.items()} == codes
    assert_failed_rows_are_nan(found)
    for i in range(len(items)):
        if i not in codes:
            alone = directly(Structures.pack([singles[i]]), USUAL)
            assert_same_bits(found.slice(i, i + 1), alone)


@pytest.mark.parametrize(
    "text", ["CUDA out of memory", "HIP out of memory", "MemoryError", "CUBLAS_STATUS_ALLOC_FAILED"]
)
@pytest.mark.parametrize("memory", [1, 2, 7, 20, 63])
def test_out_of_memory_at_any_depth(memory: int, text: str) -> None:
    structures = block(*[1] * 64)
    limit = Limit()
    found = outcome(structures, limit=limit, memory=memory, memory_text=text)
    assert found.errors == {}
    assert_same_bits(found, directly(structures, USUAL))
    assert limit.atoms is not None
    assert limit.atoms <= 32
    assert limit.splits >= 1


def test_a_learned_limit_spares_further_failures() -> None:
    structures = block(*[4] * 32)
    limit = Limit()
    outcome(structures, limit=limit, memory=40)
    splits = limit.splits
    outcome(structures, limit=limit, memory=40)
    assert limit.splits == splits


def test_a_structure_too_large_for_the_memory_names_its_size() -> None:
    found = outcome(block(3, 50, 3), memory=20)
    assert list(found.errors) == [1]
    assert found.errors[1].code == "out_of_memory"
    assert "50 atoms" in found.errors[1].reason


def test_memory_that_others_held_for_a_moment() -> None:
    calls = []

    class Passing(toy.ToyCalculator):  # type: ignore[misc,name-defined]
        def run(self, structures: Structures, properties: Sequence[str]) -> Any:
            calls.append(structures.n_atoms)
            if len(calls) == 1:
                raise MemoryError
            return (yield from super().run(structures, properties))

    structures = block(9)
    found = finish(evaluate(Passing({}, "cpu", "float64"), structures, USUAL, Limit()))
    assert found.errors == {}
    assert_same_bits(found, directly(structures, USUAL))
    assert calls == [9, 9]


def test_an_unexpected_exception_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    structures = Structures.pack([structure(4), structure(4, 1, ["Ge"]), structure(4, 2)])
    with caplog.at_level(logging.ERROR, "nepserve.engine"):
        found = outcome(structures, faults={"Ge": "raise"})
    assert found.errors[1].code == "internal"
    assert found.errors[1].reason == "the evaluation failed: ValueError: the toy trips over a poisoned atom"
    assert "Traceback" in caplog.text
    assert "_fail" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("fault", ["nan", "nan_energy"])
@pytest.mark.parametrize("properties", [("energy",), ("forces",), ("energy", "forces"), PROPERTIES], ids="+".join)
def test_a_result_that_is_not_finite_names_the_atom(fault: str, properties: tuple[str, ...]) -> None:
    poisoned = structure(6, 1, ["Si", "Si", "Si", "Ge", "Si", "Si"])
    structures = Structures.pack([structure(5), poisoned, structure(7, 2)])
    found = outcome(structures, properties, faults={"Ge": fault})
    shown = {"nan": {"forces"}, "nan_energy": {"energy", "energies", "virials", "virial", "free_energy"}}[fault]
    if shown.isdisjoint(properties):
        assert found.errors == {}
        return
    assert list(found.errors) == [1]
    error = found.errors[1]
    assert error.code == "non_finite_result"
    assert "atom 4" in error.reason
    assert error.atoms == (3,)
    assert_failed_rows_are_nan(found)
    assert_same_bits(found, directly(structures, properties), [0, 2])


def test_stress_of_a_molecule_is_unknown_and_no_error() -> None:
    structures = Structures.pack([structure(5, periodic=False), structure(4)])
    found = outcome(structures)
    assert found.errors == {}
    assert found.stress_known.tolist() == [False, True]
    assert np.isnan(found.values["stress"][0]).all()


def test_what_the_model_cannot_do_fails_the_batch() -> None:
    with pytest.raises(ModelError, match="cannot do that"):
        outcome(block(3), faults={"Si": "model"})


def test_a_lost_device_ends_everything() -> None:
    with pytest.raises(DeviceLost, match="device-side assert"):
        outcome(block(3, 4), faults={"Si": "lost"})


@pytest.mark.parametrize("name", ["forces", "energy"])
def test_a_backend_that_forgets_rows_is_caught(name: str) -> None:
    class Short(toy.ToyCalculator):  # type: ignore[misc,name-defined]
        def run(self, structures: Structures, properties: Sequence[str]) -> Any:
            found = yield from super().run(structures, properties)
            if len(structures) == 2:
                found.values[name] = found.values[name][:-1]
            return found

    structures = block(3, 4)
    found = finish(evaluate(Short({}, "cpu", "float64"), structures, USUAL, Limit()))
    assert found.errors == {}
    assert_same_bits(found, directly(structures, USUAL))


def test_progress_counts_finished_atoms() -> None:
    structures = block(*[4] * 10)
    steps = evaluate(toy.load(file(tile=8)), structures, USUAL, Limit(20))
    assert list(steps) == [8, 16, 20, 28, 36, 40]
