"""Packed structures and predictions: plain numpy, from the socket to the device and back.

A block holds B structures end to end: arrays over structures have B rows, arrays over atoms have N rows, N being the
sum of ``counts``. Nothing on the way of a request makes one object per structure; :class:`Structure` and
:class:`Prediction` are views for people.

Units: Å, eV, eV/Å, eV/Å³, K. Cell vectors are rows. Stress is σ = (1/V) ∂E/∂ε, tension positive, in Voigt order
xx yy zz yz xz xy. Virials are W = −∂E/∂ε; the virial of atom j collects what its neighbours' energies owe to it
(row r, column gradient).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import isinf
from typing import TYPE_CHECKING, Any

import numpy as np

from . import cells
from .cells import MAX_COORDINATE
from .elements import MAX_NUMBER, NUMBERS, SYMBOLS, symbol_of
from .errors import StructureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ase import Atoms
    from numpy.typing import ArrayLike, NDArray

PER_STRUCTURE: dict[str, tuple[int, ...]] = {"energy": (), "free_energy": (), "stress": (6,), "virial": (3, 3)}
"""Properties with one entry per structure, and the shape of that entry."""

PER_ATOM: dict[str, tuple[int | None, ...]] = {
    "energies": (),
    "forces": (3,),
    "virials": (3, 3),
    "descriptors": (None,),
}
"""Properties with one entry per atom, and the shape of that entry (None: the model's descriptor length)."""

PROPERTIES: tuple[str, ...] = (*PER_STRUCTURE, *PER_ATOM)
DEFAULT_PROPERTIES: tuple[str, ...] = ("energy", "forces", "stress")


@dataclass(frozen=True, eq=False)
class Structure:
    """One structure: a view for people and for tests.

    Attributes:
        numbers: Atomic numbers, (n,) uint8.
        positions: Å, (n, 3) float64.
        cell: Cell vectors as rows, Å, (3, 3) float64; zero rows where there is no vector.
        pbc: Periodic directions, (3,) bool.
        temperature: K, for temperature-dependent models; None if not given.
    """

    numbers: NDArray[np.uint8]
    positions: NDArray[np.float64]
    cell: NDArray[np.float64]
    pbc: NDArray[np.bool_]
    temperature: float | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def symbols(self) -> list[str]:
        """Chemical symbols, one an atom."""
        return [symbol_of(int(z)) for z in self.numbers]

    @property
    def volume(self) -> float:
        """|det(cell)| in Å³; zero where vectors are missing."""
        return float(abs(np.linalg.det(self.cell)))

    @classmethod
    def make(
        cls,
        species: Sequence[str] | ArrayLike,
        positions: ArrayLike,
        cell: ArrayLike | None = None,
        pbc: bool | Sequence[bool] | None = None,
        temperature: float | None = None,
    ) -> Structure:
        """Build one structure from symbols or atomic numbers; see :meth:`Structures.pack` for a block of them.

        Without ``cell`` the structure is a molecule; with ``cell`` and without ``pbc`` all three directions are
        periodic (the rule of extended XYZ).

        Raises:
            StructureError: An unknown symbol or a wrong shape.
        """
        pos = np.asarray(positions, dtype=np.float64)
        if pos.ndim != 2 or pos.shape[1] != 3:
            raise StructureError("bad_shape", f"positions must have shape (n, 3), not {pos.shape}", field="positions")
        numbers = atomic_numbers(species)
        if len(numbers) != len(pos):
            raise StructureError(
                "bad_shape", f"{len(numbers)} species but {len(pos)} positions; wanted one each", field="positions"
            )
        box = np.zeros((3, 3)) if cell is None else np.asarray(cell, dtype=np.float64)
        if box.shape == (3,):
            box = np.diag(box)
        if box.shape != (3, 3):
            raise StructureError("bad_shape", f"cell must have shape (3, 3), not {box.shape}", field="cell")
        if pbc is None:
            periodic = np.full(3, cell is not None)
        else:
            periodic = np.broadcast_to(np.asarray(pbc, dtype=bool), 3).copy()
        return cls(numbers, pos, box, periodic, temperature)

    @classmethod
    def from_ase(cls, atoms: Atoms) -> Structure:
        """Take an ASE ``Atoms``; ``atoms.info["temperature"]`` (K) is the temperature of temperature models."""
        temperature = atoms.info.get("temperature")
        return cls(
            atomic_numbers(atoms.numbers),
            np.asarray(atoms.positions, dtype=np.float64),
            np.asarray(atoms.cell.array, dtype=np.float64),
            np.asarray(atoms.pbc, dtype=bool),
            None if temperature is None else float(temperature),
        )


def atomic_numbers(species: Sequence[str] | ArrayLike) -> NDArray[np.uint8]:
    """Atomic numbers of symbols (exact spelling) or of numbers.

    Raises:
        StructureError: ``bad_value`` naming the atom and what was given.
    """
    if isinstance(species, str):
        raise StructureError("bad_value", f"species must be a list of symbols, not the string {species!r}")
    values = np.asarray(species)
    if values.ndim != 1:
        raise StructureError("bad_shape", f"species must be a flat list, not shape {values.shape}", field="numbers")
    if values.size == 0:
        return np.zeros(0, np.uint8)
    if values.dtype.kind in "US":
        out = np.zeros(len(values), np.uint8)
        for i, symbol in enumerate(values.tolist()):
            number = NUMBERS.get(symbol)
            if number is None:
                raise StructureError(
                    "bad_value", f"atom {i + 1}: {symbol!r} is not a chemical symbol (H to Pu, exact spelling)",
                    field="symbols", atoms=(i,),
                )  # fmt: skip
            out[i] = number
        return out
    if values.dtype.kind not in "iu":
        raise StructureError("bad_value", "species must be symbols or whole numbers", field="numbers")
    bad = np.flatnonzero((values < 1) | (values > MAX_NUMBER))
    if len(bad):
        i = int(bad[0])
        raise StructureError(
            "bad_value", f"atom {i + 1}: {values[i]} is not an atomic number from 1 to {MAX_NUMBER}",
            field="numbers", atoms=(i,),
        )  # fmt: skip
    return values.astype(np.uint8)


@dataclass(frozen=True, eq=False)
class Structures:
    """B structures packed end to end.

    Attributes:
        counts: Atoms per structure, (B,) int64.
        numbers: Atomic numbers, (N,) uint8.
        positions: Å, (N, 3) float64.
        cells: Cell vectors as rows, Å, (B, 3, 3) float64; zero rows where there is no vector.
        pbc: Periodic directions, (B, 3) bool.
        temperatures: K, (B,) float64, NaN where not given.
        keys: (B,) int64, or None for zeros: structures with the same key other than 0 are the same atoms in the same
            periodic directions, moved, of which a backend may keep what it knows. Results do not depend on it.
    """

    counts: NDArray[np.int64]
    numbers: NDArray[np.uint8]
    positions: NDArray[np.float64]
    cells: NDArray[np.float64]
    pbc: NDArray[np.bool_]
    temperatures: NDArray[np.float64]
    keys: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        B, N = len(self.counts), len(self.numbers)
        for name, shape in {
            "counts": (B,), "numbers": (N,), "positions": (N, 3), "cells": (B, 3, 3), "pbc": (B, 3),
            "temperatures": (B,),
        }.items():  # fmt: skip
            found = getattr(self, name).shape
            if found != shape:
                raise StructureError("bad_shape", f"{name} must have shape {shape}, not {found}", field=name)
        if B and int(self.counts.min()) < 0:
            raise StructureError("bad_value", "counts must not be negative", field="counts")
        if int(self.counts.sum()) != N:
            raise StructureError(
                "bad_shape", f"counts announce {int(self.counts.sum())} atoms but {N} came", field="counts"
            )

    @classmethod
    def from_arrays(
        cls,
        counts: ArrayLike,
        numbers: ArrayLike,
        positions: ArrayLike,
        cells: ArrayLike | None = None,
        pbc: ArrayLike | None = None,
        temperatures: ArrayLike | None = None,
    ) -> Structures:
        """Pack arrays, converted to the dtypes of the class; molecules need no ``cells``.

        ``pbc`` left out means periodic in all directions where a cell was given (not all zero), else in none.
        """
        n = np.ascontiguousarray(counts, dtype=np.int64)
        B = len(n)
        box = np.zeros((B, 3, 3)) if cells is None else np.ascontiguousarray(cells, dtype=np.float64)
        if pbc is None:
            periodic = np.repeat((box != 0).any(axis=(1, 2))[:, None], 3, axis=1)
        else:
            periodic = np.ascontiguousarray(pbc).astype(bool, copy=False)
        heat = np.full(B, np.nan) if temperatures is None else np.ascontiguousarray(temperatures, dtype=np.float64)
        return cls(
            n,
            np.ascontiguousarray(numbers, dtype=np.uint8),
            np.ascontiguousarray(positions, dtype=np.float64),
            box,
            periodic,
            heat,
        )

    @classmethod
    def pack(cls, items: Iterable[Structure | Atoms]) -> Structures:
        """Pack single structures (or ASE ``Atoms``) in their order."""
        views = [s if isinstance(s, Structure) else Structure.from_ase(s) for s in items]
        if not views:
            return cls.empty()
        return cls(
            np.array([len(s) for s in views], np.int64),
            np.concatenate([s.numbers for s in views]),
            np.concatenate([s.positions for s in views]),
            np.stack([s.cell for s in views]),
            np.stack([s.pbc for s in views]),
            np.array([np.nan if s.temperature is None else s.temperature for s in views], np.float64),
        )

    @classmethod
    def empty(cls) -> Structures:
        """A block of no structures."""
        return cls.from_arrays(np.zeros(0), np.zeros(0), np.zeros((0, 3)), np.zeros((0, 3, 3)), np.zeros((0, 3), bool))

    @classmethod
    def concatenate(cls, blocks: Sequence[Structures]) -> Structures:
        """Join blocks end to end."""
        if len(blocks) == 1:
            return blocks[0]
        if not blocks:
            return cls.empty()
        return cls(
            np.concatenate([b.counts for b in blocks]),
            np.concatenate([b.numbers for b in blocks]),
            np.concatenate([b.positions for b in blocks]),
            np.concatenate([b.cells for b in blocks]),
            np.concatenate([b.pbc for b in blocks]),
            np.concatenate([b.temperatures for b in blocks]),
            _joined_keys(blocks),
        )

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[Structure]:
        return (self.view(i) for i in range(len(self)))

    @property
    def n_atoms(self) -> int:
        """Atoms in the whole block, N."""
        return len(self.numbers)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """First atom of each structure and, last, N: (B + 1,)."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    def view(self, index: int) -> Structure:
        """Structure number ``index`` (negative counts from the end), without copying."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"structure {index} of {len(self)}")
        i = index % len(self)
        a, b = self.offsets[i], self.offsets[i + 1]
        heat = float(self.temperatures[i])
        return Structure(
            self.numbers[a:b], self.positions[a:b], self.cells[i], self.pbc[i], None if np.isnan(heat) else heat
        )

    def slice(self, start: int, stop: int) -> Structures:
        """Structures ``start`` to ``stop`` − 1 as a block of views."""
        a, b = self.offsets[start], self.offsets[stop]
        return Structures(
            self.counts[start:stop], self.numbers[a:b], self.positions[a:b], self.cells[start:stop],
            self.pbc[start:stop], self.temperatures[start:stop],
            None if self.keys is None else self.keys[start:stop],
        )  # fmt: skip

    def select(self, indices: ArrayLike) -> Structures:
        """The structures at ``indices``, in that order, copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        atoms = ragged_arange(self.offsets[chosen], self.counts[chosen])
        return Structures(
            self.counts[chosen], self.numbers[atoms], self.positions[atoms], self.cells[chosen], self.pbc[chosen],
            self.temperatures[chosen], None if self.keys is None else self.keys[chosen],
        )  # fmt: skip

    @cached_property
    def fully_periodic(self) -> NDArray[np.bool_]:
        """Whether all three directions are periodic, (B,): only then is there a volume, and a stress."""
        return np.asarray(self.pbc.all(axis=1), dtype=bool)

    @cached_property
    def volumes(self) -> NDArray[np.float64]:
        """|det(cell)|, Å³, (B,); zero where vectors are missing."""
        return np.abs(np.linalg.det(self.cells)) if len(self) else np.zeros(0)

    def problems(self) -> dict[int, StructureError]:
        """Structures that no model can evaluate, by index; an empty dictionary if all are fine.

        Checks, vectorised over the block: atoms there at all, atomic numbers in range, finite positions, cells and
        temperatures of a size that float64 resolves, independent cell vectors in periodic directions.
        """
        if self._sound():
            return {}
        found: dict[int, StructureError] = {}

        def note(index: int, error: StructureError) -> None:
            found.setdefault(index, error)

        for i in np.flatnonzero(self.counts == 0).tolist():
            note(i, StructureError("empty", "a structure needs at least one atom", field="positions"))
        for atom in np.flatnonzero((self.numbers < 1) | (self.numbers > MAX_NUMBER)).tolist():
            i, k = self._locate(atom)
            note(i, StructureError(
                "bad_value", f"atom {k + 1}: {self.numbers[atom]} is not an atomic number from 1 to {MAX_NUMBER}",
                field="numbers", atoms=(k,)))  # fmt: skip
        # A NaN fails the comparison, too: one pass over the positions finds every bad coordinate.
        fine = np.abs(self.positions) <= MAX_COORDINATE
        if not fine.all():
            for atom in np.flatnonzero(~fine.all(axis=1)).tolist():
                i, k = self._locate(atom)
                if i not in found:
                    axis = int(np.flatnonzero(~fine[atom])[0])
                    note(i, _bad_number(self.positions[atom, axis], f"positions: {'xyz'[axis]} of atom {k + 1}",
                                        "positions", (k,)))  # fmt: skip
        fine = np.abs(self.cells) <= MAX_COORDINATE
        for i, row, column in np.argwhere(~fine).tolist():
            label = f"cell: component {'xyz'[column]} of vector {row + 1}"
            note(i, _bad_number(self.cells[i, row, column], label, "cell", ()))
        for i in np.flatnonzero(np.isinf(self.temperatures) | (self.temperatures < 0)).tolist():
            note(i, StructureError("bad_value", f"temperature must be finite and not negative, not "
                                   f"{self.temperatures[i]}", field="temperature"))  # fmt: skip
        for i in np.flatnonzero(cells.singular(self.cells, self.pbc)).tolist():
            note(i, StructureError(
                "singular_cell", "cell: the vectors of the periodic directions are zero or not independent",
                field="cell"))  # fmt: skip
        return found

    def _sound(self) -> bool:
        """True if :meth:`problems` has nothing to tell; false may also mean that it is not sure.

        Nearly every block passes here, and pays for a few reductions alone.
        """
        if not len(self.counts):
            return True
        if int(self.counts.min()) < 1 or int(self.numbers.min()) < 1 or int(self.numbers.max()) > MAX_NUMBER:
            return False
        # A NaN fails each of these comparisons.
        if not (float(self.positions.min()) >= -MAX_COORDINATE and float(self.positions.max()) <= MAX_COORDINATE):
            return False
        if len(self.counts) == 1:
            # The step of a simulation: on nine numbers Python is faster than NumPy.
            heat = float(self.temperatures[0])
            return not (heat < 0 or isinf(heat)) and cells.sound(self.cells[0].tolist(), self.pbc[0].tolist())
        if not (float(self.cells.min()) >= -MAX_COORDINATE and float(self.cells.max()) <= MAX_COORDINATE):
            return False
        if (self.temperatures < 0).any() or np.isinf(self.temperatures).any():
            return False
        return not cells.singular(self.cells, self.pbc).any()

    def _locate(self, atom: int) -> tuple[int, int]:
        """Structure and index within it of atom number ``atom`` of the block."""
        i = int(np.searchsorted(self.offsets, atom, side="right")) - 1
        return i, int(atom - self.offsets[i])


def _joined_keys(blocks: Sequence[Structures]) -> NDArray[np.int64] | None:
    if all(b.keys is None for b in blocks):
        return None
    return np.concatenate([np.zeros(len(b), np.int64) if b.keys is None else b.keys for b in blocks])


def _bad_number(value: float, label: str, field_name: str, atoms: tuple[int, ...]) -> StructureError:
    if np.isfinite(value):
        return StructureError(
            "out_of_range", f"{label} is {value:g} Å; at most {MAX_COORDINATE:g} Å can be resolved",
            field=field_name, atoms=atoms,
        )  # fmt: skip
    return StructureError("non_finite", f"{label} is {value}; it must be finite", field=field_name, atoms=atoms)


def ragged_arange(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenation of ``arange(starts[i], starts[i] + counts[i])``."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - counts), counts) + np.arange(total, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Prediction:
    """Result of one structure: ``values`` by property name, what could not be had in ``unavailable``."""

    values: Mapping[str, Any]
    unavailable: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass(frozen=True, eq=False)
class Predictions:
    """Results of B structures, packed like their :class:`Structures`.

    Attributes:
        counts: Atoms per structure, (B,) int64.
        values: Arrays by property name: ``energy``, ``free_energy`` (B,) float64 eV; ``stress`` (B, 6) float64
            eV/Å³; ``virial`` (B, 3, 3) float64 eV; ``energies`` (N,) eV; ``forces`` (N, 3) eV/Å; ``virials``
            (N, 3, 3) eV; ``descriptors`` (N, D). NaN where a structure failed or a property cannot be had.
        stress_known: Whether the stress exists, (B,) bool: only with three periodic directions.
        errors: Structures that failed, by index.
    """

    counts: NDArray[np.int64]
    values: dict[str, NDArray[Any]]
    stress_known: NDArray[np.bool_]
    errors: dict[int, StructureError] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """First atom of each structure and, last, N: (B + 1,)."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The packed array of a property.

        Raises:
            StructureError: The first failure, if any structure failed; look at ``errors`` to go on without it.
        """
        if self.errors:
            index = min(self.errors)
            error = self.errors[index]
            raise StructureError(
                error.code, f"structure {index + 1}: {error.reason}", field=error.field, atoms=error.atoms
            )
        return self.values[name]

    def view(self, index: int) -> Prediction:
        """Result of structure ``index``.

        Raises:
            StructureError: That structure failed.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"structure {index} of {len(self)}")
        i = index % len(self)
        if i in self.errors:
            raise self.errors[i]
        a, b = self.offsets[i], self.offsets[i + 1]
        values: dict[str, Any] = {}
        missing: list[str] = []
        for name, array in self.values.items():
            if name == "stress" and not self.stress_known[i]:
                missing.append(name)
            elif name in PER_ATOM:
                values[name] = array[a:b]
            else:
                values[name] = float(array[i]) if array.ndim == 1 else array[i]
        return Prediction(values, tuple(missing))

    def slice(self, start: int, stop: int) -> Predictions:
        """Results of structures ``start`` to ``stop`` − 1."""
        a, b = self.offsets[start], self.offsets[stop]
        return Predictions(
            self.counts[start:stop],
            {k: v[a:b] if k in PER_ATOM else v[start:stop] for k, v in self.values.items()},
            self.stress_known[start:stop],
            {i - start: e for i, e in self.errors.items() if start <= i < stop},
        )

    @classmethod
    def failed(
        cls,
        counts: NDArray[np.int64],
        properties: Iterable[str],
        errors: Mapping[int, StructureError],
        *,
        descriptor_size: int = 0,
        dtype: str = "float64",
    ) -> Predictions:
        """Rows of NaN for structures none of which was evaluated.

        Args:
            counts: Atoms of each, (B,).
            properties: Properties that were asked for.
            errors: What is wrong with each, by index.
            descriptor_size: Length of the model's descriptors, D; 0 where nobody knows.
            dtype: Of the arrays over atoms.
        """
        values: dict[str, NDArray[Any]] = {}
        for name in properties:
            if name in PER_ATOM:
                each = (descriptor_size if n is None else n for n in PER_ATOM[name])
                values[name] = np.full((int(counts.sum()), *each), np.nan, dtype)
            else:
                values[name] = np.full((len(counts), *PER_STRUCTURE[name]), np.nan)
        return cls(counts, values, np.zeros(len(counts), bool), dict(errors))

    def among(
        self, counts: NDArray[np.int64], places: NDArray[np.int64], errors: Mapping[int, StructureError]
    ) -> Predictions:
        """These results among those of structures that were not evaluated.

        Args:
            counts: Atoms of each structure of the whole, (B,).
            places: Indices in the whole of the structures of these results, in order.
            errors: What is wrong with the others, by index in the whole.

        Returns:
            Results of the whole, with rows of NaN for the structures in ``errors``.
        """
        B, N = len(counts), int(counts.sum())
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)[places]
        atoms = ragged_arange(starts, self.counts)
        values: dict[str, NDArray[Any]] = {}
        for name, array in self.values.items():
            rows, where = (N, atoms) if name in PER_ATOM else (B, places)
            values[name] = np.full((rows, *array.shape[1:]), np.nan, array.dtype)
            values[name][where] = array
        known = np.zeros(B, bool)
        known[places] = self.stress_known
        return Predictions(
            counts, values, known, dict(errors) | {int(places[i]): error for i, error in self.errors.items()}
        )

    @classmethod
    def concatenate(cls, blocks: Sequence[Predictions]) -> Predictions:
        """Join results end to end; all blocks carry the same properties."""
        if len(blocks) == 1:
            return blocks[0]
        errors: dict[int, StructureError] = {}
        start = 0
        for block in blocks:
            errors.update({start + i: e for i, e in block.errors.items()})
            start += len(block)
        return cls(
            np.concatenate([b.counts for b in blocks]),
            {k: np.concatenate([b.values[k] for b in blocks]) for k in blocks[0].values},
            np.concatenate([b.stress_known for b in blocks]),
            errors,
        )


__all__ = [
    "DEFAULT_PROPERTIES",
    "MAX_COORDINATE",
    "PER_ATOM",
    "PER_STRUCTURE",
    "PROPERTIES",
    "SYMBOLS",
    "Prediction",
    "Predictions",
    "Structure",
    "Structures",
    "atomic_numbers",
    "ragged_arange",
]
