from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

pytest.importorskip("ase")


def run(name, *words):
    command = [sys.executable, EXAMPLES / name, *(str(word) for word in words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_dynamics(server, tmp_path):
    from ase.io import Trajectory

    done = run("ase_md.py", "--url", server.url, "--element", "Al", "--repeat", 1, "--steps", 20, "--output",
               tmp_path / "md.traj")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step     20" in done.stdout
    frames = Trajectory(tmp_path / "md.traj")
    assert len(frames) == 3
    assert np.isfinite(frames[-1].get_forces()).all()


def test_many_structures(server, tmp_path):
    from ase import Atoms
    from ase.io import write

    structures = [Atoms("SiH", [[0, 0, 0], [0, 0, 1 + 0.1 * k]]) for k in range(7)]
    structures[3].symbols[0] = "Ge"
    write(tmp_path / "in.xyz", structures)
    done = run("many_structures.py", tmp_path / "in.xyz", "--url", server.url, "--output", tmp_path / "out.npz")
    assert done.returncode == 0, done.stderr
    assert "6 structures, 14 atoms" in done.stdout
    assert "structure 4: atom 1" in done.stdout
    with np.load(tmp_path / "out.npz") as found:
        assert found["energy"].shape == (7,)
        assert found["forces"].shape == (14, 3)
        assert np.isnan(found["energy"]).tolist() == [k == 3 for k in range(7)]


def test_a_server_that_fails_ends_the_run(server, fault):
    server.always = fault(500, "internal", "the device is gone")
    done = run("ase_md.py", "--url", server.url, "--element", "Al", "--repeat", 1, "--steps", 20)
    assert done.returncode != 0
    assert "the device is gone" in done.stderr


def test_the_python_of_the_page_runs(server):
    from ase import Atoms
    from ase.build import bulk
    from ase.optimize import FIRE

    page = (EXAMPLES.parent / "docs" / "client.md").read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    # One shows servers of which there are several.
    found = [block for block in found if "node1" not in block]
    assert len(found) == 7
    atoms = bulk("Al", cubic=True)
    atoms.rattle(0.1, seed=0)
    images = [atoms.copy() for _ in range(5)]
    for k, image in enumerate(images):
        image.positions[0] += 0.1 * k
    # What phonopy calls a structure.
    displaced = [
        SimpleNamespace(symbols=a.get_chemical_symbols(), cell=a.cell.array, scaled_positions=a.get_scaled_positions())
        for a in images
    ]
    names = {
        "atoms": atoms,
        "structures": [Atoms("OH", [[0, 0, 0], [0, 0, 1.0 + k]]) for k in range(3)],
        "images": images,
        "phonon": SimpleNamespace(supercells_with_displacements=displaced),
    }
    for block in found:
        exec(block.replace("http://127.0.0.1:8000", server.url), names)
    np.testing.assert_allclose(names["phonon"].forces[0], atoms.get_forces(), atol=1e-9)
    before, steps = len(server.evaluations), 3
    FIRE(names["band"], logfile=None).run(fmax=0.0, steps=steps)
    assert len(server.evaluations) <= before + steps + 1
