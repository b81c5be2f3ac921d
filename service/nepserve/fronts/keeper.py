"""Starts the fronts and keeps them alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from nepserve.engine import arenas
from nepserve.engine.spawn import module_command

from .hub import Hub
from .peer import Peer
from .reception import Reception

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp

    from nepserve.app.service import Service

log = logging.getLogger("nepserve")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 20.0
"""Seconds before a front is started again: doubled with each failure within :data:`WINDOW`."""

WINDOW = 600.0

COUNT_SECONDS = 1.0
"""How often the fronts say what they counted, which is their sign of life, too."""

START_SECONDS = 60.0
"""What a front may take to come up."""

SILENT_TIMES = 10
"""How often in a row a front may leave the question for its counts without an answer before it counts as hung."""

LOOK_SECONDS = 0.2
"""How often one looks whether a front lives, should its socket not tell."""

STOP_SECONDS = 5.0
"""What a front may take to end after its work is done."""

KEYS_EACH = 1 << 40
"""Keys of sessions that a front may give out in its life."""


class FrontsFailedError(RuntimeError):
    """No front has come up."""


class Fronts:
    """The HTTP side of a server that has several fronts.

    Args:
        service: The parts of the server.
        api: The application for what is neither evaluation nor session.
        listeners: Sockets that listen, each with what is spoken there, ``http`` or ``frames``.
    """

    def __init__(self, service: Service, api: ASGIApp, listeners: Sequence[tuple[socket.socket, str]]) -> None:
        self.hub = Hub(service, api)
        self._service = service
        most = service.settings.max_connections
        self._receptions = [Reception(self.hub, listener, way, most) for listener, way in listeners]
        self.hub.room = self._room
        self._arenas = arenas.available()
        self._lives = 0
        self._stopping = False

    def _room(self) -> None:
        for reception in self._receptions:
            reception.look()

    async def serve(self) -> None:
        """Keep the fronts alive until :meth:`stop`.

        Raises:
            FrontsFailedError: The first of them did not come up.
        """
        lives = [asyncio.ensure_future(self._keep(k)) for k in range(self._service.settings.fronts)]
        looking = asyncio.ensure_future(self._look())
        try:
            done, _ = await asyncio.wait([*lives, looking], return_when=asyncio.FIRST_COMPLETED)
            for life in done:
                life.result()
            await asyncio.wait(lives, timeout=STOP_SECONDS)
        finally:
            for life in (*lives, looking):
                life.cancel()
            await asyncio.gather(*lives, looking, return_exceptions=True)

    async def stop(self) -> None:
        """Let the fronts end, and see that they do."""
        self._stopping = True
        for reception in self._receptions:
            reception.close()
        peers = list(self.hub.peers)
        for peer in peers:
            peer.tell("stop", {})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(peer.gone.wait() for peer in peers)), STOP_SECONDS)

    def sweep(self, now: float) -> int:  # noqa: ARG002 (each front looks at its own connections)
        """Leave it to the fronts."""
        return 0

    def reload(self) -> None:
        """Let the fronts read the certificate again."""
        for peer in self.hub.peers:
            peer.tell("reload", {})

    async def _keep(self, number: int) -> None:
        """Keep one front alive."""
        failures: list[float] = []
        while True:
            cause, was_ready = await self._live_once(number)
            if self._stopping:
                return
            if not was_ready and not failures and not self.hub.ready and self._lives <= self._service.settings.fronts:
                raise FrontsFailedError(f"front {number + 1} {cause}")
            now = time.monotonic()
            failures = [at for at in failures if at > now - WINDOW] + [now]
            pause = min(FIRST_PAUSE * 2 ** (len(failures) - 1), LONGEST_PAUSE)
            log.error("front %d %s; it is started again in %.1f s", number + 1, cause, pause)
            self._service.metrics.front_restarts.add()
            await asyncio.sleep(pause)

    async def _live_once(self, number: int) -> tuple[str, bool]:
        """One life of a front: how it ended, and whether it ever took connections."""
        settings = self._service.settings
        self._lives += 1
        try:
            process, sock = spawn(shared=self._arenas)
        except OSError as error:
            return f"cannot be started: {error}", False
        peer = Peer(self.hub, sock, process.pid, arenas=self._arenas)
        self.hub.peers.append(peer)
        peer.tell("begin", {
            "settings": settings.model_dump(mode="json", exclude={"api_keys", "api_key_file"}),
            "keys": self._service.keys.entries,
            "max_atoms": self._service.dispatcher.max_atoms,
            "first_key": self._lives * KEYS_EACH,
        })  # fmt: skip
        log.debug("front %d is process %d", number + 1, process.pid)
        looks = 0
        try:
            while process.poll() is None and not peer.gone.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(peer.gone.wait(), LOOK_SECONDS)
                looks += 1
                if peer.missed >= SILENT_TIMES:
                    return "hangs", True
                # Counted in looks: a server that was stopped itself must not blame its fronts.
                if not peer.ready.is_set() and looks * LOOK_SECONDS > START_SECONDS:
                    return f"did not come up within {START_SECONDS:g} s", False
            # Its socket is closed: it has ended, or is about to.
            await _ended(process, STOP_SECONDS)
            return _how(process), peer.ready.is_set()
        finally:
            peer.close()
            if process.poll() is None:
                process.kill()
                process.wait()

    async def _look(self) -> None:
        """Ask for counts, and see who is silent."""
        counted = 0.0
        while True:
            self.hub.look()
            now = time.monotonic()
            if now - counted >= COUNT_SECONDS:
                counted = now
                await self.hub.count(watch=True)
            await asyncio.sleep(0.1)


def spawn(*, shared: bool) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a front; the calling thread must outlive it.

    Returns:
        The process, and the lead's end of its socket (non-blocking).

    Raises:
        OSError: It cannot be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    command = [*module_command("nepserve.fronts"), "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
    if not shared:
        command.append("--no-arenas")
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            pass_fds=[theirs.fileno()],
            # Not in the terminal's group: Ctrl-C is for the lead, which ends the fronts when their work is done.
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    ours.setblocking(False)
    return process, ours


async def _ended(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the end of a process, and end it after that time."""
    end = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > end:
            process.kill()
        await asyncio.sleep(0.01)


def _how(process: subprocess.Popen[bytes]) -> str:
    code: Any = process.returncode
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
