"""One evaluation of a model on the device: the kernels of the physics in their order, and what they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from .angular import angular_forces, angular_gather, angular_slopes, angular_sums
from .branches import Branches
from .model import ZBL_WIDTH, padded
from .network import element_order, network, radial_weights
from .radial import radial_forces, radial_sums
from .repulsion import repulsion

if TYPE_CHECKING:
    from torch import Tensor

    from .lists import Lists, Outputs
    from .model import Model, Shape


FEW_ATOMS = 8192
"""Atoms that are counted one by one."""

RADIAL, REVERSE = 0, 1
"""Branches: the radial part, beside the angular one, and the list of reverse pairs, beside the sums."""


@dataclass(frozen=True)
class Tiles:
    """Shapes of the programs: atoms, neighbours at a time, warps. They change the last bits of results.

    Attributes:
        radial_sums, radial_forces, angular_sums, angular_forces, gather, repulsion: (atoms, lanes of an atom, warps).
        slopes: (lanes, warps).
        network: (atoms of a lane, lanes of an atom, of both together, warps).
        weights: (lanes, warps).
    """

    radial_sums: tuple[int, int, int]
    radial_forces: tuple[int, int, int]
    angular_sums: tuple[int, int, int]
    angular_forces: tuple[int, int, int]
    gather: tuple[int, int, int]
    repulsion: tuple[int, int, int]
    slopes: tuple[int, int]
    network: tuple[int, int, int, int]
    weights: tuple[int, int]


def tiles(shape: Shape) -> Tiles:
    """Those of a model's shape on a GPU that large structures keep busy."""
    return Tiles(
        radial_sums=(32, 4, 4) if shape.apart else (16, 8, 4),
        radial_forces=(8, 4, 1) if shape.apart else (4, 8, 1),
        angular_sums=(16, 2, 1),
        angular_forces=(4, 8, 1) if shape.few else (1, 32, 1),
        gather=(16, 8, 4),
        repulsion=(16, 8, 4),
        slopes=(128, 4),
        network=(2, 4, 8, 1),
        weights=(128, 4),
    )


def hasty(shape: Shape) -> Tiles:
    """Those for small structures, of which there may be one alone: many lanes an atom, so that nobody waits long.

    Batches of many do not take longer by them: most of their time goes into the search and the copies.
    """
    return Tiles(
        radial_sums=(1, 32, 1),
        radial_forces=(1, 32, 1),
        angular_sums=(4, 8, 1) if shape.few else (2, 16, 1),
        angular_forces=(4, 8, 1) if shape.few else (1, 32, 1),
        gather=(4, 8, 1) if shape.few else (1, 32, 1),
        repulsion=(1, 32, 1),
        slopes=(32, 1),
        network=(1, 8, 4, 1),
        weights=(32, 1),
    )


def interpreted(shape: Shape) -> Tiles:
    """Those for Triton's interpreter: each operation costs the same, however large."""
    del shape
    wide = (64, 64, 4)
    return Tiles(wide, wide, (64, 32, 4), (64, 32, 4), wide, wide, (1024, 4), (8, 4, 16, 1), (1024, 4))


