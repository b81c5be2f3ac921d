"""What a batch's positions determine: sums of the basis over neighbours, and the way from derivatives to forces.

The basis is summed over the neighbours of each type before any coefficient is seen; the sums M and their derivatives by
the positions are constants of a training. With W = ∂E/∂M the forces are linear in W, F = −Jᵀ W, and so is the virial;
the gradient of a loss by W is the same map the other way round. Nothing else of a step sees pairs.
"""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003 - of a NamedTuple
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .polynomials import Harmonics, radial_functions, values

if TYPE_CHECKING:
    from .batches import Arrays


class Sizes(NamedTuple):
    """What the shapes follow from."""

    types: int
    radial: int  # functions of the radial basis
    angular: int
    l_max: int


class Slots(NamedTuple):
    """Pairs in rows: A atoms of w slots, those of the v angular neighbours first; empty ones are far away."""

    center: Tensor  # (A, T) one-hot types
    neighbor: Tensor  # (A, w) int64, atom of the batch
    types: Tensor  # (A, w) int64
    r: Tensor  # (A, w) Å
    unit: Tensor  # (3, A, w), zero where empty


class Angular(NamedTuple):
    """Constants of the angular neighbours, the first v slots; b counts harmonics, k functions of the basis."""

    slots: Slots
    table: Tensor  # (A, 2v, T k): the angular basis, then its derivatives, in the columns of the neighbour's type
    y: Tensor  # (A, v, b)
    turn: Tensor  # (A, v, 3, b): derivatives of the harmonics by the vector, 1/Å


class Geometry(NamedTuple):
    """Constants of a batch."""

    angular_part: Angular
    own: Tensor  # (A,) types
    of_type: Tensor  # (A, T, w) one-hot types of the neighbours
    slope: Tensor  # (A, w, k) derivatives of the radial basis
    radial: Tensor  # (A, T k) sums of the radial basis
    angular: Tensor  # (A, T k, b) sums of the angular basis times harmonics

    @property
    def center(self) -> Tensor:
        """One-hot types, (A, T)."""
        return self.angular_part.slots.center


def slots_of(arrays: Arrays, widths: tuple[int, int], n_types: int, far: float) -> Slots:
    """Lay the pairs of a batch out in rows."""
    dtype, device = arrays.vectors.dtype, arrays.vectors.device
    count = arrays.radial.to(torch.int64)
    start = torch.cumsum(count, 0) - count
    column = torch.arange(widths[0], device=device)
    real = column < count[:, None]
    A, P = len(count), len(arrays.vectors)
    if P:
        pair = torch.where(real, start[:, None] + column, 0).clamp_(max=P - 1)
        vector = arrays.vectors[pair].permute(2, 0, 1)  # (3, A, w)
        # Atoms of a frame stand together: its first one is where the frame number changes.
        first = torch.searchsorted(arrays.frame, arrays.frame)
        neighbor = arrays.neighbors[pair] + first[:, None]
    else:
        vector = torch.zeros((3, A, widths[0]), dtype=dtype, device=device)
        neighbor = torch.zeros((A, widths[0]), dtype=torch.int64, device=device)
    own = torch.arange(A, device=device)[:, None].expand(A, widths[0])
    neighbor = torch.where(real, neighbor, own)
    r = torch.sqrt(vector[0] * vector[0] + vector[1] * vector[1] + vector[2] * vector[2])
    r = torch.where(real, r, far)
    unit = torch.where(real, vector / r, 0.0)
    center = (arrays.types[:, None] == torch.arange(n_types, device=device)).to(dtype)
    return Slots(center, neighbor, arrays.types[neighbor], r, unit)


