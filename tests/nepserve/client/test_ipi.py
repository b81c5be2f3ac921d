"""The i-PI bridge: against i-PI itself, and against a host that breaks the rules."""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("uvicorn")

import nepcore
from bridges import SHEARED, command, crystal, finish, free_port, serving, start, write_model
from cases import TOY_NACL, file
from locations import MODELS, needs_shared
from nepcore.files import xyz
from nepcore.structures import Structure
from nepserve.client import Client, ConnectionFailed, NepserveError, units
from nepserve.client import ipi as bridge
from nepserve.client.forcefield import Forces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers import ServerProcess

needs_ipi = pytest.mark.skipif(find_spec("ipi") is None, reason="the package ipi is not installed")

# Runs i-PI in this process and writes down, in full precision, what it knows after every step.
HOST = """
import json, sys
import numpy as np
from ipi.scripting import InteractiveSimulation
from ipi.utils.depend import dstrip
job = json.loads(sys.argv[1])
sim = InteractiveSimulation(open(job["input"]).read())
names = ("q", "f", "pots", "virs", "h", "conserved")
kept = {name: [] for name in names}
for step in range(job["steps"] + 1):
    if step:
        sim.run(1)
    system = sim.syslist[0]
    kept["q"].append(dstrip(system.beads.q).copy())
    kept["f"].append(dstrip(system.forces.f).copy())
    kept["pots"].append(dstrip(system.forces.pots).copy())
    kept["virs"].append(dstrip(system.forces.virs).copy())
    kept["h"].append(dstrip(system.cell.h).copy())
    kept["conserved"].append(float(sim.properties("conserved")))
np.savez(job["output"], **kept)
sim.stop()
"""

INPUT = """
<simulation verbosity='low' safe_stride='1000'>
  <ffsocket mode='{mode}' name='nep' {pbc}>
    <address>{address}</address>{port}{batch}
    <latency> 1e-4 </latency>{more}
  </ffsocket>
  <output prefix='sim'><properties stride='100'> [step] </properties></output>
  <prng><seed>11</seed></prng>
  <system>
    <initialize nbeads='{beads}'>
      <file mode='xyz' units='angstrom'> init.xyz </file>
      <cell mode='manual' units='angstrom'> {cell} </cell>
      <velocities mode='thermal' units='kelvin'> 300 </velocities>
    </initialize>
    <forces><force forcefield='nep'/></forces>
    <ensemble><temperature units='kelvin'> 300 </temperature>{pressure}</ensemble>
    <motion mode='dynamics'>
      <dynamics mode='{ensemble}'><timestep units='femtosecond'> 0.5 </timestep>{extras}</dynamics>
    </motion>
  </system>
</simulation>
"""

THERMOSTAT = "<thermostat mode='pile_g'><tau units='femtosecond'> 50 </tau></thermostat>"


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


def write_structure(path: Path, structure: Structure) -> Path:
    """An XYZ file as i-PI reads it, in full precision."""
    rows = [
        f"{s} {x!r} {y!r} {z!r}" for s, (x, y, z) in zip(structure.symbols, structure.positions.tolist(), strict=True)
    ]
    box = "# CELL(abcABC): 9 9 9 90 90 90"
    path.write_text("\n".join([str(len(rows)), box, *rows, ""]))
    return path


