"""What passes between the neighbour search, the kernels of the model, and the sums behind them.

N atoms (rows; padded ones have no neighbours), S structures, MR and MA slots for the neighbours of an atom. A position
is three whole numbers, one for each cell vector, in steps of a power of two of that vector, so that differences are
exact: with ``d[k] = rows[j, k] - rows[i, k] (+ n[k] * units[s, k])``, wrapping, the vector from i to j is
``Σ_k float(d[k]) * cells[s, 3k:3k+3]``, in Å. Where a cell is wider than two cutoffs the difference wraps by itself and
its unit is zero; elsewhere ``n`` are the whole cells that the neighbour is displaced by, packed into an image code of
three times ten bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from .model import Model


class Lists(NamedTuple):
    """Atoms and their neighbours on the device, int32 where nothing else is said.

    The neighbours of an atom are sorted by element, then by the caller's order of atoms, then by image. Slots behind
    the count hold anything.
    """

    images: bool  # whether neighbours carry image codes
    rows: Tensor  # (N, 4): position, element among those that are present
    structure: Tensor  # (N,)
    cells: Tensor  # (S, 9) float32, Å a step
    units: Tensor  # (S, 3): steps of a whole cell, 0 where differences wrap
    temperatures: Tensor  # (S,) float32, K
    radial_index: Tensor  # (N, MR)
    radial_count: Tensor  # (N,)
    radial_image: Tensor | None  # (N, MR)
    angular_index: Tensor  # (N, MA)
    angular_count: Tensor  # (N,)
    angular_image: Tensor | None  # (N, MA)
    angular_reverse: Tensor  # (N, MA): where the pair from j to i stands, j * MA + slot


class Outputs(NamedTuple):
    """What the kernels of the model fill."""

    energy: Tensor  # (N,) float64, eV
    forces: Tensor  # (N, 3) float32, eV/Å
    virials: Tensor | None  # (N, 9) float32, eV, xx xy xz yx yy yz zx zy zz
    descriptors: Tensor | None  # (N, D) float32, scaled


class Tables(NamedTuple):
    """What the kernels read of a model, for some of its elements."""

    model: Model
    place: Tensor  # (256,) int32: element among those that are present, by atomic number
    cutoff_radial: float  # Å, of the whole model: a structure's lists do not depend on the elements of others
    cutoff_angular: float
