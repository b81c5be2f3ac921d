"""Errors of models that are trained here and by TorchNEP: same frames, split, model, keywords and number of epochs.

    python bench/accuracy.py run --tasks emt --seeds 1 2 3 4 5 -o accuracy.jsonl
    python bench/accuracy.py run --tasks mosi2n4 mosi2n4-split mos2 mos2-split -o accuracy.jsonl
    python bench/accuracy.py table accuracy.jsonl

Each training is a process of its own; all of a call run at once (``--jobs``), so that their seconds tell nothing of
speed unless there is only one. Every model file is evaluated by nepcore, and each line of the output is one training.
Data: EMT frames by ``examples/emt/make_data.py`` (in ``--emt``, made there if it is empty), MoSi2N4 and MoS2 beside
the checkout. Both programs read one ``nep.in``; what it leaves out are their own defaults. ``mosi2n4`` and ``mos2``
train on all frames, and their errors are those of the frames trained on.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The folder of this script holds an http.py, which is not the one that libraries ask for.
sys.path[0] = str(ROOT)

import numpy as np

from nepcore.files import nep_in, nep_txt, xyz
from nepcore.training.dataset import split
from nepcore.training.inputs import inputs
from nepcore.training.outputs import evaluate

MODELS = {
    "emt": "type 7 Al Ni Cu Pd Ag Pt Au\ncutoff 6 5\nn_max 4 4\nbasis_size 8 8\nl_max 4 2 0\nneuron 30\n",
    "mosi2n4": "type 3 Mo Si N\ncutoff 6 4\nn_max 4 4\nbasis_size 12 12\nl_max 4 2 0\nneuron 30\n",
    "mos2": "type 2 Mo S\ncutoff 6 4\nn_max 4 4\nbasis_size 12 12\nl_max 4 2 0\nneuron 30\n",
}
LONG = (
    "epoch 3000\nbatch 16\nlr 0.01\nstop_lr 1e-6\nlr_scheduler cosine\nloss_form mse\nlambda_e 15\nlambda_f 1\n"
    "lambda_v 0.3\nweight_decay 0\naverage 50\n"
)
"""A training to the end: energies and virials weigh more than by default, and the learning rate falls to nothing."""

COURSES = {
    "emt": "epoch 100\nbatch 32\n",
    "mosi2n4": LONG,
    "mosi2n4-split": "epoch 600\nbatch 32\n",
    "mos2": LONG,
    "mos2-split": "epoch 600\nbatch 32\n",
}
SPLIT_SEED = 0
TARGETS = {"energy": 3.15e-3, "force": 97.4e-3, "virial": 53.3e-3}
"""GPUMD's published training errors on MoSi2N4: eV/atom, eV/Å, eV/atom."""

EMT_FRAMES = {"train": (500, 1), "valid": (220, 3)}
"""Frames asked of the maker, and its seed; those with large forces are left out."""


def frames_of(task: str, emt: Path) -> tuple[xyz.Frames, xyz.Frames | None]:
    """Frames to train and to validate on."""
    if task == "emt":
        made_emt(emt)
        return xyz.read(emt / "train.xyz"), xyz.read(emt / "valid.xyz")
    from bench import systems

    name, _, divided = task.partition("-")
    frames = xyz.read(systems.SHARED / "data" / {"mosi2n4": "MoSi2N4", "mos2": "MoS2"}[name] / "train.xyz")
    if not divided:
        return frames, None
    train, valid = split(frames, 0.1, SPLIT_SEED)
    return frames.select(train), frames.select(valid)


def made_emt(folder: Path) -> None:
    """Make the EMT frames where they are missing; the two sets at once, each from a seed of its own."""
    missing = [name for name in EMT_FRAMES if not (folder / f"{name}.xyz").is_file()]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    maker = ROOT / "examples/emt/make_data.py"
    running = []
    for name in missing:
        count, seed = EMT_FRAMES[name]
        command = [sys.executable, str(maker), "-o", str(folder / name), "--frames", str(count), "--seed", str(seed)]
        running.append(subprocess.Popen(command))
    for name, process in zip(missing, running, strict=True):
        if process.wait():
            sys.exit(f"{maker} ended with {process.returncode}")
        (folder / name / "train.xyz").replace(folder / f"{name}.xyz")


def write(frames: xyz.Frames, path: Path) -> None:
    xyz.write(path, frames.structures, frames=frames)


