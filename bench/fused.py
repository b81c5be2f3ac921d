"""The fused backend: large systems along a trajectory, small batches, single structures, kernel by kernel.

    python bench/fused.py figures [--systems si5 pbte unep c24] [--steps 200]
    python bench/fused.py kernels [--systems ...]
    python bench/fused.py peers [--systems ...]
    python bench/fused.py drift [--systems ...] [--picoseconds 100] [--side density]
    python bench/fused.py warm [--systems ...] [--share 0/4]
    python bench/fused.py tiles [--systems ...] [--share 0/4]

``figures``: for each system, ns an atom and step of the largest crystal (velocity Verlet on the device at 300 K, 1 fs,
the list with its skin made anew whenever an atom moved half of it, all counted), the same from host arrays to host
arrays, one step of 1,000 atoms and of 64 from host to host, and structures a second of 1,024 structures of 32 to 64
atoms, neighbour search included; beside them the device's time, one replay after the other, and Python's.
``kernels``: time of each kernel, by batch. ``tiles``: the device's time with other shapes of programs.
``peers``: TorchNEP and nep-adapters (PyPI) on the same atoms; the latter's kernels have to be compiled by the driver at
first use on a GPU that it was not built for, which takes minutes once (its cache keeps them).
``drift``: of the energy of NVE runs, here in float32 and, with ``--side density``, along a torch backend in float64.
``warm``: compiles the kernels, so that several processes can do so at a time before the others run.
Medians; one JSON line a figure.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import contextlib
import json
import time
import zlib
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime.jit import JITFunction

import nepcore
from bench import systems
from nepcore import Structure, Structures
from nepcore.backends.fused import forward, large, small
from nepcore.backends.fused.branches import Branches
from nepcore.backends.fused.model import Shape
from nepcore.elements import NUMBERS
from nepcore.files import nep_txt
from nepcore.structures import DEFAULT_PROPERTIES, PROPERTIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nepcore.backends.fused.backend import Fused
    from nepcore.backends.fused.forward import Tiles
    from nepcore.calculator import Calculator

LARGE = {"si5": (40, 40, 40), "pbte": (40, 40, 40), "unep": (50, 50, 52), "c24": (32, 32, 32)}
"""Repeats of the unit cell: 512,000, 512,000, 520,000 and 262,144 atoms."""

THOUSAND = {"si5": (5, 5, 5), "pbte": (5, 5, 5), "unep": (6, 6, 7), "c24": (5, 5, 5)}

MASS = {
    6: 12.011, 12: 24.305, 13: 26.982, 14: 28.085, 22: 47.867, 23: 50.942, 24: 51.996, 28: 58.693, 29: 63.546,
    40: 91.224, 42: 95.95, 46: 106.42, 47: 107.868, 52: 127.6, 73: 180.948, 74: 183.84, 78: 195.084, 79: 196.967,
    82: 207.2,
}  # fmt: skip
"""Atomic masses, u."""

FORCE_UNIT = 9.648533e-3
"""Å/fs² that a force of 1 eV/Å gives a mass of 1 u."""

BOLTZMANN = 8.617333e-5

GPUMD = {
    "si5": {"large": 44.2, "1,000": 1.20}, "pbte": {"large": 15.4, "1,000": 0.68},
    "unep": {"large": 43.5, "1,000": 1.21}, "c24": {"large": 130.0},
}  # fmt: skip
"""GPUMD (main of August 2026) on an H200, NVE, integrator included, measured for this project in November 2026 with
the same models and crystals: ns an atom and step at its largest size (0.25 to 2 million atoms), ms a step of 1,000."""


def say(**figures: Any) -> None:
    for name, value in figures.items():
        if isinstance(value, float):
            figures[name] = float(f"{value:.4g}")
    print(json.dumps(figures), flush=True)


def timed(call: Callable[[], object], budget: float = 2.0, repeats: int = 200) -> float:
    """Median seconds, the device synchronised, after a warm-up."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 5 or (len(times) < repeats and sum(times) < budget):
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return median(times)


