from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

pytest.importorskip("ase")

from ase import Atoms, units
from ase.build import bulk
from ase.calculators.calculator import CalculatorSetupError, PropertyNotImplementedError
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import Trajectory, read, write
from ase.md.verlet import VelocityVerlet
from ase.mep import NEB
from ase.optimize import BFGS, FIRE

try:
    from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress
except ImportError:  # ASE before 3.24

    def calculate_numerical_forces(atoms, eps):
        return atoms.calc.calculate_numerical_forces(atoms, d=eps)

    def calculate_numerical_stress(atoms, eps):
        return atoms.calc.calculate_numerical_stress(atoms, d=eps)


from ase.filters import FrechetCellFilter

from nepserve.client import Client, ConnectionFailed, InvalidAnswer, NepserveError, Retry, StructureRejected
from nepserve.client.ase import NEPCalculator

SOON = Retry(limit=5, first=0.0, longest=0.0)


@pytest.fixture
def calc(server):
    return NEPCalculator(server.url, retries=SOON)


def crystal(seed=1):
    """A sheared, rattled crystal: six different stress components."""
    atoms = bulk("Al", "fcc", a=4.05, cubic=True)
    atoms.set_cell(atoms.cell.array @ [[1, 0.02, 0.03], [0, 1.1, 0.01], [0, 0, 0.95]], scale_atoms=True)
    atoms.rattle(0.2, seed=seed)
    return atoms


def molecule(n=3):
    places = [[0.1, 0.1, 0.1], [1.0, 0.2, 0.1], [0.0, 1.1, 0.3], [1.2, 1.4, 0.9], [0.2, 0.3, 1.5]]
    return Atoms(["O", "H", "H", "Si", "Al"][:n], places[:n])


def asked(server):
    return len(server.evaluations)


# --- What is returned ------------------------------------------------------------------------------------------------


def test_types_and_shapes_are_those_of_ase(calc):
    atoms = crystal()
    atoms.calc = calc
    assert type(atoms.get_potential_energy()) is float
    assert atoms.get_potential_energy(force_consistent=True) == atoms.get_potential_energy()
    assert atoms.get_forces().shape == (4, 3)
    assert atoms.get_forces().dtype == np.float64
    assert atoms.get_stress().shape == (6,)
    assert atoms.get_stress(voigt=False).shape == (3, 3)
    assert atoms.get_potential_energies().shape == (4,)
    assert atoms.get_potential_energies().sum() == pytest.approx(atoms.get_potential_energy())
    assert set(calc.results) == {"energy", "free_energy", "forces", "stress", "energies"}


def test_forces_are_the_gradient_of_the_energy(calc):
    atoms = crystal()
    atoms.calc = calc
    np.testing.assert_allclose(atoms.get_forces(), calculate_numerical_forces(atoms, 1e-4), atol=1e-6)


def test_stress_is_the_strain_derivative_in_ases_sign_and_order(calc):
    atoms = crystal()
    atoms.calc = calc
    stress = atoms.get_stress()
    assert len(set(np.round(stress, 5))) == 6
    np.testing.assert_allclose(stress, calculate_numerical_stress(atoms, 1e-5), atol=1e-6)


def test_virials_on_request(calc, toy_results):
    atoms = crystal()
    atoms.calc = calc
    virials = calc.get_property("virials", atoms)
    assert virials.shape == (4, 3, 3)
    np.testing.assert_allclose(virials.sum(axis=0), calc.get_property("virial", atoms), atol=1e-13)
    np.testing.assert_allclose(virials.sum(axis=0), -atoms.get_volume() * atoms.get_stress(voigt=False), atol=1e-13)
    assert calc.get_property("descriptors", atoms).shape[0] == 4
    assert calc.results["virials"].shape == (4, 3, 3)


def test_properties_asked_for_in_general_come_with_every_request(server):
    calc = NEPCalculator(server.url, properties=["energy", "forces", "virials"])
    calc.calculate(crystal())
    assert set(calc.results) == {"energy", "free_energy", "forces", "virials"}
    assert asked(server) == 1


