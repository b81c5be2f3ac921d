"""The compact frame of one step of a session: a head of 24 bytes and arrays, little-endian. Both sides live here.

Head: magic ``NEPF``, version u8, kind u8, flags u16, atoms u32, payload bytes u32, sequence number u64. Payload of a
request: ``[cell 9 × f8]``, positions; of a result: energy f8, ``[stress 6 × f8]``, ``[virial 9 × f8]``, forces,
``[energies]``, ``[virials 9 × atoms]``. ``docs/sessions.md`` describes every byte.

A client imports this module without pydantic or orjson.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .request import WireError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

CONTENT_TYPE = "application/x-nepserve-frame"

HEAD = struct.Struct("<4sBBHIIQ")
MAGIC = b"NEPF"
VERSION = 1

MAX_OPENING = 1 << 20
"""Largest payload that is taken before the key of a connection is known, bytes."""

REQUEST, RESULT, ERROR, OPEN, OPENED = range(5)
"""Kinds of frame."""

SINGLE, CELL, STRESS, ENERGIES, VIRIAL, VIRIALS = 1, 2, 4, 8, 64, 128
"""Flags: coordinates and values of atoms are float32; a cell follows; what is wanted, or there, beside energy and
forces. 16 and 32 are kept for the spread of a committee and for extrapolation grades, the others for later."""

WANTED: dict[str, int] = {"stress": STRESS, "energies": ENERGIES, "virial": VIRIAL, "virials": VIRIALS}
"""Flag of a property; energy and forces are in every result."""

PROPERTIES: frozenset[str] = frozenset({"energy", "free_energy", "forces", *WANTED})
"""Properties that a frame has a place for."""

_REQUEST_FLAGS = SINGLE | CELL | STRESS | ENERGIES | VIRIAL | VIRIALS
_ASKED = tuple(WANTED.items())
_F8 = np.dtype("<f8")
_F4 = np.dtype("<f4")


class Head(NamedTuple):
    """The first 24 bytes of a frame."""

    kind: int
    flags: int
    atoms: int
    size: int
    """Bytes that follow."""
    sequence: int
    """Number that the answer repeats."""


def flags_of(properties: Iterable[str]) -> int:
    """The flags that ask for some properties.

    Raises:
        KeyError: One that a frame has no place for.
    """
    found = 0
    for name in properties:
        if name not in PROPERTIES:
            raise KeyError(name)
        found |= WANTED.get(name, 0)
    return found


def properties_of(flags: int) -> tuple[str, ...]:
    """The properties that flags ask for."""
    return ("energy", "forces", *(name for name, flag in _ASKED if flags & flag))


def read_head(data: bytes | bytearray | memoryview, most: int) -> Head:
    """The head of a frame of which at least 24 bytes are there.

    Args:
        data: Its first bytes.
        most: Largest payload that is taken, bytes.

    Raises:
        WireError: ``bad_frame``: these bytes are no head; ``body_too_large``.
    """
    magic, version, kind, flags, atoms, size, sequence = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise bad_frame(f"a frame begins with NEPF, not with {bytes(data[:4])!r}")
    if version != VERSION:
        raise bad_frame(f"frames of version {version} are not known here; wanted {VERSION}")
    if size > most:
        raise WireError(
            None, "body_too_large", f"the frame announces {size:,} bytes; at most {most:,} are taken", max_bytes=most
        )
    return Head(kind, flags, atoms, size, sequence)


def bad_frame(detail: str) -> WireError:
    """What is told of bytes that are no frame."""
    return WireError(None, "bad_frame", detail)


def pack(kind: int, payload: bytes, *, flags: int = 0, atoms: int = 0, sequence: int = 0) -> bytes:
    """A frame of given bytes."""
    return HEAD.pack(MAGIC, VERSION, kind, flags, atoms, len(payload), sequence) + payload


def pack_request(
    positions: NDArray[np.floating[Any]],
    cell: NDArray[np.float64] | None,
    flags: int,
    sequence: int,
) -> bytes:
    """A step, for clients.

    Args:
        positions: Å, (n, 3).
        cell: Vectors as rows, Å, (3, 3); None for that of the session.
        flags: What is wanted, and :data:`SINGLE` for float32.
        sequence: Number that the answer repeats.
    """
    dtype = _F4 if flags & SINGLE else _F8
    body = np.ascontiguousarray(positions, dtype).tobytes()
    if cell is not None:
        flags |= CELL
        body = np.ascontiguousarray(cell, _F8).tobytes() + body
    return HEAD.pack(MAGIC, VERSION, REQUEST, flags, len(positions), len(body), sequence) + body


def read_request(
    head: Head, payload: bytes | bytearray | memoryview, atoms: int
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Positions (n, 3) and, if one came, cell (3, 3) of a step; views of ``payload`` where they can be.

    Args:
        head: The head.
        payload: What follows it.
        atoms: Atoms of the session.

    Raises:
        WireError: ``bad_frame`` for another kind, unknown flags or another length; ``bad_shape`` for other atoms.
    """
    flags = head.flags
    if head.kind != REQUEST:
        raise bad_frame(f"a frame of kind {head.kind} came; wanted kind {REQUEST}, a request")
    if flags & ~_REQUEST_FLAGS:
        raise bad_frame(f"flags {flags & ~_REQUEST_FLAGS} mean nothing in a request")
    if head.atoms != atoms:
        raise WireError(
            None, "bad_shape", f"positions: the frame has {head.atoms} atoms, and the session {atoms}",
            field="positions",
        )  # fmt: skip
    real = _F4 if flags & SINGLE else _F8
    skip = 72 if flags & CELL else 0
    wanted = skip + 3 * atoms * real.itemsize
    if head.size != wanted or len(payload) != wanted:
        what = "cell and positions" if skip else "positions"
        raise bad_frame(f"the frame has {len(payload)} bytes behind its head; wanted {wanted}: {what} of {atoms} atoms")
    cell = np.frombuffer(payload, _F8, 9).reshape(3, 3) if skip else None
    positions: NDArray[Any] = np.frombuffer(payload, real, 3 * atoms, skip).reshape(atoms, 3)
    if real is _F4:
        # A signalling NaN would make the conversion warn; whoever checks the numbers finds it.
        with np.errstate(invalid="ignore"):
            positions = positions.astype(np.float64)
    return positions, cell


