"""The OpenMM bridge, in OpenMM itself, on its reference platform in double precision."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("uvicorn")
pytest.importorskip("openmm", reason="the package openmm is not installed")

import openmm as mm

import nepcore
from bridges import SHEARED, crystal, free_port, serving, write_model
from nepcore.structures import Structure
from nepserve.client import Client, NepserveError
from nepserve.client import openmm as bridge
from nepserve.client.units import KJ_MOL, NM

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from servers import ServerProcess

pytestmark = pytest.mark.skipif(not hasattr(mm, "PythonForce"), reason="this OpenMM has no PythonForce")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "nep.txt")


@pytest.fixture(scope="module")
def server(model) -> Iterator[ServerProcess]:
    with serving(f"si={model}") as found:
        yield found


@pytest.fixture(scope="module")
def library(model):
    return nepcore.load(model, device="cpu", dtype="float64", backend="loop")


def context(structure: Structure, force, seed: int = 3, extra: int = 0):
    """A context of the structure, with velocities of 300 K and ``extra`` particles of no element."""
    system = mm.System()
    for number in structure.numbers.tolist():
        system.addParticle(28.0 if number == 14 else 72.6)
    for _ in range(extra):
        system.addParticle(1.0)
    if structure.pbc.all():
        system.setDefaultPeriodicBoxVectors(*(structure.cell / NM).tolist())
    system.addForce(force)
    found = mm.Context(system, mm.VerletIntegrator(0.001), mm.Platform.getPlatformByName("Reference"))
    positions = np.vstack([structure.positions, np.full((extra, 3), 50.0)])
    found.setPositions((positions / NM).tolist())
    found.setVelocitiesToTemperature(300, seed)
    return found


def state_of(found, periodic: bool):
    state = found.getState(getPositions=True, getForces=True, getEnergy=True)
    cell = np.array(state.getPeriodicBoxVectors(asNumpy=True)._value) * NM if periodic else None
    return (
        np.array(state.getPositions(asNumpy=True)._value) * NM,
        cell,
        state.getPotentialEnergy()._value * KJ_MOL,
        np.array(state.getForces(asNumpy=True)._value) * KJ_MOL / NM,
    )


@pytest.mark.parametrize("periodic", [True, False])
def test_forces_are_the_librarys_at_several_steps(server, library, periodic):
    structure = crystal(1, cell=SHEARED / 2) if periodic else crystal(1)
    if not periodic:
        structure = Structure.make(structure.numbers, structure.positions)
    found = context(structure, bridge.force(structure.symbols, server.url, periodic=periodic))
    seen = []
    for steps in (0, 5, 20):
        found.getIntegrator().step(steps)
        positions, cell, energy, forces = state_of(found, periodic)
        wanted = library.evaluate([Structure.make(structure.numbers, positions, cell)], ["energy", "forces"])
        assert energy == pytest.approx(wanted["energy"][0], abs=1e-8)
        np.testing.assert_allclose(forces, wanted["forces"], rtol=0, atol=1e-7)
        seen.append(positions)
    assert np.abs(seen[2] - seen[0]).max() > 1e-2


def test_a_barostat_moves_the_box(server, library):
    structure = crystal(2)
    force = bridge.force(structure.symbols, server.url)
    system = mm.System()
    for _ in structure.numbers:
        system.addParticle(28.0)
    system.setDefaultPeriodicBoxVectors(*(structure.cell / NM).tolist())
    system.addForce(force)
    system.addForce(mm.MonteCarloBarostat(1.0, 300.0, 2))
    found = mm.Context(system, mm.LangevinMiddleIntegrator(300, 1, 0.001), mm.Platform.getPlatformByName("Reference"))
    found.setPositions((structure.positions / NM).tolist())
    found.getIntegrator().step(20)
    positions, cell, energy, _ = state_of(found, True)
    assert cell[0, 0] != structure.cell[0, 0]
    wanted = library.evaluate([Structure.make(structure.numbers, positions, cell)], ["energy"])
    assert energy == pytest.approx(wanted["energy"][0], abs=1e-8)


def test_some_particles_alone(server, library):
    structure = Structure.make(crystal(1).numbers, crystal(1).positions)
    order = [7, 2, 0, 1, 3, 4, 5, 6]
    for symbols in (structure.symbols + ["X"] * 3, [structure.symbols[i] for i in order]):
        if "X" in symbols:
            symbols = [s if s != "X" else "H" for s in symbols]
        force = bridge.force(symbols, server.url, periodic=False, particles=order)
        found = context(structure, force, extra=3)
        _, _, energy, forces = state_of(found, False)
        wanted = library.evaluate([structure], ["energy", "forces"])
        assert energy == pytest.approx(wanted["energy"][0], abs=1e-8)
        np.testing.assert_allclose(forces[:8], wanted["forces"], rtol=0, atol=1e-7)
        assert not forces[8:].any()


def test_elements_of_a_topology(server):
    app = pytest.importorskip("openmm.app")
    structure = crystal(1)
    topology = app.Topology()
    residue = topology.addResidue("R", topology.addChain())
    for symbol in structure.symbols:
        topology.addAtom(symbol, app.Element.getBySymbol(symbol), residue)
    assert bridge.force(topology, server.url).getName() == "nepserve"
    topology.addAtom("M", None, residue)
    with pytest.raises(ValueError, match="particle 9 of the topology has no element"):
        bridge.force(topology, server.url)
    bridge.force(topology, server.url, particles=range(8))


def test_a_failure_stops_the_integrator_at_that_step(model):
    with serving(f"si={model}") as server:
        structure = crystal(1)
        found = context(structure, bridge.force(structure.symbols, Client(server.url, timeout=2.0)))
        found.getIntegrator().step(5)
        before = state_of(found, True)[0]
        server.close()
    with pytest.raises(mm.OpenMMException, match=r"no answer|cannot get an answer"):
        found.getIntegrator().step(10)
    assert found.getStepCount() == 5
    np.testing.assert_array_equal(
        np.array(found.getState(getPositions=True).getPositions(asNumpy=True)._value) * NM, before
    )


def test_a_system_can_be_copied_through_xml(server):
    structure = crystal(1)
    force = bridge.force(structure.symbols, server.url)
    again = mm.XmlSerializer.deserialize(mm.XmlSerializer.serialize(force))
    found = [state_of(context(structure, one), True) for one in (force, again)]
    np.testing.assert_array_equal(found[0][3], found[1][3])
    assert pickle.loads(pickle.dumps(bridge.Computation(Client(server.url), structure.numbers, True, None, None)))


def test_what_cannot_work_is_told_before_the_run(server):
    with pytest.raises(ValueError, match="has no C"):
        bridge.force(["Si", "C"], server.url)
    with pytest.raises(ValueError, match="2 elements for 1 particles up to index 4"):
        bridge.force(["Si", "Si"], server.url, particles=[4])
    with pytest.raises(NepserveError):
        bridge.force(["Si"], f"http://127.0.0.1:{free_port()}")
    with pytest.raises(mm.OpenMMException, match="made for 3 particles, and the system has 8"):
        state_of(context(crystal(1), bridge.force(["Si"] * 3, server.url)), True)
