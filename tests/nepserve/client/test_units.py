from __future__ import annotations

import numpy as np
import pytest

import nepcore
from bridges import SHEARED, crystal, write_model
from nepserve.client import units


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BOHR", lambda u: u.Bohr),
        ("HARTREE", lambda u: u.Hartree),
        ("KCAL_MOL", lambda u: u.kcal / u.mol),
        ("KJ_MOL", lambda u: u.kJ / u.mol),
        ("NM", lambda u: u.nm),
    ],
)
def test_constants_are_those_of_ase(name, value):
    ase_units = pytest.importorskip("ase.units")
    assert getattr(units, name) == pytest.approx(value(ase_units), rel=1e-12, abs=0)


def test_components_take_the_symmetric_part_in_each_order():
    tensor = np.arange(9.0).reshape(3, 3)
    assert units.components(tensor, units.LAMMPS_ORDER).tolist() == [0, 4, 8, 2, 4, 6]
    assert units.components(np.stack([tensor, -tensor]), units.ASE_ORDER)[1].tolist() == [0, -4, -8, -6, -4, -2]


@pytest.mark.parametrize("order", [units.ASE_ORDER, units.LAMMPS_ORDER], ids=["ase", "lammps"])
def test_the_virial_is_minus_the_strain_derivative_in_each_order(tmp_path, order):
    """In a sheared cell with six different components, so that no two can be exchanged."""
    pytest.importorskip("torch")
    library = nepcore.load(write_model(tmp_path / "nep.txt"), device="cpu", dtype="float64", backend="loop")
    structure = crystal(1, cell=SHEARED / 2)
    found = library.evaluate([structure], ["virial", "stress"])
    virial = found["virial"][0]
    step = 1e-5
    moved = []
    for a, b in order:
        for sign in (1, -1):
            strain = np.eye(3)
            strain[a, b] += sign * step / 2
            strain[b, a] += sign * step / 2
            moved.append(
                nepcore.Structure.make(structure.numbers, structure.positions @ strain, structure.cell @ strain, True)
            )
    energies = library.evaluate(moved, ["energy"])["energy"].reshape(6, 2)
    wanted = -(energies[:, 0] - energies[:, 1]) / (2 * step)
    np.testing.assert_allclose(units.components(virial, order), wanted, rtol=0, atol=1e-6)
    assert np.min(np.abs(np.subtract.outer(wanted, wanted)[~np.eye(6, dtype=bool)])) > 1e-3
    stress = units.components(units.stress(virial, structure.cell), units.ASE_ORDER)
    np.testing.assert_allclose(stress, found["stress"][0], rtol=0, atol=1e-12)
