"""ASE's dynamics, optimisers and bands with the calculator on a real server: the runs of the library, to the bit."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("uvicorn")
pytest.importorskip("ase")

import ase.io
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.fd import calculate_numerical_stress
from ase.calculators.singlepoint import SinglePointCalculator
from ase.filters import FrechetCellFilter
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from ase.mep import NEB
from ase.optimize import BFGS, FIRE

import nepcore
from bridges import SHEARED, crystal, free_port, serving, write_model
from locations import MODELS, needs_shared
from nepcore.files import nep_txt, xyz
from nepcore.synthetic import make_model
from nepserve.client import Client, NepserveError, Timeout
from nepserve.client.ase import NEPCalculator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from servers import ServerProcess


class Direct(Calculator):
    """The library in this process."""

    implemented_properties = ["energy", "free_energy", "forces", "stress"]  # noqa: RUF012

    def __init__(self, library) -> None:
        super().__init__()
        self.library = library

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        found = self.library.evaluate([atoms], ["energy", "forces", "stress"])
        energy = float(found["energy"][0])
        self.results = {
            "energy": energy, "free_energy": energy, "forces": found["forces"], "stress": found["stress"][0],
        }  # fmt: skip


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


@pytest.fixture
def calc(server) -> NEPCalculator:
    return NEPCalculator(server.url)


def atoms_of(repeats: int = 1, *, cell=None, mixed: bool = True) -> Atoms:
    one = crystal(repeats, cell=cell, mixed=mixed)
    return Atoms(one.numbers, one.positions, cell=one.cell, pbc=True)


def verlet(atoms: Atoms, steps: int) -> None:
    VelocityVerlet(atoms, 1 * units.fs).run(steps)


def langevin(atoms: Atoms, steps: int) -> None:
    Langevin(atoms, 1 * units.fs, temperature_K=300, friction=0.02, rng=np.random.default_rng(5)).run(steps)


def fire(atoms: Atoms, steps: int) -> None:
    FIRE(atoms, logfile=None).run(fmax=1e-9, steps=steps)


def cell_bfgs(atoms: Atoms, steps: int) -> None:
    BFGS(FrechetCellFilter(atoms), logfile=None, maxstep=0.05).run(fmax=1e-9, steps=steps)


@pytest.mark.parametrize("job", [verlet, langevin, fire, cell_bfgs])
def test_the_run_is_that_of_the_library(calc, library, job):
    ends = []
    for calculator in (calc, Direct(library)):
        atoms = atoms_of(cell=SHEARED / 2)
        atoms.calc = calculator
        MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=np.random.default_rng(1))
        before = atoms.positions.copy()
        job(atoms, 25)
        assert np.abs(atoms.positions - before).max() > 1e-2
        ends.append((atoms.positions, atoms.cell.array, atoms.get_potential_energy()))
    for found, wanted in zip(*ends, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)


def test_a_relaxation_lowers_the_energy_and_the_stress(tmp_path):
    """With a wall at short distances, so that there is a minimum to find."""
    path = tmp_path / "nep.txt"
    made = make_model(["Si"], zbl="universal", n_max=(2, 2), basis_size=(3, 3), hidden=(5,), cutoff=(4.0, 3.5), seed=4)
    path.write_text(nep_txt.dumps(made))
    with serving(f"si={path}") as server:
        atoms = bulk("Si", cubic=True)
        atoms.rattle(0.02, seed=1)
        atoms.calc = NEPCalculator(server.url)
        before = atoms.get_potential_energy()
        optimizer = BFGS(FrechetCellFilter(atoms), logfile=None)
        optimizer.run(fmax=0.05, steps=60)
        assert atoms.get_potential_energy() < before


def test_stress_in_both_forms_is_the_numerical_one(calc):
    """Sign, order and shape (public report, deepmd-kit 338)."""
    atoms = atoms_of(cell=SHEARED / 2)
    atoms.calc = calc
    wanted = calculate_numerical_stress(atoms, 1e-5)
    voigt, full = atoms.get_stress(), atoms.get_stress(voigt=False)
    np.testing.assert_allclose(voigt, wanted, rtol=0, atol=1e-6)
    assert full.shape == (3, 3)
    np.testing.assert_array_equal(full[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]], voigt)
    assert np.abs(np.subtract.outer(voigt, voigt))[~np.eye(6, dtype=bool)].min() > 1e-5
    assert isinstance(atoms.get_potential_energy(), float)
    assert atoms.get_forces().shape == (8, 3)
    assert atoms.get_potential_energy(force_consistent=True) == atoms.get_potential_energy()


class BandInOneCall(NEB):
    """As on the page about ASE: one request a step, whatever the number of images."""

    def get_forces(self):
        self.images[0].calc.calculate_many(self.images)
        return super().get_forces()


def test_the_images_of_a_band_are_one_request_a_step(server, library):
    start = atoms_of()
    end = start.copy()
    end.positions[0] += [0.3, 0.2, 0.1]
    ends = []
    for calculator in (NEPCalculator(server.url), Direct(library)):
        images = [start.copy() for _ in range(6)] + [end.copy()]
        for image in images:
            image.calc = calculator if isinstance(calculator, NEPCalculator) else Direct(library)
        kind = BandInOneCall if isinstance(calculator, NEPCalculator) else NEB
        band = kind(images, allow_shared_calculator=True, method="improvedtangent")
        band.interpolate()
        bodies = count_requests(calculator.client) if isinstance(calculator, NEPCalculator) else None
        optimizer = FIRE(band, logfile=None)
        optimizer.run(fmax=1e-9, steps=5)
        if bodies is not None:
            assert bodies[0] <= optimizer.nsteps + 2
        ends.append(np.stack([image.positions for image in images]))
    np.testing.assert_allclose(ends[0], ends[1], rtol=0, atol=1e-9)


def count_requests(client: Client) -> list[int]:
    """How many evaluations a client sends from now on."""
    sent = [0]
    exchange = client.exchange
    call = exchange.call

    def counting(method, path, *arguments, **options):
        sent[0] += path == "/v1/evaluate"
        return call(method, path, *arguments, **options)

    exchange.call = counting
    return sent


def test_force_constants_from_one_call(calc, library):
    """Displaced supercells as a phonon code makes them: the dynamical matrix is symmetric and has three zeros."""
    atoms = bulk("Si", cubic=True)
    step = 0.01
    moved = []
    for i in range(len(atoms)):
        for axis in range(3):
            for sign in (1, -1):
                one = atoms.copy()
                one.positions[i, axis] += sign * step
                moved.append(one)
    sent = count_requests(calc.client)
    forces = np.array([result["forces"] for result in calc.evaluate_many(moved, ["forces"])])
    assert sent[0] <= 3
    constants = -(forces[0::2] - forces[1::2]).reshape(24, 24) / (2 * step)
    np.testing.assert_allclose(constants, constants.T, rtol=0, atol=1e-3 * np.abs(constants).max())
    np.testing.assert_allclose(constants.reshape(24, 8, 3).sum(axis=1), 0, atol=1e-8)
    wanted = library.evaluate(moved, ["forces"])["forces"].reshape(-1, 8, 3)
    np.testing.assert_allclose(forces, wanted, rtol=0, atol=1e-10)


def test_a_server_that_restarts_in_the_middle_of_a_run(model):
    """Killed, and started again at the same address: 200 steps end where an undisturbed run ends."""
    port = free_port()
    ends = []
    for disturbed in (False, True):
        with serving(f"si={model}", port=port) as server:
            atoms = atoms_of(2, mixed=False)
            atoms.calc = NEPCalculator(server.url, timeout=120.0)
            MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=np.random.default_rng(2))
            dynamics = VelocityVerlet(atoms, 1 * units.fs)
            dynamics.run(100)
            if disturbed:
                server.close()
                later = threading.Thread(target=dynamics.run, args=(100,))
                later.start()
                with serving(f"si={model}", port=port):
                    later.join(120)
                    assert not later.is_alive()
            else:
                dynamics.run(100)
        assert dynamics.nsteps == 200
        ends.append(atoms.positions)
    assert np.abs(ends[1] - ends[0]).max() < 1e-6


def test_a_server_that_is_gone_stops_the_run_within_its_time(model):
    with serving(f"si={model}") as server:
        atoms = atoms_of()
        atoms.calc = NEPCalculator(server.url, timeout=2.0)
        dynamics = VelocityVerlet(atoms, 1 * units.fs)
        dynamics.run(10)
        server.close()
    started = time.monotonic()
    with pytest.raises(NepserveError, match=server.url):
        dynamics.run(100)
    # Two seconds are what it was given; the rest is a busy machine's.
    assert time.monotonic() - started < 20
    assert dynamics.nsteps == 10
    assert atoms.calc.results == {}


def test_fifty_clients_that_come_before_their_server(model):
    """They wait for a stated time, then all get their answer (public report, psiflow 74)."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(Timeout, match=r"not ready within 0\.3 s"):
        Client(url).wait_until_ready(0.3)
    found: list[float] = []

    def come() -> None:
        atoms = atoms_of()
        atoms.calc = NEPCalculator(url)
        atoms.calc.client.wait_until_ready(120)
        found.append(atoms.get_potential_energy())

    threads = [threading.Thread(target=come) for _ in range(50)]
    for thread in threads:
        thread.start()
    with serving(f"si={model}", port=port):
        for thread in threads:
            thread.join(120)
    assert len(set(found)) == 1
    assert len(found) == 50


