"""Every error as a problem document: which exception becomes which code, and the bytes of the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from nepcore.errors import ModelError, ModelFileError, StructureError
from nepserve.dispatch import DeadlinePassed, Draining
from nepserve.engine import EngineDown
from nepserve.models import ModelNameError, ModelNotGivenError, UnknownModelError
from nepserve.scheduler import QueueFull, TooLarge
from nepserve.wire.problem import CONTENT_TYPE
from nepserve.wire.request import WireError

if TYPE_CHECKING:
    from collections.abc import Mapping

Headers = list[tuple[bytes, bytes]]

_CONTENT_TYPE = (b"content-type", CONTENT_TYPE.encode())


RETRY_SECONDS = 1.0
"""When to ask again where nobody can say when it will be better."""

KNOWN = (
    DeadlinePassed, Draining, EngineDown, ModelError, ModelFileError, ModelNameError, ModelNotGivenError, QueueFull,
    StructureError, TooLarge, UnknownModelError,
)  # fmt: skip
"""Exceptions that :func:`as_wire_error` has an answer for, besides its own kind."""


def as_wire_error(error: Exception) -> WireError | None:
    """The answer that an exception stands for; None for one that nobody foresaw."""
    match error:
        case WireError():
            return error
        case UnknownModelError():
            return WireError(None, "unknown_model", str(error), field="model", models=list(error.served))
        case ModelNotGivenError():
            if not error.served:
                return WireError(None, "starting", str(error), retry_after=RETRY_SECONDS)
            return WireError(None, "missing_field", str(error), field="model", models=list(error.served))
        case StructureError():
            return WireError.from_structure(error)
        case QueueFull():
            return WireError(
                None, error.code, f"{error}; ask again after that", retry_after=round(error.retry_after, 3)
            )
        case TooLarge():
            return WireError(None, error.code, str(error), structure=error.structure, max_atoms=error.max_atoms)
        case Draining():
            return draining()
        case DeadlinePassed():
            return WireError(None, error.code, str(error))
        case EngineDown():
            return WireError(None, "engine_down", error.reason, retry_after=RETRY_SECONDS)
        case ModelFileError() | ModelError():
            return WireError(None, "bad_model", str(error), line=getattr(error, "line", None))
        case ModelNameError():
            return WireError(None, "bad_name", str(error), field="name")
    return None


def internal() -> WireError:
    """What is told of an error that nobody foresaw: nothing that is not in the log."""
    return WireError(None, "internal", "the server made a mistake; its log has more under the request id")


def draining() -> WireError:
    """Refusal of a server that is about to stop."""
    return WireError(
        None,
        "draining",
        "this server is about to stop; ask another one, or again later",
        retry_after=RETRY_SECONDS,
    )


def answer(error: WireError, request_id: str) -> tuple[int, Headers, bytes]:
    """Status, headers and body of an error."""
    document = error.problem(request_id)
    body = orjson.dumps(document)
    headers: Headers = [_CONTENT_TYPE, (b"content-length", b"%d" % len(body))]
    headers += _extra_headers(error, document)
    return error.status, headers, body


def _extra_headers(error: WireError, document: Mapping[str, Any]) -> Headers:
    headers: Headers = []
    retry_after = document.get("retry_after")
    if retry_after is not None:
        # The header has whole seconds; the document may be finer.
        headers.append((b"retry-after", b"%d" % max(1, -int(-retry_after // 1))))
    if error.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="nepserve"'))
    if error.status == 405 and document.get("allow"):
        headers.append((b"allow", ", ".join(document["allow"]).encode()))
    return headers
