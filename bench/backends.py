"""Every way to evaluate a model, on one device, in one run.

    python bench/backends.py paths [--device cuda] [--systems si5 pbte unep] [--backends density mulsum+graphs ...]
    python bench/backends.py sweep [--device cuda] [--types 1 2 4 ...] [--compiled]
    python bench/backends.py peers [--device cuda] [--backends density+compiled]
    python bench/backends.py together [--device cuda] [--wait 150] [--commands "sweep --types 8 --forms bmm" peers ...]
    python bench/backends.py profile [--device cuda] [--systems si5] [--backends density] [--batch "64,000 atoms"]

``paths``: energies and forces of one structure of 32 to 64 atoms, of 1024 such structures, and of one crystal of
64,000 atoms, from host arrays to host arrays, neighbour search included. ``sweep``: the same model (8/4 Å, n_max 4,
basis 8, l_max 4) at several numbers of types, all of which occur: inference of a crystal of 16,000 atoms, and one
training step (parameter gradients of a loss of energies and pair forces) of a dense block of as many. ``peers``:
TorchNEP (PyPI: torchnep) beside ours. ``together``: each of the commands in a process of its own, which compile at
the same time and are timed one after the other; left out, the compiled part of the sweep and ``peers``. ``profile``:
kernels by their time. Each figure is the median of repeats after a warm-up, synchronised; peak memory is that of
torch's allocator. One JSON line a figure on standard output, words on standard error.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import fcntl
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import nepcore
from bench import systems
from nepcore import Structure, Structures, synthetic
from nepcore.backends import candidates, forms
from nepcore.backends.rows import Rows, Shape, Tables, evaluate
from nepcore.calculator import Calculator
from nepcore.elements import SYMBOLS
from nepcore.potential import NEP

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE = {"si5": (20, 20, 20), "pbte": (20, 20, 20), "unep": (25, 25, 26)}
SWEEP = (1, 2, 4, 8, 16, 32, 64, 87)
SWEEP_COMPILED = (1, 8, 32, 87)
LOOP_COMPILED = 8


def once(call: Callable[[], object], device: str) -> float:
    """Seconds of one call, synchronised."""
    begun = time.perf_counter()
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def timed(call: Callable[[], object], device: str, budget: float, repeats: int = 9) -> dict[str, float]:
    """Median milliseconds, and peak memory, GiB; the call was run before."""
    gpu = device.startswith("cuda")
    for _ in range(2):
        once(call, device)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    while len(times) < 3 or (len(times) < repeats and sum(times) < budget):
        times.append(once(call, device))
    out = {"ms": 1e3 * median(times)}
    if gpu:
        out["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return out


def say(**figures: Any) -> None:
    for name, value in figures.items():
        if isinstance(value, float):
            figures[name] = float(f"{value:.4g}")
    print(json.dumps(figures), flush=True)


class Figures:
    """Figures of one process: said as they come, or, where processes take turns, when all of them are prepared."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = options.device
        self.budget = options.budget
        self.turns: Path | None = options.turns
        self._prepared: list[tuple[Callable[[], object], int, dict[str, Any]]] = []

    def of(self, prepare: Callable[[], Callable[[], object]], atoms: int, **what: Any) -> None:
        """Time a call, which ``prepare`` makes; its first run may compile something."""
        try:
            begun = time.perf_counter()
            call = prepare()
            once(call, self.device)
            what["first_s"] = time.perf_counter() - begun
        except Exception as error:  # the other figures are wanted all the same
            say(**what, failed=f"{type(error).__name__}: {str(error).splitlines()[:1]}")
            return
        self._prepared.append((call, atoms, what))
        if self.turns is None:
            self._say()
        elif self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _say(self) -> None:
        for call, atoms, what in self._prepared:
            self._say_one(call, atoms, what)
        self._prepared.clear()

    def _say_one(self, call: Callable[[], object], atoms: int, what: dict[str, Any]) -> None:
        try:
            figures = timed(call, self.device, self.budget)
        except Exception as error:  # as above
            say(**what, failed=f"{type(error).__name__}: {str(error).splitlines()[:1]}")
            return
        if faults := getattr(call, "faults", dict)():
            what["faults"] = faults
        say(**what, **figures, ns_per_atom=1e6 * figures["ms"] / atoms)

    def finish(self) -> None:
        """Wait for one's turn and say what was only prepared so far."""
        if self.turns is None:
            return
        (self.turns / f"ready-{os.getpid()}").touch()
        while not (self.turns / "go").exists():
            time.sleep(0.05)
        with (self.turns / "turn").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            self._say()