class Host:
    """i-PI on a structure, and where it listens."""

    def __init__(
        self, folder: Path, structure: Structure, *, unix: bool = True, beads: int = 1, batch: int = 1, steps: int = 5,
        ensemble: str = "nve", more: str = "", pressure: str = "", extras: str = "", pbc: str = "",
    ) -> None:  # fmt: skip
        self.folder, self.steps = folder, steps
        self.structure_file = write_structure(folder / "init.xyz", structure)
        name = f"nep-{uuid.uuid4().hex[:12]}"
        port = free_port()
        self.address = f"unix:{name}" if unix else f"127.0.0.1:{port}"
        (folder / "input.xml").write_text(INPUT.format(
            mode="unix" if unix else "inet", address=name if unix else "127.0.0.1", beads=beads,
            port="" if unix else f"<port>{port}</port>", batch=f"<batch_size>{batch}</batch_size>" if batch > 1 else "",
            cell=np.array2string(structure.cell.T.ravel(), separator=",", floatmode="unique", max_line_width=1000),
            ensemble=ensemble, more=more, pressure=pressure, extras=extras, pbc=pbc,
        ))  # fmt: skip
        self._process = None

    def start(self) -> None:
        job = {"input": "input.xml", "output": "out.npz", "steps": self.steps}
        self._process = start("-c", HOST, json.dumps(job), cwd=self.folder)

    def result(self) -> dict[str, np.ndarray]:
        code, output = finish(self._process)
        assert code == 0, output
        return dict(np.load(self.folder / "out.npz"))

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        if self.address.startswith("unix:"):
            Path(bridge.parse_address(self.address).path).unlink(missing_ok=True)


@contextmanager
def hosting(*arguments, **options) -> Iterator[Host]:
    host = Host(*arguments, **options)
    try:
        host.start()
        yield host
    finally:
        host.close()


def check_against_library(library, structure: Structure, kept: dict[str, np.ndarray]) -> None:
    """Energies, forces and virials of all beads at all steps are those of the library at i-PI's own positions."""
    steps, beads = kept["q"].shape[:2]
    assert np.abs(np.diff(kept["q"], axis=0)).max(axis=(1, 2)).min() > 1e-5
    items = [
        Structure.make(
            structure.numbers, kept["q"][s, b].reshape(-1, 3) * units.BOHR, kept["h"][s].T * units.BOHR, True
        )
        for s in range(steps)
        for b in range(beads)
    ]
    wanted = library.evaluate(items, ["energy", "forces", "virial"])
    force = units.HARTREE / units.BOHR
    found = kept["f"].reshape(len(items) * len(structure), 3) * force
    np.testing.assert_allclose(found, wanted["forces"], rtol=0, atol=1e-8)
    np.testing.assert_allclose(kept["pots"].ravel() * units.HARTREE, wanted["energy"], rtol=0, atol=1e-8)
    # i-PI keeps the upper triangle.
    virials = np.triu(wanted["virial"])
    np.testing.assert_allclose(kept["virs"].reshape(-1, 3, 3) * units.HARTREE, virials, rtol=0, atol=1e-8)