@pytest.mark.parametrize("pbc", [(False, False, False), (True, True, False), (False, True, False)])
def test_no_stress_without_three_periodic_directions(calc, server, pbc):
    atoms = crystal()
    atoms.pbc = pbc
    atoms.calc = calc
    atoms.get_forces()
    with pytest.raises(PropertyNotImplementedError):
        atoms.get_stress()
    assert "stress" not in calc.results
    assert atoms.get_potential_energy()
    assert asked(server) == 1


def test_a_property_that_no_potential_has(calc):
    with pytest.raises(PropertyNotImplementedError):
        calc.get_property("magmoms", molecule())


def test_temperature_comes_from_info(calc):
    atoms = molecule()
    atoms.calc = calc
    cold = atoms.get_potential_energy()
    atoms.info["temperature"] = 300
    assert atoms.get_potential_energy() - cold == pytest.approx(0.9)


# --- When it asks ----------------------------------------------------------------------------------------------------


def move(atoms):
    atoms.positions[1, 2] += 0.01


def nudge(atoms):
    atoms.positions[1, 2] = np.nextafter(atoms.positions[1, 2], 9.0)


def strain(atoms):
    atoms.set_cell(atoms.cell.array * 1.01, scale_atoms=True)


def stretch(atoms):
    atoms.set_cell(atoms.cell.array * 1.01, scale_atoms=False)


def open_up(atoms):
    atoms.pbc = [True, True, False]


def swap_species(atoms):
    atoms.numbers[2] = 14


def add(atoms):
    atoms += Atoms("H", [[0.5, 0.6, 2.2]])


def remove(atoms):
    del atoms[0]


def reorder(atoms):
    atoms.numbers[0] = 14
    atoms.positions[:] = atoms.positions[::-1].copy()
    atoms.numbers[:] = atoms.numbers[::-1].copy()


def heat(atoms):
    atoms.info["temperature"] = 100.0


CHANGES = [move, strain, stretch, open_up, swap_species, add, remove, reorder, heat]


@pytest.mark.parametrize("change", [*CHANGES, nudge], ids=lambda change: change.__name__)
def test_every_change_that_matters_is_a_request_and_none_is_none(calc, server, change):
    atoms = crystal()
    atoms.calc = calc
    before = atoms.get_potential_energy()
    atoms.get_forces()
    assert asked(server) == 1
    change(atoms)
    after, forces = atoms.get_potential_energy(), atoms.get_forces()
    assert asked(server) == 2
    if change is not nudge:
        assert after != before
    fresh = atoms.copy()
    fresh.calc = NEPCalculator(server.url)
    assert fresh.get_potential_energy() == after
    np.testing.assert_array_equal(fresh.get_forces(), forces)
    atoms.get_potential_energy()
    atoms.get_forces()
    assert asked(server) == 3


def test_one_calculator_through_all_changes(calc, server):
    atoms = crystal()
    atoms.calc = calc
    for change in CHANGES:
        change(atoms)
        fresh = atoms.copy()
        fresh.calc = NEPCalculator(server.url)
        assert atoms.get_potential_energy() == fresh.get_potential_energy()
        assert atoms.get_forces().shape == (len(atoms), 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda atoms: atoms.set_initial_charges([1.0] * 4),
        lambda atoms: atoms.set_initial_magnetic_moments([1.0] * 4),
        lambda atoms: atoms.set_velocities(np.ones((4, 3))),
        lambda atoms: atoms.set_tags([1, 2, 3, 4]),
        lambda atoms: atoms.info.update(name="x"),
        len,
    ],
    ids=["charges", "moments", "velocities", "tags", "info", "nothing"],
)
def test_what_the_model_does_not_see_is_no_request(calc, server, change):
    atoms = crystal()
    atoms.calc = calc
    atoms.get_forces()
    change(atoms)
    for ask in (atoms.get_forces, atoms.get_potential_energy, atoms.get_stress):
        ask()
    assert asked(server) == 1
    assert not calc.calculation_required(atoms, ["energy", "forces", "stress"])
    assert calc.check_state(atoms) == []


def test_another_model_or_other_properties_forget_the_results(calc, server):
    atoms = crystal()
    atoms.calc = calc
    atoms.get_forces()
    calc.set(model="toy")
    assert calc.results == {}
    atoms.get_forces()
    assert [seen.message.get("model") for seen in server.evaluations] == [None, "toy"]
    calc.set(model="toy")
    atoms.get_forces()
    assert asked(server) == 2
    with pytest.raises(TypeError, match="cutoff"):
        calc.set(cutoff=5)
    with pytest.raises(ValueError, match="charges"):
        calc.set(properties=["charges"])