class Dynamics:
    """Velocity Verlet on the device around one large structure."""

    def __init__(self, fused: Fused, structures: Structures, kelvin: float, femtoseconds: float) -> None:
        state = fused.follow(structures)
        box = large.box_of(structures, fused.reach)
        assert state is not None
        assert box is not None
        self.state, self.box, self.dt = state, box, femtoseconds
        masses = torch.tensor([MASS[int(z)] for z in structures.numbers], dtype=torch.float64, device="cuda")[:, None]
        self.per_mass = FORCE_UNIT / masses
        rng = torch.Generator(device="cuda").manual_seed(0)
        v = torch.randn((structures.n_atoms, 3), generator=rng, dtype=torch.float64, device="cuda")
        v *= (BOLTZMANN * kelvin * self.per_mass).sqrt()
        self.v = v - (v * masses).sum(0) / masses.sum()
        self.wanted = large.Wanted(virials=False, descriptors=False)
        state.put(structures.positions)
        state.update(box)
        state.compute(self.wanted)

    def step(self) -> None:
        state = self.state
        kick = (0.5 * self.dt) * self.per_mass
        self.v.addcmul_(state.forces, kick)
        state.positions.add_(self.v, alpha=self.dt)
        if not state.update():
            state.update(self.box)
        state.compute(self.wanted)
        self.v.addcmul_(state.forces, kick)

    def energy(self) -> float:
        """Kinetic and potential energy, eV."""
        kinetic = 0.5 * (self.v**2 / self.per_mass).sum()
        return float(kinetic + self.state.total[9])


def crystal(name: str, repeat: tuple[int, int, int]) -> Structures:
    return Structures.pack([Structure.make(*systems.raw(name, repeat))])


def load(name: str) -> tuple[Calculator, Fused]:
    begun = time.perf_counter()
    calculator = nepcore.load(systems.MODELS[name], device="cuda", backend="fused")
    calculator.evaluate(systems.small(name, 2), ["energy", "forces"])
    say(system=name, first_answer_s=time.perf_counter() - begun, faults=calculator.faults)
    return calculator, calculator._resolved.backend  # type: ignore[return-value]  # noqa: SLF001


def figures(options: argparse.Namespace) -> None:
    for name in options.systems:
        calculator, fused = load(name)
        wanted = ["energy", "forces"]
        one, thousand = systems.small(name, 2).slice(1, 2), crystal(name, THOUSAND[name])
        many = systems.small(name, 1024)
        for label, block in (("one", one), ("1,000", thousand), ("1024 small", many)):
            call = partial(calculator.evaluate, block, wanted)
            seconds, device = timed(call), _replay(calculator, fused, block)
            with patch.multiple(small.Slot, launch=lambda _: None, wait=lambda _: None):
                host = timed(call)
            say(system=name, batch=label, atoms=block.n_atoms, us=1e6 * seconds,
                structures_per_s=len(block) / seconds, ns_per_atom=1e9 * seconds / block.n_atoms,
                device_us_a_piece=device, python_us=1e6 * host)  # fmt: skip
        big = crystal(name, options.repeat or LARGE[name])
        n = big.n_atoms
        before = torch.cuda.memory_allocated()
        dynamics = Dynamics(fused, big, 300.0, 1.0)
        for _ in range(10):
            dynamics.step()
        torch.cuda.synchronize()
        bytes_per_atom = (torch.cuda.memory_allocated() - before) / n
        rebuilds, begun, energy = dynamics.state.rebuilds, time.perf_counter(), dynamics.energy()
        for _ in range(options.steps):
            dynamics.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        free = torch.cuda.get_device_properties(0).total_memory
        say(system=name, batch="large", atoms=n, ns_per_atom=1e9 * seconds / options.steps / n, skin=large.SKIN,
            rebuilds=dynamics.state.rebuilds - rebuilds, steps=options.steps, bytes_per_atom=bytes_per_atom,
            atoms_that_fit=free / bytes_per_atom, drift_mev=1e3 * (dynamics.energy() - energy) / n,
            gpumd=GPUMD[name])  # fmt: skip
        del dynamics
        seconds = timed(partial(calculator.evaluate, big, wanted), repeats=20)
        say(system=name, batch="large, host to host", atoms=n, ns_per_atom=1e9 * seconds / n)
        fused._large.clear()  # noqa: SLF001
        torch.cuda.empty_cache()