def replace_lines(path: Path, lines: list[str]) -> None:
    """Put lines into a nep.in, each for the one of the same keyword."""
    rows = path.read_text().splitlines()
    for line in lines:
        rows = [row for row in rows if row.split()[0] != line.split()[0]] + [line]
    path.write_text("\n".join(rows) + "\n")


def rmse(model: Path, frames: xyz.Frames, device: str) -> dict[str, float]:
    """Errors of a model file: eV/atom, eV/Å, eV/atom."""
    found = evaluate(nep_txt.read(model), frames, "test", device=device, dtype="float32").errors()
    return {name: value["rmse"] for name, value in found.items()}


def nepcore(folder: Path, train: xyz.Frames, valid: xyz.Frames | None, options: argparse.Namespace) -> dict[str, Any]:
    from nepcore.training import Training

    begun = time.perf_counter()
    epochs, reached, said, start = 0, None, begun, None
    for lines in [[], options.then] if options.then else [[]]:
        replace_lines(folder / "nep.in", lines)
        given = inputs(nep_in.read(folder / "nep.in"), len(train), seed=options.seed)
        training = Training(
            given.settings, train, valid, directory=folder / f"out{epochs}", device=options.device, start=start
        )
        for progress in training.run():
            now = time.perf_counter()
            e = progress.train
            if reached is None and progress.kind == "epoch" and valid is None:
                found = {"energy": e.energy, "force": e.force, "virial": e.virial}
                if all(found[name] is not None and found[name] < TARGETS[name] for name in TARGETS):
                    reached = {"epoch": epochs + progress.epoch, "seconds": round(now - begun, 1)}
            if now - said > 20.0:
                said = now
                print(f"{options.name} epoch {progress.epoch} {e} {now - begun:.0f} s", file=sys.stderr, flush=True)
            if now - begun > options.limit:
                training.stop()
        epochs += training.epochs
        models = training.models()
        for name in ("best", "final", "average"):
            model = getattr(models, name)
            if model is not None:
                nep_txt.write(model, folder / f"nep_{name}.txt")
        start = folder / "nep_best.txt"
    seconds = time.perf_counter() - begun
    return {"epochs": epochs, "seconds": seconds, "reached": reached}


def torchnep(folder: Path, _: xyz.Frames, valid: xyz.Frames | None, options: argparse.Namespace) -> dict[str, Any]:
    from torchnep import train_nep

    begun = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        train_nep(
            str(folder / "nep.in"), str(folder / "train.xyz"), output_dir=str(folder), device=options.device,
            use_compile=None if options.device == "cuda" else False, print_interval=10**6, checkpoint_interval=10**6,
            prediction_interval=0, run_seed=options.seed,
            valid_file=None if valid is None else str(folder / "valid.xyz"),
        )  # fmt: skip
    return {"epochs": nep_in.read(folder / "nep.in").integer("epoch"), "seconds": time.perf_counter() - begun}


PROGRAMS = {"nepcore": nepcore, "torchnep": torchnep}


def one(options: argparse.Namespace) -> int:
    """One training, in this process: a line of JSON."""
    train, valid = frames_of(options.task, options.emt)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "nep.in").write_text(MODELS[options.task.partition("-")[0]] + COURSES[options.task])
        replace_lines(folder / "nep.in", options.set)
        write(train, folder / "train.xyz")
        if valid is not None:
            write(valid, folder / "valid.xyz")
        facts = PROGRAMS[options.who](folder, train, valid, options)
        errors = {
            which: rmse(path, train if valid is None else valid, options.device)
            for which in ("best", "final", "average")
            if (path := folder / f"nep_{which}.txt").is_file()
        }
    row = {
        "task": options.task, "name": options.name, "who": options.who, "seed": options.seed, "frames": len(train),
        "validated": 0 if valid is None else len(valid), "set": options.set, "then": options.then,
        "device": options.device, **facts, "rmse": errors,
    }  # fmt: skip
    line = json.dumps(row)
    print(line, flush=True)
    if options.output is not None:
        with options.output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return 0


