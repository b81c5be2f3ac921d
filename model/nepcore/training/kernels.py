"""The radial part of a batch by Triton's kernels, on a GPU in single precision.

The sums over radial neighbours, and the map from derivatives by them to forces and back, of
:mod:`nepcore.training.geometry`. Pairs are read as they lie in the batch, their basis is computed where it is used, and
nothing is kept of them: the arrays of (atoms, neighbours, functions) that plain torch writes and reads are most of the
bytes of a step. Needs Triton, which comes with torch on a GPU; in its interpreter also on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nepcore.backends.fused.pairs import basis, basis_slopes, lanes_of, length, over, zeros

from .geometry import Angular, angular_forces, angular_of, angular_spread, shift_of, slots_of, virial_of

if TYPE_CHECKING:
    from .batches import Arrays
    from .geometry import Sizes
    from .polynomials import Harmonics


class Blocks(NamedTuple):
    """Shapes of the programs, each (atoms, lanes of an atom, warps)."""

    sums: tuple[int, int, int] = (32, 4, 4)
    forces: tuple[int, int, int] = (8, 4, 1)


INTERPRETED = Blocks((64, 64, 4), (64, 64, 4))
"""Those for Triton's interpreter: each operation costs the same, however large."""


class Pairs(NamedTuple):
    """The radial pairs of A atoms, as they lie in the batch."""

    vectors: Tensor  # (P, 3) Å
    neighbors: Tensor  # (P,) int32, counted within the frame
    start: Tensor  # (A,) int64: first pair of each atom
    count: Tensor  # (A,) int32
    first: Tensor  # (A,) int64: first atom of its frame
    types: Tensor  # (A,) int64
    inverse_rc: Tensor  # (T, T) 1/Å
    functions: int


class Geometry(NamedTuple):
    """Constants of a batch."""

    pairs: Pairs
    angular_part: Angular
    radial: Tensor  # (A, T k) sums of the radial basis
    angular: Tensor  # (A, T k, b) sums of the angular basis times harmonics

    @property
    def center(self) -> Tensor:
        """One-hot types, (A, T)."""
        return self.angular_part.slots.center


@triton.jit
def _atoms(count, start, first, types, i, N):
    """Pairs, first pair, first atom of the frame and element of the atom of each lane."""
    inside = i < N
    n = tl.load(count + i, mask=inside, other=0)
    begin = tl.load(start + i, mask=inside, other=0)
    home = tl.load(first + i, mask=inside, other=0)
    return n, begin, home, tl.load(types + i, mask=inside, other=0)


@triton.jit
def _pair(vectors, at, live):
    """Vector, distance and inverse distance of the pair of each lane."""
    at = 3 * at
    rx = tl.load(vectors + at, mask=live, other=0.0)
    ry = tl.load(vectors + at + 1, mask=live, other=0.0)
    rz = tl.load(vectors + at + 2, mask=live, other=0.0)
    r, inverse = length(rx, ry, rz, live)
    return rx, ry, rz, r, inverse


@triton.jit
def _put(out, total, K: tl.constexpr, T: tl.constexpr, N, A: tl.constexpr, G: tl.constexpr):
    """Write sums of ½ fc T_k as those of f_k = ½ fc (T_k + T_0), of the element that the program is for."""
    i = tl.program_id(0) * A + tl.arange(0, A)
    row = out + (i.to(tl.int64) * T + tl.program_id(1)) * K
    constant = over(total[0], A, G)
    for k in tl.static_range(K):
        tl.store(row + k, over(total[k], A, G) + constant, mask=i < N)


