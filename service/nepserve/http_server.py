"""uvicorn as this package uses it: its own connections, no signals, no lifespan; and the clock behind the bounds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any

from .listeners import reload_certificate

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

    import uvicorn

    from .app.door import Door
    from .app.service import Service
    from .settings import Settings

SWEEP_SECONDS = 0.5
"""Seconds between two looks for clients that are too slow."""


def make(
    app: Any, settings: Settings, connection: type[asyncio.Protocol], context: ssl.SSLContext | None
) -> uvicorn.Server:
    """A server of an application, which is to be told where to listen, and ends when ``should_exit`` is set."""
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn's server; signals are this program's business."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Leave them alone."""
            yield

    config = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=settings.max_connections,
        timeout_keep_alive=int(settings.keep_alive) or 1,
        timeout_graceful_shutdown=1,
    )
    config.load()
    config.ssl = context
    return Server(config)


class Http:
    """HTTP, and frames, in this process.

    Args:
        door: The application.
        listener: The socket for HTTP.
        frames: The socket for frames; None without.
        context: TLS for both; None without.
    """

    def __init__(
        self, door: Door, listener: socket.socket, frames: socket.socket | None, context: ssl.SSLContext | None
    ) -> None:
        from .app.connection import Connection

        self._door = door
        self._settings = door.service.settings
        self._listener = listener
        self._frames = frames
        self._context = context
        self._server = make(door, self._settings, Connection, context)
        self._others: asyncio.Server | None = None

    async def serve(self) -> None:
        """Take connections until :meth:`stop`."""
        await self._serve_frames()
        await self._server.serve(sockets=[self._listener])

    async def stop(self) -> None:
        """Take no more, and let those that there are end."""
        if self._others is not None:
            self._others.close()
        self._server.should_exit = True

    def sweep(self, now: float) -> int:
        """Cut off the connections that are overdue; how many."""
        from .app.connection import sweep

        return sweep(self._server.server_state.connections, now)

    def reload(self) -> None:
        """Take a renewed certificate for the connections to come."""
        assert self._context is not None
        reload_certificate(self._context, self._settings)

    async def _serve_frames(self) -> None:
        """Take connections of the frame socket, if there is one."""
        if self._frames is None:
            return
        from .app.stream import FrameSocket

        loop = asyncio.get_running_loop()
        stepping, connections = self._door.stepping, self._server.server_state.connections

        def connect() -> FrameSocket:
            return FrameSocket(stepping, connections)

        if self._frames.family == socket.AF_UNIX:
            self._others = await loop.create_unix_server(connect, sock=self._frames, backlog=2048)
        else:
            self._others = await loop.create_server(connect, sock=self._frames, ssl=self._context, backlog=2048)


async def sweep(service: Service, connections: Callable[[float], int]) -> None:
    """Cut off clients that are too slow, for as long as the server lives.

    Args:
        service: Whose bodies and sessions are looked at.
        connections: Called with the event loop's time to look at the connections.
    """
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        service.bodies.sweep(loop.time())
        service.sessions.sweep(time.monotonic())
        connections(loop.time())