def geometry_of(
    slots: Slots, width: int, sizes: Sizes, cutoff_radial: Tensor, cutoff_angular: Tensor, types: Tensor,
    tables: Harmonics,
) -> Geometry:  # fmt: skip
    """Constants of a batch.

    Args:
        slots: The pairs.
        width: v, slots for angular neighbours.
        sizes: Sizes of the basis.
        cutoff_radial, cutoff_angular: (T, T), Å, in the dtype of the rest.
        types: (A,) int64.
        tables: Of the harmonics.
    """
    A = slots.r.shape[0]
    of_type = _of_type(slots, sizes.types)
    f, slope = radial_functions(slots.r, cutoff_radial[types[:, None], slots.types], sizes.radial)
    radial = torch.bmm(of_type, f).reshape(A, -1)
    part, angular = angular_of(slots, sizes, cutoff_angular, types, tables, width)
    return Geometry(part, types, of_type, slope, radial, angular)


def _of_type(slots: Slots, n_types: int) -> Tensor:
    one = torch.arange(n_types, device=slots.types.device)
    return (slots.types[:, None, :] == one[:, None]).to(slots.r.dtype)  # (A, T, w)


def angular_of(
    slots: Slots, sizes: Sizes, cutoff: Tensor, types: Tensor, tables: Harmonics, width: int | None = None
) -> tuple[Angular, Tensor]:
    """Constants of the angular neighbours, and the sums (A, T k, b); ``width``: v, if not all slots are angular."""
    A, w = slots.r.shape
    v = w if width is None else width
    tj, r, unit = slots.types[:, :v], slots.r[:, :v], slots.unit[:, :, :v]
    basis = torch.cat(radial_functions(r, cutoff[types[:, None], tj], sizes.angular), dim=1)  # (A, 2v, k)
    one = torch.arange(sizes.types, device=types.device)
    mine = (tj[:, :, None] == one).to(r.dtype).repeat(1, 2, 1)  # (A, 2v, T)
    table = (mine[..., None] * basis[:, :, None, :]).reshape(A, 2 * v, -1)
    direction = unit.permute(1, 2, 0).reshape(A * v, 3)
    found = values(direction, tables).view(A, v, 5, -1)
    y = found[:, :, 0]
    turn = found[:, :, 1:4] - direction.view(A, v, 3, 1) * found[:, :, 4:]
    turn = turn / r[:, :, None, None]
    return Angular(slots, table, y, turn), torch.bmm(table[:, :v].transpose(1, 2), y)