class Evaluation:
    """Energies and forces of a block."""

    def __init__(self, calculator: Calculator, block: Structures) -> None:
        self.calculator, self.block = calculator, block

    def __call__(self) -> object:
        return self.calculator.evaluate(self.block, ["energy", "forces"])

    def faults(self) -> dict[str, str]:
        """Why it does less than it should."""
        return self.calculator.faults


def blocks(name: str, quick: bool) -> dict[str, Structures]:
    many = systems.small(name, 8 if quick else 1024)
    repeat = (3, 3, 3) if quick else LARGE[name]
    return {
        "one small": many.slice(0, 1),
        "1024 small": many,
        "64,000 atoms": Structures.pack([Structure.make(*systems.raw(name, repeat))]),
    }


def paths(options: argparse.Namespace, figures: Figures) -> None:
    for system in options.systems:
        batches = blocks(system, options.quick)
        for backend in options.backends or candidates.names():
            try:
                calculator = nepcore.load(systems.MODELS[system], device=options.device, backend=backend)
            except nepcore.ModelError as error:
                print(error, file=sys.stderr)
                continue
            for name, block in batches.items():
                figures.of(
                    partial(Evaluation, calculator, block), block.n_atoms, system=system, backend=backend, batch=name
                )
            if calculator.faults or calculator.graphs:
                say(system=system, backend=backend, faults=calculator.faults, graphs=calculator.graphs)


def alloy(n_types: int, repeat: int) -> Structures:
    """A face-centred crystal in which every one of the elements occurs."""
    rng = np.random.default_rng(0)
    cells = np.stack(np.meshgrid(*[np.arange(repeat)] * 3, indexing="ij"), axis=-1).reshape(-1, 1, 3)
    sites = (cells + np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])).reshape(-1, 3) * 4.1
    species = [SYMBOLS[1 + t] for t in rng.permutation(np.arange(len(sites)) % n_types)]
    return Structures.pack(
        [Structure.make(species, sites + rng.normal(0, 0.05, sites.shape), np.eye(3) * 4.1 * repeat)]
    )


def training_step(nep: NEP, form: str, n_types: int, device: str, compiled: bool) -> Callable[[], object]:
    """Gradients by all parameters of a loss of energies and pair forces, of 16,384 atoms with 54 and 18 neighbours."""
    A, w, v = 16384, 64, 32
    generator = torch.Generator(device=device).manual_seed(0)

    def some(width: int, neighbors: int, reach: float) -> torch.Tensor:
        r = 2.5 + (reach - 2.5) * torch.rand((A, width), generator=generator, device=device)
        r[:, neighbors:] = 2.0 * nep.max_cutoff
        return r

    def kinds(*shape: int) -> torch.Tensor:
        return torch.randint(n_types, shape, generator=generator, device=device)

    unit = torch.nn.functional.normalize(torch.randn((3, A, v), generator=generator, device=device), dim=0)
    rows = Rows(kinds(A), some(w, 54, 8.0), kinds(A, w), some(v, 18, 4.0), kinds(A, v), unit, unit.new_zeros(A))
    for parameter in nep.parameters():
        parameter.requires_grad_(True)
    present = torch.arange(n_types, device=device)

    def loss() -> torch.Tensor:
        out = evaluate(Shape.of(nep), forms.FORMS[form], Tables.of(nep, present), rows)
        return (out.energies**2).mean() + (out.along**2).mean() + (out.push**2).mean()

    run = torch.compile(loss) if compiled else loss

    def step() -> object:
        for parameter in nep.parameters():
            parameter.grad = None
        run().backward()
        return None

    return step