def test_all_that_is_known_is_of_one_answer(calc, server):
    atoms = crystal()
    atoms.calc = calc
    atoms.get_forces()
    atoms.get_potential_energies()
    calc.get_property("virials", atoms)
    assert [seen.message["properties"] for seen in server.evaluations] == [
        ["energy", "forces", "stress"],
        ["energy", "forces", "stress", "energies"],
        ["energy", "forces", "stress", "virials", "energies"],
    ]


# --- Whose arrays ----------------------------------------------------------------------------------------------------


def test_changing_what_was_returned_changes_nothing(calc, server):
    atoms = crystal()
    atoms.calc = calc
    forces, stress = atoms.get_forces(), atoms.get_stress()
    kept = forces.copy(), stress.copy()
    forces[:] = 7.0
    stress[:] = 7.0
    np.testing.assert_array_equal(atoms.get_forces(), kept[0])
    np.testing.assert_array_equal(atoms.get_stress(), kept[1])
    assert asked(server) == 1


def test_results_of_one_structure_do_not_leak_into_the_next(calc, tmp_path):
    small, large = molecule(3), molecule(5)
    wanted = {}
    with Trajectory(tmp_path / "out.traj", "w") as trajectory:
        for name, atoms in (("small", small), ("large", large), ("small", small), ("large", large)):
            atoms.calc = calc
            found = (atoms.get_potential_energy(), atoms.get_forces())
            assert found[1].shape == (len(atoms), 3)
            wanted.setdefault(name, found)
            assert found[0] == wanted[name][0]
            trajectory.write(atoms)
    frames = Trajectory(tmp_path / "out.traj")
    assert [len(frame) for frame in frames] == [3, 5, 3, 5]
    for frame, name in zip(frames, ["small", "large", "small", "large"], strict=True):
        assert frame.get_potential_energy() == wanted[name][0]
        np.testing.assert_array_equal(frame.get_forces(), wanted[name][1])


def test_earlier_frames_keep_their_arrays(calc):
    atoms = crystal()
    atoms.calc = calc
    frames = []
    for _ in range(3):
        atoms.positions += 0.05 * atoms.positions
        atoms.get_forces()
        frame = atoms.copy()
        frame.calc = SinglePointCalculator(frame, **calc.results)
        frames.append((frame, atoms.get_forces(), calc.results["forces"]))
    for frame, forces, results in frames:
        np.testing.assert_array_equal(frame.get_forces(), forces)
        np.testing.assert_array_equal(results, forces)


def test_extended_xyz_keeps_the_results(calc, tmp_path):
    atoms = crystal()
    atoms.calc = calc
    energy, forces, stress = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
    write(tmp_path / "out.xyz", atoms, format="extxyz")
    back = read(tmp_path / "out.xyz")
    assert back.get_potential_energy() == pytest.approx(energy, abs=1e-8)
    np.testing.assert_allclose(back.get_forces(), forces, atol=1e-7)
    np.testing.assert_allclose(back.get_stress(), stress, atol=1e-7)


def test_ases_own_list_of_properties_gets_what_it_knows(calc):
    atoms = crystal()
    atoms.calc = calc
    calc.get_property("virials", atoms)
    exported = calc.export_properties()
    assert set(exported) >= {"energy", "free_energy", "forces", "stress"}
    assert "virials" not in exported
    assert calc.calculate_properties(atoms, ["energy", "forces"])["energy"] == atoms.get_potential_energy()


# --- Failures --------------------------------------------------------------------------------------------------------


def break_server(server, reply, fault):
    """Faults, each with the error it makes."""
    return [
        (reply(change=lambda message: message.update(forces=b"\0" * 24)), InvalidAnswer),
        (reply(change=lambda message: message.update(energy=np.array([np.nan]).tobytes())), InvalidAnswer),
        (reply(body=b"<html>", kind="text/html"), InvalidAnswer),
        (reply(keep=50), ConnectionFailed),
        (fault(500, "internal"), NepserveError),
        (fault(429, "queue_full"), NepserveError),
        (fault(422, "coincident_atoms", "atoms 1 and 2", atoms=[0, 1], field="positions"), StructureRejected),
    ]


