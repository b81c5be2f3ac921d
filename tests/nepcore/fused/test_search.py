"""Neighbour lists of the fused backend against those of nepcore.neighbors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import crystals
from nepcore import Structure, Structures, synthetic
from nepcore.batch import Batch
from nepcore.neighbors import Bins

pytest.importorskip("triton")

from nepcore.backends.fused import cells, large, search, small
from nepcore.backends.fused.backend import Fused, room
from nepcore.backends.fused.branches import Branches
from nepcore.backends.fused.forward import RADIAL

if TYPE_CHECKING:
    from nepcore.backends.fused.lists import Lists, Tables

CUTOFF = (5.0, 3.5)
MODEL = synthetic.make_model(("Si", "C", "O"), cutoff=CUTOFF, seed=1)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu"


@pytest.fixture
def no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search alone."""

    def nothing(*given: object) -> None:
        # What comes on this branch afterwards waits for the search, as it does for the network otherwise.
        for branches in given:
            if isinstance(branches, Branches):
                with branches.aside(RADIAL):
                    pass

    for module in (small, large):
        monkeypatch.setattr(module, "forward", nothing)
        monkeypatch.setattr(module, "scratch", lambda *_, **__: {})


def tables() -> Tables:
    return Fused(MODEL, DEVICE, 1e9, pytest.fail).tensors(np.array([6, 8, 14], np.uint8))  # type: ignore[arg-type]


