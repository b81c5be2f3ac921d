"""Losses and their gradients: every way to compute, against each other, finite differences and the formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import trainings
from nepcore.calculator import Calculator
from nepcore.errors import ModelError
from nepcore.potential import DTYPES
from nepcore.training.batches import assemble, widths
from nepcore.training.dataset import Dataset, element_offsets
from nepcore.training.forward import BACKENDS, KERNELS, usual
from nepcore.training.loss import TERMS
from nepcore.training.parameters import Layout, scalers, start_model, without_types
from nepcore.training.stepper import State, Stepper

KINDS = {
    "plain": {},
    "two layers, all invariants": {"neuron": (4, 3), "l_max": 4,
                                   "switches": ("q222", "q1111", "q112", "q123", "q233", "q134")},
    "temperature": {"temperature": True},
    "typewise zbl, element offsets": {"zbl": 2.5, "zbl_factor": 0.8, "offset": "elements"},
    "weights": {"type_weight": (1.5, 0.5), "force_delta": 0.7, "lambda_shear": 2.0},
}  # fmt: skip


def made(
    backend: str = "sums", *, padded: bool = False, device: str = "cpu", **changes: object
) -> tuple[Stepper, list, list[float]]:
    """A stepper with random parameters, a batch, and its numbers of labels."""
    settings = trainings.settings(**changes)
    frames = trainings.without(trainings.frames(4), energy=[1], forces=[2], virial=[0])
    frames = replace(frames, weight=np.array([1.0, 2.0, 0.5, 1.5]), energy_weight=np.array([1.0, 1.0, 3.0, 0.5]))
    model = start_model(settings, (1, 1))
    data = Dataset.of(frames, model, settings)
    layout = Layout.of(model)
    vector = layout.vector(model, torch.float64)
    vector += 0.1 * torch.randn(len(vector), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scaler = torch.linspace(0.4, 1.3, model.dim, dtype=torch.float64)
    if settings.temperature:
        scaler[-1] = 0.001
    vector, scaler = (t.to(device, DTYPES[settings.dtype]) for t in (vector, scaler))
    stepper = Stepper(model, settings, layout, State.of(vector, 0.3), scaler, backend=backend)
    arrays = assemble(data, np.arange(4), pad=padded)
    part = (arrays, widths(arrays, pad=padded))
    return stepper, [part], stepper.errors(*part).labels.tolist()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_ways_to_compute_agree(kind: dict[str, object]) -> None:
    reference = None
    for backend in BACKENDS:
        stepper, parts, labels = made(backend, **kind)
        stepper.set(0.01, (1.0, 0.3, 0.2))
        found = stepper.errors(*parts[0])
        values = [*found.weighted, *found.plain, *found.offset, *stepper.gradient(parts, labels)]
        now = torch.stack(values).numpy()
        reference = now if reference is None else reference
        np.testing.assert_allclose(now, reference, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_kernels_agree_in_single_precision(kind: dict[str, object]) -> None:
    """Losses and gradient of Triton's kernels, as near to double precision as plain torch in single precision."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def found(backend: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        stepper, parts, labels = made(backend, padded=True, dtype=dtype, device=device, **kind)
        stepper.set(0.01, (1.0, 0.3, 0.2))
        sums = stepper.errors(*parts[0])
        return torch.cat([sums.weighted, sums.plain]).cpu().numpy(), stepper.gradient(parts, labels).cpu().numpy()

    sums, gradient = found("sums", "float64")
    for backend in ("sums", KERNELS):
        values, slope = found(backend, "float32")
        np.testing.assert_allclose(values, sums, rtol=5e-6)
        assert np.linalg.norm(slope - gradient) < 5e-6 * np.linalg.norm(gradient)


def test_kernels_are_for_single_precision() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ModelError, match="float32"):
        made(KERNELS)
    cuda = torch.device("cuda")
    assert usual(torch.float64, cuda) == usual(torch.float32, torch.device("cpu")) == "sums"


