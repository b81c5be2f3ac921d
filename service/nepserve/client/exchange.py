"""Requests and answers over kept connections, repeated as often as it takes: HTTP without a word about structures."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .connection import Answer, Broken, Connection, Garbled
from .errors import InvalidAnswer, Overloaded, from_answer, give_up, hopeless, late, unreachable
from .options import USER_AGENT, new_request_id, tls_context
from .replicas import Course, Replica, Replicas
from .retry import RETRIED_STATUS, Attempts, Retry

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from .address import Address

CONNECT_SECONDS = 10.0
"""Longest wait for one connection to stand, s."""

MOVE_SECONDS = 3.0
"""The same where another server could take the request."""

MAX_IDLE = 32
"""Connections kept at most."""


class Call:
    """A request on its way.

    Attributes:
        path: Its route, for messages.
        body: The body.
        course: Where it goes.
        attempts: What may still be tried.
        request_id: Id under which the server logs it.
        connection: Where it was sent; None if it is to be sent (again).
    """

    __slots__ = ("_fault", "_headers", "_line", "attempts", "body", "connection", "course", "path", "request_id")

    def __init__(self, method: str, path: str, headers: str, body: bytes, course: Course, request_id: str) -> None:
        self.path = path
        self.body = body
        self.course = course
        self.attempts = course.attempts
        self._line = method, path
        self._headers = headers
        self.request_id = request_id
        self.connection: Connection | None = None
        self._fault: OSError | None = None

    @property
    def url(self) -> str:
        """The address it was sent to last."""
        return self.course.url

    def head(self, address: Address) -> bytes:
        """Request line and headers, but for the time that is left."""
        method, path = self._line
        text = f"{method} {address.prefix}{path} HTTP/1.1\r\nHost: {address.authority}\r\n{self._headers}"
        return text.encode("latin-1")

    @property
    def ends(self) -> float:
        """Clock by which the call must be over, s."""
        return self.attempts.started + self.attempts.timeout

    def drop(self) -> None:
        """Close the connection the request is on: the server sees that nobody waits for it."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    def abandon(self) -> None:
        """Give it up."""
        self.drop()
        self.course.left()

    def fail_later(self, error: OSError) -> None:
        """Keep an error of the sending until the answer is asked for."""
        self._fault = error

    def raise_kept(self) -> None:
        """Raise the error that was kept, once."""
        error, self._fault = self._fault, None
        if error is not None:
            raise error