def sweep(options: argparse.Namespace, figures: Figures) -> None:
    for n_types in options.types or (SWEEP_COMPILED if options.compiled else SWEEP):
        model = synthetic.make_model(SYMBOLS[1 : n_types + 1], cutoff=(8.0, 4.0), seed=1)
        block = alloy(n_types, 16)
        for form in options.forms or forms.FORMS:
            if options.compiled and form == "loop" and n_types > LOOP_COMPILED:
                continue
            name = form + candidates.COMPILED if options.compiled else form
            what = {"types": n_types, "form": form, "compiled": options.compiled}

            def infer(name: str = name, model: Any = model, block: Structures = block) -> Evaluation:
                return Evaluation(Calculator.of(model, device=options.device, backend=name), block)

            def train(form: str = form, model: Any = model, n_types: int = n_types) -> Callable[[], object]:
                nep = NEP(model, torch.float32).to(options.device)
                return training_step(nep, form, n_types, options.device, options.compiled)

            if "inference" in options.steps:
                figures.of(infer, block.n_atoms, **what, step="inference")
            if "training" in options.steps:
                torch._dynamo.reset()  # noqa: SLF001 (its public name): one function in many forms is given up
                figures.of(train, 16384, **what, step="training")
            if options.device.startswith("cuda"):
                torch.cuda.empty_cache()


def peers(options: argparse.Namespace, figures: Figures) -> None:
    from torchnep.data import read_xyz
    from torchnep.nep import NEPCalculator
    from torchnep.predict import _chunk_arrays, _predict_chunk
    from torchnep.train import make_preproc_pool, preprocess_structures

    for system in options.systems:
        batches = blocks(system, options.quick)
        many, large = batches["1024 small"], batches["64,000 atoms"]
        ours = {
            name: nepcore.load(systems.MODELS[system], device=options.device, backend=name) for name in options.backends
        }
        for name, calculator in ours.items():
            for batch in ("1024 small", "64,000 atoms"):
                figures.of(
                    partial(Evaluation, calculator, batches[batch]), batches[batch].n_atoms,
                    system=system, program=f"nepserve {name}", batch=batch,
                )  # fmt: skip
        core = NEPCalculator(str(systems.MODELS[system]), dtype=torch.float32, device=options.device)
        frames = _frames(many, read_xyz)
        config = {
            "cutoff_radial": core.rc_radial, "cutoff_angular": core.rc_angular, "type_names": core.type_names,
            "cutoff_radial_per_type": core.rc_radial_per_type, "cutoff_angular_per_type": core.rc_angular_per_type,
        }  # fmt: skip
        pool = make_preproc_pool()

        def prepare(frames: Any = frames, config: Any = config, pool: Any = pool) -> Any:
            return _chunk_arrays(preprocess_structures(frames, config, np.float32, pool=pool), np.float32)

        chunk = prepare()
        for backend in ("loop", "bmm"):

            def compute(chunk: Any = chunk, core: Any = core, backend: str = backend) -> object:
                return _predict_chunk(core, chunk, 1024, options.device, torch.float32, backend, 0, print)

            def whole(prepare: Any = prepare, core: Any = core, backend: str = backend) -> object:
                return _predict_chunk(core, prepare(), 1024, options.device, torch.float32, backend, 0, print)

            for label, call in (("lists ready", compute), ("from structures", whole)):
                figures.of(
                    lambda call=call: call, many.n_atoms,
                    system=system, program=f"torchnep predict {backend}, {label}", batch="1024 small",
                )  # fmt: skip
        one = large.view(0)
        arguments = (one.symbols, one.positions, one.cell)
        for label, call in {
            "ASE's path": partial(core.compute, *arguments),
            "tiled": partial(core.compute_tiled, *arguments),
            "tiled, compiled": partial(core.compute_tiled, *arguments, compile=True),
        }.items():
            figures.of(
                lambda call=call: call, large.n_atoms,
                system=system, program=f"torchnep {label}", batch="64,000 atoms",
            )  # fmt: skip


