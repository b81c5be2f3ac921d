"""The library: forces are derivatives, symmetries hold, a structure is the same alone and in company."""

from __future__ import annotations

import numpy as np
import pytest

import crystals
import nepcore
from nepcore import ModelError, Structure, StructureError, Structures, synthetic
from nepcore.backends import candidates, forms
from nepcore.calculator import Calculator
from nepcore.structures import PROPERTIES

MODELS = {
    "one type": synthetic.make_model(("Si",), switches=("q222", "q1111"), seed=1),
    "three types, every invariant": synthetic.make_model(
        ("Si", "O", "C"), switches=("q222", "q1111", "q112", "q123", "q233", "q134"), seed=2
    ),
    "shared network, universal ZBL": synthetic.make_model(("O", "Si"), version=3, zbl="universal", seed=3),
    "per-type bias and cutoffs": synthetic.make_model(
        ("Si", "C"), version=5, cutoff=[(5.0, 4.0), (4.4, 3.1)], zbl="typewise", l_max=3, seed=4
    ),
    "two layers, temperature, flexible ZBL": synthetic.make_model(
        ("C", "Si"), hidden=(12, 9), temperature=True, zbl="flexible", seed=5
    ),
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
BACKENDS = (*forms.FORMS, candidates.FUSED_CPU)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def energies_of(calculator: Calculator, items: list[Structure]) -> np.ndarray:
    return calculator.evaluate(items, ["energy"])["energy"]


@every_model
@pytest.mark.parametrize("seed", [10, 11])
def test_forces_are_derivatives(model: object, seed: int) -> None:
    calculator = Calculator.of(model, device="cpu", dtype="float64")
    pbc = crystals.PERIODICITIES[seed % 8]
    s = crystals.random_structure(seed, model.elements, n=6, pbc=pbc)
    h = 2e-4
    moved = []
    for atom in range(len(s)):
        for axis in range(3):
            for steps in (1, -1, 2, -2):
                positions = s.positions.copy()
                positions[atom, axis] += steps * h
                moved.append(crystals.replace(s, positions=positions))
    e = energies_of(calculator, moved).reshape(-1, 4)
    slope = (8.0 * (e[:, 0] - e[:, 1]) - (e[:, 2] - e[:, 3])) / (12.0 * h)
    forces = calculator.evaluate(s, ["forces"])["forces"]
    assert np.abs(forces).max() > 0.01
    assert np.abs(forces.ravel() + slope).max() < 1e-6


@every_model
@pytest.mark.parametrize("seed", [21, 22])
def test_stress_is_the_strain_derivative(model: object, seed: int) -> None:
    calculator = Calculator.of(model, device="cpu", dtype="float64")
    s = crystals.random_structure(seed, model.elements, n=7)
    h, strained = 1e-5, []
    voigt = [(0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)]
    for a, b in voigt:
        for sign in (1, -1):
            strain = np.eye(3)
            strain[a, b] += sign * h / 2
            strain[b, a] += sign * h / 2
            strained.append(crystals.replace(s, positions=s.positions @ strain, cell=s.cell @ strain))
    e = energies_of(calculator, strained).reshape(-1, 2)
    result = calculator.evaluate(s, PROPERTIES)
    wanted = (e[:, 0] - e[:, 1]) / (2 * h) / s.volume
    assert np.abs(result["stress"][0] - wanted).max() < 1e-6
    virial = result["virial"][0]
    assert np.allclose(virial, virial.T, atol=1e-9)
    assert np.allclose(result["virials"].sum(axis=0), virial, atol=1e-9)
    assert np.allclose(result["stress"][0] * -s.volume, [virial[a, b] for a, b in voigt], atol=1e-9)


@every_model
@every_backend
def test_backends_agree(model: object, backend: str) -> None:
    items = [crystals.random_structure(k, model.elements, n=9, pbc=p) for k, p in enumerate(crystals.PERIODICITIES)]
    wanted = Calculator.of(model, device="cpu", dtype="float64", backend="loop").evaluate(items, PROPERTIES)
    found = Calculator.of(model, device="cpu", dtype="float64", backend=backend).evaluate(items, PROPERTIES)
    for name in PROPERTIES:
        assert np.allclose(found[name], wanted[name], rtol=1e-10, atol=1e-10, equal_nan=True), name


@every_model
@every_backend
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_alone_and_in_company_the_bits_are_equal(model: object, backend: str, dtype: str) -> None:
    sizes = [1, 2, 5, 16, 17, 40]
    items = [crystals.random_structure(k, model.elements, n=n) for k, n in enumerate(sizes)]
    items += [crystals.random_structure(9, model.elements, n=8, pbc=p) for p in crystals.PERIODICITIES]
    calculator = Calculator.of(model, device="cpu", dtype=dtype, backend=backend)
    together = calculator.evaluate(items, PROPERTIES)
    in_pieces = Calculator.of(model, device="cpu", dtype=dtype, backend=backend, memory=3e5).evaluate(items, PROPERTIES)
    for i, s in enumerate(items):
        alone = calculator.evaluate(s, PROPERTIES).view(0)
        for name, value in alone.values.items():
            assert np.array_equal(value, together.view(i)[name]), (i, name)
            assert np.array_equal(value, in_pieces.view(i)[name]), (i, name)


@every_backend
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_alone_and_among_64_others_the_bits_are_equal(backend: str, dtype: str) -> None:
    model = MODELS["three types, every invariant"]
    items = [
        crystals.random_structure(k, model.elements, n=3 + k % 13, pbc=crystals.PERIODICITIES[k % 8]) for k in range(65)
    ]
    calculator = Calculator.of(model, device="cpu", dtype=dtype, backend=backend)
    together = calculator.evaluate(items, PROPERTIES)
    for i in (0, 31, 64):
        for name, value in calculator.evaluate(items[i], PROPERTIES).view(0).values.items():
            assert np.array_equal(value, together.view(i)[name]), (i, name)


@every_model
def test_symmetries(model: object) -> None:
    calculator = Calculator.of(model, device="cpu", dtype="float64")
    s = crystals.random_structure(31, model.elements, n=8)
    rng = np.random.default_rng(0)
    rotation, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    order = rng.permutation(len(s))
    lattice = rng.integers(-3, 4, (len(s), 3)) @ s.cell
    skew = np.array([[1, 0, 0], [2, 1, 0], [-1, 3, 1]])
    doubled = Structure(
        np.tile(s.numbers, 2), np.concatenate([s.positions, s.positions + s.cell[1]]),
        s.cell * np.array([[1], [2], [1]]), s.pbc, s.temperature,
    )  # fmt: skip
    variants = {
        "rotated": crystals.replace(s, positions=s.positions @ rotation, cell=s.cell @ rotation),
        "shifted": crystals.replace(s, positions=s.positions + rng.normal(size=3)),
        "permuted": crystals.replace(s, positions=s.positions[order], numbers=s.numbers[order]),
        "unwrapped": crystals.replace(s, positions=s.positions + lattice),
        "skewed": crystals.replace(s, cell=skew @ s.cell),
        "left-handed": crystals.replace(s, cell=s.cell[[1, 0, 2]]),
        "doubled": doubled,
    }
    base = calculator.evaluate(s, ["energy", "forces", "stress"])
    for name, variant in variants.items():
        found = calculator.evaluate(variant, ["energy", "forces", "stress"])
        n = len(variant) / len(s)
        assert found["energy"] == pytest.approx(base["energy"] * n, rel=1e-10, abs=1e-10), name
        if name == "rotated":
            assert np.allclose(found["forces"], base["forces"] @ rotation, atol=1e-9)
        elif name == "permuted":
            assert np.allclose(found["forces"], base["forces"][order], atol=1e-9)
        else:
            assert np.allclose(found["forces"][: len(s)], base["forces"], atol=1e-9), name
            assert np.allclose(found["stress"], base["stress"], atol=1e-11), name


def test_newton_and_no_torque() -> None:
    calculator = Calculator.of(MODELS["one type"], device="cpu", dtype="float64")
    cluster = crystals.random_structure(5, ("Si",), n=12, pbc=False)
    forces = calculator.evaluate(cluster, ["forces"])["forces"]
    assert np.abs(forces.sum(axis=0)).max() < 1e-10
    assert np.abs(np.cross(cluster.positions, forces).sum(axis=0)).max() < 1e-9


def test_stress_is_left_out_where_there_is_no_volume() -> None:
    calculator = Calculator.of(MODELS["one type"], device="cpu")
    for pbc in crystals.PERIODICITIES:
        view = calculator.evaluate(crystals.random_structure(1, ("Si",), pbc=pbc)).view(0)
        assert ("stress" in view.values) == all(pbc)
        assert view.unavailable == (() if all(pbc) else ("stress",))


def test_a_bad_structure_harms_nobody() -> None:
    calculator = Calculator.of(MODELS["one type"], device="cpu", dtype="float64")
    good = crystals.diamond((1, 1, 2))
    same_place = crystals.replace(good, positions=np.concatenate([good.positions[:-1], good.positions[3:4]]))
    on_image = crystals.replace(
        good, positions=np.concatenate([good.positions[:-1], good.positions[:1] + good.cell[2]])
    )
    not_finite = crystals.replace(good, positions=np.where(np.arange(16)[:, None] == 6, np.nan, good.positions))
    wrong = Structure.make(["Ge"], [[0, 0, 0]])
    far = Structure.make(["Si"], [[0, 1e300, 0]])
    items = [good, same_place, wrong, good, on_image, not_finite, far, good]
    predictions = calculator.evaluate(items, PROPERTIES)
    alone = calculator.evaluate(good, PROPERTIES).view(0)
    for i in (0, 3, 7):
        for name, value in alone.values.items():
            assert np.array_equal(value, predictions.view(i)[name])
    codes = {i: (e.code, e.atoms, e.field) for i, e in predictions.errors.items()}
    assert codes == {
        1: ("coincident_atoms", (3, 15), "positions"),
        2: ("unknown_element", (0,), "numbers"),
        4: ("coincident_atoms", (0, 15), "positions"),
        5: ("non_finite", (6,), "positions"),
        6: ("out_of_range", (0,), "positions"),
    }
    assert "atoms 4 and 16" in str(predictions.errors[1])
    assert np.isnan(predictions.values["energy"][[1, 2, 4, 5, 6]]).all()
    with pytest.raises(StructureError, match=r"structure 2: .*atoms 4 and 16 coincide"):
        predictions["energy"]


def test_a_crystal_on_its_own_image() -> None:
    calculator = Calculator.of(MODELS["one type"], device="cpu")
    crushed = Structure.make(["Si"], [[0, 0, 0]], np.diag([1e-6, 50.0, 50.0]))
    (error,) = calculator.evaluate(crushed).errors.values()
    assert error.code in {"coincident_atoms", "too_dense"}


def test_what_was_computed_before_does_not_matter() -> None:
    model = MODELS["three types, every invariant"]
    used = Calculator.of(model, device="cpu")
    small = crystals.random_structure(3, model.elements, n=5)
    first = used.evaluate(small, PROPERTIES)
    used.evaluate(crystals.random_structure(4, model.elements, n=60), PROPERTIES)
    used.evaluate(Structure.make(["Si", "Si"], [[0, 0, 0], [0, 0, 0]]))
    fresh = Calculator.of(model, device="cpu").evaluate(small, PROPERTIES)
    for name in PROPERTIES:
        assert np.array_equal(used.evaluate(small, PROPERTIES)[name], first[name])
        assert np.array_equal(fresh[name], first[name])


def test_isolated_atoms_have_the_energy_of_the_bare_network() -> None:
    model = MODELS["one type"]
    calculator = Calculator.of(model, device="cpu", dtype="float64")
    bare = float((model.w1[0] * np.tanh(-model.b0[0])).sum() - model.bias)
    lone = Structure.make(["Si"], [[0, 0, 0]])
    far = Structure.make(["Si", "Si"], [[0, 0, 0], [10, 0, 0]], np.diag([40.0, 40.0, 40.0]))
    result = calculator.evaluate([lone, far, lone], PROPERTIES)
    assert result["energy"] == pytest.approx([bare, 2 * bare, bare])
    assert not result["forces"].any()
    assert not result["virials"].any()


def test_nothing_to_evaluate() -> None:
    calculator = Calculator.of(MODELS["one type"], device="cpu")
    result = calculator.evaluate(Structures.empty(), PROPERTIES)
    assert len(result) == 0
    assert result["forces"].shape == (0, 3)
    assert result["stress"].shape == (0, 6)
    empty = Structures.from_arrays([0], [], np.zeros((0, 3)))
    assert calculator.evaluate(empty).errors[0].code == "empty"


def test_temperature_is_asked_for() -> None:
    model = MODELS["two layers, temperature, flexible ZBL"]
    calculator = Calculator.of(model, device="cpu", dtype="float64")
    s = crystals.random_structure(2, model.elements)
    cold, warm = crystals.replace(s, temperature=100.0), crystals.replace(s, temperature=900.0)
    missing = crystals.replace(s, temperature=None)
    result = calculator.evaluate([cold, missing, warm])
    assert result.errors.keys() == {1}
    assert result.errors[1].code == "missing_temperature"
    assert abs(result.values["energy"][0] - result.values["energy"][2]) > 1e-6


def test_wrong_names_are_named(tmp_path: object) -> None:
    model = MODELS["one type"]
    with pytest.raises(ModelError, match=r"no backend 'fast'.*loop"):
        Calculator.of(model, backend="fast")
    with pytest.raises(ModelError, match="float32 or float64"):
        Calculator.of(model, dtype="float16")
    with pytest.raises(ModelError, match=r"unknown property 'dipole'.*energy"):
        Calculator.of(model, device="cpu").evaluate(crystals.diamond(), ["dipole"])
    with pytest.raises(ModelError, match=r"device 'cuda:7' is not there"):
        Calculator.of(model, device="cuda:7")
    with pytest.raises(ModelError, match=r"no device 'tpu'|not supported"):
        Calculator.of(model, device="tpu")
    with pytest.raises(nepcore.ModelFileError, match="nowhere"):
        nepcore.load("nowhere/nep.txt")


def test_progress_counts_every_atom() -> None:
    calculator = Calculator.of(MODELS["one type"], device="cpu", backend="loop", memory=1e6)
    done: list[int] = []
    calculator.evaluate([crystals.diamond((2, 2, 2)), crystals.diamond()], progress=done.append)
    assert sum(done) == 72
    assert len(done) > 1


def test_other_work_fits_between_the_pieces() -> None:
    calculator = Calculator.of(MODELS["one type"], device="cpu", dtype="float64", memory=1e6)
    large, small = Structures.pack([crystals.diamond((2, 2, 2))]), crystals.diamond()
    wanted = calculator.evaluate(large, PROPERTIES)
    run = calculator.run(large, PROPERTIES)
    while True:
        try:
            next(run)
        except StopIteration as end:
            found = end.value
            break
        calculator.evaluate(small)
    for name in PROPERTIES:
        assert np.array_equal(found[name], wanted[name])


def test_importing_the_package_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import nepcore, nepcore.files.nep_txt, nepcore.admission, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