def test_a_failure_leaves_no_results(calc, server, reply, fault):
    atoms = crystal()
    atoms.calc = calc
    for one, error in break_server(server, reply, fault):
        energy = atoms.get_potential_energy()
        server.always = one
        move(atoms)
        for ask in (atoms.get_forces, atoms.get_potential_energy, atoms.get_stress, atoms.get_forces):
            with pytest.raises(error):
                ask()
            assert calc.results == {}
        server.always = None
        assert atoms.get_potential_energy() != energy


def test_a_failure_for_a_further_property_leaves_no_results(calc, server, fault):
    atoms = crystal()
    atoms.calc = calc
    atoms.get_forces()
    server.always = fault(500, "internal")
    with pytest.raises(NepserveError):
        atoms.get_potential_energies()
    assert calc.results == {}
    with pytest.raises(NepserveError):
        atoms.get_forces()


def test_an_unknown_element_names_the_atom(calc):
    atoms = Atoms("SiGe", [[0, 0, 0], [0, 0, 2]], calculator=calc)
    with pytest.raises(StructureRejected, match="atom 2") as caught:
        atoms.get_forces()
    assert caught.value.atoms == (1,)
    assert calc.results == {}


def test_asking_without_a_structure(calc):
    with pytest.raises(CalculatorSetupError):
        calc.get_property("energy")
    with pytest.raises(CalculatorSetupError):
        calc.calculate()


def test_a_simulation_stops_at_the_step_that_failed(calc, server, fault):
    atoms = crystal()
    atoms.calc = calc
    atoms.set_velocities(np.full((4, 3), 0.01))
    dynamics = VelocityVerlet(atoms, 1 * units.fs)
    dynamics.run(5)
    server.always = fault(500, "internal", "the device is gone")
    with pytest.raises(NepserveError, match="the device is gone"):
        dynamics.run(5)
    # The step that failed is not counted, and nobody has its forces.
    assert dynamics.nsteps == 5
    assert calc.results == {}


# --- Copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", [lambda c: pickle.loads(pickle.dumps(c)), copy.deepcopy, copy.copy], ids=["pickle", "deepcopy", "copy"]
)
def test_copies_work_and_stand_alone(server, way):
    atoms = crystal()
    atoms.calc = NEPCalculator(server.url, model="toy", timeout=9.0, properties=["energy", "forces"])
    energy = atoms.get_potential_energy()
    twin = way(atoms.calc)
    other = atoms.copy()
    other.calc = twin
    assert other.get_potential_energy() == energy
    move(other)
    assert other.get_potential_energy() != energy
    assert atoms.get_potential_energy() == energy
    assert (twin.client.timeout, twin.parameters["model"], twin.parameters["properties"]) == (
        9.0, "toy", ("energy", "forces"),
    )  # fmt: skip


def test_atoms_with_their_calculator_can_be_pickled(calc):
    atoms = crystal()
    atoms.calc = calc
    energy = atoms.get_potential_energy()
    assert pickle.loads(pickle.dumps(atoms)).get_potential_energy() == energy


def test_a_client_can_be_shared(server):
    client = Client(server.url)
    first, second = crystal(1), crystal(2)
    first.calc, second.calc = NEPCalculator(client), NEPCalculator(client, "toy")
    assert first.get_potential_energy() != second.get_potential_energy()
    assert server.connections == 1
    with pytest.raises(ValueError, match="timeout"):
        NEPCalculator(client, timeout=3)


def test_what_is_written_of_it_has_no_key(server):
    calc = NEPCalculator(server.url, "toy", api_key="secret")
    assert calc.name == "nep"
    assert calc.todict() == {"model": "toy", "url": server.url}
    assert "secret" not in repr(calc) + str(calc.todict())


# --- Many structures -------------------------------------------------------------------------------------------------


