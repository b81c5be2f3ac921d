"""The model that comes with the package: what it is, its figures, and its numbers beside those of another program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import nepcore
from nepcore import Structure, bundled
from nepcore.calculator import Calculator

# Energies and forces of calorine 4.1 (CPUNEP, double precision) for the periodic structures of examples/metals.xyz:
# written by examples/emt/reference.py.
REFERENCES = json.loads(Path(__file__).with_name("demo_emt_calorine.json").read_text(encoding="utf-8"))


def test_it_says_what_it_is() -> None:
    model = bundled.model()
    assert model.version == 4
    assert model.elements == ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au")
    about = bundled.about()
    assert "demonstration" in about["purpose"].lower()
    assert "EMT" in about["reference"]
    assert about["test_frames"] == sum(kind["frames"] for kind in about["kinds"].values()) > 100


@pytest.mark.parametrize("k", range(len(REFERENCES)), ids=[r["name"] for r in REFERENCES])
@pytest.mark.parametrize("backend", ["loop", "density"])
def test_it_is_what_another_program_reads(k: int, backend: str) -> None:
    reference = REFERENCES[k]
    structure = Structure.make(reference["symbols"], reference["positions"], reference["cell"])
    calculator = Calculator.of(bundled.model(), device="cpu", dtype="float64", backend=backend)
    found = calculator.evaluate([structure])
    np.testing.assert_allclose(found["energy"][0], reference["energy"], rtol=0, atol=1e-8)
    np.testing.assert_allclose(found["forces"], reference["forces"], rtol=0, atol=1e-8)


def test_it_is_as_good_as_it_says() -> None:
    """On frames made here, like those of examples/emt: small rattled crystals, where EMT itself is asked."""
    ase = pytest.importorskip("ase")
    from ase.build import bulk
    from ase.calculators.emt import EMT

    assert ase
    calculator = Calculator.of(bundled.model(), device="cpu", dtype="float64", backend="density")
    errors = []
    for k, symbol in enumerate(bundled.model().elements):
        atoms = bulk(symbol, cubic=True) * (2, 2, 2)
        atoms.rattle(0.08, seed=k)
        atoms.calc = EMT()
        errors.append(calculator.evaluate([atoms])["forces"] - atoms.get_forces())
    found = float(np.sqrt(np.mean(np.square(errors))))
    assert found < 1.5 * bundled.about()["kinds"]["rattled"]["force_rmse"]


def test_it_is_in_the_installed_package_and_needs_no_torch() -> None:
    assert (Path(nepcore.__file__).parent / "data" / f"{bundled.NAME}.txt").is_file()
    code = "import sys; from nepcore import bundled; bundled.model(); bundled.about(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
