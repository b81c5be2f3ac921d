"""Energies and forces of thousands of structures, evaluated in bulk by a server.

    nepserve serve nep.txt                            # in one shell
    python examples/many_structures.py data.xyz       # in another

Needs ASE to read the file. Structures that the model cannot evaluate are reported and left out; all others are right.
(`nepserve predict data.xyz --url http://127.0.0.1:8000` does the same on the command line.)
"""

from __future__ import annotations

import argparse
import time

import ase.io
import numpy as np

from nepserve.client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate every structure of a file on a server.")
    parser.add_argument("file", help="anything that ASE reads")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--model", help="name of the model, if the server has several")
    parser.add_argument("--output", help="npz file for the packed results")
    arguments = parser.parse_args()

    structures = ase.io.read(arguments.file, ":")
    with Client(arguments.url, model=arguments.model) as client:
        started = time.perf_counter()
        result = client.evaluate_many(
            structures,
            ["energy", "forces"],
            on_error="return",
            progress=lambda done, total: print(f"\r{done} of {total}", end="", flush=True),
        )
        seconds = time.perf_counter() - started

    good = np.ones(len(result), bool)
    good[list(result.errors)] = False
    atoms = int(result.counts.sum())
    print(f"\r{good.sum()} structures, {atoms} atoms in {seconds:.2f} s")
    for index, error in sorted(result.errors.items()):
        print(f"structure {index + 1}: {error.reason}")
    if good.any():
        energy = result.values["energy"][good] / result.counts[good]
        forces = np.linalg.norm(result.values["forces"], axis=1)
        print(f"energy {energy.min():.6f} to {energy.max():.6f} eV/atom, largest force {np.nanmax(forces):.4f} eV/Å")
    if arguments.output:
        # One row of `energy` a structure; the forces of structure i are rows offsets[i] to offsets[i + 1].
        np.savez(arguments.output, n_atoms=result.counts, offsets=result.offsets, **result.values)


if __name__ == "__main__":
    main()