def searched(structures: Structures, radial: int = 512, angular: int = 256) -> small.Slot:
    size = small.Size(-(-structures.n_atoms // 64) * 64, len(structures) + 2, radial, angular, False, False)
    slot = small.Slot(tables(), size, small.INTERPRETED if INTERPRETED else small.Blocks(), Branches(DEVICE))
    slot.fill(structures)
    slot.launch()
    slot.wait()
    return slot


def vectors(lists: Lists, i: int, index: np.ndarray, image: np.ndarray | None) -> np.ndarray:
    """r_j − r_i as the kernels form it."""
    rows, s = lists.rows.cpu().numpy(), int(lists.structure[i])
    d = (rows[index, :3].astype(np.int64) - rows[i, :3]).astype(np.int32)
    if image is not None:
        n = np.stack([(image << 22) >> 22, (image << 12) >> 22, (image << 2) >> 22], axis=1)
        d = d + n * lists.units.cpu().numpy()[s]
    return d.astype(np.float64) @ lists.cells.cpu().numpy()[s].astype(np.float64).reshape(3, 3)


def wanted_of(structures: Structures, cutoff: float) -> dict[int, list[tuple[int, np.ndarray]]]:
    batch = Batch.of(structures, MODEL.admission.types, torch.device("cpu"))
    found: dict[int, list[tuple[int, np.ndarray]]] = {i: [] for i in range(structures.n_atoms)}
    for pairs in Bins.of(batch, cutoff).pairs(1_000_000):
        for i, j, v in zip(pairs.i.tolist(), pairs.j.tolist(), pairs.vector.numpy(), strict=True):
            found[pairs.start + i].append((j, v))
    return found


def compare(structures: Structures, lists: Lists, original: np.ndarray | None = None) -> None:
    """Every list is complete, in order, and its vectors are right; ``original`` are the callers' numbers of rows."""
    number = np.arange(structures.n_atoms) if original is None else original
    element = lists.rows[:, 3].cpu().numpy()
    for part, cutoff in (("radial", CUTOFF[0]), ("angular", CUTOFF[1])):
        index, count, image = (getattr(lists, f"{part}_{name}", None) for name in ("index", "count", "image"))
        wanted = wanted_of(structures, cutoff)
        for i in range(structures.n_atoms):
            n = int(count[i])
            row = index[i, :n].cpu().numpy()
            code = None if image is None else image[i, :n].cpu().numpy()
            r = vectors(lists, i, row, code)
            theirs = wanted[int(number[i])]
            assert sorted(number[row].tolist()) == sorted(j for j, _ in theirs), (part, i)
            key = element[row] * 100_000 + number[row]
            assert (np.diff(key) >= 0).all()
            for j in np.unique(number[row]).tolist():
                mine = r[number[row] == j]
                distance = [np.abs(mine - v).sum(axis=1).min() for k, v in theirs if k == j]
                assert max(distance) < 3e-6
    check_reverse(structures.n_atoms, lists)


def check_reverse(atoms: int, lists: Lists) -> None:
    count, index = lists.angular_count.cpu().numpy(), lists.angular_index.cpu().numpy()
    reverse, width = lists.angular_reverse.cpu().numpy(), lists.angular_index.shape[1]
    image = None if lists.angular_image is None else lists.angular_image.cpu().numpy()
    for i in range(atoms):
        for slot in range(int(count[i])):
            j, back = divmod(int(reverse[i, slot]), width)
            assert j == index[i, slot]
            assert index[j, back] == i
            assert back < count[j]
            if image is not None:
                a = vectors(lists, i, index[i, slot : slot + 1], image[i, slot : slot + 1])
                b = vectors(lists, j, index[j, back : back + 1], image[j, back : back + 1])
                assert np.abs(a + b).max() < 1e-12


def varied() -> list[Structure]:
    rng = np.random.default_rng(0)
    items = [crystals.random_structure(k, MODEL.elements, n=3 + 2 * k, pbc=crystals.PERIODICITIES[k]) for k in range(8)]
    items.append(crystals.diamond((2, 2, 2)))
    items.append(Structure.make(["Si"], [[0.3, 0.2, 0.1]], np.eye(3) * 1.9))
    skewed = np.array([[4.0, 0, 0], [33.0, 4.5, 0], [-21.0, 30.0, 5.0]])
    items.append(Structure.make(["Si", "C"], rng.normal(0, 30, (2, 3)), skewed))
    items.append(Structure.make(["O"], [[1e4, -3e5, 7.0]]))
    return items


def test_lists_of_small_structures(no_forward: None) -> None:
    structures = Structures.pack(varied())
    slot = searched(structures)
    assert slot.host_out["most"][:2].tolist() == [0, 0]
    assert not slot.host_out["state"].any()
    compare(structures, slot.lists)


def test_what_does_not_fit_is_counted(no_forward: None) -> None:
    structures = Structures.pack([crystals.diamond((1, 1, 1), rattle=0.01)])
    slot = searched(structures, 16, 16)
    counts = [max(len(v) for v in wanted_of(structures, c).values()) for c in CUTOFF]
    assert int(slot.host_out["most"][0]) == counts[0] > 16
    assert int(slot.lists.radial_count.max()) == 16
    assert room(counts[0]) >= counts[0]


def test_coincident_atoms_and_coarse_cells_are_told(no_forward: None) -> None:
    fine = crystals.random_structure(3, MODEL.elements, n=5)
    double = crystals.replace(fine, positions=fine.positions[[0, 1, 2, 3, 0]])
    far = Structure.make(["Si", "Si"], [[0.0, 0, 0], [5e4, 0, 0]])
    slot = searched(Structures.pack([fine, double, fine, far]))
    assert slot.host_out["state"][:4].tolist() == [0, search.COINCIDENT, 0, cells.ELSEWHERE]


@pytest.mark.parametrize("pbc", crystals.PERIODICITIES[::3], ids=str)
def test_lists_of_a_large_structure(no_forward: None, pbc: tuple[bool, bool, bool]) -> None:
    rng = np.random.default_rng(1)
    n, edge = 70, 12.5
    cell = np.eye(3) * edge + rng.normal(0, 0.1, (3, 3))
    species = [MODEL.elements[t] for t in rng.integers(0, 3, n)]
    one = Structures.pack([Structure.make(species, rng.random((n, 3)) @ cell, cell, pbc)])
    state = large.Large(tables(), one, large.INTERPRETED if INTERPRETED else large.Blocks(), Branches(DEVICE))
    wanted = large.Wanted(False, False)
    for step in range(3):
        state.put(one.positions)
        box = large.box_of(one, CUTOFF[0] + large.SKIN)
        assert box is not None
        if not (box.same(state.box) and state.update()):
            state.update(box)
        state.compute(wanted)
        original = state._order.cpu().numpy().astype(np.int64)
        compare(one, state._lists, original)
        assert state.rebuilds == [1, 1, 2][step]
        one.positions[:] += rng.normal(0, 0.05 if step == 0 else 0.4, (n, 3)).clip(-0.2 if step == 0 else -2, 2)


def test_thin_cells_are_no_large_structures() -> None:
    thin = Structures.pack([Structure.make(["Si"], [[0.0, 0, 0]], np.diag([30.0, 30.0, 11.9]))])
    assert large.box_of(thin, 6.0) is None
