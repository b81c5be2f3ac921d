"""The atom lines of extended-XYZ frames: many at a time to arrays, or one by one to find the fault."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.elements import MAX_NUMBER, NUMBERS

from .xyz_comment import Fault, number, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from .xyz_comment import Layout

_LINES = 8192
"""Lines converted at a time: their tokens stay in the cache, and a large frame needs little more than its arrays."""

_WIDE = 64
"""Tokens longer than this are kept one by one; an array of fixed width would take many times their size."""

_NUMBER_OF = {symbol.encode(): z for symbol, z in NUMBERS.items()}


@dataclass(frozen=True, eq=False)
class AtomColumns:
    """The columns of n atom lines.

    Attributes:
        numbers: Atomic numbers, (n,) uint8.
        positions: Å, (n, 3) float64.
        forces: eV/Å, (n, 3) float64; None without that column.
        extras: Tokens of the columns that nobody reads, (n, k) bytes; None without such columns.
    """

    numbers: NDArray[np.uint8]
    positions: NDArray[np.float64]
    forces: NDArray[np.float64] | None
    extras: NDArray[Any] | None


def convert(lines: Sequence[bytes], layout: Layout) -> AtomColumns:
    """Convert atom lines of one layout.

    Raises:
        ValueError: Something is wrong somewhere; :func:`locate` says what and where.
    """
    if not lines:
        forces = np.zeros((0, 3)) if layout.forces >= 0 else None
        return AtomColumns(np.zeros(0, np.uint8), np.zeros((0, 3)), forces, None)
    pieces = [_convert(lines[i : i + _LINES], layout) for i in range(0, len(lines), _LINES)]
    if len(pieces) == 1:
        return pieces[0]
    return AtomColumns(
        np.concatenate([p.numbers for p in pieces]),
        np.concatenate([p.positions for p in pieces]),
        np.concatenate([p.forces for p in pieces if p.forces is not None]) if layout.forces >= 0 else None,
        np.concatenate([p.extras for p in pieces if p.extras is not None]) if layout.extras else None,
    )


def _convert(lines: Sequence[bytes], layout: Layout) -> AtomColumns:
    n = len(lines)
    rows = [line.split() for line in lines]
    if list(map(len, rows)).count(layout.width) != n:
        raise Fault("a line has another number of columns")
    columns = list(zip(*rows, strict=True))
    read = [layout.pos, layout.pos + 1, layout.pos + 2]
    if layout.forces >= 0:
        read += [layout.forces, layout.forces + 1, layout.forces + 2]
    # float() takes 1_000 for a thousand.
    if b"_" in b"".join(lines) and any(b"_" in token for k in read for token in columns[k]):
        raise Fault("a number with an underscore")
    values = np.fromiter(map(float, chain.from_iterable([columns[k] for k in read])), np.float64, n * len(read))
    if not np.isfinite(values).all():
        raise Fault("a number is not finite")
    values = values.reshape(-1, n)
    return AtomColumns(
        _numbers(columns, layout),
        np.ascontiguousarray(values[:3].T),
        np.ascontiguousarray(values[3:].T) if layout.forces >= 0 else None,
        _extras(columns, layout, n) if layout.extras else None,
    )


def _numbers(columns: Sequence[Sequence[bytes]], layout: Layout) -> NDArray[np.uint8]:
    n = len(columns[0])
    found: NDArray[np.uint8] | None = None
    if layout.species >= 0:
        try:
            found = np.fromiter(map(_NUMBER_OF.__getitem__, columns[layout.species]), np.uint8, n)
        except KeyError as error:
            raise Fault("an unknown species") from error
    if layout.number >= 0:
        given = np.fromiter(map(_atomic_number, columns[layout.number]), np.uint8, n)
        if found is not None and not np.array_equal(found, given):
            raise Fault("species and atomic number differ")
        found = given
    assert found is not None
    return found


def _atomic_number(token: bytes) -> int:
    if not token.isdigit() or len(token) > 9 or not 1 <= int(token) <= MAX_NUMBER:
        raise Fault(f"{shown(token)} is not an atomic number from 1 to {MAX_NUMBER}")
    return int(token)


def _extras(columns: Sequence[Sequence[bytes]], layout: Layout, n: int) -> NDArray[Any]:
    chosen = [columns[k] for column in layout.extras for k in range(column.first, column.first + column.count)]
    # An array of bytes drops zero bytes at the end of a token.
    if max(max(map(len, column)) for column in chosen) <= _WIDE and b"\0" not in b"".join(chain(*chosen)):
        return np.array(chosen, dtype=np.bytes_).T
    wide = np.empty((n, len(chosen)), dtype=object)
    for k, column in enumerate(chosen):
        wide[:, k] = column
    return wide


def locate(lines: Sequence[bytes], layout: Layout) -> tuple[int, str]:
    """The first fault of lines that :func:`convert` refused: index of the line, and what is wrong with it."""
    for index, line in enumerate(lines):
        reason = _fault(line.split(), layout, index, len(lines))
        if reason is not None:
            return index, reason
    raise AssertionError("no fault in lines that could not be converted")


def misfit(tokens: list[bytes], layout: Layout, index: int, announced: int) -> str | None:
    """Why a line cannot be that of atom ``index`` of ``announced``: it has not the columns of the layout."""
    if len(tokens) == layout.width:
        return None
    early = f"the frame ends early: {announced} atoms announced, {index} found before "
    if not tokens:
        return early + "this blank line"
    if len(tokens) == 1 and tokens[0].isdigit():
        return early + f"this line, {shown(tokens[0])}, which looks like the next frame's count"
    named = ", ".join(f"{shown(c.name)[1:-1]} {c.count}" for c in layout.columns[:12])
    return f"atom {index + 1}: found {len(tokens)} columns, wanted {layout.width} ({named})"


def _fault(tokens: list[bytes], layout: Layout, index: int, announced: int) -> str | None:
    """What is wrong with one line, None if nothing is."""
    reason = misfit(tokens, layout, index, announced)
    if reason is not None:
        return reason
    if layout.species >= 0:
        token = tokens[layout.species]
        if token not in _NUMBER_OF:
            return f"atom {index + 1}, species: {shown(token)} is not a chemical symbol{_hint(token)}"
    if layout.number >= 0:
        token = tokens[layout.number]
        reason = _refused(_atomic_number, token)
        if reason is not None:
            return f"atom {index + 1}, atomic number: {reason}"
        if layout.species >= 0 and _NUMBER_OF[tokens[layout.species]] != int(token):
            return f"atom {index + 1}: species {shown(tokens[layout.species])} but atomic number {int(token)}"
    for label, first in (("pos", layout.pos), ("forces", layout.forces)):
        for axis in range(3 if first >= 0 else 0):
            reason = _refused(number, tokens[first + axis].decode("latin-1"))
            if reason is not None:
                return f"atom {index + 1}, {label} {'xyz'[axis]}: {reason}"
    return None


def _refused(read: Callable[[Any], object], token: str | bytes) -> str | None:
    """Why ``read`` does not take a token."""
    try:
        read(token)
    except Fault as fault:
        return str(fault)
    return None


def _hint(token: bytes) -> str:
    """What was probably meant by a species that is none."""
    if token.isdigit():
        return "; atomic numbers stand in a column Z:I:1"
    likely = token.rstrip(b"0123456789").capitalize()
    return f"; did you mean {shown(likely)}?" if likely in _NUMBER_OF else " (H to Pu, exact spelling)"
