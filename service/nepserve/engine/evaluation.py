"""One batch on one model, whatever happens: structures that fail do so alone, the others get the bits they would have
got without them."""

from __future__ import annotations

import logging
from collections import deque
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nepcore.errors import ModelError, StructureError
from nepcore.structures import PER_ATOM, PER_STRUCTURE, Predictions

from .errors import DeviceLost, describe
from .memory import Limit, halves, is_device_lost, is_out_of_memory, release

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from nepcore.structures import Structures

logger = logging.getLogger("nepserve.engine")


class Calculator(Protocol):
    """What the engine asks of a loaded model (:class:`nepcore.calculator.Calculator` is one).

    ``model`` has at least ``elements``, ``cutoff`` (Å) and ``temperature``; with ``admission`` batches are cut by
    work, without it by atoms.
    """

    model: Any
    device: str
    dtype: str
    backend: str

    def run(self, structures: Structures, properties: Sequence[str]) -> Generator[int, None, Predictions]:
        """Evaluate, yielding the number of atoms finished after each tile."""
        ...


def evaluate(
    calculator: Calculator, structures: Structures, properties: tuple[str, ...], limit: Limit
) -> Generator[int, None, Predictions]:
    """Evaluate a block; yields the number of atoms finished after each tile.

    Out of memory cuts what was tried in halves by work, down to a single structure, and lowers ``limit``. Any other
    exception is closed in upon in the same way, until the structure that causes it stands alone: its error has the
    code ``internal``. A result that is not finite becomes the error ``non_finite_result``.

    Raises:
        ModelError: The model cannot do what was asked for, whatever the structure.
        DeviceLost: Nothing more can be computed by this process.
    """
    # The front has looked at the structures, and the results are screened here.
    run = getattr(calculator, "run_admitted", calculator.run)
    finished: list[Predictions] = []
    atoms = 0
    todo = deque([structures] if len(structures) else [])
    retried = False
    while todo:
        piece, *rest = limit.pieces(todo.popleft())
        todo.extendleft(reversed(rest))
        error: Exception
        try:
            steps = run(piece, properties)
            result = yield from _shifted(steps, atoms) if atoms else steps
            finished.append((yield from _screened(calculator, piece, result, properties)))
        except ModelError:
            raise
        except Exception as raised:  # whatever a batch raises must not end the engine
            error = raised
        else:
            limit.succeeded(piece.n_atoms)
            atoms += piece.n_atoms
            retried = False
            continue
        if is_device_lost(error):
            raise DeviceLost(describe(error)) from error
        no_memory = is_out_of_memory(error)
        if no_memory:
            limit.failed(piece.n_atoms)
            logger.warning(
                "out of memory with %d structures of %d atoms in one call, now at most %d atoms: %s",
                len(piece), piece.n_atoms, limit.atoms, describe(error),
            )  # fmt: skip
        elif not isinstance(error, StructureError):
            level = logging.ERROR if len(piece) == 1 else logging.DEBUG
            logger.log(level, "evaluation of %d structures failed", len(piece), exc_info=error)
        failure = _failure(error, piece, no_memory)
        if no_memory:
            release(error)
        # The traceback holds this frame, which holds the error: without this the two would wait for the collector.
        error.__traceback__ = None
        del error
        if len(piece) > 1:
            limit.splits += no_memory
            todo.extendleft(reversed(halves(piece, _work(calculator, piece))))
        elif no_memory and not retried:
            # What others held at the time of the failure has just been released.
            retried = True
            todo.appendleft(piece)
        else:
            retried = False
            atoms += piece.n_atoms
            finished.append(Predictions(piece.counts, {}, np.zeros(1, bool), {0: failure}))
    return _join(structures, finished, properties)


def _shifted(steps: Generator[int, None, Predictions], by: int) -> Generator[int, None, Predictions]:
    while True:
        try:
            atoms = next(steps)
        except StopIteration as end:
            result: Predictions = end.value
            return result
        yield by + atoms


def _failure(error: Exception, piece: Structures, no_memory: bool) -> StructureError:
    if isinstance(error, StructureError):
        return error
    if no_memory:
        return StructureError("out_of_memory", f"not enough memory for its {piece.n_atoms} atoms: {describe(error)}")
    return StructureError("internal", f"the evaluation failed: {describe(error)}")


def _work(calculator: Calculator, structures: Structures) -> NDArray[np.float64]:
    """Work of each structure, (B,), always positive."""
    admission = getattr(calculator.model, "admission", None)
    if admission is not None:
        try:
            return np.maximum(admission.work(structures), 1.0)
        except Exception:  # it may be what makes this batch fail; any cut will do
            logger.debug("no estimate of the work of %d structures", len(structures), exc_info=True)
    return np.maximum(structures.counts, 1).astype(np.float64)


