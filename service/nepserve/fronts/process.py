"""The front process: HTTP on the connections that the lead gives it, with everything else asked of the lead.

It ignores the signals that a terminal or a service manager sends to the whole group, as only the lead decides when to
end; it ends when its socket closes, and the kernel kills it when the lead dies.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from nepserve import http_server, logs, runtime
from nepserve.app.auth import Key, Keys
from nepserve.app.connection import Connection, sweep
from nepserve.app.door import Door
from nepserve.app.evaluate import Evaluate
from nepserve.app.service import Service
from nepserve.app.sessions import Stepping
from nepserve.app.stream import FrameSocket
from nepserve.app.tracing import tracer_of
from nepserve.listeners import reload_certificate, tls_context
from nepserve.models import Registry
from nepserve.parent import die_with
from nepserve.sessions import number_from
from nepserve.settings import Settings

from . import far
from .lead import Lead

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from nepserve.app.limits import Bodies
    from nepserve.engine.messages import Message

log = logging.getLogger("nepserve")

EXIT_ALONE = 72
"""The lead is gone."""


class Pattern:
    """The route that the lead's application found."""

    def __init__(self, path: str) -> None:
        self.path = path


class Elsewhere:
    """The application in front of which a front stands: the lead's."""

    def __init__(self, lead: Lead, bodies: Bodies) -> None:
        self._lead = lead
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        call = scope["nepserve.call"]
        body = await self._bodies.read(receive, call.headers)
        headers = [pair for pair in scope["headers"] if pair[0] not in {b"content-encoding", b"content-length"}]
        if body:
            headers.append((b"content-length", b"%d" % len(body)))
        asked = {
            "scope": {
                **{name: scope[name] for name in ("method", "path", "raw_path", "query_string", "scheme", "root_path",
                                                  "http_version", "client", "server")},
                "headers": headers,
            },
            "id": call.id,
        }  # fmt: skip
        _, answer = self._lead.ask("route", asked, {"body": np.frombuffer(body, np.uint8)})
        message = await answer
        told = message.body
        call.note = told["note"]
        scope["route"] = Pattern(told["route"])
        await send({"type": "http.response.start", "status": told["status"],
                    "headers": [tuple(pair) for pair in told["headers"]]})  # fmt: skip
        await send({"type": "http.response.body", "body": message.arrays["body"].tobytes()})


