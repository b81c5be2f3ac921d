"""Batches of small structures: one block of bytes in, a chain of kernels, one block of bytes out.

All buffers of a size are made once and stay where they are, so that the chain can be captured and replayed as one
graph, copies included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from . import cells, search, totals
from .forward import RADIAL, REVERSE, forward, hasty, scratch
from .lists import Lists, Outputs

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from nepcore.structures import Structures

    from .branches import Branches
    from .lists import Tables


class Size(NamedTuple):
    """What the buffers of a batch are made for."""

    atoms: int
    structures: int
    radial: int  # neighbours of an atom
    angular: int
    virials: bool
    descriptors: bool
    many: bool = False  # structures of many atoms


class Blocks(NamedTuple):
    """Shapes of the programs; results do not depend on them. The interpreter likes them large."""

    atoms: int = 16  # lanes that place atoms
    mates: int = 256  # atoms that each is compared with
    centres: int = 1  # atoms a program of the search
    others: int = 64
    centres_alone: int = 1  # the same where structures are larger than MANY
    others_alone: int = 256
    pairs: int = 16  # pairs whose reverse is looked for at a time
    slots: int = 16  # slots that are looked at
    sums: int = 128
    warps: int = 2
    words: int = 512  # of a copy


INTERPRETED = Blocks(64, 64, 64, 64, 64, 64, 64, 64, 64, words=4096)

REACHED = 1 << 16
"""Bytes up to which kernels read and write the host's memory themselves, each way: a copy takes longer to begin."""

MANY = 256
"""Atoms beyond which a program of the search takes few atoms and many others at a time."""


