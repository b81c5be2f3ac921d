"""Training frames on the host: neighbours, labels and weights, packed; memory-mapped where they are large.

Whatever depends on positions alone is done once: the neighbours of every atom, and the ZBL repulsion, which is taken
off the labels. Labels that are missing have the weight zero.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np
import torch

from nepcore.batch import Batch
from nepcore.elements import NUMBERS
from nepcore.errors import InputFileError
from nepcore.neighbors import Bins
from nepcore.physics import zbl
from nepcore.potential import DTYPES, NEP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray
    from torch import Tensor

    from nepcore.files.nep_txt import NepFile
    from nepcore.files.xyz import Frames

    from .settings import Settings

IN_MEMORY = 4e9
"""Bytes of neighbours beyond which they go to a file that is mapped into memory."""

SIX = ((0, 1, 2, 0, 1, 2), (0, 1, 2, 1, 2, 0))
"""Rows and columns of the six virial components xx yy zz xy yz zx."""

_SEARCHED = 2_000_000
_NEAREST = 1e-5


@dataclass(frozen=True, eq=False)
class Labels:
    """References and the weights of their squared errors, for B frames of N atoms.

    Attributes:
        energy: eV/atom, (B,) float64, 0 where missing; ``energy_weight`` and ``has_energy`` (0 or 1) alike.
        forces: eV/Å, (N, 3); ``force_weight``, ``has_forces``: (N,).
        virial: eV/atom, xx yy zz xy yz zx, (B, 6); ``virial_weight``, ``has_virial``: (B,).
        offset_weight: Weight of a frame in the mean that the energy offset is, (B,).
    """

    energy: NDArray[np.float64]
    energy_weight: NDArray[np.float64]
    has_energy: NDArray[np.float64]
    offset_weight: NDArray[np.float64]
    forces: NDArray[np.float64]
    force_weight: NDArray[np.float64]
    has_forces: NDArray[np.float64]
    virial: NDArray[np.float64]
    virial_weight: NDArray[np.float64]
    has_virial: NDArray[np.float64]

    @classmethod
    def of(cls, frames: Frames, settings: Settings) -> Labels:
        """Labels of frames; nothing is taken off yet."""
        counts = frames.structures.counts
        n = np.maximum(counts, 1)
        square = frames.weight**2 if settings.weighting == "square" else frames.weight
        has_e = np.isfinite(frames.energy)
        has_f = np.asarray(np.isfinite(frames.forces).all(axis=1))
        has_v = np.asarray(np.isfinite(frames.virial).all(axis=(1, 2)))
        forces = np.where(has_f[:, None], frames.forces, 0.0)
        force_weight = np.repeat(square, counts) * has_f
        if settings.type_weight:
            by_type = np.array(settings.type_weight)
            force_weight = force_weight * by_type[_types(frames, settings.elements)] ** 2
        if settings.force_delta > 0.0:
            size = np.linalg.norm(forces, axis=1)
            force_weight = force_weight * settings.force_delta / (settings.force_delta + size)
        # The lower triangle, as GPUMD takes it.
        six = frames.virial[:, SIX[1], SIX[0]] / n[:, None]
        return cls(
            np.where(has_e, frames.energy, 0.0) / n,
            np.where(has_e, square * frames.energy_weight, 0.0),
            has_e.astype(np.float64),
            np.where(has_e, frames.energy_weight, 0.0),
            forces,
            force_weight,
            has_f.astype(np.float64),
            np.where(has_v[:, None], six, 0.0),
            square * has_v,
            has_v.astype(np.float64),
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """Frames that are ready to be put into batches; the frame numbers of this class count its own frames.

    Attributes:
        frames: The frames.
        labels: Their labels, ZBL taken off.
        types: Type of each atom, (N,) int64.
        radial, angular: Neighbours of each atom within its cutoffs, (N,) int64.
        first_pair: First pair of each frame, and last, the number of pairs, (B + 1,) int64.
        vectors: r_j − r_i, Å, (P, 3) in the dtype of the training; the pairs of an atom stand together, those within
            its angular cutoff first.
        neighbors: j, counted within the frame, (P,) int32.
        work: What a frame costs, about, (B,): atoms and pairs.
    """

    frames: Frames
    labels: Labels
    types: NDArray[np.int64]
    radial: NDArray[np.int64]
    angular: NDArray[np.int64]
    first_pair: NDArray[np.int64]
    vectors: Tensor
    neighbors: Tensor

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Atoms of each frame, (B,)."""
        return self.frames.structures.counts

    @property
    def offsets(self) -> NDArray[np.int64]:
        """First atom of each frame, and last, N, (B + 1,)."""
        return self.frames.structures.offsets

    @classmethod
    def of(cls, frames: Frames, model: NepFile, settings: Settings, in_memory: float = IN_MEMORY) -> Dataset:
        """Find the neighbours of all frames.

        Args:
            frames: The frames.
            model: Elements, cutoffs and ZBL.
            settings: Weights and dtype.
            in_memory: Bytes of neighbours that are kept in memory; more go to a file that is mapped.

        Raises:
            InputFileError: A frame cannot be computed with; names file, frame and line.
        """
        check(frames, model)
        labels = Labels.of(frames, settings)
        nep = NEP(model, torch.float64)
        dtype = DTYPES[settings.dtype]
        vectors = _Spool(dtype, (3,), in_memory)
        neighbors = _Spool(torch.int32, (), in_memory)
        structures = frames.structures
        types = model.admission.types[structures.numbers]
        N = structures.n_atoms
        radial, angular = np.zeros(N, np.int64), np.zeros(N, np.int64)
        repulsion = _Repulsion(frames)
        for start, stop in _groups(structures.counts):
            part = structures.slice(start, stop)
            batch = Batch.of(part, model.admission.types, torch.device("cpu"))
            base = int(structures.offsets[start])
            for pairs in Bins.of(batch, nep.max_cutoff).pairs(_SEARCHED):
                i, j, r = pairs.start + pairs.i, pairs.j, pairs.distance
                ti, tj = batch.types[i], batch.types[j]
                near = r < nep.cutoff_angular[ti, tj]
                kept = torch.nonzero(r < nep.cutoff_radial[ti, tj]).squeeze(1)
                # Centres stay in order; of each, the angular neighbours come first.
                order = kept[torch.sort(2 * i[kept] + (~near[kept]).to(torch.int64), stable=True).indices]
                i, j, near = i[order], j[order], near[order]
                vector = pairs.vector[order]
                if len(order) and float(r[order].min()) < _NEAREST:
                    worst = int(torch.argmin(r[order]))
                    _coincident(frames, start + int(batch.structure[i[worst]]), base, int(i[worst]), int(j[worst]))
                vectors.add(vector.to(dtype))
                neighbors.add((j - torch.from_numpy(batch.offsets)[batch.structure[i]]).to(torch.int32))
                rows = slice(base + pairs.start, base + pairs.stop)
                n = pairs.stop - pairs.start
                radial[rows] = np.bincount(i.numpy() - pairs.start, minlength=n)
                angular[rows] = np.bincount(i[near].numpy() - pairs.start, minlength=n)
                if nep.has_zbl:
                    repulsion.add(nep, batch, start, base, i[near], j[near], vector[near], r[order][near])
        first = np.concatenate([[0], np.cumsum(radial)])[structures.offsets]
        return cls(
            frames, repulsion.taken_off(labels), types, radial, angular, first.astype(np.int64), vectors.finish(),
            neighbors.finish(),
        )  # fmt: skip

    @property
    def work(self) -> NDArray[np.float64]:
        """What each frame costs, about, (B,): pairs, and atoms at the price of some pairs."""
        return np.diff(self.first_pair) + 20.0 * self.counts

    @cached_property
    def widest(self) -> NDArray[np.int64]:
        """Most neighbours of an atom of each frame within the radial and the angular cutoff, (B, 2)."""
        found = np.zeros((len(self), 2), np.int64)
        some = self.counts > 0
        for column, neighbors in enumerate((self.radial, self.angular)):
            if some.any():
                found[some, column] = np.maximum.reduceat(neighbors, self.offsets[:-1][some])
        return found

    def name(self, frame: int) -> str:
        """File and number of a frame, for messages."""
        return f"{self.frames.path}, frame {int(self.frames.indices[frame]) + 1}"


