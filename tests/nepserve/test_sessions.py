"""The table of sessions: who has what, what goes first, and which steps are looked at again."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from nepcore.admission import Admission
from nepserve import sessions
from nepserve.sessions import Opening, Sessions


def opening(n: int = 2, *, pbc: bool = True) -> Opening:
    return Opening(
        None, ("energy",), np.full(n, 14, np.uint8), 9.0 * np.eye(3), np.full(3, pbc), np.nan
    )  # fmt: skip


def table(**limits: float) -> Sessions:
    return Sessions(**{"idle": 10.0, "limit": 100, "limit_each": 50, **limits})  # type: ignore[arg-type]


def test_a_session_is_its_owners_alone() -> None:
    found = table()
    mine = found.open("me", opening(), 0.0)
    assert found.get(mine.id, "me") is mine
    assert found.get(mine.id, "you") is None
    assert found.get("no such id", "me") is None
    assert len(mine.id) >= 20


def test_idle_sessions_go_and_used_ones_stay() -> None:
    found = table(idle=10.0)
    first, second = found.open("me", opening(), 0.0), found.open("me", opening(), 1.0)
    found.touch(first, 8.0)
    assert found.sweep(10.5) == 0
    assert found.sweep(11.5) == 1
    assert second.lost
    assert not first.lost
    assert found.get(second.id, "me") is None
    found.touch(second, 12.0)  # a step that was under way
    assert len(found) == 1


def test_one_too_many_takes_the_place_of_its_owners_least_lately_used() -> None:
    found = table(limit_each=2)
    other = found.open("you", opening(), 0.0)
    first, second = found.open("me", opening(), 0.0), found.open("me", opening(), 0.0)
    found.touch(first, 1.0)
    third = found.open("me", opening(), 2.0)
    assert (first.lost, second.lost, third.lost, other.lost) == (False, True, False, False)
    assert len(found) == 3


def test_the_limit_of_all_and_that_of_their_atoms(monkeypatch: pytest.MonkeyPatch) -> None:
    found = table(limit=2)
    first = found.open("a", opening(), 0.0)
    found.open("b", opening(), 0.0)
    found.open("c", opening(), 0.0)
    assert first.lost
    assert len(found) == 2
    monkeypatch.setattr(sessions, "MAX_ATOMS", 10)
    found.open("d", opening(9), 0.0)
    assert (len(found), found.atoms) == (1, 9)


def test_a_client_with_one_session_can_open_another() -> None:
    found = table(limit_each=1)
    first = found.open("me", opening(), 0.0)
    second = found.open("me", opening(), 0.0)
    assert first.lost
    assert found.get(second.id, "me") is second
    found.drop(second)
    found.drop(second)
    assert (len(found), found.atoms) == (0, 0)


@pytest.mark.parametrize("pbc", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2e9])
def test_a_bad_coordinate_is_found_at_any_step(pbc: bool, value: float) -> None:
    session = table().open("me", opening(3, pbc=pbc), 0.0)
    version = SimpleNamespace(admission=Admission(("Si",), False, 5.0))
    good = np.array([[0, 0, 0], [0, 0, 2.4], [0, 2.4, 0]], float)
    for _ in range(3):
        error, work = session.examine(version, session.block(good, None))  # type: ignore[arg-type]
        assert error is None
        assert work[0] > 0
    bad = good.copy()
    bad[1, 2] = value
    error, _ = session.examine(version, session.block(bad, None))  # type: ignore[arg-type]
    assert error is not None
    assert (error.field, error.atoms) == ("positions", (1,))


def test_a_cell_that_changes_is_looked_at() -> None:
    session = table().open("me", opening(1), 0.0)
    version = SimpleNamespace(admission=Admission(("Si",), False, 5.0))
    positions = np.zeros((1, 3))
    assert session.examine(version, session.block(positions, None))[0] is None  # type: ignore[arg-type]
    error, _ = session.examine(version, session.block(positions, np.zeros((3, 3))))  # type: ignore[arg-type]
    assert error is not None
    assert error.code == "singular_cell"
    # Another version of the model may know other elements.
    other = SimpleNamespace(admission=Admission(("C",), False, 5.0))
    error, _ = session.examine(other, session.block(positions, None))  # type: ignore[arg-type]
    assert error is not None
    assert error.code == "unknown_element"
