"""A process that runs LAMMPS as a list of things to do says, and writes down what LAMMPS knows.

    python lammps_host.py JOB.json

The job: ``url``, ``attach`` (arguments of attach), ``prepare`` (commands before), ``client`` (options of the client),
``computes`` (false: none), ``output``, and ``do``, a list of [what, value]:

``command``, ``plain``  a LAMMPS command, past the bridge
``run``                 steps, or a command, through the bridge
``raises``              the same, and it must raise; what, at which step and with what forces is written down
``take``                the state of all atoms by id, under that name
``global``              the vector of that compute
``energy``              the total energy, one after the other into ``energies``
``say``, ``wait``       a line to the standard output, one from the standard input
``fail``                the client fails after so many more evaluations
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from lammps import LMP_STYLE_ATOM, LMP_STYLE_GLOBAL, LMP_TYPE_ARRAY, LMP_TYPE_VECTOR, lammps

from nepserve.client import Client, ConnectionFailed
from nepserve.client.lammps import attach

COMPUTES = """
compute virial all pressure NULL virial
compute stress all stress/atom NULL virial
compute energies all pe/atom
compute kinetic all ke/atom
compute flux all heat/flux kinetic energies stress
thermo_style custom step pe etotal press c_virial[1] c_flux[1]
thermo_modify norm no format float %20.15g
fix stored all store/state 1 c_stress[1] c_energies
"""


class Fragile(Client):
    """A client that can be told to fail."""

    left = None

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        call = self.exchange.call

        def counted(method, path, *more, **options):
            if self.left is not None and path.endswith(("/v1/evaluate", "/positions")):
                if self.left == 0:
                    raise ConnectionFailed("told to fail", url=self.url)
                self.left -= 1
            return call(method, path, *more, **options)

        self.exchange.call = counted


def take(lmp, comm):
    """Everything, in the order of the ids, on every rank."""
    n = lmp.extract_setting("nlocal")
    local = {
        name: np.array(lmp.numpy.extract_atom(name)[:n]) if n else np.zeros((0, 3) if name in "xfv" else 0)
        for name in ("id", "type", "x", "f", "v")
    }
    # Collective: every rank asks.
    for name, kind in (("stress", LMP_TYPE_ARRAY), ("energies", LMP_TYPE_VECTOR)):
        found = np.array(lmp.numpy.extract_compute(name, LMP_STYLE_ATOM, kind))
        local[name] = found[:n] if n else np.zeros((0, 6) if kind == LMP_TYPE_ARRAY else 0)
    parts = [local] if comm is None else comm.allgather(local)
    whole = {name: np.concatenate([part[name] for part in parts]) for name in local}
    order = np.argsort(whole["id"])
    whole = {name: value[order] for name, value in whole.items()}
    low, high, xy, yz, xz, periodic, _ = lmp.extract_box()
    side = np.subtract(high, low)
    whole["cell"] = np.array([[side[0], 0, 0], [xy, side[1], 0], [xz, yz, side[2]]])
    whole["pbc"] = np.array(periodic)
    whole["pe"] = np.array(lmp.get_thermo("pe"))
    whole["etotal"] = np.array(lmp.get_thermo("etotal"))
    whole["press"] = np.array(lmp.get_thermo("press"))
    whole["virial"] = np.array(lmp.numpy.extract_compute("virial", LMP_STYLE_GLOBAL, LMP_TYPE_VECTOR))
    whole["flux"] = np.array(lmp.numpy.extract_compute("flux", LMP_STYLE_GLOBAL, LMP_TYPE_VECTOR))[:3]
    whole["step"] = np.array(lmp.extract_global("ntimestep"))
    return whole


def main(path):
    job = json.loads(Path(path).read_text())
    lmp = lammps(cmdargs=["-log", "none", "-screen", "none", "-nocite"])
    comm = lmp.comm if lmp.extract_setting("world_size") > 1 else None
    first = comm is None or comm.rank == 0
    lmp.commands_list(
        [*job["prepare"], *COMPUTES.strip().splitlines()] if job.get("computes", True) else job["prepare"]
    )
    client = Fragile(job["url"], **job.get("client", {}))
    nep = attach(lmp, "nep", client, **job["attach"])
    kept = {}
    energies = []
    for what, value in job["do"]:
        if what == "command":
            lmp.command(value)
        elif what == "run":
            nep.run(value)
        elif what == "plain":
            lmp.command(value)
        elif what == "take":
            kept |= {f"{value}/{name}": array for name, array in take(lmp, comm).items()}
        elif what == "say":
            if first:
                print(value, flush=True)
        elif what == "global":
            kept[value] = np.array(lmp.numpy.extract_compute(value, LMP_STYLE_GLOBAL, LMP_TYPE_VECTOR))
        elif what == "energy":
            energies.append(lmp.get_thermo("etotal"))
        elif what == "wait":
            sys.stdin.readline()
        elif what == "fail":
            client.left = value
        elif what == "raises":
            try:
                nep.run(value)
            except Exception as error:  # the test looks at what it was
                kept["raised"] = np.array(f"{type(error).__name__}: {error}")
                kept["step"] = np.array(lmp.extract_global("ntimestep"))
                kept["f"] = np.array(lmp.numpy.extract_atom("f"))
            else:
                raise AssertionError("nothing was raised")
    kept["energies"] = np.array(energies)
    if first:
        np.savez(job["output"], **kept)
    print("finished", flush=True)
    lmp.close()


if __name__ == "__main__":
    main(sys.argv[1])
