"""Errors as they leave the server: RFC 9457 problem documents, and the table of every code there is.

A code is a stable word, one for each fault, whatever the format of the request. Programs look at ``code`` and at the
numbers beside it; ``title`` and ``detail`` are for people and may change.
"""

from __future__ import annotations

from typing import Any, NamedTuple

CONTENT_TYPE = "application/problem+json"


class Code(NamedTuple):
    """One row of the table of codes."""

    status: int
    """HTTP status of a problem document with this code."""
    number: int | None
    """Entry of the ``status`` array of a binary answer; None for codes that are never about one structure."""
    title: str
    """What the code means, in a few words that never change with the request."""
    extras: str = ""
    """Members of the problem document besides the usual ones."""


CODES: dict[str, Code] = {
    # About one structure: entry of a result, status array of a binary answer, or the whole answer if it was alone.
    "non_finite": Code(422, 1, "A number of the input is NaN or infinite", "field, atoms"),
    "out_of_range": Code(422, 2, "A number of the input is too large to compute with", "field, atoms"),
    "bad_shape": Code(422, 3, "An array of the input has the wrong shape", "field, atoms"),
    "bad_value": Code(422, 4, "A value of the input has the wrong type or is not allowed", "field, atoms"),
    "unknown_element": Code(422, 5, "The model does not know an element", "field, atoms"),
    "singular_cell": Code(422, 6, "The cell vectors of periodic directions are missing or dependent", "field"),
    "coincident_atoms": Code(422, 7, "Two atoms are at the same place", "field, atoms"),
    "too_dense": Code(422, 8, "Atoms have more neighbours than can be right", "field"),
    "too_large": Code(413, 9, "More atoms than this server takes", "max_atoms"),
    "missing_temperature": Code(422, 10, "The model needs a temperature", "field"),
    "non_finite_result": Code(422, 11, "The model gives no finite result", "field, atoms"),
    "out_of_memory": Code(413, 12, "The device has not enough memory for the structure", "max_atoms"),
    "empty": Code(422, 13, "A structure has no atoms", "field"),
    "unknown_field": Code(422, 14, "A key that the request does not have", "field, did_you_mean"),
    "missing_field": Code(422, 15, "A key that the request must have is missing", "field"),
    "ambiguous": Code(422, 16, "The input can be read in more than one way", "field, atoms"),
    # About the request as a whole.
    "bad_json": Code(400, None, "The body is not JSON"),
    "bad_msgpack": Code(400, None, "The body is not MessagePack"),
    "bad_npz": Code(400, None, "The body is not an npz archive of plain arrays"),
    "bad_xyz": Code(422, None, "The body is not extended XYZ", "structure, line"),
    "bad_frame": Code(400, None, "These bytes are not a frame"),
    "duplicate_key": Code(400, None, "A key is given twice", "field"),
    "bad_encoding": Code(400, None, "The body is not what its Content-Encoding says"),
    "bad_request": Code(400, None, "This is not HTTP"),
    "bad_header": Code(400, None, "A header of the request cannot be read", "field"),
    "bad_model": Code(422, None, "The file is not a model that can be served here", "line"),
    "bad_name": Code(422, None, "A name that no model can have, or that is taken", "field"),
    "unknown_property": Code(422, None, "A property that does not exist", "properties"),
    "unauthorized": Code(401, None, "A key is needed, or the one given is not known"),
    "forbidden": Code(403, None, "The key does not allow this"),
    "not_found": Code(404, None, "No such address"),
    "unknown_model": Code(404, None, "No such model", "models"),
    "session_lost": Code(404, None, "No such session, or no more; open it again"),
    "method_not_allowed": Code(405, None, "The address does not take this method", "allow"),
    "not_acceptable": Code(406, None, "None of the accepted answer formats is spoken here", "types"),
    "request_timeout": Code(408, None, "The body did not arrive in time"),
    "body_too_large": Code(413, None, "The body is larger than the limit", "max_bytes"),
    "too_many_structures": Code(413, None, "More structures than one request may carry", "max_structures"),
    "unsupported_media_type": Code(415, None, "The content type is not spoken here", "types"),
    "headers_too_large": Code(431, None, "Request line and headers are larger than the limit"),
    "queue_full": Code(429, None, "The queue is full", "retry_after"),
    "internal": Code(500, None, "The server made a mistake"),
    "bad_answer": Code(502, None, "The answer of a server cannot be read"),
    "starting": Code(503, None, "The server is starting", "retry_after"),
    "draining": Code(503, None, "The server is about to stop", "retry_after"),
    "too_many_connections": Code(503, None, "The server holds as many connections as it may", "retry_after"),
    "engine_down": Code(503, None, "The device is not answering", "retry_after"),
    "deadline_passed": Code(504, None, "The time given for the request is over"),
}
"""Every code, with its HTTP status. ``docs/errors.md`` repeats this table; a test compares the two."""

STATUS_NUMBERS: dict[str, int] = {word: code.number for word, code in CODES.items() if code.number is not None}
"""Entry of the ``status`` array of binary answers by code; 0 is success."""

OTHER_STATUS = 255
"""Entry of the ``status`` array for a code that has no number of its own."""


def problem(
    status: int | None, code: str, title: str | None, detail: str, request_id: str | None = None, **extra: Any
) -> dict[str, Any]:
    """A problem document, ready to be written as JSON with content type :data:`CONTENT_TYPE`.

    Args:
        status: HTTP status; None takes that of the table.
        code: A word of :data:`CODES`.
        title: What the code means; None takes that of the table.
        detail: What is wrong this time: names structure and atom (from 1), field, what was found and wanted.
        request_id: Value of ``X-Request-Id``.
        extra: Members that a program can act on (``field``, ``atoms``, ``max_atoms``, ``retry_after`` ...); those
            that are None are left out. Indices count from 0.
    """
    row = CODES[code]
    document = {
        "type": f"urn:nepserve:problem:{code}",
        "title": row.title if title is None else title,
        "status": row.status if status is None else status,
        "code": code,
        "detail": detail,
    }
    if request_id is not None:
        document["request_id"] = request_id
    document.update({key: value for key, value in extra.items() if value is not None})
    return document