def test_results_in_a_trajectory_come_back(calc, model, server, tmp_path):
    """Written by ASE and by our command, read by ASE and by our reader (public report, janus-core 200)."""
    images = []
    for seed in range(3):
        one = crystal(1, cell=SHEARED / 2, seed=seed)
        # The file has eight digits.
        atoms = Atoms(one.numbers, one.positions.round(6), cell=one.cell, pbc=True, calculator=calc)
        atoms.calc = SinglePointCalculator(
            atoms, energy=atoms.get_potential_energy(), forces=atoms.get_forces(), stress=atoms.get_stress()
        )
        images.append(atoms)
    ase.io.write(tmp_path / "ase.xyz", images, format="extxyz")
    code = "from nepserve.cli import main; main()"
    words = ["predict", tmp_path / "ase.xyz", "--url", server.url, "-o", tmp_path / "ours.xyz", "-q"]
    subprocess.run([sys.executable, "-c", code, *map(str, words)], check=True)
    for name in ("ase.xyz", "ours.xyz"):
        for atoms, again in zip(images, ase.io.read(tmp_path / name, ":"), strict=True):
            assert again.get_potential_energy() == pytest.approx(atoms.get_potential_energy(), abs=1e-8)
            np.testing.assert_allclose(again.get_forces(), atoms.get_forces(), rtol=0, atol=1e-8)
            np.testing.assert_allclose(again.get_stress(), atoms.get_stress(), rtol=0, atol=1e-8)
        frames = xyz.read(tmp_path / name)
        energies = [atoms.get_potential_energy() for atoms in images]
        np.testing.assert_allclose(frames.energy, energies, rtol=0, atol=1e-8)
        forces = np.concatenate([atoms.get_forces() for atoms in images])
        np.testing.assert_allclose(frames.forces, forces, rtol=0, atol=1e-8)
        virials = [-atoms.get_volume() * atoms.get_stress(voigt=False) for atoms in images]
        np.testing.assert_allclose(frames.virial, virials, rtol=0, atol=1e-6)


