"""Beside the steps: time, steps that came to nothing, and signals."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

STEP_SECONDS = 2.0
"""Seconds between two records within an epoch."""

MOST_BAD = 3
"""Steps in a row that are skipped before the parameters go back to those of the epoch's start; so many times, too."""


class Clock:
    """Time since the training began, and the rate of frames."""

    def __init__(self, before: float) -> None:
        self._before = before
        self._start = self._mark = self._spoke = time.monotonic()
        self._first_epochs: float | None = None
        self.frames = 0

    def seconds(self) -> float:
        """Since the training began, s."""
        return self._before + time.monotonic() - self._start

    def mark(self) -> None:
        """An epoch has ended."""
        self._mark = self._spoke = time.monotonic()
        self.frames = 0

    def rate(self) -> float:
        """Frames a second since the last mark."""
        return self.frames / max(time.monotonic() - self._mark, 1e-9)

    def speak(self) -> bool:
        """Whether it is time for a sign of life."""
        if time.monotonic() - self._spoke < STEP_SECONDS:
            return False
        self._spoke = time.monotonic()
        return True

    def left(self, done: float, whole: int) -> float | None:
        """Seconds for the rest, if ``done`` of ``whole`` epochs are done; None while unknown."""
        if self._first_epochs is None:
            self._first_epochs = done
        new = done - self._first_epochs
        return (time.monotonic() - self._start) / new * (whole - done) if new > 0 else None


class Watch:
    """Notes skipped steps, on a GPU some steps later, so that nothing waits."""

    def __init__(self, totals: Tensor) -> None:
        self._totals = totals
        self._waiting: deque[tuple[Any, Tensor, tuple[int, NDArray[np.int64]]]] = deque()
        self.in_row = 0

    def look(self, what: tuple[int, NDArray[np.int64]]) -> None:
        """A step was made."""
        flag = self._totals[11]
        if flag.device.type == "cuda":
            host = torch.empty((), dtype=torch.float64, pin_memory=True)
            host.copy_(flag, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._waiting.append((event, host, what))
        else:
            self._waiting.append((None, flag.clone(), what))

    def bad(self, *, wait: bool = False) -> list[tuple[int, NDArray[np.int64], int]]:
        """Steps that were skipped: number, frames, and how many in a row by then."""
        out = []
        while self._waiting:
            event, flag, (k, frames) = self._waiting[0]
            if event is not None and not event.query():
                # The host is not to run away from the device either.
                if not wait and len(self._waiting) < 32:
                    break
                event.synchronize()
            self._waiting.popleft()
            self.in_row = self.in_row + 1 if float(flag) else 0
            if self.in_row:
                out.append((k, frames, self.in_row))
                if self.in_row >= MOST_BAD:
                    self.in_row = 0
        return out


@contextlib.contextmanager
def stopping(stop_it: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM do that, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def stop(number: int, frame: object) -> None:
        del frame
        stop_it()
        handler = before[signal.Signals(number)]
        # Who asks twice does not want to wait.
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
