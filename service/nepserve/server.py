"""The server process: sockets, signals, the HTTP front and the engine beside it, from start to end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nepcore import __version__

from . import logs, models
from .app.auth import keys_of
from .devices import devices_of
from .settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    import uvicorn

    from .app.auth import Keys
    from .app.service import Service
    from .app.sessions import Stepping
    from .app.tracing import Tracer
    from .devices import Device
    from .dispatch import Dispatcher
    from .fleet import Fleet
    from .models import Source
    from .settings import Loaded, Settings
    from .spread import Spread
    from .supervision import Supervisor

log = logging.getLogger("nepserve")

SWEEP_SECONDS = 0.5
"""Seconds between two looks for clients that are too slow."""

SWITCH_SECONDS = 0.0005
"""How long a thread that decodes a large body may keep the interpreter from the event loop."""

ENGINE_SECONDS = 2.0
"""What the engine may take to end after its work is done."""

ABORTED = 130
GAVE_UP = 1
WRONG = 2

# mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


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
    context = tls_context(settings)
    tracer = tracer_of(settings)
    listener = listen(settings)
    try:
        frames = listen_for_frames(settings)
    except SettingsError:
        listener.close()
        raise
    _allow_connections(settings.max_connections)
    sys.setswitchinterval(SWITCH_SECONDS)
    _keep_freed_memory()
    process = _Process(settings, sources, listener, context, keys, secret, loader, frames, tracer)
    if listening is not None:
        process.hints = False
        listening(process.url)
    try:
        return _run(process.live())
    finally:
        listener.close()
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)
        if frames is not None:
            frames.close()
            if isinstance(where := settings.frame_address, Path):
                where.unlink(missing_ok=True)
        if tracer is not None:
            tracer.close()


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


def listen(settings: Settings) -> socket.socket:
    """The bound socket.

    Raises:
        SettingsError: The address is in use, or is not ours.
    """
    if settings.uds is not None:
        return _listen_unix(settings.uds)
    return _listen_tcp(settings.host, settings.port, "--port")


def listen_for_frames(settings: Settings) -> socket.socket | None:
    """The bound socket for frames; None if there is to be none.

    Raises:
        SettingsError: The address is in use, or is not ours.
    """
    where = settings.frame_address
    if where is None:
        return None
    return _listen_unix(where) if isinstance(where, Path) else _listen_tcp(settings.host, where, "--frame-socket")


def _listen_tcp(host: str, port: int, flag: str) -> socket.socket:
    where = f"{host}, port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingsError(f"cannot listen on {where}: {error.strerror or error}") from None
    try:
        # The port of a server that ended a moment ago is still remembered by the kernel.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        hint = f"; choose another with {flag} (0 takes a free one)" if in_use and port else ""
        raise SettingsError(f"cannot listen on {where}: {(error.strerror or str(error)).lower()}{hint}") from None
    return listener


def _listen_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise SettingsError(f"cannot listen on {path}: another server answers there")
            path.unlink()
        # Whoever may connect is decided by the folder; the socket itself is for its owner and group.
        mask = os.umask(0o117)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise SettingsError(f"cannot listen on {path}: {error.strerror or error}") from None
    except SettingsError:
        listener.close()
        raise
    return listener


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """TLS as the settings want it; None without a certificate.

    Raises:
        SettingsError: Certificate and key cannot be used.
    """
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        raise SettingsError(f"certificate {settings.ssl_certfile}, key {settings.ssl_keyfile}: {reason}") from None
    return context


def tracer_of(settings: Settings) -> Tracer | None:
    """Who is told of requests; None without ``tracing``.

    Raises:
        SettingsError: What it needs is not installed.
    """
    if not settings.tracing:
        return None
    from .app.tracing import Tracer

    try:
        return Tracer()
    except ImportError as error:
        raise SettingsError(f"tracing needs OpenTelemetry ({error}): pip install 'nepserve[otel]'") from None


class _Process:
    """One server from start to end."""

    def __init__(
        self,
        settings: Settings,
        sources: list[Source],
        listener: socket.socket,
        context: ssl.SSLContext | None,
        keys: Keys,
        secret: str | None,
        loader: str,
        frames: socket.socket | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.frames = frames
        self.tracer = tracer
        self.devices = [] if settings.devices is None else devices_of(settings.devices, settings.threads)
        self.settings = settings
        self.sources = sources
        self.listener = listener
        self.context = context
        self.keys = keys
        self.secret = secret
        self.loader = loader
        self.wanted = asyncio.Event()
        self.code = 0
        self.hints = settings.log_format == "text"
        self.started = time.perf_counter()

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
        keeping = asyncio.create_task(supervisor.run([(s, settings.dtype_of(s.name)) for s in self.sources]))
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
        from .app.connection import Connection, sweep
        from .app.factory import create_app
        from .app.service import Service
        from .supervision import EngineGaveUpError, UnusableModelError

        service = Service(self.settings, registry, dispatcher, supervisor, self.keys, tracer=self.tracer)
        service.observe()
        supervisor.on_restart = lambda reason: service.metrics.restarts.add()  # noqa: ARG005
        door = create_app(service)
        server = _server(door, self.settings, Connection, self.context)
        serving = asyncio.create_task(server.serve(sockets=[self.listener]))
        frames = await self._serve_frames(door.stepping, server.server_state.connections)
        others = [
            asyncio.create_task(_sweep(service, lambda now: sweep(server.server_state.connections, now))),
            asyncio.create_task(self._announce(supervisor)),
            waiting := asyncio.create_task(self.wanted.wait()),
        ]
        self._greet()
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
            if frames is not None:
                frames.close()
            server.should_exit = True
            await asyncio.wait([serving], timeout=5.0)
            for task in (serving, *others):
                task.cancel()
            await asyncio.gather(serving, *others, return_exceptions=True)

    async def _serve_frames(self, stepping: Stepping, connections: Any) -> asyncio.Server | None:
        """Take connections of the frame socket, if there is one."""
        if self.frames is None:
            return None
        from .app.stream import FrameSocket

        loop = asyncio.get_running_loop()

        def connect() -> FrameSocket:
            return FrameSocket(stepping, connections)

        if self.frames.family == socket.AF_UNIX:
            return await loop.create_unix_server(connect, sock=self.frames, backlog=2048)
        return await loop.create_server(connect, sock=self.frames, ssl=self.context, backlog=2048)

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
        if self.context is not None:
            loop.add_signal_handler(signal.SIGHUP, self._reload_certificate)

    def _reload_certificate(self) -> None:
        """Take a renewed certificate for the connections to come."""
        assert self.context is not None
        assert self.settings.ssl_certfile is not None
        try:
            self.context.load_cert_chain(self.settings.ssl_certfile, self.settings.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            log.error("the certificate stays as it was: %s", error)
        else:
            log.info("certificate read again")

    @property
    def url(self) -> str:
        """Where the server listens."""
        if self.settings.uds is not None:
            return f"unix:{self.settings.uds}"
        return self._url(*self.listener.getsockname()[:2])

    @property
    def own_url(self) -> str:
        """Where this machine finds it: an address that stands for all is none that can be asked everywhere."""
        if self.settings.uds is not None:
            return "http://localhost"
        host, port = self.listener.getsockname()[:2]
        return self._url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)

    @property
    def frames_address(self) -> str:
        """Where frames are spoken."""
        assert self.frames is not None
        if self.frames.family == socket.AF_UNIX:
            return f"frames://{self.frames.getsockname()}"
        host, port = self.frames.getsockname()[:2]
        return f"frames://[{host}]:{port}" if ":" in host else f"frames://{host}:{port}"

    def _url(self, host: str, port: int) -> str:
        scheme = "http" if self.context is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def _greet(self) -> None:
        if self.frames is not None:
            log.info("frames on %s", self.frames_address)
        log.info("nepserve %s on %s, API page %s/docs", __version__, self.url, self.url)
        for source in self.sources:
            elements = " ".join(source.file.elements)
            if source.origin == "bundled":
                log.info(
                    "model %s (%s): a DEMONSTRATION. No model was given, so this one, of seven metals after the EMT "
                    "potential, shows how the server answers. Serve your own with: nepserve serve nep.txt",
                    source.name, elements,
                )  # fmt: skip
            else:
                log.info(
                    "model %s (%s), %s, from %s",
                    source.name, elements, self.settings.dtype_of(source.name), source.origin,
                )  # fmt: skip
        if self.secret is not None:
            # On its own line and not in the log's format: it is for whoever started the server.
            print(f"API key made for this run: {self.secret}", file=sys.stderr)  # noqa: T201
        elif not self.settings.is_local and self.settings.insecure:
            log.warning("everybody who can reach %s may use this server (--insecure)", self.url)

    async def _announce(self, supervisor: Supervisor | Fleet) -> None:
        """Say when the server is ready, and how to ask it."""
        while supervisor.unready is not None:
            if not self.sources and not supervisor.starting:
                break
            await asyncio.sleep(0.02)
        engine = supervisor.status()
        served = ", ".join(
            f"{v.name} ({v.dtype}, backend {v.info.get('backend', 'unknown')})" for v in supervisor.registry.versions
        )
        log.info(
            "ready after %.1f s on %s: %s",
            time.perf_counter() - self.started,
            engine.get("name") or engine.get("device"),
            served or "no model yet",
        )
        if self.sources and self.hints:
            print(f"\nTry:\n  {self._example()}\n", file=sys.stderr)  # noqa: T201

    def _example(self) -> str:
        element = self.sources[0].file.elements[0]
        structure = f'{{"symbols": ["{element}", "{element}"], "positions": [[0, 0, 0], [0, 0, 2.4]]}}'
        if self.sources[0].file.temperature:
            structure = structure[:-1] + ', "temperature": 300}'
        model = f'"model": "{self.sources[0].name}", ' if len(self.sources) > 1 else ""
        key = "" if not len(self.keys) else " -H 'Authorization: Bearer KEY'"
        place = f"--unix-socket {self.settings.uds} {self.own_url}" if self.settings.uds else self.own_url
        return (
            f"curl {place}/v1/evaluate{key} -H 'Content-Type: application/json' "
            f"-d '{{{model}\"structure\": {structure}}}'"
        )


def _server(
    app: Any, settings: Settings, connection: type[asyncio.Protocol], context: ssl.SSLContext | None
) -> uvicorn.Server:
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


async def _sweep(service: Service, connections: Callable[[float], int]) -> None:
    """Cut off clients that are too slow."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        service.bodies.sweep(loop.time())
        service.sessions.sweep(time.monotonic())
        connections(loop.time())


def _allow_connections(wanted: int) -> None:
    """Raise the limit of open files towards what the connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + 256
    if soft < needed:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))


def _keep_freed_memory() -> None:
    """Tell glibc to keep the memory of large bodies: given back to the kernel it would be mapped anew each time."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_TRIM_THRESHOLD, 256 << 20)
    # The largest that glibc takes.
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def _run(work: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
