"""Public reports about physics and neighbour lists: each gives the reference value, in every backend and precision."""

from __future__ import annotations

import itertools
import re
import tracemalloc

import numpy as np
import pytest

import cases
import nepcore
from locations import needs_shared
from nepcore import Structure, Structures
from nepcore.backends import candidates, forms
from nepcore.files import xyz

pytestmark = needs_shared

BACKENDS = (*forms.FORMS, candidates.FUSED_CPU)


@pytest.fixture(scope="module", params=[*itertools.product(BACKENDS, ["float64", "float32"])], ids="-".join)
def silicon(request: pytest.FixtureRequest) -> nepcore.calculator.Calculator:
    backend, dtype = request.param
    return nepcore.load(cases.TOY_SI, device="cpu", dtype=dtype, backend=backend)


def read(case: int, name: str) -> Structure:
    (structure,) = xyz.read(cases.file(case, name)).structures
    return structure


def check(calculator: nepcore.calculator.Calculator, structure: Structure, text: str) -> None:
    """Energy, forces and virial as the text states them, within the tolerance of the cases."""
    of_energy, of_forces, of_virial = cases.PER_ATOM[calculator.dtype]
    n = len(structure)
    found = calculator.evaluate(structure, ["energy", "forces", "virial"])
    assert found["energy"][0] == pytest.approx(cases.energy(text), abs=of_energy * n)
    wanted = cases.forces(text)
    assert found["forces"].shape == wanted.shape
    assert np.abs(found["forces"] - wanted).max() < of_forces
    assert np.abs(cases.six(found["virial"][0]) - cases.virial(text)).max() < of_virial * n


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (14, "header-a.extxyz"),
        (18, "no-pbc-key.extxyz"),
        (19, "no-lattice.extxyz"),
        (19, "zero-lattice.extxyz"),
        (29, "si-111.extxyz"),
        (31, "wrapped.extxyz"),
        (31, "unwrapped.extxyz"),
        (31, "negative.extxyz"),
        (32, "no-cell.extxyz"),
        (32, "dummy-1A-cell.extxyz"),
        (37, "far-away.extxyz"),
        (39, "left-handed.extxyz"),
    ],
)
def test_stated_values(silicon: nepcore.calculator.Calculator, case: int, name: str) -> None:
    check(silicon, read(case, name), cases.expected(14 if case == 18 else case))


def test_rows_are_atoms_and_cell_vectors(silicon: nepcore.calculator.Calculator) -> None:
    first, second = cases.expected(26).split("nonsymmetric-cell:")
    check(silicon, read(26, "three-atoms.extxyz"), first)
    check(silicon, read(26, "nonsymmetric-cell.extxyz"), second)


def test_supercells(silicon: nepcore.calculator.Calculator) -> None:
    items = [read(29, f"si-{k}.extxyz") for k in ("111", "211", "222", "333", "444")]
    result = silicon.evaluate(items, ["energy", "forces", "stress"])
    of_energy, of_forces, _ = cases.PER_ATOM[silicon.dtype]
    assert result["energy"] / result.counts == pytest.approx(-0.38871585, abs=of_energy)
    first = result.view(0)
    for i in range(1, len(items)):
        view = result.view(i)
        assert np.allclose(view["stress"], first["stress"], atol=of_forces)
        # Every atom has the force of its twin in the small cell: the sets of force rows repeat.
        rows = np.abs(view["forces"][:, None] - first["forces"][None]).max(axis=2)
        assert (rows.min(axis=1) < of_forces).all()


def test_four_kinds_of_periodicity_in_one_batch(silicon: nepcore.calculator.Calculator) -> None:
    wanted = {"crystal": -0.77743170, "slab": -4.49633935, "wire": -2.91960885, "molecule": -4.44590737}
    items = {name: read(34, f"{name}.extxyz") for name in wanted}
    tolerance = 1e-6 if silicon.dtype == "float64" else 4e-5
    for order in itertools.permutations(wanted):
        result = silicon.evaluate([items[name] for name in order])
        assert result["energy"] == pytest.approx([wanted[name] for name in order], abs=tolerance)
        assert result.stress_known.tolist() == [name == "crystal" for name in order]


def test_a_molecule_has_no_stress_whatever_its_box(silicon: nepcore.calculator.Calculator) -> None:
    molecule = read(26, "three-atoms.extxyz")
    boxes = [np.zeros((3, 3)), np.eye(3) * 30.0, np.eye(3) * 300.0]
    items = [Structure(molecule.numbers, molecule.positions, box, np.zeros(3, bool)) for box in boxes]
    result = silicon.evaluate(items, ["energy", "virial", "stress"])
    assert not result.stress_known.any()
    assert (result["energy"] == result["energy"][0]).all()
    assert (result["virial"] == result["virial"][0]).all()
    assert np.isnan(result["stress"]).all()


def test_a_molecule_far_away_takes_no_more_memory(silicon: nepcore.calculator.Calculator) -> None:
    near, far = read(26, "three-atoms.extxyz"), read(37, "far-away.extxyz")
    peaks = []
    for structure in (near, far):
        silicon.evaluate(structure)
        tracemalloc.start()
        silicon.evaluate(structure)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] <= 1.1 * peaks[0]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_no_pair_in_range(silicon: nepcore.calculator.Calculator, place: int) -> None:
    lone, crystal = read(41, "two-far-atoms.extxyz"), read(14, "header-a.extxyz")
    items = [crystal, crystal]
    items.insert(place, lone)
    view = silicon.evaluate(items, ["energy", "forces", "virial"]).view(place)
    assert view["energy"] == pytest.approx(-3.39724033, abs=1e-6 if silicon.dtype == "float64" else 4e-5)
    assert not view["forces"].any()
    assert not view["virial"].any()
    alone = silicon.evaluate(lone, ["energy", "forces"])
    assert alone["energy"][0] == view["energy"]


