"""Structures for tests: random, crystalline, of every periodicity; deterministic for a seed."""

from __future__ import annotations

from itertools import product

import numpy as np

from nepcore import Structure

DIAMOND = np.array(
    [
        *([0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]),
        *([0.25, 0.25, 0.25], [0.25, 0.75, 0.75], [0.75, 0.25, 0.75], [0.75, 0.75, 0.25]),
    ]
)
PERIODICITIES = list(product([True, False], repeat=3))


def random_structure(seed: int, elements: tuple[str, ...], *, n: int = 12, pbc: object = True) -> Structure:
    """Atoms at least 1.6 Å apart (images too) in a random triclinic cell of ordinary density."""
    rng = np.random.default_rng(seed)
    edge = (n * 18.0) ** (1 / 3)
    cell = np.eye(3) * edge + rng.normal(0, 0.12 * edge, (3, 3))
    shifts = np.array(list(product((-1, 0, 1), repeat=3))) @ cell
    positions: list[np.ndarray] = []
    for _ in range(100_000):
        if len(positions) == n:
            break
        candidate = rng.random(3) @ cell
        others = [(p[None] + shifts) for p in positions]
        if all(np.linalg.norm(o - candidate, axis=1).min() > 1.6 for o in others):
            positions.append(candidate)
    assert len(positions) == n
    species = rng.choice(elements, n)
    return Structure.make([str(s) for s in species], np.array(positions), cell, pbc, 300.0)


def diamond(
    repeat: tuple[int, int, int] = (1, 1, 1), *, a: float = 5.43, rattle: float = 0.05, seed: int = 0
) -> Structure:
    """Rattled diamond silicon."""
    rng = np.random.default_rng(seed)
    shifts = np.array(list(product(*(range(r) for r in repeat))))
    sites = (shifts[:, None, :] + DIAMOND).reshape(-1, 3) * a
    return Structure.make(["Si"] * len(sites), sites + rng.normal(0, rattle, sites.shape), np.diag(repeat) * a)


def replace(structure: Structure, **changes: object) -> Structure:
    """The structure with some of its attributes changed."""
    values = {name: getattr(structure, name) for name in ("numbers", "positions", "cell", "pbc", "temperature")}
    values.update(changes)
    return Structure(**values)
