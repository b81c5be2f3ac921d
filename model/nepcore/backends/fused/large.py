"""One large structure at a time: its list with a skin outlives the call, and a step along a trajectory reuses it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nepcore.batch import compact_cells, complete_cells

from . import cells, search, skin, totals
from .forward import REVERSE, forward, scratch
from .lists import Lists, Outputs

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from nepcore.structures import Structures

    from .branches import Branches
    from .lists import Tables

SKIN = 1.0
"""Å by which the list reaches beyond the cutoff; it is made anew when an atom has moved half of it."""

MOST_ATOMS = 1 << 24
"""Atoms of a structure: their numbers have 24 bits in the keys that neighbours are sorted by."""

LONGEST = 4096.0
"""Longest cell vector, Å: 2^32 steps resolve 1e-6 Å of it."""

MOST_NEIGHBORS = 30_000
"""Neighbours within cutoff and skin: two counts of them share a number of 32 bits."""

_CAPTURE_AFTER = 2
"""Steps with the same list after which its chain of kernels is captured."""


class Wanted(NamedTuple):
    """What a step has to fill beside energies and forces."""

    virials: bool
    descriptors: bool


class Blocks(NamedTuple):
    """Shapes of the programs; results do not depend on them."""

    atoms: int = 256
    candidates: int = 64
    sorted: int = 32
    compared: int = 64
    centres: int = 4
    slots: int = 32
    pairs: int = 16
    sums: int = 1024  # results do depend on this one: it is the length of a block of float64 sums


INTERPRETED = Blocks(512, 256, 128, 128, 128, 128, 64)


class Box(NamedTuple):
    """The cell of a structure, completed and widened where it is not periodic."""

    frame: NDArray[np.float64]  # (16,), see cells.FRAME
    scaled: NDArray[np.float32]  # (9,)
    heights: NDArray[np.float64]  # (3,)

    def same(self, other: Box | None) -> bool:
        """Whether positions are rounded in the same way in both."""
        return other is not None and np.array_equal(self.frame, other.frame)


def box_of(structures: Structures, reach: float) -> Box | None:
    """Box of the only structure; None where images of one atom would be in reach together, or steps too coarse.

    Where it is not periodic, its length is a power of two, so that it seldom changes along a trajectory.
    """
    pbc = structures.pbc
    cell = complete_cells(compact_cells(structures.cells, pbc), pbc)[0]
    if not pbc.all():
        along = structures.positions @ cell.T  # the completed vectors are unit vectors, orthogonal to all others
        for k in np.flatnonzero(~pbc[0]).tolist():
            low, high = float(along[:, k].min()), float(along[:, k].max())
            cell[k] *= 2.0 ** math.ceil(math.log2(2.0 * (high - low + reach)))
    inverse = np.linalg.inv(cell)
    heights = 1.0 / np.linalg.norm(inverse, axis=0)
    if (heights[pbc[0]] <= 2.0 * reach).any() or np.linalg.norm(cell, axis=1).max() > LONGEST:
        return None
    frame = np.zeros(cells.FRAME)
    frame[:9] = inverse.T.reshape(-1)
    frame[12:15] = 2.0**32
    return Box(frame, (cell / 2.0**32).astype(np.float32).reshape(-1), heights)


def bytes_of(tables: Tables, expected: float) -> float:
    """Memory on the device that an atom takes, with so many neighbours within the radial cutoff, and virials wanted."""
    radial, angular = tables.cutoff_radial, tables.cutoff_angular
    density = 1.1 * expected / radial**3
    mr, ma = (int(density * (cutoff + SKIN) ** 3) + 16 for cutoff in (radial, angular))
    arrays = scratch(tables.model, 1, mr, ma, virials=True).values()
    return 250.0 + 8 * mr + 8 * ma + sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays)


class Large:
    """A structure on the device, with the list of its neighbours.

    Args:
        tables: The model's tensors.
        structures: A block of one structure: the atoms and the cell; see :meth:`follows`.
        blocks: Shapes of the programs.
        branches: Streams beside the current one.

    Attributes:
        positions: Å, (N, 3) float64, on the device; to be written before :meth:`update`.
        forces: eV/Å, (N, 3) float32, in the caller's order; likewise energies (N,) and, where wanted, virials (N, 9)
            and descriptors (N, D).
        total: (16,) float64: the virial's nine components, the energy.
        box: What the list was made in.
        rebuilds: How often the list was made.
    """

    def __init__(self, tables: Tables, structures: Structures, blocks: Blocks, branches: Branches) -> None:
        self.tables, self.model, self.blocks, self._branches = tables, tables.model, blocks, branches
        self.device = tables.place.device
        self.numbers = structures.numbers.copy()
        self.pbc, self.cell = structures.pbc.copy(), structures.cells.copy()
        self.temperature = float(structures.temperatures[0])
        self.n = structures.n_atoms
        self._padded = -(-self.n // 64) * 64
        self.rebuilds = 0
        self.box: Box | None = None
        self.graphs: dict[Wanted, Any] = {}
        self._runs: dict[Wanted, int] = {}
        n, device = self.n, self.device

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._empty = empty
        self.positions = empty(n, 3, dtype=torch.float64)
        self.element = tables.place[torch.from_numpy(self.numbers.astype(np.int64)).to(device)].to(torch.int32)
        self.forces = empty(n, 3, dtype=torch.float32)
        self.energies = empty(n, dtype=torch.float64)
        self.virials: Tensor | None = None
        self.descriptors: Tensor | None = None
        self.total = empty(16, dtype=torch.float64)
        self.state = empty(1)
        self._partial = empty(-(-n // blocks.sums), 16, dtype=torch.float64)
        self._moved = empty(1)
        self._staged: Tensor | None = None
        self._frame = empty(cells.FRAME, dtype=torch.float64)
        self._scaled = empty(1, 9, dtype=torch.float32)
        self._order = torch.arange(n, dtype=torch.int32, device=device)
        self._place = self._order.clone()
        self._reference = empty(self._padded, 4)
        self._rows = empty(self._padded, 4)
        self._skin_count = empty(n)
        self._skin_index = empty(0, 0)
        self._lists: Lists | None = None
        self._capacity = (0, 0)
        self._outputs: dict[Wanted, tuple[Outputs, dict[str, Tensor]]] = {}

    def follows(self, structures: Structures) -> bool:
        """Whether a block of one structure is another state of this one: same atoms, same cell."""
        same_heat = self.temperature == float(structures.temperatures[0]) or math.isnan(self.temperature)
        return (
            len(structures) == 1
            and structures.n_atoms == self.n
            and same_heat
            and np.array_equal(structures.cells, self.cell)
            and np.array_equal(structures.pbc, self.pbc)
            and np.array_equal(structures.numbers, self.numbers)
        )

    @property
    def bytes(self) -> int:
        """Memory on the device."""
        tensors = [self.positions, self.element, self.forces, self.energies, self._rows, self._reference,
                   self._skin_index, self._order, self._place, self._skin_count]  # fmt: skip
        if self._lists is not None:
            tensors += [t for t in self._lists[1:] if isinstance(t, torch.Tensor)]
        for outputs, scratched in self._outputs.values():
            tensors += [*(t for t in outputs if t is not None), *scratched.values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    def put(self, positions: NDArray[np.float64]) -> None:
        """Send positions to the device."""
        if self._staged is None:
            self._staged = torch.empty(self.n, 3, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        if positions.flags.writeable:
            self._staged.copy_(torch.from_numpy(positions))  # by several threads
        else:
            np.copyto(self._staged.numpy(), positions)
        self.positions.copy_(self._staged, non_blocking=True)

    def get(self, rows: dict[str, NDArray[np.float32]]) -> tuple[NDArray[np.float64], bool]:
        """Wait for the results and read them.

        Args:
            rows: Arrays to fill, by the names of properties of atoms.

        Returns:
            The virial's components and the energy, (16,), and whether all is well: False if atoms coincide.
        """
        for name, target in rows.items():
            source = getattr(self, name)
            torch.from_numpy(target).copy_(source.view(target.shape), non_blocking=True)
        total = self.total.cpu().numpy()
        well = int(self.state.item()) == 0  # waits for all copies before it, too
        return total, well

    def update(self, box: Box | None = None) -> bool:
        """Bring rows and list up to the positions; waits for the device.

        Args:
            box: Where the list has to be made whatever the atoms did.

        Returns:
            Whether there is a list: False if an atom moved too far for the one there is, so that a box is needed; or,
            with a box, if atoms have more than MOST_NEIGHBORS.
        """
        if box is not None:
            return self._build(box)
        self._moved.zero_()
        self._refresh(self._order, self._rows, check=True)
        return not bool(self._moved.item())

    def compute(self, wanted: Wanted) -> None:
        """Fill the results; does not wait for the device."""
        graph = self.graphs.get(wanted)
        if graph is not None:
            graph.replay()
            return
        self._prepare(wanted)
        runs = self._runs[wanted] = self._runs.get(wanted, 0) + 1
        if self.device.type != "cuda" or runs <= _CAPTURE_AFTER:
            self._chain(wanted)
            return
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._chain(wanted)
        self.graphs[wanted] = graph
        graph.replay()

    def _refresh(self, order: Tensor, rows: Tensor, *, check: bool) -> None:
        skin.refresh[(-(-self.n // self.blocks.atoms),)](
            self.positions, order, self.element, self._frame, self._scaled, self._reference, rows, self._moved, self.n,
            (0.5 * SKIN) ** 2, check, self.blocks.atoms, num_warps=4,
        )  # fmt: skip

    def _build(self, box: Box) -> bool:
        """Sort the atoms into bins and make the list with the skin."""
        n, device, tables = self.n, self.device, self.tables
        self.rebuilds += 1
        self.box = box
        self._frame.copy_(torch.from_numpy(box.frame))
        self._scaled.copy_(torch.from_numpy(box.scaled).view(1, 9))
        reach = tables.cutoff_radial + SKIN
        bins = _bins(box.heights, reach, n)
        self._refresh(torch.arange(n, dtype=torch.int32, device=device), self._rows, check=False)
        number = torch.zeros(n, dtype=torch.int64, device=device)
        for k in range(3):
            steps = self._rows[:n, k].to(torch.int64) & 0xFFFFFFFF
            number = number * bins[k] + ((steps * bins[k]) >> 32)
        number, order = torch.sort(number, stable=True)
        self._order.copy_(order)
        self._place.scatter_(0, order, torch.arange(n, dtype=torch.int32, device=device))
        edges = torch.arange(math.prod(bins) + 1, device=device)
        bounds = torch.searchsorted(number, edges, out_int32=True)
        self._refresh(self._order, self._rows, check=False)
        self._reference.copy_(self._rows)

        count_a = torch.empty_like(self._skin_count)
        wide = [int(b > 2) for b in bins]
        while True:
            radial = self._capacity[0]
            keys = self._lists.radial_index if self._lists is not None else self._empty(n, 0)
            skin.find_within_skin[(n,)](
                self._rows, self._order, bounds, self._scaled, keys, self._skin_count, count_a, radial, *bins,
                *wide, reach**2, (tables.cutoff_angular + SKIN) ** 2, self.blocks.candidates, num_warps=1,
            )  # fmt: skip
            most = torch.stack([self._skin_count.max(), count_a.max()]).tolist()
            if most[0] <= radial and most[1] <= self._capacity[1]:
                break
            if most[0] > MOST_NEIGHBORS:
                return False
            self._make_room(most[0], most[1])
        skin.sort_row[(n,)](
            keys, self._place, self._skin_count, self._skin_index, radial, self.blocks.sorted, self.blocks.compared,
            num_warps=1,
        )  # fmt: skip
        return True

    def _make_room(self, radial: int, angular: int) -> None:
        """Buffers for so many neighbours within cutoff and skin, and some more."""
        mr, ma = (max(16, -(-(most + most // 16) // 16) * 16) for most in (radial, angular))
        mr, ma = max(mr, self._capacity[0]), max(ma, self._capacity[1])
        self._capacity = (mr, ma)
        self.graphs.clear()
        self._runs.clear()
        self._outputs.clear()
        self._lists = None
        empty, n = self._empty, self._padded
        self._skin_index = empty(n, mr)
        heat = torch.full((1,), self.temperature, dtype=torch.float32, device=self.device)
        self._lists = Lists(
            False, self._rows, empty(n), self._scaled, empty(1, 3), heat, empty(n, mr), empty(n), None, empty(n, ma),
            empty(n), None, empty(n, ma),
        )  # fmt: skip

    def _prepare(self, wanted: Wanted) -> None:
        if wanted in self._outputs:
            return
        n, padded, dim = self.n, self._padded, self.model.dim
        mr, ma = self._capacity
        shapes = scratch(self.model, padded, mr, ma, virials=wanted.virials, descriptors=wanted.descriptors)
        single = torch.float32
        outputs = Outputs(
            self._empty(padded, dtype=torch.float64), self._empty(padded, 3, dtype=single),
            self._empty(padded, 9, dtype=single) if wanted.virials else None,
            self._empty(padded, dim, dtype=single) if wanted.descriptors else None,
        )  # fmt: skip
        if wanted.virials and self.virials is None:
            self.virials = self._empty(n, 9, dtype=single)
        if wanted.descriptors and self.descriptors is None:
            self.descriptors = self._empty(n, dim, dtype=single)
        self._outputs[wanted] = (
            outputs, {name: self._empty(*shape, dtype=dtype) for name, (shape, dtype) in shapes.items()},
        )  # fmt: skip

    def _chain(self, wanted: Wanted) -> None:
        n, blocks, model, lists = self.n, self.blocks, self.model, self._lists
        assert lists is not None
        outputs, scratched = self._outputs[wanted]
        mr, ma = self._capacity
        self.state.zero_()
        skin.pick_in_range[(-(-n // blocks.centres),)](
            lists.rows, lists.cells, self._skin_index, self._skin_count, lists.radial_index, lists.radial_count,
            lists.angular_index, lists.angular_count, self.state, n, mr, mr, ma, self.tables.cutoff_radial**2,
            self.tables.cutoff_angular**2, search.COINCIDENT, search.SAME_PLACE**2, blocks.centres, blocks.slots,
            num_warps=4,
        )  # fmt: skip
        branches = self._branches
        with branches.aside(REVERSE):
            search.find_reverse[(-(-n // blocks.centres),)](
                lists.angular_index, lists.angular_index, lists.angular_count, lists.angular_reverse, n, ma, False,
                blocks.centres, blocks.pairs, blocks.pairs, num_warps=4,
            )  # fmt: skip
        forward(model, lists, outputs, scratched, None, branches)
        branches.join(REVERSE)
        for source, target, width in (
            (outputs.forces, self.forces, 3), (outputs.energy, self.energies, 1), (outputs.virials, self.virials, 9),
            (outputs.descriptors, self.descriptors, model.dim),
        ):  # fmt: skip
            if source is not None:
                totals.put_back[(-(-n // blocks.atoms),)](
                    source, self._place, target, n, width, 1 << (width - 1).bit_length(), blocks.atoms, num_warps=4
                )
        totals.sum_blocks[(len(self._partial),)](
            outputs.energy, outputs.forces if outputs.virials is None else outputs.virials, self._place, self._partial,
            n, wanted.virials, blocks.sums, num_warps=4,
        )  # fmt: skip
        totals.sum_partial[(1,)](self._partial, self.total, len(self._partial), 64, num_warps=4)


def _bins(heights: NDArray[np.float64], reach: float, atoms: int) -> list[int]:
    """Bins along the cell vectors, no thinner than the reach, and no more than a few an atom."""
    bins = [max(2, int(h / reach)) for h in heights.tolist()]
    while math.prod(bins) > 4 * atoms + 64 and max(bins) > 2:
        widest = bins.index(max(bins))
        bins[widest] = max(2, bins[widest] // 2)
    return bins
