from __future__ import annotations

from datetime import datetime, timezone

import pytest

from nepserve.client import Retry
from nepserve.client.retry import Attempts, retry_after


def test_jitter_is_drawn_from_zero_to_a_bound_that_doubles_up_to_the_longest():
    policy = Retry(first=0.1, longest=1.0)
    assert [policy.wait(k, None, lambda: 1.0) for k in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert [policy.wait(k, None, lambda: 0.0) for k in range(6)] == [0.0] * 6


def test_a_wait_never_is_shorter_than_what_the_server_asks_for():
    policy = Retry(first=0.1, longest=1.0)
    assert policy.wait(0, 3.0, lambda: 0.0) == 3.0
    assert policy.wait(0, 3.0, lambda: 1.0) == pytest.approx(3.1)


def test_thousands_of_repetitions_do_not_overflow():
    assert Retry(limit=10**6, longest=2.0).wait(10**5, None, lambda: 1.0) == 2.0


@pytest.mark.parametrize(
    "arguments", [{"limit": -1}, {"unreached": -1}, {"cut": -1}, {"first": 2.0, "longest": 1.0}, {"first": -1.0}]
)
def test_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match="must"):
        Retry(**arguments)


def attempts(timeout=100.0, **policy):
    return Attempts(Retry(**{"first": 1.0, "longest": 1.0, **policy}), started=0.0, timeout=timeout, draw=lambda: 1.0)


def count(call, **kind):
    """How many repetitions are granted when no time passes."""
    n = 0
    while call.again(0.0, **kind) is not None:
        n += 1
    return n


def test_repetitions_end_at_the_limit():
    assert count(attempts(limit=7)) == 7
    assert count(attempts(limit=0)) == 0


def test_a_server_that_never_answered_is_given_up_sooner():
    assert count(attempts(limit=7, unreached=2), reached=False) == 2
    assert count(attempts(limit=1, unreached=2), reached=False) == 1


def test_a_request_that_breaks_its_connections_is_given_up_sooner():
    assert count(attempts(limit=7, cut=3), cut=True) == 3


def test_a_wait_that_would_outlast_the_call_is_not_begun():
    call = attempts(timeout=10.0)
    assert call.again(8.0) == 1.0
    assert call.again(9.5) is None
    assert call.again(0.0, retry_after=9.5) is None
    assert call.repeated == 1


def test_the_time_left_counts_from_the_first_attempt():
    assert attempts(timeout=10.0).left(4.0) == 6.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3", 3.0),
        (" 0.25 ", 0.25),
        ("0", 0.0),
        ("Tue, 03 Nov 2026 12:00:10 GMT", 10.0),
        ("Tue, 03 Nov 2026 11:00:00 GMT", 0.0),
        ("Tue, 03 Nov 2026 12:00:10 -0000", 10.0),
        (None, None),
        ("", None),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("soon", None),
    ],
)
def test_retry_after(text, seconds):
    now = datetime(2026, 11, 3, 12, 0, 0, tzinfo=timezone.utc)
    assert retry_after(text, now) == seconds
