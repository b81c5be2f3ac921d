"""Opening a session, and its steps, as JSON and MessagePack bring them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nepcore.errors import StructureError
from nepserve.sessions import Opening

from . import json_text, lists, msgpack_format, negotiation
from .arrays import too_many_atoms
from .request import Limits, WireError, choose_model, choose_properties, describe, unknown_field

if TYPE_CHECKING:
    from numpy.typing import NDArray

OPEN_KEYS = ("model", "properties", "numbers", "symbols", "cell", "pbc", "temperature")
"""Keys of the document that opens a session."""

STEP_KEYS = ("positions", "cell", "properties", "dtype")
"""Keys of a step as JSON or MessagePack (``dtype`` in MessagePack alone)."""

_ARRAYS = {"numbers": "u1", "cell": "<f8", "pbc": "u1"}


def read_map(content_type: str | None, body: bytes | bytearray, limits: Limits) -> tuple[str, dict[str, Any]]:
    """Format (``json`` or ``msgpack``) and object of a body.

    Raises:
        WireError: It is neither, or not an object.
    """
    form = negotiation.request_format(content_type)
    if form == "json":
        message = json_text.parse(bytes(body))
    elif form == "msgpack":
        message = msgpack_format.read_map(bytes(body), limits)
    else:
        types = ["application/json", msgpack_format.CONTENT_TYPE]
        raise WireError(
            None, "unsupported_media_type", f"sessions speak JSON and MessagePack, not {content_type}", types=types
        )
    if not isinstance(message, dict):
        raise WireError(None, "bad_value", f"the body must be an object, not {describe(message)}")
    return form, message


def read_opening(message: dict[str, Any], limits: Limits) -> Opening:
    """What a session is opened with.

    Raises:
        WireError: A key that is unknown or missing, or a value that cannot be.
    """
    for key in message:
        if key not in OPEN_KEYS:
            raise unknown_field(key, OPEN_KEYS, where="the request")
    model = choose_model(message.get("model"), {})
    properties = choose_properties(message.get("properties"), {})
    try:
        numbers = _species(message)
        cell = _value(message, "cell", lists.cell)
        pbc = _value(message, "pbc", lists.pbc)
        heat = message.get("temperature")
        temperature = np.nan if heat is None else lists.temperature(heat)
        if not len(numbers):
            raise StructureError("empty", "a structure needs at least one atom", field="numbers")
        if cell is None and pbc is not None and any(pbc):
            raise StructureError(
                "singular_cell", "pbc is true but there is no cell; give it, or pbc false for a molecule", field="cell"
            )
    except StructureError as error:
        raise WireError.from_structure(error) from None
    if len(numbers) > limits.max_atoms:
        raise too_many_atoms(len(numbers), limits)
    box = np.zeros((3, 3)) if cell is None else cell
    periodic = np.full(3, bool(box.any())) if pbc is None else np.array(pbc, bool)
    return Opening(model, properties, np.array(numbers, np.uint8), box, periodic, temperature)


def read_step(
    form: str, message: dict[str, Any], atoms: int
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None, tuple[str, ...] | None, Literal["f4", "f8"]]:
    """Positions (n, 3), cell (3, 3) or None, properties or None, and the type of values of atoms, of a step.

    Raises:
        WireError: A key that is unknown or missing, or a value that cannot be.
    """
    keys = STEP_KEYS if form == "msgpack" else STEP_KEYS[:-1]
    for key in message:
        if key not in keys:
            raise unknown_field(key, keys, where="a step of a session")
    dtype: Literal["f4", "f8"] = message.get("dtype", "f8")
    if dtype not in {"f4", "f8"}:
        raise WireError(None, "bad_value", f"dtype is {describe(dtype)}; wanted 'f8' or 'f4'", field="dtype")
    given = message.get("properties")
    try:
        raw = message.get("positions")
        if raw is None:
            raise StructureError("missing_field", "positions are missing; wanted one row [x, y, z] an atom",
                                 field="positions")  # fmt: skip
        if isinstance(raw, bytes):
            found = _bytes(raw, "positions", f"<{dtype}")
            with np.errstate(invalid="ignore"):
                flat = found.astype(np.float64, copy=False)
            if flat.size != 3 * atoms:
                raise StructureError(
                    "bad_shape",
                    f"positions has {flat.size} numbers; wanted {3 * atoms}: the session has {atoms} atoms",
                    field="positions",
                )  # fmt: skip
            positions = flat.reshape(atoms, 3)
        else:
            positions = lists.positions(raw)
            if len(positions) != atoms:
                raise StructureError(
                    "bad_shape", f"positions has shape ({len(positions)}, 3); wanted ({atoms}, 3), the session has "
                    f"{atoms} atoms", field="positions",
                )  # fmt: skip
        cell = _value(message, "cell", lists.cell)
    except StructureError as error:
        raise WireError.from_structure(error) from None
    return positions, cell, None if given is None else choose_properties(given, {}), dtype


def _species(message: dict[str, Any]) -> Any:
    numbers, symbols = message.get("numbers"), message.get("symbols")
    if numbers is not None and symbols is not None:
        raise StructureError("ambiguous", "numbers and symbols are both given; wanted one of them", field="symbols")
    if numbers is None and symbols is None:
        raise StructureError("missing_field", "numbers is missing; wanted atomic numbers (or symbols)", field="numbers")
    if symbols is not None:
        return lists.symbols(symbols)
    return lists.numbers(list(numbers) if isinstance(numbers, bytes) else numbers)


def _value(message: dict[str, Any], name: str, read: Any) -> Any:
    value = message.get(name)
    if value is None:
        return None
    if isinstance(value, bytes):
        array = _bytes(value, name, _ARRAYS[name])
        size = 9 if name == "cell" else 3
        if array.size != size:
            raise StructureError("bad_shape", f"{name} has {array.size} entries; wanted {size}", field=name)
        return array.reshape(3, 3) if name == "cell" else lists.pbc(array.tolist())
    return read(value)


def _bytes(value: bytes, name: str, code: str) -> NDArray[Any]:
    dtype = np.dtype(code)
    if len(value) % dtype.itemsize:
        raise StructureError(
            "bad_shape", f"{name} has {len(value)} bytes, which is no whole number of {code} entries", field=name
        )
    return np.frombuffer(value, dtype)
