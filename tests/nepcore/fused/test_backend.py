"""The fused backend as a whole, in Triton's interpreter where there is no GPU: values, bits, failures, fallbacks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import crystals
from nepcore import Structure, Structures, synthetic
from nepcore.backends import candidates
from nepcore.calculator import Calculator
from nepcore.errors import ModelError
from nepcore.structures import PROPERTIES, Predictions

pytest.importorskip("triton")

from nepcore.backends.fused import backend as fused_backend
from nepcore.backends.fused import small
from nepcore.backends.fused.backend import Fused, atoms_of, room, structures_of

if TYPE_CHECKING:
    from collections.abc import Generator

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CUTOFF = (3.6, 2.8)
MODEL = synthetic.make_model(("Si", "C"), cutoff=CUTOFF, switches=("q222",), zbl="universal", seed=3)


def fused(model: object = MODEL) -> Fused:
    return Fused(model, DEVICE, 1e9, lambda: candidates.make("loop", model, DEVICE, "float32", 48e6))  # type: ignore[arg-type]


def evaluated(backend: Fused, structures: Structures) -> Predictions:
    found: list[Predictions] = []

    def whole() -> Generator[int, None, None]:
        found.append((yield from backend.run(structures, frozenset(PROPERTIES))))

    assert sum(whole()) == structures.n_atoms
    return found[0]


def wanted(structures: Structures) -> Predictions:
    return Calculator.of(MODEL, device="cpu", dtype="float64", backend="loop").evaluate(structures, PROPERTIES)


def check(found: Predictions, structures: Structures, bound: float = 1e-4) -> None:
    reference = wanted(structures)
    assert {i: str(e) for i, e in found.errors.items()} == {i: str(e) for i, e in reference.errors.items()}
    for name in PROPERTIES:
        a, b = found.values[name], reference.values[name]
        scale = max(1.0, float(np.nanmax(np.abs(b), initial=0.0)))
        assert a.shape == b.shape
        assert np.allclose(a, b, rtol=0, atol=bound * scale, equal_nan=True), name


def same_bits(a: Predictions, b: Predictions) -> bool:
    return all(np.array_equal(a.values[name], b.values[name], equal_nan=True) for name in PROPERTIES)


def some(count: int) -> list[Structure]:
    return [
        crystals.random_structure(k, MODEL.elements, n=3 + k, pbc=crystals.PERIODICITIES[k % 8]) for k in range(count)
    ]


def test_a_structure_has_the_same_bits_alone_and_anywhere_in_a_batch() -> None:
    items = some(5)
    backend = fused()
    together = evaluated(backend, Structures.pack(items))
    check(together, Structures.pack(items))
    backwards = evaluated(backend, Structures.pack(items[::-1]))
    for k, item in enumerate(items):
        alone = evaluated(backend, Structures.pack([item]))
        for name, value in alone.view(0).values.items():
            assert np.array_equal(value, together.view(k)[name]), (k, name)
            assert np.array_equal(value, backwards.view(4 - k)[name]), (k, name)
    assert backend.fault == ""


def test_bits_do_not_depend_on_the_elements_of_others() -> None:
    model = synthetic.make_model(("Si", "C", "O", "N", "B"), cutoff=CUTOFF, seed=3)
    one = crystals.random_structure(0, ("C", "N"), n=6)
    other = crystals.random_structure(1, ("Si", "O", "B", "C"), n=6)
    backend = fused(model)
    alone = evaluated(backend, Structures.pack([one]))
    together = evaluated(backend, Structures.pack([other, one]))
    for name, value in alone.view(0).values.items():
        assert np.array_equal(value, together.view(1)[name]), name


def test_chunks_and_more_neighbours_than_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    # A slab in a tall cell is denser than its volume tells.
    slab = crystals.replace(crystals.diamond((1, 1, 1), a=3.9), cell=np.diag([3.9, 3.9, 60.0]))
    items = [*some(3), slab]
    whole = evaluated(fused(), Structures.pack(items))
    monkeypatch.setattr(fused_backend, "CHUNK", 8)
    monkeypatch.setattr(fused_backend, "room", lambda count: max(16, -(-int(count) // 16) * 16))
    backend = fused()
    monkeypatch.setattr(backend, "capacity", lambda _expected: backend._corrected.get((16, 16), (16, 16)))
    pieces = evaluated(backend, Structures.pack(items))
    assert backend._corrected
    assert same_bits(whole, pieces)
    check(pieces, Structures.pack(items))


def test_results_do_not_depend_on_what_was_evaluated_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_backend, "SMALL", 20)
    rng = np.random.default_rng(0)
    one = Structures.pack([crystals.random_structure(5, MODEL.elements, n=70, pbc=(False, True, True)), *some(1)])
    backend = fused()
    for step in range(3):
        found = evaluated(backend, one)
        check(found, one)
        assert same_bits(found, evaluated(fused(), one))
        assert backend._large[-1].rebuilds == (1, 1, 2)[step]
        one.positions[:] += rng.normal(0, 0.05, one.positions.shape)
        one.positions[7] += 0.6 * step
    assert backend.fault == ""


def test_failures_stay_alone_and_have_the_words_of_the_other_backends() -> None:
    items = some(3)
    double = items[2]
    items.insert(1, crystals.replace(double, positions=double.positions[[0, 0, *range(2, len(double))]]))
    items.append(Structure.make(["Si", "C"], [[0, 0, 0], [6e4, 0, 0]]))  # left to another backend
    backend = fused()
    found = evaluated(backend, Structures.pack(items))
    assert {i: e.code for i, e in found.errors.items()} == {1: "coincident_atoms"}
    check(found, Structures.pack(items))


def test_nothing_to_do() -> None:
    found = evaluated(fused(), Structures.empty())
    assert len(found) == 0
    assert found.values["forces"].shape == (0, 3)


def test_where_triton_cannot_compile_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(small.Slot, "launch", broken)
    structures = Structures.pack(some(2))
    backend = fused()
    with caplog.at_level(logging.WARNING, "nepcore"):
        first, second = evaluated(backend, structures), evaluated(backend, structures)
    assert [record.message for record in caplog.records if "Triton" in record.message] == [
        (
            "Triton cannot be used here, the model is evaluated by torch: "
            "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."
        )
    ]
    assert backend.fault.startswith("RuntimeError: Failed to find C compiler")
    check(first, structures)
    check(second, structures)


def test_two_runs_may_alternate() -> None:
    backend = fused()
    a, b = Structures.pack(some(2)), Structures.pack(some(3)[1:])
    runs = [backend.run(s, frozenset(PROPERTIES)) for s in (a, b)]
    results: dict[int, Predictions] = {}
    while len(results) < 2:
        for k, run in enumerate(runs):
            if k in results:
                continue
            try:
                next(run)
            except StopIteration as end:
                results[k] = end.value
    check(results[0], a)
    check(results[1], b)


def test_it_says_where_it_cannot_be_used() -> None:
    with pytest.raises(ModelError, match="it computes on a GPU, not on cpu"):
        Calculator.of(MODEL, device="cpu", backend="fused")
    with pytest.raises(ModelError, match="computes in float32, not in float64"):
        candidates.get("fused").make(MODEL, DEVICE, "float64", 1e9)
    large = synthetic.make_model(("Si",), n_max=(40, 40), l_max=8, seed=1)
    assert "inputs" in candidates.get("fused").unfit(large, torch.device("cuda", 0))


def test_sizes_of_buffers_grow_in_steps() -> None:
    assert [atoms_of(n) for n in (1, 64, 65, 97, 129, 200)] == [64, 64, 96, 128, 192, 256]
    assert [structures_of(n) for n in (1, 2, 5, 1024)] == [1, 4, 16, 1024]
    assert [room(n) for n in (0, 17, 129, 200, 1000)] == [16, 32, 160, 224, 1024]
    assert all(room(n) % 16 == 0 for n in range(1, 5000, 37))
