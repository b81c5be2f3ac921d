"""``nepserve predict``: a structure file in, the same file with results out, whatever its size.

Blocks are read, evaluated and written in turn, in the order of the file, so that memory does not grow with it. The
output has another name (``.partial``) until it is complete.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

import numpy as np

from nepcore.errors import InputFileError, ModelError
from nepcore.files import gpumd_out, xyz
from nepcore.structures import PER_ATOM, PROPERTIES, Predictions

from .partial_file import OutputError, PartialFile, refuse_overwriting, remaining, writing
from .progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from nepcore.structures import Structures

DEFAULT_PROPERTIES = ("energy", "energies", "forces", "stress", "virial")
"""What is written where nothing else is asked for."""

MAX_ATOMS = 200_000
"""Atoms in one block."""

MAX_LISTED = 1000
"""Failures and warnings that are kept with the result; all are counted."""


class Evaluator(Protocol):
    """What evaluates: a :class:`nepcore.calculator.Calculator`, or a server."""

    def evaluate(
        self, structures: Structures, properties: Iterable[str], progress: Callable[[int], None] | None = None
    ) -> Predictions:
        """Predictions in the order of the structures; ``progress`` is called with the atoms finished so far."""


@dataclass(frozen=True)
class Failure:
    """A frame without results: its number in the file (from 0), the line of its count (from 1), and the reason."""

    frame: int
    line: int
    reason: str


@dataclass(frozen=True)
class PredictResult:
    """What a run of :func:`predict` did.

    Attributes:
        source: The input.
        output: The output.
        frames: Frames with results.
        atoms: Their atoms.
        failed: Frames without results.
        failures: The first of them.
        seconds: Wall time, loading the model, reading and writing included.
        evaluation_seconds: What evaluating took of it.
        rmse_energy: Against the labels of the input, eV/atom; None where it has none or none was predicted.
        rmse_forces: The same, eV/Å, over components.
        rmse_virial: The same, eV/atom, over the six components.
        warnings: Labels that were not used, and why.
    """

    source: str
    output: str
    frames: int
    atoms: int
    failed: int
    failures: tuple[Failure, ...]
    seconds: float
    evaluation_seconds: float
    rmse_energy: float | None
    rmse_forces: float | None
    rmse_virial: float | None
    warnings: tuple[str, ...]


def predict(
    source: str | Path,
    model: str | Path | None,
    output: str | Path,
    *,
    device: str = "auto",
    dtype: str = "float32",
    backend: str = "auto",
    properties: Iterable[str] = DEFAULT_PROPERTIES,
    gpumd_dir: str | Path | None = None,
    skip_bad: bool = False,
    progress: bool = True,
    url: str | None = None,
    api_key: str | None = None,
    calculator: Evaluator | None = None,
    max_atoms: int = MAX_ATOMS,
) -> PredictResult:
    """Evaluate all frames of an extended-XYZ file and write them with the results.

    Args:
        source: The file (gzip too); ``-`` is the standard input.
        model: A ``nep.txt``; with ``url`` the name of a model of the server, None for its only one.
        output: Where the frames go, with results in place of labels; packed if the name ends in ``.gz``; ``-`` is the
            standard output.
        device: As in :func:`nepcore.load`.
        dtype: As in :func:`nepcore.load`.
        backend: As in :func:`nepcore.load`.
        properties: What is written, names among :data:`nepcore.structures.PROPERTIES`.
        gpumd_dir: A directory for GPUMD's ``*_train.out`` files. They have a row for every frame of the input; those
            of frames without results are ``nan``.
        skip_bad: Go on after a frame that cannot be read (if it is sure where the next one begins) or evaluated. It is
            left out of the output, whose frames then carry their number in the input, from 0, as ``source_frame``.
        progress: Show a progress bar, or a line now and then where there is no terminal, on the standard error.
        url: Let a server evaluate instead of this process.
        api_key: The server's key.
        calculator: What evaluates, if it is there already; ``model`` and the arguments about it are not used then.
        max_atoms: Atoms in one block; a larger frame is a block of its own.

    Raises:
        InputFileError: A frame that cannot be read or evaluated, with its file, frame, line and reason; or no frame.
        OutputError: The output cannot be written, or would overwrite an input.
        ModelFileError, ModelError: The model cannot be used.
        nepserve.client.NepserveError: The server gave no answer.
    """
    wanted = tuple(dict.fromkeys(properties))
    unknown = [name for name in wanted if name not in PROPERTIES]
    if unknown:
        raise ModelError(f"unknown property {unknown[0]!r}; there are: {', '.join(PROPERTIES)}")
    if calculator is None and model is None and url is None:
        raise ModelError("no model was given, and no server")
    asked = wanted if gpumd_dir is None else tuple(dict.fromkeys((*wanted, *gpumd_out.PROPERTIES)))
    started = time.monotonic()
    refuse_overwriting(output, [source] if calculator or url or model is None else [source, model])
    run = _Run(wanted, asked, skip_bad)
    with ExitStack() as stack:
        file, name = _opened(source, stack)
        target = PartialFile(output)
        writer: gpumd_out.Writer | None = None
        bar = Progress(name, _size(file), shown=progress)
        try:
            if gpumd_dir is not None:
                with writing(gpumd_dir):
                    writer = gpumd_out.Writer(gpumd_dir)
            evaluator = calculator or _evaluator(model, url, api_key, device, dtype, backend)
            with bar:
                for block in _blocks(file, name, max_atoms, skip_bad, bar):
                    run.block(block, evaluator, target, writer, bar)
            if run.frames + run.failed == 0:
                raise InputFileError(name, None, None, "there are no frames in it")
            target.close()
            if writer is not None:
                with writing(writer.directory):
                    writer.close()
        except BaseException:
            left = target.abandon(keep=run.frames > 0)
            if writer is not None:
                writer.abandon()
                left += remaining(writer.partial, keep=run.frames > 0)
            if left:
                bar.say(f"not complete: {run.frames} frames with results are in {', '.join(map(str, left))}")
            raise
    return PredictResult(
        name, str(output), run.frames, run.atoms, run.failed, tuple(run.failures), time.monotonic() - started,
        run.seconds, run.energy.rmse(), run.forces.rmse(), run.virial.rmse(), tuple(run.warnings),
    )  # fmt: skip


_NOTHING = Predictions(np.zeros(0, np.int64), {}, np.zeros(0, bool))


class _Squares:
    """A root mean square in the making."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def add(self, difference: NDArray[np.float64]) -> None:
        known = difference[np.isfinite(difference)]
        self.total += float(np.square(known).sum())
        self.count += known.size

    def rmse(self) -> float | None:
        return float(np.sqrt(self.total / self.count)) if self.count else None


