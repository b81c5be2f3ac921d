"""From the data set to the device: which frames make a step, and their arrays in one piece.

The frames are sorted by what they cost and dealt into as many lanes as a batch has places; a batch takes one frame of
each lane. So all batches cost about the same, processes that share the lanes have even shares of each, and the frames
of a batch do not depend on the number of processes.
"""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from nepcore.structures import ragged_arange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray
    from torch import Tensor

    from .dataset import Dataset

THREADS = 2
"""Threads that make arrays for the steps to come: one is slower than a fast device, and half of the work is done under
the interpreter's lock, for which more of them would keep the thread waiting that starts the steps."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The batches of every epoch.

    Attributes:
        lanes: Frames of each lane.
        cost: What a frame of each lane costs on average.
        seed: Of their order.
    """

    lanes: tuple[NDArray[np.int64], ...]
    cost: NDArray[np.float64]
    seed: int
    _dealt: dict[int, list[list[int]]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, work: NDArray[np.float64], batch: int, seed: int) -> Plan:
        """Deal frames of that cost into batches of ``batch`` frames."""
        order = np.argsort(work, kind="stable")
        lanes = tuple(np.array_split(order, min(batch, len(order)))) if len(order) else ()
        return cls(lanes, np.array([work[lane].mean() for lane in lanes]), seed)

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return max((len(lane) for lane in self.lanes), default=0)

    def owned(self, rank: int, size: int) -> NDArray[np.int64]:
        """All frames of a process, ascending."""
        mine = [self.lanes[i] for i in self._lanes_of(rank, size)]
        return np.sort(np.concatenate(mine)) if mine else np.zeros(0, np.int64)

    def _lanes_of(self, rank: int, size: int) -> list[int]:
        """Lanes of a process: dealt by their cost, each to whoever has least so far."""
        if size not in self._dealt:
            load = [0.0] * size
            lanes: list[list[int]] = [[] for _ in range(size)]
            for lane in np.argsort(self.cost, kind="stable")[::-1].tolist():
                owner = load.index(min(load))
                load[owner] += float(self.cost[lane])
                lanes[owner].append(lane)
            self._dealt[size] = [sorted(own) for own in lanes]
        return self._dealt[size][rank]

    def epoch(self, number: int) -> list[NDArray[np.int64]]:
        """Frames of each batch of an epoch, in the order of the lanes; -1 where a lane has none left."""
        generator = np.random.PCG64([self.seed, 2, number])
        columns = np.full((len(self.lanes), self.steps), -1, np.int64)
        for row, lane in zip(columns, self.lanes, strict=True):
            row[: len(lane)] = lane[np.argsort(generator.random_raw(len(lane)), kind="stable")]
        return list(columns.T)

    def share(self, batch: NDArray[np.int64], rank: int, size: int) -> NDArray[np.int64]:
        """Frames of a batch that a process evaluates."""
        mine = batch[self._lanes_of(rank, size)]
        return mine[mine >= 0]


@dataclass(frozen=True, eq=False)
class Arrays:
    """Frames of a batch: B frames, A atoms, P pairs; tensors on the host or on the device.

    The last frame may be one of no weight, to which atoms that only fill up the arrays belong.
    """

    vectors: Tensor  # (P, 3) Å
    neighbors: Tensor  # (P,) int32, counted within the frame
    radial: Tensor  # (A,) int32: pairs of each atom
    angular: Tensor  # (A,) int32: those within the angular cutoff, which come first
    types: Tensor  # (A,) int64
    frame: Tensor  # (A,) int64
    forces: Tensor  # (A, 3)
    force_weight: Tensor  # (A,)
    has_forces: Tensor  # (A,)
    atoms: Tensor  # (B,) float64: atoms of each frame
    temperature: Tensor  # (B,)
    energy: Tensor  # (B,) eV/atom, float64
    energy_weight: Tensor  # (B,) float64
    has_energy: Tensor  # (B,) float64
    offset_weight: Tensor  # (B,) float64
    virial: Tensor  # (B, 6) eV/atom
    virial_weight: Tensor  # (B,)
    has_virial: Tensor  # (B,)
    blob: Tensor  # all of them in one piece, bytes

    @property
    def rows(self) -> tuple[int, int, int]:
        """B, A and P."""
        return len(self.atoms), len(self.types), len(self.vectors)

    def at(self, blob: Tensor) -> Arrays:
        """Arrays of these shapes in another piece of memory, with what stands there."""
        return Arrays(*[*_views(blob, _shapes(self.rows, self.vectors.dtype)), blob])

    def to(self, device: torch.device) -> Arrays:
        """On a device."""
        return self if device.type == "cpu" else self.at(self.blob.to(device, non_blocking=True))


