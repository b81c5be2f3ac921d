"""The wire formats: bytes in, packed blocks out, and back. Pure functions: no server, no torch, no event loop.

    >>> request = decode("application/json", body)
    >>> content_type, answer = encode(request, predictions)

JSON, MessagePack, extended XYZ and npz come by content type and go by ``Accept``; :class:`WireError` is the only
exception that a request can cause. Formats are imported when they are first used, so that a client that speaks
MessagePack needs neither pydantic nor orjson.
"""

from __future__ import annotations

from .problem import CODES, problem
from .request import Limits, Request, WireError

__all__ = ["CODES", "Limits", "Request", "WireError", "problem"]
