"""From parameters to energies, forces and virials of a batch, differentiable by the parameters.

``sums`` is the way of training: see :mod:`nepcore.training.geometry`; ``kernels`` is the same with Triton's kernels
for the radial pairs (:mod:`nepcore.training.kernels`). The forms of the torch backends, by their names, compute the
same from the coefficients of every pair.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch

from nepcore.backends.forms import FORMS
from nepcore.backends.rows import Rows, Shape, Tables, evaluate
from nepcore.errors import ModelError
from nepcore.physics import invariants
from nepcore.potential import NEP

from .geometry import (
    PairForces,
    PairMap,
    Sizes,
    Slots,
    forces_of,
    geometry_of,
    slots_of,
    spread_of,
    virial_of,
)  # fmt: skip
from .polynomials import gradient_of, harmonics_tables, invariants_of, invariants_tables

if TYPE_CHECKING:
    from torch import Tensor

    from nepcore.files.nep_txt import NepFile

    from .batches import Arrays

_logger = logging.getLogger("nepcore")

SUMS = "sums"
BACKENDS = (SUMS, *FORMS)
"""Names of the ways to compute, on every device and in both precisions."""

KERNELS = "kernels"
"""One more, in single precision, on a GPU (and in Triton's interpreter)."""


class Found(NamedTuple):
    """What a model says of a batch, without the common energy offset and without ZBL."""

    energies: Tensor  # (A,) eV
    descriptors: Tensor  # (A, D), scaled
    forces: Tensor  # (A, 3) eV/Å
    virial: Tensor  # (B, 9) eV, row major


class Forward(Protocol):
    """A way to compute."""

    def prepare(self, arrays: Arrays, widths: tuple[int, int]) -> object:
        """What follows from the positions alone."""

    def __call__(
        self, parameters: dict[str, Tensor], q_scaler: Tensor, arrays: Arrays, prepared: object, forces: bool = True
    ) -> Found:
        """Evaluate; without ``forces``, forces and virial are zero."""


def make(
    backend: str, model: NepFile, dtype: torch.dtype, device: torch.device, *, compiled: bool = False
) -> Forward:  # fmt: skip
    """The way of that name; ``compiled``: by code that torch makes (of ``sums``, and of ``kernels`` the network).

    Raises:
        ModelError: There is none.
    """
    if backend == SUMS:
        return BySums(model, dtype, device, compiled=compiled)
    if backend == KERNELS:
        if dtype != torch.float32:
            raise ModelError(f"backend {KERNELS} computes in float32; {SUMS} is the one for float64")
        return ByKernels(model, dtype, device, compiled=compiled)
    if backend in FORMS:
        return ByForm(backend, model, dtype, device)
    raise ModelError(f"there is no backend {backend!r} for training; there are: {', '.join((*BACKENDS, KERNELS))}")


def usual(dtype: torch.dtype, device: torch.device) -> str:
    """The way that is taken where none is named: kernels where they can be had."""
    if dtype != torch.float32 or device.type != "cuda":
        return SUMS
    try:
        from . import kernels

        kernels.try_out(device)
    except Exception as error:  # a missing compiler, another driver: there is another way
        _logger.warning("training without Triton's kernels, which is slower: %s", error)
        return SUMS
    return KERNELS


class _Base:
    def __init__(self, model: NepFile, dtype: torch.dtype, device: torch.device) -> None:
        nep = NEP(model, dtype).to(device)
        self.shape = Shape.of(nep)
        self.cutoff_radial = nep.cutoff_radial.to(dtype)
        self.cutoff_angular = nep.cutoff_angular.to(dtype)
        self.far = 2.0 * nep.max_cutoff
        self.sizes = Sizes(len(model.elements), nep.c_radial.shape[1], nep.c_angular.shape[1], nep.l_max)
        self.one_network = model.version == 3


class BySums(_Base):
    """Sums over neighbours before coefficients; forces by the linear map of :mod:`nepcore.training.geometry`."""

    def __init__(self, model: NepFile, dtype: torch.dtype, device: torch.device, *, compiled: bool = False) -> None:
        super().__init__(model, dtype, device)
        self._harmonics = harmonics_tables(self.shape.l_max, dtype, device)
        self._invariants = invariants_tables(self.shape.switches, self.shape.l_max, dtype, device)
        self._geometry: Any = geometry_of
        self._atoms: Any = self._of_atoms
        self._map = PairMap(forces_of, spread_of)
        if compiled:
            # The sizes of batches differ; code for each of them would take minutes to make.
            self._geometry, self._atoms = (torch.compile(f, dynamic=True) for f in (geometry_of, self._of_atoms))
            self._map = PairMap(torch.compile(forces_of, dynamic=True), torch.compile(spread_of, dynamic=True))

    def prepare(self, arrays: Arrays, widths: tuple[int, int]) -> Any:
        """See :class:`Forward`."""
        slots = slots_of(arrays, widths, self.sizes.types, self.far)
        cutoffs = self.cutoff_radial, self.cutoff_angular
        return self._geometry(slots, widths[1], self.sizes, *cutoffs, arrays.types, self._harmonics)

    def __call__(
        self, parameters: dict[str, Tensor], q_scaler: Tensor, arrays: Arrays, prepared: object, forces: bool = True
    ) -> Found:
        """See :class:`Forward`."""
        g: Any = prepared
        temperature = arrays.temperature[arrays.frame] if self.shape.temperature else None
        energies, q, by_radial, by_angular = self._atoms(
            parameters, q_scaler, g.center, g.radial, g.angular, temperature
        )
        n_frames = len(arrays.atoms)
        if not forces:
            return Found(energies, q, q.new_zeros((len(q), 3)), q.new_zeros((n_frames, 9)))
        f, virial = PairForces.apply(by_radial, by_angular, g, arrays.frame, n_frames, self._map)
        return Found(energies, q, f, virial)

    def _of_atoms(
        self, parameters: dict[str, Tensor], q_scaler: Tensor, center: Tensor, radial: Tensor, angular: Tensor,
        temperature: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Site energies, descriptors, and the derivatives by the sums."""
        A = center.shape[0]
        n_r, k_r, T, _ = parameters["c_radial"].shape
        table = parameters["c_radial"].permute(3, 1, 2, 0).reshape(T * k_r, T * n_r)
        s_r = ((radial @ table).view(A, T, n_r) * center[:, :, None]).sum(dim=1)  # (A, n)
        c_a = _by_center(parameters["c_angular"], center)  # (A, n, T k)
        n_a = c_a.shape[1]
        s_a = torch.bmm(c_a, angular).flatten(0, 1)  # (A n, b)
        q_a = invariants_of(s_a, self._invariants)  # (A n, blocks)
        blocks = q_a.shape[1]
        q = torch.cat([s_r, q_a.view(A, n_a, blocks).transpose(1, 2).reshape(A, -1)], dim=1)
        if temperature is not None:
            q = torch.cat([q, temperature[:, None]], dim=1)
        q = q * q_scaler
        energies, slope = _networks(parameters, q, center[:, :1] * 0.0 + 1.0 if self.one_network else center)
        slope = slope * q_scaler
        by_s_r = slope[:, :n_r]
        by_q_a = slope[:, n_r : n_r + blocks * n_a].view(A, blocks, n_a).transpose(1, 2).reshape(A * n_a, blocks)
        by_s_a = gradient_of(s_a, by_q_a, self._invariants).view(A, n_a, -1)
        by_radial = (center[:, :, None] * by_s_r[:, None]).reshape(A, T * n_r) @ table.T  # (A, T k)
        by_angular = torch.bmm(c_a.transpose(1, 2), by_s_a)  # (A, T k, b)
        return energies, q, by_radial, by_angular


class ByKernels(BySums):
    """As :class:`BySums`, the radial pairs by Triton's kernels."""

    def __init__(self, model: NepFile, dtype: torch.dtype, device: torch.device, *, compiled: bool = False) -> None:
        super().__init__(model, dtype, device)
        if compiled:
            self._atoms = torch.compile(self._of_atoms, dynamic=True)
        try:
            from . import kernels
        except ImportError as error:
            raise ModelError(f"backend {KERNELS} needs Triton: {error}") from error
        self._geometry = kernels.geometry_of
        self._map = PairMap(kernels.forces_of, kernels.spread_of)
        self._inverse = 1.0 / self.cutoff_radial

    def prepare(self, arrays: Arrays, widths: tuple[int, int]) -> Any:
        """See :class:`Forward`."""
        cutoffs = self._inverse, self.cutoff_angular
        return self._geometry(arrays, widths[1], self.sizes, *cutoffs, self.far, self._harmonics)


class ByForm(_Base):
    """A form of the torch backends, differentiated by torch."""

    def __init__(self, form: str, model: NepFile, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(model, dtype, device)
        self.form = FORMS[form]
        self.monomials = invariants.tables(self.shape.switches, self.shape.l_max, dtype, device)

    def prepare(self, arrays: Arrays, widths: tuple[int, int]) -> tuple[Slots, int]:
        """See :class:`Forward`."""
        return slots_of(arrays, widths, self.sizes.types, self.far), widths[1]

    def __call__(
        self, parameters: dict[str, Tensor], q_scaler: Tensor, arrays: Arrays, prepared: object, forces: bool = True
    ) -> Found:
        """See :class:`Forward`."""
        del forces  # they come along
        slots, v = cast("tuple[Slots, int]", prepared)
        p = parameters
        nothing = q_scaler.new_zeros(())
        tables = Tables(
            p["c_radial"], p["c_angular"], self.cutoff_radial, self.cutoff_angular, p["w0"], p["b0"], p["w1"],
            p.get("b1"), p.get("w2"), nothing, q_scaler.new_zeros(self.sizes.types), q_scaler, self.monomials,
        )  # fmt: skip
        rows = Rows(
            arrays.types, slots.r, slots.types, slots.r[:, :v], slots.types[:, :v], slots.unit[:, :, :v],
            arrays.temperature[arrays.frame],
        )  # fmt: skip
        out = evaluate(self.shape, self.form, tables, rows)
        push = out.along * slots.unit
        push = torch.cat([push[:, :, :v] + out.push, push[:, :, v:]], dim=2)
        f = push.sum(dim=2).T.index_add(0, slots.neighbor.reshape(-1), -push.reshape(3, -1).T)
        return Found(out.energies, out.descriptors, f, virial_of(push, slots, arrays.frame, len(arrays.atoms)))


def _by_center(coefficients: Tensor, center: Tensor) -> Tensor:
    """Coefficients of each atom's own type, (A, n, T k); as a product, whose derivative is one, too."""
    n, k, T, _ = coefficients.shape
    table = coefficients.permute(2, 0, 3, 1).reshape(T, -1)
    return (center @ table).view(-1, n, T * k)


def _networks(p: dict[str, Tensor], q: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Site energies (A,) and their derivatives by the inputs (A, D); all networks at once, then each atom's own."""
    h = torch.tanh(_layer(q, p["w0"], center) - center @ p["b0"])  # (A, H)
    if "w2" not in p:
        out = center @ p["w1"]
        return (h * out).sum(dim=1), _back((1.0 - h * h) * out, p["w0"], center)
    h2 = torch.tanh(_layer(h, p["w1"], center) - center @ p["b1"])
    out = center @ p["w2"]
    slope = (1.0 - h * h) * _back((1.0 - h2 * h2) * out, p["w1"], center)
    return (h2 * out).sum(dim=1), _back(slope, p["w0"], center)


def _layer(x: Tensor, w: Tensor, center: Tensor) -> Tensor:
    M, H, D = w.shape
    every = (x @ w.reshape(M * H, D).T).view(-1, M, H)
    return (every * center[:, :, None]).sum(dim=1)


def _back(slope: Tensor, w: Tensor, center: Tensor) -> Tensor:
    M, H, D = w.shape
    return (slope[:, None] * center[:, :, None]).reshape(-1, M * H) @ w.reshape(M * H, D)
