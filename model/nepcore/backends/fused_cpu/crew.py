"""Threads that share one compiled call and sleep in between."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Job = tuple[Callable[[int], object], int, SimpleQueue[BaseException | None]]


def cores() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Crew:
    """``size`` threads, the caller's among them. The others start with the first shared job, and are daemons.

    One caller at a time.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._started = 0
        self._process = os.getpid()

    def share(self, work: Callable[[int], object], hands: int, finished: Callable[[], bool] | None = None) -> None:
        """Call ``work(0)`` here and ``work(1)`` … ``work(hands − 1)`` elsewhere, at the same time.

        ``work`` must release the interpreter lock to gain anything, and must tolerate that one call does it all, and
        that a call comes when all is done. If ``finished`` says so after the call here, nobody is waited for.

        Raises:
            BaseException: The first that a call raised, when all have ended.
        """
        others = min(hands, self.size) - 1
        if others < 1:
            work(0)
            return
        self._start(others)
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        for k in range(others):
            self._jobs.put((work, k + 1, done))
        failure: BaseException | None = None
        try:
            work(0)
        except BaseException as error:
            failure = error
        # On a busy machine some have not woken up yet: nothing is left for them to do.
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
                others -= 1
        if failure is None and finished is not None and finished():
            return
        # An interrupt must not leave the others writing into arrays that are used again.
        while others:
            try:
                failure = done.get() or failure
                others -= 1
            except KeyboardInterrupt as error:  # noqa: PERF203
                failure = error
        if failure is not None:
            raise failure

    def _start(self, others: int) -> None:
        if self._process != os.getpid():
            # Threads do not survive a fork; whoever forks gets new ones.
            self._process, self._started, self._jobs = os.getpid(), 0, SimpleQueue()
        while self._started < others:
            threading.Thread(target=_serve, args=(self._jobs,), name="nepcore-cpu", daemon=True).start()
            self._started += 1


def _serve(jobs: SimpleQueue[Job]) -> None:
    while True:
        work, index, done = jobs.get()
        try:
            work(index)
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)
        del work, done
