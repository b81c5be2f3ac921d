"""The torch backends on a GPU (CUDA or HIP): right values, and nearly the same ones in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import crystals
import nepcore
import references
from locations import needs_shared
from nepcore import synthetic
from nepcore.backends import forms
from nepcore.calculator import Calculator
from nepcore.structures import PROPERTIES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or HIP device")]


@needs_shared
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("backend", forms.FORMS)
@pytest.mark.parametrize("name", references.names())
def test_reference_values(name: str, backend: str, dtype: str) -> None:
    reference = references.load(name)
    calculator = nepcore.load(reference.path, device="cuda", dtype=dtype, backend=backend)
    predictions = calculator.evaluate(reference.structures, PROPERTIES)
    assert predictions.errors == {}
    assert references.compare(predictions, reference, dtype) == []


@pytest.mark.parametrize("backend", forms.FORMS)
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 2e-6)])
def test_alone_and_among_64_others(backend: str, dtype: str, bound: float) -> None:
    model = synthetic.make_model(("Si", "C"), switches=("q222", "q1111"), zbl="universal", seed=3)
    items = [
        crystals.random_structure(k, model.elements, n=4 + k, pbc=crystals.PERIODICITIES[k % 8]) for k in range(65)
    ]
    calculator = Calculator.of(model, device="cuda", dtype=dtype, backend=backend)
    together = calculator.evaluate(items, PROPERTIES)
    for i in (0, 7, 31, 64):
        for name, value in calculator.evaluate(items[i], PROPERTIES).view(0).values.items():
            scale = max(1.0, float(np.abs(value).max()))
            assert np.abs(np.asarray(value) - together.view(i)[name]).max() <= bound * scale, (i, name)


def test_cpu_and_gpu_agree_and_failures_stay_alone() -> None:
    model = synthetic.make_model(("Si", "O", "C"), version=5, zbl="typewise", hidden=(10, 8), seed=4)
    items = [crystals.random_structure(k, model.elements, n=9, pbc=p) for k, p in enumerate(crystals.PERIODICITIES)]
    items.insert(3, crystals.replace(items[0], positions=items[0].positions[[0, 0, *range(2, 9)]]))
    wanted = Calculator.of(model, device="cpu", dtype="float64").evaluate(items, PROPERTIES)
    found = Calculator.of(model, device="cuda", dtype="float64").evaluate(items, PROPERTIES)
    assert {i: e.code for i, e in found.errors.items()} == {3: "coincident_atoms"}
    for name in PROPERTIES:
        assert np.allclose(found.values[name], wanted.values[name], rtol=1e-10, atol=1e-10, equal_nan=True), name


def test_pieces_fit_the_memory_they_are_given() -> None:
    model = synthetic.make_model(("Si",), switches=("q222", "q1111"), seed=1)
    s = crystals.diamond((12, 12, 12))
    calculator = Calculator.of(model, device="cuda", memory=200e6)
    calculator.evaluate(crystals.diamond((2, 2, 2)))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    calculator.evaluate(s)
    assert torch.cuda.max_memory_allocated() - before < 2.5 * 200e6
