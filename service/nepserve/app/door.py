"""The outermost part of the application: request ids, keys, metrics and logs, and errors as problem documents.

It lets ``/v1/evaluate`` and ``/v1/sessions`` pass straight to their endpoints, which read and write bytes themselves,
and everything else to FastAPI. It is plain ASGI because it is on the way of every force call.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
import time
from typing import TYPE_CHECKING

from nepserve.wire.request import WireError

from . import problems, websocket
from .direct import DirectStep, session_of
from .limits import ClientGone
from .sessions import ROUTE as SESSIONS
from .sessions import lost
from .stream import STREAM_ROUTE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from nepserve.dispatch import Answer
    from nepserve.sessions import Session

    from .auth import Key
    from .connection import Connection
    from .evaluate import Evaluate
    from .service import Service
    from .sessions import Stepping

log = logging.getLogger("nepserve.access")

EVALUATE = "/v1/evaluate"
OPEN = frozenset({
    "/", "/healthz", "/readyz", "/v1/health/live", "/v1/health/ready", "/v2/health/live", "/v2/health/ready",
    "/docs", "/openapi.json", "/favicon.ico",
})  # fmt: skip
"""Addresses that need no key: probes have none to give, and the pages say nothing about this server's work."""

_PREFIX = secrets.token_hex(4)
_numbers = itertools.count(1)

_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


def _new_id() -> str:
    """An id that no other request of this or another server has: a random part drawn once, and a number."""
    return f"{_PREFIX}{next(_numbers):08x}"


class Call:
    """One request: who asks, what was said in its headers, and what is noted for metrics and logs."""

    __slots__ = (
        "answer",
        "client",
        "headers",
        "id",
        "key",
        "method",
        "model",
        "note",
        "path",
        "route",
        "started",
        "status",
    )

    def __init__(self, scope: Scope) -> None:
        self.started = time.perf_counter()
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        given = self.headers.get(b"x-request-id")
        self.id = given.decode() if given is not None and _ID.fullmatch(given) else _new_id()
        address = scope.get("client")
        self.client: str = address[0] if address else "local"
        self.key: Key | None = None
        self.model = ""
        self.answer: Answer | None = None
        self.route = ""
        self.status = 0
        self.note = ""


