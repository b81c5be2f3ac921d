"""What the fronts of a server share: its models, sessions, counters, its end, and all that is not evaluation."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from nepserve.app.door import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from starlette.types import ASGIApp, Message

    from nepserve.app.service import Service
    from nepserve.sessions import Session

    from .peer import Peer

log = logging.getLogger("nepserve")

COUNT_SECONDS = 2.0
"""What a front may take to say what it counted."""

TELL_SECONDS = 0.02
"""How often fronts are told of a queue that is full, for them to refuse requests by their headers."""

CROWDED_SECONDS = 0.2
"""How long the queue counts as full after it had no room for somebody: for less there may be room."""

SEEN_SECONDS = 10.0
"""What a front may take to hear of a model."""


class Hub:
    """The lead's side of all fronts.

    Args:
        service: Queue, models, sessions and counters of the server.
        api: The application that answers what is neither evaluation nor session.

    Attributes:
        peers: Those that are connected, ready or not.
        room: Called when a front has fewer connections than before, or has come or gone.
    """

    def __init__(self, service: Service, api: ASGIApp) -> None:
        self.service = service
        self.peers: list[Peer] = []
        self.room: Callable[[], None] = lambda: None
        self._api = api
        self._number = 0
        self._unready: str | None = ""
        self._crowded_until = 0.0
        self._telling: asyncio.Task[None] | None = None
        self._waiters: list[asyncio.Future[None]] = []
        service.registry.on_change = self.list_models
        service.sessions.on_drop = self._session_dropped
        service.fronts = self

    @property
    def ready(self) -> list[Peer]:
        """Those that take connections."""
        return [peer for peer in self.peers if peer.ready.is_set()]

    def joined(self, peer: Peer) -> None:
        """A front takes connections from now on."""
        if self.service.draining:
            peer.tell("refuse", {})
        self._tell_models(peer)
        self.room()

    def lost(self, peer: Peer) -> None:
        """A front has ended."""
        if peer in self.peers:
            self.peers.remove(peer)
        self.acknowledged()
        self.room()

    # -- models ----------------------------------------------------------------------------------------------------

    def list_models(self) -> None:
        """Tell all fronts which models there are."""
        self._number += 1
        for peer in self.ready:
            self._tell_models(peer)

    def look(self) -> None:
        """Tell them why there is no model yet, if that has changed."""
        unready = None if len(self.service.registry) else self.service.engine.unready
        if unready != self._unready:
            self._unready = unready
            for peer in self.ready:
                peer.tell("unready", {"reason": unready})

    def _tell_models(self, peer: Peer) -> None:
        registry = self.service.registry
        versions = registry.versions
        body = {
            "number": self._number,
            "aliases": registry.aliases,
            "versions": [
                {
                    "key": v.key, "name": v.name, "origin": v.source.origin, "sha256": v.source.sha256,
                    "dtype": v.dtype, "path": str(v.source.copy.path),
                }
                for v in versions
            ],
        }  # fmt: skip
        peer.tell("unready", {"reason": None if versions else self.service.engine.unready})
        peer.list_models(body, versions)

    async def settled(self) -> None:
        """Wait until all fronts know the models that there are now."""
        end = time.monotonic() + SEEN_SECONDS
        number = self._number
        while any(peer.seen < number for peer in self.ready) and (left := end - time.monotonic()) > 0:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await asyncio.wait([waiter], timeout=left)

    def acknowledged(self) -> None:
        """A front knows the models, or has ended."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    # -- sessions --------------------------------------------------------------------------------------------------

    def _session_dropped(self, session: Session) -> None:
        for peer in self.peers:
            peer.session_dropped(session)

    # -- the queue -------------------------------------------------------------------------------------------------

    def crowded(self) -> None:
        """Somebody was refused for want of room: let all fronts know, for as long as it lasts."""
        self._crowded_until = time.monotonic() + CROWDED_SECONDS
        if self._telling is None:
            self._telling = asyncio.get_running_loop().create_task(self._tell_crowded())

    async def _tell_crowded(self) -> None:
        dispatcher, most = self.service.dispatcher, self.service.settings.max_queue_requests
        try:
            while time.monotonic() < self._crowded_until or dispatcher.waiting.requests >= most:
                waiting = dispatcher.waiting
                load = waiting.requests, waiting.atoms, waiting.work
                for peer in self.ready:
                    peer.tell("waiting", {"waiting": load, "retry_after": dispatcher.retry_after})
                await asyncio.sleep(TELL_SECONDS)
        finally:
            self._telling = None

    # -- counters, status, end -------------------------------------------------------------------------------------

    async def count(self, *, watch: bool = False) -> None:
        """Add up what the fronts counted since they were asked last.

        Args:
            watch: Note who is silent; only who asks regularly may, or many questions at once would make a busy front
                a hung one.
        """

        async def of(peer: Peer) -> int:
            if await peer.ask("count", {}, COUNT_SECONDS) is not None:
                peer.missed = 0
            elif watch:
                peer.missed += 1
            return 0

        await self._of_all(of)

    def counted(self, counted: dict[str, Any]) -> None:
        """Take what a front counted."""
        self.service.metrics.put(counted)
        self.service.in_flight = sum(peer.in_flight for peer in self.peers)

    async def drain(self, timeout: float) -> int:
        """Let all fronts refuse new work and finish what they have; how many requests are left after that time."""
        return sum(await self._of_all(lambda peer: self._drain(peer, timeout)))

    async def _drain(self, peer: Peer, timeout: float) -> int:
        said = await peer.ask("drain", {"timeout": timeout}, timeout + COUNT_SECONDS)
        return 0 if said is None and peer.gone.is_set() else peer.in_flight if said is None else int(said["left"])

    async def _of_all(self, ask: Callable[[Peer], Coroutine[Any, Any, int]]) -> list[int]:
        return await asyncio.gather(*(ask(peer) for peer in self.ready))

    def status(self) -> list[dict[str, Any]]:
        """State of the fronts, for people."""
        return [{"ready": peer.ready.is_set(), "pid": peer.pid, "connections": peer.connections} for peer in self.peers]

    # -- other routes ----------------------------------------------------------------------------------------------

    async def route(
        self, scope: dict[str, Any], call_of: dict[str, Any], content: bytes
    ) -> tuple[dict[str, Any], bytes]:
        """Answer a request that is neither evaluation nor session, with the application.

        Returns:
            Status, headers, route and note, for the front's answer and log; and the body.
        """
        if scope["path"] in {"/metrics", "/v1/status"}:
            await self.count()
        scope = {
            **scope, "type": "http", "asgi": {"version": "3.0"}, "headers": [tuple(pair) for pair in scope["headers"]],
            "client": None if scope["client"] is None else tuple(scope["client"]),
            "server": None if scope["server"] is None else tuple(scope["server"]),
        }  # fmt: skip
        call = Call(scope)
        call.id = call_of["id"]
        keys = self.service.keys
        if len(keys):
            call.key = keys.match(call.headers.get(b"authorization"))
        inner = {**scope, "nepserve.call": call}
        told: dict[str, Any] = {"status": 500, "headers": []}
        parts: list[bytes] = []
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                told.update(status=message["status"], headers=[list(pair) for pair in message["headers"]])
            else:
                parts.append(message.get("body", b""))

        try:
            await self._api(inner, receive, send)
        except Exception as error:
            # The application has made its answer of it already.
            log.error("request %s failed: %s", call.id, error, exc_info=error, extra={"request_id": call.id})
        if call.method != "GET":
            await self.settled()
        told["route"] = getattr(inner.get("route"), "path", "other")
        told["note"] = call.note
        return told, b"".join(parts)