class _Run:
    """The loop's body, and what it counts."""

    def __init__(self, wanted: tuple[str, ...], asked: tuple[str, ...], skip_bad: bool) -> None:
        self._wanted = frozenset(wanted)
        self._asked = asked
        self._skip_bad = skip_bad
        self.frames = self.atoms = self.failed = 0
        self.seconds = 0.0
        self.failures: list[Failure] = []
        self.warnings: list[str] = []
        self.energy, self.forces, self.virial = _Squares(), _Squares(), _Squares()

    def block(
        self,
        frames: xyz.Frames,
        evaluator: Evaluator,
        target: PartialFile,
        writer: gpumd_out.Writer | None,
        bar: Progress,
    ) -> None:
        """Evaluate and write one block."""
        self.warnings += frames.warnings[: MAX_LISTED - len(self.warnings)]
        # Frames that could not be read hold no atoms: nothing to evaluate.
        good = _without(frames, frames.errors)
        started = time.monotonic()
        predictions = evaluator.evaluate(good.structures, self._asked, bar.step) if len(good) else _NOTHING
        self.seconds += time.monotonic() - started
        failed = {**frames.errors}
        kept = np.flatnonzero(~np.isin(np.arange(len(frames)), list(frames.errors)))
        failed.update(
            {
                int(kept[i]): InputFileError(frames.path, int(good.indices[i]), int(good.lines[i]), error.reason)
                for i, error in predictions.errors.items()
            }
        )
        if failed and not self._skip_bad:
            first = min(failed)
            good, predictions = good.select(range(first)), predictions.slice(0, first)
            self._write(good, predictions, target)
            if writer is not None:
                with writing(writer.directory):
                    writer.add(good.structures, predictions, good)
            raise failed[first]
        if writer is not None:
            with writing(writer.directory):
                _add_rows(writer, frames, good, predictions)
        for i in sorted(failed):
            self.failed += 1
            if len(self.failures) < MAX_LISTED:
                self.failures.append(Failure(int(frames.indices[i]), int(frames.lines[i]), failed[i].reason))
        self._write(_without(good, predictions.errors), _succeeded(predictions), target)

    def _write(self, frames: xyz.Frames, predictions: Predictions, target: PartialFile) -> None:
        values = predictions.values
        atoms = np.maximum(frames.structures.counts, 1)
        if "energy" in values:
            self.energy.add((values["energy"] - frames.energy) / atoms)
        if "forces" in values:
            self.forces.add(values["forces"] - frames.forces)
        if "virial" in values:
            lower = np.tril_indices(3)
            self.virial.add((values["virial"] - frames.virial)[:, lower[0], lower[1]] / atoms[:, None])
        shown = replace(predictions, values={k: v for k, v in values.items() if k in self._wanted})
        target.write(xyz.dumps(frames.structures, shown, frames, number_frames=self._skip_bad))
        self.frames += len(frames)
        self.atoms += frames.structures.n_atoms


