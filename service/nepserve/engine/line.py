"""One end of the way between two processes, for an event loop: sends and receives messages without waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

from .messages import Channel, Closed, Message, Outgoing

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray


class Line:
    """A channel that an event loop looks after.

    Args:
        sock: A unix stream socket, not blocking.
        arenas: Whether large arrays may go through shared memory.
        take: Called with each message.
        broken: Called once, with the reason (empty: the other side closed it), when nothing more can be sent or read.
            Not called after :meth:`close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        arenas: bool,
        take: Callable[[Message], None],
        broken: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._channel = Channel(sock, arenas=arenas)
        self._take = take
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._fd = sock.fileno()
        self._unsent: deque[Outgoing] = deque()
        self._flushing = False  # there is a call to come that sends
        self._blocked = False  # the socket takes no more at present
        self.closed = False
        self._loop.add_reader(self._fd, self._readable)

    def send(
        self,
        kind: str,
        number: int,
        body: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any]] | None = None,
        *,
        give: socket.socket | None = None,
    ) -> None:
        """Send a message, with others of this turn of the loop in one call; nothing once the line is closed."""
        if self.closed:
            if give is not None:
                give.close()
            return
        outgoing = self._channel.message(kind, number, body, arrays, give=give)
        if not (self._unsent and self._unsent[-1].join(outgoing)):
            self._unsent.append(outgoing)
        if not (self._flushing or self._blocked):
            self._flushing = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Give up the socket; what was not sent is lost."""
        if self.closed:
            return
        self.closed = True
        for remove in (self._loop.remove_reader, self._loop.remove_writer):
            # uvloop minds if it has stopped to look by itself.
            with contextlib.suppress(RuntimeError):
                remove(self._fd)
        for outgoing in self._unsent:
            outgoing.drop()
        self._unsent.clear()
        self._channel.close()

    def _flush(self) -> None:
        self._flushing = False
        try:
            while self._unsent:
                if not self._unsent[0].send(self._sock):
                    if not self._blocked:
                        self._blocked = True
                        self._loop.add_writer(self._fd, self._flush)
                    return
                self._unsent.popleft()
        except Closed:
            # What the other side said before its end is still to be read, and after that the end.
            self._unsent.clear()
        except OSError as error:
            self._end(f"nothing can be sent: {error}")
            return
        if self._blocked:
            self._blocked = False
            self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        try:
            messages = self._channel.read()
        except Closed:
            self._end("")
            return
        except Exception as error:  # whatever it is, nothing that comes after it can be read
            self._end(f"what came could not be read: {error}")
            return
        for message in messages:
            self._take(message)

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._broken(reason)
