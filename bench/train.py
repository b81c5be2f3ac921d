"""Step time of the training beside TorchNEP and neppo, on the same frames, model and batch.

    python bench/train.py --data pbte emt --batch 32 64 --who nepcore nepcore+compiled nepcore+sums neppo torchnep

Frames are the example's 25 PbTe frames repeated with small displacements, and random alloys of seven metals with labels
that mean nothing: neither changes what a step costs. Each program, data set and batch is a process. All prepare at
once, and take turns on the device, one after the other, nothing else beside it. One JSON object a line, when it is
known (a program that is not ready in ``--patience`` seconds of its turn is one with ``error``); a table at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The folder of this script holds an http.py, which is not the one that libraries ask for.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from nepcore.files import xyz
from nepcore.training import Settings, Training

SYSTEMS: dict[str, dict[str, Any]] = {
    "pbte": {"elements": ("Te", "Pb"), "cutoff": (8.0, 4.0), "n_max": (6, 6), "basis_size": (6, 6), "frames": 256},
    "emt": {"elements": ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au"), "cutoff": (6.0, 5.0), "n_max": (4, 4),
            "basis_size": (8, 8), "frames": 2000},
}  # fmt: skip
LATTICE = (4.05, 3.52, 3.61, 3.89, 4.09, 3.92, 4.08)


def pbte_lines(count: int) -> list[str]:
    """The frames of ``shared/bench/train_peers.py``."""
    from bench import systems

    frames: list[tuple[str, list[list[str]]]] = []
    lines = (systems.SHARED / "data/PbTe/train.xyz").read_text().split("\n")
    i = 0
    while i < len(lines) and lines[i].strip():
        n = int(lines[i])
        frames.append((lines[i + 1], [line.split() for line in lines[i + 2 : i + 2 + n]]))
        i += n + 2
    rng = np.random.default_rng(0)
    out = []
    for k in range(count):
        head, rows = frames[k % len(frames)]
        out += [str(len(rows)), head]
        moved = rng.normal(0, 0.01, (len(rows), 3)) * (k >= len(frames))
        for row, d in zip(rows, moved, strict=True):
            p = [float(row[1 + a]) + d[a] for a in range(3)]
            out.append(f"{row[0]} {p[0]:.7f} {p[1]:.7f} {p[2]:.7f} " + " ".join(row[4:]))
    return out


def emt_lines(count: int) -> list[str]:
    """Rattled fcc alloys of 100 to 108 atoms."""
    elements = SYSTEMS["emt"]["elements"]
    rng = np.random.default_rng(1)
    sites = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    grid = np.array([[i, j, k] for i in range(3) for j in range(3) for k in range(3)])
    base = (grid[:, None] + sites).reshape(-1, 3)
    out = []
    for _ in range(count):
        species = rng.choice(len(elements), len(base), p=rng.dirichlet(np.ones(len(elements))))
        a = float(np.mean([LATTICE[s] for s in species])) * rng.uniform(0.97, 1.03)
        cell = 3 * a * (np.eye(3) + rng.normal(0, 0.01, (3, 3)))
        positions = base / 3 @ cell + rng.normal(0, 0.1, base.shape)
        kept = np.sort(rng.permutation(len(base))[: len(base) - int(rng.integers(0, 9))])
        forces = rng.normal(0, 0.5, (len(kept), 3))
        virial = " ".join(f"{v:.5f}" for v in rng.normal(0, 3.0, 9))
        lattice = " ".join(f"{v:.7f}" for v in cell.reshape(-1))
        energy = -3.0 * len(kept) + rng.normal(0, 5)
        labels = f'energy={energy:.5f} virial="{virial}" Properties=species:S:1:pos:R:3:forces:R:3'
        out += [str(len(kept)), f'Lattice="{lattice}" pbc="T T T" {labels}']
        for i, f in zip(kept, forces, strict=True):
            numbers = " ".join(f"{v:.7f}" for v in (*positions[i], *f))
            out.append(f"{elements[species[i]]} {numbers}")
    return out


def record(**values: Any) -> dict[str, Any]:
    print(json.dumps(values), flush=True)
    return values


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def turn(options: argparse.Namespace) -> None:
    """Wait for the device; whatever can be done before is done before."""
    if options.child:
        say(f"{options.who[0]} {options.data[0]} {options.batch[0]}: prepared")
        if not sys.stdin.readline():
            sys.exit(1)


def waited(device: str) -> float:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def ours(path: Path, system: str, batch: int, options: argparse.Namespace, way: str) -> dict[str, Any]:
    import torch

    s = SYSTEMS[system]
    settings = Settings(
        s["elements"], cutoff=(s["cutoff"],), n_max=s["n_max"], basis_size=s["basis_size"], batch=batch,
        epochs=options.epochs, valid_ratio=options.valid,
    )  # fmt: skip
    frames = xyz.read(path)
    turn(options)
    start = time.perf_counter()
    compiled = "compiled" in way
    backend = "sums" if "sums" in way else None  # the usual one has kernels on a GPU
    training = Training(settings, frames, device=options.device, compiled=compiled, backend=backend)
    prepared = waited(options.device) - start
    seconds, errors = [0.0], []
    for progress in training.run():
        if progress.kind == "epoch":
            seconds.append(progress.seconds)
            errors.append(progress.train.force)
    epochs = np.diff(seconds)
    # The steps alone: arrays lie ready on the host, and nothing is read between steps.
    from nepcore.training.batches import stream
    from nepcore.training.preparation import cut

    cuda = options.device == "cuda"
    pieces = [cut(training._data, b[b >= 0], training._stepper) for b in training._plan.epoch(0)]  # noqa: SLF001
    ready = list(stream(training._data, pieces[:40], pin=cuda, pad=cuda, ahead=0))  # noqa: SLF001
    labels = [1.0, 3.0 * 32 * 250, 6.0]
    stepper = training._stepper  # noqa: SLF001
    steps = []
    for _ in range(3 if cuda else 1):
        begin = waited(options.device)
        for parts in ready:
            stepper.step(parts, labels)
        steps.append((waited(options.device) - begin) / len(ready) * 1e3)
    out = record(
        who=way, system=system, batch=batch, frames=len(frames),
        s_per_epoch=float(np.median(epochs[2:])) if len(epochs) > 3 else float(epochs[-1]),
        ms_per_step=min(steps), steps=training._plan.steps, prepare_s=prepared, first_epoch_s=float(epochs[0]),  # noqa: SLF001
        epochs_s=[round(float(e), 4) for e in epochs], force_rmse=[errors[0], errors[-1]],
        device_mb=round(torch.cuda.max_memory_allocated() / 1e6) if cuda else None,
        graphs=len(stepper._graphs),  # noqa: SLF001
    )  # fmt: skip
    if options.profile and cuda:
        profile(stepper, ready)
    return out


def profile(stepper: Any, ready: list[Any]) -> None:
    """Kernels of a step by time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        for parts in ready[:4]:
            stepper.step(parts, [1.0, 1.0, 1.0])
        waited("cuda")
    rows = sorted(found.key_averages(), key=lambda e: -e.device_time_total)[:28]
    total = sum(e.device_time_total for e in found.key_averages())
    count = sum(e.count for e in found.key_averages())
    print(f"kernels a step: {count / 4:.0f}, {total / 4e3:.3f} ms")
    for e in rows:
        print(f"  {e.device_time_total / 4e3:7.4f} ms {e.count / 4:6.1f} x {e.key[:100]}")


