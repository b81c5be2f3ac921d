"""The npz form: the arrays of a block by name in a zip archive, as :func:`numpy.savez` writes it.

The archive's directory is checked before anything is unpacked, and nothing in an archive is ever evaluated or larger in
memory than the limit.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nepcore.elements import MAX_NUMBER
from nepcore.structures import PER_ATOM

from . import arrays
from .request import Request, WireError, check_query, choose_model, choose_properties, unknown_field

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from .outcome import Outcome
    from .request import Limits

KEYS = ("model", "properties", *arrays.FIELDS)
"""Names of arrays in a request."""

_MAX_HEADER = 4096

# More than any request has, so that a few bytes of data that look like an entry do no harm.
_MAX_MEMBERS = 4 * len(KEYS)
_DIRECTORY_ENTRY = b"PK\x01\x02"


def decode(body: bytes, *, limits: Limits, query: Mapping[str, str]) -> Request:
    """Read a request.

    Raises:
        WireError: It is not an archive of plain arrays, or the arrays do not fit together.
    """
    if query:
        check_query(query)
    found = _read(body, limits)
    for name in ("numbers", "positions"):
        if name not in found:
            raise WireError(None, "missing_field", f"the archive has no array {name!r}", field=name)
    counts = None
    if "n_atoms" in found and found["n_atoms"].ndim:
        counts = _whole(found, "n_atoms", 2**31 - 1, ndim=1)
    numbers = _whole(found, "numbers", MAX_NUMBER, ndim=1).astype(np.uint8)
    positions = _real(found, "positions", ndim=2)
    assert positions is not None
    pbc = None
    if "pbc" in found:
        flags = found["pbc"]
        pbc = flags.astype(np.uint8) if flags.dtype.kind == "b" else _whole(found, "pbc", 1).astype(np.uint8)
    block, assumed = arrays.assemble(
        counts, numbers, positions, _real(found, "cell"), pbc, _real(found, "temperature"), limits
    )
    dtype: Literal["f4", "f8"] = "f4" if positions.dtype.itemsize == 4 else "f8"
    return Request(
        "npz",
        choose_model(_text(found, "model"), query),
        choose_properties(_texts(found, "properties"), query),
        block,
        single=counts is None,
        dtype=dtype,
        pbc_assumed=assumed,
    )


def _read(body: bytes, limits: Limits) -> dict[str, NDArray[Any]]:
    # Before zipfile reads the directory: it makes an object of every entry, many times as large as the entry itself.
    members = body.count(_DIRECTORY_ENTRY)
    if members > _MAX_MEMBERS:
        raise WireError(None, "bad_npz", f"the archive has {members} members; wanted: {', '.join(KEYS)}")
    found: dict[str, NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            entries = archive.infolist()
            unpacked = sum(entry.file_size for entry in entries)
            if unpacked > limits.max_body:
                raise WireError(
                    None, "body_too_large",
                    f"the archive holds {unpacked:,} bytes; at most {limits.max_body:,} are taken",
                    max_bytes=limits.max_body,
                )  # fmt: skip
            for entry in entries:
                name = entry.filename.removesuffix(".npy")
                if name not in KEYS:
                    raise unknown_field(name, KEYS, where="the archive")
                if name in found:
                    raise WireError(None, "duplicate_key", f"the array {name!r} is there twice", field=name)
                if entry.flag_bits & 1 or entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
                    raise WireError(None, "bad_npz", f"{name} is encrypted or packed in an unusual way", field=name)
                with archive.open(entry) as file:
                    # One byte more would show a member that is longer than the directory says.
                    content = file.read(entry.file_size + 1)
                found[name] = _array(content, name)
    except WireError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, struct.error,
            ValueError, OverflowError, MemoryError, IndexError, UnicodeError) as error:  # fmt: skip
        raise WireError(None, "bad_npz", f"the body is not an npz archive: {str(error)[:200]}") from None
    return found


def _array(content: bytes, name: str) -> NDArray[Any]:
    """One array of an archive, a view of its bytes."""
    if content[:6] != b"\x93NUMPY" or len(content) < 12:
        raise WireError(None, "bad_npz", f"{name} is not an array in NumPy's format", field=name)
    wide = content[6] > 1
    start = 12 if wide else 10
    length = int.from_bytes(content[8:start], "little")
    if length > _MAX_HEADER or start + length > len(content) or content[6] > 3:
        raise WireError(None, "bad_npz", f"the header of {name} cannot be read", field=name)
    header = _header(content[start : start + length].decode("latin-1"))
    if header is None:
        raise WireError(None, "bad_npz", f"{name} is not an array of numbers or text", field=name)
    dtype, order, shape = header
    data = memoryview(content)[start + length :]
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise WireError(
            None, "bad_npz", f"{name} has {len(data)} bytes of data; its header says {shape} of {dtype}", field=name
        )
    return np.frombuffer(data, dtype).reshape(shape, order=order)


_DESCR = re.compile(r"""['"]descr['"]\s*:\s*['"]([<>|=]?[biufUS]\d{1,6})['"]""")
_ORDER = re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)""")
_SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(\s*((?:\d{1,12}\s*(?:,\s*|(?=\)))){0,3})\)""")
_REST = re.compile(r"\s*\{[\s,]*\}\s*")


