"""Threads that share one job in compiled code and sleep in between."""

from __future__ import annotations

import os
import threading
import time
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from .kernels import DONE, FIRST, LAST, MISFITS, RANGES, RANGES_DONE
from .mailbox import MAILBOX
from .signals import SEMAPHORES, make_semaphore

if TYPE_CHECKING:
    from types import SimpleNamespace

    from numpy.typing import NDArray

_NAP = 3e-5
"""Seconds between two looks at helpers that the machine has put off."""


def cores() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Crew:
    """``size`` threads, the caller's among them. The others start with the first shared job, and are daemons.

    One caller at a time. The others end when the crew is thrown away.

    Args:
        size: How many.
        dtype: Compute dtype.
        widths: Vector widths.
    """

    def __init__(self, size: int, dtype: str, widths: Any) -> None:
        self.size = size
        self._like = np.zeros(1, dtype)
        self._widths = widths
        self._process = 0
        self._mails: NDArray[np.int64] = np.zeros(0, np.int64)
        self._calls: SimpleQueue[bool] = SimpleQueue()

    def try_out(self, functions: SimpleNamespace) -> None:
        """Compile what a crew calls, however many it has."""
        mails = np.zeros(MAILBOX, np.int64)
        make_semaphore(mails)
        functions.call(mails, 1, SEMAPHORES)
        functions.hand_out(mails, 1, mails, SEMAPHORES)
        functions.withdraw(mails, 1)
        functions.dismiss(mails, 2)
        functions.work(mails, mails, 1, self._like, self._widths, SEMAPHORES)

    def call(self, functions: SimpleNamespace, hands: int) -> None:
        """Wake ``hands`` − 1 helpers: there will be a job soon."""
        if hands > 1:
            self._start(functions)
            self._wake(functions.call(self._mails, hands, SEMAPHORES)[0])

    def share(self, functions: SimpleNamespace, job: NDArray[np.int64], hands: int) -> None:
        """Do a job with that many hands, the caller's among them.

        Raises:
            KeyboardInterrupt: Afterwards, when nobody writes into the job's arrays any longer.
        """
        if hands < 2:
            functions.work(self._mails, job, 0, self._like, self._widths, False)
            return
        self._start(functions)
        failure: BaseException | None = None
        try:
            self._wake(functions.hand_out(self._mails, hands, job, SEMAPHORES)[0])
            functions.work(self._mails, job, 0, self._like, self._widths, False)
            while not _finished(job):
                time.sleep(_NAP)
        except BaseException as error:
            failure = error
        # Not even an interrupt may leave the others writing into arrays that are used again.
        while True:
            try:
                while not functions.withdraw(self._mails, hands)[0]:
                    time.sleep(_NAP)
                break
            except KeyboardInterrupt as error:
                failure = error
        if failure is not None:
            raise failure

    def _wake(self, calls: int) -> None:
        if not SEMAPHORES:
            for _ in range(calls):
                self._calls.put(True)

    def _start(self, functions: SimpleNamespace) -> None:
        # Threads do not survive a fork; whoever forks gets new ones.
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._mails = mails = np.zeros(MAILBOX * (self.size - 1), np.int64)
        self._calls = SimpleQueue()
        for hand in range(1, self.size):
            make_semaphore(mails[MAILBOX * (hand - 1) :])
            arguments = (functions, mails, hand, self._like, self._widths, self._calls)
            threading.Thread(target=_serve, args=arguments, name="nepcore-cpu", daemon=True).start()
        # When the interpreter ends they need not be told.
        weakref.finalize(self, _dismiss, functions, mails, self.size, self._calls, self._process).atexit = False


def _finished(job: NDArray[np.int64]) -> bool:
    """Whether nothing is left to do in a job."""
    if job[DONE] < job[LAST] - job[FIRST]:
        return False
    return bool(job[MISFITS] or job[RANGES_DONE] >= job[RANGES])


def _serve(
    functions: SimpleNamespace, mails: NDArray[np.int64], hand: int, like: Any, widths: Any, calls: SimpleQueue[bool]
) -> None:
    nothing = np.zeros(0, np.int64)
    while SEMAPHORES or calls.get():
        functions.work(mails, nothing, hand, like, widths, SEMAPHORES)
        if SEMAPHORES:
            return


def _dismiss(
    functions: SimpleNamespace, mails: NDArray[np.int64], size: int, calls: SimpleQueue[bool], process: int
) -> None:
    if process == os.getpid():
        functions.dismiss(mails, size)
        for _ in range(1, size):
            calls.put(False)