def _join(structures: Structures, parts: list[Predictions], properties: Sequence[str]) -> Predictions:
    """Put the results of consecutive runs of structures together; those that failed get rows of NaN."""
    if len(parts) == 1 and parts[0].values:
        return parts[0]
    B, N = len(structures), structures.n_atoms
    model = next((p.values for p in parts if p.values), {})
    values: dict[str, NDArray[Any]] = {}
    for name in properties:
        rows = N if name in PER_ATOM else B
        if name in model:
            values[name] = np.full((rows, *model[name].shape[1:]), np.nan, model[name].dtype)
        else:
            shape = PER_ATOM.get(name, PER_STRUCTURE.get(name, ()))
            values[name] = np.full((rows, *(n or 0 for n in shape)), np.nan)
    known = np.zeros(B, bool)
    errors: dict[int, StructureError] = {}
    row = atom = 0
    for part in parts:
        n = int(part.counts.sum())
        for name, array in part.values.items():
            start, count = (atom, n) if name in PER_ATOM else (row, len(part))
            values[name][start : start + count] = array
        known[row : row + len(part)] = part.stress_known
        errors |= {row + i: e for i, e in part.errors.items()}
        row += len(part)
        atom += n
    return Predictions(structures.counts, values, known, errors)


def _screened(
    calculator: Calculator, structures: Structures, found: Predictions, properties: Sequence[str]
) -> Generator[int, None, Predictions]:
    """``found`` with an error in place of every structure that has a number which is not finite."""
    _check_rows(structures, found, properties)
    bad = _not_finite(found)
    if not bad:
        return found
    errors = dict(found.errors)
    values = {name: array.copy() for name, array in found.values.items()}
    known = found.stress_known.copy()
    for i in bad:
        errors[i] = yield from _blame(calculator, structures.slice(i, i + 1), found.slice(i, i + 1))
        a, b = found.offsets[i], found.offsets[i + 1]
        for name, array in values.items():
            array[slice(a, b) if name in PER_ATOM else i] = np.nan
        known[i] = False
    return Predictions(found.counts, values, known, errors)


def _check_rows(structures: Structures, found: Predictions, properties: Sequence[str]) -> None:
    for name in properties:
        rows = structures.n_atoms if name in PER_ATOM else len(structures)
        if name not in found.values or len(found.values[name]) != rows:
            there = len(found.values[name]) if name in found.values else 0
            raise RuntimeError(f"the backend gave {there} rows of {name} where {rows} were due")


def _not_finite(found: Predictions) -> list[int]:
    """Structures without an error of their own whose results are not all finite."""
    bad: set[int] = set()
    for name, array in found.values.items():
        if isfinite(np.add.reduce(array, axis=None)):
            # One number tells: a sum with anything in it that is not finite is not finite.
            continue
        fine = np.isfinite(array)
        if fine.all():
            continue
        if name in PER_ATOM:
            atoms = np.flatnonzero(~fine.reshape(len(fine), -1).all(axis=1))
            bad.update((np.searchsorted(found.offsets, atoms, side="right") - 1).tolist())
        else:
            rows = ~fine.reshape(len(fine), -1).all(axis=1)
            if name == "stress":
                rows &= found.stress_known
            bad.update(np.flatnonzero(rows).tolist())
    return sorted(bad - set(found.errors))


_WORDS = {"energies": "energy", "forces": "force", "virials": "virial", "descriptors": "descriptor"}


def _blame(calculator: Calculator, alone: Structures, found: Predictions) -> Generator[int, None, StructureError]:
    """Say which number of a structure is not finite, and of which atom; asks the model again if only sums are known."""
    for result in (found, None):
        if result is None:
            result = yield from calculator.run(alone, ("energies", "forces"))
        for name, word in _WORDS.items():
            if name not in result.values or 0 in result.errors:
                continue
            array = result.values[name]
            atoms = np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))
            if len(atoms):
                row = array[atoms[0]].ravel()
                value = row[~np.isfinite(row)][0]
                more = f", and {len(atoms) - 1} more atoms are concerned" if len(atoms) > 1 else ""
                return StructureError(
                    "non_finite_result", f"the model gave a {word} of {value} for atom {atoms[0] + 1}{more}",
                    atoms=tuple(atoms[:100].tolist()),
                )  # fmt: skip
    sums = [name for name in found.values if name in PER_STRUCTURE and not np.isfinite(found.values[name]).all()]
    return StructureError("non_finite_result", f"the model gave no finite {' and '.join(sums)}")