def scratch(
    model: Model, n: int, mr: int, ma: int, *, virials: bool = False, descriptors: bool = False
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Scratch tensors of :func:`forward` for n rows with mr and ma slots: name → shape, dtype."""
    del mr, virials, descriptors
    shape, P = model.shape, model.elements
    many = P > 1
    deep = len(shape.hidden) > 1
    return {
        "descriptor": ((shape.dim, n), torch.float32),
        "sums": ((n, shape.n_harmonics, shape.row_angular), torch.float32),
        "weights": ((n, P, shape.row_radial), torch.float32),
        "push": ((n, ma, 4), torch.float32),
        "pull": ((n, 4), torch.float32),
        "order": ((P, n) if many else (1, 1), torch.int32),
        "tally": ((P,), torch.int32),
        "hidden": ((sum(shape.hidden), n) if deep else (1, 1), torch.float32),
    }


def forward(
    model: Model, lists: Lists, outputs: Outputs, scratch: dict[str, Tensor], sizes: Tiles | None = None,
    branches: Branches | None = None, delivered: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill the outputs: launches kernels, allocates nothing and waits for nothing.

    Args:
        model: For the elements that are present, on the device of the lists.
        lists: Atoms and neighbours.
        outputs: Where results go; virials and descriptors where they are wanted. Rows beyond the last atom hold
            anything.
        scratch: Tensors of :func:`scratch`.
        sizes: Shapes of the programs; left out, those of large structures.
        branches: Streams for kernels beside others, two at least. The last kernel, and it alone, waits for branch
            :data:`REVERSE`, on which the list of reverse pairs may still be made, and for :data:`RADIAL`, on which
            energies are written.
        delivered: Where forces go when they are complete, if not to the outputs.
    """
    shape = model.shape
    if sizes is None:
        sizes = interpreted(shape) if triton.knobs.runtime.interpret else tiles(shape)
    if branches is None:
        branches = Branches(torch.device("cpu"))
    N, P = lists.rows.shape[0], model.elements
    MR, MA = lists.radial_index.shape[1], lists.angular_index.shape[1]
    if not N:
        return
    atoms = (lists.rows, lists.structure, lists.cells, lists.units)
    radial_image, angular_image = lists.radial_image, lists.angular_image
    radial = (lists.radial_index, lists.radial_index if radial_image is None else radial_image, lists.radial_count)
    angular = (lists.angular_index, lists.angular_index if angular_image is None else angular_image,
               lists.angular_count)  # fmt: skip
    q, sums, push, pull = scratch["descriptor"], scratch["sums"], scratch["push"], scratch["pull"]
    order, tally = scratch["order"], scratch["tally"]
    wants = outputs.virials is not None
    virials = outputs.virials if outputs.virials is not None else outputs.forces
    images = lists.images
    options: dict[str, Any] = {"enable_fp_fusion": True}
    many = P > 1
    with branches.aside(RADIAL):
        A, G, warps = sizes.radial_sums
        radial_sums[(_cdiv(N, A),)](
            *atoms, *radial, model.c_radial, model.inverse_radial, q, tally, N, MR, P,
            shape.n_radial, shape.k_radial, shape.row_radial, P if shape.apart else 0, images, A, G,
            num_warps=warps, **options,
        )  # fmt: skip
        if many:
            each = N <= FEW_ATOMS
            A = 256 if each else 1024  # as many as there are lanes at least, with 64 a warp too
            element_order[(_cdiv(N, A),)](
                lists.rows, lists.structure, tally, order, N, P, each, A, num_warps=4, **options
            )  # fmt: skip
    A, G, warps = sizes.angular_sums
    angular_sums[(_cdiv(N, A), _cdiv(shape.n_angular, shape.group))](
        *atoms, *angular, model.c_angular, model.inverse_angular, sums, q, N, MA, P,
        shape.n_angular, shape.row_angular, shape.k_angular, shape.functions,
        padded(shape.k_angular), shape.l_max, shape.switches, shape.n_radial, images, A, G, shape.group,
        num_warps=warps, **options,
    )  # fmt: skip
    branches.join(RADIAL)
    R, S, A, warps = sizes.network
    network[(_cdiv(N, R * A) + (P if many else 0),)](
        lists.structure, lists.temperatures, order, tally, model.w0, model.b0, model.w1, model.b1,
        model.w2, model.bias, model.scaler, scratch["hidden"], q, outputs.energy,
        q if outputs.descriptors is None else outputs.descriptors, N, P, model.networks,
        shape.dim, shape.row_inputs, shape.neurons, shape.hidden[1] if len(shape.hidden) > 1 else 0,
        shape.temperature, outputs.descriptors is not None, many, R, S, A, num_warps=warps, **options,
    )  # fmt: skip
    with branches.aside(RADIAL):
        lanes, warps = sizes.weights
        radial_weights[(_cdiv(N * P, lanes),)](
            lists.rows, q, model.c_radial, scratch["weights"], N, P, shape.n_radial, shape.row_radial, lanes,
            num_warps=warps, **options,
        )  # fmt: skip
        A, G, warps = sizes.radial_forces
        radial_forces[(_cdiv(N, A),)](
            *atoms, *radial, scratch["weights"], model.inverse_radial, outputs.forces, virials, N, MR, P,
            shape.k_radial, shape.row_radial, images, wants, A, G, num_warps=warps, **options,
        )  # fmt: skip
        if shape.zbl:
            A, G, warps = sizes.repulsion
            repulsion[(_cdiv(N, A),)](
                *atoms, *angular, model.inverse_angular, model.zbl, outputs.energy, outputs.forces, virials, N, MA, P,
                ZBL_WIDTH, images, True, wants, A, G, num_warps=warps, **options,
            )  # fmt: skip
    lanes, warps = sizes.slopes
    angular_slopes[(_cdiv(N * shape.row_angular, lanes),)](
        sums, q, N, shape.n_angular, shape.row_angular, shape.l_max, shape.switches, shape.n_blocks, shape.n_radial,
        shape.group, lanes, num_warps=warps, **options,
    )  # fmt: skip
    A, G, warps = sizes.angular_forces
    angular_forces[(_cdiv(N, A),)](
        *atoms, *angular, model.c_angular, model.inverse_angular, sums, push, pull, N, MA, P,
        shape.n_angular, shape.row_angular, shape.k_angular, shape.functions,
        padded(shape.k_angular), shape.l_max, shape.group, images, A, G, num_warps=warps, **options,
    )  # fmt: skip
    branches.join(RADIAL, REVERSE)
    A, G, warps = sizes.gather
    angular_gather[(_cdiv(N, A),)](
        *atoms, *angular, lists.angular_reverse, push, pull, outputs.forces,
        outputs.forces if delivered is None else delivered, virials, N, MA, images, wants, A, G,
        num_warps=warps, **options,
    )  # fmt: skip


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
