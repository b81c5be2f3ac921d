"""The replicas of one model group: as many alive as there should be, and a file of those that clients may ask.

A replica that ends is replaced by another one, wherever the cluster has room. One is listed when it was ready for the
first time, and as long as it answers; while its engine restarts it stays listed, since clients pass it by then.
"""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from nepcore import __version__
from nepserve.partial_file import OutputError, PartialFile
from nepserve.supervision import FIRST_PAUSE, LONGEST_PAUSE

from .policy import Policy, Seen, Since, decide

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .host import Ended, Look

log = logging.getLogger("nepserve")

TICK = 0.5
"""Seconds between two looks at the replicas."""

SILENT_SECONDS, LOST_SECONDS = 10.0, 60.0
"""Seconds without an answer after which a replica is listed no longer, and after which another takes its place."""

SOON = 60.0
"""A replica that ends within so many seconds of its start may do so again: the next one is started after a pause."""

FAILED_STARTS = 5
"""Replicas that may end in a row before any was ever ready."""

ROOM_SECONDS = 10.0
"""Seconds after which it is said that a replica has no place yet."""

END_SECONDS = 15.0
"""What replicas may take to end beyond the time for their drain."""

BUSY_SECONDS = 10.0
"""Time over which it is averaged how busy a device is, about."""

_WRONG = 2


class GroupError(RuntimeError):
    """No replica can be kept alive.

    Attributes:
        wrong: Whether a setting or a model is the cause.
    """

    def __init__(self, message: str, *, wrong: bool) -> None:
        self.wrong = wrong
        super().__init__(message)


class Placed(Protocol):
    """A replica that the cluster was asked for, with what is known of it by now."""

    look: Look | None
    ended: Ended | None

    def drain(self) -> None:
        """Let it finish what it has, and end."""
        ...

    def kill(self) -> None:
        """End it at once, or give up waiting for its place."""
        ...


class Cluster(Protocol):
    """Where replicas are placed."""

    def place(self, number: int) -> Placed:
        """Ask for another replica."""
        ...

    def wait(self, seconds: float) -> None:
        """Ask all replicas how they are, and wait; not to the end when one of them ends."""
        ...

    def room(self) -> str:
        """What a replica needs and what is free, in words."""
        ...


@dataclass(eq=False)
class Replica:
    """One of the group.

    Attributes:
        started: Clock when it was asked for.
        look: What it last said of itself.
        heard: Clock of that.
        busy: Share of the time that its devices compute.
        told: Whether it was said that there is no room for it.
    """

    number: int
    placed: Placed
    started: float
    state: Literal["starting", "ready", "draining"] = "starting"
    look: Look | None = None
    heard: float = 0.0
    busy: float = 0.0
    told: bool = False

    def hear(self, look: Look, now: float) -> None:
        """Take in what it says."""
        before = self.look
        if before is not None and look.uptime > before.uptime:
            seconds = look.uptime - before.uptime
            share = max(0.0, look.device_seconds - before.device_seconds) / seconds / look.devices
            self.busy += (min(share, 1.0) - self.busy) * min(1.0, seconds / BUSY_SECONDS)
        self.look, self.heard = look, now


