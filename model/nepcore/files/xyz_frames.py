"""Frames of an extended-XYZ file, packed: structures, labels, and what is needed to write the frames again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nepcore.errors import InputFileError
from nepcore.structures import Structures, ragged_arange

from .xyz_atoms import AtomColumns, convert, locate
from .xyz_comment import Fault, Header, header, number, numbers, readable_items, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from .xyz_comment import Layout

MISSING = -1e6
"""What GPUMD writes where a reference is missing; never taken for a label."""

MAX_DISAGREEMENT = 1e-3
"""Largest difference between ``virial`` and −V ``stress`` of one frame, eV/atom, that is not reported."""

MAX_WARNINGS = 1000
"""Warnings kept in one :class:`Frames`."""

GPA = 160.2177
"""One eV/Å³ in GPa, to the digits that GPUMD uses."""


class RawFrame(NamedTuple):
    """A frame as it stands in the file: its number (from 0), the line of its count (from 1), and its lines."""

    frame: int
    line: int
    comment: str
    atoms: list[bytes]


@dataclass(frozen=True, eq=False)
class Frames:
    """B frames of a file, packed.

    Attributes:
        structures: The structures, with their temperatures.
        energy: eV, (B,), NaN where there is no label.
        forces: eV/Å, (N, 3), NaN where there is no label.
        virial: W = −∂E/∂ε, eV, (B, 3, 3), NaN where there is no label.
        weight: (B,), 1 where not given.
        energy_weight: (B,), 1 where not given.
        config_type: One an entry, empty where not given.
        comments: The comment lines as they stand in the file.
        extras: Columns that nobody reads, (n, k) bytes an entry, in the order of the comment's ``Properties``; None
            where a frame has no such columns.
        indices: Number of each frame in its file, from 0, (B,).
        lines: Line of each frame's atom count, from 1, (B,).
        announced: Atoms that the frame announced, (B,); more than ``structures.counts`` for frames in ``errors``.
        errors: Frames that could not be read, by index in this block; each stands as a structure of no atoms.
        warnings: Labels that were not used, and why, naming the frame.
        path: The file.
    """

    structures: Structures
    energy: NDArray[np.float64]
    forces: NDArray[np.float64]
    virial: NDArray[np.float64]
    weight: NDArray[np.float64]
    energy_weight: NDArray[np.float64]
    config_type: tuple[str, ...]
    comments: tuple[str, ...]
    extras: tuple[NDArray[Any] | None, ...]
    indices: NDArray[np.int64]
    lines: NDArray[np.int64]
    announced: NDArray[np.int64]
    errors: dict[int, InputFileError] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    path: str = "<request>"

    def __len__(self) -> int:
        return len(self.energy)

    def label_counts(self) -> dict[str, int]:
        """How many labels there are: ``energies``, ``forces`` (vectors) and ``virials``."""
        return {
            "energies": int(np.isfinite(self.energy).sum()),
            "forces": int(np.isfinite(self.forces).all(axis=1).sum()),
            "virials": int(np.isfinite(self.virial).all(axis=(1, 2)).sum()),
        }

    def select(self, indices: ArrayLike) -> Frames:
        """The frames at ``indices``, in that order; warnings stay."""
        chosen = np.asarray(indices, dtype=np.int64)
        atoms = ragged_arange(self.structures.offsets[chosen], self.structures.counts[chosen])
        return replace(
            self,
            structures=self.structures.select(chosen),
            energy=self.energy[chosen],
            forces=self.forces[atoms],
            virial=self.virial[chosen],
            weight=self.weight[chosen],
            energy_weight=self.energy_weight[chosen],
            config_type=tuple([self.config_type[i] for i in chosen]),
            comments=tuple([self.comments[i] for i in chosen]),
            extras=tuple([self.extras[i] for i in chosen]),
            indices=self.indices[chosen],
            lines=self.lines[chosen],
            announced=self.announced[chosen],
            errors={k: self.errors[i] for k, i in enumerate(chosen.tolist()) if i in self.errors},
        )

    @classmethod
    def concatenate(cls, blocks: Sequence[Frames]) -> Frames:
        """Join blocks of one file end to end."""
        if not blocks:
            return build("<request>", [])
        if len(blocks) == 1:
            return blocks[0]
        starts = np.cumsum([0, *[len(b) for b in blocks]])
        return cls(
            Structures.concatenate([b.structures for b in blocks]),
            np.concatenate([b.energy for b in blocks]),
            np.concatenate([b.forces for b in blocks]),
            np.concatenate([b.virial for b in blocks]),
            np.concatenate([b.weight for b in blocks]),
            np.concatenate([b.energy_weight for b in blocks]),
            tuple([c for b in blocks for c in b.config_type]),
            tuple([c for b in blocks for c in b.comments]),
            tuple([e for b in blocks for e in b.extras]),
            np.concatenate([b.indices for b in blocks]),
            np.concatenate([b.lines for b in blocks]),
            np.concatenate([b.announced for b in blocks]),
            {int(s) + i: e for s, b in zip(starts, blocks, strict=False) for i, e in b.errors.items()},
            [w for b in blocks for w in b.warnings][:MAX_WARNINGS],
            blocks[0].path,
        )

    def column(self, name: str, width: int) -> NDArray[np.float64]:
        """A column that nobody reads, as numbers, (N, width); NaN for frames that do not have it.

        Args:
            name: The column's name, in any letter case: ``energies``, ``bec`` …
            width: Numbers an atom that are wanted.

        Raises:
            InputFileError: Another width, or a token that is not a finite number.
        """
        out = np.full((self.structures.n_atoms, width), np.nan)
        for i, tokens in enumerate(self.extras):
            if tokens is None:
                continue
            at = 0
            for column in header(self.comments[i]).layout.extras:
                if column.name.lower() == name.lower():
                    out[self.structures.offsets[i] : self.structures.offsets[i + 1]] = self._column(
                        i, column.name, column.count, tokens[:, at : at + column.count], width
                    )
                at += column.count
        return out

    def _column(self, i: int, name: str, count: int, tokens: NDArray[Any], width: int) -> NDArray[np.float64]:
        frame, first = int(self.indices[i]), int(self.lines[i]) + 2
        if count != width:
            reason = f"key properties: column {shown(name)} has {count} numbers, wanted {width}"
            raise InputFileError(self.path, frame, first - 1, reason)
        out = np.empty((len(tokens), width))
        k = 0
        try:
            for k, row in enumerate(tokens.tolist()):
                out[k] = [number(token.decode("latin-1")) for token in row]
        except Fault as fault:
            raise InputFileError(self.path, frame, first + k, f"atom {k + 1}, {name}: {fault}") from None
        return out

    def key_numbers(self, key: str, count: int) -> NDArray[np.float64]:
        """A comment item that nobody reads, as numbers, (B, count); NaN for frames that do not have it.

        Raises:
            InputFileError: Another count, or a token that is not a finite number.
        """
        out = np.full((len(self), count), np.nan)
        for i, comment in enumerate(self.comments):
            for item in readable_items(comment) if i not in self.errors else ():
                if item.key.lower() == key.lower():
                    try:
                        out[i] = numbers(key, item.value, count)
                    except Fault as fault:
                        frame, line = int(self.indices[i]), int(self.lines[i]) + 1
                        raise InputFileError(self.path, frame, line, str(fault)) from None
        return out


def build(path: str, raws: Sequence[RawFrame]) -> Frames:
    """Convert frames; those that cannot be read are in ``errors`` and stand as structures of no atoms."""
    headers = [_header(path, raw) for raw in raws]
    errors = {k: found for k, found in enumerate(headers) if isinstance(found, InputFileError)}
    pieces, extras = _convert(path, raws, headers, errors)
    known = [h if k not in errors and isinstance(h, Header) else None for k, h in enumerate(headers)]
    structures = Structures(
        np.array([0 if h is None else len(raw.atoms) for raw, h in zip(raws, known, strict=True)], np.int64),
        np.concatenate([np.zeros(0, np.uint8), *[p.numbers for p in pieces]]),
        np.concatenate([np.zeros((0, 3)), *[p.positions for p in pieces]]),
        np.array([(0.0,) * 9 if h is None else h.cell for h in known]).reshape(-1, 3, 3),
        np.array([(False,) * 3 if h is None else h.pbc for h in known], bool).reshape(-1, 3),
        np.array([np.nan if h is None else h.temperature for h in known], np.float64),
    )
    energy = np.array([np.nan if h is None else h.energy for h in known], np.float64)
    forces = np.concatenate(
        [np.zeros((0, 3)), *[np.full_like(p.positions, np.nan) if p.forces is None else p.forces for p in pieces]]
    )
    warnings = _Warnings(path, raws)
    _drop_placeholders(energy, forces, structures, warnings)
    return Frames(
        structures,
        energy,
        forces,
        _virials(known, structures, warnings),
        np.array([1.0 if h is None else h.weight for h in known], np.float64),
        np.array([1.0 if h is None else h.energy_weight for h in known], np.float64),
        tuple(["" if h is None else h.config_type for h in known]),
        tuple([raw.comment for raw in raws]),
        tuple(extras),
        np.array([raw.frame for raw in raws], np.int64),
        np.array([raw.line for raw in raws], np.int64),
        np.array([len(raw.atoms) for raw in raws], np.int64),
        dict(sorted(errors.items())),
        warnings.texts,
        path,
    )


def _convert(
    path: str, raws: Sequence[RawFrame], headers: Sequence[object], errors: dict[int, InputFileError]
) -> tuple[list[AtomColumns], list[NDArray[Any] | None]]:
    """Atom lines of all frames that have a header, frames of one layout together."""
    pieces: list[AtomColumns] = []
    extras: list[NDArray[Any] | None] = [None] * len(raws)

    def note(piece: AtomColumns, members: Sequence[int]) -> None:
        pieces.append(piece)
        at = 0
        for k in members if piece.extras is not None else ():
            assert piece.extras is not None
            extras[k] = piece.extras[at : at + len(raws[k].atoms)]
            at += len(raws[k].atoms)

    for columns, group in groupby(range(len(raws)), key=lambda k: getattr(headers[k], "layout", None)):
        if columns is None:
            continue
        members = list(group)
        try:
            note(convert(list(chain.from_iterable([raws[k].atoms for k in members])), columns), members)
        except ValueError:
            # One frame at a time: the others of the group are fine.
            for k in members:
                piece = _converted(path, raws[k], columns)
                if isinstance(piece, InputFileError):
                    errors[k] = piece
                else:
                    note(piece, [k])
    return pieces, extras


def _header(path: str, raw: RawFrame) -> Header | InputFileError:
    try:
        return header(raw.comment)
    except Fault as fault:
        return InputFileError(path, raw.frame, raw.line + 1, str(fault))


def _converted(path: str, raw: RawFrame, columns: Layout) -> AtomColumns | InputFileError:
    try:
        return convert(raw.atoms, columns)
    except ValueError:
        row, reason = locate(raw.atoms, columns)
        return InputFileError(path, raw.frame, raw.line + 2 + row, reason)


class _Warnings:
    """Texts that name their frame, not more than :data:`MAX_WARNINGS`."""

    def __init__(self, path: str, raws: Sequence[RawFrame]) -> None:
        self.texts: list[str] = []
        self._path = path
        self._raws = raws

    def add(self, k: int, reason: str) -> None:
        if len(self.texts) < MAX_WARNINGS:
            raw = self._raws[k]
            self.texts.append(f"{self._path}, frame {raw.frame + 1}, line {raw.line + 1}: {reason}")


def _drop_placeholders(
    energy: NDArray[np.float64], forces: NDArray[np.float64], structures: Structures, warnings: _Warnings
) -> None:
    for k in np.flatnonzero(energy == MISSING).tolist():
        energy[k] = np.nan
        warnings.add(k, f"energy is {MISSING:g}, which marks a missing value; the label is not used")
    marked = np.flatnonzero((forces == MISSING).any(axis=1))
    for k in np.unique(np.searchsorted(structures.offsets, marked, side="right") - 1).tolist():
        forces[structures.offsets[k] : structures.offsets[k + 1]] = np.nan
        warnings.add(k, f"forces hold {MISSING:g}, which marks a missing value; the frame's forces are not used")


def _virials(headers: Sequence[Header | None], structures: Structures, warnings: _Warnings) -> NDArray[np.float64]:
    """W of each frame, (B, 3, 3): ``virial`` where it is given, else −V ``stress``."""
    unknown = (np.nan,) * 9
    B = len(headers)
    virial = np.array([unknown if h is None else h.virial or unknown for h in headers]).reshape(B, 3, 3)
    stress = np.array([unknown if h is None else h.stress or unknown for h in headers]).reshape(B, 3, 3)
    for name, label in (("virial", virial), ("stress", stress)):
        for k in np.flatnonzero((label == MISSING).any(axis=(1, 2))).tolist():
            label[k] = np.nan
            warnings.add(k, f"{name} holds {MISSING:g}, which marks a missing value; the label is not used")
    with np.errstate(over="ignore", invalid="ignore"):
        volumes = structures.volumes
        converted = -volumes[:, None, None] * stress
        both = np.abs(virial - converted).max(axis=(1, 2), initial=0.0)
    usable = np.isfinite(converted).all(axis=(1, 2)) & (volumes > 0)
    for k in np.flatnonzero(np.isfinite(stress).all(axis=(1, 2)) & ~usable).tolist():
        warnings.add(k, "stress needs a cell with a volume; the label is not used")
    converted[~usable] = np.nan
    atoms = np.maximum(structures.counts, 1)
    for k in np.flatnonzero(usable & (both > MAX_DISAGREEMENT * atoms)).tolist():
        warnings.add(
            k, f"virial and -V stress differ by {both[k] / atoms[k]:.3g} eV/atom; the virial is used"
            f"{_likely(virial[k], converted[k], MAX_DISAGREEMENT * float(atoms[k]))}",
        )  # fmt: skip
    return np.where(np.isnan(virial), converted, virial)


def _likely(virial: NDArray[np.float64], converted: NDArray[np.float64], margin: float) -> str:
    """What would explain a stress that disagrees, for the reader of the message; nothing is converted by it."""
    explanations = (
        (-1.0, "with its sign turned round"), (1 / GPA, "in GPa"), (-1 / GPA, "in GPa with its sign turned round"),
    )  # fmt: skip
    for factor, text in explanations:
        if np.abs(virial - factor * converted).max() <= margin:
            return f" (the stress looks like one {text}; wanted eV/Å³, tension positive)"
    return ""
