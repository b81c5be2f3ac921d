"""Evaluation over lists of pairs in torch: what surrounds the dense blocks, ZBL, and sums over pairs.

The pairs of a tile are laid out densely, one row an atom, in blocks of atoms whose padded numbers of neighbours are
equal. An atom's block follows from its own neighbours alone, and every sum runs along its own row, so its bits do not
depend on what else is evaluated. Forces on neighbours are added in the order of the pair list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from nepcore.batch import Batch
from nepcore.errors import StructureError
from nepcore.physics import harmonics, zbl
from nepcore.skin import Lists
from nepcore.structures import Predictions

from .rows import COINCIDENT, Results, Rows, Shape, Tables, evaluate

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray
    from torch import Tensor

    from nepcore.admission import Admission
    from nepcore.backends.protocol import Form
    from nepcore.neighbors import Pairs
    from nepcore.potential import NEP
    from nepcore.structures import Structures


_MOST_PRESENTS = 16
"""Sets of types whose tables are kept."""


class Block(Protocol):
    """What evaluates dense blocks of atoms."""

    def types(self, present: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Types, ascending, that the tables are to hold if ``present`` of the model's ``count`` types occur."""

    def rows(self, n: int) -> int:
        """Number of rows, at least ``n``, that a block of ``n`` atoms is to have."""

    def __call__(self, tables: Tables, rows: Rows) -> Results:
        """Evaluate a block; the results are read before the next call."""


