"""Training data from ASE's EMT calculator: Al, Ni, Cu, Pd, Ag, Pt, Au and their alloys.

    python make_data.py -o . --frames 2000        # train.xyz and test.xyz, five minutes on one core

EMT (effective medium theory) is an empirical potential that costs next to nothing, so that a training can be tried out,
and its errors measured on as many unseen frames as wanted. A model of it is a demonstration: it is no better than EMT.

Kinds of frames, named in ``config_type``: bulk, strained, rattled, alloy, surface, vacancy, liquid; 45 to 144 atoms,
about 95 in the mean. The same seed gives the same frames. Labels: energy (eV), forces (eV/Å), virial −V σ (eV).
Random alloys and large displacements bring atoms too close now and then: frames with forces above ``--max-force``
(10 eV/Å) are left out, about a fifth.
"""

from __future__ import annotations

import argparse
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.build import bulk, fcc100, fcc110, fcc111
from ase.calculators.emt import EMT
from ase.io import write
from ase.md.langevin import Langevin

LATTICE = {"Al": 4.00, "Ni": 3.49, "Cu": 3.59, "Pd": 3.88, "Ag": 4.06, "Pt": 3.92, "Au": 4.06}
"""Lattice parameters of EMT, Å, to two digits."""

METALS = tuple(LATTICE)
SHARES = {"bulk": 1, "strained": 3, "rattled": 3, "alloy": 6, "surface": 3, "vacancy": 2, "liquid": 2}
BOXES = ((2, 2, 4), (2, 3, 3), (2, 3, 4), (3, 3, 3), (3, 3, 4))
"""Cubic cells of a box: 64 to 144 atoms."""

SNAPSHOTS = 6
"""Frames taken from one liquid."""


def crystal(rng: np.random.Generator, symbol: str) -> Atoms:
    """A box of a cubic crystal."""
    cell = bulk(symbol, "fcc", a=LATTICE[symbol], cubic=True)
    return cell.repeat(BOXES[int(rng.integers(len(BOXES)))])


def strained(rng: np.random.Generator, atoms: Atoms, size: float) -> Atoms:
    """The box and its atoms, deformed by up to ``size`` in all six ways, and by half of it in volume."""
    strain = rng.uniform(-size, size, (3, 3))
    strain = 0.25 * (strain + strain.T) + rng.uniform(-size, size) * np.eye(3)
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
    return atoms


def rattled(rng: np.random.Generator, atoms: Atoms, size: float) -> Atoms:
    """Every coordinate moved by a normal deviate."""
    atoms.positions += rng.normal(0.0, size, atoms.positions.shape)
    return atoms


def mixed(rng: np.random.Generator, atoms: Atoms, most: int = 7) -> Atoms:
    """Sites given to two to ``most`` metals at random, the box scaled to the mean of their lattices."""
    metals = rng.choice(METALS, size=int(rng.integers(2, most + 1)), replace=False)
    before = LATTICE[atoms[0].symbol]
    symbols = rng.choice(metals, size=len(atoms), p=rng.dirichlet(np.ones(len(metals))))
    atoms.symbols[:] = symbols
    after = float(np.mean([LATTICE[s] for s in symbols]))
    atoms.set_cell(atoms.cell.array * (after / before), scale_atoms=True)
    return atoms


def surface(rng: np.random.Generator, symbol: str) -> Atoms:
    """A slab of a low-index face in a periodic box with 8 to 12 Å of vacuum."""
    make = (fcc100, fcc110, fcc111)[int(rng.integers(3))]
    size = (3, 3, int(rng.integers(5, 10)))
    slab = make(symbol, size, a=LATTICE[symbol], vacuum=float(rng.uniform(4.0, 6.0)))
    slab.pbc = True
    return slab