def kernels(options: argparse.Namespace) -> None:
    """Time of each kernel of the device, of a step of the large crystal and of a batch of small structures."""
    for name in options.systems:
        calculator, fused = load(name)
        many = systems.small(name, 1024)
        dynamics = Dynamics(fused, crystal(name, options.repeat or LARGE[name]), 300.0, 1.0)
        for _ in range(5):
            dynamics.step()
            calculator.evaluate(many, ["energy", "forces"])

        def small(calculator: Calculator = calculator, many: Structures = many) -> None:
            calculator.evaluate(many, ["energy", "forces"])

        def rebuild(dynamics: Dynamics = dynamics) -> None:
            dynamics.state.update(dynamics.box)

        one, thousand = many.slice(1, 2), crystal(name, THOUSAND[name])
        for label, atoms, call in (
            ("large", dynamics.state.n, dynamics.step),
            ("rebuild", dynamics.state.n, rebuild),
            ("1024 small", many.n_atoms, small),
            ("1,000", thousand.n_atoms, partial(calculator.evaluate, thousand, ["energy", "forces"])),
            ("one", one.n_atoms, partial(calculator.evaluate, one, ["energy", "forces"])),
        ):
            for _ in range(3):
                call()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
                for _ in range(3):
                    call()
                torch.cuda.synchronize()
            rows = [(e.key, e.self_device_time_total / 3, e.count / 3) for e in record.key_averages()]
            say(system=name, batch=label, atoms=atoms, us={
                key.removeprefix("void at::native::")[:40]: round(us, 1)
                for key, us, _ in sorted(rows, key=lambda row: -row[1])[:20] if us > 0.5
            }, sum_us=sum(us for _, us, _ in rows))  # fmt: skip
        fused._large.clear()  # noqa: SLF001
        torch.cuda.empty_cache()


SHAPES: dict[str, list[Any]] = {
    "radial_sums": [(8, 16, 4), (4, 16, 2), (2, 16, 1), (32, 4, 4)],
    "radial_forces": [(4, 8, 1), (2, 16, 1)],
    "angular_sums": [(8, 4, 1), (1, 32, 1), (16, 2, 1)],
    "angular_forces": [(2, 16, 1)],
    "network": [(1, 4, 8, 1), (2, 4, 8, 1)],
    "gather": [(16, 8, 4)],
    "slopes": [(128, 4)],
}
"""Other shapes of programs than the usual ones, see :class:`nepcore.backends.fused.forward.Tiles`."""

BLOCKS: dict[str, list[dict[str, int]]] = {
    "search": [{"centres": 2}, {"centres": 4, "warps": 4}],
    "place": [{"atoms": 32, "mates": 128}],
}


def tiles(options: argparse.Namespace) -> None:
    """Device time of the whole chain, copies included, with other shapes of programs of one kernel after the other."""
    for name in options.systems:
        many = systems.small(name, 1024)
        batches = {"one": many.slice(1, 2), "1,000": crystal(name, THOUSAND[name]), "1024 small": many}
        usual = forward.hasty(Shape.of(nep_txt.read(systems.MODELS[name])))
        cases: list[tuple[str, Any, Tiles, small.Blocks]] = [("usual", "", usual, small.Blocks())]
        cases += [(what, "", usual, small.Blocks()) for what in ("without branches", "with copies")]
        cases += [(k, v, replace(usual, **{k: v}), small.Blocks()) for k, values in SHAPES.items() for v in values]
        cases += [(k, v, usual, small.Blocks()._replace(**v)) for k, values in BLOCKS.items() for v in values]
        for kernel, value, shape, blocks in cases:
            times = {}
            with (
                patch.object(small, "hasty", lambda _, shape=shape: shape),
                patch.object(small, "REACHED", 0 if kernel == "with copies" else small.REACHED),
            ):
                calculator = nepcore.load(systems.MODELS[name], device="cuda", backend="fused")
                fused: Any = calculator._resolved.backend  # noqa: SLF001
                fused.small_blocks = blocks
                if kernel == "without branches":
                    fused.branches = Branches(torch.device("cpu"))
                with compiling(options.share) as alone:
                    for label, block in batches.items():
                        if alone:
                            calculator.evaluate(block, ["energy", "forces"])
                        else:
                            times[label] = _replay(calculator, fused, block)
            say(system=name, kernel=kernel, shape=str(value), us=times, fault=fused.fault)
            del calculator, fused
            torch.cuda.empty_cache()


def _replay(calculator: Calculator, fused: Any, block: Structures) -> float:
    """µs of a replay of the graph that a block, or a piece of it, is evaluated by."""
    for _ in range(4):
        calculator.evaluate(block, ["energy", "forces"])
    graphs = [slot.graph for slots in fused._slots.values() for slot in slots if slot.graph]  # noqa: SLF001
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(20):
            graphs[-1].replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 20)
    return round(median(times), 1)


