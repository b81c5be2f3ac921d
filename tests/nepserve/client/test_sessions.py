"""Sessions as the clients use them: by themselves, unseen, through restarts, forks and copies; and one in C."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
import subprocess
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bridges import crystal, free_port, serving, write_model
from checkout import ROOT
from nepserve.client import Client, NepserveError
from nepserve.client.forcefield import evaluator
from nepserve.client.session import Session
from nepserve.client.ways import parse_steps

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from servers import ServerProcess

pytest.importorskip("ase")

from ase import Atoms, units
from ase.md.verlet import VelocityVerlet

from nepserve.client.ase import NEPCalculator

NAMES = ("energy", "forces", "virial")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "nep.txt")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    place = tmp_path_factory.mktemp("s") / "f.sock"
    with serving(f"si={model}", frame_socket=str(place)) as found:
        yield found


def ways(server: ServerProcess) -> list[str]:
    found = re.search(r"frames on (\S+)", server.log)
    assert found is not None
    return ["http", "websocket", found[1]]


def atoms_of(seed: int = 0, *, mixed: bool = True) -> Atoms:
    one = crystal(1, seed=seed, mixed=mixed)
    return Atoms(one.numbers, one.positions, cell=one.cell, pbc=True)


def requests(client: Client) -> list[str]:
    """Method and route of each request from now on."""
    seen: list[str] = []
    call = client.exchange.call

    def noting(method, path, *more, **options):
        parts = path.split("/")
        seen.append(f"{method} {'/'.join('ID' if k == 3 else part for k, part in enumerate(parts))}")
        return call(method, path, *more, **options)

    client.exchange.call = noting
    return seen


def fresh(server: ServerProcess, atoms: Atoms) -> dict[str, object]:
    found = Client(server.url).evaluate(atoms, ["energy", "forces", "stress"])
    return dict(found.values)


def same(atoms: Atoms, wanted: dict[str, object]) -> None:
    assert atoms.get_potential_energy() == wanted["energy"]
    np.testing.assert_array_equal(atoms.get_forces(), wanted["forces"])
    if atoms.pbc.all():
        np.testing.assert_array_equal(atoms.get_stress(), wanted["stress"])


def test_a_session_begins_with_the_second_request_and_ends_with_other_atoms(server: ServerProcess) -> None:
    calc = NEPCalculator(server.url)
    seen = requests(calc.client)
    atoms = atoms_of()
    atoms.calc = calc
    for _ in range(3):
        same(atoms, fresh(server, atoms))
        atoms.positions[0] += 0.05
    step = "PUT /v1/sessions/ID/positions"
    assert seen == ["POST /v1/evaluate", "POST /v1/sessions", step, step]
    del seen[:]
    # Swapped species: other atoms, though positions, cell and their number are the same.
    other = atoms.copy()
    other.numbers = atoms.numbers[::-1]
    other.calc = calc
    same(other, fresh(server, other))
    assert seen == ["DELETE /v1/sessions/ID", "POST /v1/evaluate"]


@pytest.mark.parametrize("change", ["cell", "pbc", "strain", "swap", "count", "order"])
@pytest.mark.parametrize("way", [0, 1, 2], ids=["http", "websocket", "frames"])
def test_whatever_changes_the_results_are_those_of_the_structure(server: ServerProcess, way: int, change: str) -> None:
    atoms = atoms_of()
    atoms.calc = NEPCalculator(server.url, steps=ways(server)[way])
    for _ in range(3):
        atoms.positions += 0.01
        atoms.get_forces()
    if change == "cell":
        atoms.set_cell(atoms.cell.array + 0.2 * np.tri(3))
    elif change == "strain":
        atoms.set_cell(atoms.cell.array * 1.03, scale_atoms=True)
    elif change == "pbc":
        atoms.pbc = [True, False, True]
    elif change == "swap":
        atoms.numbers = atoms.numbers[::-1]
    elif change == "count":
        del atoms[2]
    else:
        atoms = atoms[np.random.default_rng(0).permutation(len(atoms))]
        atoms.calc = NEPCalculator(server.url) if atoms.calc is None else atoms.calc
    for _ in range(3):
        same(atoms, fresh(server, atoms))
        atoms.positions[1] += 0.03


@pytest.mark.parametrize("way", [0, 1, 2], ids=["http", "websocket", "frames"])
def test_copies_pickles_and_forks_go_on(server: ServerProcess, way: int) -> None:
    atoms = atoms_of()
    atoms.calc = NEPCalculator(server.url, steps=ways(server)[way])
    for _ in range(3):
        atoms.positions += 0.01
        atoms.get_forces()
    atoms.positions[0] += 0.05
    wanted = fresh(server, atoms)
    for calc in (pickle.loads(pickle.dumps(atoms.calc)), copy.deepcopy(atoms.calc)):
        again = atoms.copy()
        again.calc = calc
        same(again, wanted)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            for _ in range(20):
                atoms.positions[0] += 0.001
                atoms.get_forces()
            atoms.positions[0] -= 0.02
            os.write(writing, json.dumps(atoms.get_forces().tolist()).encode())
        finally:
            os._exit(0)
    for _ in range(20):
        atoms.positions[1] += 0.001
        atoms.get_forces()
    atoms.positions[1] -= 0.02
    mine = atoms.get_forces()
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = np.array(json.loads(pipe.read()))
    os.waitpid(child, 0)
    np.testing.assert_allclose(told, wanted["forces"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(mine, wanted["forces"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", ["http", "websocket", "frames"])
def test_a_server_that_restarts_in_the_middle(model: Path, tmp_path: Path, way: str) -> None:
    port, place = free_port(), tmp_path / "f.sock"
    steps = f"frames://{place}" if way == "frames" else way
    ends = []
    for disturbed in (False, True):
        with serving(f"si={model}", port=port, frame_socket=str(place)) as server:
            atoms = atoms_of(mixed=False)
            atoms.calc = NEPCalculator(server.url, timeout=120.0, steps=steps)
            dynamics = VelocityVerlet(atoms, 1 * units.fs)
            dynamics.run(100)
            if disturbed:
                server.close()
                later = threading.Thread(target=dynamics.run, args=(100,))
                later.start()
                with serving(f"si={model}", port=port, frame_socket=str(place)):
                    later.join(120)
                    assert not later.is_alive()
            else:
                dynamics.run(100)
        ends.append(atoms.positions)
    assert dynamics.nsteps == 200
    np.testing.assert_allclose(ends[0], ends[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", ["http", "websocket", "frames"])
def test_a_server_that_is_gone_ends_the_run(model: Path, tmp_path: Path, way: str) -> None:
    place = tmp_path / "f.sock"
    with serving(f"si={model}", frame_socket=str(place)) as server:
        atoms = atoms_of()
        steps = f"frames://{place}" if way == "frames" else way
        atoms.calc = NEPCalculator(server.url, timeout=1.0, steps=steps)
        dynamics = VelocityVerlet(atoms, 1 * units.fs)
        dynamics.run(5)
        server.close()
    with pytest.raises(NepserveError):
        dynamics.run(50)
    assert dynamics.nsteps == 5
    assert atoms.calc.results == {}


def test_an_older_server_gets_whole_requests(make_server) -> None:
    toy = make_server()
    found = evaluator(Client(toy.url), [1, 1], False)
    for _ in range(3):
        found.one(np.array([[0.0, 0, 0], [0, 0, 1]]), np.zeros((3, 3)))
    found.close()
    assert [seen.path for seen in toy.seen] == ["/v1/sessions", *["/v1/evaluate"] * 3]


def test_a_server_that_loses_every_session_is_an_error(make_server) -> None:
    toy = make_server()
    document = {"type": "x", "title": "x", "status": 404, "code": "session_lost", "detail": "lost"}

    def lost(seen):
        if seen.path == "/v1/sessions":
            return 200, "application/json", b'{"id": "abc"}'
        return 404, "application/problem+json", json.dumps(document).encode()

    toy.right = lost
    with pytest.raises(NepserveError, match="session_lost"):
        Session(Client(toy.url, timeout=5.0), [1]).step(np.zeros((1, 3)), np.zeros((3, 3)), NAMES)
    assert 2 <= sum(seen.method == "PUT" for seen in toy.seen) <= 5


@pytest.mark.parametrize("steps", ["ftp", "frames://", "frames://host", "frames://host:0", "frames://:7", "frames:/x"])
def test_ways_that_are_none(steps: str) -> None:
    with pytest.raises(ValueError, match="steps is"):
        Client("http://127.0.0.1:1", steps=steps)


def test_ways_taken_apart() -> None:
    assert parse_steps(None).kind == "http"
    unix, tcp = parse_steps("frames:///run/f.sock").address, parse_steps("framess://[::1]:70").address
    assert unix is not None
    assert tcp is not None
    assert (unix.socket, tcp.host, tcp.port, tcp.tls) == ("/run/f.sock", "::1", 70, True)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) on this machine")
def test_the_client_in_c(server: ServerProcess, tmp_path: Path) -> None:
    """The example compiles without a warning, and its run is the one that Python makes."""
    program = tmp_path / "frame_client"
    source = ROOT / "examples" / "frame_client.c"
    subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, source, "-lm"], check=True)
    place = ways(server)[2].removeprefix("frames://")
    done = subprocess.run([program, place, "20"], capture_output=True, text=True, check=True)
    rows = np.array([line.split() for line in done.stdout.splitlines()], float)
    basis = np.array([[0, 0, 0], [0, 2, 2], [2, 0, 2], [2, 2, 0], [1, 1, 1], [1, 3, 3], [3, 1, 3], [3, 3, 1]]) / 4
    i, k = np.indices((8, 3))
    atoms = Atoms("Si8", 5.43 * basis + 0.1 * np.sin(3.0 * i + k), cell=[5.43] * 3, pbc=True, masses=[28.085] * 8)
    atoms.calc = NEPCalculator(server.url)
    dynamics = VelocityVerlet(atoms, 1 * units.fs)
    for step in range(21):
        assert rows[step, 0] == step
        np.testing.assert_allclose(rows[step, 1:], [atoms.get_potential_energy(), atoms.get_total_energy()], atol=1e-7)
        dynamics.run(1)
    missing = subprocess.run([program, tmp_path / "none", "1"], capture_output=True, text=True, check=False)
    assert missing.returncode == 1
    assert "nobody listens" in missing.stderr
    for words in ([place], [place, "abc"], [place, "2x"], [place, "-1"]):
        wrong = subprocess.run([program, *words], capture_output=True, text=True, check=False)
        assert (wrong.returncode, wrong.stdout) == (1, "")
        assert "usage" in wrong.stderr


@pytest.mark.parametrize("way", ["http", "websocket"])
def test_a_session_goes_on_at_another_server_when_its_own_is_killed(model: Path, way: str) -> None:
    with serving(f"si={model}") as one, serving(f"si={model}") as other:
        atoms = atoms_of()
        session = Session(Client([one.url, other.url], timeout=30, steps=way), atoms.numbers)
        first = session.step(atoms.positions, atoms.cell.array, NAMES)
        place = session._way._opener.replica.address.text
        home, left = (one, other) if place == one.url else (other, one)
        home.process.kill()
        home.process.wait(10)
        second = session.step(atoms.positions, atoms.cell.array, NAMES)
        np.testing.assert_array_equal(first["forces"], second["forces"])
        assert session._way._opener.replica.address.text == left.url
        session.close()
