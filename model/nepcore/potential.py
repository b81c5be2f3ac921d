"""NEP: the parameters of a model as tensors, the same for serving and for training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from .elements import NUMBERS
from .files.nep_layout import SWITCHES
from .physics import screening

if TYPE_CHECKING:
    from .files.nep_txt import NepFile


DTYPES = {"float32": torch.float32, "float64": torch.float64}
"""Arithmetic by its name."""


class NEP(nn.Module):
    """A neuroevolution potential: descriptors, networks and ZBL tables of one model file.

    T types, M networks (1 for version 3, else T), D inputs (with the temperature, where there is one), H neurons.

    Attributes:
        c_radial, c_angular: (n, k, T, T) coefficients; first type index: centre, second: neighbour.
        w0, b0, w1, b1, w2: Networks; (M, H, D), (M, H), then (M, H), or with two layers (M, H2, H), (M, H2), (M, H2).
        bias: () common output bias; ``type_bias`` (T,) of version 5, zero in other versions. Both are subtracted.
        q_scaler: (D,).
        cutoff_radial, cutoff_angular: (T, T) pair cutoffs, Å, float64 whatever the dtype of the rest.
    """

    c_radial: Tensor
    c_angular: Tensor
    w0: Tensor
    b0: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    bias: Tensor
    type_bias: Tensor
    q_scaler: Tensor
    cutoff_radial: Tensor
    cutoff_angular: Tensor
    zbl_charge: Tensor
    zbl_rate: Tensor
    zbl_inner: Tensor
    zbl_outer: Tensor
    zbl_terms: Tensor

    def __init__(self, file: NepFile, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.elements = file.elements
        self.version = file.version
        self.temperature = file.temperature
        self.has_zbl = file.zbl != "none"
        self.two_layers = len(file.hidden) == 2
        self.l_max = file.l_max
        self.switches = tuple(name for name in SWITCHES if file.switches[name])
        self.max_cutoff = float(np.max(file.cutoff_radial))

        def parameter(name: str, value: object) -> None:
            tensor = torch.tensor(np.asarray(value), dtype=dtype)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

        T = len(file.elements)
        for name in ("c_radial", "c_angular", "w0", "b0", "w1", "bias"):
            parameter(name, getattr(file, name))
        if file.b1 is not None and file.w2 is not None:
            parameter("b1", file.b1)
            parameter("w2", file.w2)
        parameter("type_bias", np.zeros(T) if file.type_bias is None else file.type_bias)
        self.register_buffer("q_scaler", torch.tensor(file.q_scaler, dtype=dtype))
        self.register_buffer("cutoff_radial", _pair_mean(file.cutoff_radial))
        self.register_buffer("cutoff_angular", _pair_mean(file.cutoff_angular))
        if self.has_zbl:
            for name, value in _zbl_tables(file).items():
                self.register_buffer(name, torch.tensor(value, dtype=dtype))

    @property
    def dtype(self) -> torch.dtype:
        """Arithmetic of everything but cutoffs and positions."""
        return self.q_scaler.dtype

    @property
    def n_radial(self) -> int:
        """Radial functions, n_max + 1."""
        return self.c_radial.shape[0]

    @property
    def n_angular(self) -> int:
        """Angular functions, n_max + 1."""
        return self.c_angular.shape[0]

    @property
    def dim(self) -> int:
        """Length of the network input."""
        return len(self.q_scaler)


def _pair_mean(cutoff: np.ndarray) -> Tensor:
    values = torch.tensor(cutoff, dtype=torch.float64)
    return (values[:, None] + values[None, :]) / 2.0


def _zbl_tables(file: NepFile) -> dict[str, np.ndarray]:
    """Tables of :func:`nepcore.physics.zbl.pair_energy` by pair of types: (T, T), the terms (T, T, 4, 2)."""
    T = len(file.elements)
    charge = np.array([NUMBERS[symbol] for symbol in file.elements], dtype=np.float64)
    power = charge**0.23
    inner, outer = np.zeros((T, T)), np.zeros((T, T))
    terms = np.broadcast_to(np.array(screening.UNIVERSAL), (T, T, 4, 2)).copy()
    if file.zbl == "flexible":
        assert file.zbl_pairs is not None
        first, second = np.triu_indices(T)
        for a, b in ((first, second), (second, first)):
            inner[a, b], outer[a, b] = file.zbl_pairs[:, 0], file.zbl_pairs[:, 1]
            terms[a, b] = file.zbl_pairs[:, 2:].reshape(-1, 4, 2)
    else:
        assert file.zbl_outer is not None
        outer[:] = file.zbl_outer
        if file.zbl == "typewise":
            assert file.zbl_factor is not None
            radius = np.array([screening.RADII[NUMBERS[symbol] - 1] for symbol in file.elements])
            outer = np.minimum(file.zbl_factor * (radius[:, None] + radius[None, :]), outer)
        else:
            assert file.zbl_inner is not None
            inner[:] = file.zbl_inner
    return {
        "zbl_charge": charge[:, None] * charge[None, :],
        "zbl_rate": (power[:, None] + power[None, :]) * screening.SCREENING,
        "zbl_inner": inner,
        "zbl_outer": outer,
        "zbl_terms": terms,
    }
