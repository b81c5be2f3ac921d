"""Relax positions and cell of a crystal with the model of a running server.

make serve MODEL=nep.txt          # in another terminal; without MODEL= a demonstration model of seven metals
.venv/bin/python examples/relax.py
"""

import sys

from ase.build import bulk
from ase.filters import FrechetCellFilter
from ase.optimize import BFGS

from nepserve.client.ase import NEPCalculator

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
atoms = bulk("Cu", cubic=True) * (2, 2, 2)
atoms.rattle(0.05, seed=1)
atoms.calc = NEPCalculator(url)
if not BFGS(FrechetCellFilter(atoms)).run(fmax=0.01, steps=50):
    print("not converged within 50 steps")
print(f"energy {atoms.get_potential_energy():.4f} eV, cell {atoms.cell.lengths()} Å")
