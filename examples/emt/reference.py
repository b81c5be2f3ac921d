"""Energies and forces of the bundled model by calorine's CPUNEP, in double precision: figures for tests.

    python reference.py -o ../../tests/nepcore/demo_emt_calorine.json        # needs calorine and ASE

For the periodic structures of ``examples/metals.xyz``, as JSON: symbols, positions (Å), cell (Å), energy (eV), forces
(eV/Å). ``--check FILE`` compares with a file instead of writing one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ase.io import read
from calorine.calculators import CPUNEP

from nepcore import bundled

STRUCTURES = Path(__file__).resolve().parents[1] / "metals.xyz"
NAMES = ("rattled copper", "copper gold", "nickel vacancy")
"""Of the periodic ones, in the order of the file."""


def references() -> list[dict[str, Any]]:
    """What calorine says of every periodic structure."""
    model = Path(bundled.__file__).parent / "data" / f"{bundled.NAME}.txt"
    rows = []
    periodic = [atoms for atoms in read(STRUCTURES, index=":") if atoms.pbc.all()]
    for name, atoms in zip(NAMES, periodic, strict=True):
        atoms.calc = CPUNEP(str(model))
        rows.append({
            "name": name, "symbols": list(atoms.symbols), "positions": atoms.positions.tolist(),
            "cell": atoms.cell.tolist(), "energy": float(atoms.get_potential_energy()),
            "forces": atoms.get_forces().tolist(),
        })  # fmt: skip
    return rows


def main() -> int:
    """Write the file, or compare with one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("-o", "--output", type=Path)
    group.add_argument("--check", type=Path)
    options = parser.parse_args()
    found = references()
    if options.output is not None:
        options.output.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
        return 0
    known = json.loads(options.check.read_text(encoding="utf-8"))
    same = [row["name"] for row in known] == [row["name"] for row in found]
    for mine, theirs in zip(found, known, strict=same):
        worst = np.abs(np.subtract(mine["forces"], theirs["forces"])).max()
        print(f"{mine['name']}: energy {mine['energy'] - theirs['energy']:+.1e} eV, forces {worst:.1e} eV/Å")
        same = same and abs(mine["energy"] - theirs["energy"]) < 1e-9 and worst < 1e-9
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
