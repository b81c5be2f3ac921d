"""``nepserve train``: a ``nep.in`` and frames in, a run directory with models, outputs and a report out."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nepcore import __version__
from nepcore.errors import NepError
from nepcore.files import nep_in as nep_in_files
from nepcore.files import nep_txt
from nepcore.training import RunDirectory
from nepcore.training import inputs as asked
from nepcore.training import survey as surveys

from .train_display import Display, errors

if TYPE_CHECKING:
    from nepcore.files.nep_in import NepIn
    from nepcore.files.xyz import Frames
    from nepcore.training import Progress, Training
    from nepcore.training.outputs import Evaluated
    from nepcore.training.survey import Survey


class TrainError(NepError):
    """A training that was asked for in a way that cannot be."""


@dataclass(frozen=True)
class Job:
    """What the command line asks for.

    Attributes:
        source: A run directory of GPUMD's kind, or a ``nep.in``.
        output: Where the run goes.
        train: Frames to train on; None: ``train.xyz`` beside the ``nep.in``.
        test: Frames to validate on; None: ``test.xyz`` beside the ``nep.in``, if there is one.
        given: Settings that take precedence over the file's.
        resume: Go on from the checkpoint in ``output``.
        overwrite: Begin anew although ``output`` holds a run.
        allow_new_data: Resume with other frames than those of the checkpoint.
        fine_tune: Model or checkpoint to start from.
        keep_types: Keep elements of that model which no frame has.
        skip_bad: Leave frames out that cannot be read.
        allow_disagreement: Take the virial of frames whose stress says something else.
        device, backend: Where, and how it is computed (None: the default).
        quiet: Show messages and results only.
    """

    source: Path
    output: Path
    train: Path | None = None
    test: Path | None = None
    given: dict[str, Any] | None = None
    resume: bool = False
    overwrite: bool = False
    allow_new_data: bool = False
    fine_tune: Path | None = None
    keep_types: bool = False
    skip_bad: bool = False
    allow_disagreement: bool = False
    device: str = "auto"
    backend: str | None = None
    quiet: bool = False


def run(job: Job) -> bool:
    """Train; returns False if the training was stopped before its end (everything is saved then).

    Raises:
        InputFileError, TrainError, SettingsError, TrainingError, CheckpointError: It cannot be done; nothing, or
            nothing more, was written.
    """
    # Under torchrun every process computes; one speaks and writes.
    leads = os.environ.get("RANK", "0") == "0"
    source, train_path, test_path = _files(job)
    directory = RunDirectory(job.output)
    _check_output(job, directory)
    nep_in = nep_in_files.read(source)
    train, skipped = surveys.read(train_path, skip_bad=job.skip_bad)
    test, test_skipped = (None, ()) if test_path is None else surveys.read(test_path, skip_bad=job.skip_bad)
    for frames in (train, test):
        if frames is not None and not job.allow_disagreement:
            surveys.check(frames)
    given = dict(job.given or {})
    if test is not None:
        if given.get("valid_ratio"):
            raise TrainError(f"{test_path} is there to validate on, and --valid-ratio is given: wanted one of them")
        given["valid_ratio"] = 0.0
    wanted = asked.inputs(nep_in, len(train), **given)
    messages = list(wanted.messages)
    tables = []
    with Display(wanted.settings.epochs, shown=leads and not job.quiet) as display:
        if leads:
            for text in messages:
                display.say(f"note: {text}")
            for name, frames, bad in (("train", train, skipped), ("test", test, test_skipped)):
                if frames is not None:
                    tables.append((f"Data: {frames.path}", _show(display, job, name, surveys.look(frames, bad))))
        training = _training(job, wanted, train, test, directory)
        said = _course(training, display, directory, leads=leads)
    _part(training)
    finished = said[-1].kind == "finished" if said else True
    if leads:
        messages += training.messages
        if not finished:
            _tell(f"stopped after epoch {training.epochs} and saved; nepserve train ... --resume goes on")
        _finish(job, training, nep_in, (train, test), (train_path, test_path), tables, messages, finished=finished)
    return finished


def _files(job: Job) -> tuple[Path, Path, Path | None]:
    """``nep.in``, frames to train on, frames to validate on."""
    source = job.source / "nep.in" if job.source.is_dir() else job.source
    if not source.is_file():
        raise TrainError(
            f"{source}: there is no such file; nepserve train --init train.xyz > nep.in proposes one for your data"
        )
    beside = source.parent / "test.xyz"
    train = source.parent / "train.xyz" if job.train is None else job.train
    test = job.test
    if test is None and beside.is_file() and job.train is None and not (job.given or {}).get("valid_ratio"):
        test = beside
    return source, train, test


def _check_output(job: Job, directory: RunDirectory) -> None:
    there = directory.checkpoint.is_file() or directory.previous_checkpoint.is_file()
    if job.resume and not there:
        raise TrainError(f"{job.output} has no checkpoint to resume from")
    if there and not (job.resume or job.overwrite):
        raise TrainError(f"{job.output} holds a training already: --resume goes on with it, --overwrite begins anew")
    if job.resume and job.fine_tune is not None:
        raise TrainError("--resume goes on with a training, --fine-tune begins one: wanted one of them")


def _show(display: Display, job: Job, name: str, survey: Survey) -> list[tuple[str, str]]:
    rows = survey.rows()
    if not job.quiet:
        display.say(f"{name}: {survey.path}")
        width = max(len(label) for label, _ in rows)
        for label, text in rows:
            display.say(f"  {label:<{width}}  {text}")
    for error in survey.skipped[:20]:
        display.say(f"left out: {error}")
    if len(survey.skipped) > 20:
        display.say(f"left out: {len(survey.skipped) - 20} more frames")
    for text in survey.warnings:
        display.say(f"warning: {text}")
    return rows


def _training(
    job: Job, wanted: asked.Inputs, train: Frames, test: Frames | None, directory: RunDirectory
) -> Training:  # fmt: skip
    from nepcore.training import Training

    options: dict[str, Any] = {} if job.backend is None else {"backend": job.backend}
    return Training(
        wanted.settings, train, test, directory=directory.path, device=job.device,
        start=None if job.resume else job.fine_tune or wanted.start, keep_types=job.keep_types,
        resume="auto" if job.resume else None, allow_new_data=job.allow_new_data, **options,
    )  # fmt: skip


def _course(training: Training, display: Display, directory: RunDirectory, *, leads: bool) -> list[Progress]:
    """Run it; returns the last record, if there is one."""
    from nepcore.training.outputs import Journal

    settings = training.settings
    if leads:
        for text in training.messages:
            display.say(f"note: {text}")
        split = (
            "" if not len(training.valid_indices) else f", {len(training.valid_indices)} of them kept for validation"
        )
        display.say(
            f"training {training.n_parameters:,} numbers on {training.device}, {settings.dtype}, for {settings.epochs} "
            f"epochs with {settings.batch} frames a step, seed {settings.seed}{split}; errors: E in meV/atom, F in "
            "meV/Å, V in meV/atom"
        )
    last: list[Progress] = []
    if not leads:
        return list(training.run())[-1:]
    after = training.epochs if training.resumed is not None else None
    with Journal(directory, settings.output_interval, after) as journal:
        for record in training.run():
            display.add(record)
            journal.add(record)
            last = [record]
    return last


def _part(training: Training) -> None:
    """End the work of several processes: what follows is done by one."""
    if training.group.size > 1:
        from torch import distributed

        distributed.barrier()
        distributed.destroy_process_group()


def _finish(
    job: Job, training: Training, nep_in: NepIn, data: tuple[Frames, Frames | None],
    paths: tuple[Path, Path | None], tables: list[tuple[str, list[tuple[str, str]]]], messages: list[str], *,
    finished: bool,
) -> None:  # fmt: skip
    """Evaluate the best model, and write outputs, summary and report."""
    from nepcore.training import outputs, report

    directory = RunDirectory(job.output)
    train, test = data
    settings = training.settings
    sets = [("train", train.select(training.train_indices))]
    if test is not None:
        sets.append(("test", test))
    elif len(training.valid_indices):
        sets.append(("test", train.select(training.valid_indices)))
    facts: dict[str, Any] = {
        "program": f"nepserve {__version__}", "finished": finished, "epochs": training.epochs,
        "parameters": training.n_parameters, "device": str(training.device), "settings": settings.as_dict(),
        "nep_in": nep_in_files.dumps(nep_in), "train": str(paths[0].resolve()),
        "test": None if paths[1] is None else str(paths[1].resolve()),
        "train_frames": train.indices[training.train_indices].tolist(),
        "valid_frames": train.indices[training.valid_indices].tolist(),
        "element_offsets": dict(zip(settings.elements, training.element_offsets.tolist(), strict=False)),
        "messages": messages,
    }  # fmt: skip
    evaluated: list[Evaluated] = []
    if finished:
        # The file, not the training's own: that would need all processes, which have ended.
        best = nep_txt.read(directory.best)
        for kind, frames in sets:
            evaluated.append(outputs.evaluate(best, frames, kind, directory.path, device=str(training.device)))
        facts["errors"] = {e.kind: e.errors() for e in evaluated}
        facts["model"] = best.describe()
    outputs.summary(directory, facts)
    if not finished:
        return
    run_rows = [
        ("epochs", str(training.epochs)), ("parameters", f"{training.n_parameters:,}"),
        ("device", f"{training.device}, {settings.dtype}"), ("seed", str(settings.seed)),
        ("nep.in", nep_in_files.dumps(nep_in).strip().replace("\n", "; ")),
    ]  # fmt: skip
    figures = report.write(
        directory, f"Training of {' '.join(settings.elements)}", [("Run", run_rows), *tables],
        outputs.records(directory), evaluated, messages,
    )  # fmt: skip
    for found in evaluated:
        rmse = {name: value["rmse"] for name, value in found.errors().items()}
        from nepcore.training import Errors

        _tell(f"best model, {found.kind} frames, RMSE: {errors(Errors(**rmse))}")
    if not figures:
        _tell("no figures: they need matplotlib, which pip install 'nepserve[train]' brings")
    _tell(f"{directory.best}, {directory.report}; nepserve serve {shlex.quote(str(job.output))} serves the best model")


def init(path: Path, *, skip_bad: bool = False) -> str:
    """A commented ``nep.in`` for the frames of a file."""
    frames, skipped = surveys.read(path, skip_bad=skip_bad)
    survey = surveys.look(frames, skipped)
    return asked.propose(survey, tuple(survey.types))


def export_split(directory: Path, output: Path) -> tuple[int, int]:
    """Write ``train.xyz``, ``test.xyz`` and ``nep.in`` for GPUMD: the split that a run trained on, to the letter.

    Returns:
        Frames to train on and to test on.

    Raises:
        TrainError: The folder holds no run, or its data have changed.
    """
    from nepcore.files import xyz

    run_directory = RunDirectory(directory)
    try:
        facts = json.loads(run_directory.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainError(
            f"{run_directory.summary}: cannot be read ({error}); it is written as a training ends"
        ) from error
    output.mkdir(parents=True, exist_ok=True)
    for name in ("train.xyz", "test.xyz"):
        if (output / name).exists() and (output / name).resolve() in {Path(facts["train"]), Path(facts["test"] or "/")}:
            raise TrainError(f"{output / name} is the data of the run itself; give another folder")
    frames = xyz.read(facts["train"], skip_bad=True)
    sets = {"train.xyz": facts["train_frames"], "test.xyz": facts["valid_frames"]}
    where = {int(index): k for k, index in enumerate(frames.indices)}
    for name, indices in sets.items():
        missing = [i for i in indices if i not in where]
        if missing:
            raise TrainError(f"{facts['train']} has no frame {missing[0] + 1} any more: it is not the file of the run")
        chosen = frames.select([where[i] for i in indices])
        if len(chosen):
            xyz.write(output / name, chosen.structures, frames=chosen)
    tested = len(sets["test.xyz"])
    if facts["test"] is not None:
        test = xyz.read(facts["test"], skip_bad=True)
        test = test.select([k for k in range(len(test)) if k not in test.errors])
        xyz.write(output / "test.xyz", test.structures, frames=test)
        tested = len(test)
    (output / "nep.in").write_text(_for_gpumd(facts["nep_in"]), encoding="utf-8")
    return len(sets["train.xyz"]), tested


def _for_gpumd(text: str) -> str:
    """A ``nep.in`` without the keywords that GPUMD does not know."""
    from nepcore.files.nep_keywords import KEYWORDS

    own = {"q_scaler", "loss_form", "weight_form", "valid_ratio", "seed", "offset"}
    nep_in = nep_in_files.loads(text)
    kept = {n: e for n, e in nep_in.entries.items() if KEYWORDS[n].group != "gradient" and n not in own}
    return nep_in_files.dumps(replace(nep_in, entries=kept))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201
