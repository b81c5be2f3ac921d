"""What a training says while it runs, and the names of the files that it leaves. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Errors:
    """Root mean squares without any weights; None where there are no labels.

    Attributes:
        energy: eV/atom.
        force: eV/Å, by component.
        virial: eV/atom, over the six components.
    """

    energy: float | None = None
    force: float | None = None
    virial: float | None = None


@dataclass(frozen=True)
class Progress:
    """The state of a training after an epoch, or, now and then, within one.

    Attributes:
        kind: ``step`` (within an epoch: a sign of life, no validation), ``epoch`` (an epoch has ended), ``stopped``
            (the last record of a training that was told to stop, and was saved) or ``finished`` (the last record of
            one that came to its end).
        epoch: Epochs that have ended, or (``step``) the one that runs, from 1.
        epochs: Epochs of all stages.
        step: Optimiser steps since the start, over all interruptions.
        stage: 1 or 2.
        lr: Learning rate of the last step.
        loss: Mean weighted loss of the epoch's steps so far.
        l1, l2: Regularisation terms in it, weighted.
        train: Errors over the epoch's training frames, each with the parameters of its step.
        valid: Errors over the validation frames; None without any, and in ``step`` records.
        valid_loss: Weighted loss over them.
        best: Whether this epoch is the best so far (by ``valid_loss``; by ``loss`` without validation frames).
        frames_per_second: Training frames, since the last ``epoch`` record.
        seconds: Since the training started, interruptions left out.
        seconds_left: Estimate for the rest; None while unknown.
        messages: What else is to be said: a rolled-back step, a new learning rate, a new stage, an early stop.
        device_bytes: Largest device memory so far; None on a CPU.
    """

    kind: str
    epoch: int
    epochs: int
    step: int
    stage: int
    lr: float
    loss: float
    l1: float
    l2: float
    train: Errors
    valid: Errors | None
    valid_loss: float | None
    best: bool
    frames_per_second: float
    seconds: float
    seconds_left: float | None
    messages: tuple[str, ...] = ()
    device_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class RunDirectory:
    """Where a run leaves what.

    The trainer itself writes the models and checkpoints; the report's side writes the other files, from the progress
    records and from the models.
    """

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @property
    def best(self) -> Path:
        """Model of the best epoch: ``nep_best.txt``."""
        return self.path / "nep_best.txt"

    @property
    def final(self) -> Path:
        """Model of the last epoch: ``nep_final.txt``."""
        return self.path / "nep_final.txt"

    @property
    def average(self) -> Path:
        """Average over the last epochs: ``nep_average.txt``."""
        return self.path / "nep_average.txt"

    def of_epoch(self, epoch: int) -> Path:
        """Model saved on the way, see ``Settings.save_potential``: ``nep_epoch00100.txt``."""
        return self.path / f"nep_epoch{epoch:05d}.txt"

    @property
    def checkpoint(self) -> Path:
        """State of the last checkpoint: ``checkpoint.pt``."""
        return self.path / "checkpoint.pt"

    @property
    def previous_checkpoint(self) -> Path:
        """The one before, used if the last one is damaged: ``checkpoint.previous.pt``."""
        return self.path / "checkpoint.previous.pt"

    @property
    def loss(self) -> Path:
        """GPUMD's ``loss.out``."""
        return self.path / "loss.out"

    @property
    def log(self) -> Path:
        """One JSON object a progress record: ``progress.jsonl``."""
        return self.path / "progress.jsonl"

    @property
    def summary(self) -> Path:
        """Settings, data, model and errors of the run: ``run.json``."""
        return self.path / "run.json"

    @property
    def report(self) -> Path:
        """The report: ``report.html``."""
        return self.path / "report.html"