@needs_ipi
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"unix": True}, id="unix"),
        pytest.param({"unix": False}, id="tcp"),
        pytest.param({"more": "<consolidate_messages>False</consolidate_messages>"}, id="message by message"),
        pytest.param(
            {"beads": 6, "batch": 4, "ensemble": "nvt", "extras": THERMOSTAT}, id="batches, the last one filled up"
        ),
        pytest.param({"beads": 4, "connections": 3}, id="connections"),
    ],
)  # fmt: skip
def test_ipi_gets_the_librarys_forces(server, library, tmp_path, options):
    options = {**options}
    connections = options.pop("connections", 1)
    structure = crystal(1, cell=SHEARED / 2)
    with hosting(tmp_path, structure, **options) as host:
        said: list[str] = []
        steps = bridge.run(
            host.address, server.url, structure.numbers, connections=connections, report=said.append, wait_seconds=60
        )
        kept = host.result()
    check_against_library(library, structure, kept)
    beads, batch = options.get("beads", 1), options.get("batch", 1)
    assert steps >= (host.steps + 1) * -(-beads // batch)
    assert "connected to i-PI" in said[-1]
    assert len(kept["q"]) == host.steps + 1


@needs_ipi
def test_the_command_drives_a_path_integral_of_silicon_at_constant_pressure(server, library, tmp_path):
    """The barostat moves a cell whose virial has six different components; an order that was wrong would be seen."""
    structure = crystal(1, cell=SHEARED / 2)
    extras = f"<barostat mode='isotropic'><tau units='femtosecond'> 100 </tau></barostat>{THERMOSTAT}"
    pressure = "<pressure units='bar'> 1 </pressure>"
    with hosting(
        tmp_path, structure, beads=2, batch=2, steps=8, ensemble="npt", pressure=pressure, extras=extras
    ) as host:
        driver = command("ipi", "--address", host.address, "--url", server.url, "--structure", host.structure_file)
        kept = host.result()
        code, output = finish(driver)
    assert code == 0, output
    assert "i-PI is done" in output
    check_against_library(library, structure, kept)
    volumes = np.linalg.det(kept["h"])
    assert abs(volumes[-1] / volumes[0] - 1) > 1e-6


@needs_ipi
def test_energy_is_conserved(server, library, tmp_path):
    structure = crystal(1, mixed=False)
    with hosting(tmp_path, structure, steps=60) as host:
        bridge.run(host.address, server.url, structure.numbers)
        kept = host.result()
    assert np.ptp(kept["conserved"]) < 0.01 * np.ptp(kept["pots"])
    check_against_library(library, structure, {name: value[::20] for name, value in kept.items()})


@needs_ipi
@needs_shared
@pytest.mark.parametrize("beads", [1, 4], ids=["nve", "path integral"])
def test_water(tmp_path, beads):
    path = MODELS / "nep_water.txt"
    if not path.is_file():
        pytest.skip(f"no water model at {path}")
    rng = np.random.default_rng(3)
    corners = np.stack(np.meshgrid(*[np.arange(2)] * 3, indexing="ij"), -1).reshape(-1, 3) * 3.2 + 0.4
    molecule = np.array([[0, 0, 0], [0.76, 0.59, 0], [-0.76, 0.59, 0]])
    positions = (corners[:, None] + molecule + rng.uniform(-0.03, 0.03, (8, 3, 3))).reshape(-1, 3)
    structure = Structure.make(["O", "H", "H"] * 8, positions, 6.4 * np.eye(3), True)
    library = nepcore.load(path, device="cpu", dtype="float64", backend="loop")
    options = {} if beads == 1 else {"ensemble": "nvt", "extras": THERMOSTAT, "batch": beads, "beads": beads}
    with serving(f"water={path}") as server, hosting(tmp_path, structure, steps=10, **options) as host:
        bridge.run(host.address, server.url, structure.numbers)
        kept = host.result()
    check_against_library(library, structure, kept)
    assert kept["q"].shape == (11, beads, 72)


# From here on the host is ours.


class Peer:
    """A host that sends what it is told, on a unix socket."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "host"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen(4)
        self.listener.settimeout(60)
        self.stream: socket.socket | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def accept(self) -> None:
        self.stream, _ = self.listener.accept()
        self.stream.settimeout(60)

    def send(self, word: str, *parts: bytes) -> None:
        self.stream.sendall(word.ljust(12).encode() + b"".join(parts))

    def init(self, text: str = "") -> None:
        self.send("INIT", np.int32(0).tobytes(), np.int32(len(text)).tobytes(), text.encode())

    def positions(self, positions: np.ndarray, cell: np.ndarray) -> None:
        h = (cell.T / units.BOHR).copy()
        self.send(
            "POSDATA", h.tobytes(), np.linalg.inv(h).tobytes(), np.int32(len(positions)).tobytes(),
            (positions / units.BOHR).tobytes(),
        )  # fmt: skip

    def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.stream.recv(size - len(data))
            if not piece:
                raise EOFError(data)
            data += piece
        return data

    def word(self) -> str:
        return self.receive(12).decode().strip()

    def forces(self, n: int) -> tuple[float, np.ndarray, np.ndarray]:
        assert self.word() == "FORCEREADY"
        energy = np.frombuffer(self.receive(8))[0] * units.HARTREE
        assert np.frombuffer(self.receive(4), np.int32)[0] == n
        forces = np.frombuffer(self.receive(24 * n)).reshape(n, 3) * units.HARTREE / units.BOHR
        virial = np.frombuffer(self.receive(72)).reshape(3, 3).T * units.HARTREE
        assert np.frombuffer(self.receive(4), np.int32)[0] == 0
        return energy, forces, virial

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.listener.close()


@pytest.fixture
def peer(tmp_path) -> Iterator[Peer]:
    found = Peer(tmp_path)
    yield found
    found.close()


class Running:
    """:func:`bridge.run` in a thread, and how it ended."""

    def __init__(self, *arguments, **options) -> None:
        self.error: BaseException | None = None
        self.steps = -1

        def job() -> None:
            try:
                self.steps = bridge.run(*arguments, **options)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=job, daemon=True)
        self.thread.start()

    def end(self) -> Running:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self


def test_status_words_and_a_step(server, library, peer):
    structure = crystal(1, cell=SHEARED / 2)
    running = Running(peer.address, server.url, structure.numbers)
    peer.accept()
    words = []
    for act in (lambda: None, peer.init, lambda: peer.positions(structure.positions, structure.cell)):
        act()
        peer.send("STATUS")
        words.append(peer.word())
    peer.send("GETFORCE")
    energy, forces, virial = peer.forces(8)
    peer.send("STATUS")
    words.append(peer.word())
    peer.send("EXIT")
    assert running.end().error is None
    assert (words, running.steps) == (["NEEDINIT", "READY", "HAVEDATA", "READY"], 1)
    wanted = library.evaluate([structure], ["energy", "forces", "virial"])
    assert energy == pytest.approx(wanted["energy"][0], abs=1e-10)
    np.testing.assert_allclose(forces, wanted["forces"], atol=1e-10)
    np.testing.assert_allclose(virial, wanted["virial"][0], atol=1e-10)


def test_a_failed_evaluation_closes_the_connection_and_sends_no_forces(server, peer):
    structure = crystal(1)
    running = Running(peer.address, server.url, structure.numbers)
    peer.accept()
    peer.init()
    peer.positions(structure.positions, structure.cell)
    peer.send("GETFORCE")
    peer.forces(8)
    broken = structure.positions.copy()
    broken[3, 1] = np.nan
    peer.positions(broken, structure.cell)
    peer.send("GETFORCE")
    with pytest.raises((EOFError, ConnectionResetError)) as caught:
        peer.word()
    assert not caught.value.args or caught.value.args[0] in {b"", 104}
    error = running.end().error
    assert isinstance(error, NepserveError)
    assert "atom 4" in str(error)


def test_a_server_that_is_gone_ends_the_driver_within_its_time(model, peer):
    structure = crystal(1)
    with serving(f"si={model}") as server:
        client = Client(server.url, timeout=2.0)
        running = Running(peer.address, client, structure.numbers)
        peer.accept()
        peer.init()
        peer.positions(structure.positions, structure.cell)
        peer.send("GETFORCE")
        peer.forces(8)
        server.close()
        peer.positions(structure.positions + 0.01, structure.cell)
        peer.send("GETFORCE")
        with pytest.raises((EOFError, ConnectionResetError)):
            peer.word()
        assert isinstance(running.end().error, NepserveError)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        pytest.param(lambda p: p.send("GETFORCE"), "before it sent positions", id="forces of nothing"),
        pytest.param(lambda p: p.send("HELLO"), "'HELLO'", id="a word unknown"),
        pytest.param(lambda p: p.positions(np.zeros((3, 3)), np.eye(3)), "3 atoms", id="another structure"),
        pytest.param(
            lambda p: p.send("POSDATA", np.ones(18).tobytes(), np.int32(8).tobytes(), bytes(192)),
            None,
            id="a singular cell",
        ),
        pytest.param(
            lambda p: p.send(
                "POSDATA", np.eye(3).tobytes(), (2 * np.eye(3)).tobytes(), np.int32(8).tobytes(), bytes(192)
            ),
            "do not belong together",
            id="a wrong inverse",
        ),
        pytest.param(
            lambda p: p.send("POSDATA", bytes(144), np.int32(-1).tobytes()), "length of -1", id="a negative count"
        ),
        pytest.param(lambda p: (p.send("POSDATA", bytes(50)), p.close()), "middle of a message", id="half a message"),
        pytest.param(lambda p: p.init("batch_size:0"), "batches of 0", id="empty batches"),
    ],
)
def test_a_host_that_breaks_the_rules(server, peer, act, said):
    running = Running(peer.address, server.url, crystal(1).numbers)
    peer.accept()
    peer.init()
    act(peer)
    if peer.stream.fileno() >= 0:
        with pytest.raises((EOFError, ConnectionResetError)):
            peer.word()
    error = running.end().error
    assert isinstance(error, (bridge.ProtocolError, ConnectionError, NepserveError))
    assert said is None or said in str(error)


def test_forces_are_never_sent_twice(server, peer):
    structure = crystal(1)
    running = Running(peer.address, server.url, structure.numbers)
    peer.accept()
    peer.init()
    peer.positions(structure.positions, structure.cell)
    peer.send("GETFORCE")
    peer.forces(8)
    peer.send("GETFORCE")
    with pytest.raises((EOFError, ConnectionResetError)):
        peer.word()
    assert isinstance(running.end().error, bridge.ProtocolError)


def test_a_host_that_hangs_up_between_steps_is_done(server, peer):
    running = Running(peer.address, server.url, crystal(1).numbers)
    peer.accept()
    peer.init()
    peer.close()
    assert running.end().error is None
    assert running.steps == 0


@pytest.mark.parametrize("periodic", [True, False])
def test_the_socket_calculator_of_ase(server, library, tmp_path, periodic):
    """It speaks an older dialect: no consolidated messages, INIT without a text of its own, the stress asked back."""
    pytest.importorskip("ase")
    from ase import Atoms
    from ase.calculators.socketio import SocketIOCalculator

    one = crystal(1, cell=SHEARED / 2)
    atoms = Atoms(one.numbers, one.positions, cell=one.cell if periodic else None, pbc=periodic)
    name = f"ase-{uuid.uuid4().hex[:12]}"
    with SocketIOCalculator(unixsocket=name, timeout=60) as calc:
        running = Running(f"unix:{name}", server.url, one.numbers, pbc=periodic)
        atoms.calc = calc
        for shift in (0.0, 0.1):
            atoms.positions[0] += shift
            wanted = library.evaluate([atoms], ["energy", "forces", "stress"])
            assert atoms.get_potential_energy() == pytest.approx(wanted["energy"][0], abs=1e-8)
            np.testing.assert_allclose(atoms.get_forces(), wanted["forces"], rtol=0, atol=1e-8)
            if periodic:
                np.testing.assert_allclose(atoms.get_stress(), wanted["stress"][0], rtol=0, atol=1e-10)
    assert running.end().error is None


@needs_shared
def test_coordinates_a_hundred_cells_away(peer):
    """i-PI does not wrap: no atom is lost, and forces come in the order of the atoms (public report, i-pi 421)."""
    frame = xyz.read(file(75, "unwrapped-water-like.extxyz")).structures.view(0)
    with serving(f"toy={TOY_NACL}") as server:
        running = Running(peer.address, server.url, frame.numbers)
        peer.accept()
        peer.init()
        peer.positions(frame.positions, frame.cell)
        peer.send("GETFORCE")
        energy, forces, virial = peer.forces(8)
        peer.send("EXIT")
        running.end()
    assert energy == pytest.approx(-3.17670974, abs=8e-6)
    # The values that the report's expected.md states.
    np.testing.assert_allclose(forces[0], [-0.02300030, 0.06333438, 0.05433250], atol=1e-6)
    np.testing.assert_allclose(forces[7], [0.10190885, 0.01238412, -0.06947651], atol=1e-6)
    np.testing.assert_allclose(
        virial[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]],
        [-1.9630565, -1.9102609, -1.9698587, 0.0257842, -0.0056930, 0.0464866],
        atol=8e-6,
    )


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_fifty_clients_that_come_before_their_host(tmp_path, kind):
    """They wait, say so once, and all get in although the host's queue is short (public report, psiflow 74)."""
    port = free_port()
    text = f"unix:{tmp_path / 'late'}" if kind == "unix" else f"127.0.0.1:{port}"
    said: list[str] = []
    found: list[int] = []

    def come() -> None:
        line = bridge._Line(bridge.parse_address(text), 60, threading.Event())
        line.connect(said.append)
        found.append(line.serve(None, 1))

    threads = [threading.Thread(target=come, daemon=True) for _ in range(50)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    listener = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(str(tmp_path / "late") if kind == "unix" else ("127.0.0.1", port))
    listener.listen(4)
    listener.settimeout(60)
    taken = []
    for _ in range(50):
        one, _ = listener.accept()
        one.sendall(b"STATUS".ljust(12) + b"EXIT".ljust(12))
        taken.append(one)
    for thread in threads:
        thread.join(60)
    assert found == [0] * 50
    assert len(said) == 50
    assert all("up to 60 s" in line for line in said)
    for one in [*taken, listener]:
        one.close()


class Slow:
    """An evaluator that takes its time."""

    def many(self, positions, _):
        time.sleep(3.0)
        return [Forces(0.0, np.zeros_like(one), np.zeros((3, 3))) for one in positions]

    def close(self):
        pass


@needs_ipi
@pytest.mark.parametrize("unix", [True, False], ids=["unix", "tcp"])
def test_sixty_four_slow_clients_are_all_served(server, tmp_path, monkeypatch, unix):
    """They come within a second to a host whose queue holds four (public report, i-pi 273)."""
    monkeypatch.setattr(bridge, "evaluator", lambda *_, **__: Slow())
    said: list[str] = []
    structure = crystal(1)
    with hosting(tmp_path, structure, unix=unix, beads=64, steps=2) as host:
        steps = bridge.run(host.address, server.url, structure.numbers, connections=64, report=said.append)
        kept = host.result()
    assert len(kept["q"]) == 3
    # Forces of all beads before the first step and in both of them.
    assert steps == 3 * 64
    assert len(said) <= 2


def test_a_host_that_never_comes_is_an_error_that_says_how_long_was_waited(tmp_path):
    address = bridge.parse_address(f"unix:{tmp_path / 'never'}")
    with pytest.raises(bridge.NoServerError, match=r"within 0\.3 s.*Is it running"):
        bridge.connect(address, 0.3)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("localhost:31415", bridge.Address(None, "localhost", 31415)),
        ("[::1]:80", bridge.Address(None, "::1", 80)),
        ("unix:water", bridge.Address("/tmp/ipi_water")),
        ("unix:/run/x", bridge.Address("/run/x")),
        ("unix:///run/x", bridge.Address("/run/x")),
    ],
)
def test_addresses(text, wanted):
    assert bridge.parse_address(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":80", "host:0", "host:70000", "host:ten", "unix:", "unix:" + "x" * 200]
)
def test_addresses_that_are_none(text):
    with pytest.raises(ValueError, match=r"unix|host"):
        bridge.parse_address(text)


