"""Which of several servers a request goes to: the one with the fewest atoms in its queue, of those that answer.

Nothing here opens a connection, sleeps or looks at a clock by itself, so that both clients share it and tests need no
time. It holds no lock either: only single operations on dictionaries, so that a fork never finds one held.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from .address import Address, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .retry import Attempts

Servers = str | os.PathLike[str]
"""How servers are named: an address, several with commas between, or a file of addresses (a path, or ``file:PATH``)."""

QUEUE_HEADER = "x-queue-atoms"
"""Header of an answer that says how many atoms wait in the server's queue."""

HALF_LIFE = 1.0
"""Seconds after which half of what a server said of its queue is believed: what is not asked is soon asked again."""

FIRST_REST, LONGEST_REST = 0.5, 30.0
"""Seconds that a server which failed is left alone, if there are others: doubled with each failure in a row."""

FULL_REST = 5.0
"""The longest that one is left alone because its queue is full."""

REREAD_SECONDS = 1.0
"""Seconds between two looks at a file of addresses."""


class Replica:
    """One of the servers, and what is known of it.

    Attributes:
        address: Where it is.
        failures: Failures since it last answered.
        rests_until: Clock until which others are preferred, s.
    """

    __slots__ = ("_process", "_queue", "_queue_at", "_under_way", "address", "failures", "rests_until")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.failures = 0
        self.rests_until = 0.0
        self._queue = 0.0
        self._queue_at = 0.0
        self._under_way: dict[Course, int] = {}
        self._process = os.getpid()

    def load(self, now: float) -> float:
        """Atoms ahead of a request that would come now: what this client has under way there, and the queue."""
        if self._process != os.getpid():
            # What was under way at a fork is the parent's.
            self._under_way, self._process = {}, os.getpid()
        own = sum(list(self._under_way.values()))
        # What is under way there has been counted in its queue, or has left it.
        return max(own, self._queue * 0.5 ** ((now - self._queue_at) / HALF_LIFE)) if self._queue else own

    def begin(self, course: Course, atoms: int) -> None:
        """Count a request that is sent there."""
        self._under_way[course] = max(atoms, 1)

    def end(self, course: Course) -> None:
        """Count it no longer."""
        self._under_way.pop(course, None)

    def answered(self, now: float, queue: str | None) -> None:
        """Note that it is alive, and what it says of its queue."""
        self.failures = 0
        self.rests_until = 0.0
        if queue is not None and queue.isascii() and queue.isdigit() and len(queue) < 16:
            self._queue, self._queue_at = float(queue), now

    def failed(self, now: float) -> None:
        """Leave it alone for a while, longer each time."""
        self.failures += 1
        rest = min(FIRST_REST * 2.0 ** min(self.failures - 1, 20), LONGEST_REST)
        # Many clients that lost it together do not come back together.
        self.rests_until = now + rest * (0.5 + 0.5 * random.random())

    def full(self, now: float, retry_after: float | None) -> None:
        """Leave it alone until it may have room."""
        self.rests_until = now + min(FIRST_REST if retry_after is None else retry_after, FULL_REST)


class Replicas:
    """The servers of a client: one or several addresses, or a file that names them, one a line, and may change.

    Attributes:
        text: As they were given, one string that makes the same again.
        reached: Whether one of them ever answered.
    """

    def __init__(self, servers: Servers | Sequence[str]) -> None:
        """Take addresses apart.

        Raises:
            ValueError: One that cannot be used, or none; the message says what they look like. A file need not exist
                yet.
        """
        self._file: Path | None = None
        self._members: tuple[Replica, ...] = ()
        self._read_at = float("-inf")
        self._stamp: tuple[int, int, int] | None = None
        self.reached = False
        if isinstance(servers, os.PathLike):
            self._file = Path(servers)
        elif isinstance(servers, str) and servers.strip().startswith("file:"):
            self._file = _path(servers.strip())
        if self._file is not None:
            self._file = self._file.absolute()
            self.text = f"file:{self._file}"
            self._reread()
            return
        words = servers.split(",") if isinstance(servers, str) else list(servers)  # type: ignore[arg-type]
        if not all(isinstance(word, str) for word in words):
            raise ValueError("servers are given by their addresses, as strings")
        # A string without a comma goes as it is, so that the message about it shows all of it.
        self._take(parse_address(word) for word in words if word.strip() or len(words) == 1)
        if not self._members:
            raise ValueError("no server address was given")
        self.text = ",".join(member.address.text for member in self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __getstate__(self) -> dict[str, str]:
        return {"text": self.text}

    def __setstate__(self, state: dict[str, str]) -> None:
        Replicas.__init__(self, state["text"])

    @property
    def several(self) -> bool:
        """Whether there are, or may be, more than one."""
        return self._file is not None or len(self._members) > 1

    @property
    def members(self) -> tuple[Replica, ...]:
        """Those there are, in the order in which they were given."""
        return self._members

    def refresh(self, now: float) -> None:
        """Look at the file of addresses again, if there is one and it is time.

        One that is gone, or does not hold addresses now, changes nothing: it is being written.
        """
        if self._file is None or now < self._read_at + REREAD_SECONDS:
            return
        self._read_at = now
        try:
            self._reread()
        except ValueError:
            self._stamp = None

    def choose(self, now: float, tried: Iterable[Replica] = ()) -> Replica | None:
        """Where the next attempt goes: not to one of ``tried``; to one that rests only if all others are tried.

        Returns:
            None if all are tried, or there is none.
        """
        self.refresh(now)
        if len(self._members) == 1 and not tried:
            return self._members[0]
        left = [member for member in self._members if member not in tried]
        awake = [member for member in left if member.rests_until <= now]
        if awake:
            # Equals take turns by chance: clients that do not know of each other spread evenly.
            return min(awake, key=lambda member: (member.load(now), random.random()))
        return min(left, key=lambda member: member.rests_until, default=None)

    def describe(self, now: float) -> list[dict[str, object]]:
        """What is known of each: ``url``, ``load`` (atoms), and ``rests`` (s) of one that is left alone."""
        found: list[dict[str, object]] = []
        for member in self._members:
            entry: dict[str, object] = {"url": member.address.text, "load": round(member.load(now))}
            if member.rests_until > now:
                entry["rests"] = round(member.rests_until - now, 3)
            found.append(entry)
        return found

    def nowhere(self) -> OSError:
        """What is wrong if there is no address at all."""
        return ConnectionRefusedError(f"{self._file} names no server")

    def _take(self, addresses: Iterable[Address]) -> None:
        """Have these members; what is known of those that stay is kept."""
        known = {member.address: member for member in self._members}
        self._members = tuple(dict.fromkeys(known.get(each) or Replica(each) for each in dict.fromkeys(addresses)))

    def _reread(self) -> None:
        assert self._file is not None
        try:
            state = self._file.stat()
            stamp = state.st_mtime_ns, state.st_size, state.st_ino
            if stamp == self._stamp:
                return
            lines = self._file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, FileNotFoundError):
                return
            raise ValueError(f"{self._file}: no file of addresses: {error}") from error
        found = []
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if words:
                try:
                    found.append(parse_address(words[0]))
                except ValueError as error:
                    raise ValueError(f"{self._file}, line {number}: {error}") from None
        self._stamp = stamp
        if found:
            self._take(found)


