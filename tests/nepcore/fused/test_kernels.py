"""The kernels of the physics against torch in float64, on lists made by :mod:`nepcore.neighbors`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import crystals
import references
from locations import needs_shared
from nepcore import Structure, Structures, synthetic
from nepcore.calculator import Calculator
from nepcore.files import nep_txt
from nepcore.files.nep_layout import SWITCHES
from nepcore.physics import harmonics as solid
from nepcore.physics import invariants as formulas
from nepcore.physics.basis import radial_basis
from nepcore.structures import PROPERTIES

pytest.importorskip("triton")

import triton
import triton.language as tl

from fused_lists import lists_of
from nepcore.backends.fused import forward as chain
from nepcore.backends.fused.harmonics import harmonics
from nepcore.backends.fused.invariants import gradient, invariants
from nepcore.backends.fused.lists import Lists, Outputs
from nepcore.backends.fused.model import Model, Shape, prepare, unfit
from nepcore.backends.fused.network import tanh
from nepcore.backends.fused.pairs import basis, basis_slopes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED_ATOMS = 8
BOUNDS = {"energies": 2e-5, "forces": 1e-4, "virials": 1e-4, "descriptors": 1e-4}
SHAPES: dict[str, dict[str, object]] = {
    "one element": {"elements": ("Si",), "switches": ("q222", "q1111"), "n_max": (4, 5), "basis_size": (6, 7)},
    "three, universal zbl": {"elements": ("Si", "C", "O"), "zbl": "universal"},
    "five, flexible zbl, own cutoffs": {
        "elements": ("Si", "C", "O", "H", "N"), "zbl": "flexible", "l_max": 3,
        "cutoff": [(5, 4), (4.5, 3.5), (5, 4), (4, 3), (4.2, 4.0)],
    },
    "nep3, typewise zbl, all invariants": {
        "elements": ("Si", "C"), "version": 3, "zbl": "typewise", "switches": SWITCHES, "n_max": (2, 3),
    },
    "nep5": {"elements": ("Si", "C"), "version": 5, "l_max": 1, "switches": ()},
    "two layers, temperature": {
        "elements": ("Si", "C"), "temperature": True, "l_max": 2, "switches": ("q222",), "hidden": (6, 5),
    },
    "smallest": {"elements": ("Si",), "l_max": 1, "switches": (), "n_max": (0, 0), "basis_size": (0, 0)},
    "l 8": {"elements": ("Si",), "l_max": 8, "switches": SWITCHES, "n_max": (1, 1), "basis_size": (2, 3)},
}  # fmt: skip
every_shape = pytest.mark.parametrize("name", SHAPES)


def model_of(name: str) -> nep_txt.NepFile:
    usual = {"cutoff": (5.0, 4.0), "n_max": (3, 2), "basis_size": (5, 4), "hidden": (6,), "seed": 3}
    return synthetic.make_model(**{**usual, **SHAPES[name]})  # type: ignore[arg-type]


def structures_of(elements: tuple[str, ...], n: int = 9) -> Structures:
    items = [crystals.random_structure(k, elements, n=n, pbc=p) for k, p in enumerate(crystals.PERIODICITIES)]
    return Structures.pack([*items, Structure.make([elements[0]], [[0.1, 0.2, 0.3]], np.eye(3) * 2.2, True, 300.0)])


def evaluated(
    model: Model, lists: Lists, tiles: chain.Tiles | None = None, *, virials: bool = True, descriptors: bool = True
) -> Outputs:
    """Outputs of one evaluation; everything that it does not write stays NaN."""
    n, mr, ma = lists.rows.shape[0], lists.radial_index.shape[1], lists.angular_index.shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        fill = float("nan") if dtype.is_floating_point else 1 << 20
        return torch.full(shape, fill, dtype=dtype, device=DEVICE)

    sizes = chain.scratch(model, n, mr, ma, virials=virials, descriptors=descriptors)
    scratch = {name: empty(*shape, dtype=dtype) for name, (shape, dtype) in sizes.items()}
    outputs = Outputs(
        empty(n, dtype=torch.float64), empty(n, 3), empty(n, 9) if virials else None,
        empty(n, model.dim) if descriptors else None,
    )  # fmt: skip
    chain.forward(model, lists, outputs, scratch, tiles)
    return outputs


def compared(file: nep_txt.NepFile, structures: Structures, *, images: bool = True) -> None:
    """All results against the loop in float64."""
    present = sorted(set(file.admission.types[structures.numbers].tolist()))
    lists = lists_of(structures, file, present, DEVICE, images=images, spare=5)
    found = evaluated(prepare(file, present, DEVICE), lists)
    wanted = Calculator.of(file, device="cpu", dtype="float64", backend="loop").evaluate(structures, PROPERTIES)
    assert wanted.errors == {}
    for name, tensor in zip(BOUNDS, found, strict=True):
        values = tensor[: structures.n_atoms].cpu().numpy().reshape(wanted[name].shape)
        bound = BOUNDS[name] * max(1.0, float(np.abs(wanted[name]).max()))
        assert np.abs(values - wanted[name]).max() < bound, name


@every_shape
def test_every_shape_of_model(name: str) -> None:
    file = model_of(name)
    compared(file, structures_of(file.elements))


def test_wrapping_differences() -> None:
    file = model_of("three, universal zbl")
    items = [crystals.random_structure(k, file.elements, n=90, pbc=p) for k, p in enumerate((True, False))]
    compared(file, Structures.pack(items), images=False)


@needs_shared
@pytest.mark.parametrize("name", references.names())
def test_fixture_models(name: str) -> None:
    reference = references.load(name)
    file = nep_txt.read(reference.path)
    # The interpreter takes its time: a few atoms have everything that many have.
    most = INTERPRETED_ATOMS if DEVICE.type == "cpu" else 1 << 20
    chosen = np.flatnonzero(reference.structures.counts <= most)
    structures = reference.structures.select(chosen)
    present = sorted(set(file.admission.types[structures.numbers].tolist()))
    found = evaluated(prepare(file, present, DEVICE), lists_of(structures, file, present, DEVICE))
    offsets = structures.offsets
    for i, k in enumerate(chosen.tolist()):
        label, wanted = reference.labels[k], reference.results[k]
        for key, tensor in zip(BOUNDS, found, strict=True):
            if key in wanted and wanted[key].size:
                values = tensor[offsets[i] : offsets[i + 1]].cpu().numpy().reshape(wanted[key].shape)
                bound = BOUNDS[key] * max(1.0, float(np.abs(wanted[key]).max()))
                assert np.abs(values - wanted[key]).max() < bound, (label, key)


def test_results_depend_neither_on_padding_nor_on_company() -> None:
    file = model_of("five, flexible zbl, own cutoffs")
    structures = structures_of(file.elements)
    present = list(range(len(file.elements)))
    model = prepare(file, present, DEVICE)
    together = evaluated(model, lists_of(structures, file, present, DEVICE))
    for i in range(len(structures)):
        one = structures.slice(i, i + 1)
        own = sorted(set(file.admission.types[one.numbers].tolist()))
        alone = evaluated(prepare(file, own, DEVICE), lists_of(one, file, own, DEVICE, spare=1 + i))
        rows = slice(int(structures.offsets[i]), int(structures.offsets[i + 1]))
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a[: one.n_atoms], b[rows])


def test_what_is_not_wanted_changes_nothing() -> None:
    file = model_of("three, universal zbl")
    structures = structures_of(file.elements)
    model = prepare(file, [0, 1, 2], DEVICE)
    lists = lists_of(structures, file, [0, 1, 2], DEVICE)
    everything, least = evaluated(model, lists), evaluated(model, lists, virials=False, descriptors=False)
    assert torch.equal(everything.energy, least.energy)
    assert torch.allclose(everything.forces, least.forces, rtol=1e-5, atol=1e-5)


def test_shapes_of_programs_change_rounding_alone() -> None:
    file = model_of("one element")
    structures = structures_of(file.elements)
    model, lists = prepare(file, [0], DEVICE), lists_of(structures, file, [0], DEVICE)
    usual = chain.interpreted(model.shape)
    small = replace(
        usual, radial_sums=(32, 4, 1), radial_forces=(16, 8, 1), angular_sums=(32, 1, 1), angular_forces=(4, 8, 1),
        gather=(8, 4, 1), slopes=(64, 2), network=(1, 2, 32, 1), weights=(32, 1),
    )  # fmt: skip
    for a, b in zip(evaluated(model, lists, usual), evaluated(model, lists, small), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_models_that_are_refused() -> None:
    fits = model_of("smallest")
    assert unfit(fits) == ""
    wide = synthetic.make_model(("Si",), n_max=(30, 40), basis_size=(2, 2), l_max=6, hidden=(2,), seed=1)
    assert "inputs" in unfit(wide)


# Functions inside the kernels, by themselves.


@triton.jit
def _basis(r_in, inverse_in, f_out, df_out, K: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    r, inverse = tl.load(r_in + at), tl.load(inverse_in + at)
    f = basis(r, inverse, K)
    df = basis_slopes(r, inverse, K)
    for k in tl.static_range(K):
        tl.store(f_out + k * N + at, f[k])
        tl.store(df_out + k * N + at, df[k])


@pytest.mark.parametrize("K", [1, 2, 17])
def test_basis(K: int) -> None:
    N = 256
    r = torch.linspace(0.01, 5.5, N, dtype=torch.float64)
    cutoff = torch.where(torch.arange(N) % 2 == 0, 5.0, 3.7).to(torch.float64)
    wanted = radial_basis(r, cutoff, K)  # f_k = ½ fc (T_k + T_0)
    first = wanted[:, :1] / 2
    wanted = torch.cat([first, wanted[:, 1:] - first], dim=1)
    f, df = torch.full((2, K, N), float("nan"), device=DEVICE)
    _basis[(1,)](r.to(DEVICE, torch.float32), (1 / cutoff).to(DEVICE, torch.float32), f, df, K, N)
    assert torch.allclose(f.cpu().double(), wanted[0], rtol=0, atol=1e-7 * (K + 1) ** 2)
    assert torch.allclose(df.cpu().double(), wanted[1], rtol=0, atol=2e-7 * (K + 1) ** 3)


@triton.jit
def _angular(
    unit, slope, y_out, q_out, d_out, L: tl.constexpr, ON: tl.constexpr, BLOCKS: tl.constexpr, N: tl.constexpr
):
    at = tl.arange(0, N)
    y = harmonics(tl.load(unit + at), tl.load(unit + N + at), tl.load(unit + 2 * N + at), L)
    f = ()
    for block in tl.static_range(BLOCKS):
        f = f + (tl.load(slope + block * N + at),)  # noqa: RUF005
    q = invariants(y, L, ON)
    d = gradient(y, f, L, ON)
    for b in tl.static_range(L * (L + 2)):
        tl.store(y_out + b * N + at, y[b])
        tl.store(d_out + b * N + at, d[b])
    for block in tl.static_range(BLOCKS):
        tl.store(q_out + block * N + at, q[block])


@pytest.mark.parametrize(("L", "switches"), [(1, ("q1111",)), (2, ("q222",)), (4, SWITCHES), (8, SWITCHES)])
def test_harmonics_and_invariants(L: int, switches: tuple[str, ...]) -> None:
    N, B, blocks = 128, L * (L + 2), L + len(switches)
    rng = torch.Generator().manual_seed(L)
    unit = torch.nn.functional.normalize(torch.randn((3, N), generator=rng, dtype=torch.float64), dim=0)
    slope = torch.randn((blocks, N), generator=rng, dtype=torch.float64)
    y, q, d = (torch.full((rows, N), float("nan"), device=DEVICE) for rows in (B, blocks, B))
    on = sum(1 << SWITCHES.index(name) for name in switches)
    _angular[(1,)](unit.to(DEVICE, torch.float32), slope.to(DEVICE, torch.float32), y, q, d, L, on, blocks, N)
    wanted = solid.harmonics(unit, L)
    for found, right in (
        (y, wanted), (q, formulas.invariants(wanted, L, switches)), (d, formulas.gradient(wanted, slope, L, switches)),
    ):  # fmt: skip
        assert torch.allclose(found.cpu().double(), right, rtol=1e-5, atol=2e-6 * float(right.abs().max()))


@triton.jit
def _tanh(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tanh(tl.load(x + at)))


def test_tanh() -> None:
    x = torch.cat([torch.linspace(-12.0, 12.0, 1020), torch.tensor([0.0, -200.0, 200.0, 1e-8])])
    y = torch.full((1024,), float("nan"), device=DEVICE)
    _tanh[(1,)](x.to(DEVICE), y, 1024)
    assert float((y.cpu().double() - torch.tanh(x.double())).abs().max()) < 5e-7


def test_shape_is_that_of_all_fine_tunes() -> None:
    a, b = (synthetic.make_model(("Si", "C"), seed=seed) for seed in (1, 2))
    assert Shape.of(a) == Shape.of(b)