def _frames(block: Structures, read: Callable[[str], Any]) -> Any:
    """The structures as TorchNEP reads them, its checks for a missing energy included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "many.xyz"
        for i in range(len(block)):
            s = block.view(i)
            systems.cells.write_xyz(
                path, s.symbols, s.positions, s.cell, energy=0.0, forces=np.zeros((len(s), 3)), mode="a"
            )
        return read(str(path))


def together(options: argparse.Namespace) -> None:
    """Commands that compile at the same time, and are timed one after the other."""
    waiting = list(options.commands or _compiled_and_peers())
    shared = ["--device", options.device, "--budget", str(options.budget), *(["--quick"] if options.quick else [])]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    children: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory() as folder:
        turns = Path(folder)
        begun = time.monotonic()

        def busy() -> list[str]:
            return [
                command
                for command, child in children.items()
                if child.poll() is None and not (turns / f"ready-{child.pid}").exists()
            ]

        try:
            while (waiting or busy()) and time.monotonic() - begun < options.wait:
                while waiting and len(busy()) < (os.cpu_count() or 1):
                    command = waiting.pop(0)
                    words = [sys.executable, __file__, *shlex.split(command), *shared, "--turns", folder]
                    children[command] = subprocess.Popen(words, env=environment, start_new_session=True)
                time.sleep(0.2)
            for command in busy():
                os.killpg(children[command].pid, signal.SIGKILL)  # and the processes that it started
                say(command=command, failed=f"not prepared within {time.monotonic() - begun:.0f} s")
            for command in waiting:
                say(command=command, failed="not begun for lack of time")
            print(f"prepared after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
            (turns / "go").touch()
            for child in children.values():
                child.wait()
        finally:
            for child in children.values():
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)


def _compiled_and_peers() -> list[str]:
    """What compiles longest comes first."""
    return [
        *(
            f"sweep --compiled --types {LOOP_COMPILED} --forms loop --steps {step}"
            for step in ("inference", "training")
        ),
        *(f"peers --systems {system} --backends density density+compiled" for system in LARGE),
        *(
            f"sweep --compiled --types {n} --forms {form} --steps {step}"
            for step in ("inference", "training")
            for n in SWEEP_COMPILED
            for form in forms.FORMS
            if form != "loop" or n < LOOP_COMPILED
        ),
    ]


def profile(options: argparse.Namespace) -> None:
    """Kernels by their time, and how long the processor was busy launching them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if options.device.startswith("cuda"):
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    order = "self_cuda_time_total" if options.device.startswith("cuda") else "self_cpu_time_total"
    for system in options.systems:
        block = blocks(system, options.quick)[options.batch]
        for backend in options.backends:
            call = Evaluation(nepcore.load(systems.MODELS[system], device=options.device, backend=backend), block)
            for _ in range(3):
                call()
            with torch.profiler.profile(activities=activities) as record:
                call()
            say(profile=system, backend=backend, batch=options.batch, **timed(call, options.device, options.budget))
            print(record.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=70), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("paths", "sweep", "peers", "together", "profile"))
    parser.add_argument("--commands", nargs="+", help="of together")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--systems", nargs="+", default=["si5", "pbte", "unep"], choices=tuple(LARGE))
    parser.add_argument("--backends", nargs="+", default=None)
    parser.add_argument("--batch", default="1024 small", help="of profile")
    parser.add_argument("--types", nargs="+", type=int)
    parser.add_argument("--forms", nargs="+")
    parser.add_argument("--quick", action="store_true", help="8 and 1 small structures, to see that it runs")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--steps", nargs="+", default=["inference", "training"], choices=("inference", "training"))
    parser.add_argument("--budget", type=float, default=3.0, help="seconds of repeats of one figure")
    parser.add_argument("--wait", type=float, default=600.0, help="seconds that together waits for what is compiled")
    parser.add_argument("--turns", type=Path, help="folder in which processes take turns; used by together")
    options = parser.parse_args()
    if options.what in {"peers", "profile"} and options.backends is None:
        options.backends = ["density"]
    if options.what in {"together", "profile"}:
        (together if options.what == "together" else profile)(options)
        return
    figures = Figures(options)
    {"paths": paths, "sweep": sweep, "peers": peers}[options.what](options, figures)
    figures.finish()


if __name__ == "__main__":
    main()