class Group:
    """Keeps the replicas.

    Args:
        cluster: Where they are placed.
        policy: How many.
        address_file: Where the addresses go, one a line; None for nowhere.
        drain_seconds: What a server may take for its drain.
        clock: Seconds of a steady clock.

    Attributes:
        wanted: Replicas that there should be now.
        stopping: Set it to end; :meth:`run` then drains all of them.
        aborting: Set it to end them at once.
    """

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        address_file: Path | None = None,
        *,
        drain_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wanted = policy.least
        self.stopping = self.aborting = False
        self._cluster = cluster
        self._policy = policy
        self._file = address_file
        self._drain_seconds = drain_seconds
        self._clock = clock
        self._replicas: list[Replica] = []
        self._draining_since: dict[Replica, float] = {}
        self._since = Since()
        self._count = 0
        self._soon = 0
        self._not_before = 0.0
        self._ever_ready = False
        self._complete = False
        self._listed: list[str] | None = None
        self._warned: set[str] = set()

    @property
    def addresses(self) -> list[str]:
        """Where clients may ask."""
        now = self._clock()
        return [
            replica.look.url
            for replica in self._replicas
            if replica.state == "ready" and replica.look is not None and now - replica.heard < SILENT_SECONDS
        ]

    def run(self) -> None:
        """Keep them until told to stop.

        Raises:
            GroupError: None was ever ready, and the first ones ended.
            OutputError: The file of addresses cannot be written.
        """
        try:
            self._write([])
            while not self.stopping:
                self.step()
                self._cluster.wait(TICK)
        finally:
            self.end()

    def step(self) -> None:
        """Look at all of them once, and start or drain what is to be."""
        now = self._clock()
        for replica in list(self._replicas):
            self._look_at(replica, now)
        self._scale(now)
        mine = [replica for replica in self._replicas if replica.state != "draining"]
        for _ in range(self.wanted - len(mine)):
            if now >= self._not_before:
                self._place(now)
        for replica in sorted(mine, key=_worth)[: max(0, len(mine) - self.wanted)]:
            log.info("replica %d is drained: %d are enough", replica.number, self.wanted)
            self._drain(replica, now)
        self._publish()

    def end(self) -> None:
        """Drain all, wait for them, and end at once those that take too long."""
        for replica in list(self._replicas):
            if replica.state != "draining":
                self._drain(replica, self._clock())
        end = self._clock() + self._drain_seconds + END_SECONDS
        while not self.aborting and self._clock() < end:
            self._replicas = [r for r in self._replicas if r.placed.ended is None]
            if not self._replicas:
                break
            self._cluster.wait(TICK)
        for replica in self._replicas:
            replica.placed.kill()
        self._replicas = []

    def _look_at(self, replica: Replica, now: float) -> None:
        placed = replica.placed
        if placed.ended is not None:
            self._lost(replica, str(placed.ended), now)
            return
        if placed.look is not None and placed.look is not replica.look:
            replica.hear(placed.look, now)
            self._check_version(placed.look)
        if replica.state == "draining":
            if now - self._draining_since[replica] > self._drain_seconds + END_SECONDS:
                self._forget(replica)
        elif replica.look is None:
            if not replica.told and now - replica.started > ROOM_SECONDS:
                replica.told = True
                log.info("replica %d has not answered yet: %s", replica.number, self._cluster.room())
        elif now - replica.heard > LOST_SECONDS:
            self._lost(replica, f"has not answered for {now - replica.heard:.0f} s", now)
        elif replica.state == "starting" and replica.look.ready:
            replica.state = "ready"
            self._ever_ready = True
            log.info(
                "replica %d is ready after %.1f s: %s (%s)",
                replica.number, now - replica.started, replica.look.url, replica.look.node,
            )  # fmt: skip

    def _lost(self, replica: Replica, how: str, now: float) -> None:
        """Another one takes its place, unless it was to end."""
        self._forget(replica)
        if replica.state == "draining":
            log.info("replica %d %s", replica.number, how)
            return
        self._soon = self._soon + 1 if now - replica.started < SOON else 0
        ended = replica.placed.ended
        if not self._ever_ready:
            if ended is not None and ended.code == _WRONG:
                raise GroupError(ended.words[-1].removeprefix("nepserve: ") if ended.words else how, wrong=True)
            if self._soon >= FAILED_STARTS:
                raise GroupError(f"no replica can be started; the last one {how}", wrong=False)
        pause = min(FIRST_PAUSE * 2.0 ** max(0, self._soon - 1), LONGEST_PAUSE)
        self._not_before = now + pause
        log.warning("replica %d %s; another one is started in %.1f s", replica.number, how, pause)

    def _forget(self, replica: Replica) -> None:
        self._replicas.remove(replica)
        self._draining_since.pop(replica, None)
        # The server has ended by itself, or must now; so must what held it.
        replica.placed.kill()

    def _scale(self, now: float) -> None:
        ready = [(r, r.look) for r in self._replicas if r.state == "ready" and r.look is not None]
        seen = Seen(len(ready), sum(look.atoms for _, look in ready), sum(r.busy for r, _ in ready))
        wanted, self._since = decide(self._policy, now, self.wanted, seen, self._since)
        if wanted != self.wanted:
            log.info(
                "replicas: %d in place of %d; %s atoms wait, devices are busy %.0f %% of the time",
                wanted, self.wanted, f"{seen.atoms:,.0f}", 100 * seen.busy / max(1, seen.ready),
            )  # fmt: skip
        self.wanted = wanted

    def _place(self, now: float) -> None:
        self._count += 1
        self._replicas.append(Replica(self._count, self._cluster.place(self._count), now))

    def _drain(self, replica: Replica, now: float) -> None:
        if replica.look is None:
            # It may have no place yet; nobody knows it.
            self._forget(replica)
            return
        replica.state = "draining"
        self._draining_since[replica] = now
        # Clients that read the file find others, before this one refuses them.
        self._publish()
        replica.placed.drain()

    def _publish(self) -> None:
        found = self.addresses
        if found == self._listed:
            return
        try:
            self._write(found)
        except OutputError as error:
            log.error("%s", error)
            return
        if not self._complete and len(found) >= self.wanted:
            self._complete = True
            where = ",".join(found) if self._file is None else f"file:{self._file}"
            log.info("replicas that are ready: %d; clients take %s", len(found), where)

    def _write(self, addresses: list[str]) -> None:
        if self._file is not None:
            file = PartialFile(self._file)
            file.write("".join(f"{address}\n" for address in addresses).encode())
            file.close()
        self._listed = addresses

    def _check_version(self, look: Look) -> None:
        if look.version != __version__ and look.node not in self._warned:
            self._warned.add(look.node)
            log.warning("%s has nepserve %s, and this is %s", look.node, look.version, __version__)

    def handle_signals(self) -> None:
        """SIGINT and SIGTERM drain; a second SIGINT ends all at once."""

        def stop(number: int, _: object) -> None:
            if not self.stopping:
                log.info("%s: replicas finish what they have (Ctrl-C ends them at once)", signal.Signals(number).name)
                self.stopping = True
            elif number == signal.SIGINT:
                self.aborting = True

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)


def _worth(replica: Replica) -> tuple[bool, int, int]:
    """Small for the one that is missed least: not ready yet, with the shortest queue, the youngest."""
    return replica.state == "ready", 0 if replica.look is None else replica.look.atoms, -replica.number
