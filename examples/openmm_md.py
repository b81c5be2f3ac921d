"""OpenMM with the forces of a server.

    nepserve serve nep.txt                      # in one shell
    python examples/openmm_md.py --element Si   # in another

Needs `pip install nepserve openmm`.
"""

from __future__ import annotations

import argparse

import numpy as np
import openmm
from openmm import app, unit

from nepserve.client.openmm import force

DIAMOND = np.array([[0, 0, 0], [0, 2, 2], [2, 0, 2], [2, 2, 0], [1, 1, 1], [1, 3, 3], [3, 1, 3], [3, 3, 1]]) / 4


def main() -> None:
    parser = argparse.ArgumentParser(description="Langevin dynamics of a diamond crystal with a served model.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--model", help="name of the model, if the server has several")
    parser.add_argument("--element", default="Si")
    parser.add_argument("--lattice", type=float, default=0.543, help="nm")
    parser.add_argument("--steps", type=int, default=100, help="steps of 1 fs")
    arguments = parser.parse_args()

    system = openmm.System()
    for _ in DIAMOND:
        system.addParticle(app.Element.getBySymbol(arguments.element).mass)
    system.setDefaultPeriodicBoxVectors(*(arguments.lattice * np.eye(3)).tolist())
    system.addForce(force([arguments.element] * len(DIAMOND), arguments.url, arguments.model))
    integrator = openmm.LangevinMiddleIntegrator(300 * unit.kelvin, 1 / unit.picosecond, 1 * unit.femtosecond)
    context = openmm.Context(system, integrator)
    context.setPositions((arguments.lattice * DIAMOND).tolist())
    context.setVelocitiesToTemperature(300 * unit.kelvin)
    for _ in range(10):
        integrator.step(max(arguments.steps // 10, 1))
        state = context.getState(energy=True)
        print(f"step {context.getStepCount():6d}  potential {state.getPotentialEnergy()}")


if __name__ == "__main__":
    main()
