"""Blocks of a file through an evaluator, several at a time, and out in the order in which they came."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Item = TypeVar("Item")
Result = TypeVar("Result")

_LOOK_SECONDS = 0.1
"""Between two looks at what is under way, to show it."""


@dataclass(eq=False)
class _Call(Generic[Item, Result]):
    """An item under way in a thread of its own."""

    item: Item
    done: int = 0
    result: list[Result] = field(default_factory=list)
    error: BaseException | None = None
    thread: threading.Thread | None = None

    def run(self, work: Callable[[Item, Callable[[int], None]], Result]) -> None:
        try:
            self.result.append(work(self.item, self.note))
        except BaseException as error:
            self.error = error

    def note(self, done: int) -> None:
        self.done = done


class Pipeline(Generic[Item, Result]):
    """``work`` on items, ``depth`` of them under way together; with a depth of 1 in the calling thread.

    An error of ``work`` is raised when its turn has come: everything before it has been handed out. So is one of the
    iterable. Threads are daemons: whoever stops early, Ctrl-C among them, waits for none.

    Attributes:
        seconds: Time in which something was under way.
    """

    def __init__(self, work: Callable[[Item, Callable[[int], None]], Result], depth: int) -> None:
        self._work = work
        self._depth = depth
        self.seconds = 0.0

    def run(self, items: Iterable[Item], progress: Callable[[int], None]) -> Iterator[tuple[Item, Result]]:
        """Items with their results; ``progress`` hears how much of what is under way is done, as ``work`` counts it."""
        if self._depth == 1:
            for item in items:
                started = time.monotonic()
                result = self._work(item, progress)
                self.seconds += time.monotonic() - started
                yield item, result
            return
        under_way: deque[_Call[Item, Result]] = deque()
        source = iter(items)
        fault: BaseException | None = None
        ended = False
        busy = time.monotonic()
        while True:
            while not ended and len(under_way) < self._depth:
                try:
                    call: _Call[Item, Result] = _Call(next(source))
                except StopIteration:
                    ended = True
                    break
                except Exception as error:
                    ended, fault = True, error
                    break
                call.thread = threading.Thread(target=call.run, args=(self._work,), daemon=True)
                if not under_way:
                    busy = time.monotonic()
                under_way.append(call)
                call.thread.start()
            if not under_way:
                break
            first = under_way[0]
            assert first.thread is not None
            while first.thread.is_alive():
                first.thread.join(_LOOK_SECONDS)
                progress(sum(call.done for call in under_way))
            under_way.popleft()
            if not any(call.thread is not None and call.thread.is_alive() for call in under_way):
                self.seconds += time.monotonic() - busy
                busy = time.monotonic()
            if first.error is not None:
                raise first.error
            yield first.item, first.result[0]
        if fault is not None:
            raise fault
