"""Threads that share one compiled call and sleep in between."""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_Job = tuple["Callable[[int], None]", int, "SimpleQueue[BaseException | None]"]


def cores() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Crew:
    """``size`` threads, the caller's among them. The others start with the first shared job, and are daemons."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def share(self, work: Callable[[int], None], hands: int) -> None:
        """Call ``work(0)`` here and ``work(1)`` … ``work(hands − 1)`` elsewhere, at the same time.

        ``work`` must release the interpreter lock to gain anything, and must tolerate that one call does it all.

        Raises:
            BaseException: The first that a call raised, when all have ended.
        """
        others = min(hands, self.size) - 1
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        while len(self._threads) < others:
            thread = threading.Thread(target=_serve, args=(self._jobs,), name="nepcore-cpu", daemon=True)
            self._threads.append(thread)
            thread.start()
        for k in range(others):
            self._jobs.put((work, k + 1, done))
        failure: BaseException | None = None
        try:
            work(0)
        except BaseException as error:
            failure = error
        for _ in range(others):
            failure = done.get() or failure
        if failure is not None:
            raise failure


def _serve(jobs: SimpleQueue[_Job]) -> None:
    while True:
        work, index, done = jobs.get()
        try:
            work(index)
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)
        del work, done
