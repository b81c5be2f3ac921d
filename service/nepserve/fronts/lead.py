"""The front's way to the lead: questions with an answer, and words without one."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from nepserve.engine.errors import EngineDown
from nepserve.engine.line import Line

from . import errors

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from nepserve.engine.messages import Message


class Lead:
    """One line to the lead. For one event loop.

    Args:
        sock: The socket that was inherited.
        arenas: Whether large arrays go through shared memory.
        take: Called with what the lead says unasked.
        broken: Called when the line is broken: the front has to end.
    """

    def __init__(
        self, sock: socket.socket, *, arenas: bool, take: Callable[[Message], None], broken: Callable[[], None]
    ) -> None:
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._unasked = take
        self._gone = broken
        self._line = Line(sock, arenas=arenas, take=self._take, broken=self._broken)

    def tell(self, kind: str, body: Mapping[str, Any], number: int = 0) -> None:
        """Say something; ``number`` is that of the question which it answers."""
        self._line.send(kind, number, body)

    def ask(
        self, kind: str, body: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None
    ) -> tuple[int, asyncio.Future[Message]]:
        """Ask something: the number of the question, and where its answer comes."""
        number = next(self._numbers)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        if self._line.closed:
            future.set_exception(EngineDown("the scheduler is gone"))
        else:
            self._asked[number] = future
            self._line.send(kind, number, body, arrays)
        return number, future

    def forget(self, number: int) -> bool:
        """Wait no more for an answer; whether somebody did."""
        return self._asked.pop(number, None) is not None

    def _take(self, message: Message) -> None:
        if message.kind not in {"answer", "failed"}:
            self._unasked(message)
            return
        future = self._asked.pop(message.id, None)
        if future is None or future.done():
            return
        if message.kind == "answer":
            future.set_result(message)
        else:
            future.set_exception(errors.unpack(message.body["error"]))

    def _broken(self, reason: str) -> None:  # noqa: ARG002 (whatever it is, this front has to end)
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(EngineDown("the scheduler is gone"))
                future.exception()  # nobody may be waiting any more
        self._gone()
