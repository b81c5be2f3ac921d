"""Which format a body is in, and which one its answer shall have: ``Content-Type`` and ``Accept``."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from .request import WireError, shorten

TYPES: dict[str, str] = {
    "application/json": "json",
    "application/msgpack": "msgpack",
    "application/x-msgpack": "msgpack",
    "application/vnd.msgpack": "msgpack",
    "chemical/x-extxyz": "xyz",
    "chemical/x-xyz": "xyz",
    "text/plain": "xyz",
    "application/x-npz": "npz",
    "application/zip": "npz",
}
"""Formats by media type."""

CONTENT_TYPES: dict[str, str] = {
    "json": "application/json",
    "msgpack": "application/msgpack",
    "xyz": "chemical/x-extxyz",
    "npz": "application/x-npz",
}
"""Media type of an answer by its format."""

_SPOKEN = ", ".join(CONTENT_TYPES.values())
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_MEDIA_TYPE = re.compile(rf"({_TOKEN})/({_TOKEN})")
_QUALITY = re.compile(r"(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?)")
_UTF8 = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})


def request_format(content_type: str | None) -> str:
    """Format of a body: ``json``, ``msgpack``, ``xyz`` or ``npz``.

    Raises:
        WireError: 415 for a missing or unknown type, or text in another encoding than UTF-8.
    """
    return _request_format(content_type or "")


@lru_cache(maxsize=64)
def _request_format(content_type: str) -> str:
    media_type, *parameters = [part.strip().lower() for part in content_type.split(";")]
    spoken = TYPES.get(media_type)
    if spoken is None:
        given = f"Content-Type is {shorten(media_type)}" if media_type else "Content-Type is missing"
        raise WireError(
            None, "unsupported_media_type", f"{given}; wanted one of: {_SPOKEN}", types=list(CONTENT_TYPES.values())
        )
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and spoken in {"json", "xyz"} and value.strip(' "') not in _UTF8:
            raise WireError(
                None, "unsupported_media_type", f"the charset {shorten(value)} is not spoken here; wanted utf-8",
                types=list(CONTENT_TYPES.values()),
            )  # fmt: skip
    return spoken


class _Range(NamedTuple):
    """One entry of ``Accept``."""

    type: str
    subtype: str
    quality: float


def answer_type(accept: str | None, own: str) -> str:
    """Media type of the answer to a body in the format ``own``; :data:`TYPES` has the format.

    The best accepted one; among equals that of the body's own format. A missing ``Accept``, or ``*/*``, means the
    body's own.

    Raises:
        WireError: 406 if none of the four formats is accepted.
    """
    if accept is None or accept in {"", "*/*"}:
        return CONTENT_TYPES[own]
    return _answer_type(accept, own)


@lru_cache(maxsize=256)
def _answer_type(accept: str, own: str) -> str:
    ranges = [found for found in map(_range, accept.split(",")) if found is not None]
    qualities = {media_type: _quality(media_type, ranges) for media_type in TYPES}
    best = max(qualities.values())
    if best <= 0.0:
        raise WireError(
            None, "not_acceptable", f"Accept is {shorten(accept, 200)}; the answer can be one of: {_SPOKEN}",
            types=list(CONTENT_TYPES.values()),
        )  # fmt: skip
    # The order of the header says nothing by the standard, but it is what people mean by it.
    named = [f"{r.type}/{r.subtype}" for r in ranges]
    mine = [CONTENT_TYPES[own], *[media_type for media_type, spoken in TYPES.items() if spoken == own]]
    return next(m for m in [*mine, *named, *CONTENT_TYPES.values(), *TYPES] if qualities.get(m) == best)


def _range(entry: str) -> _Range | None:
    """One entry; None for one that is no media range, which says nothing."""
    media_range, *parameters = [part.strip().lower() for part in entry.split(";")]
    found = _MEDIA_TYPE.fullmatch(media_range)
    if found is None:
        return None
    quality = 1.0
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            if not _QUALITY.fullmatch(value.strip()):
                return None
            quality = float(value)
    return _Range(found[1], found[2], quality)


def _quality(media_type: str, ranges: list[_Range]) -> float:
    """Quality of a type by the most specific range that covers it; 0 if none does."""
    kind, _, subtype = media_type.partition("/")
    best, quality = -1, 0.0
    for entry in ranges:
        exact = (entry.type == kind) + (entry.subtype == subtype)
        covers = entry.type in {kind, "*"} and entry.subtype in {subtype, "*"} and (entry.type != "*" or exact == 0)
        if covers and exact > best:
            best, quality = exact, entry.quality
    return quality
