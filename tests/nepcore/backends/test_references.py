"""Every supported fixture model, every structure, every backend."""

from __future__ import annotations

import pytest

import nepcore
import references
from locations import needs_shared
from nepcore.backends import candidates, forms
from nepcore.structures import PROPERTIES

pytestmark = needs_shared

BACKENDS = (*forms.FORMS, candidates.FUSED_CPU)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", references.names())
def test_reference_values(name: str, backend: str, dtype: str) -> None:
    reference = references.load(name)
    calculator = nepcore.load(reference.path, device="cpu", dtype=dtype, backend=backend)
    predictions = calculator.evaluate(reference.structures, PROPERTIES)
    assert predictions.errors == {}
    assert references.compare(predictions, reference, dtype) == []


@pytest.mark.parametrize("name", references.names())
def test_descriptions_of_one_crystal_have_one_energy(name: str) -> None:
    reference = references.load(name)
    twins = [i for i, label in enumerate(reference.labels) if label.startswith("ref_cell")]
    if not twins:
        pytest.skip(f"{name} has no ref_cell structures")
    assert len(twins) >= 2
    # Temperature models have each twin at another temperature: give all of them that of the first.
    structures = reference.structures.select(twins)
    structures.temperatures[:] = structures.temperatures[0]
    calculator = nepcore.load(reference.path, device="cpu", dtype="float64")
    energy = calculator.evaluate(structures, ["energy"])["energy"]
    assert energy == pytest.approx(energy[0], rel=1e-12)