def _without(frames: xyz.Frames, left_out: dict[int, Any]) -> xyz.Frames:
    if not left_out:
        return frames
    return frames.select([i for i in range(len(frames)) if i not in left_out])


def _succeeded(predictions: Predictions) -> Predictions:
    """The predictions without the structures that failed."""
    if not predictions.errors:
        return predictions
    good = ~np.isin(np.arange(len(predictions)), list(predictions.errors))
    atoms = np.repeat(good, predictions.counts)
    values = {k: v[atoms if k in PER_ATOM else good] for k, v in predictions.values.items()}
    return Predictions(predictions.counts[good], values, predictions.stress_known[good])


def _add_rows(writer: gpumd_out.Writer, frames: xyz.Frames, good: xyz.Frames, predictions: Predictions) -> None:
    """Rows for every frame in its place, those that could not be read included."""
    start = 0
    for done, i in enumerate(sorted(frames.errors)):
        # Of the frames before i, `done` are not in `good`.
        stop = i - done
        _add_slice(writer, good, predictions, start, stop)
        writer.skip(int(frames.announced[i]))
        start = stop
    _add_slice(writer, good, predictions, start, len(good))


def _add_slice(writer: gpumd_out.Writer, good: xyz.Frames, predictions: Predictions, start: int, stop: int) -> None:
    if start < stop:
        part = good if (start, stop) == (0, len(good)) else good.select(range(start, stop))
        writer.add(part.structures, predictions.slice(start, stop), part)


def _blocks(file: BinaryIO, name: str, max_atoms: int, skip_bad: bool, bar: Progress) -> Iterator[xyz.Frames]:
    """Blocks of the file; tells the bar how far it has been read and how many atoms are under way."""
    for block in xyz.read_blocks(file, max_atoms, path=name, skip_bad=skip_bad):
        bar.begin(_position(file), block.structures.n_atoms, len(block))
        yield block
        bar.end()


def _position(file: BinaryIO) -> int | None:
    return file.tell() if file.seekable() else None


def _size(file: BinaryIO) -> int | None:
    return os.fstat(file.fileno()).st_size if file.seekable() else None


def _opened(source: str | Path, stack: ExitStack) -> tuple[BinaryIO, str]:
    if str(source) == "-":
        return sys.stdin.buffer, "<stdin>"
    try:
        return stack.enter_context(Path(source).open("rb")), str(source)
    except (OSError, ValueError) as error:
        raise InputFileError(source, None, None, getattr(error, "strerror", None) or str(error)) from error


def _evaluator(
    model: str | Path | None, url: str | None, api_key: str | None, device: str, dtype: str, backend: str
) -> Evaluator:
    if url is not None:
        return _Remote(url, None if model is None else str(model), api_key)
    import nepcore

    return cast("Evaluator", nepcore.load(cast("str | Path", model), device=device, dtype=dtype, backend=backend))


class _Remote:
    """A server as an evaluator."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        from .client import Client

        # Double precision on the way: the file's positions arrive as they stand.
        self._client = Client(url, model=model, api_key=api_key, dtype="float64", priority="bulk")

    def evaluate(
        self, structures: Structures, properties: Iterable[str], progress: Callable[[int], None] | None = None
    ) -> Predictions:
        def done(structures_done: int, _: int) -> None:
            if progress is not None:
                progress(int(structures.offsets[structures_done]))

        return self._client.evaluate_many(structures, properties, on_error="return", progress=done)


__all__ = [
    "DEFAULT_PROPERTIES",
    "MAX_ATOMS",
    "Evaluator",
    "Failure",
    "OutputError",
    "PredictResult",
    "predict",
]