def _header(text: str) -> tuple[np.dtype[Any], Literal["F", "C"], tuple[int, ...]] | None:
    """Type, order and shape of an array of numbers or text; None for anything else. Nothing is evaluated."""
    descr, order, shape = _DESCR.search(text), _ORDER.search(text), _SHAPE.search(text)
    if descr is None or order is None or shape is None:
        return None
    if not _REST.fullmatch(_SHAPE.sub("", _ORDER.sub("", _DESCR.sub("", text, 1), 1), 1)):
        return None
    try:
        dtype = np.dtype(descr[1])
    except TypeError:
        return None
    if dtype.itemsize == 0:
        return None
    return dtype, "F" if order[1] == "True" else "C", tuple(int(n) for n in re.findall(r"\d+", shape[1]))


def _shaped(found: dict[str, NDArray[Any]], name: str, ndim: int | None) -> NDArray[Any]:
    array = found[name]
    if ndim is not None and array.ndim != ndim:
        wanted = "(n, 3)" if name == "positions" else "one dimension"
        raise WireError(None, "bad_shape", f"{name} has shape {array.shape}; wanted {wanted}", field=name)
    if name == "positions" and array.shape[1] != 3:
        n = found["numbers"].size
        raise WireError(None, "bad_shape", f"positions has shape {array.shape}; wanted ({n}, 3)", field=name)
    return array


def _whole(found: dict[str, NDArray[Any]], name: str, largest: int, ndim: int | None = None) -> NDArray[np.int64]:
    array = _shaped(found, name, ndim)
    if array.dtype.kind not in "iu":
        raise WireError(None, "bad_value", f"{name} is of type {array.dtype}; wanted whole numbers", field=name)
    if array.size and (int(array.min()) < 0 or int(array.max()) > largest):
        i = int(np.flatnonzero((array.reshape(-1) < 0) | (array.reshape(-1) > largest))[0])
        raise WireError(
            None, "bad_value", f"{name}: entry {i + 1} is {array.reshape(-1)[i]}; wanted 0 to {largest}", field=name
        )
    return array.astype(np.int64)


def _real(found: dict[str, NDArray[Any]], name: str, ndim: int | None = None) -> NDArray[np.floating[Any]] | None:
    if name not in found:
        return None
    array = _shaped(found, name, ndim)
    if array.dtype.kind not in "iuf":
        raise WireError(None, "bad_value", f"{name} is of type {array.dtype}; wanted numbers", field=name)
    kept = np.dtype(np.float32) if array.dtype.kind == "f" and array.dtype.itemsize == 4 else np.dtype(np.float64)
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(array, dtype=kept)


def _texts(found: dict[str, NDArray[Any]], name: str) -> list[str] | None:
    if name not in found:
        return None
    array = found[name]
    if array.dtype.kind not in "US":
        raise WireError(None, "bad_value", f"{name} is of type {array.dtype}; wanted text", field=name)
    try:
        texts = [item.decode() if isinstance(item, bytes) else str(item) for item in array.reshape(-1).tolist()]
    except UnicodeDecodeError:
        raise WireError(None, "bad_value", f"{name} is not UTF-8", field=name) from None
    # One text may hold several names, as in a query string.
    return [word.strip() for text in texts for word in text.split(",")] if name == "properties" else texts


def _text(found: dict[str, NDArray[Any]], name: str) -> str | None:
    texts = _texts(found, name)
    if texts is None:
        return None
    if len(texts) != 1:
        raise WireError(None, "bad_value", f"{name} has {len(texts)} entries; wanted one", field=name)
    return texts[0]


def encode(outcome: Outcome) -> bytes:
    """The answer: ``n_atoms``, ``status``, one array for each property, and what went wrong as parallel arrays."""
    real = np.dtype("<f4" if outcome.dtype == "f4" else "<f8")
    members: dict[str, NDArray[Any]] = {
        "n_atoms": outcome.counts.astype("<i4"),
        "status": outcome.status,
    }
    if outcome.model is not None:
        members["model"] = np.array(outcome.model)
    for name, array in outcome.values.items():
        members[name] = array.astype(real if name in PER_ATOM else "<f8", copy=False)
    if outcome.pbc_assumed is not None:
        members["pbc"] = outcome.structures.pbc.astype(np.uint8)
    for name, rows in outcome.unavailable.items():
        members[f"unavailable_{name}"] = rows.astype("<i4")
    if outcome.errors:
        failed = sorted(outcome.errors)
        members["error_index"] = np.array(failed, "<i4")
        members["error_code"] = np.array([outcome.errors[i].code for i in failed])
        members["error_message"] = np.array([outcome.errors[i].reason for i in failed])
    file = io.BytesIO()
    np.savez(file, **members)  # type: ignore[arg-type]
    return file.getvalue()
