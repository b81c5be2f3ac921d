"""``nep.in``, the input of a training run: GPUMD's keywords, and those of training by gradients.

One keyword a line, its values after it; a word that begins with ``#`` ends the line. The order is free, but ``type``
stands before ``type_weight`` and before a ``cutoff`` that has values for each type. An unknown keyword is an error that
names the nearest one. A keyword that is given again counts as it was given last, as in GPUMD, and is reported.

Keywords of the evolution strategy are read and reported once: a run by gradients has no use for them, but the length
that ``generation`` asks for is kept in proportion (see :func:`epochs_of`).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nepcore.elements import NUMBERS
from nepcore.errors import InputFileError

from .nep_header import parse_float, quoted
from .nep_keywords import ALIASES, KEYWORDS, MAX_ANGULAR, STAGED, Keyword, Value
from .nep_layout import LEAST_L, SWITCHES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

MAX_BYTES = 1 << 20
"""Largest file read; longer ones are no ``nep.in``."""

FULL_GENERATIONS = 100_000
"""GPUMD's default of ``generation``, the length of a run by evolution ..."""

FULL_EPOCHS = 600
"""... and the epochs that it stands for: the default of a run by gradients."""

Scalar = int | float | str

_REFUSED = {
    "model_type": {1: "dipoles (TNEP)", 2: "polarizabilities (TNEP)"},
    "charge_mode": dict.fromkeys((1, 2, 3), "charges (qNEP)"),
    "vdw": {1: "dispersion"},
    "charge_vdw": {1: "charges and dispersion"},
    "atomic_v": {1: "atomic dipoles and polarizabilities"},
}
_HARMLESS = frozenset({"lambda_q", "lambda_z", "output_descriptor"})


@dataclass(frozen=True)
class Entry:
    """A keyword as it was given: its values, and its line, from 1 (0 if it did not come from a file)."""

    values: tuple[Scalar, ...]
    line: int = 0


