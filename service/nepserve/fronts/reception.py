"""Takes connections and gives each to the front that has the fewest."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .hub import Hub

log = logging.getLogger("nepserve")

_AT_ONCE = 64
"""Connections that are taken in one turn of the loop: the queue is kept in other turns."""

_PAUSE = 0.5
"""Seconds to wait where the kernel has no descriptor for another connection."""


class Reception:
    """One socket that listens.

    While no front is ready, connections wait in the kernel.

    Args:
        hub: The fronts.
        listener: The socket.
        way: What is spoken on its connections: ``http`` or ``frames``.
        most: Connections that all fronts may have together; one more is refused by its front.
    """

    def __init__(self, hub: Hub, listener: socket.socket, way: str, most: int) -> None:
        self._hub = hub
        self._listener = listener
        self._way = way
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._open = self._closed = False
        listener.setblocking(False)

    def look(self) -> None:
        """Take connections as long as there is somebody to give them to."""
        if self._closed:
            return
        wanted = bool(self._hub.ready)
        if wanted and not self._open:
            self._loop.add_reader(self._listener.fileno(), self._accept)
        elif not wanted and self._open:
            self._loop.remove_reader(self._listener.fileno())
        self._open = wanted

    def close(self) -> None:
        """Take no more, whatever the fronts that are ending still say."""
        self._closed = True
        self._pause()

    def _pause(self) -> None:
        if self._open:
            self._loop.remove_reader(self._listener.fileno())
            self._open = False

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            peers = self._hub.ready
            if not peers:
                return
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connection can be taken: %s", error)
                self._pause()
                self._loop.call_later(_PAUSE, self.look)
                return
            if sock.family != socket.AF_UNIX:
                # A step is one small message and its answer: they must not wait for each other.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            full = sum(peer.connections for peer in peers) >= self._most
            min(peers, key=lambda peer: peer.connections).give(sock, self._way, full=full)
