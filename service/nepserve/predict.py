"""``nepserve predict``: a structure file in, the same file with results out, whatever its size.

Blocks are read, evaluated and written in the order of the file, so that memory does not grow with it; with several
servers or devices several blocks are under way together. The output has another name (``.partial``) until it is
complete, and beside it stands how far it is, for a run that is cut off to be gone on with.
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

from . import resume as resuming
from .partial_file import OutputError, PartialFile, refuse_overwriting, remaining, writing
from .pipeline import Pipeline
from .progress import Progress
from .resume import ResumeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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
    url: str | Sequence[str] | None = None,
    api_key: str | None = None,
    devices: str | None = None,
    resume: bool = False,
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
        url: Let a server evaluate instead of this process, or several, as :class:`nepserve.client.Client` takes them.
            Each has blocks under way at all times, and one that fails leaves its blocks to the others.
        api_key: The server's key.
        devices: Let an engine on each of several devices evaluate, in place of ``device``: ``all``, numbers of GPUs
            such as ``0,1``, or ``cpu:N``.
        resume: Go on where an earlier run with the same arguments was cut off; from the beginning if none was. The
            output is then what it would have been. Needs an input and an output that are files.
        calculator: What evaluates, if it is there already; ``model`` and the arguments about it are not used then.
        max_atoms: Atoms in one block; a larger frame is a block of its own.

    Raises:
        InputFileError: A frame that cannot be read or evaluated, with its file, frame, line and reason; or no frame.
        OutputError: The output cannot be written, or would overwrite an input.
        ResumeError: ``resume``, and the earlier run was another one, or its input has changed.
        ModelFileError, ModelError: The model cannot be used.
        nepserve.client.NepserveError: The server gave no answer.
    """
    wanted = tuple(dict.fromkeys(properties))
    unknown = [name for name in wanted if name not in PROPERTIES]
    if unknown:
        raise ModelError(f"unknown property {unknown[0]!r}; there are: {', '.join(PROPERTIES)}")
    if calculator is None and model is None and url is None:
        raise ModelError("no model was given, and no server")
    if devices is not None and (url is not None or device != "auto"):
        raise ModelError("devices are those of this machine: give either them, or one device, or a server's url")
    asked = wanted if gpumd_dir is None else tuple(dict.fromkeys((*wanted, *gpumd_out.PROPERTIES)))
    started = time.monotonic()
    refuse_overwriting(output, [source] if calculator or url or model is None else [source, model])
    with ExitStack() as stack:
        file, name = _opened(source, stack)
        state: resuming.State | None = None
        if file.seekable() and str(output) != "-":
            about: dict[str, Any] = {
                "properties": wanted, "dtype": None if url else dtype, "backend": None if url else backend,
                "skip_bad": skip_bad, "blocks": max_atoms,
                "gpumd_out": None if gpumd_dir is None else str(Path(gpumd_dir).resolve()),
            }  # fmt: skip
            about["model"] = model if url is not None or model is None else resuming.digest(model)
            state = resuming.State(resuming.description(source, **about))
        if resume:
            if state is None:
                raise ResumeError("only a run from a file to a file can be gone on with")
            state = resuming.find(resuming.state_name(output), state.run) or state
        run = _Run(wanted, asked, skip_bad, state or resuming.State({}))
        begun = run.state.read > 0
        if not begun and str(output) != "-":
            # What an earlier run left is overwritten.
            resuming.forget(resuming.state_name(output))
        target = PartialFile(output, run.state.output if begun else None)
        run.state_path = resuming.state_name(output) if state is not None and target.partial is not None else None
        writer: gpumd_out.Writer | None = None
        bar = Progress(name, _size(file), shown=progress)
        if begun:
            bar.say(f"going on after frame {run.state.read:,} of {name}")
            bar.resumed(run.frames)
        try:
            if gpumd_dir is not None:
                with writing(gpumd_dir):
                    writer = gpumd_out.Writer(gpumd_dir, kept=run.state.gpumd if begun else None)
            evaluator, depth = (calculator, 1) if calculator else (None, 1)
            if evaluator is None:
                evaluator, depth = _evaluator(model, url, api_key, device, devices, dtype, backend, stack)
            work = Pipeline(run.evaluation(evaluator), depth)
            with bar:
                blocks = _blocks(file, name, max_atoms, skip_bad, run.state.read, bar)
                for block, predictions in work.run(blocks, bar.step):
                    run.block(block, predictions, target, writer)
                    bar.end()
            if run.frames + run.failed == 0:
                raise InputFileError(name, None, None, "there are no frames in it")
            target.close()
            if writer is not None:
                with writing(writer.directory):
                    writer.close()
            if run.state_path is not None:
                resuming.forget(run.state_path)
        except BaseException:
            left = target.abandon(keep=run.frames > 0)
            if writer is not None:
                writer.abandon()
                left += remaining(writer.partial, keep=run.frames > 0)
            if not left and run.state_path is not None:
                resuming.forget(run.state_path)
            if left:
                more = "; --resume goes on" if run.state_path is not None and run.state_path.exists() else ""
                bar.say(f"not complete: {run.frames} frames with results are in {', '.join(map(str, left))}{more}")
            raise
    return PredictResult(
        name, str(output), run.frames, run.atoms, run.failed, tuple(run.failures), time.monotonic() - started,
        work.seconds, run.energy.rmse(), run.forces.rmse(), run.virial.rmse(), tuple(run.warnings),
    )  # fmt: skip


_NOTHING = Predictions(np.zeros(0, np.int64), {}, np.zeros(0, bool))