def test_kernels_are_tried_out_before_they_are_the_usual_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    from nepcore.training import kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels.try_out(device)
    real, tried = kernels.try_out, []
    monkeypatch.setattr(kernels, "try_out", lambda _: tried.append(real(device)))
    assert usual(torch.float32, torch.device("cuda")) == KERNELS
    assert tried == [None]
    monkeypatch.setattr(kernels, "radial_forces", lambda *_: (torch.zeros(2, 3, device=device), None))
    with caplog.at_level("WARNING", "nepcore"):
        assert usual(torch.float32, torch.device("cuda")) == "sums"
    assert "without Triton's kernels" in caplog.text


@pytest.mark.parametrize("form", ["mse", "rmse"])
@pytest.mark.parametrize("term", range(3), ids=TERMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_finite_differences(backend: str, term: int, form: str) -> None:
    stepper, parts, labels = made(backend, loss=form)
    lambdas = [0.0, 0.0, 0.0]
    lambdas[term] = 0.7
    stepper.set(0.01, lambdas)
    gradient = stepper.gradient(parts, labels)
    assert gradient.norm() > 0
    vector = stepper.state.vector
    generator = torch.Generator().manual_seed(2)
    directions = [torch.randn(len(vector), generator=generator, dtype=torch.float64) for _ in range(2)]
    directions += [torch.eye(len(vector), dtype=torch.float64)[i] for i in range(0, len(vector), len(vector) // 12)]
    for direction in directions:
        values = []
        for sign in (1, -1):
            vector += sign * 1e-5 * direction
            mean = stepper.errors(*parts[0]).weighted[term] / labels[term]
            values.append(float(0.7 * (mean if form == "mse" else mean.sqrt())))
            vector -= sign * 1e-5 * direction
        slope = (values[0] - values[1]) / 2e-5
        assert float(gradient @ direction) == pytest.approx(slope, rel=2e-6, abs=1e-8)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_gradients_of_all_terms_of_every_kind_of_model(kind: dict[str, object]) -> None:
    stepper, parts, labels = made(**kind)
    stepper.set(0.01, (1.0, 1.0, 1.0))
    gradient = stepper.gradient(parts, labels)
    vector = stepper.state.vector
    direction = torch.randn(len(vector), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    values = []
    for sign in (1, -1):
        vector += sign * 1e-5 * direction
        found = stepper.errors(*parts[0])
        values.append(float((found.weighted / found.labels).sum()))
        vector -= sign * 1e-5 * direction
    assert float(gradient @ direction) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)


def test_arrays_that_are_filled_up_change_nothing() -> None:
    one, other = made(), made(padded=True)
    assert len(other[1][0][0].types) > len(one[1][0][0].types)
    for stepper, _, _ in (one, other):
        stepper.set(0.01, (1.0, 0.3, 0.2))
    torch.testing.assert_close(other[0].gradient(*other[1:]), one[0].gradient(*one[1:]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("form", ["mse", "rmse"])
def test_a_batch_in_pieces_is_the_batch(form: str) -> None:
    stepper, parts, labels = made(loss=form)
    stepper.set(0.01, (1.0, 0.3, 0.2))
    whole = stepper.gradient(parts, labels)
    frames = trainings.without(trainings.frames(4), energy=[1], forces=[2], virial=[0])
    frames = replace(frames, weight=np.array([1.0, 2.0, 0.5, 1.5]), energy_weight=np.array([1.0, 1.0, 3.0, 0.5]))
    data = Dataset.of(frames, start_model(stepper.settings, (1, 1)), stepper.settings)
    pieces = [assemble(data, np.array(rows)) for rows in ([0, 1], [2], [3])]
    again = stepper.gradient([(arrays, widths(arrays, pad=False)) for arrays in pieces], labels)
    torch.testing.assert_close(again, whole, rtol=1e-11, atol=1e-13)


def test_the_loss_is_that_of_the_formulas() -> None:
    """Energies, forces and virials of the evaluating side, and the formulas written out once more."""
    kind = {"type_weight": (1.5, 0.5), "force_delta": 0.7, "lambda_shear": 2.0, "zbl": 2.5}
    stepper, parts, labels = made(**kind)
    model = start_model(stepper.settings, (1, 1))
    model = stepper.layout.model(stepper.state.vector, model, 0.3, stepper.q_scaler.numpy())
    frames = trainings.without(trainings.frames(4), energy=[1], forces=[2], virial=[0])
    w, u = np.array([1.0, 2.0, 0.5, 1.5]), np.array([1.0, 1.0, 3.0, 0.5])
    found = Calculator.of(model, device="cpu", dtype="float64", backend="loop").evaluate(
        frames.structures, ["energy", "forces", "virial"]
    )
    n = frames.structures.counts
    energy = np.nansum(w**2 * u * ((found["energy"] - frames.energy) / n) ** 2)
    per_atom = np.repeat(w**2, n) * np.where(frames.structures.numbers == 14, 1.5, 0.5) ** 2
    delta = 0.7 / (0.7 + np.linalg.norm(frames.forces, axis=1))
    forces = np.nansum(per_atom * delta * ((found["forces"] - frames.forces) ** 2).sum(axis=1))
    dw = (found["virial"] - frames.virial) / n[:, None, None]
    straight = dw[:, 0, 0] ** 2 + dw[:, 1, 1] ** 2 + dw[:, 2, 2] ** 2
    off = 4.0 * (dw[:, 0, 1] ** 2 + dw[:, 1, 2] ** 2 + dw[:, 2, 0] ** 2)
    virial = np.nansum(w**2 * (straight + off))
    # Eight digits of the model's numbers stand between the two.
    np.testing.assert_allclose(stepper.errors(*parts[0]).weighted.numpy(), [energy, forces, virial], rtol=1e-5)
    atoms = n.sum() - n[2]
    assert labels == [3.0, 3.0 * atoms, 18.0]


def test_neighbours_on_disk_are_those_in_memory() -> None:
    settings = trainings.settings()
    model = start_model(settings, (1, 1))
    frames = trainings.frames(6)
    one, other = Dataset.of(frames, model, settings), Dataset.of(frames, model, settings, in_memory=1000.0)
    assert torch.equal(one.vectors, other.vectors)
    assert torch.equal(one.neighbors, other.neighbors)
    assert len(one.vectors) == one.radial.sum() > one.angular.sum() > 0


def test_components_that_do_not_change_have_a_finite_scaler() -> None:
    found = scalers(np.array([0.0, 1.0, 300.0]), np.array([0.0, 3.0, 300.0]), temperature=True)
    assert found.tolist() == [1.0, 0.5, 0.001]


def test_offsets_of_elements_by_least_squares() -> None:
    frames = trainings.frames(6, sizes=(3, 5, 8))
    silicon = np.add.reduceat((frames.structures.numbers == 14).astype(float), frames.structures.offsets[:-1])
    energy = -7.5 * silicon - 155.25 * (frames.structures.counts - silicon)
    found = element_offsets(replace(frames, energy=energy), trainings.ELEMENTS)
    np.testing.assert_allclose(found, [-7.5, -155.25], rtol=1e-9)


@pytest.mark.parametrize("zbl", ["none", "flexible"])
def test_types_that_are_not_used_can_go(zbl: str) -> None:
    from nepcore.synthetic import make_model

    sizes = {"cutoff": ((5.0, 4.0), (4.5, 3.5), (4.0, 3.0)), "n_max": (2, 2), "basis_size": (3, 3), "hidden": (4,)}
    large = make_model(("C", "Ge", "Si"), zbl=zbl, **sizes)
    small = without_types(large, ("Si", "C"))
    assert small.elements == ("C", "Si")
    structures = trainings.frames(3).structures
    energies = [
        Calculator.of(model, device="cpu", dtype="float64", backend="loop").evaluate(structures, ["energy"])["energy"]
        for model in (large, small)
    ]
    np.testing.assert_allclose(energies[1], energies[0], rtol=1e-13)
