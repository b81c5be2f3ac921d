"""The wire formats: bytes in, packed blocks out, and back. Pure functions: no server, no torch, no event loop.

    >>> request = decode("application/json", body)
    >>> content_type, answer = encode(request, predictions)

JSON, MessagePack, extended XYZ and npz come by ``Content-Type`` and go by ``Accept``; :class:`WireError` is the only
exception that a request can cause. Formats are imported when they are first used, so that a client that speaks
MessagePack needs neither pydantic nor orjson.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import negotiation
from .outcome import settle
from .problem import CODES, problem
from .request import Limits, Request, WireError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nepcore.structures import Predictions

_NO_LIMITS = Limits()
_NO_QUERY: dict[str, str] = {}
_formats: dict[str, Any] = {}


def negotiate(accept: str | None, content_type: str | None) -> str:
    """Content type of the answer, known before anything is read or computed.

    Raises:
        WireError: 415 for a body in a format that is not spoken here, 406 if no format of the answer is accepted.
    """
    return negotiation.answer_type(accept, negotiation.request_format(content_type))


def decode(
    content_type: str | None,
    body: bytes | bytearray,
    *,
    limits: Limits = _NO_LIMITS,
    query: Mapping[str, str] = _NO_QUERY,
) -> Request:
    """Read the body of an evaluation request.

    Structures are checked for their form; whether their numbers can be computed with (finite, in range, an element
    that the model knows) is for :meth:`nepcore.admission.Admission.problems` to say.

    Args:
        content_type: The header.
        body: The body, whole.
        limits: How much is taken.
        query: Query string: ``model`` and ``properties`` (names with commas between), for formats that have no place
            for them and for all others.

    Raises:
        WireError: Anything that is wrong with the request as a whole. A structure that is wrong by itself is an entry
            of :attr:`Request.errors`.
    """
    name = negotiation.request_format(content_type)
    if len(body) > limits.max_body:
        raise WireError(
            None, "body_too_large", f"the body has {len(body):,} bytes; at most {limits.max_body:,} are taken",
            max_bytes=limits.max_body,
        )  # fmt: skip
    request: Request = _format(name).decode(body, limits=limits, query=query)
    return request


def encode(
    request: Request, predictions: Predictions, accept: str | None = None, model: str | None = None
) -> tuple[str, bytes]:
    """Write the answer.

    Args:
        request: What was asked; its ``errors`` go into the answer, too.
        predictions: Results of ``request.structures``, row by row. Numbers that are not finite become the failure of
            their structure.
        accept: The header; None and ``*/*`` mean the format of the request.
        model: Name of the model that answered, told where the format has a place for it.

    Returns:
        Content type and body of an answer with status 200.

    Raises:
        WireError: 406; or the fault of the structure, if the request was one structure and it failed.
    """
    media_type = negotiation.answer_type(accept, request.format)
    outcome = settle(request, predictions, model)
    return media_type, _format(negotiation.TYPES[media_type]).encode(outcome)


def _format(name: str) -> Any:
    module = _formats.get(name)
    if module is None:
        module = _formats[name] = import_module(f".{name}_format", __name__)
    return module


__all__ = ["CODES", "Limits", "Request", "WireError", "decode", "encode", "negotiate", "problem"]
