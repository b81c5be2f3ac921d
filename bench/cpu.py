"""Energy and forces on a CPU, beside the C++ code of calorine (CPUNEP) and TorchNEP.

    pip install -r bench/requirements.txt
    python bench/cpu.py [--threads 1 2] [--seconds 4] [--compile]

Seven systems, neighbour search inside the timing: every call sees positions that moved a little, as a molecular
dynamics step does. The programs take turns within each system, so that whatever else the machine does meets all of
them. A turn is some calls one after the other, and the first does not count where it is short: it finds in the caches
what another program left there, and whoever follows the greediest one would be judged by that. Printed are atoms per
second of the best and of the median call, and the ratio of the medians to calorine's.

Then 1024 structures of 32 to 64 atoms in one call of the library, and 1024 of 64 silicon atoms in one call of the
library and in one request to a server on this machine (MessagePack, float32 answers; pip install nepserve[server]).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its http.py would hide the library's

import argparse
import os
import subprocess
import time
import warnings
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from bench import systems

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[np.ndarray], np.ndarray]

SYSTEMS = [("si5", 64), ("si5", 1000), ("si5", 8000), ("unep", 108), ("unep", 2048), ("pbte", 250), ("pbte", 4096)]
TURN = 0.02
"""Seconds that a program computes before it is the next one's turn."""
TOLERANCE = {"float64": 1e-6, "float32": 2e-3}
"""Largest difference of a force component from calorine's, eV/Å, before a figure counts for nothing."""


def ours(model: Path, dtype: str, backend: str, species: list[str], cell: np.ndarray) -> Step:
    import nepcore
    from nepcore import Structure, Structures

    calculator = nepcore.load(model, device="cpu", dtype=dtype, backend=backend)
    numbers = Structure.make(species, np.zeros((len(species), 3))).numbers

    def step(positions: np.ndarray) -> np.ndarray:
        block = Structures.from_arrays([len(numbers)], numbers, positions, cell[None], np.ones((1, 3), bool))
        return calculator.evaluate(block, ("energy", "forces"))["forces"]

    return step


def calorine(model: Path, species: list[str], cell: np.ndarray) -> Step:
    from ase import Atoms
    from calorine.calculators import CPUNEP

    atoms = Atoms(species, np.zeros((len(species), 3)), cell=cell, pbc=True)
    atoms.calc = CPUNEP(str(model))

    def step(positions: np.ndarray) -> np.ndarray:
        atoms.positions[:] = positions
        return atoms.get_forces()

    return step


def torchnep(model: Path, species: list[str], cell: np.ndarray, *, compiled: bool) -> Step:
    import torch
    from torchnep.nep import NEPCalculator

    calculator = NEPCalculator(str(model), dtype=torch.float32)

    def step(positions: np.ndarray) -> np.ndarray:
        if compiled:
            return calculator.compute_tiled(species, positions, cell, compile=True)["forces"].numpy()
        return calculator.compute(species, positions, cell)["forces"].numpy()

    return step


def measure(steps: dict[str, Step], positions: np.ndarray, seconds: float) -> dict[str, list[float]]:
    """Seconds of each call, the programs taking turns of at least ``TURN`` seconds."""
    rng = np.random.default_rng(1)
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds * len(steps)
    rounds = 0
    while rounds < 3 or (time.perf_counter() < end and rounds < 200):
        for name, step in steps.items():
            turn: list[float] = []
            while sum(turn) < TURN:
                moved = positions + rng.normal(0, 1e-3, positions.shape)
                begin = time.perf_counter()
                step(moved)
                turn.append(time.perf_counter() - begin)
            times[name] += turn[1:] or turn
        rounds += 1
    return times


