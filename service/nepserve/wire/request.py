"""What every format is decoded to, and the one exception that decoding may raise."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from nepcore.errors import StructureError
from nepcore.structures import DEFAULT_PROPERTIES, PROPERTIES

from .problem import CODES, problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from nepcore.files.xyz import Frames
    from nepcore.structures import Structures

MAX_NAME = 256
"""Longest model name, in characters."""

QUERY_KEYS = ("model", "properties")
"""Keys of the query string that every format understands."""


class WireError(ValueError):
    """A request that cannot be answered, or an answer that cannot be read.

    Attributes:
        status: HTTP status.
        code: A word of :data:`nepserve.wire.problem.CODES`.
        detail: What is wrong, for people.
        extra: Members of the problem document that a program can act on: ``field``, ``structure`` (index from 0),
            ``atoms`` (indices from 0 in that structure) and what the code announces.
    """

    def __init__(
        self,
        status: int | None,
        code: str,
        detail: str,
        *,
        field: str | None = None,
        structure: int | None = None,
        atoms: Sequence[int] = (),
        **extra: Any,
    ) -> None:
        self.status = CODES[code].status if status is None else status
        self.code = code
        self.detail = detail
        self.extra: dict[str, Any] = {"field": field, "structure": structure, "atoms": list(atoms) or None, **extra}
        super().__init__(detail)

    @classmethod
    def from_structure(cls, error: StructureError, structure: int | None = None) -> WireError:
        """The failure of a structure as the failure of the whole request.

        ``structure`` (index from 0) is named where the request had more than one.
        """
        code = error.code if error.code in CODES else "bad_value"
        detail = error.reason if structure is None else f"structure {structure + 1}: {error.reason}"
        return cls(None, code, detail, field=error.field, structure=structure, atoms=error.atoms)

    def problem(self, request_id: str | None = None) -> dict[str, Any]:
        """The problem document (RFC 9457) of this error."""
        return problem(self.status, self.code, None, self.detail, request_id, **self.extra)

    def __reduce__(self) -> tuple[object, tuple[int, str, str, dict[str, Any]]]:
        return _wire_error, (self.status, self.code, self.detail, self.extra)


def _wire_error(status: int, code: str, detail: str, extra: dict[str, Any]) -> WireError:
    return WireError(status, code, detail, **extra)


@dataclass(frozen=True)
class Limits:
    """How much one request may carry.

    Attributes:
        max_body: Bytes of the body, and of an archive after unpacking.
        max_structures: Structures.
        max_atoms: Atoms of all its structures together.
    """

    max_body: int = 256 * 1024 * 1024
    max_structures: int = 100_000
    max_atoms: int = 4_000_000


@dataclass(frozen=True, eq=False)
class Request:
    """A decoded request.

    Attributes:
        format: Format it came in: ``json``, ``msgpack``, ``xyz`` or ``npz``.
        model: Name of the model; None for the only one there is.
        properties: Properties asked for, without repetition.
        structures: The packed block, one row a structure, those in ``errors`` included.
        errors: Structures that could not be read, by index. Their rows are placeholders that must not be evaluated:
            no atoms at all where the format gives none, so that results line up by ``structures.counts``.
        single: One structure was sent as one structure, not as a batch of one: its failure is the answer's failure,
            and a JSON answer has the properties as top-level keys.
        dtype: Type of the per-atom arrays of a binary answer.
        pbc_assumed: Structures that came without ``pbc``, or may have, (B,) bool; their answers say which periodicity
            was used.
        frames: The frames of an extended XYZ body, whose comment lines come back in the answer.
    """

    format: str
    model: str | None
    properties: tuple[str, ...]
    structures: Structures
    errors: dict[int, StructureError] = field(default_factory=dict)
    single: bool = False
    dtype: Literal["f4", "f8"] = "f8"
    pbc_assumed: NDArray[np.bool_] | None = None
    frames: Frames | None = None

    def refuse_single(self) -> None:
        """Refuse a single structure that could not be read, before anything is computed.

        Raises:
            WireError: The structure's own fault.
        """
        if self.single and self.errors:
            raise WireError.from_structure(self.errors[0])

    def with_elements(self, elements: Sequence[str]) -> Request:
        """The same request, its complaints about species naming the elements that the model knows."""
        told = {i: _name_elements(e, elements) for i, e in self.errors.items()}
        return replace(self, errors=told) if told else self


def _name_elements(error: StructureError, elements: Sequence[str]) -> StructureError:
    if error.field not in {"symbols", "numbers"} or not error.atoms:
        return error
    reason = f"{error.reason}; the model knows: {' '.join(elements)}"
    return StructureError(error.code, reason, field=error.field, atoms=error.atoms)


def check_query(query: Mapping[str, str]) -> None:
    """Refuse keys of the query string that mean nothing: a misspelt one must not be ignored."""
    for key in query:
        if key not in QUERY_KEYS:
            raise unknown_field(key, QUERY_KEYS, where="the query string")


def choose_model(body: Any, query: Mapping[str, str]) -> str | None:
    """Name of the model from the body or the query string; None if neither names one."""
    if body is not None and not isinstance(body, str):
        raise WireError(None, "bad_value", f"model must be a string, not {describe(body)}", field="model")
    asked = query.get("model")
    if body is not None and asked is not None and body != asked:
        raise WireError(
            None, "ambiguous", f"the body asks for model {shorten(body)}, the query string for {shorten(asked)}",
            field="model",
        )  # fmt: skip
    name = asked if body is None else body
    if name is not None and not 0 < len(name) <= MAX_NAME:
        raise WireError(None, "bad_value", f"model must be a name of 1 to {MAX_NAME} characters", field="model")
    return name


def choose_properties(body: Any, query: Mapping[str, str]) -> tuple[str, ...]:
    """Properties asked for by the body or the query string, each once; energy, forces, stress if neither asks."""
    asked = query.get("properties")
    if body is None:
        if asked is None:
            return DEFAULT_PROPERTIES
        return _properties(tuple(word.strip() for word in asked.split(",")))
    if not isinstance(body, (list, tuple)):
        raise WireError(
            None, "bad_value", f"properties must be a list of names, not {describe(body)}", field="properties"
        )
    if len(body) > 4 * len(PROPERTIES):
        raise WireError(None, "bad_value", f"properties has {len(body)} entries", field="properties")
    for item in body:
        if not isinstance(item, str):
            raise WireError(
                None, "bad_value", f"properties must be names, not {describe(item)}; there are: "
                f"{', '.join(PROPERTIES)}", field="properties",
            )  # fmt: skip
    chosen = _properties(tuple(body))
    if asked is not None and _properties(tuple(word.strip() for word in asked.split(","))) != chosen:
        raise WireError(
            None, "ambiguous", "the body and the query string ask for different properties", field="properties"
        )
    return chosen


@lru_cache(maxsize=256)
def _properties(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise WireError(
            None, "bad_value",
            f"properties is empty; leave it out for {', '.join(DEFAULT_PROPERTIES)}, or choose from: "
            f"{', '.join(PROPERTIES)}", field="properties",
        )  # fmt: skip
    for name in names:
        if name not in PROPERTIES:
            raise WireError(
                None, "unknown_property",
                f"there is no property {shorten(name)}{_suggestion(name, PROPERTIES)}; there are: "
                f"{', '.join(PROPERTIES)}", field="properties", properties=list(PROPERTIES),
            )  # fmt: skip
    return tuple(dict.fromkeys(names))


def unknown_field(key: Any, known: Iterable[str], *, where: str) -> WireError:
    """Complaint about a key that means nothing, with the nearest spelling that does."""
    wanted = list(known)
    name = key if isinstance(key, str) else str(key)
    return WireError(
        None, "unknown_field", unknown_reason(name, wanted, where), field=name[:MAX_NAME],
        did_you_mean=nearest(name, wanted),
    )  # fmt: skip


def unknown_reason(key: str, known: Sequence[str], where: str) -> str:
    """Sentence about a key that ``where`` does not have."""
    return f"{where} has no key {shorten(key)}{_suggestion(key, known)}; its keys are: {', '.join(known)}"


SYNONYMS: dict[str, str] = {
    "atomic_numbers": "numbers", "atomicnumbers": "numbers", "atom_types": "numbers", "z": "numbers",
    "species": "symbols", "elements": "symbols", "types": "symbols", "atoms": "structure",
    "coords": "positions", "coordinates": "positions", "xyz": "positions", "pos": "positions", "r": "positions",
    "lattice": "cell", "box": "cell", "cells": "cell", "unit_cell": "cell", "lattice_vectors": "cell",
    "periodic": "pbc", "periodicity": "pbc", "temp": "temperature", "t": "temperature",
    "potential": "model", "outputs": "properties", "energy_and_forces": "properties",
    "natoms": "n_atoms", "counts": "n_atoms", "force": "forces", "site_energies": "energies",
}  # fmt: skip
"""What other programs call our keys."""


def nearest(key: str, known: Sequence[str]) -> str | None:
    """The key that was probably meant, if there is one."""
    word = key[:MAX_NAME].strip().lower()
    meant = SYNONYMS.get(word)
    if meant in known:
        return meant
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return close[0] if close else None


def _suggestion(key: str, known: Sequence[str]) -> str:
    meant = nearest(key, known)
    return "" if meant is None else f" (did you mean {meant!r}?)"


def shorten(text: str, length: int = 60) -> str:
    """A string from outside, quoted and short enough for a message."""
    return repr(text) if len(text) <= length else repr(text[:length]) + "..."


def describe(value: Any) -> str:
    """What a value from outside is, in words for a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"the number {value:.6g}" if isinstance(value, float) or abs(value) < 10**15 else "a huge number"
    if isinstance(value, str):
        return f"the string {shorten(value)}"
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    return f"a value of type {type(value).__name__}"


__all__ = [
    "Limits",
    "Request",
    "WireError",
    "check_query",
    "choose_model",
    "choose_properties",
    "describe",
    "nearest",
    "shorten",
    "unknown_field",
    "unknown_reason",
]
