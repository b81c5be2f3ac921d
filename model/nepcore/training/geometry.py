"""What a batch's positions determine: sums of the basis over neighbours, and the way from derivatives to forces.

The basis is summed over the neighbours of each type before any coefficient is seen; the sums M and their derivatives by
the positions are constants of a training. With W = ∂E/∂M the forces are linear in W, F = −Jᵀ W, and so is the virial;
the gradient of a loss by W is the same map the other way round. Nothing else of a step sees pairs.
"""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003 - of a NamedTuple
from typing import TYPE_CHECKING, NamedTuple

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


class Geometry(NamedTuple):
    """Constants of a batch; b counts harmonics, k functions of the basis."""

    slots: Slots
    own: Tensor  # (A,) types
    of_type: Tensor  # (A, T, w) one-hot types of the neighbours
    slope: Tensor  # (A, w, k) derivatives of the radial basis
    table: Tensor  # (A, 2v, T k): the angular basis, then its derivatives, in the columns of the neighbour's type
    y: Tensor  # (A, v, b)
    turn: Tensor  # (A, v, 3, b): derivatives of the harmonics by the vector, 1/Å
    radial: Tensor  # (A, T k) sums of the radial basis
    angular: Tensor  # (A, T k, b) sums of the angular basis times harmonics


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
    T, v = sizes.types, width
    one = torch.arange(T, device=types.device)
    of_type = (slots.types[:, None, :] == one[:, None]).to(slots.r.dtype)  # (A, T, w)
    f, slope = radial_functions(slots.r, cutoff_radial[types[:, None], slots.types], sizes.radial)
    radial = torch.bmm(of_type, f).reshape(A, -1)
    tj, r, unit = slots.types[:, :v], slots.r[:, :v], slots.unit[:, :, :v]
    basis = torch.cat(radial_functions(r, cutoff_angular[types[:, None], tj], sizes.angular), dim=1)  # (A, 2v, k)
    mine = of_type[:, :, :v].transpose(1, 2).repeat(1, 2, 1)  # (A, 2v, T)
    table = (mine[..., None] * basis[:, :, None, :]).reshape(A, 2 * v, -1)
    direction = unit.permute(1, 2, 0).reshape(A * v, 3)
    found = values(direction, tables).view(A, v, 5, -1)
    y = found[:, :, 0]
    turn = found[:, :, 1:4] - direction.view(A, v, 3, 1) * found[:, :, 4:]
    turn = turn / r[:, :, None, None]
    angular = torch.bmm(table[:, :v].transpose(1, 2), y)
    return Geometry(slots, types, of_type, slope, table, y, turn, radial, angular)


class PairMap(NamedTuple):
    """The linear map from derivatives by the sums to forces and virials, and the same map the other way round."""

    forces: Callable[[Geometry, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
    spread: Callable[[Geometry, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class PairForces(torch.autograd.Function):
    """Forces and virials of the derivatives by the sums."""

    @staticmethod
    def forward(ctx, radial: Tensor, angular: Tensor, geometry: Geometry, frame: Tensor, n_frames: int, by: PairMap):  # type: ignore[no-untyped-def]
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
    slots = geometry.slots
    A, T = geometry.of_type.shape[:2]
    v = geometry.y.shape[1]
    table = radial.view(A, T, -1)
    # Both ends of a radial pair at once: lookups, where adding to the neighbour would be a scattered sum.
    here = torch.arange(A, device=radial.device)[:, None]
    weight = table[here, slots.types] + table[slots.neighbor, geometry.own[:, None]]  # (A, w, k)
    pull = (geometry.slope * weight).sum(dim=2) * slots.unit  # (3, A, w)
    by = torch.bmm(geometry.table, angular)  # (A, 2v, b): by Y_b, then by r and Y_b
    outward = (by[:, v:] * geometry.y).sum(dim=2)
    sideways = (by[:, :v, None] * geometry.turn).sum(dim=3)  # (A, v, 3)
    push = sideways.permute(2, 0, 1) + outward * slots.unit[:, :, :v]  # (3, A, v): angular ∂U_i/∂r_ij
    forces = (pull.sum(dim=2) + push.sum(dim=2)).T
    forces = forces.index_add(0, slots.neighbor[:, :v].reshape(-1), -push.reshape(3, -1).T)
    half = 0.5 * pull
    half[:, :, :v] += push
    return forces, virial_of(half, slots, frame, n_frames)


def virial_of(push: Tensor, slots: Slots, frame: Tensor, n_frames: int) -> Tensor:
    """−Σ r ⊗ ∂U/∂r of each frame, (B, 9), of the derivatives (3, A, w)."""
    vector = slots.unit * slots.r
    own = torch.bmm(vector.permute(1, 0, 2), push.permute(1, 2, 0)).reshape(-1, 9)
    return torch.zeros((n_frames, 9), dtype=own.dtype, device=own.device).index_add(0, frame, own, alpha=-1.0)


def spread_of(geometry: Geometry, by_forces: Tensor, by_virial: Tensor, frame: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives by forces (A, 3) and virials (B, 9) → derivatives by ∂E/∂M."""
    slots = geometry.slots
    A = len(frame)
    v = geometry.y.shape[1]
    vector = slots.unit * slots.r
    own = by_virial[frame].reshape(A, 3, 3)
    # Derivative of the loss by ∂U_i/∂r_ij.
    shift = by_forces.T[:, :, None] - by_forces[slots.neighbor].permute(2, 0, 1)
    shift = shift - torch.bmm(own.transpose(1, 2), vector.permute(1, 0, 2)).permute(1, 0, 2)  # (3, A, w)
    along = (shift * slots.unit).sum(dim=0)  # (A, w)
    radial = torch.bmm(geometry.of_type, geometry.slope * along[..., None]).reshape(A, -1)
    sideways = (shift[:, :, :v].permute(1, 2, 0)[..., None] * geometry.turn).sum(dim=2)  # (A, v, b)
    outward = geometry.y * along[:, :v, None]
    angular = torch.bmm(geometry.table.transpose(1, 2), torch.cat([sideways, outward], dim=1))
    return radial, angular
