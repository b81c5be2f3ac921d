"""What the routes stand on: one object that holds the parts of a running server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from nepserve.models import public_name
from nepserve.sessions import Sessions
from nepserve.wire.request import Limits, WireError

from . import problems
from .limits import Bodies
from .metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from nepserve.dispatch import Dispatcher
    from nepserve.engine import Evaluated
    from nepserve.models import Registry, Source, Version
    from nepserve.scheduler import Batch
    from nepserve.sessions import Session
    from nepserve.settings import Settings
    from nepserve.spread import Spread

    from .auth import Keys
    from .tracing import Tracer


class Engine(Protocol):
    """What the routes ask of whoever keeps the engine alive."""

    @property
    def starting(self) -> bool:
        """Whether it was never ready yet."""
        ...

    @property
    def unready(self) -> str | None:
        """Why the server is not ready, in a sentence; None if it is."""
        ...

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the engine was heard of."""
        ...

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of memory that the engine uses, by kind."""
        ...

    def status(self) -> dict[str, Any]:
        """State of the engine, for people: process, device, memory, progress of loading, restarts."""
        ...

    async def serve(self, source: Source, dtype: str) -> Version:
        """Load a model and point its name to it once it is warm; the version it replaces serves until then."""
        ...

    async def unserve(self, name: str) -> None:
        """Take a model away; requests that hold it are answered first."""
        ...


class Serving(Protocol):
    """What is asked of the engine by whoever takes requests."""

    @property
    def unready(self) -> str | None:
        """Why the server is not ready, in a sentence; None if it is."""
        ...


class Fronts(Protocol):
    """Other processes that take requests for this one."""

    @property
    def ready(self) -> Sequence[Any]:
        """Those that do."""
        ...

    async def drain(self, timeout: float) -> int:
        """Let them take no more work, and wait until what they have is answered; how many requests are left."""
        ...

    def status(self) -> list[dict[str, Any]]:
        """State of each, for people."""
        ...


class Table(Protocol):
    """Where sessions are kept: :class:`nepserve.sessions.Sessions`, or the way to those of another process.

    Attributes:
        idle: Seconds without a step after which one is dropped.
        elsewhere: Whether there may be sessions that only :meth:`find` finds.
    """

    idle: float
    elsewhere: bool

    def __len__(self) -> int: ...

    def get(self, id_: str, owner: str) -> Session | None:
        """The owner's session of that id, if it is known here."""
        ...

    def met(self, id_: str) -> bool:
        """Whether the session of that id is known here, whoever's it is."""
        ...

    async def find(self, id_: str, owner: str) -> Session | None:
        """The owner's session of that id, if there is one."""
        ...

    async def keep(self, session: Session, *, tied: bool = False) -> None:
        """Keep a new one; a ``tied`` one as long as its connection lives, which whoever calls sees to."""
        ...

    def touch(self, session: Session, now: float) -> None:
        """Note a step."""
        ...

    def drop(self, session: Session) -> None:
        """Forget one; nothing if it is forgotten already."""
        ...

    def sweep(self, now: float) -> int:
        """Drop those that were idle for too long; how many."""
        ...


@dataclass
class Service:
    """The parts of a server.

    Attributes:
        draining: No more work is taken; once true it stays so.
        tracer: Who is told of each request, if traces are wished for.
        in_flight: Evaluations whose request has arrived and whose answer has not been made.
        sessions: Where sessions are kept; left out, here.
        fronts: The processes that take requests, if it is not this one.
    """

    settings: Settings
    registry: Registry
    dispatcher: Dispatcher | Spread
    engine: Engine
    keys: Keys
    metrics: Metrics = field(default_factory=Metrics)
    started: float = field(default_factory=time.time)
    draining: bool = False
    in_flight: int = 0
    tracer: Tracer | None = None
    sessions: Any = None
    fronts: Fronts | None = None

    def __post_init__(self) -> None:
        self.limits = Limits(self.settings.max_body, self.settings.max_structures, self.settings.max_atoms)
        self.bodies = Bodies(self.settings.max_body, self.settings.receive_timeout)
        if self.sessions is None:
            self.sessions = Sessions(
                self.settings.session_idle, self.settings.max_sessions, self.settings.max_sessions_per_key
            )

    def observe(self) -> None:
        """Let the metrics see queue, engine and batches."""
        metrics, dispatcher = self.metrics, self.dispatcher
        metrics.gauges.update({
            "requests_running": ("Requests wholly in the engine.", lambda: dispatcher.running),
            "requests_waiting": ("Requests that wait for it.", lambda: dispatcher.waiting.requests),
            "queue_atoms": ("Atoms that wait for it.", lambda: dispatcher.waiting.atoms),
            "requests_in_flight": ("Requests between body and answer.", lambda: self.in_flight),
            "sessions": ("Sessions kept.", lambda: len(self.sessions)),
            "ready": ("1 if the server is ready.", lambda: float(self.unready is None)),
            "engine_heartbeat_age_seconds": ("Since the engine was heard of.", lambda: self.engine.heartbeat_age),
        })  # fmt: skip
        metrics.memory = lambda: self.engine.memory
        metrics.models = lambda: [
            (v.name, v.source.sha256, str(v.info.get("backend", "")), v.dtype) for v in self.registry.versions
        ]

        def count(batch: Batch, evaluated: Evaluated) -> None:
            metrics.batch(public_name(batch.model), batch.atoms, batch.fill, evaluated.device_seconds, evaluated.splits)

        dispatcher.on_batch = count
        if (fronts := self.fronts) is not None:
            ready = "Processes that take requests for this one."
            metrics.gauges["fronts"] = ready, lambda: len(fronts.ready)

    @property
    def unready(self) -> str | None:
        """Why the server should get no traffic, in a sentence; None if it should."""
        if self.draining:
            return "this server is about to stop"
        if not self.dispatcher.healthy:
            return "requests do not get their turn"
        return self.engine.unready

    async def drain(self, timeout: float) -> int:
        """Take no more work, and wait until what is in flight is answered; how many requests are left after that."""
        if not self.draining:
            self.draining = True
            # What has not arrived whole was not accepted yet.
            self.bodies.cut(problems.draining())
        if self.fronts is not None:
            return await self.fronts.drain(timeout)
        end = time.monotonic() + timeout
        while self.in_flight and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return self.in_flight

    def refuse_unless_serving(self) -> None:
        """Raise 503 while there is nothing to evaluate with, or no more work is taken."""
        if self.draining:
            raise problems.draining()
        if not len(self.registry):
            reason = self.engine.unready
            if reason is not None:
                raise WireError(None, "starting", reason, retry_after=problems.RETRY_SECONDS)
