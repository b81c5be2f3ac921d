"""The asynchronous client, on httpx."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx

from nepcore.structures import DEFAULT_PROPERTIES, Predictions

from . import answers, bodies
from .connection import KEEP_ALIVE, Answer
from .errors import (
    ConnectionFailed,
    InvalidAnswer,
    NepserveError,
    Overloaded,
    StructureRejected,
    Timeout,
    from_answer,
    give_up,
    hopeless,
    late,
    unreachable,
)
from .options import (
    USER_AGENT,
    check_dtype,
    check_key,
    check_priority,
    check_timeout,
    new_request_id,
    tls_context,
)
from .replicas import Course, Replica, Replicas, Servers
from .retry import Attempts, Retry

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from nepcore.structures import Prediction, Structures

    from .address import Address
    from .bodies import OnError, StructureLike

IN_FLIGHT = 4
"""Bodies of one ``evaluate_many`` under way together at each server."""

_CONNECT_SECONDS = 10.0
_MOVE_SECONDS = 3.0


class AsyncClient:
    """The client for ``asyncio`` programs: the methods of :class:`nepserve.client.Client`, to be awaited.

    One object serves any number of tasks of a running event loop; in another loop, or after a fork, it opens new
    connections. Arguments and attributes are those of ``Client``. Proxies named in the environment are not used.
    """

    def __init__(
        self,
        url: Servers | Sequence[str],
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 60.0,
        retries: Retry | int = Retry(),  # noqa: B008 - frozen
        dtype: str = "float64",
        priority: str | None = None,
        verify: bool | str | os.PathLike[str] = True,
    ) -> None:
        """Prepare a client; nothing is sent yet. See :class:`nepserve.client.Client` for the arguments."""
        self._replicas = Replicas(url)
        self.url = self._replicas.text
        self.model_name = model
        self.timeout = check_timeout(timeout)
        self.retries = Retry(limit=retries) if isinstance(retries, int) else retries
        self.dtype = check_dtype(dtype)
        self.priority = check_priority(priority)
        self._verify = verify if isinstance(verify, bool) else os.fspath(verify)
        self._key = check_key(api_key)
        self._tls: ssl.SSLContext | None = None
        for replica in self._replicas.members:
            self._context(replica.address)
        self._http: dict[Address, httpx.AsyncClient] = {}
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_http": {}, "_home": None, "_tls": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for replica in self._replicas.members:
            self._context(replica.address)

    def _context(self, address: Address) -> ssl.SSLContext | None:
        if address.tls and self._tls is None:
            self._tls = tls_context(address, self._verify)
        return self._tls if address.tls else None

    def __repr__(self) -> str:
        model = "" if self.model_name is None else f", model={self.model_name!r}"
        return f"{type(self).__name__}({self.url!r}{model})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. A later call opens a new one."""
        clients, self._http = self._http, {}
        if self._home == (os.getpid(), asyncio.get_running_loop()):
            for http in clients.values():
                await http.aclose()

    async def evaluate(
        self,
        structure: StructureLike | Structures,
        properties: Iterable[str] = DEFAULT_PROPERTIES,
        *,
        model: str | None = None,
        timeout: float | None = None,
    ) -> Prediction:
        """Evaluate one structure; see :meth:`nepserve.client.Client.evaluate`."""
        names = bodies.check_properties(properties)
        block = bodies.gather_one(structure)
        body = bodies.request_body(block, names, model or self.model_name, self.dtype, single=True)
        seconds = self.timeout if timeout is None else check_timeout(timeout)
        answer, request_id, url = await self._post(body, self.priority, seconds, block.n_atoms)
        found = answers.read_answer(answer, block, names, url=url, request_id=request_id)
        return answers.one_result(found, names, url=url, request_id=request_id)

    async def evaluate_many(
        self,
        structures: Structures | Iterable[StructureLike],
        properties: Iterable[str] = DEFAULT_PROPERTIES,
        *,
        chunk_atoms: int = 65_536,
        on_error: OnError = "raise",
        progress: Callable[[int, int], None] | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> Predictions:
        """Evaluate any number of structures; see :meth:`nepserve.client.Client.evaluate_many`.

        Of several faults the first to be found is raised, and the bodies still under way are abandoned.
        """
        names = bodies.check_properties(properties)
        seconds = self.timeout if timeout is None else check_timeout(timeout)
        pace = bodies.Pace(chunk_atoms, seconds)
        work = bodies.gather(structures)
        answers.raise_first(work.rejected, bodies.check_on_error(on_error), self.url)
        priority = bodies.many_priority(self.priority, pace, work)
        offsets, B = work.structures.offsets, len(work.structures)
        done: dict[int, Predictions] = {}
        finished = len(work.rejected)
        start = 0

        async def solve(first: int, last: int) -> None:
            block = work.structures.slice(first, last)
            body = bodies.request_body(block, names, model or self.model_name, self.dtype)
            began = time.monotonic()
            try:
                answer, request_id, url = await self._post(body, priority, seconds, block.n_atoms)
                found = answers.read_answer(answer, block, names, url=url, request_id=request_id)
            except NepserveError as error:
                if bodies.cuts(error, last - first):
                    middle = (first + last) // 2
                    await solve(first, middle)
                    await solve(middle, last)
                    return
                if not isinstance(error, StructureRejected):
                    raise error.concerning(work.span(first, last)) from None
                if on_error == "raise":
                    raise error.at(work.index(first)) from None
                done[first] = bodies.failed_block(block, names, self.dtype, error)
                return
            pace.note(block.n_atoms, time.monotonic() - began)
            errors = {work.index(first + i): error for i, error in found.errors.items()}
            answers.raise_first(errors, on_error, url, request_id)
            done[first] = found

        async def work_off() -> None:
            nonlocal start, finished
            while start < B:
                first, start = start, pace.stop(offsets, start)
                last = start
                try:
                    await solve(first, last)
                except BaseException:
                    # The others find nothing more to do, even one that misses its cancellation.
                    start = B
                    raise
                finished += last - first
                if progress is not None:
                    progress(finished, len(work.counts))

        await _together([work_off() for _ in range(IN_FLIGHT * max(len(self._replicas), 1))])
        return bodies.join(work, [done[k] for k in sorted(done)], names, self.dtype)

    async def models(self) -> list[dict[str, Any]]:
        """What the server serves."""
        return answers.read_models(await self._get("/v1/models"), url=self.url)

    async def model(self, name: str | None = None) -> dict[str, Any]:
        """What one model is; ``name`` left out means the client's own."""
        found: dict[str, Any] = await self._get(answers.model_path(name or self.model_name))
        return found

    async def status(self) -> dict[str, Any]:
        """Queue, speed and limits of the server; of several, of one of them."""
        found: dict[str, Any] = await self._get("/v1/status")
        return found

    def replicas(self) -> list[dict[str, Any]]:
        """What is known of each server; see :meth:`nepserve.client.Client.replicas`."""
        now = time.monotonic()
        self._replicas.refresh(now)
        return self._replicas.describe(now)

    async def version(self) -> dict[str, Any]:
        """Versions of the server and of what it runs on."""
        found: dict[str, Any] = await self._get("/v1/version")
        return found

    async def ready(self, timeout: float = 5.0) -> bool:
        """Whether the server can evaluate now; False also if nothing answers there."""
        try:
            return await self._not_ready(check_timeout(timeout)) is None
        except (ConnectionFailed, Timeout):
            return False

    async def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Wait for a server that starts, or that is not there yet; see :meth:`nepserve.client.Client`."""
        ends = time.monotonic() + check_timeout(timeout)
        for pause in answers.pauses():
            try:
                reason = await self._not_ready(min(max(ends - time.monotonic(), 0.05), 5.0))
            except (ConnectionFailed, Timeout) as error:
                reason = str(error)
            if reason is None:
                return
            if time.monotonic() + pause >= ends:
                raise Timeout(f"{self.url} was not ready within {timeout:g} s: {reason}", url=self.url, seconds=timeout)
            await asyncio.sleep(pause)

    async def _not_ready(self, timeout: float) -> str | None:
        self._replicas.refresh(time.monotonic())
        if not self._replicas.several:
            return await self._one_not_ready(None, timeout)
        reasons = []
        for replica in self._replicas.members:
            try:
                reason = await self._one_not_ready(replica, timeout)
            except (ConnectionFailed, Timeout) as error:
                reason = str(error)
            if reason is None:
                return None
            reasons.append(reason)
        return "; ".join(reasons) or str(self._replicas.nowhere())

    async def _one_not_ready(self, replica: Replica | None, timeout: float) -> str | None:
        once = Retry(limit=0)
        answer, _, url = await self._call("GET", "/readyz", {}, b"", timeout, once, any_status=True, to=replica)
        return answers.not_ready(answer, url=url)

    async def _get(self, path: str) -> Any:
        accept = {"Accept": "application/json"}
        answer, _, url = await self._call("GET", path, accept, b"", self.timeout, self.retries)
        return answers.read_json(answer, url=url, path=path)

    async def _post(self, body: bytes, priority: str | None, timeout: float, atoms: int) -> tuple[Answer, str, str]:
        headers = answers.post_headers(priority)
        return await self._call("POST", "/v1/evaluate", headers, body, timeout, self.retries, atoms=atoms)

    async def _call(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        timeout: float,
        retries: Retry,
        *,
        any_status: bool = False,
        atoms: int = 0,
        to: Replica | None = None,
    ) -> tuple[Answer, str, str]:
        """The answer to a request, the request's id, and who answered; it is sent as often as it takes."""
        request_id = new_request_id()
        course = Course(self._replicas, Attempts(retries, time.monotonic(), timeout), atoms, to)
        sent = {**headers, "X-Request-Id": request_id}
        try:
            while True:
                left = course.attempts.left(time.monotonic())
                sent["X-Request-Timeout"] = f"{max(left, 0.001):.3f}"
                try:
                    answer = await _within(max(left, 0.001), self._once(method, path, sent, body, course))
                except asyncio.TimeoutError as fault:
                    course.timed_out(time.monotonic())
                    raise late(url=course.url, request_id=request_id, seconds=timeout) from fault
                except (httpx.HTTPError, OSError) as fault:
                    await self._pause(course, fault, request_id, len(body))
                    continue
                course.arrived(time.monotonic(), answer.headers.get)
                if answer.status == 200 or any_status:
                    return answer, request_id, course.url
                refusal = from_answer(
                    answer.status, answer.headers, bytes(answer.body), url=course.url, path=path, request_id=request_id
                )
                if not isinstance(refusal, Overloaded):
                    raise refusal
                now = time.monotonic()
                wait = course.refused(now, answer.status, refusal.retry_after)
                if wait is None:
                    raise give_up(refusal, course.attempts.repeated + 1, now - course.attempts.started)
                await asyncio.sleep(wait)
        finally:
            course.left()

    async def _once(self, method: str, path: str, headers: Mapping[str, str], body: bytes, course: Course) -> Answer:
        address = course.go(time.monotonic()).address
        response = await self._connected(address, course.may_move).request(
            method, address.base + path, headers=dict(headers), content=body or None
        )
        return Answer(response.status_code, response.headers, response.content)

    async def _pause(self, course: Course, error: httpx.HTTPError | OSError, request_id: str, size: int) -> None:
        """Wait before the next attempt after a connection failed, or give up."""
        attempts = course.attempts
        cut = isinstance(error, (httpx.NetworkError, httpx.RemoteProtocolError)) and not isinstance(
            error, httpx.ConnectError
        )
        if not isinstance(error, (httpx.TransportError, OSError)) or (
            # The one class stands for connections that end early and for what is no HTTP at all.
            isinstance(error, httpx.RemoteProtocolError) and not re.search("disconnected|closed connection", str(error))
        ):
            raise InvalidAnswer(
                f"{course.url} does not speak HTTP: {error}. Is the address right, and is it http or https?",
                url=course.url, request_id=request_id,
            ) from error  # fmt: skip
        if cut and not attempts.renewed:
            # A kept connection that the server closed just as it was used looks the same: nobody's fault.
            attempts.renewed = True
            return
        now = time.monotonic()
        cause = _system_error(error)
        wait = course.failed(now, cut=cut, hopeless=hopeless(cause))
        if wait is None:
            raise unreachable(
                cause, url=course.url, request_id=request_id, attempts=attempts.repeated + 1,
                seconds=now - attempts.started, size=size,
            ) from error  # fmt: skip
        await asyncio.sleep(wait)

    def _connected(self, address: Address, may_move: bool) -> httpx.AsyncClient:
        """The HTTP client of the running loop for a server."""
        home = (os.getpid(), asyncio.get_running_loop())
        if self._home != home:
            # Connections of a loop that is gone cannot be closed any more, nor used; its collector has them.
            self._http = {}
            self._home = home
        http = self._http.get(address)
        if http is None:
            headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
            if self._key is not None:
                headers["Authorization"] = f"Bearer {self._key}"
            http = self._http[address] = httpx.AsyncClient(
                headers=headers,
                transport=httpx.AsyncHTTPTransport(
                    verify=self._context(address) or False, uds=address.socket,
                    limits=httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=60.0),
                    socket_options=[] if address.socket else KEEP_ALIVE,
                ),
                timeout=httpx.Timeout(None, connect=_MOVE_SECONDS if may_move else _CONNECT_SECONDS),
                follow_redirects=False,
                trust_env=False,
            )  # fmt: skip
        return http


def _system_error(error: BaseException) -> OSError:
    """What the operating system said, out of the layers around it."""
    layer: BaseException | None = error
    while layer is not None:
        if isinstance(layer, OSError) and layer.errno is not None:
            return layer
        layer = layer.__cause__ or layer.__context__
    return ConnectionError(str(error) or type(error).__name__)


async def _within(seconds: float, job: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of ``job``, or ``asyncio.TimeoutError``."""
    if sys.version_info >= (3, 11):
        # wait_for of that version may lose a cancellation that comes with the result.
        async with asyncio.timeout(seconds):
            return await job
    return await asyncio.wait_for(job, seconds)


async def _together(jobs: list[Any]) -> None:
    """Await all; the first that fails ends the others, and is raised when they have ended."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
