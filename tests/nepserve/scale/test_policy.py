"""How many replicas: the rule, without clock or cluster."""

from __future__ import annotations

import pytest

from nepserve.scale.policy import BUSY, FEW, Policy, Seen, Since, decide

POLICY = Policy(1, 8, queue_atoms=1000, up_seconds=5, down_seconds=60)


def follow(policy: Policy, wanted: int, story: list[tuple[float, Seen]]) -> list[int]:
    """What is wanted after each of the moments."""
    since, found = Since(), []
    for now, seen in story:
        wanted, since = decide(policy, now, wanted, seen, since)
        found.append(wanted)
    return found


def steady(seen: Seen, seconds: int) -> list[tuple[float, Seen]]:
    return [(float(t), seen) for t in range(seconds + 1)]


def test_a_queue_that_lasts_calls_for_another_one_and_a_wave_does_not() -> None:
    full = Seen(1, 1500, 1.0)
    assert follow(POLICY, 1, steady(full, 5)) == [1, 1, 1, 1, 1, 2]
    wave = [(t, full if t % 4 else Seen(1, 900, 1.0)) for t in map(float, range(60))]
    assert set(follow(POLICY, 1, wave)) == {1}


@pytest.mark.parametrize(
    ("wanted", "atoms", "then"),
    [(1, 1001, 2), (1, 50_000, 2), (2, 50_000, 4), (3, 3500, 4), (4, 6500, 7), (5, 50_000, 8), (8, 50_000, 8)],
)
def test_up_goes_as_far_as_the_queue_asks_for_to_the_double_at_a_time(wanted: int, atoms: int, then: int) -> None:
    assert follow(POLICY, wanted, steady(Seen(wanted, atoms, wanted), 5))[-1] == then


def test_those_that_are_on_their_way_are_waited_for() -> None:
    assert follow(POLICY, 2, steady(Seen(1, 50_000, 1.0), 60))[-1] == 2
    # And the queue has to last anew with them.
    story = [*steady(Seen(1, 50_000, 1.0), 60), (61.0, Seen(2, 50_000, 2.0)), (66.0, Seen(2, 50_000, 2.0))]
    assert follow(POLICY, 2, story)[-2:] == [2, 4]


def test_down_goes_one_at_a_time_each_after_its_patience() -> None:
    found = follow(POLICY, 4, steady(Seen(4, 0, 0.0), 400))
    assert [found.index(n) for n in (3, 2, 1)] == [60, 121, 182]
    assert found[-1] == 1


@pytest.mark.parametrize(
    ("seen", "then"),
    [
        (Seen(3, 0, 0.0), 2),
        (Seen(3, FEW * 2000, BUSY * 2), 2),
        (Seen(3, FEW * 2000 + 1, 0.0), 3),
        (Seen(3, 0, BUSY * 2 + 0.01), 3),
    ],
    ids=["idle", "just few", "a queue", "busy without a queue"],
)
def test_down_asks_for_little_work_in_both_senses(seen: Seen, then: int) -> None:
    assert follow(POLICY, 3, steady(seen, 60))[-1] == then


def test_one_busy_moment_starts_the_patience_anew() -> None:
    story = [(float(t), Seen(2, 0, 1.9 if t == 30 else 0.0)) for t in range(100)]
    found = follow(POLICY, 2, story)
    assert found.index(1) == 91


def test_between_the_bounds_nothing_moves() -> None:
    """The load that brought the second one does not send it away: two of them then have less to do each."""
    for atoms in range(0, 2001, 100):
        for busy in (0.0, 0.5, 0.71, 1.0, 1.5, 2.0):
            found = follow(POLICY, 2, steady(Seen(2, atoms, busy), 300))
            if found[-1] == 1:
                # What then is there alone has neither a queue that calls for more nor a device without reserve.
                assert atoms <= POLICY.queue_atoms
                assert busy <= BUSY
            else:
                assert found[-1] == 2


def test_one_that_finds_no_place_does_not_keep_the_others() -> None:
    assert follow(POLICY, 3, steady(Seen(2, 0, 0.0), 60))[-1] == 2


@pytest.mark.parametrize("wanted", [0, 1, 5, 99])
def test_a_fixed_number_stays(wanted: int) -> None:
    fixed = Policy(3, 3)
    assert follow(fixed, wanted, [*steady(Seen(3, 10**9, 3.0), 300), *steady(Seen(3, 0, 0.0), 300)]) == [3] * 602


@pytest.mark.parametrize(
    "wrong", [{"least": 0}, {"least": 3, "most": 2}, {"queue_atoms": 0}, {"up_seconds": -1}, {"down_seconds": -1}]
)
def test_bounds_that_cannot_be_kept_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"replicas|atoms"):
        Policy(**{"least": 1, "most": 2, **wrong})  # type: ignore[arg-type]
