"""Public reports on training: labels, losses, numbers, neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cases
import trainings
from locations import needs_shared
from nepcore.calculator import Calculator
from nepcore.files import nep_txt, xyz
from nepcore.training import Settings, Training, TrainingError, train

SMALL: dict[str, Any] = {
    "cutoff": ((4.0, 3.0),), "n_max": (2, 2), "basis_size": (3, 3), "neuron": (4,), "epochs": 5, "batch": 2
}  # fmt: skip


@needs_shared
def test_82_large_energies_keep_their_differences() -> None:
    frames = xyz.read(cases.file(82, "train.xyz"))
    training = Training(Settings(("Si",), **SMALL), frames, device="cpu")
    per_atom = frames.energy / frames.structures.counts
    np.testing.assert_allclose(np.diff(training._data.labels.energy), np.diff(per_atom), atol=1e-9)
    np.testing.assert_allclose(training.element_offsets, per_atom.mean(), atol=1e-6)
    records = list(training.run())
    assert records[-1].train.energy < 0.2  # type: ignore[operator]
    model = training.models().final
    found = Calculator.of(model, device="cpu", dtype="float64", backend="loop").evaluate(frames.structures, ["energy"])
    # On the original scale, to the eight digits of the file.
    assert abs(((found["energy"] - frames.energy) / frames.structures.counts).mean()) < 5e-5


@needs_shared
@pytest.mark.parametrize("form", ["mse", "rmse"])
def test_83_no_virial_at_all_leaves_the_loss_finite(form: str) -> None:
    frames = xyz.read(cases.file(83, "train.xyz"))
    training = Training(Settings(("Si",), **SMALL, loss=form), frames, device="cpu")
    assert any("virial" in message for message in training.messages)
    for record in training.run():
        assert np.isfinite(record.loss)
        assert record.train.virial is None
    assert "nan" not in nep_txt.dumps(training.models().final)


@needs_shared
def test_85_a_placeholder_is_no_label() -> None:
    frames = xyz.read(cases.file(85, "placeholder-as-label.xyz"))
    assert frames.warnings
    records = list(Training(Settings(("Si",), **SMALL), frames, device="cpu").run())
    assert records[-1].train.virial is None
    assert records[-1].loss < 1e3


@pytest.mark.parametrize(
    ("taken", "reason"),
    [
        ({"energy": range(4), "forces": range(4), "virial": range(4)}, "no energy labels, no forces labels"),
        ({"energy": range(4), "virial": range(4)}, ""),
        ("weights", "forces weights are all 0"),
    ],
    ids=["no labels", "forces only", "weights of zero"],
)
def test_91_a_loss_of_exactly_zero_is_refused(taken: Any, reason: str) -> None:
    frames = trainings.frames(4)
    frames = replace(frames, weight=np.zeros(4)) if taken == "weights" else trainings.without(frames, **taken)
    if not reason:
        records = list(Training(trainings.settings(), frames, device="cpu").run())
        assert records[0].loss > 0
        assert records[0].train.energy is None
        return
    with pytest.raises(TrainingError, match=f"exactly zero: .*{reason}"):
        Training(trainings.settings(), frames, device="cpu")


@needs_shared
@pytest.mark.parametrize(("one", "other"), [("float32", "float64"), ("float64", "float32")])
def test_93_trained_in_one_precision_and_evaluated_in_the_other(one: str, other: str) -> None:
    structures = xyz.read(cases.file(93, "input.extxyz")).structures
    model = train(Settings(("Si",), **SMALL, dtype=one), xyz.read(cases.file(97, "train.xyz")), device="cpu").final
    values = [
        Calculator.of(model, device="cpu", dtype=dtype, backend="density").evaluate(structures, ["energy"])["energy"]
        for dtype in (one, other)
    ]
    assert np.abs(values[0] - values[1]).max() < 4e-5
    for dtype, tolerance in (("float64", 1e-7), ("float32", 4e-5)):
        toy = Calculator.load(cases.TOY_SI, device="cpu", dtype=dtype, backend="density")
        assert toy.evaluate(structures, ["energy"])["energy"][0] == pytest.approx(cases.SI2, abs=tolerance)


@needs_shared
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("backend", ["sums", "loop", "density"])
def test_97_frames_without_neighbours(batch: int, backend: str) -> None:
    frames = xyz.read(cases.file(97, "train.xyz"))
    settings = Settings(("Si",), **(SMALL | {"batch": batch, "epochs": 1}))
    training = Training(settings, frames, device="cpu", backend=backend)
    records = list(training.run())
    assert np.isfinite(records[0].loss)
    assert np.isfinite(training.models().final.q_scaler).all()
    alone = Training(settings, frames.select([0, 1]), device="cpu", backend=backend)
    assert np.isfinite(alone.models().final.q_scaler).all()
    # With the toy model the labels come out.
    settings = replace(settings, lr=1e-12, stop_lr=0.0)
    toy = Training(settings, frames, device="cpu", backend=backend, start=cases.TOY_SI)
    assert next(iter(toy.run())).train.energy < 1e-5  # type: ignore[operator]
