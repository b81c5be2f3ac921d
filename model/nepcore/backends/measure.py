"""Measuring which backend is the fastest on this device for a model of this shape.

Every candidate runs on representative batches after a warm-up; its numbers are checked against float64 before its
times count. The times of a size class (the geometric mean over its batches of the median of repeats) decide for that
class.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nepcore.elements import NUMBERS
from nepcore.physics.screening import RADII
from nepcore.structures import Structure, Structures

from . import candidates

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from numpy.typing import NDArray

    from nepcore.files.nep_txt import NepFile
    from nepcore.structures import Predictions

    from .candidates import Candidate
    from .protocol import Backend

logger = logging.getLogger("nepcore")

CLASSES = {"small": 1000.0, "large": math.inf}
"""Size classes by name: atoms of the largest structure that belongs to each."""

PROPERTIES = frozenset({"energy", "forces", "virial"})

TOLERANCE = {"float32": (2e-5, 2e-4, 2e-4), "float64": (1e-9, 1e-9, 1e-9)}
"""Deviations from float64 that are allowed: energy and virial an atom, forces; × max(1, largest value)."""

_REPEATS = 7
_ENOUGH_SECONDS = 1.0
_HOPELESS = 8.0
"""A candidate that takes this many times the best is not repeated."""


def classes_of(counts: NDArray[np.int64]) -> list[str]:
    """Size class of structures of so many atoms."""
    names = list(CLASSES)
    bounds = np.array(list(CLASSES.values()))
    return [names[i] for i in np.searchsorted(bounds, counts).tolist()]


@dataclass(frozen=True)
class Batch:
    """A batch that candidates are measured on."""

    name: str
    size_class: str
    structures: Structures


@dataclass
class Timing:
    """One candidate on one batch. What is not known is None, and left out of the report."""

    batch: str
    milliseconds: float | None = None
    microseconds_per_atom: float | None = None
    peak_bytes: int | None = None
    error: float | None = None


@dataclass
class Row:
    """One candidate.

    Attributes:
        name: The candidate's.
        timings: By batch, as far as it came.
        prepared: Seconds until its first answer.
        verdict: Where it was chosen, or why it was not.
    """

    name: str
    timings: list[Timing] = field(default_factory=list)
    prepared: float | None = None
    verdict: str = ""


@dataclass
class Report:
    """What was measured and chosen.

    Attributes:
        choice: Name of a candidate by size class; empty where none can be recommended.
        rows: All candidates, tried or not.
        seconds: What it took.
        complete: Whether every candidate was tried.
        interrupted: Whether somebody ended it (Ctrl-C).
    """

    choice: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; what is not known is left out."""
        out = asdict(self)
        if not self.interrupted:
            del out["interrupted"]
        for row in out["rows"]:
            row["timings"] = [{k: v for k, v in t.items() if v is not None} for t in row["timings"]]
            if row["prepared"] is None:
                del row["prepared"]
        return out

    @classmethod
    def of_dict(cls, data: Any) -> Report:
        """The inverse of :meth:`to_dict`.

        Raises:
            KeyError, TypeError, ValueError: It is something else.
        """
        rows = [
            Row(str(r["name"]), [Timing(**t) for t in r["timings"]], r.get("prepared"), str(r["verdict"]))
            for r in data["rows"]
        ]
        choice = {str(k): str(v) for k, v in data["choice"].items()}
        return cls(choice, rows, float(data["seconds"]), bool(data["complete"]), bool(data.get("interrupted", False)))


def representative(model: NepFile, device_type: str) -> list[Batch]:
    """Batches to measure on, the smallest first: rattled crystals of the model's elements at ordinary densities."""
    gpu = device_type != "cpu"
    many, repeat = (512, (20, 20, 20)) if gpu else (8, (8, 8, 8))
    rng = np.random.default_rng(0)
    small = [_crystal(model, (2, 2, 2), rng) for _ in range(many)]
    blocks = [("one", "small", small[:1]), ("many", "small", small), ("big", "large", [_crystal(model, repeat, rng)])]
    out = []
    for name, size_class, items in blocks:
        block = Structures.pack(items)
        if model.temperature:
            block.temperatures[:] = 300.0
        out.append(Batch(f"{name}: {len(items)} × {len(items[0])} atoms", size_class, block))
    return out


def _crystal(model: NepFile, repeat: tuple[int, int, int], rng: np.random.Generator) -> Structure:
    """A face-centred crystal of up to eight elements of the model, each neighbour at about the sum of the radii, Å."""
    count = min(len(model.elements), 8)
    elements = rng.choice(len(model.elements), count, replace=False)
    distance = 2.1 * float(np.mean([RADII[NUMBERS[model.elements[e]] - 1] for e in elements]))
    a = math.sqrt(2.0) * distance
    cells = np.stack(np.meshgrid(*[np.arange(n) for n in repeat], indexing="ij"), axis=-1).reshape(-1, 1, 3)
    sites = (cells + np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])).reshape(-1, 3)
    positions = a * sites + 0.03 * distance * rng.normal(size=sites.shape)
    species = [model.elements[e] for e in elements[rng.permutation(len(sites)) % count]]
    return Structure.make(species, positions, np.diag(np.array(repeat, float) * a))