def peers(options: argparse.Namespace) -> None:
    """Other programs on the same atoms, from host arrays to host arrays."""
    for name in options.systems:
        many, big = systems.small(name, 1024), crystal(name, options.repeat or LARGE[name])
        batches = {
            "one": many.slice(1, 2), "1,000": crystal(name, THOUSAND[name]), "1024 small": many, "large": big,
        }  # fmt: skip
        for program in options.programs:
            for label, block in batches.items():
                if label not in options.batches or (program == "torchnep" and label == "1024 small"):
                    continue  # bench/backends.py has the latter
                try:
                    begun = time.perf_counter()
                    call = {"nep-adapters": _nep_adapters, "torchnep": _torchnep}[program](name, block)
                    call()
                    first = time.perf_counter() - begun
                    seconds = timed(call, budget=1.0, repeats=20)
                except Exception as error:  # the other figures are wanted all the same
                    say(system=name, program=program, batch=label, failed=f"{type(error).__name__}: {error}"[:200])
                    continue
                say(system=name, program=program, batch=label, us=1e6 * seconds, structures_per_s=len(block) / seconds,
                    ns_per_atom=1e9 * seconds / block.n_atoms, first_call_s=first)  # fmt: skip
                del call
                torch.cuda.empty_cache()


def _nep_adapters(name: str, block: Structures) -> Callable[[], object]:
    from nep_adapters import NEPCalculator

    calculator = NEPCalculator(systems.MODELS[name], "cuda")
    place = np.zeros(256, np.int32)
    for symbol, t in calculator.type_dict.items():
        place[NUMBERS[symbol]] = t
    boxes = block.cells.transpose(0, 2, 1).reshape(-1, 9)
    pbc = block.pbc.astype(np.int32)
    return partial(
        calculator.predict_arrays, place[block.numbers], block.positions, boxes, block.counts.astype(np.int32), pbc
    )


def _torchnep(name: str, block: Structures) -> Callable[[], object]:
    from torchnep.nep import NEPCalculator

    calculator = NEPCalculator(str(systems.MODELS[name]), dtype=torch.float32, device="cuda")
    one = block.view(0)
    if len(one) > 100_000:
        return partial(calculator.compute_tiled, one.symbols, one.positions, one.cell)
    return partial(calculator.compute, one.symbols, one.positions, one.cell)


class OnHost:
    """Velocity Verlet on the host around a calculator: the torch path in double precision."""

    def __init__(self, calculator: Calculator, structures: Structures, kelvin: float, femtoseconds: float) -> None:
        self.calculator, self.structures, self.dt = calculator, structures, femtoseconds
        masses = np.array([MASS[int(z)] for z in structures.numbers])[:, None]
        self.per_mass = FORCE_UNIT / masses
        v = np.random.default_rng(0).normal(size=(structures.n_atoms, 3)) * np.sqrt(BOLTZMANN * kelvin * self.per_mass)
        self.v = v - (v * masses).sum(0) / masses.sum()
        self._evaluate()

    def _evaluate(self) -> None:
        found = self.calculator.evaluate(self.structures, ["energy", "forces"])
        self.forces, self.potential = np.asarray(found["forces"]), float(found["energy"][0])

    def step(self) -> None:
        kick = (0.5 * self.dt) * self.per_mass
        self.v += self.forces * kick
        self.structures = replace(self.structures, positions=self.structures.positions + self.dt * self.v)
        self._evaluate()
        self.v += self.forces * kick

    def energy(self) -> float:
        """Kinetic and potential energy, eV."""
        return float(0.5 * (self.v**2 / self.per_mass).sum()) + self.potential