def _part(fields: dict[str, tuple[tuple[int, ...], torch.dtype]], buffer: Tensor) -> dict[str, Tensor]:
    """Views of a buffer of bytes, end to end."""
    views, at = {}, 0
    for name, (shape, dtype) in fields.items():
        size = math.prod(shape) * dtype.itemsize
        views[name] = buffer[at : at + size].view(dtype).view(shape)
        at += -(-size // 16) * 16
    return views


def _bytes(fields: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(-(-math.prod(shape) * dtype.itemsize // 16) * 16 for shape, dtype in fields.values())


def inputs(size: Size) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What goes to the device."""
    n, s = size.atoms, size.structures
    return {
        "positions": ((n, 3), torch.float64), "cells": ((s, 9), torch.float64), "structure": ((n,), torch.int32),
        "temperatures": ((s,), torch.float32), "offsets": ((s + 1,), torch.int32), "pbc": ((s,), torch.int32),
        "numbers": ((n,), torch.uint8),
    }  # fmt: skip


_FORCES = 5
"""Where the forces stand among the outputs."""


def outputs(size: Size, dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What comes back."""
    n, s = size.atoms, size.structures
    fields = {
        "total": ((s,), torch.float64), "virial": ((s, 9), torch.float64), "energy": ((n,), torch.float64),
        "state": ((s,), torch.int32), "most": ((4,), torch.int32), "forces": ((n, 3), torch.float32),
    }  # fmt: skip
    assert len(fields) == _FORCES + 1
    if size.virials:
        fields["virials"] = ((n, 9), torch.float32)
    if size.descriptors:
        fields["descriptors"] = ((n, dim), torch.float32)
    return fields


@dataclass(eq=False)
class Slot:
    """Buffers of one size, on the host and on the device, and the chain of kernels between them.

    Args:
        tables: The model's tensors.
        size: Capacities.
        blocks: Shapes of the programs.
        branches: Streams beside the current one.
    """

    tables: Tables
    size: Size
    blocks: Blocks
    branches: Branches

    def __post_init__(self) -> None:
        device = self.tables.place.device
        model = self.tables.model
        size = self.size
        pinned = device.type == "cuda"
        fields_in, fields_out = inputs(size), outputs(size, model.dim)

        def both(fields: dict[str, Any]) -> tuple[Tensor, Tensor]:
            count = _bytes(fields)
            return torch.zeros(count, dtype=torch.uint8, pin_memory=pinned), torch.zeros(
                count, dtype=torch.uint8, device=device
            )

        self._host_in, self._device_in = both(fields_in)
        self._host_out, self._device_out = both(fields_out)
        self.host_in = {name: view.numpy() for name, view in _part(fields_in, self._host_in).items()}
        self.host_out = {name: view.numpy() for name, view in _part(fields_out, self._host_out).items()}
        self._in = _part(fields_in, self._device_in)
        self._out = _part(fields_out, self._device_out)
        self._reached = max(len(self._host_in), len(self._host_out)) <= REACHED
        self._near_in = _part(fields_in, self._host_in) if self._reached else self._in
        self._near_forces = _part(fields_out, self._host_out)["forces"] if self._reached else None
        self._before_forces = _bytes({name: fields_out[name] for name in list(fields_out)[:_FORCES]})
        n, s, mr, ma = size.atoms, size.structures, size.radial, size.angular

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._frames = empty(s, cells.FRAME, dtype=torch.float64)
        self._spans = empty(s, cells.SPAN)
        self._order = empty(n)
        self.lists = Lists(
            True, empty(n, 4), self._in["structure"], empty(s, 9, dtype=torch.float32), empty(s, 3),
            self._in["temperatures"], empty(n, mr), empty(n), empty(n, mr), empty(n, ma), empty(n), empty(n, ma),
            empty(n, ma),
        )  # fmt: skip
        self.outputs = Outputs(
            self._out["energy"], self._out["forces"], self._out.get("virials"), self._out.get("descriptors")
        )
        wanted = scratch(model, n, mr, ma, virials=size.virials, descriptors=size.descriptors)
        self._scratch = {name: empty(*shape, dtype=dtype) for name, (shape, dtype) in wanted.items()}
        self._tiles = hasty(model.shape) if pinned else None
        self.done = torch.cuda.Event() if pinned else None
        self.graph: Any = None
        self.uses = 0

    @property
    def bytes(self) -> int:
        """Memory on the device."""
        tensors = [self._device_in, self._device_out, *self._scratch.values(), *self.lists[1:]]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))

    def fill(self, structures: Structures) -> None:
        """Write a block of structures into the buffers on the host."""
        host, N, S = self.host_in, structures.n_atoms, len(structures)
        host["positions"][:N] = structures.positions
        host["numbers"][:N] = structures.numbers
        host["cells"][:S] = structures.cells.reshape(S, 9)
        host["offsets"][: S + 1] = structures.offsets
        host["offsets"][S + 1 :] = N
        host["pbc"][:S] = structures.pbc @ _BITS if S > 1 else _code(structures.pbc)
        host["temperatures"][:S] = structures.temperatures
        if S > 1:
            host["structure"][:N] = np.repeat(_numbers(S), structures.counts)
        else:
            host["structure"][:N] = 0

    def launch(self) -> None:
        """Send the chain to the device; :meth:`wait` before reading."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self._chain()
        if self.done is not None:
            self.done.record()

    def wait(self) -> None:
        """Wait until the results are on the host."""
        if self.done is not None:
            self.done.synchronize()

    def capture(self, pool: Any) -> None:
        """Capture the chain as a graph; it must have run once."""
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._chain()
        self.graph = graph

    def _chain(self) -> None:
        given, near, out, lists, size, blocks = self._in, self._near_in, self._out, self.lists, self.size, self.blocks
        model, place, cutoff_radial, cutoff_angular = self.tables
        branches, n, s = self.branches, size.atoms, size.structures
        if self._reached:
            with branches.aside(REVERSE):
                self._copy(self._host_in, self._device_in)
        else:
            self._device_in.copy_(self._host_in, non_blocking=True)
        cells.prepare_cells[(s,)](
            near["cells"], near["pbc"], near["positions"], near["offsets"], self._frames, lists.cells, lists.units,
            self._spans, out["state"], out["most"], cutoff_radial, cells.COARSEST,
            cells.MOST_CANDIDATES, cells.ELSEWHERE, cells.FRAME, cells.SPAN, blocks.sums, num_warps=1,
        )  # fmt: skip
        if self._reached:
            branches.join(REVERSE)
        many = model.elements > 1
        cells.place_atoms[(-(-n // blocks.atoms),)](
            given["positions"], given["numbers"], place, given["structure"], given["offsets"], given["pbc"],
            self._frames, lists.rows, self._order, s, many, cells.FRAME, blocks.atoms, blocks.mates, num_warps=4,
        )  # fmt: skip
        centres, others = (blocks.centres_alone, blocks.others_alone) if size.many else (blocks.centres, blocks.others)
        search.find_neighbors[(-(-n // centres),)](
            lists.rows, self._order, lists.structure, given["offsets"], lists.cells, lists.units, self._spans,
            out["state"], out["most"], lists.radial_index, lists.radial_image, lists.radial_count, lists.angular_index,
            lists.angular_image, lists.angular_count, s, size.radial, size.angular, cutoff_radial**2,
            cutoff_angular**2, many, cells.SPAN, search.COINCIDENT, search.SAME_PLACE**2,
            centres, others, num_warps=blocks.warps,
        )  # fmt: skip
        with branches.aside(REVERSE):
            search.find_reverse[(-(-n // blocks.centres),)](
                lists.angular_index, lists.angular_image, lists.angular_count, lists.angular_reverse, n, size.angular,
                True, blocks.centres, blocks.pairs, blocks.slots, num_warps=blocks.warps,
            )  # fmt: skip
        forces_alone = self._reached and not (size.virials or size.descriptors)
        forward(
            model, lists, self.outputs, self._scratch, self._tiles, branches,
            self._near_forces if forces_alone else None,
        )  # fmt: skip
        # Energies are ready before forces; virials are not.
        with branches.aside(RADIAL, again=not size.virials):
            totals.sum_structures[(s,)](
                out["energy"], out.get("virials", out["forces"]), given["offsets"], out["total"], out["virial"],
                size.virials, blocks.sums, num_warps=4,
            )  # fmt: skip
            if forces_alone:
                self._copy(self._device_out[: self._before_forces], self._host_out)
        branches.join(RADIAL, REVERSE)
        if forces_alone:
            return
        if self._reached:
            self._copy(self._device_out, self._host_out)
        else:
            self._host_out.copy_(self._device_out, non_blocking=True)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """Copy bytes by a kernel."""
        words = len(source) // 4
        totals.copy_words[(-(-words // self.blocks.words),)](
            source.view(torch.int32), target.view(torch.int32), words, self.blocks.words, num_warps=4
        )


_BITS = np.array([1, 2, 4], np.int32)


def _code(pbc: NDArray[np.bool_]) -> int:
    a, b, c = pbc[0].tolist()
    return int(a) + 2 * int(b) + 4 * int(c)


_COUNT = np.arange(1024, dtype=np.int32)


def _numbers(count: int) -> NDArray[np.int32]:
    return _COUNT[:count] if count <= len(_COUNT) else np.arange(count, dtype=np.int32)