def test_an_element_that_the_model_lacks_is_told_before_anything_starts(server, tmp_path):
    with pytest.raises(ValueError, match=r"has no C; it has Si, Ge"):
        bridge.run(f"unix:{tmp_path / 'x'}", server.url, [14, 6])


def test_a_server_that_is_not_there_is_told_before_anything_starts(tmp_path):
    with pytest.raises((NepserveError, ConnectionFailed), match="not ready within"):
        bridge.run(f"unix:{tmp_path / 'x'}", f"http://127.0.0.1:{free_port()}", [14], wait_seconds=0.5)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--address", "nowhere"], 2, "not an address of i-PI"),
        (["--structure", "missing.xyz"], 2, "missing.xyz"),
        (["--wait", "0.2"], 1, "within 0.2 s"),
    ],
    ids=["address", "structure", "nobody there"],
)
def test_what_the_command_says_of_mistakes(server, tmp_path, words, code, said):
    path = write_structure(tmp_path / "s.xyz", crystal(1))
    given = {"--address": f"unix:{tmp_path / 'no'}", "--url": server.url, "--structure": str(path)}
    given |= dict([words])
    found, output = finish(command("ipi", *[word for pair in given.items() for word in pair], cwd=tmp_path))
    assert (found, said in output) == (code, True), output
    assert "Traceback" not in output
