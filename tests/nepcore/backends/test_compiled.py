"""Compiled forms: the same numbers as without, one compilation for all sizes, a way on where there is no compiler."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import crystals
from dense_blocks import loss_gradients
from nepcore import synthetic
from nepcore.backends import compiled, forms, rows
from nepcore.calculator import Calculator
from nepcore.elements import SYMBOLS
from nepcore.potential import NEP
from nepcore.structures import PROPERTIES

if TYPE_CHECKING:
    from collections.abc import Callable


def model_of(n_types: int) -> object:
    """As small as a model can be: compilers take long."""
    return synthetic.make_model(
        SYMBOLS[1 : n_types + 1], n_max=(1, 1), basis_size=(1, 1), l_max=1, switches=("q1111",), hidden=(3,),
        cutoff=(4.0, 3.5), seed=n_types,
    )  # fmt: skip


def check(n_types: int, form: str, ending: str = "+compiled") -> None:
    model = model_of(n_types)
    plain = Calculator.of(model, device="cpu", dtype="float64", backend="loop")
    calculator = Calculator.of(model, device="cpu", dtype="float64", backend=form + ending)
    sizes = [1, 2, 17, 40]
    items = [crystals.random_structure(n, model.elements, n=n, pbc=n != 2) for n in sizes]
    wanted, found = plain.evaluate(items, PROPERTIES), calculator.evaluate(items, PROPERTIES)
    assert calculator.faults == {}
    for name in PROPERTIES:
        assert np.allclose(found[name], wanted[name], rtol=1e-10, atol=1e-10, equal_nan=True), name
    graphs = counters["stats"]["unique_graphs"]
    for i, s in enumerate([*items, crystals.diamond((3, 3, 3)) if "Si" in model.elements else items[-1]]):
        alone = calculator.evaluate(s, PROPERTIES).view(0)
        if i < len(items):
            for name, value in alone.values.items():
                assert np.array_equal(value, found.view(i)[name]), (i, name)
    assert counters["stats"]["unique_graphs"] == graphs, "a size was compiled anew"


@pytest.mark.parametrize("form", ["density", "mulsum"])
def test_numbers_bits_and_no_second_compilation(form: str) -> None:
    check(2, form)


@pytest.mark.slow
@pytest.mark.parametrize("n_types", [1, 2, 16])
@pytest.mark.parametrize("form", forms.FORMS)
def test_every_form(form: str, n_types: int) -> None:
    if form == "loop" and n_types > 8:
        pytest.skip("the loop is compiled for few types")
    check(n_types, form)


@pytest.mark.slow
@pytest.mark.parametrize("n_types", [1, 3])
def test_forces_by_automatic_differentiation(n_types: int) -> None:
    check(n_types, "density", "+compiled+autograd")


@pytest.mark.slow
@pytest.mark.parametrize("n_types", [1, 2, 16])
@pytest.mark.parametrize("form", forms.FORMS)
def test_parameter_gradients(form: str, n_types: int) -> None:
    if form == "loop" and n_types > 8:
        pytest.skip("the loop is compiled for few types")
    model = model_of(n_types)
    nep = NEP(model, torch.float64)

    def together(shape: rows.Shape, form: object, tables: rows.Tables, block: rows.Rows) -> rows.Results:
        function = compiled._own_code(lambda tables, block: rows.evaluate(shape, form, tables, block))
        return torch.compile(function, fullgraph=True)(tables, block)

    graphs = counters["stats"]["unique_graphs"]
    found = loss_gradients(form, nep, model.elements, together)
    assert counters["stats"]["unique_graphs"] == graphs + 1
    found = [gradient.clone() for gradient in found]
    wanted = loss_gradients("loop", nep, model.elements)
    assert len(wanted) >= 6
    for gradient, want in zip(found, wanted, strict=True):
        assert torch.allclose(gradient, want, rtol=1e-10, atol=1e-10 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize(
    "failing",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        PermissionError(13, "Permission denied", "/nowhere/torchinductor"),
        KeyError("getpwuid(): uid not found: 4711"),
        FileNotFoundError(2, "No such file or directory", "g++"),
    ],
    ids=["compiler", "cache", "user", "program"],
)
def test_without_a_compiler_it_goes_on(
    failing: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> Callable[..., object]:
        raise failing

    monkeypatch.setattr(torch, "compile", fail)
    model = model_of(2)
    calculator = Calculator.of(model, device="cpu", backend="density+compiled")
    s = crystals.random_structure(3, model.elements)
    with caplog.at_level(logging.WARNING, logger="nepcore"):
        found = calculator.evaluate(s)
        calculator.evaluate(s)
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
    (fault,) = calculator.faults.values()
    assert str(failing).strip("'").split(":")[0][:20] in fault
    assert np.allclose(found["energy"], Calculator.of(model, device="cpu", backend="density").evaluate(s)["energy"])


def test_out_of_memory_is_no_fault_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Callable[..., object]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "compile", fail)
    model = model_of(1)
    calculator = Calculator.of(model, device="cpu", backend="density+compiled")
    with pytest.raises(torch.OutOfMemoryError):
        calculator.evaluate(crystals.random_structure(3, model.elements))
    assert calculator.faults == {}


def test_tables_hold_the_types_that_the_code_is_made_for() -> None:
    nep = NEP(model_of(40), torch.float32)
    shape, form = rows.Shape.of(nep), forms.FORMS["density"]
    on_cpu = compiled.CompiledBlock(shape, form, torch.device("cpu"))
    on_gpu = compiled.CompiledBlock(shape, form, torch.device("cuda"))
    assert on_cpu.types(np.array([3]), 40).tolist() == list(range(40))
    assert on_gpu.types(np.array([3]), 40).tolist() == [3, 4]
    assert on_gpu.types(np.array([39]), 40).tolist() == [0, 39]
    assert on_gpu.types(np.array([3, 7, 9]), 40).tolist() == [3, 7, 9]
    assert on_gpu.types(np.array([3]), 16).tolist() == list(range(16))
    assert {on_cpu.rows(n) % 16 for n in range(1, 50)} == {0}
