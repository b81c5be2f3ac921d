"""The header of a ``nep.txt``, read and written.

It is six lines, seven with ZBL, in fixed order::

    <tag> <number of types> <symbols>
    zbl <inner> <outer> [<factor>]                      only if the tag says so; "0 0" is the flexible kind
    cutoff <radial> <angular> [<MN> <MN>]               or one pair of cutoffs per type
    n_max <radial> <angular>
    basis_size <radial> <angular>
    l_max <L> [<q222> <q1111> <q112> <q123> <q233> <q134>]
    ANN <neurons> <neurons of a second layer, or 0>
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from nepcore.elements import NUMBERS
from nepcore.errors import ModelFileError

from .nep_layout import MAX_L, SWITCHES, Header

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_TAG = re.compile(r"nep(\d{1,3})((?:_[a-z0-9]+)*)")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_INT = re.compile(r"[+-]?[0-9]{1,18}")

_KINDS = {
    "dipole": "a dipole model (TNEP), which is planned but not supported yet",
    "polarizability": "a polarizability model (TNEP), which is planned but not supported yet",
    "charge1": "a model with charges (qNEP, mode 1), which is planned but not supported yet",
    "charge2": "a model with charges (qNEP, mode 2), which is planned but not supported yet",
    "charge3": "a model with charges in an old form (qNEP, mode 3), which is not supported",
    "vdw": "a model with dispersion (vdW), which is planned but not supported yet",
    "charge_vdw": "a model with charges and dispersion (vdW), which is planned but not supported yet",
}
_SUPPORTED = "nep3, nep4, nep5 with or without _zbl, and nep3, nep4 with _temperature after that"


def parse_header(lines: Sequence[str], path: str | Path) -> Header:
    """Read the header from the first lines of a file.

    Raises:
        ModelFileError: naming the line, what it says and what it should say.
    """
    return _HeaderReader(lines, path).read()


def parse_float(token: str) -> float | None:
    """A finite number written in full, or None."""
    if not _FLOAT.fullmatch(token):
        return None
    value = float(token)
    return value if math.isfinite(value) else None


def quoted(text: str) -> str:
    """A piece of a file for a message: quoted, printable and short."""
    text = re.sub(r"[ \t]+", " ", text).strip(" ")
    return ascii(text if len(text) <= 40 else f"{text[:37]}...")


class _HeaderReader:
    """Takes the header apart line by line; ``line`` is the number of the line at hand, from 1."""

    def __init__(self, lines: Sequence[str], path: str | Path) -> None:
        self.lines = lines
        self.path = path
        self.line = 0

    def fail(self, reason: str) -> ModelFileError:
        return ModelFileError(self.path, self.line, reason)

    def read(self) -> Header:
        tag, version, has_zbl, temperature, elements = self.read_tag()
        zbl, inner, outer, factor = self.read_zbl(tag) if has_zbl else ("none", None, None, None)
        radial, angular, mn_radial, mn_angular = self.read_cutoff(tag, elements)
        n_max_radial, n_max_angular = self.read_sizes("n_max", "radial and angular number of functions less one")
        basis_radial, basis_angular = self.read_sizes("basis_size", "radial and angular basis size less one")
        l_max, switches = self.read_l_max()
        neurons, neurons2 = self.read_sizes("ANN", "neurons, and neurons of a second layer or 0")
        if neurons < 1:
            raise self.fail("ANN: the number of neurons must be at least 1, found 0")
        return Header(
            tag,
            version,
            elements,
            temperature,
            zbl,
            inner,
            outer,
            factor,
            radial,
            angular,
            mn_radial,
            mn_angular,
            n_max_radial,
            n_max_angular,
            basis_radial,
            basis_angular,
            l_max,
            switches,
            (neurons, neurons2) if neurons2 else (neurons,),
        )

    def next_tokens(self, wanted: str) -> list[str]:
        self.line += 1
        if self.line > len(self.lines):
            raise ModelFileError(
                self.path, None, f"the file ends after line {self.line - 1}; expected the {wanted} line next"
            )
        tokens = self.lines[self.line - 1].split()
        if not tokens:
            raise self.fail(f"blank line; expected the {wanted} line (blank lines are not allowed inside the file)")
        return tokens

    def keyword(self, wanted: str, why: str = "") -> list[str]:
        """Values of the next line, which must start with the keyword."""
        found, *values = self.next_tokens(wanted)
        if found != wanted:
            raise self.fail(f"expected keyword {wanted!r}, found {quoted(found)}{why}")
        return values

    def floats(self, keyword: str, tokens: list[str]) -> list[float]:
        values = []
        for token in tokens:
            value = parse_float(token)
            if value is None:
                raise self.fail(f"{keyword}: {quoted(token)} is not a finite number")
            values.append(value)
        return values

    def integers(self, keyword: str, tokens: list[str]) -> list[int]:
        values = []
        for token in tokens:
            if not _INT.fullmatch(token):
                raise self.fail(f"{keyword}: {quoted(token)} is not an integer")
            value = int(token)
            if value < 0:
                raise self.fail(f"{keyword}: {value} is negative")
            values.append(value)
        return values

    def read_tag(self) -> tuple[str, int, bool, bool, tuple[str, ...]]:
        tag, *tokens = self.next_tokens("tag")
        version, has_zbl, temperature = self.parse_tag(tag)
        if not tokens:
            raise self.fail(f"expected '{tag} <number of types> <symbols>', found the tag alone")
        (n_types,) = self.integers("number of types", tokens[:1])
        elements = tuple(tokens[1:])
        if n_types < 1 or n_types != len(elements):
            raise self.fail(f"number of types is {n_types}, found {len(elements)} element symbols after it")
        for i, symbol in enumerate(elements):
            if symbol not in NUMBERS:
                known = symbol.capitalize() in NUMBERS
                hint = f"; symbols are case sensitive: {symbol.capitalize()}" if known else " (H to Pu are known)"
                raise self.fail(f"unknown element symbol {quoted(symbol)}{hint}")
            if symbol in elements[:i]:
                raise self.fail(f"element {symbol} appears twice")
        return tag, version, has_zbl, temperature, elements

    def parse_tag(self, tag: str) -> tuple[int, bool, bool]:
        match = _TAG.fullmatch(tag)
        if match is None:
            hint = "; tags are lower case" if _TAG.fullmatch(tag.lower()) else ""
            raise self.fail(f"tag {quoted(tag)} is not that of a NEP model{hint}; supported: {_SUPPORTED}")
        version, parts = int(match[1]), match[2].split("_")[1:]
        has_zbl = parts[:1] == ["zbl"]
        kind = "_".join(parts[1:] if has_zbl else parts)
        if kind in _KINDS:
            raise self.fail(f"tag {tag!r} says {_KINDS[kind]}; supported: {_SUPPORTED}")
        if version not in {3, 4, 5}:
            raise self.fail(
                f"tag {quoted(tag)} says NEP version {version}, which is not known here; supported: {_SUPPORTED}"
            )
        if kind and not (kind == "temperature" and version != 5):
            raise self.fail(f"tag {quoted(tag)} says a kind of model that is not known here; supported: {_SUPPORTED}")
        return version, has_zbl, kind == "temperature"

    def read_zbl(self, tag: str) -> tuple[str, float | None, float | None, float | None]:
        tokens = self.keyword("zbl", f"; the tag {tag} asks for a zbl line")
        values = self.floats("zbl", tokens)
        if len(values) not in {2, 3}:
            raise self.fail(f"zbl: expected 2 numbers (inner, outer) or 3 (and a factor), found {len(values)}")
        inner, outer = values[:2]
        if len(values) == 2 and inner == outer == 0:
            return "flexible", None, None, None
        if inner < 0 or outer <= 0:
            raise self.fail(f"zbl: the cutoffs must be positive, found {inner:g} and {outer:g}")
        if len(values) == 3:
            if values[2] <= 0:
                raise self.fail(f"zbl: the factor must be positive, found {values[2]:g}")
            return "typewise", inner, outer, values[2]
        if inner > outer:
            raise self.fail(f"zbl: the inner cutoff {inner:g} is larger than the outer one {outer:g}")
        return "universal", inner, outer, None

    def read_cutoff(
        self, tag: str, elements: tuple[str, ...]
    ) -> tuple[tuple[float, ...], tuple[float, ...], float | None, float | None]:
        next_is_zbl = self.line < len(self.lines) and self.lines[self.line].split()[:1] == ["zbl"]
        tokens = self.keyword("cutoff", f"; a zbl line needs a tag with _zbl, not {tag}" if next_is_zbl else "")
        values = self.floats("cutoff", tokens)
        T, n = len(elements), len(values)
        # Two types: four numbers are a common pair and MN, as everywhere else.
        per_type = n not in {2, 4}
        if n not in {2, 4, 2 * T, 2 * T + 2}:
            allowed = "2 (radial, angular), 4 (and the neighbour limits MN)"
            if T > 1:
                allowed += f", {2 * T + 2} (a pair of cutoffs for each of the {T} types, and MN)"
            if T > 2:
                allowed += f", {2 * T} (that without MN)"
            old = "; factors for typewise cutoffs, of an older GPUMD, are not supported" if n >= 5 and n % 2 else ""
            raise self.fail(f"cutoff: found {n} numbers, expected {allowed}{old}")
        mn_radial, mn_angular = values[-2:] if n in {4, 2 * T + 2} else (None, None)
        radial = tuple(values[0 : 2 * T : 2]) if per_type else (values[0],) * T
        angular = tuple(values[1 : 2 * T : 2]) if per_type else (values[1],) * T
        for symbol, outer, inner in zip(elements, radial, angular, strict=True):
            whose = f" of {symbol}" if per_type else ""
            if outer <= 0 or inner <= 0:
                raise self.fail(f"cutoff: the cutoffs{whose} must be positive, found {outer:g} and {inner:g}")
            if inner > outer:
                raise self.fail(
                    f"cutoff: the angular cutoff{whose}, {inner:g}, is larger than the radial one, {outer:g}"
                )
        if mn_radial is not None and mn_angular is not None and min(mn_radial, mn_angular) < 0:
            raise self.fail(f"cutoff: the neighbour limits are negative: {mn_radial:g} {mn_angular:g}")
        return radial, angular, mn_radial, mn_angular

    def read_sizes(self, keyword: str, what: str) -> tuple[int, int]:
        values = self.integers(keyword, self.keyword(keyword))
        if len(values) != 2:
            raise self.fail(f"{keyword}: expected 2 integers ({what}), found {len(values)}")
        return values[0], values[1]

    def read_l_max(self) -> tuple[int, tuple[bool, ...]]:
        values = self.integers("l_max", self.keyword("l_max"))
        if not 1 <= len(values) <= 1 + len(SWITCHES):
            names = " ".join(SWITCHES)
            raise self.fail(
                f"l_max: expected L and up to {len(SWITCHES)} switches ({names}), found {len(values)} numbers"
            )
        if not 1 <= values[0] <= MAX_L:
            raise self.fail(f"l_max: L must be 1 to {MAX_L}, found {values[0]}")
        on = [v != 0 for v in values[1:]]
        return values[0], tuple(on + [False] * (len(SWITCHES) - len(on)))


def format_header(header: Header) -> list[str]:
    """Header lines as GPUMD writes them.

    Raises:
        ValueError: two types with different cutoffs and no MN, which the format cannot tell from common cutoffs.
    """
    T = len(header.elements)
    lines = [f"{header.tag} {T} {' '.join(header.elements)} "]
    if header.zbl == "flexible":
        lines.append("zbl 0 0")
    elif header.zbl != "none":
        numbers = (header.zbl_inner, header.zbl_outer, header.zbl_factor)
        lines.append("zbl " + " ".join(_short(v) for v in numbers if v is not None))
    common = len(set(header.cutoff_radial)) == len(set(header.cutoff_angular)) == 1
    pairs = list(zip(header.cutoff_radial, header.cutoff_angular, strict=True))
    cutoffs = [_short(v) for pair in (pairs[:1] if common else pairs) for v in pair]
    if header.mn_radial is not None and header.mn_angular is not None:
        cutoffs += [_short(header.mn_radial), _short(header.mn_angular)]
    elif T == 2 and not common:
        raise ValueError("cutoffs of two types are written with MN only: without it they would read as common ones")
    lines.append("cutoff " + " ".join(cutoffs))
    lines.append(f"n_max {header.n_max_radial} {header.n_max_angular}")
    lines.append(f"basis_size {header.basis_radial} {header.basis_angular}")
    # GPUMD writes the first switch as 2, the order that it stood for once, and stops after the last one in use.
    last = max([2, *(i + 1 for i, on in enumerate(header.switches) if on)])
    digits = [2 * header.switches[0], *map(int, header.switches[1:last])]
    lines.append("l_max " + " ".join(map(str, [header.l_max, *digits])))
    second = header.hidden[1] if len(header.hidden) > 1 else 0
    lines.append(f"ANN {header.hidden[0]} {second}")
    return lines


def _short(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))
