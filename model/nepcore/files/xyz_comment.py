"""The comment line of an extended-XYZ frame: its items, what they mean, and the column layout that it announces.

What is understood (keys and column names in any letter case): ``lattice``, ``pbc``, ``properties``, ``energy``,
``virial``, ``stress``, ``weight``, ``energy_weight``, ``temperature``, ``config_type``. Other items are kept as they
are spelled. ``free_energy`` is another item: it is never taken for the energy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, nan

NUMERIC_KEYS = {
    "lattice": 9, "energy": 1, "virial": 9, "stress": 9, "weight": 1, "energy_weight": 1, "temperature": 1,
}  # fmt: skip
"""Keys whose values are numbers, and how many."""

READ_KEYS = frozenset((*NUMERIC_KEYS, "pbc", "properties", "config_type"))

DEFAULT_PROPERTIES = "species:S:1:pos:R:3"

_BOOLEANS = {"t": True, "true": True, "1": True, "f": False, "false": False, "0": False}
_QUOTED = {
    '"': re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL),
    "'": re.compile(r"'(?:\\.|[^'\\])*'", re.DOTALL),
}
_USUAL = re.compile(r"""([^\s="'][^\s=]*)=(?:"([^"\\]*)"|([^\s"'\[{=]\S*))(?:\s+|\Z)""")
_BARE_KEY = re.compile(r"[^\s=]+")
_BARE_VALUE = re.compile(r"\S+")
_BLANKS = re.compile(r"\s*")
_EQUALS = re.compile(r"\s*=(\s*)")
_NEXT_KEY = re.compile(r"[A-Za-z_][\w.-]*\s*=(?!=)", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_FORTRAN = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)[dD][+-]?\d+", re.ASCII)
_MENTIONED = re.compile(r"(?<![A-Za-z0-9_])(?:" + "|".join(sorted(READ_KEYS)) + r")(?![A-Za-z0-9_])", re.IGNORECASE)
_CLOSING = {"[": "]", "{": "}"}
_BRACKET_OR_QUOTE = re.compile(r"""[\[\]{}"']""")


class Fault(ValueError):  # noqa: N818 - it never leaves the reader
    """What is wrong in a comment line or an atom line; who knows file, frame and line adds them."""


@dataclass(frozen=True)
class Item:
    """One item of a comment line.

    Attributes:
        key: The key as it is spelled, without quotes.
        value: The value without its quotes, escapes undone; brackets stay. None for a key without a value (true).
        raw: Key and value as they stand in the line.
    """

    key: str
    value: str | None
    raw: str


@dataclass(frozen=True)
class Column:
    """Columns ``first`` … ``first + count`` − 1 of an atom line, called ``name``; ``kind`` is R, I, S or L."""

    name: str
    kind: str
    first: int
    count: int


@dataclass(frozen=True)
class Layout:
    """Where things stand in the atom lines of a frame.

    Attributes:
        columns: All columns in their order.
        width: Columns of an atom line in all.
        species: Index of the column of chemical symbols, −1 if there is none.
        number: Index of the column of atomic numbers, −1 if there is none.
        pos: First column of the positions.
        forces: First column of the forces, −1 if there are none.
        extras: The columns that nobody reads here.
    """

    columns: tuple[Column, ...]
    width: int
    species: int
    number: int
    pos: int
    forces: int
    extras: tuple[Column, ...]


@dataclass(frozen=True)
class Header:
    """What a comment line says. Numbers not given are NaN, arrays not given are None.

    Attributes:
        layout: The columns of the atom lines.
        cell: Nine numbers, cell vectors as rows, Å; all zero without a cell.
        pbc: Periodic directions.
        energy: eV.
        virial: Nine numbers, eV, as given.
        stress: Nine numbers, eV/Å³, as given.
        weight: Weight of the frame, 1 if not given.
        energy_weight: Weight of its energy, 1 if not given.
        temperature: K.
        config_type: Empty if not given.
    """

    layout: Layout
    cell: tuple[float, ...]
    pbc: tuple[bool, bool, bool]
    energy: float
    virial: tuple[float, ...] | None
    stress: tuple[float, ...] | None
    weight: float
    energy_weight: float
    temperature: float
    config_type: str


def shown(token: str | bytes) -> str:
    """A token as messages show it: quoted, printable, not longer than 60 characters."""
    text = token if isinstance(token, str) else token.decode("utf-8", "surrogateescape")
    return ascii(text if len(text) <= 60 else text[:57] + "...")


def items(comment: str) -> list[Item]:
    """Split a comment line into its items.

    Blanks round ``=`` are allowed. Values stand bare, in single or double quotes (``\\"`` is a quote inside them), in
    brackets or in braces (which may be nested). A line of free text is a list of keys without values.

    Raises:
        Fault: A quote or bracket is not closed, or the line cannot be split without doubt.
    """
    found: list[Item] = []
    at = _skip(comment, 0)
    while at < len(comment):
        usual = _USUAL.match(comment, at)
        if usual is not None:
            key, quoted, bare_value = usual.groups()
            found.append(Item(key, bare_value if quoted is None else quoted, usual.group().rstrip()))
            at = usual.end()
            continue
        start = at
        if comment[at] in _QUOTED:
            at = _quoted(comment, at, "a key")
            key = _unquoted(comment[start:at])
        else:
            bare = _BARE_KEY.match(comment, at)
            if bare is None:
                raise Fault(f"a key is missing before {shown(comment[at : at + 20])}")
            key, at = bare.group(), bare.end()
        equals = _EQUALS.match(comment, at)
        if equals is None:
            found.append(Item(key, None, comment[start:at]))
        else:
            value, at = _value(comment, equals, key)
            found.append(Item(key, value, comment[start:at].rstrip()))
        if at < len(comment) and not comment[at].isspace():
            raise Fault(f"key {shown(key)}: a blank is missing before {shown(comment[at : at + 20])}")
        at = _skip(comment, at)
    return found


def readable_items(comment: str) -> list[Item]:
    """The items of a comment line, none if it is free text that cannot be split and mentions no key that is read.

    Raises:
        Fault: The line cannot be split, but names one of the keys that matter.
    """
    try:
        return items(comment)
    except Fault:
        if _MENTIONED.search(comment):
            raise
        return []


def _skip(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return at if found is None else found.end()


def _quoted(text: str, at: int, what: str) -> int:
    """End of the quoted string that begins at ``at``."""
    found = _QUOTED[text[at]].match(text, at)
    if found is None:
        raise Fault(f"{what}: the quote that opens {shown(text[at : at + 20])} is not closed")
    return found.end()


def _value(text: str, equals: re.Match[str], key: str) -> tuple[str, int]:
    """Value after an equals sign, and where it ends."""
    at = equals.end()
    if at == len(text):
        return "", at
    first = text[at]
    if first in _QUOTED:
        end = _quoted(text, at, f"key {shown(key)}")
        return _unquoted(text[at:end]), end
    if first in _CLOSING:
        end = _bracketed(text, at, key)
        return text[at:end], end
    # "energy= virial=..." has an empty energy, not the energy "virial=...".
    if equals.group(1) and _NEXT_KEY.match(text, at):
        return "", equals.end(0) - len(equals.group(1))
    bare = _BARE_VALUE.match(text, at)
    if bare is None or first == "=":
        raise Fault(f"key {shown(key)}: no value after the equals sign")
    return bare.group(), bare.end()


def _bracketed(text: str, at: int, key: str) -> int:
    """End of the bracketed value that begins at ``at``; brackets nest, quotes inside hide what they hold."""
    open_brackets: list[str] = []
    found = _BRACKET_OR_QUOTE.search(text, at)
    while found is not None:
        char, after = found.group(), found.end()
        if char in _CLOSING:
            open_brackets.append(_CLOSING[char])
        elif char in _QUOTED:
            after = _quoted(text, found.start(), f"key {shown(key)}")
        elif open_brackets.pop() != char:
            raise Fault(f"key {shown(key)}: {char!r} closes a bracket of another kind")
        if not open_brackets:
            return after
        found = _BRACKET_OR_QUOTE.search(text, after)
    raise Fault(f"key {shown(key)}: the bracket that opens {shown(text[at : at + 20])} is not closed")


def _unquoted(text: str) -> str:
    inner = text[1:-1]
    return re.sub(r"\\(.)", r"\1", inner, flags=re.DOTALL) if "\\" in inner else inner


def words(value: str) -> list[str]:
    """Words of a value: separated by blanks or commas, one pair of brackets round them is taken off."""
    text = value.strip()
    if text[:1] in _CLOSING and text[-1:] == _CLOSING[text[0]]:
        text = text[1:-1]
    return text.replace(",", " ").split()


def number(token: str) -> float:
    """A token as a finite number, the whole of it.

    Raises:
        Fault: It is no number, or not a finite one. Fortran's exponent letter D is no number here either.
    """
    if _NUMBER.fullmatch(token):
        value = float(token)
        if isfinite(value):
            return value
        raise Fault(f"{shown(token)} is too large for a number")
    if _FORTRAN.fullmatch(token):
        raise Fault(f"{shown(token)} is not a number; write the exponent with E")
    if token.lower().lstrip("+-") in {"nan", "inf", "infinity"}:
        raise Fault(f"{shown(token)} is not a finite number")
    raise Fault(f"{shown(token)} is not a number")


def numbers(key: str, value: str | None, count: int) -> tuple[float, ...]:
    """Exactly ``count`` finite numbers from the value of a key.

    Raises:
        Fault: Naming key, token and what was wanted.
    """
    tokens = [] if value is None else words(value)
    wanted = "one number" if count == 1 else f"{count} numbers"
    if not tokens:
        raise Fault(f"key {key}: the value is empty ({shown(value or '')}), wanted {wanted}")
    if len(tokens) != count:
        raise Fault(f"key {key}: found {len(tokens)} values in {shown(value or '')}, wanted {wanted}")
    try:
        values = tuple(map(float, tokens))
        # float() takes 1_000 for a thousand, and the digits of other scripts.
        if all(map(isfinite, values)) and value is not None and value.isascii() and "_" not in value:
            return values
    except ValueError:
        pass
    try:
        return tuple(map(number, tokens))
    except Fault as fault:
        raise Fault(f"key {key}: {fault}") from None


def _directions(value: str | None) -> tuple[bool, bool, bool]:
    tokens = ["T"] if value is None else words(value)
    flags = [_BOOLEANS.get(token.lower()) for token in tokens]
    if len(flags) == 1:
        flags *= 3
    a, b, c = flags if len(flags) == 3 else (None, None, None)
    if a is None or b is None or c is None:
        raise Fault(f"key pbc: {shown(value or '')} is not one or three of T, F, true, false, 1, 0")
    return a, b, c


def layout(properties: str) -> Layout:
    """The columns that ``Properties`` announces, as name:type:count triples.

    Raises:
        Fault: Broken triples, unknown types, no positions, no species, or a column that is read given twice.
    """
    # Cached by the text: a file has one layout, or few. A text of silly length is not worth the memory.
    return _cached_layout(properties) if len(properties) <= 1000 else _layout(properties)


def _layout(properties: str) -> Layout:
    fields = properties.split(":")
    if len(fields) % 3:
        raise Fault(f"key properties: {shown(properties)} is not a list of name:type:count triples")
    columns: list[Column] = []
    read: dict[str, Column] = {}
    extras: list[Column] = []
    width = 0
    for name, kind, count in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
        if kind.upper() not in {"R", "I", "S", "L"}:
            raise Fault(f"key properties: column {shown(name)} has type {shown(kind)}, wanted R, I, S or L")
        if not (count.isascii() and count.isdigit() and len(count) <= 9 and int(count) > 0):
            raise Fault(f"key properties: column {shown(name)} has count {shown(count)}, wanted a whole number above 0")
        column = Column(name, kind.upper(), width, int(count))
        width += column.count
        columns.append(column)
        role = _ROLES.get(name.lower())
        if role is None:
            extras.append(column)
            continue
        what, wanted_kind, wanted_count = role
        if column.kind != wanted_kind or column.count != wanted_count:
            raise Fault(
                f"key properties: column {shown(name)} is {column.kind}:{column.count}, "
                f"wanted {wanted_kind}:{wanted_count}"
            )
        if what in read:
            raise Fault(f"key properties: {shown(read[what].name)} and {shown(name)} both give the {what}")
        read[what] = column
    if "positions" not in read:
        raise Fault(f"key properties: no column pos:R:3 in {shown(properties)}")
    if "species" not in read and "atomic number" not in read:
        raise Fault(f"key properties: no column species:S:1 or Z:I:1 in {shown(properties)}")
    first = {what: column.first for what, column in read.items()}
    return Layout(
        tuple(columns), width, first.get("species", -1), first.get("atomic number", -1), first["positions"],
        first.get("forces", -1), tuple(extras),
    )  # fmt: skip


_cached_layout = lru_cache(maxsize=256)(_layout)

_ROLES = {
    "species": ("species", "S", 1),
    "z": ("atomic number", "I", 1),
    "numbers": ("atomic number", "I", 1),
    "pos": ("positions", "R", 3),
    "force": ("forces", "R", 3),
    "forces": ("forces", "R", 3),
}


def header(comment: str) -> Header:
    """Read a comment line.

    A lattice without ``pbc`` means periodic in all directions; no lattice, or one of zeros, without ``pbc`` means a
    molecule.

    Raises:
        Fault: Naming the key, what was found and what was wanted.
    """
    given: dict[str, str | None] = {}
    for item in readable_items(comment):
        key = item.key.lower()
        if key not in READ_KEYS:
            continue
        if key in given and given[key] != item.value:
            raise Fault(f"key {key} is given twice, as {shown(given[key] or '')} and as {shown(item.value or '')}")
        given[key] = item.value
    read = {key: numbers(key, given[key], count) for key, count in NUMERIC_KEYS.items() if key in given}
    properties = given.get("properties", DEFAULT_PROPERTIES)
    columns = layout((properties or "").strip())
    cell = read.get("lattice", (0.0,) * 9)
    vectors = (any(cell[0:3]), any(cell[3:6]), any(cell[6:9]))
    pbc = _directions(given["pbc"]) if "pbc" in given else (any(vectors),) * 3
    for name, periodic, vector in zip("abc", pbc, vectors, strict=True):
        if periodic and not vector:
            if "lattice" not in given:
                raise Fault(f"key pbc: direction {name} is periodic but there is no Lattice")
            if "pbc" in given:
                raise Fault(f"key lattice: vector {name} is zero but pbc makes its direction periodic")
            raise Fault(f"key lattice: vector {name} is zero; say with pbc which directions are periodic")
    one = {key: read[key][0] for key in ("energy", "weight", "energy_weight", "temperature") if key in read}
    return Header(
        columns, cell, pbc, one.get("energy", nan), read.get("virial"), read.get("stress"), one.get("weight", 1.0),
        one.get("energy_weight", 1.0), one.get("temperature", nan), given.get("config_type") or "",
    )  # fmt: skip
