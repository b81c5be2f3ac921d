"""Which neighbours the compiled CPU backend finds, in which order, and what it says of impossible input."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("numba")

import crystals
from nepcore import Structure, Structures, synthetic
from nepcore.backends.fused_cpu import FusedCPU
from nepcore.backends.fused_cpu.kernels import FIRST, LAST

if TYPE_CHECKING:
    from collections.abc import Generator

    from nepcore.structures import Predictions

CUTOFF = 5.0


@pytest.fixture(scope="module")
def backend() -> FusedCPU:
    return FusedCPU(synthetic.make_model(("Si", "C"), cutoff=(CUTOFF, 4.0), seed=1), "float64", 2)


def evaluate(backend: FusedCPU, items: list[Structure]) -> Predictions:
    out = []

    def whole() -> Generator[int, None, None]:
        out.append((yield from backend.run(Structures.pack(items), frozenset(("energy", "forces", "virials")))))

    assert sum(whole()) == sum(map(len, items))
    return out[0]


def pairs_of(backend: FusedCPU, structure: Structure) -> list[list[tuple[int, tuple[float, ...]]]]:
    """Neighbours and edges of every atom as the backend lays them out, from the pair arrays it leaves behind."""
    from nepcore.backends.fused_cpu import task

    kept: list[Any] = []

    class Spy(task.Task):
        def _piece(self, group: Any, start: int) -> int:
            kept[:] = [group]
            return super()._piece(group, start)

    near: dict[int, list[tuple[int, tuple[float, ...]]]] = {}
    spy = Spy(backend, Structures.pack([structure]), frozenset(("forces", "virials")))
    for _ in spy.run():
        (group,) = kept
        n = len(structure)
        (_, whole, _, order, _), (_, neighbor, _, edge) = group.kept[1:3]
        first, last = group.job[FIRST], group.job[LAST]
        blocks = group.plan.blocks
        for place in range(int(blocks.begin[first]), int(blocks.end[last - 1])):
            a = int(whole[3 * n + place])
            b = a + int(whole[4 * n + place])
            j = neighbor[a:b].tolist()
            edges = map(tuple, edge[3 * a : 3 * b].reshape(-1, 3).tolist())
            near[int(order[place])] = list(zip(j, edges, strict=True))
    return [near[i] for i in range(len(structure))]


def brute_force(structure: Structure) -> list[list[tuple[int, tuple[float, ...]]]]:
    """All images that could matter, tried one by one, in the order of atom and image."""
    cell = np.where(structure.pbc[:, None], structure.cell, 0.0)
    reach = [0, 0, 0]
    if structure.pbc.any():
        full = cell.copy()
        # Fill missing directions with what lies across the others: the thickness of the periodic ones is not changed.
        _, _, v = np.linalg.svd(cell[structure.pbc])
        full[~structure.pbc] = v[int(structure.pbc.sum()) :]
        inverse = np.linalg.inv(full)
        spread = np.ptp(structure.positions @ inverse, axis=0)
        height = 1.0 / np.linalg.norm(inverse, axis=0)
        reach = [
            int(np.ceil(CUTOFF / h + s)) + 1 if p else 0 for h, s, p in zip(height, spread, structure.pbc, strict=True)
        ]
    images = np.array(list(product(*(range(-r, r + 1) for r in reach))))
    out = []
    for x in structure.positions:
        found = []
        for j, y in enumerate(structure.positions):
            edges = y - x + images @ cell
            r = np.linalg.norm(edges, axis=1)
            found += [(j, tuple(e)) for e in edges[(r < CUTOFF) & (r > 0)].tolist()]
        out.append(found)
    return out


def shapes() -> dict[str, Structure]:
    rng = np.random.default_rng(3)
    elements = ("Si", "C")
    items = {f"random {''.join('FT'[p] for p in pbc)}": crystals.random_structure(k, elements, pbc=pbc)
             for k, pbc in enumerate(crystals.PERIODICITIES)}  # fmt: skip
    items["one atom"] = Structure.make(
        ["Si"], [[0.1, 0.2, 0.3]], np.array([[0, 1.4, 1.4], [1.4, 0, 1.4], [1.4, 1.4, 0]])
    )
    items["thin"] = Structure.make(["Si", "C"], [[0, 0, 0], [0.6, 9.0, 4.0]], np.diag([0.9, 30.0, 8.0]))
    items["skewed"] = Structure.make(
        ["Si", "C"], [[0, 0, 0], [1, 2, 1]], [[3.0, 0, 0], [14.0, 3.1, 0], [-9.0, 5.0, 2.9]]
    )
    items["left-handed"] = Structure.make(
        ["Si", "C"], [[0, 0, 0], [1, 2, 1]], [[0, 0, 4.0], [0, 3.5, 1], [3.0, 0.2, 0]]
    )
    items["outside"] = Structure.make(["Si", "C"], [[-71.0, 3, 55], [208, -30, -4]], np.diag([4.0, 5.0, 6.0]))
    items["far molecule"] = Structure.make(["Si"] * 30, rng.random((30, 3)) * 9 + [1e6, -2e6, 3e6])
    items["two clusters"] = Structure.make(
        ["Si"] * 40, np.vstack([rng.random((20, 3)) * 6, rng.random((20, 3)) * 6 + [1e7, 0, 0]])
    )
    items["in a plane"] = Structure.make(["C"] * 50, np.c_[rng.random((50, 2)) * 20, np.zeros(50)])
    items["on a line"] = Structure.make(["C"] * 50, np.c_[np.arange(50) * 1.3, np.zeros((50, 2))])
    items["slab with a long vector"] = Structure.make(
        ["C"] * 30, rng.random((30, 3)) * [8, 8, 4], [[8, 0, 0], [1, 8, 0], [3, 4, 1e6]], (True, True, False)
    )
    items["wire along y"] = Structure.make(
        ["C"] * 20, rng.random((20, 3)) * [5, 7, 5], np.diag([0.0, 7.0, 0.0]), (False, True, False)
    )
    items["dense"] = Structure.make(["C"] * 200, rng.random((200, 3)) * 4.2)
    items["empty box"] = Structure.make(["C", "C"], [[0, 0, 0], [500, 500, 500]], np.eye(3) * 1000)
    items["faces"] = Structure.make(["C"] * 8, np.array(list(product((0.0, 3.0), repeat=3))), np.eye(3) * 6.0)
    return items


@pytest.mark.parametrize("name", shapes())
def test_neighbors_and_their_order(backend: FusedCPU, name: str) -> None:
    structure = shapes()[name]
    scale = max(1.0, float(np.abs(structure.positions).max()))
    for found, wanted in zip(pairs_of(backend, structure), brute_force(structure), strict=True):
        assert [j for j, _ in found] == [j for j, _ in wanted]
        if not found:
            continue
        a, b = np.array([e for _, e in found]), np.array([e for _, e in wanted])
        # Images of one atom come in one order; wrapping may number them from elsewhere, which keeps it.
        assert np.allclose(a, b, rtol=0, atol=1e-14 * scale + 1e-12)


def test_like_vesin(backend: FusedCPU) -> None:
    vesin = pytest.importorskip("vesin")
    for seed in range(3):
        structure = crystals.diamond((5, 4, 6), rattle=0.2, seed=seed)
        structure = crystals.replace(structure, cell=structure.cell + np.array([[0, 3, 1], [0, 0, 2], [0, 0, 0]]))
        found = {(i, j, *np.round(e, 6)) for i, near in enumerate(pairs_of(backend, structure)) for j, e in near}
        i, j, d = vesin.NeighborList(cutoff=CUTOFF, full_list=True).compute(
            points=structure.positions, box=structure.cell, periodic=True, quantities="ijD"
        )
        assert len(i) == len(found)
        assert {(int(a), int(b), *np.round(e, 6)) for a, b, e in zip(i, j, d, strict=True)} == found


def test_pairs_at_the_cutoff_do_not_count(backend: FusedCPU) -> None:
    def at(r: float) -> Structure:
        return Structure.make(["Si", "Si"], [[0, 0, 0], [r, 0, 0]])

    below = np.nextafter(CUTOFF, 0)
    assert [len(near) for near in pairs_of(backend, at(CUTOFF))] == [0, 0]
    assert [len(near) for near in pairs_of(backend, at(below))] == [1, 1]


def test_more_neighbors_than_any_room(backend: FusedCPU) -> None:
    """Thousands of neighbours an atom, in the same block as ordinary structures."""
    grid = np.array(list(product(range(9), repeat=3))) * 0.25
    dense = Structure.make(["Si"] * 729, grid + np.random.default_rng(0).normal(0, 0.01, grid.shape))
    crystal = crystals.diamond((2, 2, 2))
    result = evaluate(backend, [crystal, dense, crystal])
    assert result["energy"][0] == result["energy"][2] == evaluate(backend, [crystal])["energy"][0]
    wanted = [len(near) for near in brute_force(dense)]
    assert max(wanted) == 728
    assert [len(near) for near in pairs_of(backend, dense)] == wanted


@pytest.mark.parametrize(
    ("structure", "atoms", "words"),
    [
        (Structure.make(["C"] * 3, [[5, 0, 0], [0, 0, 0], [5, 0, 0]]), (0, 2), "atoms 1 and 3 coincide"),
        (Structure.make(["C", "C"], [[0, 0, 0], [4, 8, 0]], np.eye(3) * 4), (0, 1), "atoms 1 and 2 coincide"),
        (Structure.make(["C", "C"], [[0, 0, 0], [0, 0, 5e-6]]), (0, 1), "atoms 1 and 2 coincide"),
    ],
    ids=["same place", "image on top", "almost"],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_atoms_at_one_place(structure: Structure, atoms: tuple[int, ...], words: str, dtype: str) -> None:
    backend = FusedCPU(synthetic.make_model(("Si", "C"), cutoff=(CUTOFF, 4.0), seed=1), dtype, 1)
    good = crystals.random_structure(1, ("Si", "C"))
    result = evaluate(backend, [good, structure, good])
    assert set(result.errors) == {1}
    assert result.errors[1].code == "coincident_atoms"
    assert result.errors[1].atoms == atoms
    assert words in result.errors[1].reason
    a, b = result.offsets[1:3]
    assert np.isnan(result.values["forces"][a:b]).all()
    assert np.isfinite(result.values["forces"][:a]).all()
    assert np.isfinite(result.values["forces"][b:]).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("r", [1.1e-5, 1e-3, 0.05])
def test_very_near_atoms_give_numbers(r: float, dtype: str) -> None:
    model = synthetic.make_model(("Si", "C"), zbl="universal", seed=1)
    result = evaluate(FusedCPU(model, dtype, 1), [Structure.make(["Si", "C"], [[0, 0, 0], [0, r, 0]])])
    assert np.isfinite(result["energy"]).all()
    assert np.isfinite(result["forces"]).all()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"positions": np.full((12, 3), np.nan)}, "non_finite"),
        ({"positions": np.full((12, 3), np.inf)}, "non_finite"),
        ({"positions": np.full((12, 3), 1e300)}, "non_finite"),
        ({"cell": np.zeros((3, 3))}, "singular_cell"),
        ({"cell": np.ones((3, 3))}, "singular_cell"),
        ({"cell": np.full((3, 3), np.nan)}, "singular_cell"),
        ({"cell": np.full((3, 3), 1e300)}, "singular_cell"),
        ({"cell": np.diag([1e-9, 1e-9, 5.0])}, "too_dense"),
        ({"cell": np.diag([9.0, 9.0, 5e-6])}, "too_dense"),
        ({"numbers": np.full(12, 92, np.uint8)}, "unknown_element"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_input_that_no_admission_lets_in(backend: FusedCPU, changes: dict[str, Any], code: str) -> None:
    """It is not let in, but if it were, it would be an error and not a crash."""
    good = crystals.random_structure(1, ("Si", "C"))
    with np.errstate(invalid="ignore", over="ignore"):
        result = evaluate(backend, [good, crystals.replace(good, **changes), good])
    assert {i: e.code for i, e in result.errors.items()} == {1: code}
    assert np.isnan(result.values["energy"][1])
    assert result.values["energy"][0] == result.values["energy"][2] == evaluate(backend, [good])["energy"][0]
