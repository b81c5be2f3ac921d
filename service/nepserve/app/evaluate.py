"""``POST /v1/evaluate``: bytes in, one packed block through the queue and the engine, bytes out.

While the queue is full, requests are refused by their headers alone: reading and decoding what is refused anyway would
take the time that those who are in the queue need.

It is written for the force call of a running simulation: no body model, no dependency, no timer and no task of its
own unless the request is large or has to wait.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

import numpy as np

from nepcore.errors import StructureError
from nepcore.structures import Predictions
from nepserve import wire
from nepserve.wire.request import MAX_NAME, WireError, shorten

from .limits import ClientGone

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from typing import TypeVar

    from numpy.typing import NDArray
    from starlette.types import Receive

    from nepcore.structures import Structures
    from nepserve.dispatch import Answer
    from nepserve.models import Version
    from nepserve.scheduler import Priority

    from .door import Call
    from .problems import Headers
    from .service import Service

    T = TypeVar("T")

LARGE_BODY = 256 * 1024
LARGE_BLOCK = 20_000
"""Bodies, and blocks of atoms, from which on decoding and encoding leave the event loop to others."""

PATIENCE = 0.05
"""Seconds a request may wait before somebody looks whether its client is still there."""

_MAX_FIELDS = 16

_MAX_TYPES = 64
"""Content types, as they are written, of which is learned what a byte stands for."""


class Wish(NamedTuple):
    """What the headers of a request say."""

    content_type: str
    accept: str
    query: Mapping[str, str]
    priority: Priority
    timeout: float


class Examined(NamedTuple):
    """A request as its model sees it.

    Attributes:
        errors: What is wrong with structures, by index: with their form, for the model, for the device.
        chosen: Indices of the others; None if there is nothing wrong.
        block: The others.
        work: Work of each of them.
    """

    errors: dict[int, StructureError]
    chosen: NDArray[np.int64] | None
    block: Structures
    work: NDArray[np.float64]


class Evaluate:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._density: dict[str, float] = {}

    async def answer(self, call: Call, receive: Receive, query_string: bytes) -> tuple[int, Headers, bytes]:
        """Status, headers and body of the answer.

        Raises:
            WireError, and whatever else :func:`.problems.as_wire_error` knows: The request cannot be answered.
            ClientGone: Nobody waits for the answer.
        """
        service = self.service
        if call.method != "POST":
            raise WireError(None, "method_not_allowed", f"{call.method} is not for this address", allow=["POST"])
        service.refuse_unless_serving()
        wish = wish_of(call.headers, query_string, service.settings.request_timeout)
        # What cannot be read or answered in any case is refused before it is sent.
        wire.negotiate(wish.accept, wish.content_type)
        sent = 0 if service.bodies.check(call.headers) else int(call.headers.get(b"content-length", 0))
        service.dispatcher.refuse_if_full(0.5 * sent * self._density.get(wish.content_type, 0.0))
        body = await service.bodies.read(receive, call.headers)
        service.in_flight += 1
        try:
            service.refuse_unless_serving()
            large = len(body) > LARGE_BODY
            request = await run_where(large, self._decode, body, wish)
            del body
            self._learn(wish.content_type, sent, request.structures.n_atoms)
            version = service.registry.get(request.model)
            call.model = version.name
            version.acquire()
            try:
                return await self._evaluated(call, receive, wish, request, version, large)
            finally:
                version.release()
        finally:
            service.in_flight -= 1

    async def _evaluated(
        self, call: Call, receive: Receive, wish: Wish, request: wire.Request, version: Version, large: bool
    ) -> tuple[int, Headers, bytes]:
        if request.errors:
            request = request.with_elements(version.source.file.elements)
            request.refuse_single()
        examined = await run_where(large, self._examine, version, request)
        if request.single and examined.errors:
            raise self._refusal(examined.errors[0])
        answer = None
        if len(examined.block):
            answer = await unless_gone(
                self.service.dispatcher.evaluate(
                    version.key,
                    examined.block,
                    request.properties,
                    client=call.client,
                    priority=wish.priority,
                    timeout=wish.timeout,
                    work=examined.work,
                ),
                receive,
            )
        call.answer = answer
        if answer is None:
            predictions = Predictions.failed(
                request.structures.counts,
                request.properties,
                examined.errors,
                descriptor_size=version.source.file.dim,
            )
        elif examined.chosen is None:
            predictions = answer.predictions
        else:
            predictions = answer.predictions.among(request.structures.counts, examined.chosen, examined.errors)
        self._count(version, request.structures.n_atoms, predictions, answer)
        if request.single and predictions.errors:
            raise self._refusal(predictions.errors[0])
        large = large or request.structures.n_atoms > LARGE_BLOCK
        media_type, body = await run_where(large, wire.encode, request, predictions, wish.accept, version.name)
        headers: Headers = [(b"content-type", media_type.encode()), (b"content-length", b"%d" % len(body))]
        if answer is not None:
            headers += _timings(answer)
            # Clients of several servers go by it.
            headers.append((b"x-queue-atoms", b"%d" % self.service.dispatcher.waiting.atoms))
        return 200, headers, body

    def _learn(self, content_type: str, sent: int, atoms: int) -> None:
        """Learn how many atoms a byte of a body stands for."""
        if sent and (content_type in self._density or len(self._density) < _MAX_TYPES):
            found = atoms / sent
            self._density[content_type] = 0.9 * self._density.get(content_type, found) + 0.1 * found

    def _decode(self, body: bytes | bytearray, wish: Wish) -> wire.Request:
        return wire.decode(wish.content_type, body, limits=self.service.limits, query=wish.query)

    def _examine(self, version: Version, request: wire.Request) -> Examined:
        structures = request.structures
        errors, work = version.admission.examine(structures)
        counts, most = structures.counts, self.service.dispatcher.max_atoms
        if len(counts) and int(counts.max()) > most:
            for i in np.flatnonzero(counts > most).tolist():
                errors[i] = StructureError("too_large", f"{counts[i]:,} atoms; at most {most:,} are taken")
        errors.update(request.errors)
        if not errors:
            return Examined(errors, None, structures, work)
        chosen = np.setdiff1d(np.arange(len(structures)), np.fromiter(errors, np.int64, len(errors)))
        return Examined(errors, chosen, structures.select(chosen), work[chosen])

    def _refusal(self, error: StructureError) -> WireError:
        refusal = WireError.from_structure(error)
        if error.code in {"too_large", "out_of_memory"}:
            refusal.extra["max_atoms"] = self.service.dispatcher.max_atoms
        return refusal

    def _count(self, version: Version, atoms: int, predictions: Predictions, answer: Answer | None) -> None:
        metrics = self.service.metrics
        waited = None if answer is None else answer.queue_seconds
        metrics.evaluated(version.name, len(predictions), atoms, waited)
        for error in predictions.errors.values():
            metrics.failures.add(version.name, error.code)


async def run_where(elsewhere: bool, work: Callable[..., T], *arguments: Any) -> T:
    """Do ``work`` here and now, or in a thread if it is long and the event loop has others to serve."""
    return await asyncio.to_thread(work, *arguments) if elsewhere else work(*arguments)


def wish_of(headers: Mapping[bytes, bytes], query_string: bytes, longest: float) -> Wish:
    """What headers and query string say.

    Raises:
        WireError: A header or a query string that cannot be read.
    """
    accept = headers.get(b"accept", b"*/*").decode("latin-1")
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    return Wish(content_type, accept, _query(query_string), _priority(headers), _timeout(headers, longest))


def _priority(headers: Mapping[bytes, bytes]) -> Priority:
    given = headers.get(b"x-priority")
    if given is None or given == b"interactive":
        return "interactive"
    if given == b"bulk":
        return "bulk"
    raise WireError(
        None, "bad_header", f"X-Priority is {given.decode('latin-1')!r}; wanted interactive or bulk", field="X-Priority"
    )


def _timeout(headers: Mapping[bytes, bytes], longest: float) -> float:
    given = headers.get(b"x-request-timeout")
    if given is None:
        return longest
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise WireError(
            None,
            "bad_header",
            f"X-Request-Timeout is {given.decode('latin-1')!r}; wanted a number of seconds above 0",
            field="X-Request-Timeout",
        )
    return min(seconds, longest)


def _query(query_string: bytes) -> dict[str, str]:
    if not query_string:
        return {}
    try:
        pairs = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise WireError(None, "bad_value", f"the query string has more than {_MAX_FIELDS} fields") from None
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise WireError(
            None, "duplicate_key", f"the query string has the key {shorten(twice)} twice", field=twice[:MAX_NAME]
        )
    return found


def _timings(answer: Answer) -> Headers:
    timing = (
        f"queue;dur={1e3 * answer.queue_seconds:.3f}, pack;dur={1e3 * answer.pack_seconds:.3f}, "
        f"device;dur={1e3 * answer.device_seconds:.3f}, unpack;dur={1e3 * answer.unpack_seconds:.3f}"
    )
    return [(b"server-timing", timing.encode()), (b"x-batch-atoms", b"%d" % answer.batch_atoms)]


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of ``work``, which is cancelled when the client goes away.

    Looking for the client costs a task; a request that is answered at once does not pay for it.

    Raises:
        ClientGone: It went away.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    watcher: asyncio.Task[None] | None = None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            # A server that says something else at once must not be asked without pause.
            await asyncio.sleep(PATIENCE)
        gone = True
        task.cancel()

    def begin() -> None:
        nonlocal watcher
        watcher = loop.create_task(watch())

    timer = loop.call_later(PATIENCE, begin)
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        if hasattr(task, "uncancel"):  # Python 3.11
            task.uncancel()
        raise ClientGone from None
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
