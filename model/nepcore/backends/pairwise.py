"""Evaluation over lists of pairs in torch: descriptors, networks, ZBL and analytical forces.

The pairs of a tile are laid out densely, one row an atom, in blocks of atoms whose padded numbers of neighbours are
equal. An atom's block follows from its own neighbours alone, and every sum runs along its own row, so its bits do not
depend on what else is evaluated. Forces on neighbours are added in the order of the pair list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from nepcore.batch import Batch
from nepcore.errors import StructureError
from nepcore.neighbors import Bins, Pairs
from nepcore.physics import harmonics, invariants, network, products, zbl
from nepcore.physics.basis import radial_basis
from nepcore.structures import Predictions

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray
    from torch import Tensor

    from nepcore.admission import Admission
    from nepcore.backends.protocol import Contraction
    from nepcore.potential import NEP
    from nepcore.structures import Structures

COINCIDENT = 1e-5
"""Atoms closer than this, Å, count as being at one place: no model was made for it, and 1/r² overflows float32."""


class PairwiseBackend:
    """A backend around one way of contracting basis and coefficients.

    Args:
        name: Its name.
        potential: Parameters, on the device and in the dtype to compute with.
        admission: The model's door, for the table of types.
        contract: The contraction.
        memory: Bytes for intermediate arrays.
    """

    def __init__(
        self, name: str, potential: NEP, admission: Admission, contract: Contraction, memory: float
    ) -> None:  # fmt: skip
        self.name = name
        self.potential = potential
        self.device = potential.q_scaler.device
        self._types = admission.types
        self._admission = admission
        self._contract = contract
        self._pair_budget = max(1024, int(memory / _bytes_per_pair(potential)))

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
            present = torch.from_numpy(np.unique(self._types[part.numbers])).to(self.device)
            view = _PresentTypes.of(self.potential, present)
            for pairs in Bins.of(batch, self.potential.max_cutoff).pairs(3 * self._pair_budget):
                sums.add(pairs, _evaluate(self.potential, view, batch, pairs, self._contract))
                yield pairs.stop - pairs.start
            parts.append(sums.predictions(part))
        return Predictions.concatenate(parts)

    def _groups(self, structures: Structures) -> list[tuple[int, int]]:
        """Runs of structures whose results and pairs fit the memory together; a large one stands alone."""
        work = self._admission.work(structures)
        limit = 16.0 * self._pair_budget
        groups, start, total = [], 0, 0.0
        for i, w in enumerate(work.tolist()):
            if i > start and total + w > limit:
                groups.append((start, i))
                start, total = i, 0.0
            total += w
        groups.append((start, len(structures)))
        return groups


def _bytes_per_pair(potential: NEP) -> float:
    """Estimate of the bytes that a pair's intermediate arrays take."""
    itemsize = torch.finfo(potential.dtype).bits / 8
    k = potential.c_radial.shape[1] + potential.c_angular.shape[1]
    n = potential.n_radial + potential.n_angular
    return itemsize * (4 * k + 4 * n + 6 * harmonics.width(potential.l_max)) + 8 * 30


@dataclass(frozen=True, eq=False)
class _PresentTypes:
    """Tables cut down to the types that occur: a model of 89 elements meets a handful of them at a time."""

    remap: Tensor  # (T,) → index among the present ones
    c_radial: Tensor
    c_angular: Tensor
    cutoff_radial: Tensor
    cutoff_angular: Tensor

    @classmethod
    def of(cls, nep: NEP, present: Tensor) -> _PresentTypes:
        remap = torch.zeros(len(nep.elements), dtype=torch.int64, device=present.device)
        remap[present] = torch.arange(len(present), device=present.device)
        both = (present[:, None], present[None, :])
        return cls(
            remap,
            nep.c_radial[:, :, both[0], both[1]],
            nep.c_angular[:, :, both[0], both[1]],
            nep.cutoff_radial[both],
            nep.cutoff_angular[both],
        )


@dataclass(frozen=True, eq=False)
class _Tile:
    """Results of the centres of one piece of the pair list."""

    energies: Tensor  # (A,)
    gradient: Tensor  # (P, 3): ∂U_i/∂r_ij
    descriptors: Tensor  # (A, D), scaled