def liquid(rng: np.random.Generator) -> list[Atoms]:
    """Snapshots of a melt of one to four metals, 1500 to 3500 K, at some density."""
    atoms = strained(rng, crystal(rng, str(rng.choice(METALS))), 0.04)
    if rng.random() < 0.7:
        atoms = mixed(rng, atoms, most=4)
    temperature = float(rng.uniform(1500.0, 3500.0))
    atoms.calc = EMT()
    # Twice the temperature: half of it goes into the displacements.
    speed = np.sqrt(2.0 * units.kB * temperature / atoms.get_masses())
    atoms.set_velocities(speed[:, None] * rng.normal(size=(len(atoms), 3)))
    motion = Langevin(atoms, 3.0 * units.fs, temperature_K=temperature, friction=0.05 / units.fs, fixcm=False, rng=rng)
    motion.run(150)
    found = []
    for _ in range(SNAPSHOTS):
        motion.run(30)
        found.append(Atoms(atoms.symbols, atoms.positions, cell=atoms.cell, pbc=True))
    return found


def one(rng: np.random.Generator, kind: str, symbol: str) -> Atoms:
    """A frame of a kind that is not liquid."""
    if kind == "surface":
        atoms = surface(rng, symbol)
        if rng.random() < 0.5:
            atoms = mixed(rng, atoms)
            # Vacuum was scaled with the slab, which does no harm.
        return rattled(rng, atoms, float(rng.uniform(0.0, 0.15)))
    atoms = crystal(rng, symbol)
    if kind == "bulk":
        return rattled(rng, atoms, float(rng.uniform(0.0, 0.02)))
    if kind == "strained":
        return rattled(rng, strained(rng, atoms, 0.09), 0.02)
    if kind == "rattled":
        return rattled(rng, strained(rng, atoms, 0.03), float(rng.uniform(0.05, 0.25)))
    if kind == "vacancy":
        if rng.random() < 0.5:
            atoms = mixed(rng, atoms)
        del atoms[rng.choice(len(atoms), size=int(rng.integers(1, 5)), replace=False).tolist()]
        return rattled(rng, strained(rng, atoms, 0.03), float(rng.uniform(0.0, 0.15)))
    return rattled(rng, strained(rng, mixed(rng, atoms), 0.05), float(rng.uniform(0.0, 0.2)))


def labelled(atoms: Atoms, kind: str) -> Atoms:
    """The frame with the labels that EMT gives it."""
    atoms.wrap()
    atoms.calc = EMT()
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    virial = -atoms.get_volume() * atoms.get_stress(voigt=False)
    frame = Atoms(atoms.symbols, atoms.positions, cell=atoms.cell, pbc=True)
    frame.arrays["forces"] = forces
    frame.info.update(energy=energy, virial=virial, config_type=kind)
    return frame


def frames(count: int, seed: int) -> list[Atoms]:
    """``count`` labelled frames of all kinds, shuffled."""
    rng = np.random.default_rng(seed)
    total = sum(SHARES.values())
    found: list[Atoms] = []
    metals = cycle(METALS)
    for kind, share in SHARES.items():
        wanted = max(1, round(count * share / total))
        if kind == "liquid":
            melts = [liquid(rng) for _ in range(-(-wanted // SNAPSHOTS))]
            made = [atoms for melt in melts for atoms in melt]
        else:
            made = [one(rng, kind, symbol) for symbol in islice(metals, wanted)]
        found += [labelled(atoms, kind) for atoms in made[:wanted]]
    order = rng.permutation(len(found))[:count]
    return [found[i] for i in order]


def main() -> None:
    """Write ``train.xyz`` and ``test.xyz``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path())
    parser.add_argument("--frames", type=int, default=2000, help="frames made to train on; a tenth as many to test")
    parser.add_argument("--max-force", type=float, default=10.0, help="frames with larger forces are left out, eV/Å")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    # Other frames, not a share of the same ones: a liquid's snapshots are alike.
    for name, count, seed in (("train", options.frames, options.seed), ("test", options.frames // 10, -options.seed)):
        made = frames(count, seed % 2**32)
        made = [f for f in made if np.linalg.norm(f.arrays["forces"], axis=1).max() <= options.max_force]
        write(options.output / f"{name}.xyz", made, format="extxyz")
        atoms = sum(map(len, made))
        print(f"{options.output / name}.xyz: {len(made)} frames, {atoms} atoms, {atoms / len(made):.0f} a frame")


if __name__ == "__main__":
    main()