@pytest.mark.slow
@needs_shared
def test_energy_is_conserved_over_2_ps():
    """64 Si at 300 K, 1 fs: a linear fit of the total energy, times 2 ps, below 0.02 meV an atom."""
    path = MODELS / "Si_2022_NEP4_3body.txt"
    if not path.is_file():
        pytest.skip(f"no silicon model at {path}")
    library = nepcore.load(path, device="cpu", dtype="float64", backend="loop")
    ends = []
    with serving(f"si={path}") as server:
        for calculator in (NEPCalculator(server.url), Direct(library)):
            atoms = bulk("Si", cubic=True) * (2, 2, 2)
            atoms.calc = calculator
            MaxwellBoltzmannDistribution(atoms, temperature_K=600, rng=np.random.default_rng(0))
            dynamics = VelocityVerlet(atoms, 1 * units.fs)
            energies: list[float] = []
            dynamics.attach(lambda a=atoms, e=energies: e.append(a.get_total_energy()), interval=10)
            dynamics.run(2000)
            slope = np.polyfit(np.arange(len(energies)) * 0.01, energies, 1)[0]
            assert abs(slope * 2) / 64 < 2e-5
            assert 200 < atoms.get_temperature() < 400
            ends.append(atoms.positions)
    np.testing.assert_allclose(ends[0], ends[1], rtol=0, atol=1e-6)
