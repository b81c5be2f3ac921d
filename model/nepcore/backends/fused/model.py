"""The parameters of a model as the kernels read them, cut down to the elements that are present."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from nepcore.backends.fused_cpu.zbl import INNER, OUTER, TERMS, pair_table
from nepcore.files.nep_layout import SWITCHES
from nepcore.physics.harmonics import width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from nepcore.files.nep_txt import NepFile

MOST_ELEMENTS = 255
"""An element is the low byte of a position's row."""

MOST_INPUTS = 256
"""Network inputs that the lanes of an atom can hold, each with its slope."""

INPUTS_PADDED = 8
"""Rows over the network inputs are padded to a multiple: the most lanes that share the inputs of an atom."""

ZBL_WIDTH = 13
"""Numbers a pair of elements in :attr:`Model.zbl`."""

MOST_APART = 3
"""Elements of a model up to which radial sums are kept apart by the neighbour's element."""

FEW = 12
"""Angular neighbours, at most, for which fewer lanes work on one atom."""

GROUP = 4
"""Angular functions of a program, about; five alone stay together."""


@dataclass(frozen=True)
class Shape:
    """What the code of the kernels depends on: the same for all fine-tunes of a model, and for any elements.

    Attributes:
        n_radial, n_angular: Radial and angular functions, n_max + 1.
        k_radial, k_angular: Chebyshev functions, K + 1.
        l_max: Highest degree.
        switches: Higher invariants that are on, one bit each in the order of the format.
        hidden: Neurons of one or two layers.
        temperature: Whether it is the last input.
        zbl: Whether there is a repulsion.
        apart: Whether radial sums are kept apart by element. It depends on the model, not on the elements present: a
            structure's bits must not depend on its batch.
        few: Whether an atom has few angular neighbours, as far as the model's file tells.
    """

    n_radial: int
    n_angular: int
    k_radial: int
    k_angular: int
    l_max: int
    switches: int
    hidden: tuple[int, ...]
    temperature: bool
    zbl: bool
    apart: bool
    few: bool

    @classmethod
    def of(cls, file: NepFile) -> Shape:
        """Of a model."""
        return cls(
            file.n_max_radial + 1, file.n_max_angular + 1, file.basis_radial + 1, file.basis_angular + 1, file.l_max,
            sum(1 << bit for bit, name in enumerate(SWITCHES) if file.switches[name]),
            file.hidden, bool(file.temperature), file.zbl != "none",
            len(file.elements) <= MOST_APART,
            file.mn_angular is not None and file.mn_angular <= FEW,
        )  # fmt: skip

    @property
    def n_blocks(self) -> int:
        """Angular blocks of the descriptor."""
        return self.l_max + self.switches.bit_count()

    @property
    def n_harmonics(self) -> int:
        """Polynomials Y_b."""
        return width(self.l_max)

    @property
    def dim(self) -> int:
        """Network inputs D, the temperature included."""
        return self.n_radial + self.n_angular * self.n_blocks + self.temperature

    @property
    def neurons(self) -> int:
        """Neurons of the first layer; an even number where it is the only one."""
        return padded(self.hidden[0], 2) if len(self.hidden) == 1 else self.hidden[0]

    @property
    def row_inputs(self) -> int:
        """Numbers in a row over the network inputs."""
        return padded(self.dim, INPUTS_PADDED)

    @property
    def row_radial(self) -> int:
        """Numbers in a row over the radial basis: a multiple of four."""
        return padded(self.k_radial)

    @property
    def group(self) -> int:
        """Angular functions of a program."""
        groups = 1 if self.n_angular <= GROUP + 1 else -(-self.n_angular // GROUP)
        return -(-self.n_angular // groups)

    @property
    def row_angular(self) -> int:
        """Numbers in a row over the angular functions, each group of which is padded to a multiple of four."""
        return -(-self.n_angular // self.group) * padded(self.group)

    @property
    def functions(self) -> int:
        """Angular functions that coefficients are padded to: whole groups."""
        return padded(self.n_angular, self.group)


@dataclass(frozen=True, eq=False)
class Model:
    """Tensors of a model for P present elements, float32.

    Coefficients are those of ½ fc T_k, not of f_k; see :func:`nepcore.backends.fused.pairs.basis`. First element
    index: centre, second: neighbour.

    Attributes:
        shape: What the code depends on.
        present: Indices of the present elements among those of the model, ascending.
        cutoff_radial, cutoff_angular: Largest of the present pairs, Å.
        c_radial: (P, P, n_radial, row_radial), zero beyond k_radial.
        c_angular: (P, P, functions, k_angular padded to four).
        inverse_radial, inverse_angular: Inverse pair cutoffs, 1/Å, (P, P).
        networks: M: one, or one for each present element.
        w0: (M, H, D), times the scaler, rows padded with zeros to INPUTS_PADDED. b0: (M, H). With one layer there is a
            neuron of zeros behind an odd number.
        w1: (M, H), or (M, H2, H) with two layers; b1, w2: (M, H2), one zero without a second layer.
        bias: Output bias of each element, (P,) float64.
        scaler: (D,).
        zbl: (P, P, 13): inner and outer radius, K Z_i Z_j, 1/screening length, inverse of the outer less the
            inner radius, four times amplitude and decay rate.
    """

    shape: Shape
    present: tuple[int, ...]
    cutoff_radial: float
    cutoff_angular: float
    c_radial: Tensor
    c_angular: Tensor
    inverse_radial: Tensor
    inverse_angular: Tensor
    networks: int
    w0: Tensor
    b0: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    bias: Tensor
    scaler: Tensor
    zbl: Tensor

    @property
    def elements(self) -> int:
        """Number of present elements, P."""
        return len(self.present)

    @property
    def dim(self) -> int:
        """Network inputs D."""
        return self.shape.dim


def padded(n: int, to: int = 4) -> int:
    """The multiple of ``to`` that is not less than n."""
    return -(-n // to) * to


def unfit(file: NepFile) -> str:
    """Why the kernels cannot evaluate a model, or an empty text."""
    if len(file.elements) > MOST_ELEMENTS:
        return f"positions carry up to {MOST_ELEMENTS} elements, the model has {len(file.elements)}"
    if file.dim > MOST_INPUTS:
        return f"networks of up to {MOST_INPUTS} inputs, the model has {file.dim}"
    return ""


def prepare(file: NepFile, elements: Sequence[int], device: torch.device) -> Model:
    """Tensors of a model for the elements with the indices ``elements`` (ascending) in the model."""
    present = np.asarray(elements, dtype=np.int64)
    both = np.ix_(present, present)
    shape = Shape.of(file)
    networks = len(present) if len(file.w0) > 1 else 1

    def own(table: NDArray[np.float64] | None) -> NDArray[np.float64]:
        if table is None:
            return np.zeros(1)
        return table if len(table) == 1 else table[present]

    def tensor(values: NDArray[np.float64], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)

    odd = shape.neurons - file.hidden[0]
    bias = np.full(len(file.elements), float(file.bias))
    if file.type_bias is not None:
        bias = bias + file.type_bias
    return Model(
        shape=shape,
        present=tuple(present.tolist()),
        cutoff_radial=float(file.cutoff_radial[present].max()),
        cutoff_angular=float(file.cutoff_angular[present].max()),
        c_radial=tensor(_coefficients(file.c_radial, both, shape.n_radial)),
        c_angular=tensor(_coefficients(file.c_angular, both, shape.functions)),
        inverse_radial=tensor(_inverse(file.cutoff_radial, present)),
        inverse_angular=tensor(_inverse(file.cutoff_angular, present)),
        networks=networks,
        w0=tensor(np.pad(own(file.w0) * file.q_scaler, ((0, 0), (0, odd), (0, shape.row_inputs - shape.dim)))),
        b0=tensor(np.pad(own(file.b0), ((0, 0), (0, odd)))),
        w1=tensor(np.pad(own(file.w1), ((0, 0), (0, odd))) if odd else own(file.w1)),
        b1=tensor(own(file.b1)),
        w2=tensor(own(file.w2)),
        bias=tensor(bias[present], torch.float64),
        scaler=tensor(file.q_scaler),
        zbl=tensor(_repulsion(file, both)),
    )


def _coefficients(c: NDArray[np.float64], both: tuple[NDArray[np.int64], ...], functions: int) -> NDArray[np.float64]:
    """(n, k, T, T) of f_k → (P, P, functions, k padded to four) of ½ fc T_k: f_k = ½ fc (T_k + T_0)."""
    n, k = c.shape[:2]
    own = c[:, :, both[0], both[1]].transpose(2, 3, 0, 1)  # (P, P, n, k)
    out = np.zeros((*own.shape[:2], functions, padded(k)))
    out[:, :, :n, :k] = own
    out[:, :, :n, 0] += own.sum(axis=3)
    return out


def _inverse(cutoffs: NDArray[np.float64], present: NDArray[np.int64]) -> NDArray[np.float64]:
    own = cutoffs[present]
    return 2.0 / (own[:, None] + own[None, :])


def _repulsion(file: NepFile, both: tuple[NDArray[np.int64], ...]) -> NDArray[np.float64]:
    table = pair_table(file)
    if table is None:
        return np.zeros((1, 1, ZBL_WIDTH))
    own = table[both]
    width = own[..., OUTER] - own[..., INNER]
    # Equal radii are a hard cutoff: with the inverse zero the switch stays at 1.
    inverse = np.where(width > 0.0, 1.0 / np.where(width > 0.0, width, 1.0), 0.0)
    return np.concatenate([own[..., :TERMS], inverse[..., None], own[..., TERMS:]], axis=2)