class Exchange:
    """The way to the servers, for any number of threads; it can be pickled and used on after a fork."""

    def __init__(self, replicas: Replicas, key: str | None, verify: bool | str) -> None:
        self.replicas = replicas
        self.key = key
        self.verify = verify
        self._reset()

    def _reset(self) -> None:
        self._tls: ssl.SSLContext | None = None
        for replica in self.replicas.members:
            self._context(replica.address)
        # Only single operations on their ends, which need no lock: so a fork never finds one held.
        self._idle: dict[Address, deque[Connection]] = {}

    def _context(self, address: Address) -> ssl.SSLContext | None:
        if address.tls and self._tls is None:
            self._tls = tls_context(address, self.verify)
        return self._tls if address.tls else None

    def __del__(self) -> None:
        # Not reached if the constructor failed; a client that is simply dropped leaves no socket to complain about.
        if hasattr(self, "_idle"):
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"replicas": self.replicas, "key": self.key, "verify": self.verify}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def reached(self) -> None:
        """Note that the server has answered: from now on it is waited for when it is away."""
        self.replicas.reached = True

    def close(self) -> None:
        """Close the idle connections; the next call opens a new one."""
        for idle in list(self._idle.values()):
            _close_all(idle)

    def call(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        timeout: float,
        retries: Retry,
        atoms: int = 0,
        to: Replica | None = None,
    ) -> Call:
        """Prepare a request; its time runs from here.

        Args:
            method: Of HTTP.
            path: The route.
            headers: Beside those that every request has.
            body: The body.
            timeout: Seconds, repetitions included.
            retries: When it is repeated.
            atoms: What it asks for, which decides where the next ones go.
            to: The only server that it may go to; left out, any of them.
        """
        request_id = new_request_id()
        lines = [
            f"User-Agent: {USER_AGENT}",
            "Accept-Encoding: identity",
            f"X-Request-Id: {request_id}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        if method != "GET":
            lines.append(f"Content-Length: {len(body)}")
        if self.key is not None:
            lines.append(f"Authorization: Bearer {self.key}")
        course = Course(self.replicas, Attempts(retries, time.monotonic(), timeout), atoms, to)
        return Call(method, path, "\r\n".join(lines), body, course, request_id)

    def begin(self, call: Call) -> None:
        """Send a request without waiting for its answer; whatever goes wrong is left to :meth:`finish`."""
        try:
            self._send(call)
        except OSError as error:
            idle = _closed_idle(call, error)
            call.drop()
            if not idle:
                call.fail_later(error)
        except BaseException:
            call.abandon()
            raise

    def finish(self, call: Call, *, any_status: bool = False, grace: float = 0.0) -> Answer:
        """Bring a call to its end, sending it as often as it takes.

        Args:
            call: The call, sent by :meth:`begin` or not at all yet.
            any_status: Whether an answer other than 200 is returned instead of acted on.
            grace: Seconds in which an answer that is already arriving may be read, even beyond the call's time.

        Raises:
            NepserveError: There was no answer, or it was not success.
        """
        while True:
            try:
                call.raise_kept()
                if call.connection is None:
                    self._send(call)
                answer = self._receive(call, grace)
            except Garbled as error:
                call.abandon()
                raise InvalidAnswer(
                    f"{call.url} does not speak HTTP: {error}. Is the address right, and is it http or https?",
                    url=call.url, request_id=call.request_id,
                ) from error  # fmt: skip
            except OSError as error:
                idle, sent = _closed_idle(call, error), call.connection is not None
                call.drop()
                if idle and not call.attempts.renewed:
                    # The server closed a kept connection just as it was used: nobody's fault, and no attempt. Its
                    # other idle connections are no better.
                    call.attempts.renewed = True
                    if call.course.replica is not None:
                        _close_all(self._idle.get(call.course.replica.address, deque()))
                    continue
                self.pause(call, error, cut=sent)
                continue
            except BaseException:
                call.abandon()
                raise
            if answer.status == 200 or any_status:
                return answer
            self.pause_or_raise(call, answer)

    def _send(self, call: Call) -> None:
        now = time.monotonic()
        address = call.course.go(now).address
        connection = self._kept(address)
        if connection is None:
            patience = MOVE_SECONDS if call.course.may_move else CONNECT_SECONDS
            connection = Connection(address, self._context(address), min(call.ends, now + patience))
        call.connection = connection
        left = max(call.ends - time.monotonic(), 0.001)
        connection.send(call.head(address) + b"\r\nX-Request-Timeout: %.3f\r\n\r\n" % left, call.body, call.ends)

    def _kept(self, address: Address) -> Connection | None:
        idle = self._idle.get(address)
        while idle:
            try:
                connection = idle.pop()
            except IndexError:
                return None
            if not connection.stale:
                return connection
            connection.close()
        return None

    def _receive(self, call: Call, grace: float) -> Answer:
        connection = call.connection
        assert connection is not None
        deadline = call.ends
        if grace and connection.ready:
            deadline = max(deadline, time.monotonic() + grace)
        answer = connection.receive(deadline)
        call.connection = None
        assert call.course.last is not None
        idle = self._idle.setdefault(call.course.last.address, deque())
        call.course.arrived(time.monotonic(), answer.headers.get)
        if connection.keep and len(idle) < MAX_IDLE:
            idle.append(connection)
        else:
            connection.close()
        return answer

    def pause(self, call: Call, error: OSError, *, cut: bool) -> None:
        """Wait before the next attempt after a connection failed, or give up."""
        attempts, now = call.attempts, time.monotonic()
        url, request_id = call.url, call.request_id
        if isinstance(error, TimeoutError) and attempts.left(now) <= 0:
            call.course.timed_out(now)
            raise late(url=url, request_id=request_id, seconds=attempts.timeout) from error
        wait = call.course.failed(now, cut=cut, hopeless=hopeless(error))
        if wait is None:
            raise unreachable(
                error, url=url, request_id=request_id, attempts=attempts.repeated + 1, seconds=now - attempts.started,
                size=len(call.body),
            ) from error  # fmt: skip
        time.sleep(wait)

    def pause_or_raise(self, call: Call, answer: Answer) -> None:
        """Wait before the next attempt if the server had no room, else raise what its answer stands for."""
        error = from_answer(
            answer.status, answer.headers, bytes(answer.body), url=call.url, path=call.path, request_id=call.request_id
        )
        if not isinstance(error, Overloaded) or answer.status not in RETRIED_STATUS:
            raise error
        now = time.monotonic()
        wait = call.course.refused(now, answer.status, error.retry_after)
        if wait is None:
            raise give_up(error, call.attempts.repeated + 1, now - call.attempts.started)
        time.sleep(wait)


def _close_all(idle: deque[Connection]) -> None:
    with suppress(IndexError):
        while True:
            idle.pop().close()


def _closed_idle(call: Call, error: OSError) -> bool:
    """Whether a call failed because its connection, kept from an earlier one, had been closed meanwhile."""
    return isinstance(error, Broken) and error.early and call.connection is not None and call.connection.used