def worker(threads: int, seconds: float, *, compiled: bool) -> None:
    """All systems with one number of threads, in a process of its own."""
    import torch

    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    print(f"threads {threads}: system, atoms, program, atoms/s best, atoms/s median, median / calorine, largest ΔF")
    for name, atoms in SYSTEMS:
        species, positions, cell = systems.pbte250() if atoms == 250 else systems.raw(name, systems.SIZES[name, atoms])
        model = systems.MODELS[name]
        steps = {
            "calorine CPUNEP float64": calorine(model, species, cell),
            "TorchNEP eager float32": torchnep(model, species, cell, compiled=False),
            "nepserve fused-cpu float32": ours(model, "float32", "fused-cpu", species, cell),
            "nepserve fused-cpu float64": ours(model, "float64", "fused-cpu", species, cell),
            "nepserve torch float32": ours(model, "float32", "rule", species, cell),
        }
        if compiled and atoms >= 1000:
            steps["TorchNEP compiled float32"] = torchnep(model, species, cell, compiled=True)
        wanted = steps["calorine CPUNEP float64"](positions)
        off = {program: float(np.abs(step(positions) - wanted).max()) for program, step in steps.items()}
        times = measure(steps, positions, seconds)
        base = median(times["calorine CPUNEP float64"])
        for program, seen in times.items():
            bad = off[program] > TOLERANCE["float64" if "float64" in program else "float32"]
            row = (atoms / min(seen), atoms / median(seen), base / median(seen))
            print(
                f"{name:>5} {atoms:>5}  {program:<27} {row[0]:>9.0f} {row[1]:>9.0f} {row[2]:>6.2f}  {off[program]:.0e}",
                "WRONG" if bad else "", flush=True,
            )  # fmt: skip
    many(seconds)


def many(seconds: float) -> None:
    """1024 small structures in one call."""
    import nepcore

    for name in ("si5", "unep", "pbte"):
        block = systems.small(name, 1024)
        calculator = nepcore.load(systems.MODELS[name], device="cpu", backend="fused-cpu")
        calculator.evaluate(block)
        times = []
        end = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            begin = time.perf_counter()
            calculator.evaluate(block, ("energy", "forces"))
            times.append(time.perf_counter() - begin)
        print(f"{name:>5} 1024 structures, {block.n_atoms} atoms: {1024 / median(times):.0f} structures/s", flush=True)


def through_server(threads: int, seconds: float) -> None:
    """1024 structures of 64 silicon atoms in one call, of the library and of a server."""
    import nepcore
    from bench import http
    from nepcore import Structures
    from nepserve.wire import msgpack_format

    one = systems.crystal("si5", 64)
    rng = np.random.default_rng(1)
    positions = np.tile(one.positions, (1024, 1)) + rng.normal(0, 0.02, (1024 * 64, 3))
    block = Structures.from_arrays(
        [64] * 1024, np.tile(one.numbers, 1024), positions, np.tile(one.cells, (1024, 1, 1)), np.ones((1024, 3), bool)
    )
    body = msgpack_format.pack_request(block, http.PROPERTIES, None, "f4")
    calculator = nepcore.load(systems.MODELS["si5"], device="cpu", backend="fused-cpu")
    calls = max(5, int(seconds / 0.1))
    calculator.evaluate(block)
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        calculator.evaluate(block, http.PROPERTIES)
        times.append(time.perf_counter() - begin)
    del calculator
    process, port, _ = http.start_server(threads, "fused-cpu")
    try:
        seen, device = http.timed_calls(port, body, "application/msgpack", "", calls, 0.0)
    finally:
        process.terminate()
        process.wait(20)
    rates = [f"{1024 / median(t):.0f}" for t in (times, seen, device)]
    print(f"  si5 1024 × 64 atoms, structures/s: library {rates[0]}, server {rates[1]} (its engine alone {rates[2]})")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--seconds", type=float, default=4.0, help="time for each program on each system")
    arguments.add_argument("--compile", action="store_true", help="TorchNEP compiled, too (a minute for each system)")
    arguments.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.worker:
        worker(options.threads[0], options.seconds, compiled=options.compile)
        through_server(options.threads[0], options.seconds)
        return
    for threads in options.threads:
        command = [sys.executable, __file__, "--worker", "--threads", str(threads), "--seconds", str(options.seconds)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        subprocess.run(command + ["--compile"] * options.compile, env=environment, check=True)


if __name__ == "__main__":
    main()
