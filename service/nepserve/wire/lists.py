"""Lists of numbers as JSON and MessagePack bring them: strictly numbers, in strictly the wanted shape.

NumPy's own conversion would take ``true`` for 1, ``null`` for NaN and ``"1.5"`` for 1.5, and would build a block of
strings as wide as the longest one; here each of these is refused by name.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.elements import MAX_NUMBER, NUMBERS
from nepcore.errors import StructureError

from .request import describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUMERIC = frozenset({int, float})


def positions(value: Any) -> NDArray[np.float64]:
    """Rows of three numbers, one row an atom: (n, 3) float64, Å. NaN and infinity pass; admission names them."""
    return _rows(value, "positions", "one row [x, y, z] for each atom")


def cell(value: Any) -> NDArray[np.float64]:
    """Three rows of three numbers, or the three edges of an orthorhombic cell: (3, 3) float64, Å."""
    if isinstance(value, list) and len(value) == 3 and _NUMERIC.issuperset(map(type, value)):
        return np.diag(_floats(value, "cell"))
    box = _rows(value, "cell", "three vectors as rows, or three edge lengths")
    if len(box) != 3:
        raise StructureError(
            "bad_shape", f"cell has shape {box.shape}; wanted (3, 3), the three vectors as rows", field="cell"
        )
    return box


def pbc(value: Any) -> list[bool]:
    """Three truth values (or 0 and 1), or one for all three directions."""
    flags = value if isinstance(value, list) else [value] * 3
    if len(flags) != 3:
        raise StructureError(
            "bad_shape", f"pbc has {len(flags)} entries; wanted three, one for each cell vector, or one for all",
            field="pbc",
        )  # fmt: skip
    for flag in flags:
        if flag is not True and flag is not False and not (type(flag) is int and flag in {0, 1}):
            raise StructureError("bad_value", f"pbc must be true or false, not {describe(flag)}", field="pbc")
    return [bool(flag) for flag in flags]


def temperature(value: Any) -> float:
    """A temperature in K."""
    if type(value) not in _NUMERIC:
        raise StructureError(
            "bad_value", f"temperature must be a number (K), not {describe(value)}", field="temperature"
        )
    kelvin = float(_floats([value], "temperature")[0])
    if not np.isfinite(kelvin):
        raise StructureError("non_finite", f"temperature is {kelvin}; it must be finite", field="temperature")
    return kelvin


def numbers(value: Any) -> NDArray[np.uint8]:
    """Atomic numbers, (n,) uint8; a whole number may be written as 14.0, as JSON does not tell it from 14."""
    if not isinstance(value, list):
        raise StructureError(
            "bad_shape", f"numbers must be a list of atomic numbers, one for each atom, not {describe(value)}",
            field="numbers",
        )  # fmt: skip
    if {int}.issuperset(map(type, value)):
        try:
            found = np.frombuffer(bytes(value), np.uint8)
        except ValueError:
            pass  # out of the range of a byte: told below, with the atom
        else:
            if not len(found) or (found.min() >= 1 and found.max() <= MAX_NUMBER):
                return found
    if not _NUMERIC.issuperset(map(type, value)):
        i, item = next((i, item) for i, item in enumerate(value) if type(item) not in _NUMERIC)
        hint = ""
        if isinstance(item, str):
            hint = ' without quotes (symbols go under "symbols")' if item.isdigit() else ' (symbols go under "symbols")'
        elif isinstance(item, list):
            hint = " in a flat list"
        raise StructureError(
            "bad_value", f"numbers: atom {i + 1} is {describe(item)}; wanted an atomic number{hint}",
            field="numbers", atoms=(i,),
        )  # fmt: skip
    real = _floats(value, "numbers")
    # A NaN fails the comparison.
    fine = (real >= 1) & (real <= MAX_NUMBER) & (real == np.floor(real))
    if not fine.all():
        i = int(np.flatnonzero(~fine)[0])
        raise StructureError(
            "bad_value", f"numbers: atom {i + 1} is {describe(value[i])}; wanted an atomic number from 1 to "
            f"{MAX_NUMBER}", field="numbers", atoms=(i,),
        )  # fmt: skip
    return real.astype(np.uint8)


def symbols(value: Any) -> NDArray[np.uint8]:
    """Atomic numbers of exactly spelt chemical symbols, (n,) uint8."""
    if not isinstance(value, list):
        raise StructureError(
            "bad_shape", f"symbols must be a list of chemical symbols, one for each atom, not {describe(value)}",
            field="symbols",
        )  # fmt: skip
    try:
        return np.array([NUMBERS[symbol] for symbol in value], np.uint8)
    except (KeyError, TypeError):
        pass  # told below, with the atom
    i, item = next((i, s) for i, s in enumerate(value) if not isinstance(s, str) or s not in NUMBERS)
    hint = ""
    if not isinstance(item, str):
        hint = ' (atomic numbers go under "numbers")' if type(item) in _NUMERIC else ""
    elif item.isdigit():
        hint = ' (atomic numbers go under "numbers", without quotes)'
    elif item.strip().capitalize() in NUMBERS:
        hint = f" (did you mean {item.strip().capitalize()!r}?)"
    elif item.rstrip("0123456789") in NUMBERS:
        hint = f" (did you mean {item.rstrip('0123456789')!r}?)"
    raise StructureError(
        "bad_value", f"symbols: atom {i + 1} is {describe(item)}, which is not a chemical symbol, H to Pu, "
        f"exactly spelt{hint}", field="symbols", atoms=(i,),
    )  # fmt: skip


def counts(value: list[Any]) -> NDArray[np.int64]:
    """Whole numbers that are not negative, (B,) int64."""
    if not _NUMERIC.issuperset(map(type, value)):
        item = next(item for item in value if type(item) not in _NUMERIC)
        raise StructureError("bad_value", f"n_atoms must be whole numbers, not {describe(item)}", field="n_atoms")
    found = _floats(value, "n_atoms")
    if not ((found >= 0) & (found < 2**31) & (found == np.floor(found))).all():
        raise StructureError("bad_value", "n_atoms must be whole numbers from 0 to 2147483647", field="n_atoms")
    return found.astype(np.int64)


def _rows(value: Any, name: str, meaning: str) -> NDArray[np.float64]:
    wanted = "(3, 3)" if name == "cell" else "(n, 3)"
    if not isinstance(value, list):
        raise StructureError(
            "bad_value" if value is None else "bad_shape",
            f"{name} is {describe(value)}; wanted shape {wanted}, {meaning}", field=name,
        )  # fmt: skip
    if not {list}.issuperset(map(type, value)):
        i, item = next((i, item) for i, item in enumerate(value) if type(item) is not list)
        if not _NUMERIC.issuperset(map(type, value)):
            found = f"{name}: row {i + 1} is {describe(item)}"
        else:
            found = f"{name} is a flat list of {len(value)} numbers"
            if name == "positions" and len(value) % 3 == 0:
                wanted = f"({len(value) // 3}, 3)"
        raise StructureError("bad_shape", f"{found}; wanted shape {wanted}, {meaning}", field=name)
    lengths = set(map(len, value))
    if not lengths <= {3}:
        i = next(i for i, row in enumerate(value) if len(row) != 3)
        if len(lengths) == 1:
            found = f"{name} has shape ({len(value)}, {len(value[0])})"
        else:
            found = f"{name}: row {i + 1} has {len(value[i])} entries"
        atoms = (i,) if name == "positions" and len(lengths) > 1 else ()
        raise StructureError("bad_shape", f"{found}; wanted shape {wanted}, {meaning}", field=name, atoms=atoms)
    return _floats(list(chain.from_iterable(value)), name).reshape(-1, 3)


def _floats(flat: list[Any], name: str) -> NDArray[np.float64]:
    """A list of numbers as float64; ``name`` tells how to name an entry that is none."""
    if not _NUMERIC.issuperset(map(type, flat)):
        i, item = next((i, item) for i, item in enumerate(flat) if type(item) not in _NUMERIC)
        label, atoms = _entry(name, i)
        hint = ", without quotes" if isinstance(item, str) else ""
        raise StructureError(
            "bad_value", f"{label} is {describe(item)}; wanted a number{hint}", field=name, atoms=atoms
        )
    try:
        return np.array(flat, dtype=np.float64)
    except OverflowError:
        i = next(i for i, item in enumerate(flat) if isinstance(item, int) and abs(item) > 10**300)
        label, atoms = _entry(name, i)
        raise StructureError(
            "out_of_range", f"{label} is a whole number of hundreds of digits", field=name, atoms=atoms
        ) from None


def _entry(name: str, i: int) -> tuple[str, tuple[int, ...]]:
    if name == "positions":
        return f"positions: {'xyz'[i % 3]} of atom {i // 3 + 1}", (i // 3,)
    if name == "cell":
        return f"cell: component {'xyz'[i % 3]} of vector {i // 3 + 1}", ()
    if name == "numbers":
        return f"numbers: atom {i + 1}", (i,)
    return name, ()