def assemble(data: Dataset, frames: NDArray[np.int64], *, pin: bool = False, pad: bool = False) -> Arrays:
    """Arrays of some frames of a data set.

    Args:
        data: The data set.
        frames: Numbers of its frames.
        pin: Put them into page-locked memory.
        pad: Fill them up to one of a few sizes, so that graphs that were captured fit.
    """
    dtype = data.vectors.dtype
    B = len(frames)
    starts, counts = data.offsets[frames], data.counts[frames]
    A = int(counts.sum())
    first, last = data.first_pair[frames].tolist(), data.first_pair[frames + 1].tolist()
    P = sum(b - a for a, b in zip(first, last, strict=True))
    rows = (B, A, P)
    if pad:
        rows = (B + 1, bucket(A), bucket(P))
    labels = data.labels

    shapes = _shapes(rows, dtype)
    blob = torch.empty(sum(_bytes(shape, kind) for shape, kind in shapes), dtype=torch.uint8, pin_memory=pin)
    views = iter(_views(blob, shapes))

    def new(n: int, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        view = next(views)
        assert view.shape == (n, *shape)
        assert view.dtype == kind
        return view

    def joined(source: Tensor, total: int) -> Tensor:
        out = new(total, tuple(source.shape[1:]), source.dtype)
        if P:
            torch.cat([source[a:b] for a, b in zip(first, last, strict=True)], out=out[:P])
        out[P:] = 0
        return out

    atoms = ragged_arange(starts, counts)

    def of_atoms(source: NDArray[np.generic], kind: torch.dtype) -> Tensor:
        out = new(rows[1], source.shape[1:], kind)
        out[:A] = torch.from_numpy(source[atoms])
        out[A:] = 0
        return out

    def of_frames(source: NDArray[np.float64], kind: torch.dtype, empty: float = 0.0) -> Tensor:
        out = new(rows[0], source.shape[1:], kind)
        out[:B] = torch.from_numpy(source[frames])
        out[B:] = empty
        return out

    def frame_of_atoms() -> Tensor:
        frame = new(rows[1], (), torch.int64)
        frame[:A] = torch.from_numpy(np.repeat(np.arange(B), counts))
        frame[A:] = rows[0] - 1
        return frame

    temperature = np.nan_to_num(data.frames.structures.temperatures)
    return Arrays(
        joined(data.vectors, rows[2]), joined(data.neighbors, rows[2]), of_atoms(data.radial, torch.int32),
        of_atoms(data.angular, torch.int32), of_atoms(data.types, torch.int64), frame_of_atoms(),
        of_atoms(labels.forces, dtype), of_atoms(labels.force_weight, dtype), of_atoms(labels.has_forces, dtype),
        of_frames(np.maximum(data.counts, 1).astype(np.float64), torch.float64, 1.0), of_frames(temperature, dtype),
        of_frames(labels.energy, torch.float64), of_frames(labels.energy_weight, torch.float64),
        of_frames(labels.has_energy, torch.float64), of_frames(labels.offset_weight, torch.float64),
        of_frames(labels.virial, dtype), of_frames(labels.virial_weight, dtype), of_frames(labels.has_virial, dtype),
        blob,
    )  # fmt: skip


_Shapes = list[tuple[tuple[int, ...], torch.dtype]]


def _shapes(rows: tuple[int, int, int], dtype: torch.dtype) -> _Shapes:
    """Shapes of the arrays of B frames, A atoms and P pairs, in the order of the fields."""
    B, A, P = rows
    double, long, short = torch.float64, torch.int64, torch.int32
    return [
        ((P, 3), dtype), ((P,), short), ((A,), short), ((A,), short), ((A,), long), ((A,), long), ((A, 3), dtype),
        ((A,), dtype), ((A,), dtype), ((B,), double), ((B,), dtype), ((B,), double), ((B,), double), ((B,), double),
        ((B,), double), ((B, 6), dtype), ((B,), dtype), ((B,), dtype),
    ]  # fmt: skip


def _bytes(shape: tuple[int, ...], kind: torch.dtype) -> int:
    """Bytes of an array, up to where the next one may begin."""
    return -(-math.prod(shape) * kind.itemsize // 64) * 64


def _views(blob: Tensor, shapes: _Shapes) -> list[Tensor]:
    """Arrays one behind the other in a piece of memory."""
    views, at = [], 0
    for shape, kind in shapes:
        views.append(blob[at : at + math.prod(shape) * kind.itemsize].view(kind).view(shape))
        at += _bytes(shape, kind)
    return views


def bucket(n: int) -> int:
    """A size of at least ``n``: steps of about a thirtieth, none smaller than 16."""
    step = max(16, 1 << max(0, n.bit_length() - 6))
    return max(1, -(-n // step)) * step


def widths(arrays: Arrays, *, pad: bool, most: Sequence[int] = (0, 0)) -> tuple[int, int]:
    """Slots for the neighbours and for the angular neighbours of an atom, at least one; read on the host.

    Args:
        arrays: The batch.
        pad: Round them up.
        most: The same over all data: taken where it is not much more, so that all batches have one size.
    """
    found = []
    for count, limit in zip((arrays.radial, arrays.angular), most, strict=True):
        n = max(1, int(count.max()) if len(count) else 0)
        if pad:
            n, limit = (-(-value // 4) * 4 for value in (n, int(limit)))
            n = limit if n <= limit <= 1.1 * n + 1 else n
        found.append(n)
    return max(found), found[1]


Part = tuple[Arrays, tuple[int, int]]
"""Arrays on the host, and their widths."""


def stream(
    data: Dataset, steps: Iterable[Sequence[NDArray[np.int64]]], *, pin: bool, pad: bool, ahead: int = 3
) -> Iterator[list[Part]]:
    """Arrays of one step after the other, made by threads some steps ahead.

    Args:
        data: The data set.
        steps: The frames of each step, in one or more pieces, or none.
        pin, pad: As of :func:`assemble`.
        ahead: How many steps; 0: no threads.

    Nothing is left running when the iterator is closed.
    """

    most = data.widest.max(axis=0, initial=0).tolist()

    def made(pieces: Sequence[NDArray[np.int64]]) -> list[Part]:
        arrays = [assemble(data, frames, pin=pin, pad=pad) for frames in pieces]
        return [(a, widths(a, pad=pad, most=most)) for a in arrays]

    if ahead < 1:
        for pieces in steps:
            yield made(pieces)
        return
    # One thread copies slower than a fast device computes.
    pool = ThreadPoolExecutor(min(ahead, THREADS), thread_name_prefix="batches")
    waiting: deque[Future[list[Part]]] = deque()
    try:
        for pieces in steps:
            waiting.append(pool.submit(made, pieces))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