def pack_result(values: Mapping[str, NDArray[Any]], atoms: int, flags: int, sequence: int) -> bytes:
    """A result.

    Args:
        values: Arrays of a block of one structure, by property.
        atoms: Its atoms.
        flags: What goes in, and :data:`SINGLE`.
        sequence: That of the request.
    """
    real = _F4 if flags & SINGLE else _F8
    parts = [b"", values["energy"].astype(_F8, copy=False).tobytes()]
    for flag, name in ((STRESS, "stress"), (VIRIAL, "virial")):
        if flags & flag:
            parts.append(values[name].astype(_F8, copy=False).tobytes())
    parts.append(values["forces"].astype(real, copy=False).tobytes())
    for flag, name in ((ENERGIES, "energies"), (VIRIALS, "virials")):
        if flags & flag:
            parts.append(values[name].astype(real, copy=False).tobytes())
    parts[0] = HEAD.pack(MAGIC, VERSION, RESULT, flags, atoms, sum(map(len, parts)), sequence)
    return b"".join(parts)


def read_result(
    head: Head, payload: bytes | bytearray | memoryview, atoms: int, flags: int, sequence: int
) -> dict[str, Any]:
    """What is in a result, for clients: a float and arrays of float64, the caller's own, by property.

    A stress that was asked for may be missing: it does not exist without three periodic directions.

    Args:
        head: The head.
        payload: What follows it.
        atoms: Atoms that were sent.
        flags: Those of the request.
        sequence: That of the request.

    Raises:
        WireError: ``bad_answer``: it is not the complete result of that request.
    """
    asked = flags & ~CELL
    given = head.flags
    if head.kind != RESULT or head.sequence != sequence or head.atoms != atoms or given | STRESS != asked | STRESS:
        raise WireError(
            None, "bad_answer",
            f"the answer (kind {head.kind}, number {head.sequence}, {head.atoms} atoms, flags {given}) is not that of "
            f"the request (number {sequence}, {atoms} atoms, flags {asked})",
        )  # fmt: skip
    real = _F4 if given & SINGLE else _F8
    layout = [(name, size, dtype) for name, size, dtype, flag in (
        ("energy", 1, _F8, 0), ("stress", 6, _F8, STRESS), ("virial", 9, _F8, VIRIAL), ("forces", 3 * atoms, real, 0),
        ("energies", atoms, real, ENERGIES), ("virials", 9 * atoms, real, VIRIALS),
    ) if not flag or given & flag]  # fmt: skip
    wanted = sum(size * dtype.itemsize for _, size, dtype in layout)
    if head.size != wanted or len(payload) != wanted:
        raise WireError(None, "bad_answer", f"the answer has {len(payload)} bytes behind its head; {wanted} were due")
    found: dict[str, Any] = {}
    at = 0
    for name, size, dtype in layout:
        array = np.frombuffer(payload, dtype, size, at).astype(np.float64)
        at += size * dtype.itemsize
        found[name] = array.reshape(_SHAPES[name]) if name in _SHAPES else array
    found["energy"] = float(found["energy"][0])
    return found


_SHAPES: dict[str, tuple[int, ...]] = {"virial": (3, 3), "forces": (-1, 3), "virials": (-1, 3, 3)}
