"""The MessagePack form: one map, arrays as little-endian bytes end to end. Both sides of the wire live here.

Request: ``n_atoms`` i4 (B), ``numbers`` u1 (N), ``positions`` f8 or f4 (N × 3; ``dtype`` says which), ``cell`` f8
(B × 3 × 3), ``pbc`` u1 (B × 3), ``temperature`` f8 (B), ``model``, ``properties``. Answer: ``n_atoms``, ``status`` u1
(B), one array for each property, ``unavailable``, ``errors``. ``docs/wire.md`` has every key.

A client imports this module without pydantic or orjson.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgpack
import numpy as np

from nepcore.errors import StructureError
from nepcore.structures import PER_ATOM, PER_STRUCTURE, Predictions

from . import arrays, lists
from .request import Request, WireError, check_query, choose_model, choose_properties, describe, unknown_field

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from nepcore.structures import Structures

    from .outcome import Outcome
    from .request import Limits

CONTENT_TYPE = "application/msgpack"

KEYS = ("model", "properties", "dtype", *arrays.FIELDS)
"""Keys of a request."""

DTYPES: dict[str, np.dtype[Any]] = {"f4": np.dtype("<f4"), "f8": np.dtype("<f8")}
_I4: np.dtype[Any] = np.dtype("<i4")
_U1: np.dtype[Any] = np.dtype("u1")
_F8: np.dtype[Any] = DTYPES["f8"]


def pack_request(
    structures: Structures,
    properties: Sequence[str] | None = None,
    model: str | None = None,
    dtype: Literal["f4", "f8"] = "f8",
    *,
    single: bool = False,
) -> bytes:
    """Body of a request, for clients.

    Args:
        structures: The block; molecules alone are sent without cells.
        properties: What to compute; None leaves it to the server (energy, forces, stress).
        model: Name of the model; None where the server has one.
        dtype: Precision of the positions sent and of the per-atom results that come back.
        single: Send a block of one as one structure: if it fails, the answer is a problem document (HTTP 4xx)
            instead of an answer with an entry in ``errors``.
    """
    if single and len(structures) != 1:
        raise ValueError(f"single means one structure, not {len(structures)}")
    message: dict[str, Any] = {}
    if model is not None:
        message["model"] = model
    if properties is not None:
        message["properties"] = list(properties)
    if dtype != "f8":
        message["dtype"] = dtype
    if not single:
        message["n_atoms"] = _bytes(structures.counts, _I4)
    message["numbers"] = _bytes(structures.numbers, _U1)
    message["positions"] = _bytes(structures.positions, DTYPES[dtype])
    if structures.pbc.any() or structures.cells.any():
        message["cell"] = _bytes(structures.cells, _F8)
        message["pbc"] = _bytes(structures.pbc, _U1)
    if not np.isnan(structures.temperatures).all():
        message["temperature"] = _bytes(structures.temperatures, _F8)
    return msgpack.packb(message)


def unpack_result(data: bytes, counts: NDArray[np.integer[Any]]) -> Predictions:
    """Results of an answer, for clients; arrays are the caller's own.

    Args:
        data: Body of an answer with status 200.
        counts: Atoms of each structure that was sent, (B,): an answer for anything else is refused.

    Raises:
        WireError: ``bad_answer``: the body is not what a server sends, or not complete.
    """
    try:
        return _unpack_result(data, np.asarray(counts, np.int64))
    except WireError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError,
            msgpack.UnpackException) as error:  # fmt: skip
        raise WireError(None, "bad_answer", f"the answer is not a complete MessagePack result: {error}") from error


def _unpack_result(data: bytes, counts: NDArray[np.int64]) -> Predictions:
    message = msgpack.unpackb(data, strict_map_key=True)
    found = np.frombuffer(message["n_atoms"], _I4)
    if not np.array_equal(found, counts):
        raise WireError(
            None, "bad_answer",
            f"the answer is about {len(found)} structures with {found.sum()} atoms, the request was about "
            f"{len(counts)} with {counts.sum()}",
        )  # fmt: skip
    B, N = len(counts), int(counts.sum())
    real = DTYPES[message["dtype"]]
    errors = {}
    for entry in message.get("errors", ()):
        error = StructureError(
            str(entry["code"]), str(entry["message"]), field=entry.get("field"), atoms=tuple(entry.get("atoms", ()))
        )
        errors[int(entry["index"])] = error
    status = np.frombuffer(message["status"], _U1)
    if len(status) != B or np.flatnonzero(status).tolist() != sorted(errors):
        raise WireError(None, "bad_answer", "the answer's status and errors name different structures")
    stress_known = np.ones(B, bool)
    values: dict[str, NDArray[Any]] = {}
    unavailable = message.get("unavailable", {})
    for name, raw in unavailable.items():
        rows = np.frombuffer(raw, _I4)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < B:
            raise WireError(None, "bad_answer", f"the answer's unavailable {name} names a structure that was not sent")
        if name == "stress":
            stress_known[rows] = False
            values[name] = np.full((B, 6), np.nan)
    for name, inner in PER_STRUCTURE.items():
        if name in message:
            values[name] = np.frombuffer(message[name], _F8).reshape(B, *inner).copy()
    for name, shape in PER_ATOM.items():
        if name in message:
            width = (int(message["descriptor_length"]),) if name == "descriptors" else shape
            values[name] = np.frombuffer(message[name], real).reshape(N, *width).copy()
    return Predictions(counts, values, stress_known, errors)


def decode(body: bytes, *, limits: Limits, query: Mapping[str, str]) -> Request:
    """Read a request; see the module's head for the keys.

    Raises:
        WireError: Anything that is not such a request.
    """
    message = read_map(body, limits)
    if not message.keys() <= _KEY_SET:
        raise unknown_field(next(key for key in message if key not in _KEY_SET), KEYS, where="the request")
    if query:
        check_query(query)
    dtype: Literal["f4", "f8"] = message.get("dtype", "f8")
    if dtype not in ("f4", "f8"):
        raise WireError(
            None, "bad_value", f"dtype is {describe(dtype)}; wanted 'f8' or 'f4', the type of positions",
            field="dtype",
        )  # fmt: skip
    try:
        n_atoms = message.get("n_atoms")
        counts = _counts(n_atoms)
        numbers = _required(message, "numbers", _U1)
        positions = _required(message, "positions", DTYPES[dtype])
        if counts is None and n_atoms is not None and n_atoms != numbers.size:
            raise StructureError(
                "bad_shape", f"n_atoms announces {n_atoms} atoms, but numbers has {numbers.size} entries",
                field="numbers",
            )  # fmt: skip
        cell = _array(message.get("cell"), "cell", _F8)
        pbc = _array(message.get("pbc"), "pbc", _U1)
        temperature = _array(message.get("temperature"), "temperature", _F8)
    except StructureError as error:
        raise WireError.from_structure(error) from None
    block, assumed = arrays.assemble(counts, numbers, positions, cell, pbc, temperature, limits)
    return Request(
        "msgpack",
        choose_model(message.get("model"), query),
        choose_properties(message.get("properties"), query),
        block,
        single=counts is None,
        dtype=dtype,
        pbc_assumed=assumed,
    )


_KEY_SET = frozenset(KEYS)


def read_map(body: bytes, limits: Limits) -> dict[str, Any]:
    """The map of a body, whatever its keys.

    Raises:
        WireError: ``bad_msgpack``, ``duplicate_key``.
    """
    most = min(len(body), max(limits.max_atoms, limits.max_structures, 16))
    # Entries, and lists that hold them. Of an atom: its number, and a row of three coordinates; of a structure: count,
    # cell, flags and temperature.
    left = 6 * limits.max_atoms + 24 * limits.max_structures + 64

    def counted(entries: list[Any]) -> list[Any]:
        # An empty list is one byte of a body and many in memory: it counts, too.
        nonlocal left
        left -= 1 + len(entries)
        if left < 0:
            raise WireError(None, "bad_msgpack", "the lists of the body have more entries than any request")
        return entries

    try:
        message = msgpack.unpackb(
            body, strict_map_key=True, object_pairs_hook=_unique, list_hook=counted, ext_hook=_no_extension,
            max_array_len=most, max_map_len=64, max_ext_len=0,
        )  # fmt: skip
    except WireError:
        raise
    except msgpack.ExtraData as error:
        raise WireError(
            None, "bad_msgpack", f"{len(error.extra)} bytes follow the end of the MessagePack map"
        ) from None
    except msgpack.StackError:
        raise WireError(None, "bad_msgpack", "the body is nested too deeply") from None
    except (ValueError, TypeError, msgpack.UnpackException, MemoryError, RecursionError, OverflowError) as error:
        reason = str(error) or type(error).__name__
        raise WireError(None, "bad_msgpack", f"the body is not a MessagePack map: {reason[:200]}") from None
    if not isinstance(message, dict):
        raise WireError(None, "bad_msgpack", f"the body is {describe(message)}; wanted a map")
    return message


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[Any] = set()
        for key, _ in pairs:
            if key in seen:
                raise WireError(None, "duplicate_key", f"the key {describe(key)} is given twice", field=str(key)[:60])
            seen.add(key)
    return found


def _no_extension(code: int, data: bytes) -> Any:
    raise WireError(None, "bad_msgpack", f"extension type {code} ({len(data)} bytes) is not part of a request")


def _counts(value: Any) -> NDArray[np.integer[Any]] | None:
    """``n_atoms`` as an array, or None where the request is one structure (a number, or nothing)."""
    if value is None:
        return None
    if isinstance(value, bytes):
        return _view(value, "n_atoms", _I4)
    if isinstance(value, list):
        return lists.counts(value)
    if type(value) is int:
        return None
    raise StructureError(
        "bad_value", f"n_atoms is {describe(value)}; wanted bytes (i4), a list, or nothing for one structure",
        field="n_atoms",
    )  # fmt: skip


def _required(message: dict[str, Any], name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    found = _array(message.get(name), name, dtype)
    if found is None:
        reason = "is null" if name in message else "is missing"
        raise WireError(None, "missing_field", f"{name} {reason}; wanted bytes ({dtype.str[1:]}) or a list", field=name)
    return found


def _array(value: Any, name: str, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """An array from bytes (a view), or from lists in their place; None stays None."""
    if value is None:
        return None
    if isinstance(value, bytes):
        return _view(value, name, dtype)
    if name == "temperature" and not isinstance(value, list):
        value = [value]
    if isinstance(value, list):
        return _from_list(value, name)
    raise StructureError(
        "bad_value", f"{name} is {describe(value)}; wanted bytes ({dtype.str[1:]}) or a list", field=name
    )


def _view(value: bytes, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(value) % dtype.itemsize:
        raise StructureError(
            "bad_shape", f"{name} has {len(value)} bytes, which is no whole number of {dtype.str[1:]} entries",
            field=name,
        )  # fmt: skip
    return np.frombuffer(value, dtype)


def _from_list(value: list[Any], name: str) -> NDArray[Any]:
    if name == "positions":
        return lists.positions(value)
    if name == "numbers":
        return lists.numbers(value)
    if name == "temperature":
        return np.array([np.nan if item is None else lists.temperature(item) for item in value])
    # One structure may give its own cell and flags, a block a list of them.
    depth = 3 if name == "cell" else 2
    inner: Any = value
    for _ in range(depth):
        inner = inner[0] if isinstance(inner, list) and inner else None
    items = value if inner is not None or not value else [value]
    if name == "cell":
        return np.array([lists.cell(item) for item in items]).reshape(-1, 3, 3)
    return np.array([lists.pbc(item) for item in items], np.uint8).reshape(-1, 3)


def _bytes(array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def encode(outcome: Outcome) -> bytes:
    """The answer: see the module's head. Rows of structures that failed are NaN, and ``errors`` says why."""
    real = DTYPES[outcome.dtype]
    message: dict[str, Any] = {}
    if outcome.model is not None:
        message["model"] = outcome.model
    message["dtype"] = outcome.dtype
    message["n_atoms"] = _bytes(outcome.counts, _I4)
    message["status"] = outcome.status.tobytes()
    for name, array in outcome.values.items():
        message[name] = _bytes(array, real if name in PER_ATOM else _F8)
        if name == "descriptors":
            message["descriptor_length"] = array.shape[1]
    if outcome.pbc_assumed is not None:
        message["pbc"] = _bytes(outcome.structures.pbc, _U1)
    if outcome.unavailable:
        message["unavailable"] = {name: _bytes(rows, _I4) for name, rows in outcome.unavailable.items()}
    if outcome.errors:
        message["errors"] = outcome.error_entries()
    return msgpack.packb(message)