class PairMap(NamedTuple):
    """The linear map from derivatives by the sums to forces and virials, and the same map the other way round.

    Its first argument is the geometry that belongs to it.
    """

    forces: Callable[[Any, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
    spread: Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class PairForces(torch.autograd.Function):
    """Forces and virials of the derivatives by the sums."""

    @staticmethod
    def forward(ctx, radial: Tensor, angular: Tensor, geometry: Any, frame: Tensor, n_frames: int, by: PairMap):  # type: ignore[no-untyped-def]
        """∂E/∂M (A, T k) and (A, T k, b) → forces (A, 3), eV/Å, and virials (B, 9), eV."""
        ctx.geometry, ctx.frame, ctx.by = geometry, frame, by
        return by.forces(geometry, radial, angular, frame, n_frames)

    @staticmethod
    def backward(ctx, by_forces: Tensor, by_virial: Tensor):  # type: ignore[no-untyped-def]
        """The same map the other way round."""
        radial, angular = ctx.by.spread(ctx.geometry, by_forces, by_virial, ctx.frame)
        return radial, angular, None, None, None, None


def forces_of(
    geometry: Geometry, radial: Tensor, angular: Tensor, frame: Tensor, n_frames: int
) -> tuple[Tensor, Tensor]:
    """∂E/∂M (A, T k) and (A, T k, b) → forces (A, 3), eV/Å, and virials (B, 9), eV."""
    slots = geometry.angular_part.slots
    A, T = geometry.of_type.shape[:2]
    table = radial.view(A, T, -1)
    # Both ends of a radial pair at once: lookups, where adding to the neighbour would be a scattered sum.
    here = torch.arange(A, device=radial.device)[:, None]
    weight = table[here, slots.types] + table[slots.neighbor, geometry.own[:, None]]  # (A, w, k)
    pull = (geometry.slope * weight).sum(dim=2) * slots.unit  # (3, A, w)
    forces, push = angular_forces(geometry.angular_part, angular)
    half = 0.5 * pull
    half[:, :, : push.shape[2]] += push
    return forces + pull.sum(dim=2).T, virial_of(half, slots, frame, n_frames)


def angular_forces(part: Angular, angular: Tensor) -> tuple[Tensor, Tensor]:
    """∂E/∂M (A, T k, b) → forces (A, 3), eV/Å, and ∂U_i/∂r_ij of the angular slots, (3, A, v)."""
    slots, v = part.slots, part.y.shape[1]
    by = torch.bmm(part.table, angular)  # (A, 2v, b): by Y_b, then by r and Y_b
    outward = (by[:, v:] * part.y).sum(dim=2)
    sideways = (by[:, :v, None] * part.turn).sum(dim=3)  # (A, v, 3)
    push = sideways.permute(2, 0, 1) + outward * slots.unit[:, :, :v]  # (3, A, v)
    neighbor = slots.neighbor[:, :v].reshape(-1)
    return push.sum(dim=2).T.index_add(0, neighbor, -push.reshape(3, -1).T), push


def virial_of(push: Tensor, slots: Slots, frame: Tensor, n_frames: int, share: Tensor | None = None) -> Tensor:
    """−Σ r ⊗ ∂U/∂r of each frame, (B, 9), of the derivatives (3, A, v) of the first slots.

    ``share``: what else belongs to it, of each atom, (A, 9).
    """
    v = push.shape[2]
    vector = slots.unit[:, :, :v] * slots.r[:, :v]
    own = torch.bmm(vector.permute(1, 0, 2), push.permute(1, 2, 0)).reshape(-1, 9)
    own = -own if share is None else share - own
    return torch.zeros((n_frames, 9), dtype=own.dtype, device=own.device).index_add(0, frame, own)


def spread_of(geometry: Geometry, by_forces: Tensor, by_virial: Tensor, frame: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives by forces (A, 3) and virials (B, 9) → derivatives by ∂E/∂M."""
    slots = geometry.angular_part.slots
    shift = shift_of(slots, slots.r.shape[1], by_forces, by_virial, frame)
    along = (shift * slots.unit).sum(dim=0)  # (A, w)
    radial = torch.bmm(geometry.of_type, geometry.slope * along[..., None]).reshape(len(frame), -1)
    return radial, angular_spread(geometry.angular_part, shift)


def angular_spread(part: Angular, shift: Tensor) -> Tensor:
    """Derivatives by ∂U_i/∂r_ij of the first slots, (3, A, ≥ v) → derivatives by ∂E/∂M of the angular sums."""
    v = part.y.shape[1]
    shift = shift[:, :, :v]
    sideways = (shift.permute(1, 2, 0)[..., None] * part.turn).sum(dim=2)  # (A, v, b)
    outward = part.y * (shift * part.slots.unit[:, :, :v]).sum(dim=0)[:, :, None]
    return torch.bmm(part.table.transpose(1, 2), torch.cat([sideways, outward], dim=1))


def shift_of(slots: Slots, width: int, by_forces: Tensor, by_virial: Tensor, frame: Tensor) -> Tensor:
    """Derivatives by forces and virials → by ∂U_i/∂r_ij of the first slots, (3, A, width)."""
    vector = slots.unit[:, :, :width] * slots.r[:, :width]
    own = by_virial[frame].reshape(-1, 3, 3)
    shift = by_forces.T[:, :, None] - by_forces[slots.neighbor[:, :width]].permute(2, 0, 1)
    return shift - torch.bmm(own.transpose(1, 2), vector.permute(1, 0, 2)).permute(1, 0, 2)