@triton.jit(do_not_specialize=["N"])
def radial_sums_of_element(
    vectors, neighbors, start, count, first, types, inverse_rc, out,
    N, T: tl.constexpr, K: tl.constexpr, A: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Σ f_k(r_ij) over the neighbours of one element, which is the second index of the grid."""
    i, slot = lanes_of(A, G)
    n, begin, home, ti = _atoms(count, start, first, types, i, N)
    element = tl.program_id(1)
    inverse_cutoff = tl.load(inverse_rc + ti * T + element)
    total = zeros(tl.zeros([A * G], tl.float32), K)
    step = 0
    most = tl.max(n, axis=0)
    while step < most:
        live = slot + step < n
        at = begin + slot + step
        j = home + tl.load(neighbors + at, mask=live, other=0)
        live = live & (tl.load(types + j, mask=live, other=-1) == element)
        _, _, _, r, _ = _pair(vectors, at, live)
        f = basis(r, inverse_cutoff, K)
        after = ()
        for k in tl.static_range(K):
            after = after + (total[k] + f[k],)
        total = after
        step += G
    _put(out, total, K, T, N, A, G)


@triton.jit(do_not_specialize=["N"])
def radial_forces_of_atoms(
    vectors, neighbors, start, count, first, types, inverse_rc, w, forces, virials,
    N, T: tl.constexpr, K: tl.constexpr, A: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """F_i = Σ_j a r̂_ij and −½ Σ_j a r_ij ⊗ r̂_ij, with a = Σ_k (w[i, tj, k] + w[j, ti, k]) f_k′(r_ij)."""
    i, slot = lanes_of(A, G)
    n, begin, home, ti = _atoms(count, start, first, types, i, N)
    own = w + tl.minimum(i, N - 1).to(tl.int64) * (T * K)
    zero = tl.zeros([A * G], tl.float32)
    force = zeros(zero, 3)
    virial = zeros(zero, 6)
    step = 0
    most = tl.max(n, axis=0)
    while step < most:
        live = slot + step < n
        at = begin + slot + step
        j = home + tl.load(neighbors + at, mask=live, other=0)
        tj = tl.load(types + j, mask=live, other=0)
        rx, ry, rz, r, inverse = _pair(vectors, at, live)
        df = basis_slopes(r, tl.load(inverse_rc + ti * T + tj), K)
        theirs = w + (j * T + ti) * K
        a = zero
        weights = zero
        for k in tl.static_range(K):
            both = tl.load(own + tj * K + k, mask=live, other=0.0) + tl.load(theirs + k, mask=live, other=0.0)
            weights += both
            a += both * df[k]
        a = tl.where(live, (a + weights * df[0]) * inverse, 0.0)
        x = a * rx
        y = a * ry
        z = a * rz
        force = (force[0] + x, force[1] + y, force[2] + z)
        virial = (
            virial[0] - x * rx, virial[1] - x * ry, virial[2] - x * rz,
            virial[3] - y * ry, virial[4] - y * rz, virial[5] - z * rz,
        )  # fmt: skip
        step += G
    i = tl.program_id(0) * A + tl.arange(0, A)
    inside = i < N
    wide = i.to(tl.int64)
    for d in tl.static_range(3):
        tl.store(forces + 3 * wide + d, over(force[d], A, G), mask=inside)
    xx = over(virial[0], A, G)
    xy = over(virial[1], A, G)
    xz = over(virial[2], A, G)
    yy = over(virial[3], A, G)
    yz = over(virial[4], A, G)
    zz = over(virial[5], A, G)
    nine = (xx, xy, xz, xy, yy, yz, xz, yz, zz)
    for d in tl.static_range(9):
        tl.store(virials + 9 * wide + d, 0.5 * nine[d], mask=inside)


@triton.jit(do_not_specialize=["N"])
def radial_spread_to_element(
    vectors, neighbors, start, count, first, types, inverse_rc, frame, by_forces, by_virial, out,
    N, T: tl.constexpr, K: tl.constexpr, A: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """The map of :func:`radial_forces_of_atoms` the other way round: derivatives by w of the neighbours of one element.

    ∂L/∂w_k(i, t) = Σ_j f_k′(r_ij) r̂ · (g_i − g_j − Gᵀ r_ij), with g = ∂L/∂F and G = ∂L/∂W of the frame.
    """
    i, slot = lanes_of(A, G)
    inside = i < N
    n, begin, home, ti = _atoms(count, start, first, types, i, N)
    element = tl.program_id(1)
    inverse_cutoff = tl.load(inverse_rc + ti * T + element)
    gx = tl.load(by_forces + 3 * i, mask=inside, other=0.0)
    gy = tl.load(by_forces + 3 * i + 1, mask=inside, other=0.0)
    gz = tl.load(by_forces + 3 * i + 2, mask=inside, other=0.0)
    own = by_virial + 9 * tl.load(frame + i, mask=inside, other=0)
    xx = tl.load(own)
    xy = tl.load(own + 1) + tl.load(own + 3)
    xz = tl.load(own + 2) + tl.load(own + 6)
    yy = tl.load(own + 4)
    yz = tl.load(own + 5) + tl.load(own + 7)
    zz = tl.load(own + 8)
    total = zeros(tl.zeros([A * G], tl.float32), K)
    step = 0
    most = tl.max(n, axis=0)
    while step < most:
        live = slot + step < n
        at = begin + slot + step
        j = home + tl.load(neighbors + at, mask=live, other=0)
        live = live & (tl.load(types + j, mask=live, other=-1) == element)
        rx, ry, rz, r, inverse = _pair(vectors, at, live)
        theirs = by_forces + 3 * j
        along = rx * (gx - tl.load(theirs, mask=live, other=0.0) - xx * rx - xy * ry - xz * rz)
        along += ry * (gy - tl.load(theirs + 1, mask=live, other=0.0) - yy * ry - yz * rz)
        along += rz * (gz - tl.load(theirs + 2, mask=live, other=0.0) - zz * rz)
        along = tl.where(live, along * inverse, 0.0)
        df = basis_slopes(r, inverse_cutoff, K)
        after = ()
        for k in tl.static_range(K):
            after = after + (total[k] + df[k] * along,)
        total = after
        step += G
    _put(out, total, K, T, N, A, G)


def _blocks() -> Blocks:
    return INTERPRETED if triton.knobs.runtime.interpret else Blocks()


def radial_sums(pairs: Pairs) -> Tensor:
    """Sums of the radial basis over the neighbours of each element, (A, T k)."""
    N, T, K = len(pairs.types), len(pairs.inverse_rc), pairs.functions
    out = torch.empty((N, T * K), dtype=torch.float32, device=pairs.vectors.device)
    if N:
        a, g, warps = _blocks().sums
        radial_sums_of_element[(triton.cdiv(N, a), T)](
            *pairs[:7], out, N, T, K, a, g, num_warps=warps, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def radial_forces(pairs: Pairs, w: Tensor) -> tuple[Tensor, Tensor]:
    """∂E/∂M (A, T k) → forces (A, 3), eV/Å, and each atom's share of the virial (A, 9), eV."""
    N, T, K = len(pairs.types), len(pairs.inverse_rc), pairs.functions
    forces, virials = w.new_empty((N, 3)), w.new_empty((N, 9))
    if N:
        a, g, warps = _blocks().forces
        radial_forces_of_atoms[(triton.cdiv(N, a),)](
            *pairs[:7], w.contiguous(), forces, virials, N, T, K, a, g,
            num_warps=warps, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
    return forces, virials


def radial_spread(pairs: Pairs, by_forces: Tensor, by_virial: Tensor, frame: Tensor) -> Tensor:
    """Derivatives by forces (A, 3) and virials (B, 9) → derivatives by ∂E/∂M, (A, T k)."""
    N, T, K = len(pairs.types), len(pairs.inverse_rc), pairs.functions
    out = by_forces.new_empty((N, T * K))
    if N:
        a, g, warps = _blocks().sums
        radial_spread_to_element[(triton.cdiv(N, a), T)](
            *pairs[:7], frame, by_forces.contiguous(), by_virial.contiguous(), out, N, T, K,
            a, g, num_warps=warps, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def try_out(device: torch.device) -> None:
    """Compile and run each kernel once, for two atoms: raises whatever stands in the way on this device."""
    long, short = torch.int64, torch.int32
    vectors = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
    pairs = Pairs(
        vectors.to(device), torch.tensor([1, 0], dtype=short, device=device),
        torch.tensor([0, 1], dtype=long, device=device), torch.ones(2, dtype=short, device=device),
        torch.zeros(2, dtype=long, device=device), torch.zeros(2, dtype=long, device=device),
        torch.full((1, 1), 0.5, device=device), 1,
    )  # fmt: skip
    sums = radial_sums(pairs)
    forces, _ = radial_forces(pairs, torch.ones_like(sums))
    found = radial_spread(pairs, forces, torch.zeros((1, 9), device=device), torch.zeros(2, dtype=long, device=device))
    # f_0 = fc is ½ half way to the cutoff, and its slope −π/4: twice that for a pair, and the same way back.
    expected = torch.tensor([0.5, -0.5 * torch.pi, 0.25 * torch.pi**2])
    measured = torch.stack([sums[0, 0], forces[0, 0], found[0, 0]]).cpu()
    if not torch.allclose(measured, expected, rtol=1e-4):
        raise RuntimeError(f"Triton's kernels give {measured.tolist()} where {expected.tolist()} is right")


def geometry_of(
    arrays: Arrays, width: int, sizes: Sizes, inverse_rc: Tensor, cutoff_angular: Tensor, far: float, tables: Harmonics
) -> Geometry:
    """Constants of a batch; arguments as of :func:`nepcore.training.geometry.geometry_of`."""
    slots = slots_of(arrays, (width, width), sizes.types, far)
    start = torch.cumsum(arrays.radial, 0) - arrays.radial  # int64
    first = torch.searchsorted(arrays.frame, arrays.frame)
    pairs = Pairs(arrays.vectors, arrays.neighbors, start, arrays.radial, first, arrays.types, inverse_rc, sizes.radial)
    part, angular = angular_of(slots, sizes, cutoff_angular, arrays.types, tables)
    return Geometry(pairs, part, radial_sums(pairs), angular)


def forces_of(
    geometry: Geometry, radial: Tensor, angular: Tensor, frame: Tensor, n_frames: int
) -> tuple[Tensor, Tensor]:
    """∂E/∂M (A, T k) and (A, T k, b) → forces (A, 3), eV/Å, and virials (B, 9), eV."""
    forces, share = radial_forces(geometry.pairs, radial)
    added, push = angular_forces(geometry.angular_part, angular)
    return forces + added, virial_of(push, geometry.angular_part.slots, frame, n_frames, share)


def spread_of(geometry: Geometry, by_forces: Tensor, by_virial: Tensor, frame: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives by forces (A, 3) and virials (B, 9) → derivatives by ∂E/∂M."""
    radial = radial_spread(geometry.pairs, by_forces, by_virial, frame)
    part = geometry.angular_part
    return radial, angular_spread(part, shift_of(part.slots, part.y.shape[1], by_forces, by_virial, frame))
