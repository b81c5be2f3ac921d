"""Each kernel of the fused backend by itself: time an atom, for several shapes of its programs.

    python -m bench.fused_kernels [--systems si5 pbte unep c24] [--kernels angular_sums ...] [--skin 0.5]

Several may run at a time, one a system: they compile together and measure one after the other.

Large rattled crystals (256 to 512 thousand atoms), lists ready, virials not wanted. A kernel is run with the arguments
that an evaluation gives it, and every shape is measured with device events, the median of several launches.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from bench import systems
from fused_lists import lists_of
from nepcore import Structure, Structures
from nepcore.backends.fused import forward as chain
from nepcore.backends.fused.lists import Lists, Outputs
from nepcore.backends.fused.model import Model, prepare
from nepcore.calculator import Calculator
from nepcore.files import nep_txt

KERNELS = (
    "radial_sums", "angular_sums", "network", "radial_weights", "angular_slopes", "radial_forces",
    "angular_forces", "angular_gather", "repulsion",
)  # fmt: skip
COPIES = {"si5": (8, 8, 8), "pbte": (8, 8, 4), "unep": (8, 8, 4), "c24": (6, 6, 6)}
DEVICE = torch.device("cuda")
LOCK = Path(tempfile.gettempdir()) / "fused_kernels.lock"

# Shapes that are tried, by kernel: the field of `Tiles` and its values.
SHAPES: dict[str, tuple[str, list[tuple[int, ...]]]] = {
    "radial_sums": ("radial_sums", [(32, 4, 4), (8, 4, 1), (16, 8, 4)]),
    "angular_sums": ("angular_sums", [(16, 2, 1), (32, 1, 1), (64, 1, 2), (8, 4, 1)]),
    "network": ("network", [(1, 4, 8, 1), (2, 4, 8, 1)]),
    "radial_weights": ("weights", [(128, 4)]),
    "angular_slopes": ("slopes", [(128, 4)]),
    "radial_forces": ("radial_forces", [(8, 4, 1), (4, 8, 1)]),
    "angular_forces": ("angular_forces", [(1, 32, 1), (2, 16, 1), (4, 8, 1)]),
    "angular_gather": ("gather", [(16, 8, 4), (4, 8, 1), (32, 4, 4)]),
    "repulsion": ("repulsion", [(16, 8, 4)]),
}


class Recorded:
    """Stands in for a kernel, and notes how it is launched."""

    def __init__(self, kernel: Any, calls: list[Any]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.calls.append((self.kernel, grid, args, options))


def recorded(model: Model, lists: Lists, outputs: Outputs, scratch: dict[str, torch.Tensor], tiles: Any) -> list[Any]:
    """The launches of one evaluation: kernel, grid, arguments, options."""
    calls: list[Any] = []
    kernels = {name: getattr(chain, name) for name in KERNELS if hasattr(chain, name)}
    for name, kernel in kernels.items():
        setattr(chain, name, Recorded(kernel, calls))
    try:
        chain.forward(model, lists, outputs, scratch, tiles)
    finally:
        for name, kernel in kernels.items():
            setattr(chain, name, kernel)
    return calls


def buffers(model: Model, lists: Lists, *, virials: bool = False) -> tuple[Outputs, dict[str, torch.Tensor]]:
    n, mr, ma = lists.rows.shape[0], lists.radial_index.shape[1], lists.angular_index.shape[1]
    device = lists.rows.device
    scratch = {k: torch.zeros(s, dtype=d, device=device) for k, (s, d) in chain.scratch(model, n, mr, ma).items()}
    outputs = Outputs(
        torch.zeros(n, dtype=torch.float64, device=device), torch.zeros((n, 3), device=device),
        torch.zeros((n, 9), device=device) if virials else None, None,
    )  # fmt: skip
    return outputs, scratch


def tiled(lists: Lists, copies: tuple[int, int, int]) -> Lists:
    """Lists of a crystal repeated along its vectors: images become neighbours in other copies."""
    n = lists.rows.shape[0]
    number = torch.tensor(copies, device=DEVICE)
    grid = torch.stack(torch.meshgrid(*[torch.arange(c, device=DEVICE) for c in copies], indexing="ij"), -1).reshape(
        -1, 3
    )
    step = 2.0**32 / np.array(copies, float)
    base = (lists.rows[:, :3].to(DEVICE, torch.float64) * 2.0**-28)[None] + grid[:, None]
    position = torch.round(base * torch.tensor(step, device=DEVICE)).to(torch.int64)
    position = ((position + 2**31) % 2**32 - 2**31).to(torch.int32).reshape(-1, 3)
    element = lists.rows[:, 3].to(DEVICE).repeat(len(grid))
    rows = torch.cat([position, element[:, None]], dim=1).contiguous()

    def neighbours(index: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        index, image = index.to(DEVICE), image.to(DEVICE)
        shift = torch.stack([(image << 22) >> 22, (image << 12) >> 22, (image << 2) >> 22], dim=-1)  # (n, m, 3)
        out = torch.empty((len(grid), *index.shape), dtype=torch.int32, device=DEVICE)
        for k, place in enumerate(grid):
            there = (place + shift) % number
            out[k] = ((there[..., 0] * copies[1] + there[..., 1]) * copies[2] + there[..., 2]) * n + index
        return out.reshape(-1, index.shape[1])

    ma = lists.angular_index.shape[1]
    assert lists.radial_image is not None
    assert lists.angular_image is not None
    angular = neighbours(lists.angular_index, lists.angular_image)
    slot = (lists.angular_reverse % ma).to(DEVICE).repeat(len(grid), 1)
    cell = lists.cells[0].reshape(3, 3).to(torch.float64) * 2.0**28 * torch.tensor(copies)[:, None] * 2.0**-32
    return Lists(
        False, rows, torch.zeros(len(rows), dtype=torch.int32, device=DEVICE),
        cell.reshape(1, 9).to(DEVICE, torch.float32), torch.zeros((1, 3), dtype=torch.int32, device=DEVICE),
        lists.temperatures.to(DEVICE), neighbours(lists.radial_index, lists.radial_image),
        lists.radial_count.to(DEVICE).repeat(len(grid)), None, angular,
        lists.angular_count.to(DEVICE).repeat(len(grid)), None, (angular * ma + slot).contiguous(),
    )  # fmt: skip


def system(name: str, skin: float) -> tuple[Model, Lists]:
    file = nep_txt.read(systems.MODELS[name])
    species, positions, cell = systems.raw(name, systems.cells.SYSTEMS[name]["rep"])
    one = Structures.pack([Structure.make(species, positions, cell)])
    present = sorted(set(file.admission.types[one.numbers].tolist()))
    lists = lists_of(one, file, present, torch.device("cpu"), skin=skin)
    return prepare(file, present, DEVICE), tiled(lists, COPIES[name])


def milliseconds(launch: Any, repeats: int = 7) -> float:
    """Median time of a launch by device events; first launches stay out."""
    for _ in range(2):
        launch()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def shapes_of(model: Model, kernel: str) -> list[Any]:
    """Tiles that differ in one kernel."""
    usual = chain.tiles(model.shape)
    if kernel not in SHAPES:
        return [usual]
    field, values = SHAPES[kernel]
    return [replace(usual, **{field: value}) for value in values]


def jobs_of(model: Model, lists: Lists, kernels: list[str]) -> list[tuple[str, Any, Any]]:
    """Launches to be measured: kernel, shape of its programs, launch."""
    outputs, scratch = buffers(model, lists)
    jobs = []
    for kernel in kernels:
        for tiles in shapes_of(model, kernel):
            for call in recorded(model, lists, outputs, scratch, tiles):
                if call[0].__name__ == kernel:
                    jobs += [(kernel, getattr(tiles, SHAPES[kernel][0]), call)]
    return jobs


def deviations(name: str, outputs: Outputs) -> str:
    """Largest deviations of the first copy of a crystal from float64."""
    file = nep_txt.read(systems.MODELS[name])
    one = Structures.pack([Structure.make(*systems.raw(name, systems.cells.SYSTEMS[name]["rep"]))])
    wanted = Calculator.of(file, device="cuda", dtype="float64", backend="mulsum").evaluate(one, ["energies", "forces"])
    energies, forces = outputs.energy[: one.n_atoms].cpu().numpy(), outputs.forces[: one.n_atoms].cpu().numpy()
    off = [np.abs(found - wanted[key]).max() for key, found in (("energies", energies), ("forces", forces))]
    return f"off by {off[0]:.1e} eV and {off[1]:.1e} eV/Å"


def measure(name: str, skin: float, kernels: list[str]) -> list[dict[str, Any]]:
    """Times of one system; compiles first, and has the device to itself while it measures."""
    begin = time.perf_counter()
    model, lists = system(name, skin)
    n = lists.rows.shape[0]
    outputs, scratch = buffers(model, lists)

    def evaluate() -> None:
        chain.forward(model, lists, outputs, scratch)

    evaluate()
    torch.cuda.synchronize()
    print(f"{name}: first evaluation after {time.perf_counter() - begin:.0f} s", flush=True)
    errors = deviations(name, outputs)
    jobs = jobs_of(model, lists, kernels)
    for _, _, (jit, grid, args, opts) in jobs:
        jit[grid](*args, **opts)
    torch.cuda.synchronize()
    rows = []
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        evaluate()
        print(f"{name}: {n} atoms, slots {lists.radial_index.shape[1]} and {lists.angular_index.shape[1]}, all kernels "
              f"{milliseconds(evaluate) * 1e6 / n:.2f} ns/atom, {errors}", flush=True)  # fmt: skip
        for kernel, shape, (jit, grid, args, opts) in jobs:
            evaluate()  # what a kernel finds is to be what the others leave
            compiled = jit[grid](*args, **opts)
            ns = milliseconds(partial(jit[grid], *args, **opts)) * 1e6 / n
            row = {"system": name, "kernel": kernel, "shape": shape, "ns": ns, "registers": compiled.n_regs}
            rows.append(row)
            print(f"  {kernel:15s} {shape!s:18s} {ns:7.3f} ns  registers {compiled.n_regs}  spills {compiled.n_spills}",
                  flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--systems", nargs="+", default=list(COPIES))
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS))
    parser.add_argument("--skin", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table = [row for name in options.systems for row in measure(name, options.skin, options.kernels)]
    if options.out:
        options.out.write_text(json.dumps(table))


if __name__ == "__main__":
    main()
