"""A training: epochs as a generator of progress records, with checkpoints, and models at the end."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nepcore.files import nep_txt
from nepcore.potential import DTYPES

from . import checkpoint, loss
from .batches import Plan, stream
from .checkpoint import CheckpointError
from .dataset import IN_MEMORY, check, chosen, fingerprint, split
from .diagnosis import diagnose
from .distributed import Group, device_of
from .forward import usual
from .parameters import Layout
from .preparation import (
    TrainingError,
    begin,
    cut,
    data_of,
    find_scaler,
    label_counts,
    most_neighbors,
    solve_offset,
)  # fmt: skip
from .progress import Errors, Progress, RunDirectory
from .schedule import Schedule
from .stepper import State, Stepper
from .watch import MOST_BAD, Clock, Watch, stopping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from nepcore.files.nep_txt import NepFile
    from nepcore.files.xyz import Frames

    from .batches import Part
    from .settings import Settings

logger = logging.getLogger("nepcore")

CHECKPOINT_SECONDS = 2.0
"""Checkpoints on the way are not written more often, however short an epoch is."""

AUTO = "auto"


@dataclass(frozen=True, eq=False)
class Models:
    """The models of a training.

    Attributes:
        best: Of the best epoch.
        final: Of the last one.
        average: Average over the last epochs; None where none is made.
    """

    best: NepFile
    final: NepFile
    average: NepFile | None


class Training:
    """A training that is ready to run.

    Args:
        settings: What to do.
        train: Frames to train on.
        valid: Frames to validate on; None: ``settings.valid_ratio`` of the training frames.
        directory: Where models and checkpoints go; None: nowhere.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1`` ...
        backend: Way to compute, one of :data:`nepcore.training.forward.BACKENDS`, or ``kernels``; None: the usual one.
        start: Model to fine-tune: itself, a ``nep.txt`` or a checkpoint.
        keep_types: Keep elements of that model that no frame has.
        resume: ``auto`` (the directory's checkpoint, if there is one), or a checkpoint; None: from the start.
        allow_new_data: Resume although the frames are not those of the checkpoint.
        graphs: Replay steps as graphs on a GPU.
        compiled: Let torch compile the parts of a step.
        in_memory: Bytes of neighbours that are kept in memory; more are mapped from a file.

    Attributes:
        settings: The settings, the model part of which may have come from ``start`` or from the checkpoint.
        train_indices, valid_indices: Frames of ``train`` that are trained and validated on, where they were split.
        messages: What the preparation has to say.
        element_offsets: Energy of an atom of each element by least squares, eV, (T,).
        resumed: The checkpoint that this goes on from.

    Raises:
        TrainingError: There is nothing to train on.
        CheckpointError: The checkpoint cannot be used, or belongs to other data.
        InputFileError: A frame that cannot be computed; names file, frame and line.
        ModelError: No such device or backend.
    """

    def __init__(
        self, settings: Settings, train: Frames, valid: Frames | None = None, *, directory: str | Path | None = None,
        device: str = "auto", backend: str | None = None, start: NepFile | str | Path | None = None,
        keep_types: bool = False, resume: str | Path | None = None, allow_new_data: bool = False, graphs: bool = True,
        compiled: bool = False, in_memory: float = IN_MEMORY,
    ) -> None:  # fmt: skip
        self.device = device_of(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # where kernels, graphs and NCCL look
        self.group = Group.join(self.device)
        self.directory = None if directory is None else RunDirectory(Path(directory))
        self.train_indices = np.arange(len(train))
        self.valid_indices = np.zeros(0, np.int64)
        if valid is None:
            self.train_indices, self.valid_indices = split(train, settings.valid_ratio, settings.seed)
            train, valid = chosen(train, self.train_indices), train.select(self.valid_indices)
        found = self._checkpoint(resume)
        prints = [fingerprint(train), fingerprint(valid)]
        if found is not None:
            self.resumed: Path | None = found[0]
            self._check_data(found[0], found[2], prints, (len(train), len(valid)), allow_new_data)
            start, keep_types = nep_txt.loads(found[2]["model"], found[0]), True
        else:
            self.resumed = None
        begun = begin(settings, train, start, keep_types)
        check(valid, begun.model)
        self.settings = settings = begun.settings
        self.messages = list(begun.messages)
        if settings.batch < self.group.size:
            self.messages.append(
                f"a batch of {settings.batch} for {self.group.size} processes: some have nothing to do"
            )
        self.element_offsets = begun.element_offsets

        self._plan = Plan.of(begun.model.admission.work(train.structures), settings.batch, settings.seed)
        self._valid_plan = Plan.of(begun.model.admission.work(valid.structures), settings.batch, settings.seed)
        self._owned = self._plan.owned(self.group.rank, self.group.size)
        self._data = data_of(chosen(train, self._owned), begun, in_memory)
        valid_owned = self._valid_plan.owned(self.group.rank, self.group.size)
        self._valid = data_of(chosen(valid, valid_owned), begun, in_memory)
        self._valid_batches = [
            np.searchsorted(valid_owned, self._valid_plan.share(batch, self.group.rank, self.group.size))
            for batch in self._valid_plan.epoch(0)
        ]
        self._labels = label_counts(train)
        self._n_valid = len(valid)
        most = most_neighbors((self._data, self._valid), self.group, self.device)
        if begun.keep_scaler and begun.model.mn_radial is not None and begun.model.mn_angular is not None:
            most = max(most[0], int(begun.model.mn_radial)), max(most[1], int(begun.model.mn_angular))
        self._like = replace(begun.model, mn_radial=float(most[0]), mn_angular=float(most[1]), header=())
        self._layout = Layout.of(self._like)
        dtype = DTYPES[settings.dtype]
        vector = self._layout.vector(self._like, dtype).to(self.device)
        scaler = torch.from_numpy(self._like.q_scaler).to(self.device, dtype)
        self._state = State.of(vector, self._like.bias)
        self._stepper = Stepper(
            self._like, settings, self._layout, self._state, scaler, group=self.group, graphs=graphs, compiled=compiled,
            backend=backend or usual(dtype, self.device),
        )  # fmt: skip
        self._stages = settings.stages()
        self._stage = 0
        self._schedule = Schedule(self._stages[0])
        self._epoch = self._batch = self._step = 0
        self._best = {"vector": vector.clone(), "bias": self._state.bias.clone()}
        self._average = torch.zeros_like(vector, dtype=torch.float64)
        self._averaged = 0
        self._seconds = 0.0
        self._prints = prints
        self._stop = False
        self._news: list[str] = []
        self._last: Progress | None = None
        if self.directory is not None and self.group.leads:
            self.directory.path.mkdir(parents=True, exist_ok=True)
        self._restores = 0
        if found is not None:
            self._take(found[1], found[2])
        else:
            if not begun.keep_scaler:
                scaler.copy_(torch.from_numpy(find_scaler(self._stepper, self._data, settings.temperature, self.group)))
            solve_offset(self._stepper, self._data, self.group)
            self._best["bias"].copy_(self._state.bias)
        self._start_of_epoch = self._state.copy()
        if found is not None and "start.vector" in found[1]:
            self._start_of_epoch = {n: found[1][f"start.{n}"].to(self.device) for n in self._state.tensors()}
        self._watch = Watch(self._state.totals)

    @property
    def n_parameters(self) -> int:
        """Numbers that are trained."""
        return self._layout.size

    @property
    def epochs(self) -> int:
        """Epochs that have ended."""
        return self._epoch

    def stop(self) -> None:
        """End after the step that runs; everything is saved then."""
        self._stop = True

    def run(self) -> Iterator[Progress]:
        """Train; yields a record after each epoch and, in long epochs, now and then in between.

        SIGINT and SIGTERM end the training as :meth:`stop` does, if this is the main thread; a second one interrupts.
        """
        with stopping(self.stop):
            yield from self._epochs()

    def models(self) -> Models:
        """The models as they are now, each with the energy offset that is exact for the training frames."""
        final = self._solved(self._state.vector, self._state.bias)
        best = self._solved(self._best["vector"], self._best["bias"])
        average = None
        if self._averaged:
            average = self._solved((self._average / self._averaged).to(self._state.vector.dtype), self._state.bias)
        return Models(best, final, average)

    def _epochs(self) -> Iterator[Progress]:
        cuda = self.device.type == "cuda"
        feed = self._feed(self._epoch, self._batch)
        source = stream(self._data, feed, pin=cuda, pad=cuda, ahead=4 if cuda else 0)
        with contextlib.closing(source):  # type: ignore[type-var]
            yield from self._stages_from(source)

    def _stages_from(self, source: Iterator[list[Part]]) -> Iterator[Progress]:
        clock = Clock(self._seconds)
        saved = time.monotonic()
        while True:
            self._enter_stage()
            if self._schedule.over:
                break
            stage = self._schedule.stage
            lambdas = (stage.lambda_e, stage.lambda_f, stage.lambda_v)
            lr = self._schedule.lr
            self._stepper.set(lr, lambdas)
            stopped = yield from self._steps(clock, lr, source)
            if stopped:
                self._seconds = clock.seconds()
                self._save()
                yield self._end("stopped", clock)
                return
            record = self._end_epoch(clock, lr, lambdas)
            self._seconds = clock.seconds()
            every = self.settings.checkpoint_interval
            if self._epoch % every == 0 and time.monotonic() - saved > CHECKPOINT_SECONDS:
                self._save()
                saved = time.monotonic()
            self._write_on_the_way()
            self._last = record
            yield record
        self._seconds = clock.seconds()
        self._save()
        self._write_models()
        yield self._end("finished", clock)

    def _end(self, kind: str, clock: Clock) -> Progress:
        """The last record: that of the last epoch, under another name."""
        last = self._last or self._record(kind, clock, self._schedule.lr, None, None, best=False, messages=())
        return replace(last, kind=kind, step=self._step, seconds=clock.seconds(), best=False, messages=self._said())

    def _enter_stage(self) -> None:
        while (why := self._schedule.over) and self._stage + 1 < len(self._stages):
            self._stage += 1
            self._schedule = Schedule(self._stages[self._stage])
            self._state.forget()
            if self._schedule.stage.epochs:
                self._say(f"stage {self._schedule.stage.number} begins after epoch {self._epoch} ({why})")

    def _feed(self, epoch: int, batch: int) -> Iterator[list[NDArray[np.int64]]]:
        """Frames of every step from there to the end of the last epoch, in pieces."""
        for number in range(epoch, self.settings.epochs):
            for frames in self._plan.epoch(number)[batch if number == epoch else 0 :]:
                yield cut(self._data, self._mine(frames), self._stepper)

    def _mine(self, batch: NDArray[np.int64]) -> NDArray[np.int64]:
        """Frames of a batch that this process evaluates, by their numbers in its data set."""
        return np.searchsorted(self._owned, self._plan.share(batch, self.group.rank, self.group.size))

    def _steps(self, clock: Clock, lr: float, source: Iterator[list[Part]]) -> Any:
        """The rest of an epoch's steps; says whether the training is to stop."""
        batches = self._plan.epoch(self._epoch)
        watch = self._watch
        for k in range(self._batch, len(batches)):
            if self._told_to_stop(k):
                return True
            batch = batches[k][batches[k] >= 0]
            self._stepper.step(next(source), self._labels[batch].sum(axis=0).tolist())
            self._batch, self._step = k + 1, self._step + 1
            watch.look((k, batches[k]))
            for bad in watch.bad():
                self._undone(*bad)
            clock.frames += len(batch)
            if clock.speak():
                yield self._record("step", clock, lr, None, None, best=False, messages=self._said())
        for bad in watch.bad(wait=True):
            self._undone(*bad)
        return self._told_to_stop(0)

    def _told_to_stop(self, k: int) -> bool:
        """Whether to stop; processes ask each other now and then only."""
        if self.group.size == 1:
            return self._stop
        return k % 16 == 0 and self.group.agree(self._stop, self.device)

    def _undone(self, k: int, batch: NDArray[np.int64], in_row: int) -> None:
        where = diagnose(self._stepper, self._data, self._mine(batch))
        self._say(f"epoch {self._epoch + 1}, step {k + 1} was undone: {where}")
        if in_row < MOST_BAD:
            return
        self._restores += 1
        if self._restores > MOST_BAD:
            raise TrainingError(f"steps that are not finite keep coming back, last {where}; try a smaller lr")
        totals = self._state.totals.clone()
        self._state.restore(self._start_of_epoch)
        self._state.totals.copy_(totals)
        self._schedule.lr *= 0.5
        self._stepper.lr.fill_(self._schedule.lr)
        self._say(f"back to the parameters after the last good epoch, with the learning rate {self._schedule.lr:.3g}")

    def _end_epoch(self, clock: Clock, lr: float, lambdas: Sequence[float]) -> Progress:
        totals = self._state.totals.cpu().numpy()
        steps = max(totals[9], 1.0)
        mean = float(totals[0] / steps) if totals[9] else float("nan")
        valid, valid_loss = self._validate(lambdas)
        self._epoch += 1
        self._batch = 0
        if self._epoch > self.settings.epochs - self.settings.average:
            self._average += self._state.vector
            self._averaged += 1
        before = self._schedule.lr
        best = self._schedule.end_epoch(mean if valid_loss is None else valid_loss)
        if best:
            self._best["vector"].copy_(self._state.vector)
            self._best["bias"].copy_(self._state.bias)
        if self._schedule.stage.lr_scheduler == "plateau" and self._schedule.lr != before:
            self._say(f"learning rate {before:.3g} → {self._schedule.lr:.3g}")
        record = self._record("epoch", clock, lr, valid, valid_loss, best=best, messages=self._said())
        self._state.totals.zero_()
        if not self._watch.in_row:
            self._start_of_epoch = self._state.copy()
        clock.mark()
        return record

    def _validate(self, lambdas: Sequence[float]) -> tuple[Errors | None, float | None]:
        if not self._n_valid:
            return None, None
        total = torch.zeros(9, dtype=torch.float64, device=self.device)
        cuda = self.device.type == "cuda"
        shares = [cut(self._valid, batch, self._stepper) for batch in self._valid_batches]
        for parts in stream(self._valid, shares, pin=cuda, pad=cuda, ahead=2 if cuda else 0):
            for arrays, w in parts:
                found = self._stepper.errors(arrays, w)
                total += torch.cat([found.weighted, found.plain, found.labels])
        self.group.add(total)
        weighted, plain, labels = torch.split(total, 3)
        lam = torch.tensor(lambdas, dtype=torch.float64, device=self.device)
        value = float(loss.terms(weighted, labels, lam, self.settings.loss).sum())
        return _errors(plain.cpu().numpy(), labels.cpu().numpy()), value

    def _record(
        self, kind: str, clock: Clock, lr: float, valid: Errors | None, valid_loss: float | None, *, best: bool,
        messages: tuple[str, ...],
    ) -> Progress:  # fmt: skip
        totals = self._state.totals.cpu().numpy()
        steps = max(float(totals[9]), 1.0)
        running = kind == "step"
        done = self._epoch + (self._batch / max(1, self._plan.steps) if running else 0.0)
        memory = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return Progress(
            kind=kind, epoch=self._epoch + running, epochs=self.settings.epochs, step=self._step,
            stage=self._schedule.stage.number, lr=lr, loss=float(totals[0]) / steps, l1=float(totals[1]) / steps,
            l2=float(totals[2]) / steps, train=_errors(totals[3:6], totals[6:9]), valid=valid, valid_loss=valid_loss,
            best=best, frames_per_second=clock.rate(), seconds=clock.seconds(),
            seconds_left=clock.left(done, self.settings.epochs), messages=messages, device_bytes=memory,
        )  # fmt: skip

    def _say(self, text: str) -> None:
        if self.group.leads:
            logger.info("%s", text)
        self._news.append(text)

    def _said(self) -> tuple[str, ...]:
        said = tuple(self._news)
        self._news.clear()
        return said

    def _solved(self, vector: Tensor, bias: Tensor) -> NepFile:
        """The model of a vector, its offset solved for all training frames."""
        kept = self._state.copy()
        self._state.vector.copy_(vector)
        self._state.bias.copy_(bias)
        solve_offset(self._stepper, self._data, self.group)
        model = self._model(self._state.vector, float(self._state.bias))
        self._state.restore(kept)
        return model

    def _model(self, vector: Tensor, bias: float) -> NepFile:
        scaler = self._stepper.q_scaler.to("cpu", torch.float64).numpy()
        return self._layout.model(vector, self._like, bias, scaler)

    def _write_on_the_way(self) -> None:
        every = self.settings.save_potential
        if self.directory is not None and self.group.leads and every and self._epoch % every == 0:
            nep_txt.write(self._model(self._state.vector, float(self._state.bias)),
                          self.directory.of_epoch(self._epoch))  # fmt: skip

    def _write_models(self) -> None:
        models = self.models()
        if self.directory is None or not self.group.leads:
            return
        nep_txt.write(models.best, self.directory.best)
        nep_txt.write(models.final, self.directory.final)
        if models.average is not None:
            nep_txt.write(models.average, self.directory.average)

    def _save(self) -> None:
        """Write the checkpoint and, beside it, the best model so far."""
        if self.directory is None or not self.group.leads:
            return
        tensors = {f"state.{name}": t for name, t in self._state.tensors().items()}
        tensors |= {f"start.{name}": t for name, t in self._start_of_epoch.items()}
        tensors |= {f"best.{name}": t for name, t in self._best.items()}
        tensors |= {"average": self._average, "q_scaler": self._stepper.q_scaler}
        values = {
            "settings": self.settings.as_dict(), "model": nep_txt.dumps(self._like), "epoch": self._epoch,
            "batch": self._batch, "step": self._step, "stage": self._stage, "schedule": self._schedule.as_dict(),
            "averaged": self._averaged, "seconds": self._seconds, "restores": self._restores, "data": self._prints,
            "frames": [len(self._labels), self._n_valid],
        }  # fmt: skip
        checkpoint.save(self.directory.checkpoint, self.directory.previous_checkpoint, tensors, values)
        nep_txt.write(self._model(self._best["vector"], float(self._best["bias"])), self.directory.best)

    def _checkpoint(self, resume: str | Path | None) -> tuple[Path, dict[str, Tensor], dict[str, Any]] | None:
        if resume is None:
            return None
        if resume == AUTO:
            if self.directory is None:
                return None
            return checkpoint.latest(self.directory.checkpoint, self.directory.previous_checkpoint)
        path = Path(resume)
        tensors, values = checkpoint.load(path)
        return path, tensors, values

    def _check_data(
        self, path: Path, values: dict[str, Any], prints: list[str], frames: tuple[int, int], allow: bool
    ) -> None:
        before = values["frames"]
        if values["data"] == prints or allow:
            return
        changed = f"{before[0]} frames to train on and {before[1]} to validate on then, {frames[0]} and {frames[1]} now"
        if list(frames) == before:
            changed = "as many frames, but other numbers in them"
        raise CheckpointError(path, f"belongs to other data ({changed}); allow new data to go on with these")

    def _take(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        same = values["data"] == self._prints and values["settings"]["batch"] == self.settings.batch
        try:
            self._state.restore({name: tensors[f"state.{name}"].to(self.device) for name in self._state.tensors()})
            for name, t in self._best.items():
                t.copy_(tensors[f"best.{name}"])
            self._average.copy_(tensors["average"])
            self._stepper.q_scaler.copy_(tensors["q_scaler"])
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(str(self.resumed), f"does not fit these settings: {error}") from error
        self._epoch, self._step, self._stage = values["epoch"], values["step"], values["stage"]
        # An epoch that was begun with other batches begins again.
        self._batch = values["batch"] if same else 0
        if not same:
            self._state.totals.zero_()
        self._stage = min(self._stage, len(self._stages) - 1)
        self._schedule = Schedule(self._stages[self._stage], **values["schedule"])
        self._averaged, self._seconds = values["averaged"], values["seconds"]
        self._restores = values["restores"]
        logger.info("going on from %s after epoch %d, step %d", self.resumed, self._epoch, self._step)
        self.messages.append(f"going on from {self.resumed} after epoch {self._epoch}, step {self._step}")


def train(
    settings: Settings, train_frames: Frames, valid_frames: Frames | None = None, *,
    progress: Callable[[Progress], None] | None = None, **options: Any,
) -> Models:  # fmt: skip
    """Train a model.

    Args:
        settings: What to do.
        train_frames: Frames to train on.
        valid_frames: Frames to validate on.
        progress: Called with every record.
        options: As of :class:`Training`.

    Returns:
        The models; with a ``directory`` they stand there, too.
    """
    training = Training(settings, train_frames, valid_frames, **options)
    for record in training.run():
        if progress is not None and training.group.leads:
            progress(record)
    return training.models()


def _errors(squares: NDArray[np.float64], labels: NDArray[np.float64]) -> Errors:
    def root(k: int) -> float | None:
        return float(np.sqrt(squares[k] / labels[k])) if labels[k] > 0 else None

    return Errors(root(0), root(1), root(2))