@pytest.mark.parametrize("name", ["same-place", "image-on-top", "almost-same-place"])
def test_coincident_atoms_are_named(silicon: nepcore.calculator.Calculator, name: str) -> None:
    crystal = read(14, "header-a.extxyz")
    result = silicon.evaluate([crystal, read(43, f"{name}.extxyz"), crystal])
    assert result.errors.keys() == {1}
    assert result.errors[1].code == "coincident_atoms"
    assert result.errors[1].atoms == (0, 1)
    assert "atoms 1 and 2 coincide" in str(result.errors[1])
    assert result.view(0)["energy"] == result.view(2)["energy"] == pytest.approx(cases.SI2, abs=4e-5)


def test_stress_is_the_strain_derivative() -> None:
    calculator = nepcore.load(cases.TOY_SI, device="cpu", dtype="float64")
    stated = [np.array(row.split(), float) for row in re.findall(r"^`([^`]+)`$", cases.expected(44), re.MULTILINE)]
    found = calculator.evaluate(read(44, "input.extxyz"), ["stress"])["stress"][0]
    for row in stated:
        assert np.abs(found - row).max() < 1e-7


def test_a_dense_clump_is_summed_whole(silicon: nepcore.calculator.Calculator) -> None:
    result = silicon.evaluate(read(46, "dense-clump.extxyz"), ["energy", "forces", "virial"])
    assert result["energy"][0] == pytest.approx(7.70331584, rel=1e-5, abs=0 if silicon.dtype == "float64" else 1e-3)
    assert np.abs(result["forces"]).max() == pytest.approx(2.17613702, rel=1e-4)
    assert result["forces"][0] == pytest.approx([0.14270238, 0.01278376, 0.01219254], abs=2e-4)
    check_again = silicon.evaluate(read(14, "header-a.extxyz"))
    assert check_again["energy"][0] == pytest.approx(cases.SI2, abs=4e-5)


def test_no_edges_between_items_of_a_batch(silicon: nepcore.calculator.Calculator) -> None:
    names = [(14, "header-a"), (26, "three-atoms"), (29, "si-222"), (41, "two-far-atoms")]
    items = [read(case, f"{name}.extxyz") for case, name in names] * 2
    alone = [silicon.evaluate(s).view(0) for s in items]
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(items))
        result = silicon.evaluate(Structures.pack([items[k] for k in order]))
        for place, k in enumerate(order):
            assert result.view(place)["energy"] == alone[k]["energy"]
            assert np.array_equal(result.view(place)["forces"], alone[k]["forces"])


@pytest.mark.parametrize("name", ["thousand-cells", "hundred-thousand-cells"])
def test_drifted_atoms(silicon: nepcore.calculator.Calculator, name: str) -> None:
    energy = silicon.evaluate(read(49, f"{name}.extxyz"))["energy"][0]
    assert energy == pytest.approx(cases.SI2, abs=1e-6)


def test_thickness_at_the_thresholds() -> None:
    calculator = nepcore.load(cases.TOY_SI, device="cpu", dtype="float64")
    rows = re.findall(r"^\| ([\d.]+) \| (-[\d.]+) \|$", cases.expected(50), re.MULTILINE)
    assert len(rows) == 9
    positions = [[0.1, 0.2, 0.3], [2.4, 0.5, 0.9]]
    items = [Structure.make(["Si", "Si"], positions, np.diag([float(d), 11.0, 13.0])) for d, _ in rows]
    found = calculator.evaluate(items)["energy"]
    assert found == pytest.approx([float(e) for _, e in rows], abs=1e-7)


def test_the_order_of_calls_does_not_matter() -> None:
    silicon = nepcore.load(cases.TOY_SI, device="cpu")
    other = nepcore.load(cases.TOY_NACL, device="cpu")
    header_a = read(14, "header-a.extxyz")
    fresh = nepcore.load(cases.TOY_SI, device="cpu").evaluate(header_a)
    silicon.evaluate(read(29, "si-444.extxyz"))
    found = [silicon.evaluate(header_a)]
    other.evaluate(read(75, "unwrapped-water-like.extxyz"))
    silicon.evaluate(read(41, "two-far-atoms.extxyz"))
    assert silicon.evaluate(read(43, "same-place.extxyz")).errors
    silicon.evaluate(read(29, "si-222.extxyz"))
    found.append(silicon.evaluate(header_a))
    for result in found:
        assert np.array_equal(result["energy"], fresh["energy"])
        assert np.array_equal(result["forces"], fresh["forces"])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_unwrapped_coordinates_of_a_driver(dtype: str) -> None:
    calculator = nepcore.load(cases.TOY_NACL, device="cpu", dtype=dtype)
    check(calculator, read(75, "unwrapped-water-like.extxyz"), cases.expected(75))


def test_both_precisions() -> None:
    structure = read(93, "input.extxyz")
    for dtype, tolerance in (("float64", 1e-6), ("float32", 4e-5)):
        energy = nepcore.load(cases.TOY_SI, device="cpu", dtype=dtype).evaluate(structure)["energy"][0]
        assert energy == pytest.approx(cases.SI2, abs=tolerance)