@dataclass(frozen=True, eq=False)
class _Slots:
    """Where the pairs of some centres stand in a dense array (rows, width)."""

    rows: int
    width: int
    pair: Tensor  # (rows · width,) pair number, P where the slot is empty
    used: Tensor  # slots that hold a pair
    held: Tensor  # their pair numbers

    @classmethod
    def of(cls, centres: Tensor, first: Tensor, count: Tensor, width: int, empty: int) -> _Slots:
        """Slots of ``centres``, whose pairs are ``count`` consecutive ones from ``first`` on."""
        column = torch.arange(width, device=centres.device)
        pair = first[centres][:, None] + column
        inside = column < count[centres][:, None]
        pair = torch.where(inside, pair, empty).reshape(-1)
        used = torch.nonzero(inside.reshape(-1)).squeeze(1)
        return cls(len(centres), width, pair, used, pair[used])


def _width(count: Tensor) -> Tensor:
    """Padded number of neighbours: multiples of 16 to 128, from there on steps of about a quarter."""
    step = torch.full_like(count, 16)
    for power in range(7, 31):
        step = torch.where(count > 2**power, 2 ** (power - 2), step)
    return (count + step - 1) // step * step


def _evaluate(nep: NEP, view: _PresentTypes, batch: Batch, pairs: Pairs, contract: Contraction) -> _Tile:
    """Energies, pair gradients and descriptors of the centres of a tile."""
    dtype, device = nep.dtype, pairs.i.device
    A, P = pairs.stop - pairs.start, len(pairs)
    types = batch.types[pairs.start : pairs.stop]
    local = view.remap[types]
    ti, tj = local[pairs.i], view.remap[batch.types[pairs.j]]
    # One empty pair stands behind the others: the slots that no pair fills point at it.
    empty = torch.zeros(1, dtype=torch.int64, device=device)
    ti, tj = torch.cat([ti, empty]), torch.cat([tj, empty])
    cut_r, cut_a = view.cutoff_radial[ti, tj], view.cutoff_angular[ti, tj]
    distance = torch.cat([pairs.distance, 2.0 * cut_r[-1:]])
    vector = torch.cat([pairs.vector, distance.new_zeros((1, 3))])
    unit = (vector / distance[:, None].clamp(min=COINCIDENT)).T.to(dtype).contiguous()  # (3, P + 1)
    r = distance.clamp(min=COINCIDENT).to(dtype)
    near = torch.nonzero(distance[:P] < cut_a[:P]).squeeze(1)

    edges = torch.arange(A + 1, device=device)
    bound_r = torch.searchsorted(pairs.i, edges)
    bound_a = torch.searchsorted(pairs.i[near], edges)
    count_r, count_a = bound_r.diff(), bound_a.diff()
    near = torch.cat([near, torch.full((1,), P, dtype=torch.int64, device=device)])
    key = _width(count_r) * (1 << 31) + _width(count_a)

    energies = r.new_zeros(A)
    descriptors = r.new_zeros((A, nep.dim))
    gradient = r.new_zeros((P + 1, 3))
    for value in torch.unique(key).tolist():
        centres = torch.nonzero(key == value).squeeze(1)
        radial = _Slots.of(centres, bound_r, count_r, value >> 31, P)
        angular = _Slots.of(centres, bound_a, count_a, value & ((1 << 31) - 1), len(near) - 1)
        q_r, g_r = _radial(nep, view, r, cut_r, ti, tj, radial, contract)
        q_a, g_a, y, s = _angular(nep, view, r, cut_a, ti, tj, unit, near, angular, contract)
        q = torch.cat([q_r, q_a], dim=1)  # (rows, D)
        if nep.temperature:
            heat = batch.temperatures[batch.structure[pairs.start + centres]].to(dtype)
            q = torch.cat([q, heat[:, None]], dim=1)
        q = q * nep.q_scaler
        energy, slope = _site_energies(nep, q, types[centres])
        energies[centres] = energy
        descriptors[centres] = q
        slope = slope * nep.q_scaler
        f_r, f_a = slope[:, : nep.n_radial], slope[:, nep.n_radial : nep.n_radial + q_a.shape[1]]
        along = products.sum_over_components(f_r.T[:, :, None], g_r).reshape(-1)  # (rows · width,)
        gradient[radial.held] = along[radial.used, None] * unit[:, radial.held].T
        push = _angular_gradient(nep, f_a, g_a, y, s, unit, r, near, angular)  # (3, rows · width)
        target = near[angular.held]
        gradient[target] = gradient[target] + push[:, angular.used].T
    if nep.has_zbl:
        _add_zbl(nep, batch, pairs, near[:-1], r, unit, energies, gradient)
    return _Tile(energies, gradient[:P], descriptors)


