"""Lists with a skin: the bits of a search at every step, made again when they must be, not made where useless."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from crystals import PERIODICITIES, random_structure
from nepcore import Structures
from nepcore.admission import Admission
from nepcore.batch import Batch
from nepcore.neighbors import Bins
from nepcore.skin import Lists

CPU = torch.device("cpu")
TYPES = Admission(("Si", "Ge"), False, 5.0).types
CUTOFF = 4.5


def block(*structures: object, keys: list[int] | None = None) -> Structures:
    packed = Structures.pack(structures)  # type: ignore[arg-type]
    return packed if keys is None else replace(packed, keys=np.array(keys, np.int64))


def collect(pieces: object) -> list[np.ndarray]:
    found = list(pieces)  # type: ignore[call-overload]
    return [
        np.concatenate([(p.i + p.start).numpy() for p in found]),
        np.concatenate([p.j.numpy() for p in found]),
        np.concatenate([p.vector.numpy() for p in found]),
        np.concatenate([p.distance.numpy() for p in found]),
    ]


def same_as_a_search(lists: Lists, structures: Structures, budget: int = 1 << 20) -> None:
    batch = Batch.of(structures, TYPES, CPU)
    kept = collect(lists.pairs(structures, batch, budget))
    searched = collect(Bins.of(batch, CUTOFF).pairs(budget))
    for a, b in zip(kept, searched, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("pbc", PERIODICITIES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 12, 60])
def test_a_trajectory_has_the_bits_of_searches(pbc: tuple[bool, bool, bool], n: int) -> None:
    """Atoms that leave the cell, drift as a whole, and jump by whole cells between two steps."""
    one = random_structure(n, ("Si", "Ge"), n=n, pbc=pbc)
    rng = np.random.default_rng(n)
    lists = Lists(CUTOFF, TYPES, CPU)
    positions = one.positions.copy()
    for step in range(40):
        positions += rng.normal(0.0, 0.03, positions.shape) + np.array([0.02, 0.05, -0.03])
        if step % 7 == 3:
            positions[step % n] += np.where(pbc, rng.integers(-2, 3, 3), 0) @ one.cell
        moved = replace(one, positions=positions.copy())
        same_as_a_search(lists, block(moved, keys=[7]), budget=1 << 20 if step % 2 else 50)
    assert 1 <= lists.made < 35


def test_several_structures_in_one_batch() -> None:
    ones = [random_structure(seed, ("Si", "Ge"), n=n) for seed, n in enumerate((4, 30, 9))]
    rng = np.random.default_rng(0)
    lists = Lists(CUTOFF, TYPES, CPU)
    for step in range(12):
        moved = [replace(s, positions=s.positions + rng.normal(0, 0.05, s.positions.shape)) for s in ones]
        keys = [1, 2, 3] if step != 5 else [1, 0, 3]
        same_as_a_search(lists, block(*moved, keys=keys))
    assert lists.made == 3
    # The same structure twice in a batch, and structures nobody has a name for.
    same_as_a_search(lists, block(ones[0], ones[0], keys=[1, 1]))
    same_as_a_search(lists, block(*ones))
    assert lists.made == 3


def test_a_list_is_made_again_when_an_atom_moved_more_than_half_the_skin() -> None:
    one = random_structure(1, ("Si",), n=20)
    lists = Lists(CUTOFF, TYPES, CPU, skin=0.8)
    for _ in range(2):
        same_as_a_search(lists, block(one, keys=[1]))
    assert lists.made == 1
    positions = one.positions.copy()
    positions[3, 0] += 0.399
    same_as_a_search(lists, block(replace(one, positions=positions), keys=[1]))
    assert lists.made == 1
    positions[3, 0] += 0.002
    same_as_a_search(lists, block(replace(one, positions=positions), keys=[1]))
    assert lists.made == 2


def test_a_cell_that_changes_in_every_step_has_no_list() -> None:
    one = random_structure(2, ("Si",), n=20)
    lists = Lists(CUTOFF, TYPES, CPU)
    for step in range(10):
        factor = 1.0 + 1e-4 * step
        strained = replace(one, cell=one.cell * factor, positions=one.positions * factor)
        same_as_a_search(lists, block(strained, keys=[1]))
    assert lists.made == 0


def test_steps_of_no_trajectory_soon_have_no_list() -> None:
    lists = Lists(CUTOFF, TYPES, CPU)
    one = random_structure(3, ("Si",), n=20)
    rng = np.random.default_rng(0)
    for _ in range(20):
        same_as_a_search(lists, block(replace(one, positions=rng.random((20, 3)) @ one.cell), keys=[1]))
    assert lists.made <= 4


def test_lists_go_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = Lists(CUTOFF, TYPES, CPU)
    ones = [random_structure(seed, ("Si",), n=20) for seed in range(4)]
    monkeypatch.setattr("nepcore.skin.MAX_PAIRS", 3000)
    for _ in range(3):
        for key, one in enumerate(ones, 1):
            same_as_a_search(lists, block(one, keys=[key]))
    assert lists._total <= 3000 or len(lists._kept) == 1
    assert lists._total == sum(kept.pairs for kept in lists._kept.values())
