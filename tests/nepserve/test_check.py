"""``nepserve check``: the report about a model file."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from locations import CASES, MODELS, needs_shared
from nepcore.files import nep_txt
from nepcore.synthetic import make_model
from nepserve.check import CheckReport, check, report

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {"n_max": (2, 1), "basis_size": (3, 2), "l_max": 2, "hidden": (3,)}


def checked(tmp_path: Path, model: nep_txt.NepFile) -> CheckReport:
    path = tmp_path / "nep.txt"
    nep_txt.write(model, path)
    return check(path)


def test_report_of_a_good_file(tmp_path: Path) -> None:
    result = checked(tmp_path, make_model(["Te", "Pb"], zbl="universal", **SMALL))
    assert (result.exit_code, result.error, result.warnings) == (0, None, ())
    text = "\n".join(result.lines())
    assert text == report(tmp_path / "nep.txt")
    for piece in ("nep.txt", "tag nep4_zbl", "2: Te Pb", "5 Å radial, 4 Å angular", "9 – 3 – 1, for each of 2 elements",
                  "3 radial, 6 angular (l = 1 … 2, q222)", "universal ZBL, switched off from 1 to 2 Å", "139 fitted",
                  "Limits:", "periodic in all three directions", "dipoles", "farther apart than 5 Å"):  # fmt: skip
        assert piece in text, piece
    assert "Warnings" not in text
    assert "temperature" not in text


def test_report_in_plain_values(tmp_path: Path) -> None:
    result = checked(tmp_path, make_model(["Te", "Pb"], version=3, **SMALL)).as_dict()
    assert json.loads(json.dumps(result)) == result
    assert result["ok"] is True
    assert result["model"]["elements"] == ["Te", "Pb"]
    assert "error" not in result
    assert len(result["warnings"]) == 1


def test_temperature_models_say_what_they_need(tmp_path: Path) -> None:
    text = "\n".join(checked(tmp_path, make_model(["Si"], temperature=True, **SMALL)).lines())
    assert "needs a temperature" in text
    assert "free energy" in text


def test_cutoffs_per_element(tmp_path: Path) -> None:
    model = make_model(["Te", "Pb"], **SMALL, cutoff=((8, 4), (7, 5)))
    assert "radial and angular, Å: Te 8 4, Pb 7 5" in "\n".join(checked(tmp_path, model).lines())


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ("nep4_dipole 1 Si\n", 1, "dipole"),
        ("nep6 1 Si\n", 1, "nep6"),
        ("nep4 1 Si\ncutoff 5 4\nn_max 1.5 2\n", 3, "'1.5' is not an integer"),
        ("", None, "empty"),
    ],
)
def test_report_of_a_bad_file(tmp_path: Path, content: str, line: int | None, reason: str) -> None:
    path = tmp_path / "nep.txt"
    path.write_text(content)
    result = check(path)
    assert result.exit_code == 1
    first, last = result.lines()
    assert first.startswith(f"{path}, line {line}: " if line else f"{path}: ")
    assert reason in first
    assert "cannot be served" in last
    values = result.as_dict()
    assert values["ok"] is False
    assert values.get("line") == line
    assert "model" not in values


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    assert "No such file" in report(tmp_path / "absent.txt")
    assert "directory" in report(tmp_path)


def model_with(**changes: object) -> nep_txt.NepFile:
    return dataclasses.replace(make_model(["Te", "Pb"], **SMALL), **changes)


PAIRS = np.array([[0.5, 1.0, 1, 1, 1, 1, 1, 1, 1, 1]] * 3)
BASE = model_with()

ODD = {
    "nep3": (make_model(["Si"], version=3, **SMALL), "no longer read by GPUMD"),
    "nep5": (make_model(["Si"], version=5, **SMALL), "no longer written by GPUMD"),
    "no-mn": (model_with(mn_radial=None, mn_angular=None), "no neighbour limits (MN)"),
    "mn-large": (model_with(mn_radial=900.0), "refuses more than 819"),
    "mn-not-whole": (model_with(mn_radial=4.0, mn_angular=3.5), "cutoffs of the second element"),
    "n_max-radial": (make_model(["Si"], **{**SMALL, "n_max": (13, 1)}), "n_max (radial) is 13"),
    "n_max-angular": (make_model(["Si"], **{**SMALL, "n_max": (1, 9)}), "n_max (angular) is 9"),
    "basis-radial": (make_model(["Si"], **{**SMALL, "basis_size": (17, 2)}), "basis_size (radial) is 17"),
    "basis-angular": (make_model(["Si"], **{**SMALL, "basis_size": (3, 13)}), "basis_size (angular) is 13"),
    "neurons": (make_model(["Si"], **{**SMALL, "hidden": (121,)}), "number of neurons is 121"),
    "neurons-second": (make_model(["Si"], **{**SMALL, "hidden": (2, 130)}), "number of neurons is 130"),
    "angular": (make_model(["Si"], **{**SMALL, "l_max": 8, "n_max": (1, 11)}), "angular components is 108"),
    "l_max-1": (make_model(["Si"], **{**SMALL, "l_max": 1, "switches": ()}), "starts at 2"),
    "idle-switch": (make_model(["Si"], **{**SMALL, "switches": ("q134", "q222")}), "q134 are on, but zero"),
    "two-layers-3": (make_model(["Si"], version=3, **{**SMALL, "hidden": (2, 2)}), "version 4 only"),
    "short-cutoff": (make_model(["Si"], **SMALL, cutoff=(5, 2)), "between 3 and 100 Å"),
    "long-cutoff": (make_model(["Si"], **SMALL, cutoff=(20, 4)), "1,676 neighbours"),
    "zbl-beyond-angular": (
        model_with(tag="nep4_zbl", zbl="universal", zbl_inner=2.0, zbl_outer=4.5),
        "beyond the shortest angular cutoff of 4 Å: it is truncated",
    ),
    "zbl-typewise-beyond": (
        model_with(tag="nep4_zbl", zbl="typewise", zbl_inner=2.0, zbl_outer=4.5, zbl_factor=0.7),
        "may be truncated",
    ),
    "zbl-without-width": (
        model_with(tag="nep4_zbl", zbl="universal", zbl_inner=2.0, zbl_outer=2.0),
        "the energy jumps at 2 Å",
    ),
    "flexible-without-width": (
        model_with(tag="nep4_zbl", zbl="flexible", zbl_pairs=PAIRS * np.array([[1], [3], [1]]) ** np.eye(10)[0]),
        "ZBL of Te-Pb leaves no width",
    ),
    "flexible-beyond-angular": (
        model_with(tag="nep4_zbl", zbl="flexible", zbl_pairs=PAIRS * np.array([[1], [1], [5]]) ** np.eye(10)[1]),
        "ZBL of Pb-Pb reaches beyond",
    ),
    "flexible-growing": (
        model_with(tag="nep4_zbl", zbl="flexible", zbl_pairs=PAIRS * (1 - 2 * np.eye(10)[5])),
        "ZBL of Te-Te, Te-Pb, Pb-Pb has a negative decay rate",
    ),
    "all-zero": (
        model_with(**{k: np.zeros_like(getattr(BASE, k)) for k in ("w0", "b0", "w1", "c_radial", "c_angular")}),
        "All parameters are zero",
    ),
    "no-output": (model_with(w1=np.zeros_like(BASE.w1)), "All zero: output weights"),
    "no-output-of-one": (model_with(w1=BASE.w1 * [[1], [0]]), "network of Pb has no output weights"),
    "huge-weights": (model_with(w0=BASE.w0 * 1e5), "input weights (w0) go up to"),
    "beyond-float32": (model_with(bias=1e39), "--dtype float64"),
    "scaler-zero": (model_with(q_scaler=np.arange(9.0)), "1 are zero"),
    "scaler-negative": (model_with(q_scaler=np.arange(9.0) - 2.5), "3 are negative"),
    "scaler-huge": (model_with(q_scaler=np.full(9, 1e7)), "9 are above 1e+06"),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_models_are_served_with_a_warning(kind: str, tmp_path: Path) -> None:
    model, warning = ODD[kind]
    result = checked(tmp_path, model)
    assert result.exit_code == 0
    assert any(warning in text for text in result.warnings), result.warnings
    assert "Warnings:" in result.lines()


def test_many_pairs_are_summed_up(tmp_path: Path) -> None:
    elements = ["H", "C", "N", "O"]
    model = make_model(elements, zbl="flexible", **SMALL)
    assert model.zbl_pairs is not None
    pairs = model.zbl_pairs.copy()
    pairs[:, 1] = 9.0
    (warning,) = checked(tmp_path, dataclasses.replace(model, zbl_pairs=pairs)).warnings
    assert "H-H, H-C, H-N, H-O and 6 more pairs" in warning


@needs_shared
@pytest.mark.parametrize("name", ["C_2022_NEP4", "PbTe_NEP4", "CrCoNi_NEP4_ZBL_typewise", "nep_water", "nep_BaTiO3"])
def test_trained_models_raise_no_warning(name: str) -> None:
    result = check(MODELS / f"{name}.txt")
    assert (result.exit_code, result.warnings) == (0, ())


@needs_shared
@pytest.mark.parametrize(
    ("case", "token"),
    [
        ("case-001/unknown-version", "nep6"),
        ("case-001/dipole-as-potential", "nep4_dipole"),
        ("case-001/charge-model", "nep4_charge1"),
    ],
)
def test_refused_cases_name_file_line_and_token(case: str, token: str) -> None:
    path = CASES / f"{case}.nep.txt"
    result = check(path)
    assert result.exit_code == 1
    assert result.lines()[0].startswith(f"{path}, line 1: tag '{token}'")


def test_checking_needs_no_torch() -> None:
    code = "import sys, nepserve.check; sys.exit(bool({'torch', 'fastapi', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
