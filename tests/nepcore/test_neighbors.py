"""Neighbour search against a direct sum over images, and against an independent library."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
import vesin

import crystals
from nepcore import Structure, Structures
from nepcore.batch import Batch, complete_cells
from nepcore.neighbors import Bins

TYPES = np.zeros(256, np.int64)


def found_pairs(structures: Structures, cutoff: float, budget: int = 10_000) -> list[list[tuple[int, int, float]]]:
    """Pairs (i, j, distance) of each structure, numbered within it, in the order of the search."""
    batch = Batch.of(structures, TYPES, torch.device("cpu"))
    out: list[list[tuple[int, int, float]]] = [[] for _ in range(len(structures))]
    for pairs in Bins.of(batch, cutoff).pairs(budget):
        for i, j, vector, r in zip(
            (pairs.i + pairs.start).tolist(),
            pairs.j.tolist(),
            pairs.vector.numpy(),
            pairs.distance.tolist(),
            strict=True,
        ):
            s = int(batch.structure[i])
            assert int(batch.structure[j]) == s
            assert np.linalg.norm(vector) == pytest.approx(r)
            out[s].append((i - int(structures.offsets[s]), j - int(structures.offsets[s]), r))
    return out


def direct_pairs(s: Structure, cutoff: float) -> list[tuple[int, int, float]]:
    """All pairs by brute force over more images than can matter."""
    cell = complete_cells(s.cell[None], s.pbc[None])[0]
    height = 1.0 / np.linalg.norm(np.linalg.inv(cell), axis=0)
    fractional = s.positions @ np.linalg.inv(cell)
    spread = np.ptp(fractional, axis=0)
    reach = np.where(s.pbc, np.ceil(cutoff / height + spread) + 1, 0).astype(int)
    out = []
    for image in product(*(range(-r, r + 1) for r in reach)):
        d = s.positions[None] + np.array(image) @ cell - s.positions[:, None]
        r = np.linalg.norm(d, axis=2)
        for i, j in np.argwhere(r < cutoff):
            if i != j or any(image):
                out.append((int(i), int(j), float(r[i, j])))
    return out


def same(found: list[tuple[int, int, float]], wanted: list[tuple[int, int, float]], cutoff: float = 5.0) -> None:
    """The same pairs; those at the very cutoff, where rounding decides and everything vanishes, are left out."""
    found = [p for p in found if abs(p[2] - cutoff) > 1e-9]
    wanted = [p for p in wanted if abs(p[2] - cutoff) > 1e-9]
    assert [p[0] for p in found] == sorted(p[0] for p in found), "centres come in order"
    found, wanted = sorted(found), sorted(wanted)
    assert [p[:2] for p in found] == [p[:2] for p in wanted]
    assert np.allclose([p[2] for p in found], [p[2] for p in wanted], atol=1e-9)


@pytest.mark.parametrize("pbc", crystals.PERIODICITIES, ids=lambda p: "".join("FT"[b] for b in p))
@pytest.mark.parametrize("n", [1, 2, 9, 30])
def test_every_periodicity(n: int, pbc: tuple[bool, ...]) -> None:
    s = crystals.random_structure(n, ("Si",), n=n, pbc=pbc)
    same(found_pairs(Structures.pack([s]), 5.0)[0], direct_pairs(s, 5.0))


@pytest.mark.parametrize(
    "cell",
    [
        np.diag([2.0, 2.3, 2.6]),
        np.array([[3.0, 0, 0], [11.0, 3.0, 0], [-7.0, 8.0, 3.0]]),
        np.array([[0, 3.0, 0], [3.0, 0, 0], [0, 0, 3.5]]),
        np.diag([40.0, 2.5, 3.0]),
        np.diag([5.0, 10.0, 12.5]),
    ],
    ids=["tiny", "skewed", "left-handed", "needle", "thresholds"],
)
def test_awkward_cells(cell: np.ndarray) -> None:
    rng = np.random.default_rng(3)
    positions = (rng.random((4, 3)) * 6.0 - 3.0) @ cell  # also far outside the cell
    s = Structure.make(["Si"] * 4, positions, cell)
    same(found_pairs(Structures.pack([s]), 5.0)[0], direct_pairs(s, 5.0))


def test_a_very_skewed_cell_needs_no_more_images_than_its_lattice() -> None:
    cell = np.diag([3.0, 3.5, 4.0])
    skewed = np.array([[1, 0, 0], [5000, 1, 0], [-3000, 7000, 1]]) @ cell
    positions = np.array([[0.1, 0.2, 0.3], [1.4, 1.5, 2.0]])
    plain, hard = (Structure.make(["Si", "Si"], positions, c) for c in (cell, skewed))
    bins = Bins.of(Batch.of(Structures.pack([hard]), TYPES, torch.device("cpu")), 5.0)
    assert int(np.prod(bins.spans[0])) < 1000
    same(found_pairs(Structures.pack([hard]), 5.0)[0], found_pairs(Structures.pack([plain]), 5.0)[0])


@pytest.mark.parametrize("d", [4.999999, 5.0, 5.000001, 9.999999, 10.0, 10.000001, 12.5])
def test_thickness_at_the_cutoff(d: float) -> None:
    s = Structure.make(["Si", "Si"], [[0.1, 0.2, 0.3], [2.4, 0.5, 0.9]], np.diag([d, 11.0, 13.0]))
    same(found_pairs(Structures.pack([s]), 5.0)[0], direct_pairs(s, 5.0))


def test_against_an_independent_search() -> None:
    s = crystals.random_structure(5, ("Si",), n=150)
    i, j, d = vesin.NeighborList(cutoff=6.0, full_list=True).compute(
        points=s.positions, box=s.cell, periodic=True, quantities="ijd"
    )
    same(found_pairs(Structures.pack([s]), 6.0)[0], list(zip(i.tolist(), j.tolist(), d.tolist(), strict=True)))


def test_structures_of_a_batch_do_not_see_each_other_whatever_the_pieces() -> None:
    items = [crystals.random_structure(k, ("Si",), n=3 + 5 * k, pbc=p) for k, p in enumerate(crystals.PERIODICITIES)]
    alone = [found_pairs(Structures.pack([s]), 4.5)[0] for s in items]
    for budget in (1, 50, 100_000):
        assert found_pairs(Structures.pack(items), 4.5, budget) == alone


def test_neighbors_come_by_number_then_image() -> None:
    s = crystals.diamond((1, 1, 1))
    batch = Batch.of(Structures.pack([s]), TYPES, torch.device("cpu"))
    (pairs,) = Bins.of(batch, 8.0).pairs(10**7)
    key = pairs.i * len(s) + pairs.j
    assert torch.equal(key, key.sort().values)
    shift = (pairs.vector - batch.positions[pairs.j] + batch.positions[pairs.i]) @ torch.from_numpy(
        np.linalg.inv(s.cell)
    )
    image = shift.round().to(torch.int64)
    number = (image[:, 0] * 1000 + image[:, 1]) * 1000 + image[:, 2]
    within = key[1:] == key[:-1]
    assert bool((number[1:] > number[:-1])[within].all())


def test_far_atoms_make_few_bins() -> None:
    far = Structure.make(["Si"] * 3, [[0, 0, 0], [1e8, 2e8, -3e8], [1e8 + 2.0, 2e8, -3e8]])
    structures = Structures.pack([far])
    assert [p[:2] for p in found_pairs(structures, 5.0)[0]] == [(1, 2), (2, 1)]
    bins = Bins.of(Batch.of(structures, TYPES, torch.device("cpu")), 5.0)
    assert len(bins.bounds) < 100


def test_isolated_atoms_and_no_atoms() -> None:
    lone = Structure.make(["Si"], [[1.0, 2.0, 3.0]])
    assert found_pairs(Structures.pack([lone, lone]), 5.0) == [[], []]
    assert found_pairs(Structures.empty(), 5.0) == []