def neppo(path: Path, system: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from ase.io import read
    from neppo import StructureContainer, Trainer
    from neppo.losses import EnergyLoss, ForceLoss
    from neppo.models import NEP, Descriptor

    s = SYSTEMS[system]
    structures = read(path, index=":")
    torch.manual_seed(0)
    descriptor = Descriptor(
        list(s["elements"]), radial_cutoff=s["cutoff"][0], angular_cutoff=s["cutoff"][1], n_max_radial=s["n_max"][0],
        n_max_angular=s["n_max"][1], n_basis_radial=s["basis_size"][0], n_basis_angular=s["basis_size"][1],
        l_max_3b=4, l_max_4b=2, l_max_5b=0,
    )  # fmt: skip
    model = NEP(descriptor, neurons=(30,))
    start = time.perf_counter()
    container = StructureContainer(model, structures)
    made = time.perf_counter() - start
    graph = options.device == "cuda"
    turn(options)
    trainer = Trainer(
        model, EnergyLoss() + ForceLoss(), container, batch_size=batch, device=options.device, use_cuda_graph=graph
    )
    count = len(trainer._batches)  # noqa: SLF001
    rounds = max(1, 40 // count)

    def round_() -> None:
        for i in range(count):
            trainer._take_step(*trainer._batches[i], trainer._batch_has_bec[i])  # noqa: SLF001

    for _ in range(max(1, -(-8 // count))):
        round_()
    start = waited(options.device)
    for _ in range(rounds):
        round_()
    step = (waited(options.device) - start) / (rounds * count)
    return record(who="neppo", system=system, batch=batch, frames=len(structures), ms_per_step=step * 1e3,
                  s_per_epoch=step * -(-SYSTEMS[system]["frames"] // batch), graphs_s=made)  # fmt: skip


def torchnep(path: Path, system: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    import torchnep.train as trainer
    from torchnep import train_nep

    s = SYSTEMS[system]
    count = min(s["frames"], options.torchnep_frames)
    folder = path.parent
    (folder / "nep.in").write_text(
        f"type {len(s['elements'])} {' '.join(s['elements'])}\ncutoff {s['cutoff'][0]} {s['cutoff'][1]}\n"
        f"n_max {s['n_max'][0]} {s['n_max'][1]}\nbasis_size {s['basis_size'][0]} {s['basis_size'][1]}\n"
        f"l_max 4 2 0\nneuron 30\nbatch {batch}\nepoch {options.torchnep_epochs}\n"
    )
    stamps = []
    real = trainer._scheduler_step  # noqa: SLF001

    def mark(*a: Any, **k: Any) -> Any:  # called once at each epoch's end
        stamps.append(waited(options.device))
        say(f"torchnep {system} {batch}: epoch {len(stamps)} after {stamps[-1] - start:.1f} s")
        return real(*a, **k)

    trainer._scheduler_step = mark  # noqa: SLF001
    turn(options)
    start = time.perf_counter()
    train_nep(str(folder / "nep.in"), str(path), output_dir=str(folder / f"tn{batch}"), device=options.device,
              use_compile=options.device == "cuda", print_interval=10**6, checkpoint_interval=10**6,
              prediction_interval=0, run_seed=1)  # fmt: skip
    trainer._scheduler_step = real  # noqa: SLF001
    epochs = np.diff(stamps)
    # It adds a pass on new minima in the last third of the epochs: those before it count.
    e = float(statistics.median(epochs[: max(1, 2 * options.torchnep_epochs // 3 - 1)]))
    return record(who="torchnep", system=system, batch=batch, frames=count, s_per_epoch=e * s["frames"] / count,
                  ms_per_step=e * 1e3 / -(-count // batch), first_epoch_s=stamps[0] - start,
                  epochs_s=[round(float(x), 4) for x in epochs])  # fmt: skip


def child(options: argparse.Namespace) -> None:
    """One program on one data set, in this process."""
    system, who, batch = options.data[0], options.who[0], options.batch[0]
    count = SYSTEMS[system]["frames"]
    # Peers lay out their data for minutes where there is much of it; what a step costs does not depend on how much.
    count = min(count, {"neppo": options.neppo_frames, "torchnep": options.torchnep_frames}.get(who, count))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.xyz"
        path.write_text("\n".join((pbte_lines if system == "pbte" else emt_lines)(count)) + "\n")
        if who.startswith("nepcore"):
            ours(path, system, batch, options, who)
        else:
            {"neppo": neppo, "torchnep": torchnep}[who](path, system, batch, options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["pbte", "emt"], choices=list(SYSTEMS))
    parser.add_argument(
        "--who", nargs="+", default=["nepcore", "nepcore+compiled", "nepcore+sums", "neppo", "torchnep"]
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[32, 64], help="of emt, the first alone")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--frames", type=int, help="of each data set; left out, 256 of PbTe and 2000 alloys")
    parser.add_argument("--neppo-frames", type=int, default=256, help="neppo takes long to lay out its structures")
    parser.add_argument("--torchnep-frames", type=int, default=512, help="and TorchNEP to find neighbours")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--torchnep-epochs", type=int, default=6)
    parser.add_argument("--valid", type=float, default=0.0, help="share of the frames that is validated on")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds that a program's turn may last")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no turn begins or goes on")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for system in options.data:
        if options.frames:
            SYSTEMS[system]["frames"] = options.frames
    if options.child:
        child(options)
        return 0
    begun = time.monotonic()
    waiting = []
    for who in options.who:
        for system in options.data:
            for batch in options.batch if system == "pbte" else options.batch[:1]:
                command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--child"]
                command += ["--data", system, "--who", who, "--batch", str(batch)]
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
                    env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
                )  # fmt: skip
                waiting.append((who, system, batch, process))
    rows = []
    for who, system, batch, process in waiting:
        left = options.limit - (time.monotonic() - begun)
        error = None
        try:
            said, _ = process.communicate("go\n", timeout=max(0.1, min(options.patience, left)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its compilers, too
            said, _ = process.communicate()
            error = "not ready in time"
        print("\n".join(line for line in said.splitlines() if who != "torchnep" or line.startswith("{")), flush=True)
        found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        rows += found
        if not found:
            record(who=who, system=system, batch=batch, error=error or f"ended with {process.returncode}")
        say(f"{who} {system} {batch}: {time.monotonic() - begun:.0f} s")
    for row in sorted(rows, key=lambda row: (row["system"], row["batch"])):
        print(f"{row['system']:5} {row['batch']:3} {row['who']:17} {row['ms_per_step']:8.3f} ms/step "
              f"{row['s_per_epoch']:8.4f} s/epoch")  # fmt: skip
    return int(len(rows) < len(waiting))


if __name__ == "__main__":
    sys.exit(main())