def check(frames: Frames, model: NepFile) -> None:
    """Refuse frames that the model cannot compute.

    Raises:
        InputFileError: Naming file, frame and line of the first one.
    """
    for index in sorted(frames.errors):
        raise frames.errors[index]
    problems = model.admission.problems(frames.structures)
    for index in sorted(problems):
        line = int(frames.lines[index])
        raise InputFileError(frames.path, int(frames.indices[index]), line, problems[index].reason)


def split(frames: Frames, ratio: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the frames to train and to validate on, each ascending; the same for the same seed everywhere."""
    order = np.argsort(np.random.PCG64([seed, 1]).random_raw(len(frames)), kind="stable")
    n = round(ratio * len(frames))
    if ratio > 0.0 and len(frames) > 1:
        n = min(max(n, 1), len(frames) - 1)
    return np.sort(order[n:]), np.sort(order[:n])


def element_offsets(frames: Frames, elements: Sequence[str]) -> NDArray[np.float64]:
    """Energy of an atom of each element, eV, (T,), by least squares over all frames with an energy.

    Where the compositions do not tell the elements apart, the offsets nearest to the mean are taken.
    """
    known = np.isfinite(frames.energy) & (frames.structures.counts > 0)
    if not known.any():
        return np.zeros(len(elements))
    types = _types(frames, elements)
    counts = frames.structures.counts
    system = np.repeat(np.arange(len(frames)), counts)
    share = np.zeros((len(frames), len(elements)))
    np.add.at(share, (system, types), 1.0)
    share = share[known] / counts[known, None]
    energy = frames.energy[known] / counts[known]
    mean = energy.mean()
    found = np.linalg.lstsq(share, energy - mean, rcond=1e-6)[0]
    return mean + found


def fingerprint(frames: Frames) -> str:
    """A number that changes with any structure, label or weight, and with the order of the frames."""
    digest = hashlib.sha256()
    s = frames.structures
    for array in (s.counts, s.numbers, s.positions, s.cells, s.pbc, frames.energy, frames.forces, frames.virial,
                  frames.weight, frames.energy_weight):  # fmt: skip
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def chosen(frames: Frames, indices: ArrayLike) -> Frames:
    """Some frames, without copying where all are wanted."""
    rows = np.asarray(indices, np.int64)
    return frames if len(rows) == len(frames) and (rows == np.arange(len(rows))).all() else frames.select(rows)


def _types(frames: Frames, elements: Sequence[str]) -> NDArray[np.int64]:
    table = np.full(256, -1, np.int64)
    table[[NUMBERS[symbol] for symbol in elements]] = np.arange(len(elements))
    return table[frames.structures.numbers]


def _groups(counts: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Runs of frames of some thousand atoms."""
    groups, start, total = [], 0, 0
    for i, n in enumerate(counts.tolist()):
        if i > start and total + n > 20_000:
            groups.append((start, i))
            start, total = i, 0
        total += n
    return [*groups, (start, len(counts))] if len(counts) else []


def _coincident(frames: Frames, frame: int, base: int, i: int, j: int) -> None:
    first = int(frames.structures.offsets[frame]) - base
    a, b = sorted((i - first, j - first))
    whose = f"atoms {a + 1} and {b + 1} coincide" if a != b else f"atom {a + 1} coincides with its own image"
    reason = f"positions: {whose} (closer than {_NEAREST:g} Å)"
    raise InputFileError(frames.path, int(frames.indices[frame]), int(frames.lines[frame]), reason)


class _Spool:
    """Collects rows, in memory up to a size, from there on in a file."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], in_memory: float) -> None:
        self._dtype, self._shape, self._limit = dtype, shape, in_memory
        self._parts: list[Tensor] = []
        self._bytes = 0
        self._rows = 0
        self._file: BinaryIO | None = None

    def add(self, rows: Tensor) -> None:
        self._rows += len(rows)
        self._bytes += rows.numel() * rows.element_size()
        self._parts.append(rows)
        if self._bytes > self._limit:
            if self._file is None:
                # Without a name: it is gone when the process ends, however it ends.
                self._file = cast("BinaryIO", tempfile.TemporaryFile(prefix="nep-training-"))  # noqa: SIM115
            for part in self._parts:
                part.contiguous().numpy().tofile(self._file)
            self._parts = []

    def finish(self) -> Tensor:
        shape = (self._rows, *self._shape)
        if self._file is None:
            parts = self._parts
            self._parts = []
            return torch.cat(parts).reshape(shape) if parts else torch.zeros(shape, dtype=self._dtype)
        for part in self._parts:
            part.contiguous().numpy().tofile(self._file)
        self._file.flush()
        numpy_dtype = torch.zeros(0, dtype=self._dtype).numpy().dtype
        # Copy on write: torch asks for arrays that could be written to, and nobody does.
        return torch.from_numpy(np.memmap(self._file, numpy_dtype, "c", shape=shape))


class _Repulsion:
    """Energies, forces and virials of the ZBL pairs."""

    def __init__(self, frames: Frames) -> None:
        self.counts = frames.structures.counts
        self.energy = np.zeros(len(frames))
        self.forces = np.zeros((frames.structures.n_atoms, 3))
        self.virial = np.zeros((len(frames), 3, 3))

    def add(
        self, nep: NEP, batch: Batch, start: int, base: int, i: Tensor, j: Tensor, vector: Tensor, r: Tensor
    ) -> None:
        ti, tj = batch.types[i], batch.types[j]
        close = torch.nonzero(r < nep.zbl_outer[ti, tj]).squeeze(1)
        if not len(close):
            return
        i, j, r, vector, ti, tj = i[close], j[close], r[close], vector[close], ti[close], tj[close]
        terms = nep.zbl_terms[ti, tj]
        energy, slope = zbl.pair_energy(
            r, nep.zbl_charge[ti, tj], nep.zbl_rate[ti, tj], nep.zbl_inner[ti, tj], nep.zbl_outer[ti, tj],
            [(terms[:, m, 0], terms[:, m, 1]) for m in range(4)],
        )  # fmt: skip
        g = ((0.5 * slope / r)[:, None] * vector).numpy()
        frame = start + batch.structure[i].numpy()
        np.add.at(self.energy, frame, 0.5 * energy.numpy())
        np.add.at(self.forces, base + i.numpy(), g)
        np.add.at(self.forces, base + j.numpy(), -g)
        np.add.at(self.virial, frame, -vector.numpy()[:, :, None] * g[:, None, :])

    def taken_off(self, labels: Labels) -> Labels:
        n = np.maximum(self.counts, 1)
        return replace(
            labels,
            energy=labels.energy - labels.has_energy * self.energy / n,
            forces=labels.forces - labels.has_forces[:, None] * self.forces,
            virial=labels.virial - labels.has_virial[:, None] * self.virial[:, SIX[0], SIX[1]] / n[:, None],
        )