class Door:
    """The ASGI application of a server."""

    def __init__(self, service: Service, evaluate: Evaluate, stepping: Stepping, api: ASGIApp) -> None:
        self.service = service
        self.evaluate = evaluate
        self.stepping = stepping
        self.api = api
        self._finding: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.api(scope, receive, send)
            return
        call = Call(scope)
        try:
            self.admit(call)
            if call.path.startswith(SESSIONS) and call.path[len(SESSIONS) :][:1] in {"", "/"}:
                status, headers, body = await self.stepping.answer(call, receive)
                await self._send(call, send, status, headers, body)
            elif call.path == EVALUATE:
                call.route = EVALUATE
                status, headers, body = await self.evaluate.answer(call, receive, scope["query_string"])
                await self._send(call, send, status, headers, body)
            else:
                await self._through_api(call, scope, receive, send)
        except ClientGone:
            self._gone(call)
        except Exception as error:
            await self._refuse(call, send, error)
        finally:
            self.note(call)

    def takes(self, url: bytes) -> bool:
        """Whether a step (:func:`.direct.is_step`) may be begun with as soon as it is here."""
        sessions = self.stepping.sessions
        return not sessions.elsewhere or sessions.met(session_of(url))

    def direct(self, connection: Connection, body: bytes) -> DirectStep:
        """Begin with a step (:func:`.direct.is_step`) of which all is here."""
        call = Call({**connection.scope, "method": "PUT", "path": connection.url.decode()})
        cycle = DirectStep(
            self, call, connection.transport, connection.server_state.default_headers, connection.on_response_complete
        )
        connection.cycle = cycle  # type: ignore[assignment]
        cycle.begin(body)
        return cycle

    def abandon(self, call: Call) -> None:
        """Note a request whose client went away."""
        self._gone(call)
        self.note(call)

    def _gone(self, call: Call) -> None:
        call.status, call.note = 499, "the client went away"
        self.service.metrics.abandoned.add()

    def upgrade(self, connection: Connection, scope: Scope, rest: bytes) -> bool:
        """Make a session's stream of an HTTP connection that asks for a websocket.

        Returns:
            Whether the request was for one; then it was answered.
        """
        id_ = websocket.session_of(scope["path"])
        if id_ is None or dict(scope["headers"]).get(b"upgrade", b"").lower() != b"websocket":
            return False
        call = Call(scope)
        call.route = STREAM_ROUTE
        try:
            self.admit(call)
            if call.method != "GET":
                raise WireError(None, "method_not_allowed", f"{call.method} is not for this address", allow=["GET"])
            session = self.stepping.sessions.get(id_, call.client)
            if session is None and self.stepping.sessions.elsewhere:
                connection.transport.pause_reading()
                task = asyncio.get_running_loop().create_task(self._find_and_change(call, connection, id_, rest))
                self._finding.add(task)
                task.add_done_callback(self._finding.discard)
                return True
            if session is None:
                raise lost(id_)
            self._change(call, connection, session, rest)
        except WireError as error:
            call.status, call.note = error.status, error.code
            connection.refuse(error.status, error.code, error.detail)
        self.note(call)
        return True

    async def _find_and_change(self, call: Call, connection: Connection, id_: str, rest: bytes) -> None:
        """Go on with a websocket whose session was not met here yet; its connection is not read meanwhile."""
        try:
            session = await self.stepping.find(id_, call.client)
            if connection.transport.is_closing():
                return
            connection.transport.resume_reading()
            self._change(call, connection, session, rest)
        except Exception as error:
            wire_error = problems.as_wire_error(error) or problems.internal()
            call.status, call.note = wire_error.status, wire_error.code
            connection.refuse(wire_error.status, wire_error.code, wire_error.detail)
        self.note(call)

    def _change(self, call: Call, connection: Connection, session: Session, rest: bytes) -> None:
        """Make a websocket of a connection."""
        answer = websocket.accept(call.headers)
        call.status = 101
        transport = connection.hand_over()
        transport.write(answer)
        stream = websocket.WebSocket(self.stepping, connection.connections, transport, session)
        transport.set_protocol(stream)
        if rest:
            stream.data_received(rest)

    async def _refuse(self, call: Call, send: Send, error: Exception) -> None:
        """Answer with a problem. Not in ``__call__``: a local of a frame that the error's traceback holds would keep
        both, and the body with them, until the garbage is collected.
        """
        status, headers, body = self.problem(call, error)
        if call.status == 0:
            await self._send(call, send, status, headers, body)

    def problem(self, call: Call, error: Exception) -> tuple[int, problems.Headers, bytes]:
        """Status, headers and body of the answer to a request that failed; noted and counted."""
        wire_error = problems.as_wire_error(error)
        if wire_error is None:
            log.error("request %s failed: %s", call.id, error, exc_info=error, extra={"request_id": call.id})
            wire_error = problems.internal()
        call.note = wire_error.code
        if call.status == 0 and wire_error.status in _SHED:
            self.service.metrics.shed.add(wire_error.code)
        return problems.answer(wire_error, call.id)

    def admit(self, call: Call) -> None:
        """Check the key.

        Raises:
            WireError: 401 without a known key.
        """
        keys = self.service.keys
        if not len(keys):
            return
        call.key = keys.match(call.headers.get(b"authorization"))
        if call.key is not None:
            call.client = call.key.name
        elif call.path not in OPEN and not call.path.startswith("/docs/"):
            given = b"authorization" in call.headers
            raise WireError(
                None,
                "unauthorized",
                "this key is not known here"
                if given
                else "a key is needed: send it in the header 'Authorization: Bearer KEY'",
            )

    async def _through_api(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", call.id.encode())]
            await send(message)

        # Whoever asks for the head alone gets that of GET; uvicorn leaves the body out by its own scope.
        inner = {**scope, "method": "GET" if call.method == "HEAD" else call.method, "nepserve.call": call}
        try:
            await self.api(inner, receive, noting)
        finally:
            # The pattern of a route, not the path: metrics must not have a series for each path a stranger thinks of.
            call.route = getattr(inner.get("route"), "path", "other")

    async def _send(self, call: Call, send: Send, status: int, headers: problems.Headers, body: bytes) -> None:
        call.status = status
        headers.append((b"x-request-id", call.id.encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def note(self, call: Call) -> None:
        """Count and log a request that was answered."""
        seconds = time.perf_counter() - call.started
        route = call.route or "other"
        self.service.metrics.answered(call.model, route, call.status, seconds)
        if self.service.tracer is not None:
            self.service.tracer.note(call, seconds)
        if self.service.settings.access_log:
            log.info(
                "%s %s %s %d %.2f ms%s", call.client, call.method, call.path, call.status, 1000 * seconds,
                f" {call.note}" if call.note else "",
                extra={
                    "request_id": call.id, "client": call.client, "method": call.method, "path": call.path,
                    "status": call.status, "ms": round(1000 * seconds, 3), "model": call.model or None,
                },
            )  # fmt: skip


_SHED = frozenset({429, 503, 504})