def run(options: argparse.Namespace) -> int:
    """All trainings asked for, each in a process."""
    if "emt" in options.tasks:
        made_emt(options.emt)
    commands = []
    for task in options.tasks:
        for seed in options.seeds if task == "emt" else options.seeds[:1]:
            for who in options.who if task == "emt" or "-" in task else options.who[:1]:
                command = [sys.executable, str(Path(__file__).resolve()), "one", "--task", task, "--who", who]
                command += ["--seed", str(seed), "--device", options.device, "--emt", str(options.emt)]
                command += ["--limit", str(options.limit), "--name", f"{task}/{who}/{seed}"]
                command += [] if options.output is None else ["-o", str(options.output)]
                command += [word for line in options.set for word in ("--set", line)]
                command += [word for line in options.then for word in ("--then", line)]
                commands.append(command)
    # Many processes, each of few threads; compilers would start one for every core each.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}

    def ended(command: list[str]) -> int:
        try:
            most = options.limit + options.grace
            return subprocess.run(command, env=environment, timeout=most, check=False).returncode
        except subprocess.TimeoutExpired:
            print(json.dumps({"name": command[command.index("--name") + 1], "error": "not ready in time"}), flush=True)
            return 1

    with ThreadPoolExecutor(options.jobs or len(commands)) as pool:
        codes = list(pool.map(ended, commands))
    if options.output is not None and options.output.is_file():
        table(options.output)
    return int(any(codes))


def table(path: Path) -> None:
    """Errors by task and program, and, with several seeds, mean differences beside their standard errors."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    names = ("energy", "force", "virial")
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        on = f"{own[0]['validated']} frames not trained on" if own[0]["validated"] else "the frames trained on"
        print(f"\n{task}: {own[0]['frames']} frames; RMSE on {on}: meV/atom, meV/Å, meV/atom")
        best: dict[str, dict[int, list[float]]] = {}
        for row in own:
            for which, errors in row["rmse"].items():
                values = " ".join(f"{1e3 * errors[n]:8.2f}" if n in errors else "       –" for n in names)
                reached = f"  published errors reached: {row['reached']}" if row.get("reached") else ""
                then = f" then {' '.join(row['then'])}" if row.get("then") else ""
                print(f"  {row['who']:9} seed {row['seed']} {which:8} {values}  {row['epochs']} epochs "
                      f"{row['seconds']:.0f} s {' '.join(row['set'])}{then}{reached}")  # fmt: skip
            if "best" in row["rmse"] and not row["set"]:
                best.setdefault(row["who"], {})[row["seed"]] = [row["rmse"]["best"].get(n, np.nan) for n in names]
        if set(best) != {"nepcore", "torchnep"}:
            continue
        seeds = sorted(set(best["nepcore"]) & set(best["torchnep"]))
        a, b = (np.array([best[who][seed] for seed in seeds]) for who in ("nepcore", "torchnep"))
        if len(seeds) < 2:
            continue
        for k, n in enumerate(names):
            d = a[:, k] - b[:, k]
            error = d.std(ddof=1) / np.sqrt(len(d))
            allowed = max(0.03 * b[:, k].mean(), 2.0 * error)
            print(f"  {n:6} nepcore {1e3 * a[:, k].mean():8.3f} torchnep {1e3 * b[:, k].mean():8.3f} difference "
                  f"{1e3 * d.mean():+.3f} ± {1e3 * error:.3f} ({100 * d.mean() / b[:, k].mean():+.1f} %), "
                  f"{'not worse' if d.mean() <= allowed else 'worse'} than by {1e3 * allowed:.3f}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "one"):
        sub = commands.add_parser(name)
        sub.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
        sub.add_argument("--emt", type=Path, default=Path(tempfile.gettempdir()) / "nepserve-emt")
        sub.add_argument("--set", action="append", default=[], help="a line of nep.in, 'epoch 10'")
        sub.add_argument("--then", action="append", default=[],
                         help="a line of nep.in for a second training, from the best model of the first")  # fmt: skip
        sub.add_argument("--limit", type=float, default=1e9, help="seconds after which a training here stops and is "
                         "evaluated as it is")  # fmt: skip
        sub.add_argument("-o", "--output", type=Path, help="JSON lines are added to this file")
        if name == "run":
            sub.add_argument("--tasks", nargs="+", choices=list(COURSES), default=list(COURSES))
            sub.add_argument(
                "--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], help="all for emt, else the first"
            )
            sub.add_argument("--who", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
            sub.add_argument("--jobs", type=int, help="trainings at once; left out, all")
            sub.add_argument("--grace", type=float, default=60.0, help="seconds more until a process is ended")
        else:
            sub.add_argument("--task", choices=list(COURSES), required=True)
            sub.add_argument("--who", choices=list(PROGRAMS), required=True)
            sub.add_argument("--seed", type=int, default=1)
            sub.add_argument("--name", default="training")
    commands.add_parser("table").add_argument("path", type=Path)
    options = parser.parse_args()
    if options.command == "table":
        table(options.path)
        return 0
    return run(options) if options.command == "run" else one(options)


if __name__ == "__main__":
    sys.exit(main())