def measure(
    model: NepFile, device: torch.device, dtype: str, memory: float, seconds: float, *,
    among: Sequence[Candidate] | None = None, batches: Sequence[Batch] | None = None, earlier: Report | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[dict[str, Any], None, Report]:  # fmt: skip
    """Measure candidates and choose among them. Yields what is being done, JSON-able, before each longer step.

    An interrupt (Ctrl-C) ends the measuring and not the function: the choice is made among what was measured.

    Args:
        model: The model.
        device: Where.
        dtype: ``float32`` or ``float64``.
        memory: Bytes for intermediate arrays, as for the backends.
        seconds: Budget. A candidate whose preparation does not fit into what is left is not tried; one that began is
            let finish its batch, and the first one all of them: a choice is made, however slow the machine.
        among: The candidates; left out, all of them. They are tried by rank.
        batches: What to measure on, instead of :func:`representative`.
        earlier: What was measured at another time, for candidates that are not tried now.
        clock: Seconds.
    """
    started = clock()
    wanted = list(candidates.every() if among is None else among)
    wanted.sort(key=lambda c: c.rank)
    batches = representative(model, device.type) if batches is None else list(batches)
    run = _Run(model, device, dtype, memory, batches, clock)
    report = Report(complete=True)
    yield {"stage": "tune", "done": 0, "total": len(wanted), "what": "reference values"}
    try:
        run.refer()
        for done, candidate in enumerate(wanted):
            row = Row(candidate.name)
            report.rows.append(row)
            yield {"stage": "tune", "done": done, "total": len(wanted), "what": candidate.name}
            if reason := candidate.unfit(model, device):
                row.verdict = f"not here: {reason}"
                continue
            left = seconds - (clock() - started)
            needs = candidate.preparation(model, device, dtype)
            if left <= 0.0 or needs > left:
                why = f"not tried: {max(left, 0.0):.0f} s of the {seconds:g} s were left"
                why += f", and its preparation takes about {needs:.0f} s" if needs else ""
                report.rows[-1] = _known(candidate, earlier) or Row(candidate.name, verdict=why)
                report.complete = False
                continue
            yield from run.try_out(candidate, row, done, len(wanted), started + seconds)
    except KeyboardInterrupt:
        report.interrupted, report.complete = True, False
        if report.rows and not report.rows[-1].verdict:
            report.rows[-1].verdict = "stopped by an interrupt"
        report.rows += [
            _known(candidate, earlier) or Row(candidate.name, verdict="not tried: stopped by an interrupt")
            for candidate in wanted[len(report.rows) :]
        ]
    _choose(report, batches)
    report.seconds = clock() - started
    return report


def _known(candidate: Candidate, earlier: Report | None) -> Row | None:
    """What an earlier report has of a candidate; None where it has no times."""
    for row in earlier.rows if earlier is not None else []:
        if row.name == candidate.name and row.timings:
            bad = row.verdict.startswith(("wrong", "failed"))
            return Row(row.name, row.timings, row.prepared, row.verdict if bad else "measured earlier")
    return None


class _Run:
    """What the candidates have in common while they are measured."""

    def __init__(
        self, model: NepFile, device: torch.device, dtype: str, memory: float, batches: Sequence[Batch],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.model, self.device, self.dtype, self.memory = model, device, dtype, memory
        self.batches = batches
        self.clock = clock
        self.reference: list[Predictions | None] = []
        self.best: dict[str, float] = {}
        self.anyone_finished = False

    def refer(self) -> None:
        """Compute float64 values: of the small batches on the CPU, of large ones on the device."""
        for batch in self.batches:
            where = torch.device("cpu") if batch.structures.n_atoms <= 4000 else self.device
            part = batch.structures.slice(0, min(4, len(batch.structures)))
            try:
                memory = self.memory if where == self.device else 48e6
                backend = candidates.make("loop", self.model, where, "float64", memory)
                self.reference.append(_answer(backend, part))
            except Exception as error:  # a device that cannot do this may still do the rest
                logger.debug("no reference for %s", batch.name, exc_info=error)
                self.reference.append(None)

    def try_out(
        self, candidate: Candidate, row: Row, done: int, total: int, deadline: float
    ) -> Generator[dict[str, Any], None, None]:
        """Measure one candidate on all batches, as far as it goes."""
        begun = self.clock()
        try:
            backend = candidate.make(self.model, self.device, self.dtype, self.memory)
            for batch, reference in zip(self.batches, self.reference, strict=True):
                timing = Timing(batch.name)
                row.timings.append(timing)
                yield {"stage": "tune", "done": done, "total": total, "what": f"{candidate.name}, {batch.name}"}
                self._check(backend, batch, reference, timing)
                if row.prepared is None:
                    row.prepared = self.clock() - begun
                if fault := getattr(getattr(backend, "block", None), "fault", ""):
                    row.verdict = f"failed: {fault}"
                    return
                if timing.error is not None and not timing.error <= 1.0:
                    row.verdict = f"wrong: {timing.error:.3g} times the error that is allowed, on {batch.name}"
                    return
                self._time(backend, batch, timing)
                if self.clock() > deadline and self.anyone_finished:
                    left = [b.name for b in self.batches[len(row.timings) :]]
                    row.verdict = f"not measured for lack of time: {', '.join(left)}" if left else ""
                    return
            self.anyone_finished = True
        except Exception as error:  # whatever a candidate raises, the others are to be measured
            row.verdict = f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            logger.debug("the backend %s failed", candidate.name, exc_info=error)

    def _check(self, backend: Backend, batch: Batch, reference: Predictions | None, timing: Timing) -> None:
        found = _answer(backend, batch.structures)
        if found.errors:
            raise next(iter(found.errors.values()))
        if reference is not None:
            timing.error = deviation(found.slice(0, len(reference)), reference, self.dtype)

    def _time(self, backend: Backend, batch: Batch, timing: Timing) -> None:
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        times: list[float] = []
        spent = 0.0
        # The first run after the check is a second warm-up.
        for repeat in range(_REPEATS + 1):
            begun = self.clock()
            _answer(backend, batch.structures)
            if on_gpu:
                torch.cuda.synchronize(self.device)
            took = self.clock() - begun
            spent += took
            if repeat or spent > _ENOUGH_SECONDS:
                times.append(took)
            if spent > _ENOUGH_SECONDS or took > _HOPELESS * self.best.get(batch.name, math.inf):
                times = times or [took]
                break
        typical = median(times)
        self.best[batch.name] = min(typical, self.best.get(batch.name, math.inf))
        timing.milliseconds = 1e3 * typical
        timing.microseconds_per_atom = 1e6 * typical / batch.structures.n_atoms
        if on_gpu:
            timing.peak_bytes = torch.cuda.max_memory_allocated(self.device)


def _answer(backend: Backend, structures: Structures) -> Predictions:
    predictions: Predictions | None = None

    def finish() -> Generator[int, None, None]:
        nonlocal predictions
        predictions = yield from backend.run(structures, PROPERTIES)

    deque(finish(), maxlen=0)
    assert predictions is not None
    return predictions


def deviation(found: Predictions, wanted: Predictions, dtype: str) -> float:
    """Largest deviation, as a multiple of what is allowed; NaN counts as infinite."""
    atoms = np.maximum(wanted.counts, 1).astype(np.float64)
    worst = 0.0
    for name, allowed in zip(("energy", "forces", "virial"), TOLERANCE[dtype], strict=True):
        a = np.asarray(found.values[name], np.float64)
        b = np.asarray(wanted.values[name], np.float64)
        if name != "forces":
            each = atoms.reshape(-1, *([1] * (a.ndim - 1)))
            a, b = a / each, b / each
        if not np.isfinite(a).all():
            return math.inf
        scale = max(1.0, float(np.abs(b).max(initial=0.0)))
        worst = max(worst, float(np.abs(a - b).max(initial=0.0)) / (allowed * scale))
    return worst


def _choose(report: Report, batches: Sequence[Batch]) -> None:
    """Fill in the choice of each size class, and the verdicts."""
    scores: dict[str, dict[str, float]] = {}
    for size_class in CLASSES:
        members = {b.name for b in batches if b.size_class == size_class}
        for row in report.rows:
            times = [t.milliseconds for t in row.timings if t.batch in members and t.milliseconds is not None]
            wrong = row.verdict.startswith("wrong")
            if members and len(times) == len(members) and not wrong:
                scores.setdefault(size_class, {})[row.name] = geometric_mean([max(t, 1e-9) for t in times])
    for size_class, by_name in scores.items():
        report.choice[size_class] = min(by_name, key=lambda name: by_name[name])
    # A class that nobody could be measured on takes what is best in the other.
    if report.choice:
        fallback = next(iter(report.choice.values()))
        report.choice = {size_class: report.choice.get(size_class, fallback) for size_class in CLASSES}
    for row in report.rows:
        chosen = [size_class for size_class in CLASSES if report.choice.get(size_class) == row.name]
        remarks = [f"chosen for {' and '.join(chosen)} structures"] if chosen else []
        remarks += [row.verdict] if row.verdict else []
        slower = [
            f"{by_name[row.name] / by_name[report.choice[c]]:.1f}× the time for {c} ones"
            for c, by_name in scores.items()
            if row.name in by_name and c not in chosen
        ]
        row.verdict = "; ".join(remarks + slower)
