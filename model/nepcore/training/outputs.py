"""What a run leaves beside its models: ``loss.out`` and ``progress.jsonl`` while it trains, and at its end GPUMD's
predictions beside references and ``run.json``. Needs no torch itself; evaluating does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from nepcore.files import gpumd_out

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from typing_extensions import Self

    from nepcore.files.nep_txt import NepFile
    from nepcore.files.xyz import Frames
    from nepcore.structures import Predictions

    from .progress import Progress, RunDirectory

MISSING = "nan"
"""What ``loss.out`` says where there are no labels."""


class Journal:
    """``loss.out`` and ``progress.jsonl``, written as epochs end.

    A run that is resumed goes on with the rows that were there, up to the epoch it goes on from; a new run begins new
    files. Rows of ``loss.out`` are GPUMD's: epoch, total, L1, L2, RMSE of energy (eV/atom), force (eV/Å) and virial
    (eV/atom) of the training frames, then of the validation frames (0 without any, ``nan`` without labels).

    Args:
        directory: Of the run.
        interval: Epochs between two rows of ``loss.out``; the last epoch always has one.
        after: The last epoch of what this run goes on from; None for a new run.
    """

    def __init__(self, directory: RunDirectory, interval: int = 1, after: int | None = None) -> None:
        self._interval = interval
        directory.path.mkdir(parents=True, exist_ok=True)
        for path, epoch_of in ((directory.loss, _epoch_of_row), (directory.log, _epoch_of_record)):
            kept = []
            if after is not None and path.is_file():
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
                kept = [line for line in lines if (epoch := epoch_of(line)) is not None and epoch <= after]
            path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._loss: TextIO = directory.loss.open("a", encoding="ascii")
        self._log: TextIO = directory.log.open("a", encoding="utf-8")
        self._written = after or 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, record: Progress) -> None:
        """Take a record: epochs are written, signs of life are not."""
        last = record.kind in {"finished", "stopped"}
        if record.kind == "epoch":
            self._log.write(json.dumps(record.as_dict()) + "\n")
            self._log.flush()
        if record.epoch <= self._written or not (record.kind == "epoch" or last):
            return
        if last or record.epoch % self._interval == 0 or record.epoch == record.epochs:
            self._loss.write(row(record) + "\n")
            self._loss.flush()
            self._written = record.epoch

    def close(self) -> None:
        """Close the files."""
        self._loss.close()
        self._log.close()


def row(record: Progress) -> str:
    """The row of ``loss.out`` of an epoch."""
    sets = [record.train]
    numbers = [_text(v) for e in sets for v in (e.energy, e.force, e.virial)]
    if record.valid is None:
        numbers += ["0"] * 3
    else:
        numbers += [_text(v) for v in (record.valid.energy, record.valid.force, record.valid.virial)]
    return " ".join([f"{record.epoch:<8d}", _text(record.loss), _text(record.l1), _text(record.l2), *numbers])


def records(directory: RunDirectory) -> list[dict[str, Any]]:
    """The records of ``progress.jsonl``, one an epoch; a torn last line is left out."""
    if not directory.log.is_file():
        return []
    lines = directory.log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [json.loads(line) for line in lines if _epoch_of_record(line) is not None]


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Predictions of a model for frames, beside the labels.

    Attributes:
        kind: ``train`` or ``test``.
        energy: eV/atom: predicted and reference, (B, 2); NaN where there is no label.
        forces: eV/Å, (N, 3, 2).
        virial: eV/atom, xx yy zz xy yz zx, (B, 6, 2).
        numbers: Atomic numbers, (N,).
        indices: Numbers of the frames in their file, from 0, (B,).
        failed: Frames that could not be evaluated.
    """

    kind: str
    energy: NDArray[np.float64]
    forces: NDArray[np.float64]
    virial: NDArray[np.float64]
    numbers: NDArray[np.uint8]
    indices: NDArray[np.int64]
    failed: int

    def errors(self) -> dict[str, dict[str, float]]:
        """RMSE and mean absolute error of ``energy``, ``force`` and ``virial``; names without labels are left out."""
        found = {}
        for name, both in (("energy", self.energy), ("force", self.forces), ("virial", self.virial)):
            difference = (both[..., 0] - both[..., 1]).ravel()
            difference = difference[np.isfinite(difference)]
            if len(difference):
                found[name] = {
                    "rmse": float(np.sqrt(np.mean(difference**2))),
                    "mae": float(np.abs(difference).mean()),
                    "labels": len(difference),
                }
        return found


def evaluate(
    model: NepFile, frames: Frames, kind: str, directory: Path | None = None, *, device: str = "auto",
    dtype: str = "float32",
) -> Evaluated:  # fmt: skip
    """Evaluate frames with a model, and write GPUMD's four files for them.

    Rows are in the order of the file, one for every frame (see :mod:`nepcore.files.gpumd_out`); a missing reference is
    −1e6 in the files and counts nowhere.
    """
    from nepcore.calculator import Calculator

    calculator = Calculator.of(model, device=device, dtype=dtype, backend="rule")
    predictions: Predictions = calculator.evaluate(frames.structures, gpumd_out.PROPERTIES)
    if directory is not None:
        with gpumd_out.Writer(directory, kind) as writer:
            writer.add(frames.structures, predictions, frames)
    counts = np.maximum(frames.structures.counts, 1).astype(np.float64)
    six = np.array([0, 1, 2, 1, 2, 2]), np.array([0, 1, 2, 0, 1, 0])
    virials = [v[:, six[0], six[1]] / counts[:, None] for v in (predictions.values["virial"], frames.virial)]
    return Evaluated(
        kind, np.stack([predictions.values["energy"] / counts, frames.energy / counts], axis=-1),
        np.stack([predictions.values["forces"], frames.forces], axis=-1), np.stack(virials, axis=-1),
        frames.structures.numbers, frames.indices, len(predictions.errors),
    )  # fmt: skip


def summary(directory: RunDirectory, facts: dict[str, Any]) -> None:
    """Write ``run.json``."""
    partial = directory.summary.with_suffix(".json.partial")
    partial.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    partial.replace(directory.summary)


def _text(value: float | None) -> str:
    return MISSING if value is None else f"{value:g}"


def _epoch_of_row(line: str) -> int | None:
    words = line.split()
    return int(words[0]) if len(words) == 10 and words[0].isdigit() else None


def _epoch_of_record(line: str) -> int | None:
    try:
        return int(json.loads(line)["epoch"])
    except (ValueError, KeyError, TypeError):
        return None
