"""The commands of training: ``nepserve train`` and ``nepserve export-split``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

WRONG = 2
INTERRUPTED = 130


def train(
    source: Annotated[
        Path, typer.Argument(metavar="[DIR | nep.in]", help="A run directory as of GPUMD, or a nep.in.")
    ] = Path(),
    train_xyz: Annotated[
        Path | None, typer.Option("--train", help="Frames to train on [default: train.xyz beside nep.in].")
    ] = None,
    test_xyz: Annotated[
        Path | None, typer.Option("--test", help="Frames to validate on [default: test.xyz there, if there is one].")
    ] = None,
    valid_ratio: Annotated[
        float | None, typer.Option(help="Without --test: share of the frames to validate on.", min=0.0, max=0.9)
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the run.")] = Path("out"),
    init: Annotated[
        Path | None, typer.Option(metavar="train.xyz", help="Print a nep.in proposed for these frames, and stop.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew in a folder that holds a run.")] = False,
    new_data: Annotated[
        bool, typer.Option("--allow-new-data", help="Resume although the frames have changed.")
    ] = False,
    fine_tune: Annotated[
        Path | None, typer.Option(help="Start from this nep.txt, or from the best model of this checkpoint.")
    ] = None,
    keep_types: Annotated[
        bool, typer.Option("--keep-types", help="Fine-tuning: keep elements that no frame has.")
    ] = False,
    run_seed: Annotated[int | None, typer.Option(help="Seed of everything that is random.", min=0)] = None,
    epochs: Annotated[int | None, typer.Option(help="Instead of the file's epoch or generation.", min=1)] = None,
    batch: Annotated[int | None, typer.Option(help="Frames of a step, instead of the file's.", min=1)] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out frames that cannot be read.")] = False,
    disagreeing: Annotated[
        bool, typer.Option("--allow-disagreement", help="Where virial and stress differ, take the virial.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32 or float64 [default: float32].")] = None,
    backend: Annotated[str | None, typer.Option(help="How the physics is computed: sums, kernels ...")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show messages and results only.")] = False,
) -> None:
    """Train a model: a nep.in and frames in, a nep.txt and a report out."""
    from nepcore.training import SettingsError

    from . import train as job

    if init is not None:
        print(job.init(init, skip_bad=skip_bad), end="")  # noqa: T201
        return
    given: dict[str, Any] = {
        "valid_ratio": valid_ratio, "seed": run_seed, "epochs": epochs, "batch": batch, "dtype": dtype,
    }  # fmt: skip
    wanted = job.Job(
        source, output, train_xyz, test_xyz, {k: v for k, v in given.items() if v is not None}, resume, overwrite,
        new_data, fine_tune, keep_types, skip_bad, disagreeing, device, backend, quiet,
    )  # fmt: skip
    try:
        finished = job.run(wanted)
    except (SettingsError, job.TrainError) as error:
        print(f"nepserve: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(WRONG)
    if not finished:
        sys.exit(INTERRUPTED)


def export_split(
    run: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of a training.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write train.xyz, test.xyz and nep.in to.")],
) -> None:
    """Write the frames that a training was trained and validated on, as a run directory of GPUMD."""
    from . import train as job

    try:
        trained, tested = job.export_split(run, output)
    except job.TrainError as error:
        print(f"nepserve: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(WRONG)
    print(f"{output}: {trained} frames to train on, {tested} to test", file=sys.stderr)  # noqa: T201
