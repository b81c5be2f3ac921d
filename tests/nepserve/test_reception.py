"""Connections are given to fronts while there are any, and to nobody after the end."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from nepserve.fronts.reception import Reception


class Peer:
    connections = 0

    def __init__(self) -> None:
        self.given: list[tuple[str, bool]] = []

    def give(self, sock: socket.socket, way: str, *, full: bool) -> None:
        self.given.append((way, full))
        sock.close()


def test_nothing_is_taken_after_the_end() -> None:
    async def run() -> list[int]:
        peer = Peer()
        hub: Any = SimpleNamespace(ready=[peer])
        counts = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            reception = Reception(hub, listener, "http", 10)
            reception.look()
            for closed in (False, True):
                if closed:
                    reception.close()
                    # A front that is ending still says how many connections it has.
                    reception.look()
                with socket.create_connection(listener.getsockname()):
                    for _ in range(20):
                        await asyncio.sleep(0.005)
                counts.append(len(peer.given))
        reception.look()  # its socket is closed by now
        return counts

    assert asyncio.run(run()) == [1, 1]
