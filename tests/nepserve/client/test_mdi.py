"""The MDI engine, driven by pymdi in another process."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("uvicorn")

import nepcore
from bridges import SHEARED, crystal, finish, free_port, serving, start, write_model
from nepcore.structures import Structure
from nepserve.client import Client, StructureRejected
from nepserve.client import mdi as bridge
from nepserve.client.units import BOHR, HARTREE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from servers import ServerProcess

needs_mdi = pytest.mark.skipif(find_spec("mdi") is None, reason="the package pymdi is not installed")

ENGINE = """
import sys
from nepserve.client.mdi import run
options = f"-role ENGINE -name NEP -method TCP -hostname localhost -port {sys.argv[1]}"
print("evaluations", run(options, sys.argv[2], timeout=3.0))
"""

DRIVER = """
import json, sys
import mdi
import numpy as np
job = json.loads(sys.argv[1])
mdi.MDI_Init(f"-role DRIVER -name test -method TCP -port {job['port']}")
comm = mdi.MDI_Accept_Communicator()
kept = {}
n = len(job["elements"])
def send(command, values, kind):
    mdi.MDI_Send_Command(command, comm)
    mdi.MDI_Send(values, len(values), kind, comm)
def ask(command, size):
    mdi.MDI_Send_Command(command, comm)
    return np.array(mdi.MDI_Recv(size, mdi.MDI_DOUBLE, comm)).ravel()
mdi.MDI_Send_Command("@DEFAULT", comm)
send(">NATOMS", [n], mdi.MDI_INT)
send(">ELEMENTS", job["elements"], mdi.MDI_INT)
if job["cell"]:
    send(">CELL", job["cell"], mdi.MDI_DOUBLE)
for k, positions in enumerate(job["steps"]):
    send(">COORDS", positions, mdi.MDI_DOUBLE)
    kept[f"{k}/forces"] = ask("<FORCES", 3 * n)
    kept[f"{k}/energy"] = ask("<ENERGY", 1)
    if job["cell"]:
        kept[f"{k}/stress"] = ask("<STRESS", 9)
    np.savez(job["output"], **kept)
mdi.MDI_Send_Command("EXIT", comm)
"""


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


def drive(
    folder: Path, url: str, structure: Structure, steps: list[np.ndarray]
) -> tuple[int, str, dict[str, np.ndarray]]:
    """Exit code and output of the engine, and what the driver got."""
    port = free_port()
    job = {
        "port": port, "elements": structure.numbers.tolist(), "output": str(folder / "out.npz"),
        "cell": (structure.cell / BOHR).ravel().tolist() if structure.pbc.all() else [],
        "steps": [(x / BOHR).ravel().tolist() for x in steps],
    }  # fmt: skip
    driver = start("-c", DRIVER, json.dumps(job))
    engine = start("-c", ENGINE, port, url)
    try:
        code, output = finish(engine)
    finally:
        if driver.poll() is None:
            try:
                driver.wait(10)
            except Exception:  # it waits for an engine that is gone
                driver.kill()
        driver.communicate()
    found = dict(np.load(folder / "out.npz")) if (folder / "out.npz").is_file() else {}
    return code, output, found


@needs_mdi
@pytest.mark.parametrize("periodic", [True, False])
def test_a_driver_gets_the_librarys_forces(server, library, tmp_path, periodic):
    structure = crystal(1, cell=SHEARED / 2)
    if not periodic:
        structure = Structure.make(structure.numbers, structure.positions)
    rng = np.random.default_rng(0)
    steps = [structure.positions + rng.uniform(-0.1, 0.1, (8, 3)) for _ in range(3)]
    code, output, found = drive(tmp_path, server.url, structure, steps)
    assert code == 0, output
    assert "evaluations 3" in output
    for k, positions in enumerate(steps):
        one = Structure.make(structure.numbers, positions, structure.cell if periodic else None)
        wanted = library.evaluate([one], ["energy", "forces", "virial"])
        assert found[f"{k}/energy"][0] * HARTREE == pytest.approx(wanted["energy"][0], abs=1e-8)
        forces = found[f"{k}/forces"].reshape(8, 3) * HARTREE / BOHR
        np.testing.assert_allclose(forces, wanted["forces"], rtol=0, atol=1e-8)
        if periodic:
            pressure = found[f"{k}/stress"].reshape(3, 3) * HARTREE / BOHR**3
            np.testing.assert_allclose(pressure, wanted["virial"][0] / one.volume, rtol=0, atol=1e-10)


@needs_mdi
def test_a_step_that_fails_ends_the_engine_and_sends_nothing(server, tmp_path):
    structure = crystal(1)
    collapsed = structure.positions.copy()
    collapsed[1] = collapsed[0]
    code, output, found = drive(tmp_path, server.url, structure, [structure.positions, collapsed])
    assert code != 0
    assert "coincident_atoms" in output
    assert {name.split("/")[0] for name in found} == {"0"}


def engine(server: ServerProcess, numbers=None) -> bridge.Engine:
    return bridge.Engine(Client(server.url), numbers, None, None)


def test_what_was_computed_is_forgotten_when_something_changes(server):
    structure = crystal(1)
    one = engine(server, structure.numbers)
    one.take(">CELL", (structure.cell / BOHR).ravel())
    one.take(">COORDS", (structure.positions / BOHR).ravel())
    first = one.answer("<ENERGY")
    assert one.answer("<PE") == first
    assert one.evaluations == 1
    for command, values in (
        (">COORDS", (structure.positions * 1.01 / BOHR).ravel()),
        (">CELL", (structure.cell * 1.02 / BOHR).ravel()),
        (">ELEMENTS", structure.numbers[::-1].astype(np.int32)),
    ):
        one.take(command, values)
        second = one.answer("<ENERGY")
        assert second != first
        first = second
    assert one.evaluations == 4


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda e: e.wants(">COORDS"), "before >NATOMS"),
        (lambda e: e.wants("<CHARGES"), "'<CHARGES'"),
        (lambda e: (e.take(">NATOMS", np.array([2])), e.answer("<FORCES")), "before >ELEMENTS"),
        (lambda e: e.take(">NATOMS", np.array([0])), "0 atoms"),
        (
            lambda e: (
                e.take(">NATOMS", np.array([1])),
                e.take(">ELEMENTS", np.array([14], np.int32)),
                e.take(">COORDS", np.zeros(3)),
                e.answer("<STRESS"),
            ),
            "before >CELL",
        ),
    ],
)
def test_questions_that_have_no_answer(server, act, said):
    with pytest.raises(bridge.DriverError, match=said):
        act(engine(server))


def test_elements_that_the_model_lacks(server):
    one = engine(server)
    one.take(">NATOMS", np.array([1]))
    with pytest.raises(ValueError, match="has no C"):
        one.take(">ELEMENTS", np.array([6], np.int32))


def test_a_structure_that_is_refused_raises(server):
    one = engine(server, [14, 14])
    one.take(">COORDS", np.zeros(6))
    with pytest.raises(StructureRejected):
        one.answer("<FORCES")