def test_many_structures_in_one_request(calc, server):
    images = [crystal(k) for k in range(5)] + [molecule()]
    found = calc.evaluate_many(images)
    assert asked(server) == 1
    for image, results in zip(images, found, strict=True):
        image.calc = NEPCalculator(server.url)
        assert results["energy"] == results["free_energy"] == image.get_potential_energy()
        np.testing.assert_array_equal(results["forces"], image.get_forces())
    np.testing.assert_array_equal(found[0]["stress"], images[0].get_stress())
    assert "stress" not in found[5]
    assert list(calc.evaluate_many(images, ["energies"])[0]) == ["energies"]
    assert calc.evaluate_many([]) == []


def test_one_bad_structure_of_many_is_named(calc):
    with pytest.raises(StructureRejected) as caught:
        calc.evaluate_many([molecule(), Atoms("Ge", [[0, 0, 0]]), molecule()])
    assert caught.value.index == 1


def neb(calculators, shared):
    images = [crystal(1) for _ in range(5)]
    images[-1].positions[0] += [0.3, 0.2, 0.1]
    band = NEB(images, allow_shared_calculator=shared, method="improvedtangent")
    band.interpolate()
    for image, calc in zip(images, calculators, strict=True):
        image.calc = calc
    return band


@pytest.mark.parametrize("shared", [True, False], ids=["one calculator", "one for each image"])
def test_the_images_of_a_band_come_in_one_request(server, shared):
    one = NEPCalculator(server.url)
    calculators = [one] * 5 if shared else [NEPCalculator(server.url) for _ in range(5)]
    wanted = neb([NEPCalculator(server.url) for _ in range(5)], False).get_forces()
    band = neb(calculators, shared)
    before = asked(server)
    calculators[0].calculate_many(band.images)
    np.testing.assert_array_equal(band.get_forces(), wanted)
    assert asked(server) == before + 1
    # Nothing moved, then one image: nothing is sent, then that image alone.
    calculators[0].calculate_many(band.images)
    band.get_forces()
    assert asked(server) == before + 1
    band.images[2].positions[1] += 0.01
    calculators[0].calculate_many(band.images)
    band.get_forces()
    assert asked(server) == before + 2
    assert len(server.evaluations[-1].counts) == 1
    band.images[2].positions[1] += 0.01
    band.images[2].get_forces()
    assert asked(server) == before + 3


def test_results_fetched_ahead_stay_with_their_server_and_model(server):
    band = neb([NEPCalculator(server.url, "toy") for _ in range(5)], False)
    NEPCalculator(server.url).calculate_many(band.images)
    before = asked(server)
    band.images[1].get_forces()
    assert asked(server) == before + 1


def test_results_fetched_ahead_are_copies(calc):
    images = [crystal(k) for k in range(3)]
    calc.calculate_many(images)
    for image in images:
        image.calc = calc
    first = images[0].get_forces()
    calc.results["forces"][:] = 0.0
    images[1].get_forces()
    np.testing.assert_array_equal(images[0].get_forces(), first)


def test_a_failure_keeps_nothing_that_was_fetched_ahead(calc, server, fault):
    images = [crystal(k) for k in range(3)]
    for image in images:
        image.calc = calc
    calc.calculate_many(images)
    images[2].positions += 0.1
    server.always = fault(500, "internal")
    with pytest.raises(NepserveError):
        calc.calculate_many(images)
    with pytest.raises(NepserveError):
        images[0].get_forces()


# --- Programs of ASE -------------------------------------------------------------------------------------------------


def test_molecular_dynamics_keeps_the_energy_and_asks_once_a_step(calc, server):
    atoms = crystal()
    atoms.calc = calc
    dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
    start = atoms.get_total_energy()
    dynamics.run(20)
    assert atoms.get_total_energy() == pytest.approx(start, abs=1e-4)
    assert asked(server) == 21


@pytest.mark.parametrize("optimizer", [BFGS, FIRE])
def test_relaxation_of_a_molecule(calc, optimizer):
    atoms = molecule(2)
    atoms.calc = calc
    before = atoms.get_potential_energy()
    optimizer(atoms, logfile=None).run(fmax=0.05, steps=20)
    assert atoms.get_potential_energy() < before


def test_relaxation_of_a_cell(calc):
    atoms = crystal()
    atoms.calc = calc
    before = np.abs(atoms.get_stress()).max()
    BFGS(FrechetCellFilter(atoms), logfile=None).run(fmax=0.01, steps=10)
    assert np.abs(atoms.get_stress()).max() < before
