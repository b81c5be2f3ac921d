"""What the routes stand on: one object that holds the parts of a running server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from nepserve.wire.request import Limits, WireError

from .limits import Bodies
from .metrics import Metrics

if TYPE_CHECKING:
    from typing import Any

    from nepserve.dispatch import Dispatcher
    from nepserve.models import Registry, Source, Version
    from nepserve.settings import Settings

    from .auth import Keys


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

    def status(self) -> dict[str, Any]:
        """State of the engine, for people: process, device, memory, progress of loading, restarts."""
        ...

    async def serve(self, source: Source, dtype: str) -> Version:
        """Load a model and point its name to it once it is warm; the version it replaces serves until then."""
        ...

    async def unserve(self, name: str) -> None:
        """Take a model away; requests that hold it are answered first."""
        ...


@dataclass
class Service:
    """The parts of a server.

    Attributes:
        draining: No more work is taken; once true it stays so.
        in_flight: Evaluations whose request has arrived and whose answer has not been made.
    """

    settings: Settings
    registry: Registry
    dispatcher: Dispatcher
    engine: Engine
    keys: Keys
    metrics: Metrics = field(default_factory=Metrics)
    started: float = field(default_factory=time.time)
    draining: bool = False
    in_flight: int = 0

    def __post_init__(self) -> None:
        self.limits = Limits(self.settings.max_body, self.settings.max_structures, self.settings.max_atoms)
        self.bodies = Bodies(self.settings.max_body, self.settings.receive_timeout)

    async def drain(self, timeout: float) -> int:
        """Take no more work, and wait until what is in flight is answered; how many requests are left after that."""
        if not self.draining:
            self.draining = True
            # What has not arrived whole was not accepted yet.
            self.bodies.cut(draining())
        end = time.monotonic() + timeout
        while self.in_flight and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return self.in_flight

    def refuse_unless_serving(self) -> None:
        """Raise 503 while there is nothing to evaluate with, or no more work is taken."""
        if self.draining:
            raise draining()
        if not len(self.registry):
            reason = self.engine.unready
            if reason is not None:
                raise WireError(None, "starting", reason, retry_after=1)


def draining() -> WireError:
    """Refusal of a server that is about to stop."""
    return WireError(None, "draining", "this server is about to stop; ask another one, or again later", retry_after=1)
