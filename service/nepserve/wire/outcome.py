"""What an answer says, whatever its format: results checked for NaN, failures gathered, gaps listed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nepcore.errors import StructureError
from nepcore.structures import PER_ATOM

from .problem import OTHER_STATUS, STATUS_NUMBERS
from .request import WireError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nepcore.files.xyz import Frames
    from nepcore.structures import Predictions, Structures

    from .request import Request


@dataclass(frozen=True, eq=False)
class Outcome:
    """One answer before it is written.

    Attributes:
        structures: What was asked about.
        values: Arrays of the properties asked for, in the order asked; a property that no structure has is not in it.
            Rows of failed structures, and of gaps, are NaN.
        unavailable: Structures (indices, ascending) that are fine but cannot have a property, by property.
        errors: Structures that failed, by index.
        pbc_assumed: Structures that left their periodicity to us, (B,) bool; None if none did.
        single: One structure as one structure.
        dtype: Type of the per-atom arrays of a binary answer.
        model: Name of the model that answered, if it is to be told.
        frames: The frames of an extended XYZ body.
    """

    structures: Structures
    values: dict[str, NDArray[Any]]
    unavailable: dict[str, NDArray[np.int64]]
    errors: dict[int, StructureError]
    pbc_assumed: NDArray[np.bool_] | None
    single: bool
    dtype: Literal["f4", "f8"]
    model: str | None = None
    frames: Frames | None = None

    def __len__(self) -> int:
        return len(self.structures)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Atoms per structure, (B,)."""
        return self.structures.counts

    @cached_property
    def offsets(self) -> list[int]:
        """First atom of each structure and, last, N."""
        return self.structures.offsets.tolist()

    @cached_property
    def status(self) -> NDArray[np.uint8]:
        """0 for a structure that is fine, else the number of its error code, (B,) uint8."""
        if not self.errors:
            return np.zeros(len(self.counts), np.uint8)
        status = np.zeros(len(self.counts), np.uint8)
        for i, error in self.errors.items():
            status[i] = STATUS_NUMBERS.get(error.code, OTHER_STATUS)
        return status

    def error_entries(self) -> list[dict[str, Any]]:
        """Failures as plain objects with the index of the structure, in its order."""
        return [{"index": i, **error_entry(self.errors[i])} for i in sorted(self.errors)]


def error_entry(error: StructureError) -> dict[str, Any]:
    """A failure as a plain object: ``code``, ``message`` and, where known, ``field`` and ``atoms`` (from 0)."""
    entry: dict[str, Any] = {"code": error.code, "message": error.reason}
    if error.field is not None:
        entry["field"] = error.field
    if error.atoms:
        entry["atoms"] = list(error.atoms)
    return entry


def settle(request: Request, predictions: Predictions, model: str | None = None) -> Outcome:
    """Bring request and results together.

    Results that are not finite become the failure of their structure; what was asked for and is not in
    ``predictions`` counts as unavailable.

    Raises:
        WireError: The request was one structure, and it failed: its fault, as the answer's.
        ValueError: The results are not about the structures of the request.
    """
    counts = predictions.counts
    B = len(counts)
    if len(request.structures) != B or (counts is not request.structures.counts
                                        and not np.array_equal(counts, request.structures.counts)):  # fmt: skip
        raise ValueError("the results do not belong to the structures of the request")
    values: dict[str, NDArray[Any]] = {}
    unavailable: dict[str, NDArray[np.int64]] = {}
    absent: list[str] = []
    for name in request.properties:
        array = predictions.values.get("energy" if name == "free_energy" else name)
        if array is None:
            absent.append(name)
        else:
            values[name] = array
    errors = predictions.errors
    if request.errors:
        errors = {**errors, **request.errors}
    gaps = "stress" in values and not predictions.stress_known.all()
    if errors or gaps or not _all_finite(values):
        errors = _with_non_finite(values, predictions, errors)
    if errors or gaps or absent:
        fine = np.ones(B, bool)
        fine[list(errors)] = False
        unavailable = {name: np.flatnonzero(fine) for name in absent if fine.any()}
        if "stress" in values:
            known = predictions.stress_known & fine
            lacking = np.flatnonzero(fine & ~predictions.stress_known)
            if len(lacking):
                unavailable["stress"] = lacking
                if not known.any():
                    del values["stress"]
        if errors or "stress" in values:
            values = _blank(values, predictions, fine)
    if request.single and errors:
        raise WireError.from_structure(errors[0])
    assumed = request.pbc_assumed
    told = assumed is not None and bool(assumed.any())
    return Outcome(
        request.structures,
        values,
        unavailable,
        errors,
        assumed if told else None,
        request.single,
        request.dtype,
        model,
        request.frames,
    )


def _all_finite(values: dict[str, NDArray[Any]]) -> bool:
    """Whether every number is finite; a sum that is not finite may be a mere overflow and reads as no."""
    total = 0.0
    with np.errstate(all="ignore"):
        # One pass each without a temporary: NaN and infinity survive every sum.
        for array in values.values():
            total += float(array[0]) if array.shape == (1,) else float(np.add.reduce(array, axis=None))
    return math.isfinite(total)


def _with_non_finite(
    values: dict[str, NDArray[Any]], predictions: Predictions, errors: dict[int, StructureError]
) -> dict[int, StructureError]:
    """``errors``, and an entry for each structure with a result that is NaN or infinite."""
    found = dict(errors)
    offsets = predictions.offsets
    # Arrays over atoms first: they can say which atom it is.
    for name in sorted(values, key=lambda name: name not in PER_ATOM):
        array = values[name]
        bad = ~np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
        if name == "stress":
            bad &= predictions.stress_known
        rows = np.flatnonzero(bad)
        if name not in PER_ATOM:
            for i in rows.tolist():
                found.setdefault(i, _non_finite(name, ()))
            continue
        owners = np.searchsorted(offsets, rows, side="right") - 1
        for i in dict.fromkeys(owners.tolist()):
            if i not in found:
                found[i] = _non_finite(name, tuple((rows[owners == i] - offsets[i]).tolist()))
    return found


def _non_finite(name: str, atoms: tuple[int, ...]) -> StructureError:
    if not atoms:
        where = f"the {name}"
    elif len(atoms) == 1:
        where = f"{name} of atom {atoms[0] + 1}"
    else:
        where = f"{name} of atom {atoms[0] + 1} and of {len(atoms) - 1} more"
    reason = f"the model gives a number that is not finite: {where}"
    return StructureError("non_finite_result", reason, field=name, atoms=atoms[:100])


def _blank(
    values: dict[str, NDArray[Any]], predictions: Predictions, fine: NDArray[np.bool_]
) -> dict[str, NDArray[Any]]:
    """Copies in which the rows of failed structures, and of stress that does not exist, are NaN."""
    atoms = np.repeat(fine, predictions.counts)
    blank: dict[str, NDArray[Any]] = {}
    for name, array in values.items():
        keep = atoms if name in PER_ATOM else fine & predictions.stress_known if name == "stress" else fine
        blank[name] = array if keep.all() else np.where(keep.reshape(-1, *[1] * (array.ndim - 1)), array, np.nan)
    return blank
