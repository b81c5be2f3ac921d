"""What can go wrong between a client and its server, with the numbers a caller can act on.

Every error survives pickling, so that worker processes can hand it to their parent. Text counts structures and atoms
from 1; attributes count from 0.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
from typing import TYPE_CHECKING, Any

from nepserve.wire.problem import STATUS_NUMBERS

from .retry import RETRIED_STATUS, retry_after

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nepcore.errors import StructureError


class NepserveError(Exception):
    """Base of all errors that the clients raise on purpose.

    Attributes:
        url: The server's address as the client was given it.
        request_id: The id under which the server logs the request; None if none was sent.
        structures: For a call with many structures: the indices (from 0) that the failed body carried.
    """

    url: str = ""
    request_id: str | None = None
    structures: range | None = None

    def __init__(self, message: str, *, url: str = "", request_id: str | None = None) -> None:
        super().__init__(message)
        self.url = url
        self.request_id = request_id

    def concerning(self, structures: range) -> NepserveError:
        """This error, saying which structures of a larger call the failed body carried."""
        self.structures = structures
        which = f"structure {structures.start + 1}"
        if len(structures) > 1:
            which = f"structures {structures.start + 1} to {structures.stop}"
        self.args = (f"{which}: {self.args[0]}",)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(kind: type[NepserveError], args: tuple[Any, ...], state: dict[str, Any]) -> NepserveError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ConnectionFailed(NepserveError):  # noqa: N818 - the name says what happened
    """The server could not be reached, or the connection broke, as often as the client tried.

    Attributes:
        attempts: How often it tried.
    """

    def __init__(self, message: str, *, url: str = "", request_id: str | None = None, attempts: int = 1) -> None:
        super().__init__(message, url=url, request_id=request_id)
        self.attempts = attempts


class Timeout(NepserveError):  # noqa: N818 - see above
    """No answer within the time the call was given.

    Attributes:
        seconds: That time.
    """

    def __init__(self, message: str, *, url: str = "", request_id: str | None = None, seconds: float = 0.0) -> None:
        super().__init__(message, url=url, request_id=request_id)
        self.seconds = seconds


class InvalidAnswer(NepserveError):  # noqa: N818 - see above
    """Something answered, but not with a complete and finite result; nothing of it is handed on."""


class ServerError(NepserveError):
    """The server refused the request, or failed.

    Attributes:
        status: HTTP status.
        code: The server's stable word for the fault; empty if the answer did not come from nepserve.
        detail: The server's sentence.
        problem: All members of the error document, with the numbers to act on (``max_atoms`` ...).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str = "",
        detail: str = "",
        url: str = "",
        request_id: str | None = None,
        problem: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, url=url, request_id=request_id)
        self.status = status
        self.code = code
        self.detail = detail
        self.problem = dict(problem or {})


class Overloaded(ServerError):  # noqa: N818 - see above
    """The server had no room for the request (429) or was not ready (503, 502 of a proxy), as often as was tried.

    Attributes:
        retry_after: Seconds the server asks to wait; None if it did not say.
        attempts: How often the client tried.
    """

    retry_after: float | None = None
    attempts: int = 1


class StructureRejected(NepserveError):  # noqa: N818 - see above
    """A structure that the model cannot evaluate.

    Attributes:
        code: A stable word, one a fault: ``non_finite``, ``unknown_element``, ``coincident_atoms`` ... (those of
            :class:`nepcore.StructureError`).
        reason: What is wrong, in a sentence.
        field: Input field at fault (``positions``, ``cell`` ...), or None.
        atoms: Indices of the atoms concerned, from 0.
        index: Index of the structure in the call, from 0; None if the call had one.
        problem: All members of the server's error document, if it sent one, with the numbers to act on
            (``max_atoms`` ...).
    """

    def __init__(
        self,
        code: str,
        reason: str,
        *,
        field: str | None = None,
        atoms: tuple[int, ...] = (),
        index: int | None = None,
        url: str = "",
        request_id: str | None = None,
        problem: Mapping[str, Any] | None = None,
    ) -> None:
        where = "" if index is None else f"structure {index + 1}: "
        super().__init__(f"{where}{reason} ({code})", url=url, request_id=request_id)
        self.code = code
        self.reason = reason
        self.field = field
        self.atoms = atoms
        self.index = index
        self.problem = dict(problem or {})

    def at(self, index: int) -> StructureRejected:
        """The same rejection, of structure ``index`` of a larger call."""
        return StructureRejected(
            self.code, self.reason, field=self.field, atoms=self.atoms, index=index, url=self.url,
            request_id=self.request_id, problem=self.problem,
        )  # fmt: skip

    @classmethod
    def of(
        cls, error: StructureError, *, index: int | None = None, url: str = "", request_id: str | None = None
    ) -> StructureRejected:
        """The rejection that a :class:`nepcore.StructureError` stands for."""
        return cls(
            error.code, error.reason, field=error.field, atoms=error.atoms, index=index, url=url, request_id=request_id
        )


_ADVICE = {
    401: "Give the client an api_key that the server knows.",
    403: "This key may not do that.",
    404: "Client.models() lists what the server has.",
    413: "Send fewer atoms in one body, or ask a device with more memory.",
    415: "Client and server may be of different versions; see Client.version().",
}
_ENVELOPE = frozenset({"model", "properties", "dtype", "format"})
"""Fields of a request that are not part of a structure."""


