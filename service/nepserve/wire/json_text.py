"""JSON text to Python objects: fast, and strict where parsers are lax (duplicate keys), helpful where it fails."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from .request import WireError, shorten

_BOM = b"\xef\xbb\xbf"
_KEY_END = re.compile(rb'"\s*:')
_NOT_FINITE = re.compile(r"[+-]?(?:NaN|Infinity)")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_HINTS = {
    "nan": "NaN is not JSON",
    "NaN": "NaN is not JSON",
    "inf": "infinity is not JSON",
    "Inf": "infinity is not JSON",
    "True": "JSON writes true in lower case",
    "False": "JSON writes false in lower case",
    "None": "JSON writes null",
    "'": "JSON takes double quotes",
    "//": "JSON has no comments",
    "/*": "JSON has no comments",
    "#": "JSON has no comments",
}


def parse(body: bytes) -> Any:
    """Objects of a JSON text, without duplicate keys.

    The tokens NaN and Infinity and numbers like 1e999 are no JSON, but they pass as the numbers they mean, so that the
    structure they are in can be named and the others can be answered.

    Raises:
        WireError: ``bad_json`` naming line and column, ``duplicate_key``.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return _not_finite(body, error)
    if body.count(b":") != (keys := _count_keys(value)) and len(_KEY_END.findall(body)) != keys:
        # Either a key is there twice, or a string looks like a key: worth a slow look.
        _check_unique(body)
    return value


def _count_keys(value: Any) -> int:
    """Keys of all objects that can be found without looking at every number; never more than there are."""
    count = 0
    waiting = [value] if isinstance(value, (dict, list)) else []
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            count += len(item)
            waiting.extend([inner for inner in item.values() if isinstance(inner, (dict, list))])
        elif item and isinstance(item[0], dict):
            waiting.extend([inner for inner in item if isinstance(inner, (dict, list))])
    return count


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise WireError(None, "duplicate_key", f"an object has the key {shorten(key)} twice", field=key[:60])
            seen.add(key)
    return found


def _check_unique(body: bytes) -> None:
    try:
        json.loads(body, object_pairs_hook=_unique)
    except WireError:
        raise
    except (ValueError, RecursionError) as error:
        raise WireError(None, "bad_json", f"the body cannot be checked for duplicate keys: {_brief(error)}") from None


def _not_finite(body: bytes, error: orjson.JSONDecodeError) -> Any:
    """The objects after all, if the error is about a number that is not finite; else the error in our words."""
    if not body.strip():
        raise WireError(None, "bad_json", "the body is empty; wanted a JSON object") from None
    if body.startswith(_BOM):
        raise WireError(None, "bad_json", "the body starts with a byte order mark; send plain UTF-8") from None
    try:
        text = body.decode()
    except UnicodeDecodeError as fault:
        raise WireError(
            None, "bad_json", f"the body is not UTF-8: byte {body[fault.start]:#04x} at offset {fault.start}"
        ) from None
    not_finite = error.msg.startswith("number is infinity") or any(
        _NOT_FINITE.match(text, at) for at in (error.pos, max(error.pos - 1, 0))
    )
    # Escaped surrogates are the one other thing that the lax parser takes and the strict one does not.
    if not_finite and not _SURROGATE.search(text):
        try:
            return json.loads(text, object_pairs_hook=_unique)
        except WireError:
            raise
        except (ValueError, RecursionError):
            pass  # there is another fault further on; the first one is told
    raise WireError(None, "bad_json", _explain(text, error)) from None


def _explain(text: str, error: orjson.JSONDecodeError) -> str:
    around = text[error.pos : error.pos + 20].split("\n", maxsplit=1)[0]
    hint = next((f" ({meaning})" for token, meaning in _HINTS.items() if around.startswith(token)), "")
    where = f"line {error.lineno}, column {error.colno}"
    near = f", at {shorten(around)}" if around else ", at its end"
    return f"the body is not JSON: {error.msg}: {where}{near}{hint}"


def _brief(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
