"""The forms of the torch backends agree: values, forces, virials, and gradients by the parameters."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import crystals
from dense_blocks import blocks_of_rows, loss_gradients
from nepcore import synthetic
from nepcore.backends import compiled, forms, mulsum, pairwise
from nepcore.backends.rows import Results, Rows, Shape, Tables, evaluate, evaluate_by_autograd
from nepcore.calculator import Calculator
from nepcore.elements import SYMBOLS
from nepcore.files.nep_layout import SWITCHES
from nepcore.physics import products
from nepcore.potential import NEP
from nepcore.structures import PROPERTIES

if TYPE_CHECKING:
    from collections.abc import Callable

TYPES = [1, 2, 16, 40, 89]
every_form = pytest.mark.parametrize("form", forms.FORMS)


def model_of(n_types: int, **options: object) -> object:
    small = {"n_max": (3, 2), "basis_size": (5, 4), "l_max": 3, "hidden": (6,), "seed": n_types}
    return synthetic.make_model(SYMBOLS[1 : n_types + 1], **{**small, **options})


@pytest.mark.parametrize("n_types", TYPES)
@every_form
def test_forms_agree(n_types: int, form: str) -> None:
    model = model_of(n_types, zbl="universal")
    items = [crystals.random_structure(k, model.elements, n=9, pbc=p) for k, p in enumerate(crystals.PERIODICITIES)]
    wanted = Calculator.of(model, device="cpu", dtype="float64", backend="loop").evaluate(items, PROPERTIES)
    found = Calculator.of(model, device="cpu", dtype="float64", backend=form).evaluate(items, PROPERTIES)
    for name in PROPERTIES:
        assert np.allclose(found[name], wanted[name], rtol=1e-10, atol=1e-10, equal_nan=True), name


@pytest.mark.parametrize("n_types", TYPES)
@every_form
def test_parameter_gradients_agree(n_types: int, form: str) -> None:
    model = model_of(n_types)
    nep = NEP(model, torch.float64)
    wanted = loss_gradients("loop", nep, model.elements)
    assert len(wanted) >= 6
    for found, want in zip(loss_gradients(form, nep, model.elements), wanted, strict=True):
        assert torch.allclose(found, want, rtol=1e-10, atol=1e-10 * max(1.0, float(want.abs().max())))


def traced(shape: Shape, form: object, tables: Tables, rows: Rows) -> Results:
    """Traced for other sizes than it is called with."""
    smaller = Rows(*(t[..., :7, :] if t.ndim > 1 else t[:7] for t in rows))
    return compiled.with_forces_inside(shape, form, tables, smaller)(tables, rows)


@pytest.mark.parametrize(
    ("form", "n_types", "function"),
    [
        *[(form, n, evaluate_by_autograd) for form in ("bmm", "mulsum", "density") for n in (1, 3)],
        *[(form, 2, traced) for form in ("mulsum", "density")],
    ],
)
def test_automatic_derivatives_are_those_of_the_formulas(
    form: str, n_types: int, function: Callable[..., Results]
) -> None:
    model = model_of(n_types, l_max=2, n_max=(2, 1), basis_size=(2, 2), switches=("q222", "q1111"))
    nep = NEP(model, torch.float64)
    tables, rows = blocks_of_rows(nep, model.elements, 5)
    wanted = evaluate(Shape.of(nep), forms.FORMS[form], tables, rows)
    for found, want in zip(function(Shape.of(nep), forms.FORMS[form], tables, rows), wanted, strict=True):
        assert torch.allclose(found, want, rtol=1e-10, atol=1e-10)
    gradients = loss_gradients("loop", nep, model.elements)
    for found, want in zip(loss_gradients(form, nep, model.elements, function), gradients, strict=True):
        assert torch.allclose(found, want, rtol=1e-10, atol=1e-10 * max(1.0, float(want.abs().max())))


def test_tracing_on_builds_that_do_not_import_opt_einsum_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.backends.opt_einsum", raising=False)
    monkeypatch.delattr(torch.backends, "opt_einsum", raising=False)
    model = model_of(1, l_max=1, n_max=(1, 1), basis_size=(1, 1), switches=())
    nep = NEP(model, torch.float64)
    tables, rows = blocks_of_rows(nep, model.elements, 5)
    wanted = evaluate(Shape.of(nep), forms.FORMS["density"], tables, rows)
    found = traced(Shape.of(nep), forms.FORMS["density"], tables, rows)
    assert torch.allclose(found.push, wanted.push, rtol=1e-10, atol=1e-10)
    assert hasattr(torch.backends, "opt_einsum")  # where a tracer that looks it up finds it


@pytest.mark.parametrize("hidden", [(6,), (6, 5)], ids=["one layer", "two layers"])
@pytest.mark.parametrize("n_types", [1, 3, 20])
@every_form
def test_the_matrix_products_of_gpus_are_right(
    n_types: int, form: str, hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(n_types, hidden=hidden, switches=SWITCHES[: 6 if n_types == 3 else 2], l_max=4)
    items = [crystals.random_structure(k, model.elements, n=9, pbc=p) for k, p in enumerate(crystals.PERIODICITIES)]
    wanted = Calculator.of(model, device="cpu", dtype="float64", backend="loop").evaluate(items, PROPERTIES)
    monkeypatch.setattr(products, "on_gpu", lambda _: True)
    # Others look it up by their own names.
    monkeypatch.setattr("nepcore.physics.network.on_gpu", lambda _: True)
    found = Calculator.of(model, device="cpu", dtype="float64", backend=form).evaluate(items, PROPERTIES)
    for name in PROPERTIES:
        assert np.allclose(found[name], wanted[name], rtol=1e-10, atol=1e-10, equal_nan=True), name


@pytest.mark.parametrize("n_types", [1, 3, 33])
def test_both_forms_of_mulsum(n_types: int) -> None:
    rng = torch.Generator().manual_seed(n_types)
    c = torch.randn((4, 7, n_types, n_types), generator=rng, dtype=torch.float64)
    basis = torch.randn((2, 7, 50), generator=rng, dtype=torch.float64)
    centre, neighbor = torch.randint(n_types, (2, 50), generator=rng)
    results = []
    for contract in (mulsum.contract_gather, mulsum.contract_one_hot):
        table, f = c.clone().requires_grad_(), basis.clone().requires_grad_()
        g = contract(table, f, centre, neighbor)
        results.append((g, *torch.autograd.grad((g * g).sum(), (table, f))))
    assert torch.equal(results[0][0], results[1][0])
    for found, wanted in zip(*results, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-10)


def test_slots_grow_by_about_a_quarter() -> None:
    steps = np.diff(pairwise._WIDTHS)
    assert pairwise._WIDTHS[:10] == [16, 32, 48, 64, 80, 96, 112, 128, 160, 192]
    assert (steps <= np.maximum(16, 0.26 * np.array(pairwise._WIDTHS[:-1]))).all()
    assert all(width % 16 == 0 for width in pairwise._WIDTHS)