def from_answer(
    status: int, headers: Mapping[str, str], body: bytes, *, url: str, path: str, request_id: str | None
) -> NepserveError:
    """The error that an answer other than success stands for.

    Args:
        status: HTTP status.
        headers: Header values by lower-case name.
        body: A problem document (RFC 9457) if nepserve itself answered; anything if a proxy did.
        url: Address of the server.
        path: What was asked for, for the message.
        request_id: Id of the request.
    """
    request_id = headers.get("x-request-id") or request_id
    if 300 <= status < 400:
        target = headers.get("location", "an unnamed place")
        return ServerError(
            f"{url}{path} redirects to {target} ({status}). Redirects are not followed, because the key and the "
            "structures would follow with them: give the client the final address.",
            status=status, url=url, request_id=request_id,
        )  # fmt: skip
    problem = _problem(headers, body)
    if problem is None:
        return _foreign(status, headers, body, url=url, path=path, request_id=request_id)
    code, detail = _text(problem, "code"), _text(problem, "detail") or _text(problem, "title")
    request_id = _text(problem, "request_id") or request_id
    if code in STATUS_NUMBERS and problem.get("field") not in _ENVELOPE:
        return _rejection(problem, code, detail, url, request_id)
    detail = detail.rstrip(".")
    said = f"{code}: {detail}" if code and detail else code or detail or "no reason given"
    known: dict[str, Any] = {
        "status": status, "code": code, "detail": detail, "url": url, "request_id": request_id, "problem": problem,
    }  # fmt: skip
    if status == 504:
        return Timeout(f"{url}{path} did not get to the request in time ({said})", url=url, request_id=request_id)
    if status in RETRIED_STATUS:
        overloaded = Overloaded(f"{url}{path} has no room now ({status} {said})", **known)
        overloaded.retry_after = retry_after(headers.get("retry-after"))
        return overloaded
    advice = _ADVICE.get(status, "")
    if status >= 500:
        advice = f"This is a fault of the server; its log has more under request id {request_id}."
    return ServerError(f"{url}{path} answered {status} ({said}). {advice}".rstrip(), **known)


def hopeless(error: OSError) -> bool:
    """Whether a connection that failed with ``error`` will fail again: the name, the key ring or a right is wrong."""
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_NONAME
    return isinstance(error, (ssl.SSLCertVerificationError, PermissionError))


def unreachable(
    error: BaseException, *, url: str, request_id: str, attempts: int, seconds: float, size: int
) -> ConnectionFailed:
    """The error of a call whose connections failed.

    Args:
        error: What happened last.
        url: Address of the server.
        request_id: Id of the request.
        attempts: How often it was tried.
        seconds: Time that took.
        size: Bytes of the body.
    """
    tried = "" if attempts == 1 else f" ({attempts} attempts in {seconds:.1f} s)"
    advice = "Is the server running there, and is the address right?"
    if isinstance(error, ssl.SSLCertVerificationError):
        advice = "For a certificate of your own, give its file as verify."
    elif size > 1_000_000 and isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError):
        advice += f" The body has {size / 1e6:.1f} MB; the server or a proxy may take less (evaluate_many sends parts)."
    return ConnectionFailed(
        f"cannot get an answer from {url}: {str(error).rstrip('.') or type(error).__name__}{tried}. {advice}",
        url=url, request_id=request_id, attempts=attempts,
    )  # fmt: skip


def late(*, url: str, request_id: str, seconds: float) -> Timeout:
    """The error of a call that had no answer in its time."""
    return Timeout(
        f"no answer from {url} within {seconds:g} s (request id {request_id}). A larger timeout, smaller structures "
        f"or a less busy server would help; {url}/v1/status shows its queue.",
        url=url, request_id=request_id, seconds=seconds,
    )  # fmt: skip


def give_up(error: Overloaded, attempts: int, seconds: float) -> Overloaded:
    """Complete the error of a call that found no room as often as it tried."""
    error.attempts = attempts
    asked = "" if error.retry_after is None else f", the server asks to wait {error.retry_after:g} s"
    error.args = (f"{error.args[0]}; gave up after {attempts} attempts in {seconds:.1f} s{asked}.",)
    return error


def _rejection(
    problem: Mapping[str, Any], code: str, detail: str, url: str, request_id: str | None
) -> StructureRejected:
    """A problem document about one structure as a rejection."""
    field, atoms, index = problem.get("field"), problem.get("atoms"), problem.get("structure")
    return StructureRejected(
        code,
        # The index says it, too, and it changes where the body was one of several.
        re.sub(r"^structure \d+: ", "", detail),
        field=field if isinstance(field, str) else None,
        atoms=tuple(a for a in atoms if isinstance(a, int)) if isinstance(atoms, list) else (),
        index=index if isinstance(index, int) else None,
        url=url,
        request_id=request_id,
        problem=problem,
    )


def _problem(headers: Mapping[str, str], body: bytes) -> dict[str, Any] | None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in {"application/problem+json", "application/json"}:
        return None
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _foreign(
    status: int, headers: Mapping[str, str], body: bytes, *, url: str, path: str, request_id: str | None
) -> ServerError:
    """An error answer that nepserve did not write: a proxy's page, or another program on that port."""
    page = re.sub(r"(?s)<(script|style)\b.*?</\1>|<[^>]*>", " ", body[:20_000].decode("utf-8", "replace"))
    said = " ".join(page.split())[:200] or "nothing"
    server = headers.get("server")
    by = f" by {server!r}" if server else ""
    message = (
        f"{url}{path} answered {status}{by}, not in nepserve's form but with: {said}. Is there a proxy in between, "
        "or another program at that address?"
    )
    if status in RETRIED_STATUS:
        overloaded = Overloaded(message, status=status, detail=said, url=url, request_id=request_id)
        overloaded.retry_after = retry_after(headers.get("retry-after"))
        return overloaded
    return ServerError(message, status=status, detail=said, url=url, request_id=request_id)


def _text(problem: Mapping[str, Any], key: str) -> str:
    value = problem.get(key)
    return value if isinstance(value, str) else ""
