"""The JSON form: one structure as ``{"structure": {...}}``, several as ``{"structures": [...]}``.

Arrays are read by orjson and NumPy: a schema that looks at each number takes many times as long. The schema of the
documentation stands in :mod:`nepserve.wire.json_schema`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from nepcore.errors import StructureError
from nepcore.structures import PER_ATOM

from . import arrays, collector, json_structure, json_text
from .json_item import NOTHING, Item, pack
from .outcome import error_entry
from .request import Request, WireError, check_query, choose_model, choose_properties, describe, unknown_field

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .outcome import Outcome
    from .request import Limits

KEYS = ("model", "properties", "structure", "structures")
"""Keys of a request."""

LARGE_TEXT = 1_000_000
"""Bytes from which the garbage collector would take a good part of the time."""

_KEY_SET = frozenset(KEYS)


def decode(body: bytes, *, limits: Limits, query: Mapping[str, str]) -> Request:
    """Read a request.

    Raises:
        WireError: It is not JSON, or its envelope is wrong.
    """
    if len(body) < LARGE_TEXT:
        return _decode(body, limits, query)
    # To the end of the reading, when the lists are gone: a collection between would look at all of them.
    with collector.still():
        return _decode(body, limits, query)


def _decode(body: bytes, limits: Limits, query: Mapping[str, str]) -> Request:
    message = json_text.parse(body)
    if not isinstance(message, dict):
        raise WireError(
            None, "bad_value", f'the body must be an object with "structure" or "structures", not {describe(message)}'
        )
    if not message.keys() <= _KEY_SET:
        raise _unknown(message)
    if query:
        check_query(query)
    model = choose_model(message.get("model"), query)
    properties = choose_properties(message.get("properties"), query)
    one, many = message.get("structure"), message.get("structures")
    if one is not None and many is not None:
        raise WireError(
            None, "ambiguous", "structure and structures are both given; wanted one of them", field="structures"
        )
    if many is None:
        if one is None:
            raise _missing(message)
        many = [one]
    elif not isinstance(many, list):
        raise WireError(
            None, "bad_value", f"structures must be a list of structures, not {describe(many)}", field="structures"
        )
    if len(many) > limits.max_structures:
        raise arrays.too_many_structures(len(many), limits)
    items: list[Item] = []
    errors: dict[int, StructureError] = {}
    total = 0
    for i, value in enumerate(many):
        try:
            item = json_structure.read(value)
        except StructureError as error:
            errors[i] = error
            item = NOTHING
        items.append(item)
        total += len(item.numbers)
    if total > limits.max_atoms:
        raise arrays.too_many_atoms(total, limits)
    block, assumed = pack(items)
    return Request("json", model, properties, block, errors, single=one is not None, pbc_assumed=assumed)


def _unknown(message: dict[str, Any]) -> WireError:
    key = next(key for key in message if key not in _KEY_SET)
    if key in json_structure.KEYS:
        return WireError(
            None, "unknown_field", f'the key {key!r} belongs into "structure": {{"structure": {{"{key}": ...}}}}',
            field=key, did_you_mean=f"structure.{key}",
        )  # fmt: skip
    return unknown_field(key, KEYS, where="the request")


def _missing(message: dict[str, Any]) -> WireError:
    name = "structures" if "structures" in message else "structure"
    what = f"{name} is null" if name in message else "neither structure nor structures is given"
    return WireError(None, "missing_field", f"{what}; wanted one of them", field=name)


def encode(outcome: Outcome) -> bytes:
    """The answer: properties as top-level keys for one structure, else ``results`` in order."""
    head: dict[str, Any] = {} if outcome.model is None else {"model": outcome.model}
    values = {name: np.ascontiguousarray(array) for name, array in outcome.values.items()}
    missing = {name: set(rows.tolist()) for name, rows in outcome.unavailable.items()}
    assumed = outcome.pbc_assumed
    offsets = outcome.offsets
    results: list[dict[str, Any]] = []
    for i in range(len(outcome)):
        error = outcome.errors.get(i)
        if error is not None:
            results.append({"error": error_entry(error)})
            continue
        unavailable = [name for name, rows in missing.items() if i in rows]
        result: dict[str, Any] = {}
        for name, array in values.items():
            if name in PER_ATOM:
                result[name] = array[offsets[i] : offsets[i + 1]]
            elif name not in unavailable:
                result[name] = array[i]
        if unavailable:
            result["unavailable"] = unavailable
        if assumed is not None and assumed[i]:
            result["pbc"] = outcome.structures.pbc[i]
        results.append(result)
    answer = {**head, **results[0]} if outcome.single else {**head, "results": results}
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
