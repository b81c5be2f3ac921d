"""Molecular dynamics with ASE, the forces from a server.

    nepserve serve nep.txt                      # in one shell
    python examples/ase_md.py --element Si      # in another

Needs `pip install nepserve[md]`. If the server is restarted meanwhile, the run waits and goes on; if no complete
answer comes within the time-out, it stops at that step with an error.
"""

from __future__ import annotations

import argparse

import numpy as np
from ase import units
from ase.build import bulk
from ase.io import Trajectory
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet

from nepserve.client.ase import NEPCalculator


def main() -> None:
    parser = argparse.ArgumentParser(description="NVE dynamics of a bulk element with a served model.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--model", help="name of the model, if the server has several")
    parser.add_argument("--element", default="Si", help="an element that the model knows")
    parser.add_argument("--repeat", type=int, default=2, help="cubic cells along each axis")
    parser.add_argument("--temperature", type=float, default=300.0, help="K")
    parser.add_argument("--steps", type=int, default=200, help="steps of 1 fs")
    parser.add_argument("--output", help="trajectory file")
    arguments = parser.parse_args()

    atoms = bulk(arguments.element, cubic=True) * ((arguments.repeat,) * 3)
    atoms.calc = NEPCalculator(arguments.url, arguments.model)
    # A server that is still starting is waited for; one that is not there is reported after this time.
    atoms.calc.client.wait_until_ready(60)

    # Half of it goes into the potential energy when the crystal starts from its equilibrium.
    rng = np.random.default_rng(0)
    MaxwellBoltzmannDistribution(atoms, temperature_K=2 * arguments.temperature, rng=rng)
    dynamics = VelocityVerlet(atoms, 1 * units.fs)
    if arguments.output:
        dynamics.attach(Trajectory(arguments.output, "w", atoms).write, interval=10)

    def report() -> None:
        print(
            f"step {dynamics.nsteps:6d}  total {atoms.get_total_energy() / len(atoms):12.6f} eV/atom  "
            f"{atoms.get_temperature():7.1f} K  pressure {-atoms.get_stress()[:3].mean() / units.GPa:8.3f} GPa"
        )

    dynamics.attach(report, interval=max(arguments.steps // 10, 1))
    dynamics.run(arguments.steps)


if __name__ == "__main__":
    main()
