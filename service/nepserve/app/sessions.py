"""Sessions by every way in: how one is opened, and a step of it examined, queued and answered.

``POST /v1/sessions`` opens one, ``PUT /v1/sessions/{id}/positions`` is a step, ``DELETE /v1/sessions/{id}`` ends it;
:mod:`.stream` has the ways on which frames follow each other without HTTP.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from nepserve import wire
from nepserve.sessions import Session
from nepserve.wire import frame, negotiation, steps
from nepserve.wire.request import WireError

from .evaluate import LARGE_BLOCK, LARGE_BODY, run_where, unless_gone, wish_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from starlette.types import Receive

    from nepcore.errors import StructureError
    from nepserve.dispatch import Answer
    from nepserve.models import Version
    from nepserve.scheduler import Priority

    from .door import Call
    from .problems import Headers
    from .service import Service, Table

ROUTE = "/v1/sessions"
STEP_ROUTE = "/v1/sessions/{id}/positions"
ONE_ROUTE = "/v1/sessions/{id}"

_JSON = (b"content-type", b"application/json")


def lost(id_: str = "") -> WireError:
    """What is told of a session that is not there."""
    which = f"session {id_[:40]!r}" if id_ else "this session"
    return WireError(None, "session_lost", f"{which} is not known here, or no more; open it again and repeat the step")


class Step:
    """A step that is queued: what it holds on to until :meth:`close`."""

    __slots__ = ("_closed", "_service", "_version", "answer", "job", "model", "properties")

    def __init__(self, service: Service, version: Version) -> None:
        self._service = service
        self._version = version
        self._closed = False
        self.model = version.name
        self.properties: tuple[str, ...] = ()
        self.job = 0
        self.answer: asyncio.Future[Answer]
        version.acquire()
        service.in_flight += 1

    def close(self) -> None:
        """Let go of the model; a step that was not answered is taken back."""
        if self._closed:
            return
        self._closed = True
        self._version.release()
        self._service.in_flight -= 1
        if self.job:
            self._service.dispatcher.withdraw(self.job)


class Stepping:
    """The sessions of a server at work."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.sessions: Table = service.sessions

    # -- for every way in ------------------------------------------------------------------------------------------

    async def open(
        self, message: dict[str, Any], client: str, instead: Session | None = None, *, tied: bool = False
    ) -> Session:
        """Open a session, ``instead`` of another that goes once it is sure that there is a new one.

        A ``tied`` one is dropped with its connection, by whoever calls.

        Raises:
            WireError, and whatever else :func:`.problems.as_wire_error` knows: It cannot be.
        """
        service = self.service
        service.refuse_unless_serving()
        opening = steps.read_opening(message, service.limits)
        version = service.registry.get(opening.model)
        session = Session(client, opening, time.monotonic())
        self._check_opening(session, version)
        # Only now, as a session may take the place of others.
        if instead is not None:
            self.sessions.drop(instead)
        await self.sessions.keep(session, tied=tied)
        return session

    def _check_opening(self, session: Session, version: Version) -> None:
        """Say at once what every step would say, but for what depends on positions."""
        most = self.service.dispatcher.max_atoms
        if len(session) > most:
            raise WireError(None, "too_large", f"{len(session):,} atoms; at most {most:,} are taken", max_atoms=most)
        block = session.block(np.zeros((len(session), 3)), None)
        errors, _ = version.admission.examine(block)
        error = errors.get(0)
        if error is not None and error.field in {"numbers", "temperature", "cell"} and error.code != "too_dense":
            raise WireError.from_structure(error)

    def describe(self, session: Session) -> dict[str, Any]:
        """A session, for its client."""
        opening = session.opening
        return {
            "id": session.id,
            "model": self.service.registry.get(opening.model).name,
            "n_atoms": len(session),
            "properties": list(opening.properties),
            "pbc": opening.pbc.tolist(),
            "idle_timeout": self.sessions.idle,
        }

    def here(self, id_: str, client: str) -> Session:
        """As :meth:`find`, among those that are known here."""
        session = self.sessions.get(id_, client)
        if session is None:
            raise lost(id_)
        return session

    async def find(self, id_: str, client: str) -> Session:
        """The client's session of that id.

        Raises:
            WireError: ``session_lost``.
        """
        session = await self.sessions.find(id_, client)
        if session is None:
            raise lost(id_)
        return session

    def begin(
        self,
        session: Session,
        positions: NDArray[np.float64],
        cell: NDArray[np.float64] | None,
        properties: tuple[str, ...] | frozenset[str],
        priority: Priority = "interactive",
        timeout: float | None = None,
    ) -> Step:
        """Queue a step; whoever calls closes it.

        Raises:
            WireError, and whatever else :func:`.problems.as_wire_error` knows: It cannot be evaluated.
        """
        service = self.service
        service.refuse_unless_serving()
        if session.lost:
            raise lost()
        version = service.registry.get(session.opening.model)
        block = session.block(positions, cell)
        error, work = session.examine(version, block)
        if error is not None:
            raise self.refusal(error)
        self.sessions.touch(session, time.monotonic())
        step = Step(service, version)
        try:
            step.job, step.answer = service.dispatcher.submit(
                version.key, block, properties, client=session.owner, priority=priority,
                timeout=service.settings.request_timeout if timeout is None else timeout, work=work,
            )  # fmt: skip
        except BaseException:
            step.close()
            raise
        return step

    def values_of(self, step: Step, answer: Answer) -> Mapping[str, NDArray[Any]]:
        """The arrays of a step that was answered, counted.

        Raises:
            WireError: It failed.
        """
        predictions = answer.predictions
        self.service.metrics.evaluated(step.model, 1, int(predictions.counts[0]), answer.queue_seconds)
        if predictions.errors:
            error = predictions.errors[0]
            self.service.metrics.failures.add(step.model, error.code)
            raise self.refusal(error)
        return predictions.values

    def refusal(self, error: StructureError) -> WireError:
        """The failure of a step as what its client is told."""
        told = WireError.from_structure(error)
        if error.code in {"too_large", "out_of_memory"}:
            told.extra["max_atoms"] = self.service.dispatcher.max_atoms
        return told

    # -- HTTP ------------------------------------------------------------------------------------------------------

    async def answer(self, call: Call, receive: Receive) -> tuple[int, Headers, bytes]:
        """Status, headers and body of the answer to a request below ``/v1/sessions``.

        Raises:
            WireError, and whatever else :func:`.problems.as_wire_error` knows: The request cannot be answered.
            ClientGone: Nobody waits for the answer.
        """
        id_, _, rest = call.path[len(ROUTE) + 1 :].partition("/")
        if not id_:
            call.route = ROUTE
            _only(call, "POST")
            return await self._open(call, receive)
        if rest == "positions":
            call.route = STEP_ROUTE
            _only(call, "PUT")
            return await self._step(call, receive, id_)
        call.route = ONE_ROUTE
        if rest == "stream":
            raise WireError(
                None, "bad_request", "this address is for a websocket: send GET with Connection: Upgrade", field=None
            )
        if rest:
            raise WireError(None, "not_found", f"there is nothing at {call.path}; see /docs")
        _only(call, "DELETE")
        self.sessions.drop(await self.find(id_, call.client))
        return 204, [], b""

    async def _open(self, call: Call, receive: Receive) -> tuple[int, Headers, bytes]:
        self.service.refuse_unless_serving()
        body = await self.service.bodies.read(receive, call.headers)
        content_type = call.headers.get(b"content-type", b"").decode("latin-1")
        _, message = await run_where(len(body) > LARGE_BODY, steps.read_map, content_type, body, self.service.limits)
        session = await self.open(message, call.client)
        described = self.describe(session)
        call.model = described["model"]
        content = orjson.dumps(described)
        return 200, [_JSON, (b"content-length", b"%d" % len(content))], content

    async def _step(self, call: Call, receive: Receive, id_: str) -> tuple[int, Headers, bytes]:
        service = self.service
        service.refuse_unless_serving()
        wish = wish_of(call.headers, b"", service.settings.request_timeout)
        framed = wish.content_type == frame.CONTENT_TYPE
        if not framed:
            negotiation.answer_type(wish.accept, negotiation.request_format(wish.content_type))
        body = await service.bodies.read(receive, call.headers)
        session = await self.find(id_, call.client)
        if framed:
            head, positions, cell = read_frame(body, len(session), service.limits.max_body)
            properties: tuple[str, ...] = frame.properties_of(head.flags)
        else:
            large = len(body) > LARGE_BODY
            form, message = await run_where(large, steps.read_map, wish.content_type, body, service.limits)
            positions, cell, asked, dtype = await run_where(large, steps.read_step, form, message, len(session))
            properties = asked or session.opening.properties
        step = self.begin(session, positions, cell, properties, wish.priority, wish.timeout)
        call.model = step.model
        try:
            answer = await unless_gone(_awaited(step.answer), receive)
            step.job = 0
            values = self.values_of(step, answer)
        finally:
            step.close()
        if framed:
            kind = frame.CONTENT_TYPE
            content = frame.pack_result(values, len(session), result_flags(head.flags, session), head.sequence)
        else:
            request = wire.Request(
                form, session.opening.model, properties, session.block(positions, cell), single=True, dtype=dtype
            )
            large = large or len(session) > LARGE_BLOCK
            kind, content = await run_where(large, wire.encode, request, answer.predictions, wish.accept, step.model)
        headers: Headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(content))]
        return 200, headers, content


def read_frame(
    data: bytes | bytearray, atoms: int, most: int
) -> tuple[frame.Head, NDArray[np.float64], NDArray[np.float64] | None]:
    """Head, positions and cell of a body that is the frame of one step.

    Raises:
        WireError: It is not.
    """
    if len(data) < frame.HEAD.size:
        raise frame.bad_frame(f"{len(data)} bytes came; the head of a frame has {frame.HEAD.size}")
    head = frame.read_head(data, most)
    return head, *frame.read_request(head, memoryview(data)[frame.HEAD.size :], atoms)


def result_flags(flags: int, session: Session) -> int:
    """Flags of the result of a step: a stress that does not exist is left out."""
    return flags & ~frame.CELL if session.fully_periodic else flags & ~(frame.CELL | frame.STRESS)


async def _awaited(answer: asyncio.Future[Answer]) -> Answer:
    return await answer


def _only(call: Call, method: str) -> None:
    if call.method != method:
        raise WireError(None, "method_not_allowed", f"{call.method} is not for this address", allow=[method])