class Connections(set[Any]):
    """The connections of a front, which says when one is gone."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self._changed = changed

    def add(self, item: Any, /) -> None:
        """Put one in."""
        super().add(item)
        self._changed()

    def discard(self, item: Any, /) -> None:
        """Take one out."""
        super().discard(item)
        self._changed()


class Front:
    """One front from start to end, on an inherited socket."""

    def __init__(self, sock: socket.socket, *, arenas: bool) -> None:
        self._sock = sock
        self._arenas = arenas
        self._begin: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._arrived = 0
        self._opening = 0
        self._telling = False
        self.context: ssl.SSLContext | None = None
        self.code = 0

    async def live(self) -> int:
        """Start, serve, end; the exit code."""
        loop = asyncio.get_running_loop()
        self.lead = Lead(self._sock, arenas=self._arenas, take=self._take, broken=self._alone)
        begin = await self._begin
        settings = Settings(**begin["settings"])
        logs.configure(settings.log_format, settings.log_level)
        number_from(begin["first_key"])
        runtime.prepare(settings.max_connections)
        registry = Registry(settings.default_model)
        self.queue = far.Queue(
            self.lead, begin["max_atoms"], settings.max_queue_atoms, settings.max_queue_requests
        )  # fmt: skip
        self.sessions = far.Sessions(self.lead, settings.session_idle)
        self.engine = far.Engine()
        self.models = far.Models(self.lead, registry)
        tracer = tracer_of(settings)
        keys = Keys(Key(name, digest, admin) for name, digest, admin in begin["keys"])
        # What the lead's own application asks of queue and engine beyond this, nobody asks here.
        queue: Any = self.queue
        engine: Any = self.engine
        self.service = service = Service(settings, registry, queue, engine, keys, tracer=tracer, sessions=self.sessions)
        self.context = tls_context(settings)
        stepping = Stepping(service)
        door = Door(service, Evaluate(service), stepping, Elsewhere(self.lead, service.bodies))
        self.stepping = stepping
        self.server = server = http_server.make(door, settings, Connection, self.context)
        server.server_state.connections = self.connections = Connections(self._changed)
        self.settings = settings
        serving = asyncio.create_task(server.serve(sockets=[]))
        following = asyncio.create_task(self.models.follow())
        while not (server.started or serving.done()):
            await asyncio.sleep(0.005)
        sweeping = asyncio.create_task(http_server.sweep(service, lambda now: sweep(self.connections, now)))
        self.lead.tell("ready", {})
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait([over, serving, following], return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, following):
            if task.done() and not self._over.is_set():
                log.error("a front ends: %s", task.exception() or "its HTTP server ended by itself")
                self.code = 1
        server.should_exit = True
        await asyncio.wait([serving], timeout=5.0)
        for each in (over, serving, following, sweeping, *self._tasks):
            each.cancel()
        await asyncio.gather(over, serving, following, sweeping, *self._tasks, return_exceptions=True)
        if tracer is not None:
            await loop.run_in_executor(None, tracer.close)
        return self.code

    def _alone(self) -> None:
        # There is nobody whom an answer could come from.
        os._exit(EXIT_ALONE)

    def _take(self, message: Message) -> None:
        body = message.body
        match message.kind:
            case "begin":
                self._begin.set_result(body)
            case "connection":
                self._connect(message.fd, body["way"], full=body["full"])
            case "models":
                self.models.hear(body)
            case "waiting":
                self.queue.heard(body)
            case "unready":
                self.engine.unready = body["reason"]
            case "dropped":
                # After whoever waits for an answer that came before this has taken it.
                asyncio.get_running_loop().call_soon(self.sessions.dropped, body["id"])
            case "count":
                self.lead.tell(
                    "said", {"counted": self.service.metrics.take(), "in_flight": self.service.in_flight}, message.id
                )
            case "refuse":
                self._later(self.service.drain(0.0))
            case "drain":
                self._later(self._drain(body["timeout"], message.id))
            case "reload":
                if self.context is not None:
                    reload_certificate(self.context, self.settings)
            case "stop":
                self._over.set()

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, timeout: float, number: int) -> None:
        left = await self.service.drain(timeout)
        self.lead.tell("said", {"left": left}, number)

    # -- connections -----------------------------------------------------------------------------------------------

    def _connect(self, fd: int, way: str, *, full: bool) -> None:
        self._arrived += 1
        self._opening += 1
        self._later(self._take_up(socket.socket(fileno=fd), way, full=full))

    async def _take_up(self, sock: socket.socket, way: str, *, full: bool) -> None:
        """Speak HTTP, or frames, on a connection."""

        def http() -> asyncio.Protocol:
            made: Connection = self.server.config.http_protocol_class(  # type: ignore[call-arg, assignment]
                config=self.server.config, server_state=self.server.server_state,
                app_state=self.server.lifespan.state,
            )  # fmt: skip
            made.full = full
            return made

        def frames() -> asyncio.Protocol:
            return FrameSocket(self.stepping, self.connections, full=full)

        try:
            sock.setblocking(False)
            with contextlib.suppress(OSError, ssl.SSLError):
                await asyncio.get_running_loop().connect_accepted_socket(
                    http if way == "http" else frames, sock, ssl=self.context
                )
        finally:
            self._opening -= 1
            self._changed()

    def _changed(self) -> None:
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        self.lead.tell("connections", {"open": len(self.connections) + self._opening, "arrived": self._arrived})


def main(arguments: list[str] | None = None) -> int:
    """Run a front on an inherited socket; started by a server with ``--fronts`` only."""
    parser = argparse.ArgumentParser(prog="python -m nepserve.fronts", description=main.__doc__)
    parser.add_argument("--fd", type=int, required=True, help="number of the inherited socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the lead")
    parser.add_argument("--no-arenas", action="store_true")
    options = parser.parse_args(arguments)
    die_with(options.parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=options.fd)
    sock.set_inheritable(False)
    sock.setblocking(False)

    async def live() -> int:
        return await Front(sock, arenas=not options.no_arenas).live()

    return runtime.run(live())


def run() -> None:
    """:func:`main` as a process."""
    try:
        code = main()
    except Exception:
        log.exception("a front failed")
        code = 1
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
