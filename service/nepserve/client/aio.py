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
from .address import parse_address
from .connection import Answer
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
from .retry import Attempts, Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from types import TracebackType

    from typing_extensions import Self

    from nepcore.structures import Prediction, Structures

    from .bodies import OnError, StructureLike

IN_FLIGHT = 4
"""Bodies of one ``evaluate_many`` under way together."""

_CONNECT_SECONDS = 10.0


class AsyncClient:
    """The client for ``asyncio`` programs: the methods of :class:`nepserve.client.Client`, to be awaited.

    One object serves any number of tasks of a running event loop; in another loop, or after a fork, it opens new
    connections. Arguments and attributes are those of ``Client``. Proxies named in the environment are not used.
    """

    def __init__(
        self,
        url: str,
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
        self._address = parse_address(url)
        self.url = self._address.text
        self.model_name = model
        self.timeout = check_timeout(timeout)
        self.retries = Retry(limit=retries) if isinstance(retries, int) else retries
        self.dtype = check_dtype(dtype)
        self.priority = check_priority(priority)
        self._verify = verify if isinstance(verify, bool) else os.fspath(verify)
        self._tls = tls_context(self._address, self._verify)
        self._key = check_key(api_key)
        self._reached = False
        self._http: httpx.AsyncClient | None = None
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_http": None, "_home": None, "_tls": None, "_reached": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tls = tls_context(self._address, self._verify)

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
        http, self._http = self._http, None
        if http is not None and self._home == (os.getpid(), asyncio.get_running_loop()):
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
        answer, request_id = await self._post(body, self.priority, seconds)
        found = answers.read_answer(answer, block, names, url=self.url, request_id=request_id)
        return answers.one_result(found, names, url=self.url, request_id=request_id)

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
                answer, request_id = await self._post(body, priority, seconds)
                found = answers.read_answer(answer, block, names, url=self.url, request_id=request_id)
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
            answers.raise_first(errors, on_error, self.url, request_id)
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

        await _together([work_off() for _ in range(IN_FLIGHT)])
        return bodies.join(work, [done[k] for k in sorted(done)], names, self.dtype)

    async def models(self) -> list[dict[str, Any]]:
        """What the server serves."""
        return answers.read_models(await self._get("/v1/models"), url=self.url)

    async def model(self, name: str | None = None) -> dict[str, Any]:
        """What one model is; ``name`` left out means the client's own."""
        found: dict[str, Any] = await self._get(answers.model_path(name or self.model_name))
        return found

    async def status(self) -> dict[str, Any]:
        """Queue, speed and limits of the server."""
        found: dict[str, Any] = await self._get("/v1/status")
        return found

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
        answer, _ = await self._call("GET", "/readyz", {}, b"", timeout, Retry(limit=0), any_status=True)
        return answers.not_ready(answer, url=self.url)

    async def _get(self, path: str) -> Any:
        answer, _ = await self._call("GET", path, {"Accept": "application/json"}, b"", self.timeout, self.retries)
        return answers.read_json(answer, url=self.url, path=path)

    async def _post(self, body: bytes, priority: str | None, timeout: float) -> tuple[Answer, str]:
        return await self._call("POST", "/v1/evaluate", answers.post_headers(priority), body, timeout, self.retries)

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
    ) -> tuple[Answer, str]:
        """The answer to a request and the request's id, sending it as often as it takes."""
        request_id = new_request_id()
        attempts = Attempts(retries, time.monotonic(), timeout)
        sent = {**headers, "X-Request-Id": request_id}
        while True:
            left = attempts.left(time.monotonic())
            sent["X-Request-Timeout"] = f"{max(left, 0.001):.3f}"
            try:
                answer = await _within(max(left, 0.001), self._once(method, path, sent, body))
            except asyncio.TimeoutError as fault:
                raise late(url=self.url, request_id=request_id, seconds=timeout) from fault
            except httpx.HTTPError as fault:
                await self._pause(attempts, fault, request_id, len(body))
                continue
            self._reached = True
            if answer.status == 200 or any_status:
                return answer, request_id
            refusal = from_answer(
                answer.status, answer.headers, bytes(answer.body), url=self.url, path=path, request_id=request_id
            )
            if not isinstance(refusal, Overloaded):
                raise refusal
            now = time.monotonic()
            wait = attempts.again(now, retry_after=refusal.retry_after)
            if wait is None:
                raise give_up(refusal, attempts.repeated + 1, now - attempts.started)
            await asyncio.sleep(wait)

    async def _once(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        response = await self._connected().request(
            method, self._address.base + path, headers=dict(headers), content=body or None
        )
        return Answer(response.status_code, response.headers, response.content)

    async def _pause(self, attempts: Attempts, error: httpx.HTTPError, request_id: str, size: int) -> None:
        """Wait before the next attempt after a connection failed, or give up."""
        cut = isinstance(error, (httpx.NetworkError, httpx.RemoteProtocolError)) and not isinstance(
            error, httpx.ConnectError
        )
        if not isinstance(error, httpx.TransportError) or (
            # The one class stands for connections that end early and for what is no HTTP at all.
            isinstance(error, httpx.RemoteProtocolError) and not re.search("disconnected|closed connection", str(error))
        ):
            raise InvalidAnswer(
                f"{self.url} does not speak HTTP: {error}. Is the address right, and is it http or https?",
                url=self.url, request_id=request_id,
            ) from error  # fmt: skip
        if cut and not attempts.renewed:
            # A kept connection that the server closed just as it was used looks the same: nobody's fault.
            attempts.renewed = True
            return
        now = time.monotonic()
        cause = _system_error(error)
        wait = None if hopeless(cause) else attempts.again(now, reached=self._reached, cut=cut)
        if wait is None:
            raise unreachable(
                cause, url=self.url, request_id=request_id, attempts=attempts.repeated + 1,
                seconds=now - attempts.started, size=size,
            ) from error  # fmt: skip
        await asyncio.sleep(wait)

    def _connected(self) -> httpx.AsyncClient:
        """The HTTP client of the running loop."""
        home = (os.getpid(), asyncio.get_running_loop())
        if self._http is None or self._home != home:
            # Connections of a loop that is gone cannot be closed any more, nor used; its collector has them.
            headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
            if self._key is not None:
                headers["Authorization"] = f"Bearer {self._key}"
            self._http = httpx.AsyncClient(
                headers=headers,
                transport=httpx.AsyncHTTPTransport(
                    verify=self._tls or False, uds=self._address.socket,
                    limits=httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=60.0),
                ),
                timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
                follow_redirects=False,
                trust_env=False,
            )  # fmt: skip
            self._home = home
        return self._http


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