@dataclass(eq=False)
class Course:
    """The way of one request: where it is, where it was, and what is to be done when an attempt fails.

    Attributes:
        replicas: Where it may go.
        attempts: How often.
        atoms: What it asks for, to count for whom it is sent to.
        pinned: The only one it may go to; None for any.
        replica: Where it is; None while it is nowhere.
        last: Where it was last.
    """

    replicas: Replicas
    attempts: Attempts
    atoms: int = 0
    pinned: Replica | None = None
    replica: Replica | None = None
    last: Replica | None = None
    _tried: list[Replica] = field(default_factory=list)
    _hopeless: bool = True
    _asked: float | None = None

    @property
    def url(self) -> str:
        """The address it was sent to last, for messages."""
        return self.replicas.text if self.last is None else self.last.address.text

    @property
    def may_move(self) -> bool:
        """Whether another server could take it."""
        return self.pinned is None and self.replicas.several

    def go(self, now: float) -> Replica:
        """Where to send it.

        Raises:
            OSError: There is no address.
        """
        if self.replica is None:
            found = self.pinned or self.replicas.choose(now, self._tried)
            if found is None:
                raise self.replicas.nowhere()
            found.begin(self, self.atoms)
            self.replica = self.last = found
        return self.replica

    def arrived(self, now: float, header: Callable[[str], str | None]) -> None:
        """There is an answer of any kind; ``header`` gives its headers by name."""
        self.replicas.reached = True
        if self.replica is not None:
            self.replica.end(self)
            self.replica.answered(now, header(QUEUE_HEADER))
            self.replica = None

    def left(self) -> None:
        """Nobody waits for it any more."""
        if self.replica is not None:
            self.replica.end(self)
            self.replica = None

    def timed_out(self, now: float) -> None:
        """There was no answer in the time that it had."""
        if self.replica is not None:
            self.replica.failed(now)
        self.left()

    def failed(self, now: float, *, cut: bool, hopeless: bool) -> float | None:
        """A connection failed; seconds to wait before the next attempt, None if there is to be none.

        Args:
            now: The clock, s.
            cut: Whether it broke with the request under way.
            hopeless: Whether it will fail again.
        """
        if self.replica is not None:
            self.replica.failed(now)
        self._hopeless &= hopeless
        return self._again(now, cut=cut)

    def refused(self, now: float, status: int, retry_after: float | None) -> float | None:
        """The server has no room (429) or is not ready; seconds to wait before the next attempt, None for none."""
        if self.last is not None and self.may_move:
            if status == 429:
                self.last.full(now, retry_after)
            else:
                self.last.failed(now)
        if retry_after is not None:
            self._asked = retry_after if self._asked is None else min(retry_after, self._asked)
        self._hopeless = False
        return self._again(now, cut=False)

    def _again(self, now: float, *, cut: bool) -> float | None:
        self.left()
        attempts = self.attempts
        if self.pinned is not None and self.replicas.several and self.pinned in self.replicas.members:
            # Whoever asked for this one alone knows what is to be done without it.
            return None
        if self.may_move and self.last is not None and attempts.policy.limit:
            self._tried.append(self.last)
            if self.replicas.choose(now, self._tried) is not None:
                # What breaks connections may be the request: it must not go round and end one server after the other.
                attempts.cuts += cut
                attempts.renewed = False
                return 0.0 if attempts.cuts <= attempts.policy.cut and attempts.left(now) > 0 else None
        if self._hopeless and self.last is not None:
            return None
        wait = attempts.again(now, retry_after=self._asked, reached=self.replicas.reached, cut=cut)
        self._tried, self._hopeless, self._asked = [], True, None
        return wait


def _path(text: str) -> Path:
    """The path in ``file:PATH`` or ``file:///PATH``."""
    parts = urlsplit(text)
    if parts.netloc not in {"", "localhost"} or not parts.path:
        raise ValueError(f"{text!r}: a file of addresses is file:PATH or file:///PATH")
    return Path(unquote(parts.path) if text.startswith("file://") else text.removeprefix("file:"))
