"""From ``nep.in`` to :class:`Settings`, and from data to a ``nep.in`` to begin with.

A file of GPUMD, one without any keyword of training by gradients, keeps its meaning: its λ are weights of root mean
squares, its intervals count generations. What an evolution strategy needs and gradients do not is replaced and said:
its length, and batches of hundreds of frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.files import nep_in as files

from .settings import Settings, SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from nepcore.files.nep_in import NepIn

    from .survey import Survey

MOST_FRAMES = 32
"""Frames of a step where nothing is said, if there are so many."""

STEPS = 8
"""Steps that an epoch has at least where nothing is said of batches, if there are so many frames."""

_NAMES = {
    "lambda_e": "lambda_e", "lambda_f": "lambda_f", "lambda_v": "lambda_v", "lambda_shear": "lambda_shear",
    "lambda_1": "lambda_1", "lambda_2": "lambda_2", "force_delta": "force_delta", "loss_form": "loss",
    "weight_form": "weighting", "valid_ratio": "valid_ratio", "seed": "seed", "epoch": "epochs", "lr": "lr",
    "stop_lr": "stop_lr", "lr_scheduler": "lr_scheduler", "scheduler_patience": "scheduler_patience",
    "scheduler_factor": "scheduler_factor", "scheduler_step": "scheduler_step", "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm", "start_stage2": "start_stage2", "stage2_lr": "stage2_lr",
    "stage2_stop_lr": "stage2_stop_lr", "stage2_lambda_e": "stage2_lambda_e", "stage2_lambda_f": "stage2_lambda_f",
    "stage2_lambda_v": "stage2_lambda_v", "stage2_lr_scheduler": "stage2_scheduler",
    "stage2_scheduler_patience": "stage2_scheduler_patience", "stage2_scheduler_factor": "stage2_scheduler_factor",
    "stage2_scheduler_step": "stage2_scheduler_step", "average": "average",
}  # fmt: skip
"""Settings that are the one value of a keyword."""


@dataclass(frozen=True)
class Inputs:
    """What a ``nep.in`` asks for.

    Attributes:
        settings: The settings.
        start: Model to fine-tune, from ``fine_tune``.
        messages: What was replaced, or has no effect.
    """

    settings: Settings
    start: Path | None
    messages: tuple[str, ...]


def inputs(nep_in: NepIn, n_frames: int, **given: Any) -> Inputs:
    """Settings of a ``nep.in``.

    Args:
        nep_in: The file; ``zbl.in`` is looked for beside it.
        n_frames: Frames to train on; a batch that is not given follows from them.
        given: Settings that take precedence over the file; None counts as not given.

    Raises:
        InputFileError: Values that cannot be used, or ``zbl.in`` cannot be read.
        SettingsError: Values of ``given`` that cannot be used.
    """
    folder = Path(nep_in.path).parent
    messages = list(nep_in.warnings)
    values = _model(nep_in, folder)
    for keyword, name in _NAMES.items():
        if keyword in nep_in:
            values[name] = (nep_in.values(keyword) or ())[0]
    evolved = not nep_in.gradient
    if "loss_form" not in nep_in and evolved and any(f"lambda_{x}" in nep_in for x in "efv"):
        values["loss"] = "rmse"
        messages.append("the loss has GPUMD's form, root mean squares, as its lambdas mean; loss_form mse changes that")
    _course(nep_in, values, n_frames, messages, evolved=evolved)
    stated = {name: value for name, value in given.items() if value is not None}
    try:
        settings = Settings(**(values | stated))
    except SettingsError as error:
        keyword = {name: key for key, name in _NAMES.items()}.get(error.field, error.field)
        if error.field in stated or keyword not in nep_in:
            raise
        raise nep_in.error(keyword, f"{keyword}: {error.reason}") from error
    start = nep_in.word("fine_tune")
    return Inputs(settings, None if start is None else folder / start, tuple(messages))


def batch_of(n_frames: int) -> int:
    """Frames of a step where nothing is said: a power of two, :data:`MOST_FRAMES` at most, some steps an epoch."""
    most = min(MOST_FRAMES, max(1, n_frames // STEPS))
    return 1 << (most.bit_length() - 1)


def _model(nep_in: NepIn, folder: Path) -> dict[str, Any]:
    radial, angular = nep_in.cutoffs
    l_max, switches = nep_in.l_max
    values: dict[str, Any] = {
        "elements": nep_in.elements,
        "cutoff": tuple(zip(radial.tolist(), angular.tolist(), strict=True)),
        "l_max": l_max,
        "switches": tuple(name for name, on in switches.items() if on),
        "neuron": nep_in.hidden,
    }
    for name in ("n_max", "basis_size", "type_weight"):
        if name in nep_in:
            values[name] = nep_in.values(name)
    if nep_in.integer("version", 4) == 5:
        values["offset"] = "elements"
    if nep_in.integer("model_type", 0) == 3:
        values["temperature"] = True
    if nep_in.word("q_scaler") == "gpumd":
        values["q_scaler"] = "gpumd"
    if "zbl" in nep_in:
        table = folder / "zbl.in"
        if table.is_file():
            values["zbl_pairs"] = files.read_zbl(table, len(nep_in.elements)).tolist()
        else:
            values["zbl"] = nep_in.number("zbl")
            if "use_typewise_cutoff_zbl" in nep_in:
                values["zbl_factor"] = float((nep_in.values("use_typewise_cutoff_zbl") or (0.7,))[0])
    return values


def _course(nep_in: NepIn, values: dict[str, Any], n_frames: int, messages: list[str], *, evolved: bool) -> None:
    """Length, batches, stages and intervals."""
    if "epoch" not in nep_in and "generation" in nep_in:
        values["epochs"] = files.epochs_of(nep_in.integer("generation") or 0)
    batch = nep_in.integer("batch")
    if batch is None:
        values["batch"] = batch_of(n_frames)
    elif evolved and batch > batch_of(n_frames):
        values["batch"] = batch_of(n_frames)
        messages.append(
            f"batch {batch} is an evolution strategy's; steps by gradients take {values['batch']} of {n_frames} frames"
            " (--batch, or any keyword of training by gradients in the file, makes it count)"
        )
    else:
        values["batch"] = batch
    if "stage2" in nep_in:
        values["stage2"] = bool(nep_in.integer("stage2"))
    elif any(name in nep_in for name in files.STAGED):
        values["stage2"] = True
    stops = nep_in.values("early_stop")
    if stops:
        values["early_stop"] = int(stops[0])
        if len(stops) > 1:
            values["stage2_early_stop"] = int(stops[1])
    for name in ("output_interval", "save_potential"):
        interval = nep_in.integer(name)
        if interval is not None:
            values[name] = files.epochs_of(interval) if evolved else interval


def propose(survey: Survey, elements: Sequence[str]) -> str:
    """A commented ``nep.in`` for data: types, cutoffs and sizes that suit them.

    Args:
        survey: What was found in the data, with distances.
        elements: The types, in the order that the model is to have.
    """
    radial, angular = cutoffs(survey.neighbors)
    T = len(elements)
    few = survey.frames < 100
    n_max, basis = ("4 4", "8 8") if T > 3 or few else ("6 6", "8 8")
    neuron = 20 if few else 30 if T <= 4 else 50
    short = "" if survey.shortest is None else f"; shortest distance in the data {survey.shortest:.2f} Å"
    batch = batch_of(survey.frames)
    seen = f"about {survey.within(radial):.0f} and {survey.within(angular):.0f} neighbours"
    virial = survey.frames - survey.without["virial"]
    rows = (
        (f"type {T} {' '.join(elements)}", "the elements; their order is that of the model"),
        (f"cutoff {radial:g} {angular:g}", f"radial and angular, Å: {seen}"),
        (f"n_max {n_max}", "radial and angular functions less one"),
        (f"basis_size {basis}", "Chebyshev polynomials they are made of, less one"),
        ("l_max 4 1", "three-body terms up to l = 4, and one four-body term; add 1 for five-body ones"),
        (f"neuron {neuron}", "neurons of the hidden layer"),
        ("#zbl 2", f"repulsion at short distances (outer cutoff, Å){short}"),
        ("", ""),
        ("epoch 600", "passes over the frames"),
        (f"batch {batch}", f"frames of a step: {-(-survey.frames // batch)} steps an epoch"),
        ("lr 0.01", "learning rate at the start"),
        ("stop_lr 1e-6", "and the smallest"),
        ("lr_scheduler plateau", "plateau, step or cosine"),
        ("lambda_e 0.01", "weights of the mean squares: energies,"),
        ("lambda_f 1", "forces,"),
        (f"lambda_v {0.01 if virial else 0:g}", f"virials ({virial} of {survey.frames} frames have one)"),
        ("stage2 1", "in the second half energies count more:"),
        ("stage2_lr 1e-3", ""),
        ("stage2_lambda_e 1", ""),
        ("stage2_lambda_f 0.05", ""),
        (f"stage2_lambda_v {0.1 if virial else 0:g}", ""),
        ("average 50", "the parameters of the last epochs are averaged, too"),
        ("valid_ratio 0.1", "share of the frames kept for validation where there is no test.xyz"),
    )  # fmt: skip
    width = max(len(row) for row, _ in rows)
    head = f"# Proposed for {survey.path}: {survey.frames} frames, {survey.atoms} atoms. Change what you know better.\n"
    return head + "".join(f"{row:<{width}}  # {why}\n" if why else f"{row}\n" for row, why in rows)


def cutoffs(neighbors: NDArray[np.float64], most: tuple[float, float] = (90.0, 25.0)) -> tuple[float, float]:
    """Radial and angular cutoff, Å: the largest with no more neighbours in the mean than ``most``.

    Args:
        neighbors: Mean number of neighbours within 0, 0.1, 0.2 … Å.
    """

    def largest(lowest: float, highest: float, limit: float) -> float:
        steps = np.arange(lowest, highest + 0.01, 0.5)
        fits = [r for r in steps.tolist() if neighbors[min(round(10 * r), len(neighbors) - 1)] <= limit]
        return max(fits, default=lowest)

    radial = largest(4.5, 8.0, most[0])
    return radial, min(radial, largest(3.0, 5.0, most[1]))