class _Squares:
    """A root mean square in the making."""

    def __init__(self, total: float = 0.0, count: int = 0) -> None:
        self.total = total
        self.count = count

    def add(self, difference: NDArray[np.float64]) -> None:
        known = difference[np.isfinite(difference)]
        self.total += float(np.square(known).sum())
        self.count += known.size

    def rmse(self) -> float | None:
        return float(np.sqrt(self.total / self.count)) if self.count else None


@dataclass(frozen=True, eq=False)
class _Block:
    """A block of the file, and what of it could be read."""

    frames: xyz.Frames
    good: xyz.Frames


class _Run:
    """The loop's body, and what it counts."""

    def __init__(self, wanted: tuple[str, ...], asked: tuple[str, ...], skip_bad: bool, state: resuming.State) -> None:
        self._wanted = frozenset(wanted)
        self._asked = asked
        self._skip_bad = skip_bad
        self.state = state
        self.state_path: Path | None = None
        self.frames, self.atoms, self.failed = state.frames, state.atoms, state.failed
        self.failures = [Failure(*entry) for entry in state.failures]
        self.warnings = list(state.warnings)
        squares = [_Squares(*state.squares.get(name, ())) for name in ("energy", "forces", "virial")]
        self.energy, self.forces, self.virial = squares

    def evaluation(self, evaluator: Evaluator) -> Callable[[_Block, Callable[[int], None]], Predictions]:
        """What is done with each block, in whatever thread."""

        def evaluate(block: _Block, progress: Callable[[int], None]) -> Predictions:
            if not len(block.good):
                return _NOTHING
            return evaluator.evaluate(block.good.structures, self._asked, progress)

        return evaluate

    def block(
        self, block: _Block, predictions: Predictions, target: PartialFile, writer: gpumd_out.Writer | None
    ) -> None:
        """Write one block, and how far the run is now."""
        frames, good = block.frames, block.good
        self.warnings += frames.warnings[: MAX_LISTED - len(self.warnings)]
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
        if self.state_path is not None:
            self._keep(int(frames.indices[-1]) + 1, self.state_path, target, writer)

    def _keep(self, read: int, path: Path, target: PartialFile, writer: gpumd_out.Writer | None) -> None:
        """Have the disk hold what was written, then how much that is."""
        state = self.state
        state.read, state.output = read, target.settle()
        if writer is not None:
            with writing(writer.directory):
                state.gpumd = writer.settle()
        state.frames, state.atoms, state.failed = self.frames, self.atoms, self.failed
        state.failures = [(f.frame, f.line, f.reason) for f in self.failures]
        state.warnings = self.warnings
        kept = {"energy": self.energy, "forces": self.forces, "virial": self.virial}
        state.squares = {name: (each.total, each.count) for name, each in kept.items()}
        resuming.keep(path, state)

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


def _blocks(file: BinaryIO, name: str, max_atoms: int, skip_bad: bool, first: int, bar: Progress) -> Iterator[_Block]:
    """Blocks of the file; tells the bar how far it has been read and how many atoms are under way."""
    for frames in xyz.read_blocks(file, max_atoms, path=name, skip_bad=skip_bad, first=first):
        bar.begin(_position(file), frames.structures.n_atoms, len(frames))
        # Frames that could not be read hold no atoms: nothing to evaluate.
        yield _Block(frames, _without(frames, frames.errors))


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
    model: str | Path | None,
    url: str | Sequence[str] | None,
    api_key: str | None,
    device: str,
    devices: str | None,
    dtype: str,
    backend: str,
    stack: ExitStack,
) -> tuple[Evaluator, int]:
    """What evaluates, and how many blocks at a time; what has to be ended goes onto the stack."""
    if url is not None:
        remote = _Remote(url, None if model is None else str(model), api_key)
        return remote, _depth(remote.servers)
    if devices is not None:
        from .devices import devices_of
        from .local_server import LocalServer
        from .settings import SettingsError

        try:
            count = len(devices_of(devices, None))
        except SettingsError as error:
            raise ModelError(str(error)) from None
        server = stack.enter_context(LocalServer(cast("str | Path", model), devices, dtype=dtype, backend=backend))
        return _Remote(server.url, None, None, dtype), _depth(count)
    import nepcore

    loaded = nepcore.load(cast("str | Path", model), device=device, dtype=dtype, backend=backend)
    return cast("Evaluator", loaded), 1


def _depth(devices: int) -> int:
    """Blocks under way together: two for each device, for it never to wait, and the one that is read or written."""
    return 1 + 2 * max(devices, 1)


class _Remote:
    """A server, or several, as an evaluator."""

    def __init__(
        self, url: str | Sequence[str], model: str | None, api_key: str | None, dtype: str = "float64"
    ) -> None:
        from .client import Client

        # Double precision on the way: the file's positions arrive as they stand.
        self._client = Client(url, model=model, api_key=api_key, dtype="float64", priority="bulk")
        self._dtype = dtype

    @property
    def servers(self) -> int:
        """How many there are."""
        return len(self._client.replicas())

    def evaluate(
        self, structures: Structures, properties: Iterable[str], progress: Callable[[int], None] | None = None
    ) -> Predictions:
        def done(structures_done: int, _: int) -> None:
            if progress is not None:
                progress(int(structures.offsets[structures_done]))

        found = self._client.evaluate_many(structures, properties, on_error="return", progress=done)
        if self._dtype == "float64":
            return found
        # What was computed in single precision is written so, as by one device.
        values = {k: v.astype(self._dtype) if k in PER_ATOM else v for k, v in found.values.items()}
        return replace(found, values=values)


__all__ = [
    "DEFAULT_PROPERTIES",
    "MAX_ATOMS",
    "Evaluator",
    "Failure",
    "OutputError",
    "PredictResult",
    "ResumeError",
    "predict",
]
