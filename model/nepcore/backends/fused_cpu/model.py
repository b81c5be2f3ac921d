"""The parameters of a model, packed for the kernels: flat arrays padded to whole vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import zbl
from .invariants import SWITCHES, legendre_tables, product_terms, square_weights
from .vec import REGISTER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nepcore.files.nep_txt import NepFile

    from .vec import Width
    from .words import Doubles, Ints, Reals

ANGULAR_TILE = 8
"""Harmonics whose sums are held in registers at a time; their number is padded to a multiple."""


class Model(NamedTuple):
    """What the kernels read.

    R, A: radial and angular functions; K: Chebyshev functions; D: network inputs; H: neurons. Their padded forms are
    multiples of the widths.
    """

    single: bool  # compute dtype is float32
    n_types: int
    n_networks: int
    temperature: bool
    cutoff: float  # largest radial
    squared_radial: Doubles  # (T, T): squared pair cutoffs
    squared_angular: Doubles  # (T, T)
    inverse_radial: Reals  # (T, T): inverse pair cutoffs
    inverse_angular: Reals
    one_list: bool  # radial and angular part see the same neighbours and the same f_k
    n_radial: int
    rows_radial: int  # R padded to the function width
    k_radial: int
    k_row: int  # k_radial padded to the full width
    n_angular: int
    rows_angular: int
    k_angular: int
    l_max: int
    n_harmonics: int  # padded to ANGULAR_TILE
    c_radial: Reals  # (T, T, K, R padded): centre, neighbour
    c_radial_k: Reals  # (T, T, R, K padded)
    c_angular: Reals  # (T, T, K, A padded)
    squares: Reals  # factor of s_b² in its invariant
    legendre: Reals  # (9, 9, 9): l, m, power
    q222: bool
    q1111: bool
    term_factors: Reals
    term_sums: Ints  # (terms, 3)
    term_ends: Ints  # (5,)
    dim: int
    dim_row: int  # D padded to the full width
    scaler: Reals  # (D,)
    hidden: int
    hidden_row: int
    hidden2: int  # 0 with one layer
    hidden2_row: int
    w0: Reals  # (M, H, D padded), times the scaler
    w0_t: Reals  # (M, D, H padded), times the scaler
    b0: Reals  # (M, H padded)
    w1: Reals  # (M, H padded); with two layers (M, H2, H padded)
    w1_t: Reals  # two layers: (M, H, H2 padded)
    b1: Reals  # (M, H2 padded)
    w2: Reals  # (M, H2 padded)
    bias: Doubles  # (T,): common and own output bias
    zbl: bool
    zbl_outer: float  # largest
    zbl_pairs: Doubles  # (T, T, zbl.WIDTH)


class Widths(NamedTuple):
    """Lanes over neighbours (and over everything without a natural length), and lanes over functions."""

    full: Width
    functions: Width


def widths(n_angular: int, dtype: str) -> Widths:
    """Vector widths for this machine."""
    full = REGISTER // np.dtype(dtype).itemsize
    return Widths((0,) * full, (0,) * (8 if n_angular <= 8 else 16))


def padded(n: int, width: int) -> int:
    """The multiple of ``width`` that is not less than ``n``."""
    return -(-n // width) * width


def aligned(size: int, dtype: str) -> NDArray[Any]:
    """Zeros that begin at a cache line, so that whole vectors do too."""
    itemsize = np.dtype(dtype).itemsize
    room = np.zeros(size + 64 // itemsize, dtype)
    skip = -room.ctypes.data % 64 // itemsize
    return room[skip : skip + size]


def _pad(array: NDArray[np.float64], axis: int, size: int, dtype: str) -> NDArray[Any]:
    """Zeros behind the end of one axis; flat, in ``dtype``."""
    shape = list(array.shape)
    shape[axis] = size
    out = aligned(int(np.prod(shape)), dtype).reshape(shape)
    index: list[Any] = [slice(None)] * array.ndim
    index[axis] = slice(array.shape[axis])
    out[tuple(index)] = array
    return out.reshape(-1)


def pack(file: NepFile, dtype: str, width: Widths) -> Model:
    """Pack a model for the kernels."""
    full, functions = len(width.full), len(width.functions)
    T, M, D = len(file.elements), len(file.w0), file.dim
    R, A = file.n_max_radial + 1, file.n_max_angular + 1
    rows_r, rows_a = padded(R, functions), padded(A, functions)
    k_row = padded(file.basis_radial + 1, full)
    cut_r = (file.cutoff_radial[:, None] + file.cutoff_radial[None, :]) / 2
    cut_a = (file.cutoff_angular[:, None] + file.cutoff_angular[None, :]) / 2
    L = file.l_max
    n_harmonics = padded(L * (L + 2), ANGULAR_TILE)
    squares = np.zeros(n_harmonics)
    squares[: L * (L + 2)] = square_weights(L)
    factors, sums, ends = product_terms(file.switches)
    # Sums of a degree that the model does not have are zero, and so are their products.
    present = np.all(sums < L * (L + 2), axis=1)
    factors, sums = np.where(present, factors, 0.0), np.where(present[:, None], sums, 0)

    H = file.hidden[0]
    H2 = file.hidden[1] if len(file.hidden) > 1 else 0
    hidden_row, hidden2_row, dim_row = padded(H, full), padded(H2, full), padded(D, full)
    w0 = file.w0 * file.q_scaler
    w1 = file.w1 if H2 else file.w1[:, None, :]
    none = np.zeros(1, dtype)
    bias = np.full(T, float(file.bias))
    if file.type_bias is not None:
        bias = bias + file.type_bias
    repulsion = zbl.pair_table(file)

    def cast(array: NDArray[np.float64]) -> NDArray[Any]:
        return np.ascontiguousarray(array, dtype).reshape(-1)

    return Model(
        single=dtype == "float32", n_types=T, n_networks=M, temperature=bool(file.temperature),
        cutoff=float(cut_r.max()),
        squared_radial=(cut_r**2).reshape(-1), squared_angular=(cut_a**2).reshape(-1),
        inverse_radial=cast(1.0 / cut_r), inverse_angular=cast(1.0 / cut_a),
        one_list=bool((cut_r == cut_a).all()) and file.basis_radial == file.basis_angular,
        n_radial=R, rows_radial=rows_r, k_radial=file.basis_radial + 1, k_row=k_row,
        n_angular=A, rows_angular=rows_a, k_angular=file.basis_angular + 1, l_max=L, n_harmonics=n_harmonics,
        c_radial=_pad(file.c_radial.transpose(2, 3, 1, 0), 3, rows_r, dtype),
        c_radial_k=_pad(file.c_radial.transpose(2, 3, 0, 1), 3, k_row, dtype),
        c_angular=_pad(file.c_angular.transpose(2, 3, 1, 0), 3, rows_a, dtype),
        squares=cast(squares), legendre=cast(legendre_tables()[0]),
        q222=bool(file.switches[SWITCHES[0]]), q1111=bool(file.switches[SWITCHES[1]]),
        term_factors=cast(factors) if len(factors) else none, term_sums=sums.reshape(-1), term_ends=ends,
        dim=D, dim_row=dim_row, scaler=cast(file.q_scaler),
        hidden=H, hidden_row=hidden_row, hidden2=H2, hidden2_row=hidden2_row,
        w0=_pad(w0, 2, dim_row, dtype), w0_t=_pad(w0.transpose(0, 2, 1), 2, hidden_row, dtype),
        b0=_pad(file.b0, 1, hidden_row, dtype),
        w1=_pad(w1, 2, hidden_row, dtype),
        w1_t=_pad(w1.transpose(0, 2, 1), 2, hidden2_row, dtype) if H2 else none,
        b1=none if file.b1 is None else _pad(file.b1, 1, hidden2_row, dtype),
        w2=none if file.w2 is None else _pad(file.w2, 1, hidden2_row, dtype),
        bias=bias,
        zbl=repulsion is not None,
        zbl_outer=0.0 if repulsion is None else float(repulsion[..., zbl.OUTER].max()),
        zbl_pairs=np.zeros(1) if repulsion is None else repulsion.reshape(-1),
    )  # fmt: skip
