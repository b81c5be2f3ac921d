"""Everything before the first step: labels that are there, the model to start with, its scalers and energy offset."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from nepcore.elements import SYMBOLS
from nepcore.errors import NepError
from nepcore.files import nep_txt
from nepcore.files.nep_layout import SWITCHES

from . import checkpoint
from .batches import assemble, widths
from .dataset import IN_MEMORY, Dataset, Labels, check, element_offsets
from .parameters import Layout, scalers, start_model, without_types

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from nepcore.files.nep_txt import NepFile
    from nepcore.files.xyz import Frames

    from .batches import Part
    from .distributed import Group
    from .settings import Settings
    from .stepper import Stepper

logger = logging.getLogger("nepcore")

WIDE_OFFSETS = 30.0
"""Difference of the energies of two elements' atoms, eV, beyond which one common offset is not enough."""

_CPU_PIECE = 150e6
_GPU_SHARE = 0.2


class TrainingError(NepError):
    """A training that cannot go on, or cannot begin."""


@dataclass(frozen=True, eq=False)
class Start:
    """What a training begins with.

    Attributes:
        model: Parameters, sizes and, if they are kept, scalers.
        settings: Settings whose model part says what the model is.
        keep_scaler: Whether the model's scalers stay.
        element_offsets: Energy of an atom of each element by least squares, eV, (T,).
        messages: What is to be said.
    """

    model: NepFile
    settings: Settings
    keep_scaler: bool
    element_offsets: NDArray[np.float64]
    messages: tuple[str, ...]


def begin(settings: Settings, frames: Frames, start: NepFile | str | Path | None, keep_types: bool) -> Start:
    """Choose the model to begin with.

    Args:
        settings: Settings.
        frames: Training frames.
        start: A model to go on with: itself, a ``nep.txt``, or a checkpoint, whose best model is taken. Its sizes,
            cutoffs and scalers hold, not those of the settings.
        keep_types: Keep elements of that model which no frame has.

    Raises:
        TrainingError: Nothing can be trained.
        InputFileError: A frame that the model cannot compute.
    """
    messages = []
    if start is None:
        model, keep = start_model(settings, (1, 1)), False
        check(frames, model)
    else:
        given = read_model(start) if isinstance(start, (str, Path)) else start
        check(frames, given)
        symbols = _symbols(frames)
        wanted = given.elements if keep_types else symbols
        model, keep = without_types(given, wanted), True
        if gone := [s for s in given.elements if s not in model.elements]:
            messages.append(f"elements that no frame has were removed from the model: {' '.join(gone)}")
        settings = settings_of(model, settings)
    if idle := [s for s in model.elements if s not in _symbols(frames)]:
        messages.append(f"no frame has {' '.join(idle)}: what the model says of them means nothing")
    messages += _check_labels(frames, settings)
    offsets = element_offsets(frames, model.elements)
    if model.type_bias is not None and start is None:
        model = replace(model, type_bias=-offsets)
    elif start is None and np.ptp(offsets) > WIDE_OFFSETS:
        messages.append(
            f"energies of the elements' atoms differ by {np.ptp(offsets):.0f} eV, which the networks have to learn; "
            "offset = elements takes them off exactly (and writes a file of version 5)"
        )
    return Start(model, settings, keep, offsets, tuple(messages))


def read_model(path: str | Path) -> NepFile:
    """A model file, or the best model of a checkpoint.

    Raises:
        ModelFileError, CheckpointError: It cannot be read.
    """
    path = Path(path)
    if path.suffix not in {".pt", ".ckpt"}:
        return nep_txt.read(path)
    tensors, values = checkpoint.load(path)
    like = nep_txt.loads(values["model"], path)
    vector = tensors["best.vector"]
    scaler = tensors["q_scaler"].to(torch.float64).numpy()
    return Layout.of(like).model(vector, like, float(tensors["best.bias"]), scaler)


def settings_of(model: NepFile, settings: Settings) -> Settings:
    """Settings whose model part says what a model is."""
    kind = model.zbl
    return replace(
        settings,
        elements=tuple(model.elements),
        cutoff=tuple(zip(model.cutoff_radial.tolist(), model.cutoff_angular.tolist(), strict=True)),
        n_max=(model.n_max_radial, model.n_max_angular),
        basis_size=(model.basis_radial, model.basis_angular),
        l_max=model.l_max,
        switches=tuple(name for name in SWITCHES if model.switches.get(name)),
        neuron=tuple(model.hidden),
        zbl=model.zbl_outer if kind in {"universal", "typewise"} else None,
        zbl_factor=model.zbl_factor if kind == "typewise" else None,
        zbl_pairs=tuple(map(tuple, model.zbl_pairs.tolist())) if model.zbl_pairs is not None else None,
        temperature=model.temperature,
        offset="elements" if model.version == 5 else "common",
        type_weight=_weights(model, settings),
    )


def data_of(frames: Frames, start: Start, in_memory: float = IN_MEMORY) -> Dataset:
    """The data set of frames: what the start's element offsets say is taken off the energies."""
    data = Dataset.of(frames, start.model, start.settings, in_memory)
    bias = start.model.type_bias
    if bias is None or not len(frames):
        return data
    total = np.zeros(len(frames))
    np.add.at(total, np.repeat(np.arange(len(frames)), data.counts), bias[data.types])
    labels = data.labels
    shifted = labels.energy + labels.has_energy * total / np.maximum(data.counts, 1)
    return replace(data, labels=replace(labels, energy=shifted))


