"""The replicas of a group on a cluster that is played: what replaces what, what is listed, what is drained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nepserve.client.replicas import Replicas
from nepserve.partial_file import OutputError
from nepserve.scale.group import (
    BUSY_SECONDS,
    END_SECONDS,
    FAILED_STARTS,
    LOST_SECONDS,
    ROOM_SECONDS,
    SILENT_SECONDS,
    SOON,
    Group,
    GroupError,
)
from nepserve.scale.host import Ended, Look
from nepserve.scale.policy import Policy

if TYPE_CHECKING:
    from pathlib import Path


class Played:
    """A replica that does what the test says."""

    def __init__(self, number: int) -> None:
        self.url = f"http://127.0.0.1:{7000 + number}"
        self.look: Look | None = None
        self.ended: Ended | None = None
        self.drained = self.killed = False

    def say(self, *, ready: bool = True, atoms: int = 0, busy: float = 0.0, uptime: float = 1.0, **more) -> None:
        self.look = Look(
            self.url, "node-a", ready, "" if ready else "starting", atoms, busy, uptime=uptime, **more
        )  # fmt: skip

    def drain(self) -> None:
        self.drained = True

    def kill(self) -> None:
        self.killed = True


class PlayedCluster:
    def __init__(self) -> None:
        self.placed: list[Played] = []
        self.now = 100.0
        self.obedient = True

    def place(self, number: int) -> Played:
        assert number == len(self.placed) + 1
        self.placed.append(Played(number))
        return self.placed[-1]

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for replica in self.placed:
            if replica.drained and self.obedient:
                replica.ended = Ended(0)

    def room(self) -> str:
        return "no room"


@pytest.fixture
def cluster() -> PlayedCluster:
    return PlayedCluster()


@pytest.fixture
def make(cluster: PlayedCluster, tmp_path: Path):
    def make(least: int, most: int | None = None, **options) -> Group:
        policy = Policy(least, most or least, 1000, up_seconds=2, down_seconds=20)
        return Group(cluster, policy, tmp_path / "a.txt", clock=lambda: cluster.now, **options)

    return make


@pytest.fixture
def listed(tmp_path: Path):
    def listed() -> list[str]:
        return [member.address.text for member in Replicas(tmp_path / "a.txt").members]

    return listed


def pass_time(group: Group, cluster: PlayedCluster, seconds: float, step: float = 1.0) -> None:
    """Steps for so long; those that are there and not told otherwise say the same as before, later."""
    end = cluster.now + seconds
    while cluster.now < end:
        cluster.wait(step)
        for replica in cluster.placed:
            if replica.look is not None and replica.ended is None and not replica.killed:
                replica.look = replica.look._replace(uptime=replica.look.uptime + step)
        group.step()


def test_those_that_are_ready_are_listed(make, cluster, listed, tmp_path) -> None:
    group = make(2)
    group.step()
    assert len(cluster.placed) == 2
    assert (tmp_path / "a.txt").read_text() == ""
    one, two = cluster.placed
    one.say()
    two.say(ready=False)
    group.step()
    assert listed() == [one.url]
    two.say()
    group.step()
    assert listed() == [one.url, two.url]
    assert len(cluster.placed) == 2


def test_one_that_is_not_ready_for_a_while_stays_listed(make, cluster, listed) -> None:
    group = make(1)
    group.step()
    [one] = cluster.placed
    one.say()
    group.step()
    one.say(ready=False)
    pass_time(group, cluster, 300)
    assert listed() == [one.url]
    assert len(cluster.placed) == 1


@pytest.mark.parametrize("end", [Ended(-9), Ended(1, ["gave up"]), Ended(0), Ended(2, ["nepserve: no"]), Ended(None)])
def test_one_that_ends_is_replaced(make, cluster, listed, end) -> None:
    group = make(2)
    group.step()
    for replica in cluster.placed:
        replica.say()
    group.step()
    one, two = cluster.placed
    one.ended = end
    group.step()
    assert listed() == [two.url]
    assert one.killed, "an actor that has no server is of no use"
    pass_time(group, cluster, 2)
    assert len(cluster.placed) == 3
    cluster.placed[2].say()
    group.step()
    assert listed() == [two.url, cluster.placed[2].url]


def test_one_that_is_silent_is_listed_no_longer_and_then_replaced(make, cluster, listed) -> None:
    group = make(2)
    group.step()
    one, two = cluster.placed
    one.say()
    two.say()
    group.step()
    silent = one.look
    for _ in range(int(SILENT_SECONDS) + 1):
        cluster.now += 1
        two.say(uptime=cluster.now)
        group.step()
    assert one.look is silent
    assert listed() == [two.url]
    assert not one.killed
    one.say(uptime=50)
    group.step()
    assert listed() == [one.url, two.url], "it may come back"
    for _ in range(int(LOST_SECONDS) + 2):
        cluster.now += 1
        two.say(uptime=cluster.now)
        group.step()
    assert one.killed
    assert len(cluster.placed) == 3


def test_what_fails_soon_is_started_after_longer_and_longer_pauses(make, cluster) -> None:
    group = make(1)
    group.step()
    cluster.placed[0].say()
    group.step()
    pauses = []
    for _ in range(10):
        cluster.placed[-1].ended = Ended(1)
        before, count = cluster.now, len(cluster.placed)
        while len(cluster.placed) == count:
            group.step()
            cluster.now += 0.05
        pauses.append(cluster.now - before)
    assert pauses[0] < 0.5
    assert 15 < pauses[-1] < 25
    assert sorted(pauses) == pauses
    # One that was there for long is replaced at once.
    cluster.placed[-1].say()
    pass_time(group, cluster, SOON + 1)
    cluster.placed[-1].ended = Ended(1)
    count = len(cluster.placed)
    pass_time(group, cluster, 1, 0.25)
    assert len(cluster.placed) == count + 1


def test_a_setting_that_is_wrong_ends_the_group_with_its_words(make, cluster) -> None:
    group = make(2)
    group.step()
    cluster.placed[0].ended = Ended(2, ["something", "nepserve: /m/nep.txt: cannot be read"])
    with pytest.raises(GroupError, match=r"^/m/nep.txt: cannot be read$") as caught:
        group.step()
    assert caught.value.wrong


def test_replicas_that_never_come_up_end_the_group(make, cluster) -> None:
    group = make(1)
    group.step()
    for _ in range(FAILED_STARTS - 1):
        cluster.placed[-1].ended = Ended(-11)
        pass_time(group, cluster, 10)
    assert len(cluster.placed) == FAILED_STARTS
    cluster.placed[-1].ended = Ended(-11)
    with pytest.raises(GroupError, match="SIGSEGV") as caught:
        group.step()
    assert not caught.value.wrong


def test_one_without_a_place_is_waited_for_and_told_of_once(make, cluster, caplog) -> None:
    group = make(2)
    group.step()
    cluster.placed[0].say()
    with caplog.at_level("INFO", logger="nepserve"):
        pass_time(group, cluster, 10 * ROOM_SECONDS)
    assert [record.getMessage() for record in caplog.records if "no room" in record.getMessage()] == [
        "replica 2 has not answered yet: no room"
    ]
    assert len(cluster.placed) == 2


def test_a_queue_brings_more_and_little_work_sends_the_least_missed_away(make, cluster, listed) -> None:
    group = make(1, 3)
    group.step()
    cluster.placed[0].say(atoms=5000)
    pass_time(group, cluster, 4)
    assert len(cluster.placed) == 2
    cluster.placed[1].say(atoms=5000)
    pass_time(group, cluster, 4)
    assert len(cluster.placed) == 3
    for replica, atoms in zip(cluster.placed, (5, 60, 100), strict=True):
        replica.say(atoms=atoms, uptime=100)
    group.step()
    assert len(listed()) == 3
    cluster.obedient = False
    pass_time(group, cluster, 22)
    first = cluster.placed[0]
    assert [replica.drained for replica in cluster.placed] == [True, False, False]
    assert first.url not in listed()
    assert not first.killed, "it has work to finish"
    first.ended = Ended(0)
    group.step()
    assert len(cluster.placed) == 3, "nothing takes the place of one that was to end"
    pass_time(group, cluster, 22)
    assert [replica.drained for replica in cluster.placed] == [True, True, False]


def test_a_device_that_is_busy_keeps_its_replica(make, cluster) -> None:
    group = make(1, 2)
    group.step()
    cluster.placed[0].say(atoms=5000)
    pass_time(group, cluster, 4)
    # No queue, and each of the two devices busy for two thirds of the time: one would not do.
    for second in range(5 * int(BUSY_SECONDS)):
        cluster.now += 1
        for replica in cluster.placed:
            replica.say(busy=0.66 * second, uptime=10.0 + second)
        group.step()
    assert not any(replica.drained for replica in cluster.placed)
    assert group.wanted == 2


def test_one_that_takes_too_long_to_drain_is_ended(make, cluster) -> None:
    group = make(1, 2, drain_seconds=30)
    group.step()
    cluster.placed[0].say(atoms=5000)
    pass_time(group, cluster, 4)
    for replica in cluster.placed:
        replica.say(uptime=50)
    cluster.obedient = False
    pass_time(group, cluster, 22)
    [drained] = [replica for replica in cluster.placed if replica.drained]
    pass_time(group, cluster, 30)
    assert not drained.killed
    pass_time(group, cluster, END_SECONDS + 1)
    assert drained.killed


@pytest.mark.parametrize("obedient", [True, False])
def test_the_end_drains_all_and_leaves_an_empty_file(make, cluster, listed, tmp_path, obedient) -> None:
    group = make(3, drain_seconds=30)
    group.step()
    one, two, waiting = cluster.placed
    one.say()
    two.say()
    group.step()
    cluster.obedient = obedient
    before = cluster.now
    group.end()
    assert one.drained
    assert two.drained
    assert waiting.killed, "what has no place has nothing to finish"
    assert (tmp_path / "a.txt").read_text() == ""
    assert one.killed is not obedient
    assert (cluster.now - before > 30) is not obedient


def test_to_abort_waits_for_nothing(make, cluster) -> None:
    group = make(1)
    group.step()
    cluster.placed[0].say()
    group.step()
    cluster.obedient = False
    group.aborting = True
    before = cluster.now
    group.end()
    assert cluster.now == before
    assert cluster.placed[0].killed


def test_another_version_on_a_node_is_told_of_once(make, cluster, caplog) -> None:
    group = make(1)
    group.step()
    cluster.placed[0].say(version="0.0.9")
    with caplog.at_level("WARNING", logger="nepserve"):
        pass_time(group, cluster, 5)
    assert [r.getMessage() for r in caplog.records if "0.0.9" in r.getMessage()]
    assert len(caplog.records) == 1


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_placed(cluster, tmp_path) -> None:
    group = Group(cluster, Policy(1, 1), tmp_path / "nowhere" / "a.txt", clock=lambda: cluster.now)
    with pytest.raises(OutputError, match="nowhere"):
        group.run()
    assert not cluster.placed
