"""The clients against the server itself: its own processes, its own physics, on loopback."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("uvicorn")

import nepcore
from cases import SI2, TOY_SI, file
from locations import needs_shared
from nepcore.files import nep_txt
from nepcore.structures import Structure
from nepcore.synthetic import make_model
from nepserve.client import AsyncClient, Client, ConnectionFailed, ServerError, StructureRejected, Timeout
from servers import ServerProcess, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = "0123456789abcdef-key"
NAMES = ["energy", "energies", "forces", "stress", "virial", "virials", "descriptors"]


OPTIONS = {"loader": "nepcore:load", "dtype": ["float64"], "device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {
        "si-ge": make_model(["Si", "Ge"], n_max=(2, 2), basis_size=(3, 3), hidden=(5,), seed=1),
        "warm": make_model(["Si"], n_max=(2, 2), basis_size=(3, 3), hidden=(5,), temperature=True, seed=2),
    }
    for name, model in made.items():
        (folder / f"{name}.txt").write_text(nep_txt.dumps(model))
    return {name: folder / f"{name}.txt" for name in made}


@pytest.fixture(scope="module")
def live(models: dict[str, Path]) -> Iterator[ServerProcess]:
    words = [f"{name}={path}" for name, path in models.items()]
    if TOY_SI.is_file():
        words.append(f"toy={TOY_SI}")
    with running(**OPTIONS, models=words, api_keys=[f"user:{KEY}"]) as found:
        Client(found.url, api_key=KEY).wait_until_ready(240)
        yield found


@pytest.fixture
def client(live: ServerProcess) -> Client:
    return Client(live.url, model="si-ge", api_key=KEY)


@pytest.fixture(scope="module")
def library(models: dict[str, Path]) -> nepcore.calculator.Calculator:
    return nepcore.load(models["si-ge"], device="cpu", dtype="float64")


def structures(count, seed=0):
    """Crystals, slabs and molecules of Si and Ge, 2 to 12 atoms."""
    rng = np.random.default_rng(seed)
    found = []
    for k in range(count):
        n = 2 + k % 11
        grid = np.stack(np.meshgrid([0, 1], [0, 1], [0, 1, 2], indexing="ij"), -1).reshape(-1, 3)[:n]
        positions = 2.4 * grid + rng.uniform(-0.2, 0.2, (n, 3))
        pbc = [(True, True, True), (True, True, False), (False, False, False)][k % 3]
        cell = np.diag([4.8, 4.8, 7.2]) + rng.uniform(-0.3, 0.3, (3, 3)) if any(pbc) else None
        found.append(Structure.make(rng.choice([14, 32], n), positions, cell, pbc))
    return found


def test_one_by_one_and_many_are_the_librarys(client, library):
    items = structures(33)
    wanted = library.evaluate(items, NAMES)
    many = client.evaluate_many(items, NAMES, chunk_atoms=40)
    assert many.stress_known.tolist() == [k % 3 == 0 for k in range(33)]
    for name in NAMES:
        tolerance = 1e-10 * max(1.0, np.nanmax(np.abs(wanted.values[name])))
        np.testing.assert_allclose(many.values[name], wanted.values[name], rtol=0, atol=tolerance)
    for i in range(0, 33, 4):
        one, packed = client.evaluate(items[i], NAMES), many.view(i)
        assert one.unavailable == packed.unavailable
        for name in one.values:
            np.testing.assert_array_equal(one[name], packed[name])


def test_the_asynchronous_client_gets_the_same_bits(client, live):
    items = structures(20)

    async def job():
        async with AsyncClient(live.url, model="si-ge", api_key=KEY) as other:
            await other.wait_until_ready(60)
            one = await asyncio.gather(*(other.evaluate(item) for item in items))
            return one, await other.evaluate_many(items, chunk_atoms=30), await other.models()

    one, many, models = asyncio.run(job())
    wanted = client.evaluate_many(items)
    np.testing.assert_array_equal(many["forces"], wanted["forces"])
    np.testing.assert_array_equal(np.concatenate([result["forces"] for result in one]), wanted["forces"])
    assert models == client.models()


def test_what_the_server_says_of_itself(client):
    names = {entry["name"] for entry in client.models()}
    assert {"si-ge", "warm"} <= names
    assert client.model()["elements"] == ["Si", "Ge"]
    assert client.ready()
    assert client.status()["ready"] is True
    assert client.version()["api"] == "v1"


@pytest.mark.parametrize(
    ("structure", "model", "code", "atoms"),
    [
        ({"symbols": ["Si", "C"], "positions": [[0, 0, 0], [0, 0, 2]]}, "si-ge", "unknown_element", (1,)),
        ({"symbols": ["Si", "Ge"], "positions": [[0, 0, 0], [0, 0, 0]]}, "si-ge", "coincident_atoms", (0, 1)),
        ({"symbols": ["Si"], "positions": [[0, np.inf, 0]]}, "si-ge", "non_finite", (0,)),
        (
            {"symbols": ["Si"], "positions": [[0, 0, 0]], "cell": np.zeros((3, 3)), "pbc": True},
            "si-ge",
            "singular_cell",
            (),
        ),
        ({"symbols": ["Si"], "positions": [[0, 0, 0]]}, "warm", "missing_temperature", ()),
        ({"symbols": [], "positions": np.zeros((0, 3))}, "si-ge", "empty", ()),
    ],
)
def test_structures_that_cannot_be_evaluated(client, structure, model, code, atoms):
    with pytest.raises(StructureRejected) as caught:
        client.evaluate(structure, model=model)
    assert (caught.value.code, caught.value.atoms) == (code, atoms)
    good = {"symbols": ["Si", "Si"], "positions": [[0, 0, 0], [0, 0, 2.3]], "temperature": 300.0}
    found = client.evaluate_many([good, structure, good], ["energy"], model=model, on_error="return")
    assert {i: error.code for i, error in found.errors.items()} == {1: code}
    assert found.values["energy"][0] == found.values["energy"][2] == client.evaluate(good, model=model)["energy"]


def test_temperature_is_of_the_structure(client):
    pair = {"symbols": ["Si", "Si"], "positions": [[0, 0, 0], [0, 0, 2.3]]}
    cold, warm = (client.evaluate({**pair, "temperature": t}, model="warm")["energy"] for t in (10.0, 2000.0))
    assert cold != warm


def test_models_and_keys_that_are_not_there(client, live):
    pair = {"symbols": ["Si", "Si"], "positions": [[0, 0, 0], [0, 0, 2.3]]}
    with pytest.raises(ServerError) as caught:
        client.evaluate(pair, model="none")
    assert (caught.value.status, caught.value.code) == (404, "unknown_model")
    with pytest.raises(ServerError) as caught:
        Client(live.url, model="si-ge").evaluate(pair)
    assert (caught.value.status, caught.value.code) == (401, "unauthorized")
    with pytest.raises(ServerError) as caught:
        Client(live.url, api_key=KEY).evaluate(pair)
    assert "si-ge" in caught.value.detail


def test_a_time_that_is_over(client, live):
    many = {"numbers": np.full(40_000, 14), "positions": np.random.default_rng(0).uniform(0, 95, (40_000, 3))}
    with pytest.raises(Timeout):
        client.evaluate(many, timeout=0.02)
    assert client.evaluate(structures(1)[0])["energy"]


@needs_shared
def test_the_two_atom_silicon_cell(live):
    ase_io = pytest.importorskip("ase.io")
    from nepserve.client.ase import NEPCalculator

    atoms = ase_io.read(file(14, "header-a.extxyz"))
    atoms.calc = NEPCalculator(live.url, "toy", api_key=KEY)
    assert atoms.get_potential_energy() == pytest.approx(SI2, abs=5e-9)


def test_ase_stress_is_the_strain_derivative(client):
    pytest.importorskip("ase")
    fd = pytest.importorskip("ase.calculators.fd")
    from ase import Atoms

    from nepserve.client.ase import NEPCalculator

    one = structures(7)[6]
    atoms = Atoms(one.numbers, one.positions, cell=one.cell, pbc=True, calculator=NEPCalculator(client))
    np.testing.assert_allclose(atoms.get_stress(), fd.calculate_numerical_stress(atoms, 1e-5), atol=1e-6)
    np.testing.assert_allclose(atoms.get_forces(), fd.calculate_numerical_forces(atoms, 1e-4), atol=1e-6)


def test_dynamics_goes_on_over_a_restart_of_the_server(models, library, tmp_path):
    pytest.importorskip("ase")
    from ase import Atoms, units
    from ase.calculators.calculator import Calculator, all_changes
    from ase.md.verlet import VelocityVerlet

    from nepserve.client.ase import NEPCalculator

    class Direct(Calculator):
        implemented_properties = ["energy", "forces"]  # noqa: RUF012

        def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
            super().calculate(atoms, properties, system_changes)
            found = library.evaluate([Structure.from_ase(atoms)], ["energy", "forces"])
            self.results = {"energy": float(found["energy"][0]), "forces": found["forces"]}

    def trajectory(calculator, between=lambda: None):
        one = structures(9)[6]
        atoms = Atoms(one.numbers, one.positions, cell=one.cell, pbc=True, calculator=calculator)
        dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
        dynamics.run(20)
        between()
        dynamics.run(20)
        return atoms.positions

    path = tmp_path / "nep.sock"
    words = {**OPTIONS, "models": [f"si-ge={models['si-ge']}"], "uds": str(path)}
    with running(**words) as first:
        calculator = NEPCalculator(f"unix://{path}", timeout=200.0)
        calculator.client.wait_until_ready(240)
        started = []

        def restart():
            # As hard as it gets: the socket stays behind, nobody listens.
            first.process.kill()
            first.process.wait()
            started.append(ServerProcess(**words))

        try:
            found = trajectory(calculator, restart)
        finally:
            for second in started:
                second.close()
    np.testing.assert_allclose(found, trajectory(Direct()), rtol=0, atol=1e-9)


def test_a_server_that_is_gone_is_an_error(models, tmp_path):
    path = tmp_path / "nep.sock"
    pair = {"symbols": ["Si", "Si"], "positions": [[0, 0, 0], [0, 0, 2.3]]}
    with running(**OPTIONS, models=[f"si-ge={models['si-ge']}"], uds=str(path)) as found:
        # As the server writes its own address.
        client = Client(f"unix:{path}", retries=2)
        client.wait_until_ready(240)
        assert np.isfinite(client.evaluate(pair)["energy"])
        assert found.terminate(60) == 0
        with pytest.raises(ConnectionFailed, match=r"nep\.sock"):
            client.evaluate(pair)