def most_neighbors(data: Sequence[Dataset], group: Group, device: torch.device) -> tuple[int, int]:
    """Most neighbours of an atom in all data of all processes."""
    found = [max((int(getattr(d, name).max(initial=0)) for d in data), default=0) for name in ("radial", "angular")]
    tensor = -torch.tensor(found, dtype=torch.float64, device=device)
    group.least(tensor)
    return int(-tensor[0].item()), int(-tensor[1].item())


def find_scaler(stepper: Stepper, data: Dataset, temperature: bool, group: Group) -> NDArray[np.float64]:
    """Scalers by the range of every component over all atoms of the training frames."""
    stepper.q_scaler.fill_(1.0)
    D = len(stepper.q_scaler)
    range_ = torch.full((2, D), torch.inf, dtype=torch.float64, device=stepper.device)
    for arrays, w in pieces(data, np.arange(len(data)), stepper):
        q = stepper.found(arrays, w).descriptors.to(torch.float64)
        if len(q):
            range_[0] = torch.minimum(range_[0], q.amin(dim=0))
            range_[1] = torch.minimum(range_[1], -q.amax(dim=0))
    group.least(range_)
    least, most = range_[0].cpu().numpy(), -range_[1].cpu().numpy()
    return scalers(least, most, temperature)


def solve_offset(stepper: Stepper, data: Dataset, group: Group) -> None:
    """Set the common energy offset to what minimises the energy errors over all training frames."""
    total = torch.zeros(2, dtype=torch.float64, device=stepper.device)
    for arrays, w in pieces(data, np.arange(len(data)), stepper):
        total += stepper.errors(arrays, w, forces=False).offset
    group.add(total)
    if float(total[1]) > 0.0:
        stepper.state.bias += total[0] / total[1]


def pieces(data: Dataset, frames: NDArray[np.int64], stepper: Stepper) -> Iterator[Part]:
    """Frames in pieces of about a batch: memory does not grow with the number of frames."""
    size = max(stepper.settings.batch, 8)
    for start in range(0, len(frames), size):
        for piece in cut(data, frames[start : start + size], stepper):
            arrays = assemble(data, piece)
            yield arrays, widths(arrays, pad=False)


def cut(data: Dataset, frames: NDArray[np.int64], stepper: Stepper) -> list[NDArray[np.int64]]:
    """Frames cut into pieces whose arrays fit the memory together; one frame at least in each."""
    s = stepper.settings
    T, b = len(s.elements), s.l_max * (s.l_max + 2)
    k_r, k_a = s.basis_size[0] + 1, s.basis_size[1] + 1
    n = data.counts[frames]
    if not len(n):
        return []
    w, v = np.maximum(data.widest[frames], 1).T
    numbers = w * (6 * k_r + 2 * T + 20) + v * (6 * T * k_a + 14 * b) + T * k_a * b * 4
    cost = n * numbers * data.vectors.element_size()
    if stepper.device.type == "cuda":
        limit = _GPU_SHARE * torch.cuda.get_device_properties(stepper.device).total_memory
    else:
        limit = _CPU_PIECE
    out, begin_, total = [], 0, 0.0
    for i, c in enumerate(cost.tolist()):
        if i > begin_ and total + c > limit:
            out.append(frames[begin_:i])
            begin_, total = i, 0.0
        total += c
    return [*out, frames[begin_:]]


def label_counts(frames: Frames) -> NDArray[np.float64]:
    """Labels of each frame, (B, 3): energies, three for an atom with forces, six for a virial."""
    counts = frames.structures.counts
    known = np.isfinite(frames.forces).all(axis=1).astype(np.float64)
    forces = np.zeros(len(frames))
    np.add.at(forces, np.repeat(np.arange(len(frames)), counts), known)
    energies = np.isfinite(frames.energy).astype(np.float64)
    virials = np.isfinite(frames.virial).all(axis=(1, 2)).astype(np.float64)
    return np.stack([energies, 3.0 * forces, 6.0 * virials], axis=1)


def _symbols(frames: Frames) -> list[str]:
    return [SYMBOLS[z] for z in np.unique(frames.structures.numbers).tolist()]


def _weights(model: NepFile, settings: Settings) -> tuple[float, ...]:
    if not settings.type_weight:
        return ()
    by_symbol = dict(zip(settings.elements, settings.type_weight, strict=True))
    return tuple(by_symbol.get(symbol, 1.0) for symbol in model.elements)


def _check_labels(frames: Frames, settings: Settings) -> list[str]:
    """Refuse data that nothing can be learned from; says which terms of the loss have no labels.

    Raises:
        TrainingError: No label counts in any stage.
    """
    if not len(frames) or not frames.structures.n_atoms:
        raise TrainingError(f"{frames.path}: there are no frames to train on")
    labels = Labels.of(frames, settings)
    weights = (labels.energy_weight, labels.force_weight, labels.virial_weight)
    present = label_counts(frames).sum(axis=0)
    names = ("energy", "forces", "virial")
    messages = []
    for stage in settings.stages():
        if not stage.epochs:
            continue
        lambdas = (stage.lambda_e, stage.lambda_f, stage.lambda_v)
        used = [float(w.sum()) > 0.0 and lam > 0.0 for w, lam in zip(weights, lambdas, strict=True)]
        if not any(used):
            reasons = [
                f"no {name} labels" if n == 0 else f"{name} weights are all 0" if not w.sum() else f"{name} has λ = 0"
                for name, n, w in zip(names, present, weights, strict=True)
            ]
            raise TrainingError(f"{frames.path}: the loss of stage {stage.number} would be exactly zero: "
                                f"{', '.join(reasons)}")  # fmt: skip
        messages += [
            f"no frame has {name}{'' if name == 'forces' else ' labels'}: that term of the loss is left out"
            for name, n, lam in zip(names, present, lambdas, strict=True)
            if n == 0 and lam > 0.0 and stage.number == 1
        ]
    return messages