@dataclass(frozen=True)
class EagerBlock:
    """Blocks evaluated operation by operation."""

    shape: Shape
    form: Form

    def types(self, present: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """See :class:`Block`."""
        del count
        return present

    def rows(self, n: int) -> int:
        """See :class:`Block`."""
        return n

    def __call__(self, tables: Tables, rows: Rows) -> Results:
        """See :class:`Block`."""
        return evaluate(self.shape, self.form, tables, rows)


class PairwiseBackend:
    """A backend around one way of evaluating dense blocks of atoms.

    Args:
        name: Its name.
        potential: Parameters, on the device and in the dtype to compute with.
        admission: The model's door, for the table of types.
        block: What evaluates the blocks.
        memory: Bytes for intermediate arrays.
    """

    def __init__(
        self, name: str, potential: NEP, admission: Admission, block: Block, memory: float
    ) -> None:  # fmt: skip
        self.name = name
        self.potential = potential
        self.device = potential.q_scaler.device
        self._types = admission.types
        self._admission = admission
        self.block = block
        self._memory = memory
        self._presents: dict[tuple[int, ...], _Present] = {}
        self._lists = Lists(potential.max_cutoff, admission.types, self.device)

    @torch.no_grad()
    def run(self, structures: Structures, properties: frozenset[str]) -> Generator[int, None, Predictions]:
        """See :class:`nepcore.backends.protocol.Backend`."""
        if not len(structures):
            return _Sums(self, Batch.of(structures, self._types, self.device), properties).predictions(structures)
        parts = []
        for start, stop in self._groups(structures):
            part = structures.slice(start, stop)
            batch = Batch.of(part, self._types, self.device)
            sums = _Sums(self, batch, properties)
            present = self._present(part)
            budget = self._pair_budget(len(present.types))
            for pairs in self._lists.pairs(part, batch, 3 * budget):
                sums.add(pairs, _evaluate(self.potential, present, batch, pairs, self.block))
                yield pairs.stop - pairs.start
            parts.append(sums.predictions(part))
        return Predictions.concatenate(parts)

    def _groups(self, structures: Structures) -> list[tuple[int, int]]:
        """Runs of structures whose results and pairs fit the memory together; a large one stands alone."""
        work = self._admission.work(structures)
        limit = 16.0 * self._pair_budget(1)
        groups, start, total = [], 0, 0.0
        for i, w in enumerate(work.tolist()):
            if i > start and total + w > limit:
                groups.append((start, i))
                start, total = i, 0.0
            total += w
        groups.append((start, len(structures)))
        return groups

    def _present(self, structures: Structures) -> _Present:
        occurring = np.unique(self._types[np.flatnonzero(np.bincount(structures.numbers))])
        types = self.block.types(occurring, len(self.potential.elements))
        key = tuple(types.tolist())
        if key not in self._presents:
            if len(self._presents) >= _MOST_PRESENTS:
                del self._presents[next(iter(self._presents))]
            self._presents[key] = _Present.of(self.potential, torch.from_numpy(types).to(self.device))
        return self._presents[key]

    def _pair_budget(self, n_types: int) -> int:
        """Pairs that may be held at a time."""
        nep = self.potential
        itemsize = torch.finfo(nep.dtype).bits / 8
        k_r, k_a = nep.c_radial.shape[1], nep.c_angular.shape[1]
        pair = 4 * (k_r + k_a) + 4 * (nep.n_radial + nep.n_angular) + 6 * harmonics.width(nep.l_max)
        if self.device.type != "cpu":
            pair += 2 * k_a * (n_types - 1)  # basis functions set apart by type
        return max(1024, int(self._memory / (itemsize * pair + 8 * 30)))


@dataclass(frozen=True, eq=False)
class _Present:
    """The types that occur in a batch."""

    types: Tensor  # (T',) indices in the model
    remap: Tensor  # (T,) → index among the present ones
    cutoff_angular: Tensor  # (T', T'), Å, float64
    tables: Tables

    @classmethod
    def of(cls, nep: NEP, types: Tensor) -> _Present:
        remap = torch.zeros(len(nep.elements), dtype=torch.int64, device=types.device)
        remap[types] = torch.arange(len(types), device=types.device)
        return cls(types, remap, nep.cutoff_angular[types[:, None], types[None, :]], Tables.of(nep, types))


@dataclass(frozen=True, eq=False)
class _Tile:
    """Results of the centres of one piece of the pair list."""

    energies: Tensor  # (A,)
    gradient: Tensor  # (P, 3): ∂U_i/∂r_ij
    descriptors: Tensor  # (A, D), scaled


def _widths() -> list[int]:
    """Numbers of slots in use: multiples of 16 to 128, from there on steps of about a quarter."""
    out, width = [], 16
    while width < 2**22:
        out.append(width)
        width += max(16, 1 << (width.bit_length() - 3))
    return out


_WIDTHS = _widths()
_ALLOWED = np.array(_WIDTHS)


def _groups_of(count_r: Tensor, count_a: Tensor) -> list[tuple[int, int, NDArray[np.int64]]]:
    """Slots for the radial and the angular part, and the centres that get so many."""
    counts = torch.stack([count_r, count_a]).cpu().numpy()
    # The width of every number that occurs is looked up: sorting tens of thousands of numbers takes milliseconds.
    size = np.searchsorted(_ALLOWED, np.arange(counts.max(initial=0) + 1))[counts]
    key = size[0] * len(_WIDTHS) + size[1]
    out = []
    for value in np.flatnonzero(np.bincount(key)).tolist():
        radial, angular = divmod(value, len(_WIDTHS))
        out.append((_WIDTHS[radial], _WIDTHS[angular], np.flatnonzero(key == value)))
    return out


def _slots(first: Tensor, count: Tensor, width: int, empty: int) -> Tensor:
    """Pair in each slot, (rows, width), of rows with ``count`` consecutive pairs from ``first`` on; else ``empty``."""
    column = torch.arange(width, device=first.device)
    return torch.where(column < count[:, None], first[:, None] + column, empty)


def _evaluate(nep: NEP, present: _Present, batch: Batch, pairs: Pairs, block: Block) -> _Tile:
    """Energies, pair gradients and descriptors of the centres of a tile."""
    dtype, device = nep.dtype, pairs.i.device
    A, P = pairs.stop - pairs.start, len(pairs)
    remap = present.remap
    types = remap[batch.types[pairs.start : pairs.stop]]
    # One empty pair stands behind the others, out of reach: the slots that no pair fills point at it.
    tj = torch.cat([remap[batch.types[pairs.j]], remap.new_zeros(1)])
    distance = torch.cat([pairs.distance, pairs.distance.new_full((1,), 2.0 * nep.max_cutoff)])
    vector = torch.cat([pairs.vector, distance.new_zeros((1, 3))])
    unit = (vector / distance[:, None].clamp(min=COINCIDENT)).T.to(dtype).contiguous()  # (3, P + 1)
    r = distance.clamp(min=COINCIDENT).to(dtype)
    near = torch.nonzero(pairs.distance < present.cutoff_angular[types[pairs.i], tj[:P]]).squeeze(1)

    edges = torch.arange(A + 1, device=device)
    bound_r = torch.searchsorted(pairs.i, edges)
    bound_a = torch.searchsorted(pairs.i[near], edges)
    count_r, count_a = bound_r.diff(), bound_a.diff()
    near = torch.cat([near, near.new_full((1,), P)])
    temperatures = batch.temperatures[batch.structure[pairs.start : pairs.stop]].to(dtype)

    energies = r.new_zeros(A)
    descriptors = r.new_zeros((A, nep.dim))
    gradient = r.new_zeros((P + 1, 3))
    for width_r, width_a, members in _groups_of(count_r, count_a):
        n = len(members)
        rows = block.rows(n)
        centres = torch.from_numpy(np.resize(members, rows) if rows > n else members).to(device)
        real = torch.arange(rows, device=device) < n
        radial = _slots(bound_r[centres], torch.where(real, count_r[centres], 0), width_r, P)
        angular = near[_slots(bound_a[centres], torch.where(real, count_a[centres], 0), width_a, len(near) - 1)]
        out = block(
            present.tables,
            Rows(types[centres], r[radial], tj[radial], r[angular], tj[angular], unit[:, angular],
                 temperatures[centres]),
        )  # fmt: skip
        centres = centres[:n]
        energies[centres] = out.energies[:n]
        descriptors[centres] = out.descriptors[:n]
        # What the empty slots write goes to the empty pair, and is cut off.
        gradient[radial] = out.along[..., None] * unit[:, radial].permute(1, 2, 0)
        gradient[angular] = gradient[angular] + out.push.permute(1, 2, 0)
    if nep.has_zbl:
        _add_zbl(nep, batch, pairs, near[:-1], r, unit, energies, gradient)
    return _Tile(energies, gradient[:P], descriptors)


def _add_zbl(
    nep: NEP, batch: Batch, pairs: Pairs, near: Tensor, r: Tensor, unit: Tensor, energies: Tensor, gradient: Tensor
) -> None:
    """Add half of each pair's repulsion to its centre, and half of its derivative to the pair's gradient."""
    ti, tj = batch.types[pairs.start + pairs.i[near]], batch.types[pairs.j[near]]
    close = torch.nonzero(r[near] < nep.zbl_outer[ti, tj]).squeeze(1)
    near, ti, tj = near[close], ti[close], tj[close]
    terms = nep.zbl_terms[ti, tj]  # (P, 4, 2)
    energy, slope = zbl.pair_energy(
        r[near], nep.zbl_charge[ti, tj], nep.zbl_rate[ti, tj], nep.zbl_inner[ti, tj], nep.zbl_outer[ti, tj],
        [(terms[:, m, 0], terms[:, m, 1]) for m in range(4)],
    )  # fmt: skip
    energies.index_add_(0, pairs.i[near], 0.5 * energy)
    gradient[near] = gradient[near] + (0.5 * slope)[:, None] * unit[:, near].T


class _Sums:
    """What the tiles of a batch add up to."""

    def __init__(self, backend: PairwiseBackend, batch: Batch, properties: frozenset[str]) -> None:
        nep = backend.potential
        self.batch = batch
        self.properties = properties
        self.errors: dict[int, StructureError] = {}
        N, B = batch.n_atoms, len(batch)

        def zeros(*shape: int, dtype: torch.dtype = nep.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=backend.device)

        self.energies = zeros(N)
        # Forces from an atom's own energy and from its neighbours' stay apart: each is then summed in the order of
        # the pair list, however the list was cut.
        self.own = zeros(N, 3) if "forces" in properties else None
        self.pushed = zeros(N, 3) if "forces" in properties else None
        self.virial = zeros(B, 9, dtype=torch.float64) if properties & {"stress", "virial"} else None
        self.virials = zeros(N, 9) if "virials" in properties else None
        self.descriptors = zeros(N, nep.dim) if "descriptors" in properties else None

    def add(self, pairs: Pairs, tile: _Tile) -> None:
        """Add a tile."""
        rows = slice(pairs.start, pairs.stop)
        self.energies[rows] = tile.energies
        if self.descriptors is not None:
            self.descriptors[rows] = tile.descriptors
        self._note_coincident(pairs)
        g = tile.gradient
        if self.own is not None and self.pushed is not None:
            self.own[rows] = torch.zeros_like(self.own[rows]).index_add_(0, pairs.i, g)
            self.pushed.index_add_(0, pairs.j, g)
        if self.virial is not None or self.virials is not None:
            outer = (pairs.vector.to(g.dtype)[:, :, None] * g[:, None, :]).reshape(-1, 9)
            if self.virials is not None:
                self.virials.index_add_(0, pairs.j, outer, alpha=-1)
            if self.virial is not None:
                structure = self.batch.structure[pairs.start + pairs.i]
                self.virial.index_add_(0, structure, outer.to(torch.float64), alpha=-1)

    def _note_coincident(self, pairs: Pairs) -> None:
        for p in torch.nonzero(pairs.distance < COINCIDENT).squeeze(1).tolist():
            i, j = pairs.start + int(pairs.i[p]), int(pairs.j[p])
            structure = int(self.batch.structure[i])
            first = int(self.batch.offsets[structure])
            a, b = sorted((i - first, j - first))
            whose = f"atoms {a + 1} and {b + 1} coincide" if a != b else f"atom {a + 1} coincides with its own image"
            reason = f"positions: {whose} (closer than {COINCIDENT:g} Å)"
            error = StructureError("coincident_atoms", reason, field="positions", atoms=(a, b) if a != b else (a,))
            self.errors.setdefault(structure, error)

    def predictions(self, structures: Structures) -> Predictions:
        """Results on the host."""
        B = len(structures)
        device = self.energies.device
        energy = torch.zeros(B, dtype=torch.float64, device=device)
        energy.index_add_(0, self.batch.structure, self.energies.to(torch.float64))
        arrays = {"energy": energy, "free_energy": energy, "energies": self.energies, "descriptors": self.descriptors}
        if self.own is not None and self.pushed is not None:
            arrays["forces"] = self.own - self.pushed
        if self.virials is not None:
            arrays["virials"] = self.virials.reshape(-1, 3, 3)
        values = {name: t.cpu().numpy() for name, t in arrays.items() if t is not None and name in self.properties}
        if self.virial is not None:
            virial = self.virial.reshape(-1, 3, 3).cpu().numpy()
            if "virial" in self.properties:
                values["virial"] = virial
            if "stress" in self.properties:
                values["stress"] = stress_of(virial, structures)
        return Predictions(structures.counts, values, structures.fully_periodic, self.errors)


def stress_of(virial: NDArray[np.float64], structures: Structures) -> NDArray[np.float64]:
    """Stress σ = −W/V, eV/Å³, Voigt xx yy zz yz xz xy, (B, 6), of virials (B, 3, 3); NaN without full periodicity."""
    known = structures.fully_periodic
    volume = np.where(known, structures.volumes, np.nan)
    symmetric = (virial + virial.transpose(0, 2, 1)) / 2.0
    voigt = symmetric[:, [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
    return -voigt / volume[:, None]
