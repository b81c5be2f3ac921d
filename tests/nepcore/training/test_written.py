"""Models that the trainer wrote, evaluated by calorine: ``calorine.json`` holds the files and what it said.

The models were trained by this package on frames of ``trainings.frames(6)``, for 20 epochs in single precision.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import trainings
from nepcore import Structure, Structures
from nepcore.calculator import Calculator
from nepcore.files import nep_txt
from nepcore.training import Training

REFERENCE = json.loads(Path(__file__).with_name("calorine.json").read_text())


@pytest.mark.parametrize("name", sorted(REFERENCE["models"]))
def test_calorine_sees_the_same(name: str) -> None:
    text, rows = REFERENCE["models"][name], REFERENCE["found"][name]
    model = nep_txt.loads(text)
    structures = Structures.pack(
        [Structure.make(s["symbols"], np.array(s["positions"]), np.array(s["cell"])) for s in REFERENCE["structures"]]
    )
    energy = np.array([row["energy"] for row in rows])
    forces = np.concatenate([row["forces"] for row in rows])
    found = Calculator.of(model, device="cpu", dtype="float64", backend="loop").evaluate(
        structures, ["energy", "forces"]
    )
    np.testing.assert_allclose(found["energy"] / structures.counts, energy / structures.counts, atol=1e-6)
    np.testing.assert_allclose(found["forces"], forces, atol=1e-5)
    # The trainer, too: with calorine's numbers for labels nothing is left to learn.
    frames = trainings.of(structures, energy, forces, np.full((len(structures), 3, 3), np.nan))
    settings = trainings.settings(epochs=1, lr=1e-12, stop_lr=0.0, average=1)
    training = Training(settings, frames, device="cpu", start=model)
    record = next(iter(training.run()))
    assert record.train.energy is not None
    assert record.train.energy < 1e-6
    assert record.train.force is not None
    assert record.train.force < 1e-5
    # And what it writes after a step of nothing is the file it read, but for the eighth digit of the offset.
    again = training.models().average
    assert again is not None
    for part in ("w0", "w1", "c_radial", "c_angular", "q_scaler"):
        np.testing.assert_allclose(getattr(again, part), getattr(model, part), rtol=1e-6, atol=1e-9)
