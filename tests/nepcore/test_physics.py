"""Formulas against independent forms of themselves: finite differences, addition theorem, polynomials."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nepcore.files.nep_layout import SWITCHES
from nepcore.physics import basis, harmonics, invariants, network, products, screening, zbl

F64 = torch.float64


def test_basis_is_chebyshev_times_cutoff() -> None:
    r = torch.linspace(0.3, 5.5, 60, dtype=F64)
    rc = torch.full_like(r, 5.0)
    f = basis.radial_basis(r, rc, 9)[0]
    x = 2 * (r / 5.0 - 1) ** 2 - 1
    fc = torch.where(r < 5.0, 0.5 * torch.cos(torch.pi * r / 5.0) + 0.5, 0.0)
    wanted = torch.stack([0.5 * (torch.special.chebyshev_polynomial_t(x, k) + 1.0) * fc for k in range(9)])
    assert torch.allclose(f, wanted, atol=1e-14)
    assert torch.equal(f[:, r >= 5.0], torch.zeros_like(f[:, r >= 5.0]))


@pytest.mark.parametrize("count", [1, 2, 9, 17])
def test_basis_derivative(count: int) -> None:
    r = torch.linspace(0.5, 4.9, 40, dtype=F64)
    rc = torch.linspace(5.0, 6.0, 40, dtype=F64)
    h = 1e-6
    slope = (basis.radial_basis(r + h, rc, count)[0] - basis.radial_basis(r - h, rc, count)[0]) / (2 * h)
    assert torch.allclose(basis.radial_basis(r, rc, count)[1], slope, atol=1e-7)
    assert basis.radial_basis(r, rc, count, derivative=False).shape == (1, count, 40)


@pytest.mark.parametrize("l_max", range(1, 9))
def test_addition_theorem(l_max: int) -> None:
    """Σ_b C_b Y_b(u) Y_b(v) over the block of l is (2l+1)/(4π) P_l(u·v)."""
    axis = torch.tensor([-0.9, -0.3, 0.2, 0.7], dtype=F64)
    unit = torch.nn.functional.normalize(torch.cartesian_prod(axis, axis, axis), dim=1).T
    y = harmonics.harmonics(unit, l_max)
    c = torch.tensor(harmonics.weights(l_max), dtype=F64)
    cosine = unit.T @ unit
    for l in range(1, l_max + 1):
        block = slice(l * l - 1, (l + 1) ** 2 - 1)
        found = torch.einsum("b,bi,bj->ij", c[block], y[block], y[block])
        wanted = (2 * l + 1) / (4 * torch.pi) * torch.special.legendre_polynomial_p(cosine, l)
        assert float((found - wanted).abs().max()) < 1e-12


def test_harmonics_are_orthogonal_on_the_sphere() -> None:
    """Different Y_b of degree up to 4 are orthogonal; a Gauss-Legendre × uniform grid integrates them exactly."""
    nodes, weights = np.polynomial.legendre.leggauss(12)
    phi = np.arange(24) * (2 * np.pi / 24)
    z = np.repeat(nodes, 24)
    s = np.sqrt(1 - z * z)
    unit = torch.tensor(np.stack([s * np.tile(np.cos(phi), 12), s * np.tile(np.sin(phi), 12), z]))
    y = harmonics.harmonics(unit, 4).numpy()
    gram = (y * np.repeat(weights, 24)) @ y.T
    off = gram - np.diag(np.diag(gram))
    assert np.abs(off).max() < 1e-12 * np.abs(gram).max()


@pytest.mark.parametrize("l_max", [1, 2, 4, 8])
def test_contracted_gradient(l_max: int) -> None:
    rng = torch.Generator().manual_seed(1)
    unit = torch.nn.functional.normalize(torch.randn(3, 20, generator=rng, dtype=F64), dim=0).requires_grad_()
    weight = torch.randn(harmonics.width(l_max), 20, generator=rng, dtype=F64)
    (wanted,) = torch.autograd.grad((weight * _harmonics_without_buffers(unit, l_max)).sum(), unit)
    assert torch.allclose(harmonics.contracted_gradient(unit.detach(), weight, l_max), wanted, atol=1e-10)


def _harmonics_without_buffers(unit: torch.Tensor, l_max: int) -> torch.Tensor:
    """The definition, word for word, open to automatic differentiation."""
    x, y, z = unit
    xy = torch.complex(x, y)
    out = []
    for l in range(1, l_max + 1):
        for m in range(l + 1):
            p = sum(c * z**k for k, c in enumerate(harmonics.POLYNOMIALS[l][m]))
            out += [p * torch.ones_like(z)] if m == 0 else [p * (xy**m).real, p * (xy**m).imag]
    assert torch.allclose(torch.stack(out), harmonics.harmonics(unit.detach(), l_max))
    return torch.stack(out)


@pytest.mark.parametrize("switch", SWITCHES)
def test_higher_invariants_do_not_rotate(switch: str) -> None:
    rng = torch.Generator().manual_seed(2)
    unit = torch.nn.functional.normalize(torch.randn(3, 7, generator=rng, dtype=F64), dim=0)
    g = torch.randn(7, 1, generator=rng, dtype=F64)
    axis, _ = torch.linalg.qr(torch.randn(3, 3, generator=rng, dtype=F64))
    values = []
    for rotation in (torch.eye(3, dtype=F64), axis, -axis if torch.det(axis) < 0 else axis @ axis):
        s = harmonics.harmonics(rotation @ unit, 4) @ g
        values.append(float(invariants.invariants(s, 4, (switch,))[-1]))
    assert abs(values[0]) > 1e-6
    assert values == pytest.approx([values[0]] * 3, rel=1e-9)


@pytest.mark.parametrize(("l_max", "switches"), [(2, ("q222",)), (4, SWITCHES), (8, SWITCHES)])
def test_gradient_of_invariants(l_max: int, switches: tuple[str, ...]) -> None:
    rng = torch.Generator().manual_seed(3)
    s = torch.randn(harmonics.width(l_max), 5, 3, generator=rng, dtype=F64).requires_grad_()
    slope = torch.randn(l_max + len(switches), 5, 3, generator=rng, dtype=F64)
    (wanted,) = torch.autograd.grad((invariants.invariants(s, l_max, switches) * slope).sum(), s)
    assert torch.allclose(invariants.gradient(s.detach(), slope, l_max, switches), wanted, atol=1e-10)


def test_invariants_above_the_sums_are_zero() -> None:
    s = torch.ones(harmonics.width(2), 1, dtype=F64)
    assert float(invariants.invariants(s, 2, ("q123",))[-1]) == 0.0
    assert float(invariants.invariants(s, 2, ("q222",))[-1]) != 0.0


def test_network_slopes() -> None:
    rng = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=F64)

    q = random(6, 5).requires_grad_()
    one = (random(6, 4, 5), random(6, 4), random(6, 4))
    two = (random(1, 4, 5), random(1, 4), random(1, 3, 4), random(1, 3), random(1, 3))
    for function, weights in ((network.one_hidden, one), (network.two_hidden, two)):
        energy, slope = function(q, *weights)
        (wanted,) = torch.autograd.grad(energy.sum(), q)
        assert torch.allclose(slope, wanted, atol=1e-12)


def test_zbl_slope_and_ends() -> None:
    r = torch.tensor([0.5, 0.9, 1.1, 1.5, 1.99, 2.0, 3.0], dtype=F64)

    def evaluate(x: torch.Tensor, inner: float) -> tuple[torch.Tensor, torch.Tensor]:
        one = torch.ones_like(x)
        terms = [(a * one, b * one) for a, b in screening.UNIVERSAL]
        return zbl.pair_energy(x, 121.0 * one, 4.0 * one, inner * one, 2.0 * one, terms)

    for inner in (0.0, 1.0):
        energy, slope = evaluate(r, inner)
        h = 1e-6
        difference = (evaluate(r + h, inner)[0] - evaluate(r - h, inner)[0]) / (2 * h)
        assert torch.allclose(slope[:5], difference[:5], rtol=1e-6, atol=1e-6)
        assert energy[-2:].tolist() == [0.0, 0.0]
    hard, _ = evaluate(r, 2.0)  # equal radii: no switch, and no 0/0
    assert torch.isfinite(hard).all()
    assert hard[-2:].tolist() == [0.0, 0.0]
    assert sum(a for a, _ in screening.UNIVERSAL) == pytest.approx(1.0, abs=1e-5)
    assert len(screening.RADII) == 94


def test_products_do_not_feel_other_rows() -> None:
    rng = torch.Generator().manual_seed(5)
    for dtype in (torch.float32, F64):
        rows = torch.randn(100, 35, generator=rng, dtype=dtype)
        matrix = torch.randn(1, 35, 80, generator=rng, dtype=dtype)
        whole = products.rows_times(rows, matrix)
        assert torch.allclose(whole, rows @ matrix[0], atol=1e-4)
        for chosen in ([3], [99, 4], list(range(5, 60))):
            assert torch.equal(products.rows_times(rows[chosen], matrix), whole[chosen])
        columns = torch.randn(2, 9, 300, generator=rng, dtype=dtype)
        c = torch.randn(11, 9, generator=rng, dtype=dtype)
        whole = products.times_columns(c, columns)
        assert torch.allclose(whole, c @ columns, atol=1e-4)
        for chosen in ([7], [250, 1, 13], list(range(3, 90))):
            assert torch.equal(products.times_columns(c, columns[:, :, chosen]), whole[:, :, chosen])
