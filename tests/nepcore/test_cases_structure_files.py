"""Public reports about structure and label files (group B and what belongs to it): each is got right."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cases
import nepcore
from cases import SI2
from cases import file as case
from locations import needs_shared
from nepcore.errors import InputFileError
from nepcore.files import gpumd_out, xyz
from nepserve.predict import PredictResult, predict

if TYPE_CHECKING:
    from pathlib import Path

    from nepcore.structures import Predictions

pytestmark = needs_shared


@pytest.fixture(scope="module")
def calculator() -> Any:
    pytest.importorskip("torch")
    return nepcore.load(cases.TOY_SI, device="cpu", dtype="float64")


def refused(path: Path) -> InputFileError:
    with pytest.raises(InputFileError) as caught:
        xyz.read(path)
    assert caught.value.path == str(path)
    return caught.value


def evaluated(calculator: Any, path: Path) -> Predictions:
    return calculator.evaluate(path, ["energy", "forces", "virial", "stress"])


def predicted(calculator: Any, path: Path, directory: Path, **options: Any) -> PredictResult:
    return predict(path, None, directory / "out.xyz", calculator=calculator, progress=False, **options)


def test_012_faults_have_a_place(calculator: Any, tmp_path: Path) -> None:
    error = refused(case(12, "bad-energy.xyz"))
    assert (error.frame, error.line) == (2, 10)
    assert "key energy: the value is empty ('')" in error.reason
    error = refused(case(12, "bad-coordinate.xyz"))
    assert (error.frame, error.line) == (1, 8)
    assert "'1.25.75' is not a number" in error.reason
    with pytest.raises(InputFileError, match="frame 3, line 10"):
        predicted(calculator, case(12, "bad-energy.xyz"), tmp_path)
    assert not (tmp_path / "out.xyz").exists()


@pytest.mark.parametrize("letter", list("abcde"))
def test_014_spellings_of_the_comment_line(calculator: Any, letter: str) -> None:
    path = case(14, f"header-{letter}.extxyz")
    assert xyz.read(path).structures.pbc.tolist() == [[True] * 3]
    result = evaluated(calculator, path)
    assert result["energy"][0] == pytest.approx(SI2, abs=1e-8)
    six = cases.six(result["virial"][0])
    np.testing.assert_allclose(six, [3.4275620, 3.5325939, 3.4123398, 0.0483279, 0.0243924, -0.0535405], atol=1e-6)
    np.testing.assert_allclose(result["forces"][0], [0.15712530, -0.03469096, -0.16708605], atol=1e-7)
    np.testing.assert_allclose(
        result["stress"][0],
        [-0.085633919, -0.088258026, -0.085253609, -0.001207419, -0.000609417, 0.001337652], atol=1e-8,
    )  # fmt: skip


LABEL = [[3.427562, -0.053541, 0.024392], [-0.053541, 3.532594, 0.048328], [0.024392, 0.048328, 3.412340]]


def test_015_stress_and_virial(calculator: Any, tmp_path: Path) -> None:
    frames = xyz.read(case(15, "stress-virial.xyz"))
    np.testing.assert_allclose(frames.virial, [LABEL] * 3, atol=5e-7)
    assert not frames.warnings
    result = predicted(calculator, case(15, "stress-virial.xyz"), tmp_path)
    for rmse in (result.rmse_energy, result.rmse_forces, result.rmse_virial):
        assert rmse is not None
        assert rmse < 1e-5
    wrong = xyz.read(case(15, "inconsistent.xyz"))
    np.testing.assert_array_equal(wrong.virial, [LABEL])
    assert len(wrong.warnings) == 1
    assert "frame 1" in wrong.warnings[0]
    assert "the virial is used" in wrong.warnings[0]


def test_016_stress_in_gpa(calculator: Any, tmp_path: Path) -> None:
    frames = xyz.read(case(16, "stress-in-gpa.xyz"))
    assert frames.virial[0, 0, 0] == 3.427562
    assert len(frames.warnings) == 1
    assert "frame 1" in frames.warnings[0]
    assert "in GPa" in frames.warnings[0]
    assert predicted(calculator, case(16, "stress-in-gpa.xyz"), tmp_path).warnings == tuple(frames.warnings)


def test_018_no_pbc_key(calculator: Any, tmp_path: Path) -> None:
    path = case(18, "no-pbc-key.extxyz")
    assert evaluated(calculator, path)["energy"][0] == pytest.approx(SI2, abs=1e-8)
    predicted(calculator, path, tmp_path)
    # What was assumed stands in the answer.
    assert 'pbc="T T T"' in (tmp_path / "out.xyz").read_text()


@pytest.mark.parametrize("name", ["no-lattice.extxyz", "zero-lattice.extxyz"])
def test_019_no_lattice(calculator: Any, name: str, tmp_path: Path) -> None:
    path = case(19, name)
    result = evaluated(calculator, path)
    assert result["energy"][0] == pytest.approx(-3.17537941, abs=1e-8)
    six = cases.six(result["virial"][0])
    np.testing.assert_allclose(six, [-0.1209146, -0.0009143, -0.0002286, 0.0004571, 0.0052572, -0.0105143], atol=1e-6)
    np.testing.assert_allclose(result["forces"][0], [0.05257155, 0.00457144, -0.00228572], atol=1e-7)
    predicted(calculator, path, tmp_path)
    text = (tmp_path / "out.xyz").read_text()
    assert "stress" not in text
    assert "energy=-3.175379" in text
    labelled = tmp_path / "labelled.xyz"
    labelled.write_text(path.read_text().replace("Properties=", "energy=-3 Properties="))
    assert xyz.read(labelled).energy[0] == -3


def test_019_periodic_without_a_cell(tmp_path: Path) -> None:
    path = tmp_path / "x.xyz"
    path.write_text(case(19, "zero-lattice.extxyz").read_text().replace("F F F", "T T T"))
    assert "vector a is zero but pbc makes its direction periodic" in refused(path).reason
    path.write_text(case(19, "no-lattice.extxyz").read_text().replace("Properties", 'pbc="T T T" Properties'))
    assert "there is no Lattice" in refused(path).reason


def test_021_names_of_labels() -> None:
    frames = xyz.read(case(21, "keys.xyz"))
    assert frames.label_counts() == {"energies": 4, "forces": 8, "virials": 0}
    assert frames.energy.tolist() == [SI2] * 4
    assert frames.energy_weight.tolist() == [1, 1, 1, 2]


def test_022_as_ase_writes_it(calculator: Any, tmp_path: Path) -> None:
    path = case(22, "ase-written.xyz")
    wanted = {"energies": 2, "forces": 4, "virials": 2}
    assert xyz.read(path).label_counts() == wanted
    result = predicted(calculator, path, tmp_path)
    for rmse in (result.rmse_energy, result.rmse_forces, result.rmse_virial):
        assert rmse is not None
        assert rmse < 1e-5
    io_ase = pytest.importorskip("ase.io")
    text = io.StringIO()
    io_ase.write(text, io_ase.read(path, index=":"), format="extxyz")
    assert xyz.parse(text.getvalue()).label_counts() == wanted


@pytest.mark.parametrize("name", ["crlf", "no-final-newline", "trailing-blanks", "blank-between"])
def test_023_line_ends(name: str) -> None:
    frames = xyz.read(case(23, f"{name}.xyz"))
    assert frames.label_counts() == {"energies": 3, "forces": 6, "virials": 0}
    assert frames.structures.counts.tolist() == [2, 2, 2]
    assert len(list(xyz.read_blocks(case(23, f"{name}.xyz"), 1))) == 3


def test_023_short_last_frame() -> None:
    error = refused(case(23, "short-last-frame.xyz"))
    assert error.frame == 2
    assert "ends early: 2 atoms announced, 1 found" in error.reason


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("nan-position.extxyz", 4, "atom 2, pos x: 'NaN' is not a finite number"),
        ("inf-lattice.extxyz", 2, "key lattice: 'inf' is not a finite number"),
        ("nan-label.xyz", 2, "key energy: 'nan' is not a finite number"),
    ],
)
def test_025_not_finite(name: str, line: int, says: str) -> None:
    error = refused(case(25, name))
    assert (error.frame, error.line, error.reason) == (0, line, says)


def test_025_batch_mates_are_not_affected(calculator: Any, tmp_path: Path) -> None:
    path = tmp_path / "in.xyz"
    good = case(14, "header-a.extxyz").read_text()
    path.write_text(good + case(25, "nan-position.extxyz").read_text() + good)
    result = predicted(calculator, path, tmp_path, skip_bad=True)
    assert (result.frames, [f.frame for f in result.failures]) == (2, [1])
    np.testing.assert_allclose(xyz.read(tmp_path / "out.xyz").energy, [SI2, SI2], atol=1e-8)


@pytest.mark.parametrize(
    ("name", "energy", "first_force"),
    [
        ("three-atoms", -4.44590737, [0.07880253, 0.06186875, 0.00463845]),
        ("nonsymmetric-cell", -2.95665218, [0.13459142, 0.01413156, 0.00217750]),
    ],
)
def test_026_rows_are_rows(calculator: Any, name: str, energy: float, first_force: list[float]) -> None:
    result = evaluated(calculator, case(26, f"{name}.extxyz"))
    assert result["energy"][0] == pytest.approx(energy, abs=1e-8)
    np.testing.assert_allclose(result["forces"][0], first_force, atol=1e-7)


@pytest.mark.parametrize(
    ("species", "says"),
    [
        ("si si", "atom 1, species: 'si' is not a chemical symbol; did you mean 'Si'?"),
        ("SI SI", "atom 1, species: 'SI' is not a chemical symbol; did you mean 'Si'?"),
        ("Si1 Si2", "atom 1, species: 'Si1' is not a chemical symbol; did you mean 'Si'?"),
        ("14 14", "atom 1, species: '14' is not a chemical symbol; atomic numbers stand in a column Z:I:1"),
        ("X Si", "atom 1, species: 'X' is not a chemical symbol (H to Pu, exact spelling)"),
        ("0 1", "atom 1, species: '0' is not a chemical symbol; atomic numbers stand in a column Z:I:1"),
    ],
)
def test_027_spellings_of_species_refused(species: str, says: str, tmp_path: Path) -> None:
    first, second = species.split()
    path = tmp_path / "x.xyz"
    lines = case(14, "header-a.extxyz").read_text().splitlines()
    lines[2:] = [lines[2].replace("Si", first), lines[3].replace("Si", second)]
    path.write_text("\n".join(lines))
    assert refused(path).reason == says


def test_027_other_species(calculator: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.xyz"
    text = case(14, "header-a.extxyz").read_text()
    numbered = text.replace("species:S:1", "Z:I:1").replace("\nSi", "\n14")
    path.write_text(numbered)
    assert evaluated(calculator, path)["energy"][0] == pytest.approx(SI2, abs=1e-8)
    path.write_text(numbered.replace("\n14", "\n0", 1))
    assert refused(path).reason == "atom 1, atomic number: '0' is not an atomic number from 1 to 94"
    path.write_text(text.replace("\nSi", "\nGe", 1))
    with pytest.raises(InputFileError, match="frame 1, line 1: atom 1: element Ge is not in the model"):
        predicted(calculator, path, tmp_path)


def test_081_results_come_back(calculator: Any, tmp_path: Path) -> None:
    path = case(22, "ase-written.xyz")
    predict(path, None, tmp_path / "out.xyz", calculator=calculator, progress=False)
    result = calculator.evaluate(path, ["energy", "energies", "forces", "stress", "virial"])
    ours = xyz.read(tmp_path / "out.xyz")
    np.testing.assert_array_equal(ours.energy, result["energy"])
    np.testing.assert_array_equal(ours.key_numbers("free_energy", 1)[:, 0], result["energy"])
    np.testing.assert_array_equal(ours.forces, result["forces"])
    np.testing.assert_array_equal(ours.virial, result["virial"])
    np.testing.assert_array_equal(ours.column("energies", 1)[:, 0], result["energies"])
    images = pytest.importorskip("ase.io").read(tmp_path / "out.xyz", index=":")
    for i, atoms in enumerate(images):
        view = result.view(i)
        assert atoms.get_potential_energy() == view["energy"]
        assert atoms.get_potential_energy(force_consistent=True) == view["energy"]
        np.testing.assert_array_equal(atoms.get_forces(), view["forces"])
        np.testing.assert_array_equal(atoms.get_stress(), view["stress"])
        np.testing.assert_array_equal(atoms.get_potential_energies(), view["energies"])
        np.testing.assert_allclose(atoms.info["virial"], view["virial"], rtol=1e-12, atol=1e-14)


def test_085_placeholders(calculator: Any, tmp_path: Path) -> None:
    result = predicted(calculator, case(85, "predict.xyz"), tmp_path, gpumd_dir=tmp_path)
    assert result.rmse_virial is not None
    assert result.rmse_virial < 1e-5
    for name in ("virial_train.out", "stress_train.out"):
        rows = np.loadtxt(tmp_path / name)
        assert (rows[:, 6:] == gpumd_out.MISSING).all(axis=1).tolist() == [True, False, True]
        np.testing.assert_allclose(rows[1, :6], rows[1, 6:], rtol=1e-3)
    label = xyz.read(case(85, "placeholder-as-label.xyz"))
    assert label.label_counts()["virials"] == 0
    assert "marks a missing value; the label is not used" in label.warnings[0]
    # GPUMD's own output, read back as labels, is no label either.
    assert predicted(calculator, case(85, "placeholder-as-label.xyz"), tmp_path).rmse_virial is None


def test_098_rows_belong_to_frames(calculator: Any, tmp_path: Path) -> None:
    """Virials in frames 1, 4 and 6, frame 2 deleted, sorted by error: each row keeps its own."""
    good = case(14, "header-a.extxyz").read_text().splitlines()
    texts = []
    for k in range(6):
        label = f'virial="{k}.5 0 0 0 {k}.5 0 0 0 {k}.5" ' if k in {0, 3, 5} else ""
        comment = good[1].replace("Properties", f"{label}energy={k} id={k} Properties")
        texts.append("\n".join([good[0], comment, *good[2:]]) + "\n")
    path = tmp_path / "in.xyz"
    path.write_text("".join(texts))
    predicted(calculator, path, tmp_path, gpumd_dir=tmp_path)
    rows = np.loadtxt(tmp_path / "virial_train.out")
    assert np.flatnonzero(rows[:, 6] != gpumd_out.MISSING).tolist() == [0, 3, 5]
    assert rows[[0, 3, 5], 6].tolist() == [0.25, 1.75, 2.75]
    frames = xyz.read(path)
    left = frames.select([0, 2, 3, 4, 5])
    assert left.indices.tolist() == [0, 2, 3, 4, 5]
    by_error = left.select(np.argsort(-np.abs(left.energy - SI2)))
    assert by_error.indices.tolist() == [5, 4, 3, 2, 0]
    np.testing.assert_array_equal(by_error.virial[:, 0, 0], [5.5, np.nan, 3.5, np.nan, 0.5])
    predicted(calculator, path, tmp_path)
    again = xyz.read(tmp_path / "out.xyz")
    assert again.key_numbers("id", 1)[:, 0].tolist() == list(range(6))