def drift(options: argparse.Namespace) -> None:
    """Drift of the total energy, a linear fit, meV an atom and ps; 300 K, 1 fs.

    The first picosecond is left out. A line is printed again and again, so that a run that is cut short has said
    something.
    """
    for name, repeat in (("si5", (8, 8, 8)), ("pbte", (10, 10, 10))):
        if name not in options.systems:
            continue
        start = Structures.pack([Structure.make(*systems.cells.base(name, repeat, 0.0))])
        # Atoms of a perfect crystal share the energy of their motion with their places: twice the temperature.
        dynamics: Dynamics | OnHost
        if options.side == "fused":
            dynamics, backend, picoseconds = Dynamics(load(name)[1], start, 600.0, 1.0), "fused", options.picoseconds
        else:
            calculator = nepcore.load(systems.MODELS[name], device="cuda", dtype="float64", backend=options.side)
            dynamics, backend, picoseconds = OnHost(calculator, start, 600.0, 1.0), options.side, 5.0
        n, times, energies, kinetic = start.n_atoms, [], [], []
        steps, begun = int(1000 * picoseconds), time.perf_counter()
        for step in range(1, steps + 1):
            dynamics.step()
            if step >= 1000 and step % 20 == 0:
                times.append(1e-3 * step)
                energies.append(1e3 * dynamics.energy() / n)
                kinetic.append(float(0.5 * (dynamics.v**2 / dynamics.per_mass).sum()))
            if step in {1500, 2000, 3000, 4000, 5000} or (step >= 1000 and step % 10_000 == 0) or step == steps:
                fit, covariance = np.polyfit(times, energies, 1, cov="unscaled" if len(times) < 5 else True)
                say(system=name, atoms=n, backend=backend, dtype="float32" if backend == "fused" else "float64",
                    picoseconds=1e-3 * step, drift_mev_per_atom_ps=float(fit[0]), error=float(covariance[0, 0] ** 0.5),
                    spread_mev=float(np.std(energies)),
                    kelvin=float(np.mean(kinetic)) / (1.5 * n * BOLTZMANN),
                    us_a_step=1e6 * (time.perf_counter() - begun) / step)  # fmt: skip


@contextlib.contextmanager
def compiling(share: str) -> Iterator[bool]:
    """Compile instead of launching, of N kernels the K-th alone with a share K/N; yields whether that is so."""
    k, of = (int(word) for word in share.split("/"))
    if of == 1:
        yield False
        return
    run = JITFunction.run

    def compile_alone(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        constants = [v for parameter, v in zip(kernel.params, args, strict=False) if parameter.is_constexpr]
        if zlib.crc32(repr((kernel.__name__, constants)).encode()) % of == k:
            run(kernel, *args, grid=grid, warmup=True, **options)

    with patch.object(JITFunction, "run", compile_alone):
        yield True


def warm(options: argparse.Namespace) -> None:
    """Compile what the others use, so that several systems can do so at a time."""
    for name in options.systems:
        begun = time.perf_counter()
        calculator = nepcore.load(systems.MODELS[name], device="cuda", backend="fused")
        fused: Any = calculator._resolved.backend  # noqa: SLF001
        with compiling(options.share) as alone:
            calculator.evaluate(systems.small(name, 2), ["energy", "forces"])
            calculator.evaluate(crystal(name, THOUSAND[name]), ["energy", "forces"])
            for properties in (DEFAULT_PROPERTIES, PROPERTIES) if options.properties else ():
                calculator.evaluate(systems.small(name, 2), properties)
            if alone:
                block = crystal(name, (14, 14, 14))
                state: Any = fused.follow(block)
                state._make_room(64, 16)  # noqa: SLF001
                state.update(large.box_of(block, fused.reach))
                state.update()
                for virials in (False, True) if options.properties else (False,):
                    state.compute(large.Wanted(virials, descriptors=False))
            else:
                Dynamics(fused, crystal(name, (14, 14, 14)), 300.0, 1.0).step()
        torch.cuda.synchronize()
        say(system=name, share=options.share, seconds=time.perf_counter() - begun, fault=fused.fault)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("figures", "kernels", "peers", "drift", "warm", "tiles"))
    parser.add_argument("--systems", nargs="+", default=list(LARGE), choices=tuple(LARGE))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeat", nargs=3, type=int, help="unit cells of the large crystal")
    parser.add_argument("--picoseconds", type=float, default=100.0, help="of drift, of the fused side; the other has 5")
    parser.add_argument("--programs", nargs="+", default=["nep-adapters", "torchnep"], help="of peers")
    parser.add_argument("--side", default="fused", help="of drift: fused, or a torch backend, in float64 then")
    parser.add_argument("--properties", action="store_true", help="of warm: everything, not energy and forces alone")
    parser.add_argument("--batches", nargs="+", default=["one", "1,000", "1024 small", "large"], help="of peers")
    parser.add_argument("--share", default="0/1", help="of warm and tiles: K/N, compile one of N kernels, launch none")
    options = parser.parse_args()
    commands = {
        "figures": figures, "kernels": kernels, "peers": peers, "drift": drift, "warm": warm, "tiles": tiles,
    }  # fmt: skip
    commands[options.what](options)


if __name__ == "__main__":
    main()