@dataclass(frozen=True, eq=False)
class NepIn:
    """What a ``nep.in`` says.

    Attributes:
        entries: Keywords that were given, by name, in their order; see :data:`~nepcore.files.nep_keywords.KEYWORDS`.
        path: The file.
        text: Its text.
        warnings: What was read and has no effect, or not the one that might be expected; each names file and line.
    """

    entries: Mapping[str, Entry]
    path: str = "nep.in"
    text: str = ""
    warnings: tuple[str, ...] = field(default=())

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def values(self, name: str) -> tuple[Scalar, ...] | None:
        """Values of a keyword; None if it was not given."""
        entry = self.entries.get(name)
        return None if entry is None else entry.values

    def number(self, name: str, default: float | None = None) -> float | None:
        """The first value of a keyword as a number; ``default`` if it was not given."""
        found = self.values(name)
        return default if found is None else float(found[0])

    def integer(self, name: str, default: int | None = None) -> int | None:
        """The first value of a keyword as a whole number; ``default`` if it was not given."""
        found = self.values(name)
        return default if found is None else int(found[0])

    def word(self, name: str, default: str | None = None) -> str | None:
        """The first value of a keyword as a word; ``default`` if it was not given."""
        found = self.values(name)
        return default if found is None else str(found[0])

    @property
    def elements(self) -> tuple[str, ...]:
        """Symbols of the types, in the order of the model."""
        return tuple(map(str, self.entries["type"].values[1:]))

    @property
    def cutoffs(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Radial and angular cutoff of each type, Å, (T,) both."""
        T = len(self.elements)
        values = np.array(self.values("cutoff") or (8.0, 4.0), np.float64).reshape(-1, 2)
        pairs = np.broadcast_to(values, (T, 2)) if len(values) == 1 else values
        return pairs[:, 0].copy(), pairs[:, 1].copy()

    @property
    def l_max(self) -> tuple[int, dict[str, bool]]:
        """Largest l of the three-body terms, and which of the higher invariants are on."""
        return _l_max(self.values("l_max") or (4, 1))

    @property
    def hidden(self) -> tuple[int, ...]:
        """Neurons of the one or two hidden layers."""
        return tuple(int(n) for n in self.values("neuron") or (30,) if n)

    @property
    def gradient(self) -> bool:
        """Whether it says anything of training by gradients; GPUMD's own files do not."""
        return any(KEYWORDS[name].group == "gradient" for name in self.entries)

    def error(self, name: str, reason: str) -> InputFileError:
        """An error about a keyword, naming file and line."""
        entry = self.entries.get(name)
        return InputFileError(self.path, None, entry.line if entry is not None and entry.line else None, reason)


def epochs_of(generations: int) -> int:
    """Epochs that a number of generations stands for, in proportion; one at least."""
    return max(1, round(FULL_EPOCHS * generations / FULL_GENERATIONS))


def read(path: str | Path) -> NepIn:
    """Read a file; see :func:`loads`."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputFileError(path, None, None, error.strerror or str(error)) from error
    if len(data) > MAX_BYTES:
        raise InputFileError(path, None, None, f"larger than {MAX_BYTES:,} bytes; this is no nep.in")
    return loads(data.decode("utf-8-sig", "replace"), str(path))


def loads(text: str, path: str = "nep.in") -> NepIn:
    """Read the text of a file.

    Raises:
        InputFileError: Naming file, line, keyword, what was found and what was wanted.
    """
    entries: dict[str, Entry] = {}
    repeated: list[str] = []
    for row, line in enumerate(text.splitlines(), start=1):
        tokens = _tokens(line)
        if not tokens:
            continue
        name = tokens[0]
        try:
            name, values = _entry(name, tokens[1:], entries)
        except _Wrong as wrong:
            raise InputFileError(path, None, row, str(wrong)) from None
        if name in entries:
            repeated.append(
                f"{path}, line {row}: {name} was given already on line {entries[name].line}; the later one counts"
            )
            del entries[name]
        entries[name] = Entry(values, row)
    if "type" not in entries:
        raise InputFileError(path, None, None, "no keyword type, which names the elements: type 2 Pb Te")
    found = NepIn(entries, path, text)
    _check(found)
    return NepIn(entries, path, text, (*repeated, *_warnings(found)))


def make(entries: Mapping[str, Sequence[Scalar] | Scalar], path: str = "nep.in") -> NepIn:
    """What a file with these keywords would say; values are checked as those of a file."""
    return loads("\n".join(_line(name, values) for name, values in entries.items()), path)


def dumps(nep_in: NepIn, *, comments: bool = False) -> str:
    """The keywords as a file, ``type`` first; with ``comments`` each line says what it means."""
    names = sorted(nep_in.entries, key=lambda name: name != "type")
    lines = [_line(name, nep_in.entries[name].values) for name in names]
    if comments:
        width = max((len(line) for line in lines), default=0)
        lines = [f"{line:<{width}}  # {KEYWORDS[name].meaning}" for name, line in zip(names, lines, strict=True)]
    return "\n".join(lines) + "\n"


def write(nep_in: NepIn, path: str | Path) -> None:
    """Write the keywords to a file that :func:`read` reads back."""
    Path(path).write_text(dumps(nep_in), encoding="utf-8")


def read_zbl(path: str | Path, n_types: int) -> NDArray[np.float64]:
    """Read ``zbl.in``: the flexible ZBL.

    Returns:
        Inner and outer cutoff (Å) and a1 … a8 of the pairs 1-1, 1-2, …, n-n, (T(T+1)/2, 10).

    Raises:
        InputFileError: Naming the line and the token, or how many numbers there are and how many were wanted.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputFileError(path, None, None, error.strerror or str(error)) from error
    values: list[float] = []
    for row, line in enumerate(text.splitlines(), start=1):
        for token in _tokens(line):
            value = parse_float(token)
            if value is None:
                raise InputFileError(path, None, row, f"{quoted(token)} is not a finite number")
            values.append(value)
    pairs = n_types * (n_types + 1) // 2
    if len(values) != 10 * pairs:
        wanted = f"{10 * pairs}: 10 for each of the {pairs} pairs of {n_types} types"
        raise InputFileError(path, None, None, f"{len(values)} numbers, wanted {wanted}")
    table = np.array(values).reshape(pairs, 10)
    bad = np.flatnonzero((table[:, 0] < 0) | (table[:, 1] <= table[:, 0]))
    if len(bad):
        inner, outer = table[bad[0], :2]
        reason = (
            f"pair {int(bad[0]) + 1}: the outer cutoff {outer:g} must be above the inner one {inner:g}, not negative"
        )
        raise InputFileError(path, None, None, reason)
    return table


class _Wrong(ValueError):  # noqa: N818 - it never leaves the reader
    """What is wrong in a line; who knows file and line adds them."""


def _tokens(line: str) -> list[str]:
    tokens = line.split()
    end = next((i for i, token in enumerate(tokens) if token.startswith("#")), len(tokens))
    return tokens[:end]


def _entry(given: str, tokens: list[str], before: Mapping[str, Entry]) -> tuple[str, tuple[Scalar, ...]]:
    """The keyword and the values of a line."""
    if given == "learning_rate" and len(tokens) == 2:
        raise _Wrong(f"unknown keyword 'learning_rate'; wanted two lines: lr {tokens[0]} and stop_lr {tokens[1]}")
    name = ALIASES.get(given, given)
    if name == "use_gpumd_qscaler":
        (flag,) = _plain(_FLAG, tokens)
        return "q_scaler", ("gpumd" if flag else "self",)
    keyword = KEYWORDS.get(name)
    if keyword is None:
        known = [*KEYWORDS, *ALIASES, "use_gpumd_qscaler"]
        near = difflib.get_close_matches(given.lower(), known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise _Wrong(f"unknown keyword {quoted(given)}{hint}")
    if name == "type":
        return name, _types(tokens)
    if name == "cutoff":
        return name, _cutoff(keyword, tokens, before)
    if name == "type_weight":
        return name, _type_weight(keyword, tokens, before)
    return name, _plain(keyword, tokens)


_FLAG = Keyword("use_gpumd_qscaler", "model", "", (Value("flag", "int", 0, 1),), 1)


def _plain(keyword: Keyword, tokens: list[str]) -> tuple[Scalar, ...]:
    least, most = keyword.least, len(keyword.values)
    if not least <= len(tokens) <= most:
        wanted = f"{most}" if least == most else f"{least} to {most}"
        names = " ".join(value.name for value in keyword.values)
        raise _Wrong(f"{keyword.name}: found {len(tokens)} values, wanted {wanted} ({names})")
    return tuple(_value(keyword.name, value, token) for value, token in zip(keyword.values, tokens, strict=False))


def _value(name: str, value: Value, token: str) -> Scalar:
    if value.kind == "path":
        return token
    if value.kind == "word":
        if token.lower() not in value.choices:
            near = difflib.get_close_matches(token.lower(), value.choices, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise _Wrong(f"{name}: {value.name} is {quoted(token)}, wanted {value.wanted()}{hint}")
        return token.lower()
    number = parse_float(token)
    good = number is not None and value.low <= number <= value.high and not (value.above and number == value.low)
    if number is None or not good or (value.kind == "int" and number != int(number)):
        raise _Wrong(f"{name}: {value.name} is {quoted(token)}, wanted {value.wanted()}")
    return int(number) if value.kind == "int" else number


def _types(tokens: list[str]) -> tuple[Scalar, ...]:
    if not tokens or not (tokens[0].isascii() and tokens[0].isdigit() and len(tokens[0]) < 10):
        found = quoted(tokens[0]) if tokens else "nothing"
        raise _Wrong(f"type: found {found}, wanted the number of types and their symbols: type 2 Pb Te")
    count, symbols = int(tokens[0]), tokens[1:]
    if count != len(symbols) or not count:
        raise _Wrong(f"type: {count} types announced, {len(symbols)} symbols found; wanted as many, and one at least")
    for i, symbol in enumerate(symbols):
        if symbol not in NUMBERS:
            hint = f"; symbols are case sensitive: {symbol.capitalize()}" if symbol.capitalize() in NUMBERS else ""
            raise _Wrong(f"type: {quoted(symbol)} is not a chemical symbol from H to Pu{hint}")
        if symbol in symbols[:i]:
            raise _Wrong(f"type: {symbol} stands twice")
    return (count, *symbols)


def _cutoff(keyword: Keyword, tokens: list[str], before: Mapping[str, Entry]) -> tuple[Scalar, ...]:
    T = len(before["type"].values) - 1 if "type" in before else None
    if len(tokens) != 2 and T is None:
        raise _Wrong(f"cutoff: {len(tokens)} values before the keyword type; give type first, or two values")
    if len(tokens) not in {2, 2 * (T or 1)}:
        each = f", or {2 * T} (a pair for each of {T} types)" if T is not None and T > 1 else ""
        raise _Wrong(f"cutoff: found {len(tokens)} values, wanted 2 (radial angular){each}")
    values = [_value("cutoff", keyword.values[i % 2], token) for i, token in enumerate(tokens)]
    for radial, angular in zip(values[::2], values[1::2], strict=True):
        if float(angular) > float(radial):
            raise _Wrong(f"cutoff: the angular cutoff {angular:g} is larger than the radial one {radial:g}")
    return tuple(values)


def _type_weight(keyword: Keyword, tokens: list[str], before: Mapping[str, Entry]) -> tuple[Scalar, ...]:
    if "type" not in before:
        raise _Wrong("type_weight stands before type; give type first")
    T = len(before["type"].values) - 1
    if len(tokens) != T:
        raise _Wrong(f"type_weight: found {len(tokens)} values, wanted {T}, one for each type")
    return tuple(_value("type_weight", keyword.values[0], token) for token in tokens)


def _l_max(values: Sequence[Scalar]) -> tuple[int, dict[str, bool]]:
    # GPUMD has q222 on where its flag is left out.
    flags = [bool(v) for v in values[1:]] or [int(values[0]) > 1]
    flags += [False] * (len(SWITCHES) - len(flags))
    return int(values[0]), dict(zip(SWITCHES, flags, strict=True))


def _check(found: NepIn) -> None:
    """What only several keywords together can have wrong, and what is not trained here."""
    for name, meanings in _REFUSED.items():
        kind = found.integer(name) or 0
        if kind in meanings:
            raise found.error(name, f"{name} {kind}: {meanings[kind]} cannot be trained here; planned")
    if found.integer("version", 4) == 3:
        raise found.error("version", "version 3: only versions 4 and 5 are trained")
    if found.integer("import_q_scaler", 0):
        raise found.error("import_q_scaler", "import_q_scaler 1 is not done here: fine-tune from that nep.txt instead")
    if found.integer("prediction", 0):
        raise found.error("prediction", "prediction 1: to evaluate a model, use nepserve predict --gpumd-out")
    l_max, switches = found.l_max
    for name, on in switches.items():
        if on and LEAST_L[name] > l_max:
            raise found.error("l_max", f"l_max: {name} needs l_max {LEAST_L[name]} at least, found {l_max}")
    functions = int((found.values("n_max") or (6, 6))[1]) + 1
    angular = functions * (l_max + sum(switches.values()))
    if angular > MAX_ANGULAR:
        reason = (
            f"{angular} angular descriptor components ({functions} functions, {l_max + sum(switches.values())} kinds)"
        )
        raise found.error(
            "l_max" if "l_max" in found else "n_max", f"{reason}, wanted {MAX_ANGULAR} at most, as GPUMD can evaluate"
        )
    if "use_typewise_cutoff_zbl" in found and "zbl" not in found:
        raise found.error("use_typewise_cutoff_zbl", "use_typewise_cutoff_zbl needs the keyword zbl")


def _warnings(found: NepIn) -> list[str]:
    lines = []
    useless = [name for name in found.entries if KEYWORDS[name].group == "evolution" and name != "generation"]
    if useless or "generation" in found:
        lines.append(_evolution(found, useless))
    harmless = [name for name in found.entries if name in _HARMLESS]
    if harmless:
        where = ", ".join(f"{name} (line {found.entries[name].line})" for name in harmless)
        lines.append(f"{found.path}: without effect on this kind of model: {where}")
    if len(found.values("batch") or ()) == 2 and (found.values("batch") or ())[1]:
        line = found.entries["batch"].line
        lines.append(f"{found.path}, line {line}: batch: the flag of full batches has no effect; every step is a batch")
    if len(found.values("fine_tune") or ()) > 1:
        line = found.entries["fine_tune"].line
        lines.append(f"{found.path}, line {line}: fine_tune: only the model is used, the other files are not needed")
    return lines


def _evolution(found: NepIn, useless: list[str]) -> str:
    """One warning for all keywords of the evolution strategy."""
    names = [name for name in found.entries if name in useless or name == "generation"]
    where = ", ".join(f"{name} (line {found.entries[name].line})" for name in names)
    text = f"{found.path}: keywords of the evolution strategy, which training by gradients does not use: {where}"
    if "generation" in found and "epoch" in found:
        text += "; the length of the run is that of epoch"
    elif "generation" in found:
        generations = found.integer("generation") or 0
        text += (
            f"; generation {generations} is taken in proportion ({FULL_GENERATIONS} for {FULL_EPOCHS} epochs): "
            f"{epochs_of(generations)} epochs; epoch would say it directly"
        )
    return text


def _line(name: str, values: Sequence[Scalar] | Scalar) -> str:
    items = (values,) if isinstance(values, (str, int, float)) else tuple(values)
    return " ".join([name, *(item if isinstance(item, str) else f"{item:.15g}" for item in items)])


__all__ = [
    "FULL_EPOCHS",
    "FULL_GENERATIONS",
    "STAGED",
    "Entry",
    "NepIn",
    "dumps",
    "epochs_of",
    "loads",
    "make",
    "read",
    "read_zbl",
    "write",
]
