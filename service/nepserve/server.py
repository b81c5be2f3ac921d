"""The server process: sockets, signals, the HTTP front and the engine beside it, from start to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from . import http_server, logs, models, runtime
from .app.auth import keys_of
from .app.tracing import tracer_of
from .devices import devices_of
from .greeting import Greeting
from .listeners import listen, listen_for_frames, tls_context
from .settings import SettingsError

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from .app.service import Service
    from .app.tracing import Tracer
    from .devices import Device
    from .dispatch import Dispatcher
    from .fleet import Fleet
    from .fronts.keeper import Fronts
    from .models import Source
    from .settings import Loaded, Settings
    from .spread import Spread
    from .supervision import Supervisor

log = logging.getLogger("nepserve")

ENGINE_SECONDS = 2.0
"""What the engine may take to end after its work is done."""

ABORTED = 130
GAVE_UP = 1
WRONG = 2


def run(loaded: Loaded, *, loader: str = "nepcore:load", listening: Callable[[str], None] | None = None) -> int:
    """Serve until told to stop; returns the exit code.

    0 after SIGTERM or SIGINT, 1 if the engine cannot be kept alive, 2 if a model cannot be loaded with these settings,
    130 if a second SIGINT ended it at once.

    Args:
        loaded: What it is told.
        loader: Function that loads a model in the engine; see :class:`.engine.EngineLink`.
        listening: Called with the server's URL once connections to it are accepted. People are then told by others how
            to ask it.

    Raises:
        SettingsError, ModelNameError, ModelFileError: The server cannot start.
    """
    settings = loaded.settings
    logs.configure(settings.log_format, settings.log_level)
    for remark in loaded.remarks:
        log.warning("%s", remark)
    sources = open_models(settings)
    keys, secret = keys_of(settings)
    devices = [] if settings.devices is None else devices_of(settings.devices, settings.threads)
    context = tls_context(settings)
    # With several fronts each has one of its own.
    tracer = tracer_of(settings) if settings.fronts == 1 else None
    listener = listen(settings)
    try:
        frames = listen_for_frames(settings)
    except SettingsError:
        _close(listener, settings.uds)
        raise
    runtime.prepare(settings.max_connections)
    greeting = Greeting(settings, sources, listener, frames, keys, secret)
    process = _Process(greeting, devices, context, loader, tracer)
    if listening is not None:
        greeting.hints = False
        listening(greeting.url)
    try:
        return runtime.run(process.live())
    finally:
        _close(listener, settings.uds)
        if frames is not None:
            _close(frames, settings.frame_address)
        if tracer is not None:
            tracer.close()


def _close(listener: socket.socket, where: Path | int | None) -> None:
    listener.close()
    if isinstance(where, Path):
        where.unlink(missing_ok=True)


def open_models(settings: Settings) -> list[Source]:
    """Read the models that the settings name, or make the demonstration model if they name none.

    Raises:
        ModelNameError, ModelFileError, SettingsError: They cannot be served.
    """
    wanted = models.parse_models(settings.models)
    if settings.default_model is not None and settings.default_model not in wanted:
        raise SettingsError(f"the default model {settings.default_model!r} is not among the models that are served")
    if settings.model_dir is not None and not settings.model_dir.is_dir():
        raise SettingsError(f"{settings.model_dir}: no such folder (--model-dir)")
    sources = [models.read_model(name, path) for name, path in wanted.items()]
    # A server that has a folder of models may begin empty.
    return sources or ([] if settings.model_dir is not None else [models.demo_model()])


class _Process:
    """One server from start to end."""

    def __init__(
        self,
        greeting: Greeting,
        devices: list[Device],
        context: ssl.SSLContext | None,
        loader: str,
        tracer: Tracer | None,
    ) -> None:
        self.greeting = greeting
        self.settings = greeting.settings
        self.devices = devices
        self.context = context
        self.loader = loader
        self.tracer = tracer
        self.wanted = asyncio.Event()
        self.code = 0

    async def live(self) -> int:
        """Start, serve, end."""
        settings = self.settings
        registry = models.Registry(settings.default_model)
        if settings.devices is None:
            from .supervision import Supervisor

            dispatcher: Dispatcher | Spread = _dispatcher(settings)
            supervisor: Supervisor | Fleet = Supervisor(settings, registry, dispatcher, loader=self.loader)  # type: ignore[arg-type]
        else:
            dispatcher, supervisor = _fleet(settings, registry, self.devices, self.loader)
        self._handle_signals(supervisor)
        # The engine comes first: while it imports what it needs, so does the front.
        sources = [(source, settings.dtype_of(source.name)) for source in self.greeting.sources]
        keeping = asyncio.create_task(supervisor.run(sources))
        await asyncio.sleep(0.01)
        try:
            await self._serve(registry, dispatcher, supervisor, keeping)
        finally:
            await supervisor.stop(ENGINE_SECONDS)
            await dispatcher.close()
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        return self.code

    async def _serve(
        self,
        registry: models.Registry,
        dispatcher: Dispatcher | Spread,
        supervisor: Supervisor | Fleet,
        keeping: asyncio.Task[None],
    ) -> None:
        """Answer requests until a signal comes or the engine is given up."""
        from .app.service import Service
        from .supervision import EngineGaveUpError, UnusableModelError

        service = Service(self.settings, registry, dispatcher, supervisor, self.greeting.keys, tracer=self.tracer)
        supervisor.on_restart = lambda reason: service.metrics.restarts.add()  # noqa: ARG005
        way = self._way(service)
        service.observe()
        serving = asyncio.create_task(way.serve())
        others = [
            asyncio.create_task(http_server.sweep(service, way.sweep)),
            asyncio.create_task(self.greeting.announce(service, supervisor)),
            waiting := asyncio.create_task(self.wanted.wait()),
        ]
        if self.context is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, way.reload)
        self.greeting.greet()
        try:
            await asyncio.wait([keeping, serving, waiting], return_when=asyncio.FIRST_COMPLETED)
            if self.wanted.is_set():
                await self._drain(service)
            else:
                self.code = GAVE_UP
                if keeping.done():
                    with contextlib.suppress(EngineGaveUpError):
                        keeping.result()
                    if isinstance(keeping.exception(), UnusableModelError):
                        self.code = WRONG
                    log.error("%s", keeping.exception())
                else:
                    cause = serving.exception() if serving.done() else None
                    log.error("the HTTP server ended by itself: %s", cause or "it gave no reason")
        finally:
            await way.stop()
            await asyncio.wait([serving], timeout=5.0)
            for task in (serving, *others):
                task.cancel()
            await asyncio.gather(serving, *others, return_exceptions=True)

    def _way(self, service: Service) -> http_server.Http | Fronts:
        """HTTP in this process, or in several others."""
        from .app.factory import create_app

        door = create_app(service)
        listener, frames = self.greeting.listener, self.greeting.frames
        if self.settings.fronts == 1:
            return http_server.Http(door, listener, frames, self.context)
        from .fronts.keeper import Fronts

        listeners = [(listener, "http")] if frames is None else [(listener, "http"), (frames, "frames")]
        return Fronts(service, door.api, listeners)

    async def _drain(self, service: Service) -> None:
        left = await service.drain(self.settings.shutdown_timeout)
        if left:
            log.warning("%d requests were not finished within %g s", left, self.settings.shutdown_timeout)

    def _handle_signals(self, supervisor: Supervisor | Fleet) -> None:
        loop = asyncio.get_running_loop()

        def stop(name: str) -> None:
            if not self.wanted.is_set():
                log.info("%s: finishing what is in flight (Ctrl-C ends it at once)", name)
                self.wanted.set()
            elif name == "SIGINT":
                supervisor.abort()
                os._exit(ABORTED)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number.name)


def _dispatcher(settings: Settings) -> Dispatcher:
    from .dispatch import Dispatcher
    from .scheduler import Scheduler

    scheduler = Scheduler(
        max_atoms=settings.max_atoms,
        max_queue_atoms=settings.max_queue_atoms,
        max_queue_requests=settings.max_queue_requests,
    )
    if settings.max_batch_ms is not None:
        scheduler.max_batch_seconds = settings.max_batch_ms / 1000
    return Dispatcher(scheduler)


def _fleet(settings: Settings, registry: models.Registry, devices: list[Device], loader: str) -> tuple[Spread, Fleet]:
    """A queue over several devices, and who keeps their engines alive."""
    from .fleet import Fleet
    from .spread import Spread
    from .supervision import Supervisor

    members = [
        Supervisor(
            settings, registry if k == 0 else models.Registry(), _dispatcher(settings), loader=loader, device=device,
            leads=k == 0,
        )
        for k, device in enumerate(devices)
    ]  # fmt: skip
    spread = Spread([m.dispatcher for m in members], settings.max_queue_atoms, settings.max_queue_requests)
    return spread, Fleet(members, [device.name for device in devices])