def _radial(
    nep: NEP, view: _PresentTypes, r: Tensor, cut: Tensor, ti: Tensor, tj: Tensor, slots: _Slots, contract: Contraction
) -> tuple[Tensor, Tensor]:
    """Radial descriptors (rows, n) and derivatives g' (n, rows, width)."""
    p = slots.pair
    basis = radial_basis(r[p], cut[p].to(r.dtype), nep.c_radial.shape[1])
    g = contract(view.c_radial, basis, ti[p], tj[p]).reshape(2, nep.n_radial, slots.rows, slots.width).contiguous()
    return g[0].sum(dim=2).T, g[1]


def _angular(
    nep: NEP, view: _PresentTypes, r: Tensor, cut: Tensor, ti: Tensor, tj: Tensor, unit: Tensor, near: Tensor,
    slots: _Slots, contract: Contraction,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Angular descriptors (rows, blocks · n), g and g' (2, n, rows, width), Y (b, rows, width), s (b, rows, n)."""
    p = near[slots.pair]
    basis = radial_basis(r[p], cut[p].to(r.dtype), nep.c_angular.shape[1])
    g = contract(view.c_angular, basis, ti[p], tj[p]).reshape(2, nep.n_angular, slots.rows, slots.width).contiguous()
    y = harmonics.harmonics(unit[:, p], nep.l_max).reshape(harmonics.width(nep.l_max), slots.rows, slots.width)
    s = products.sum_over_neighbors(g[0], y).contiguous()
    q = invariants.invariants(s, nep.l_max, nep.switches)  # (blocks, rows, n)
    return q.permute(1, 0, 2).reshape(slots.rows, -1), g, y, s


def _angular_gradient(
    nep: NEP, slope: Tensor, g: Tensor, y: Tensor, s: Tensor, unit: Tensor, r: Tensor, near: Tensor, slots: _Slots
) -> Tensor:
    """∂U_i/∂r_ij of the angular part, (3, rows · width)."""
    rows, width = slots.rows, slots.width
    slope = slope.reshape(rows, -1, nep.n_angular).permute(1, 0, 2)  # (blocks, rows, n)
    ds = invariants.gradient(s, slope, nep.l_max, nep.switches)  # (b, rows, n)
    p = near[slots.pair]
    u, distance = unit[:, p].reshape(3, rows, width), r[p].reshape(rows, width)
    along = products.sum_over_components(products.sum_over_functions(ds, g[1]), y)  # (rows, width)
    by_y = products.sum_over_functions(ds, g[0])  # (b, rows, width): ∂U/∂Y_b
    turn = harmonics.contracted_gradient(u, by_y, nep.l_max)
    radial_part = products.sum_over_components(turn, u)
    return (along * u + (turn - radial_part * u) / distance).reshape(3, -1)


def _site_energies(nep: NEP, q: Tensor, types: Tensor) -> tuple[Tensor, Tensor]:
    """Site energies (rows,) and their derivatives by the network's inputs (rows, D)."""
    network_of = types if len(nep.w0) > 1 else torch.zeros(1, dtype=torch.int64, device=types.device)
    w0, b0, w1 = nep.w0[network_of], nep.b0[network_of], nep.w1[network_of]
    if nep.two_layers:
        energy, slope = network.two_hidden(q, w0, b0, w1, nep.b1[network_of], nep.w2[network_of])
    else:
        energy, slope = network.one_hidden(q, w0, b0, w1)
    return energy - nep.bias - nep.type_bias[types], slope


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
