"""Public reports about model files: each is loaded and gives the reference energy, or is refused by name and line.

After every refusal a good model still answers the two-atom silicon cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import cases
from locations import needs_shared
from nepcore.errors import ModelFileError
from nepcore.files import nep_txt

if TYPE_CHECKING:
    from pathlib import Path

    from nepcore.structures import Predictions

pytestmark = needs_shared


def evaluate(model: Path, structures: Path, dtype: str = "float64") -> Predictions:
    pytest.importorskip("torch")
    import nepcore

    calculator = nepcore.load(model, device="cpu", dtype=dtype)
    result = calculator.evaluate(structures, ["energy", "forces", "virial"])
    assert not result.errors
    return result


def still_healthy() -> None:
    result = evaluate(cases.TOY_SI, cases.file(14, "header-a.extxyz"))
    assert result.values["energy"][0] == pytest.approx(cases.SI2, abs=2e-6)


def agrees(result: Predictions, text: str, dtype: str) -> None:
    energy, force, virial = cases.PER_ATOM[dtype]
    n = int(result.counts[0])
    assert result.values["energy"][0] == pytest.approx(cases.energy(text), abs=energy * n)
    np.testing.assert_allclose(result.values["forces"], cases.forces(text), rtol=0, atol=force)
    np.testing.assert_allclose(cases.six(result.values["virial"][0]), cases.virial(text), rtol=0, atol=virial * n)


@pytest.mark.parametrize(
    ("name", "token"),
    [("unknown-version", "nep6"), ("dipole-as-potential", "nep4_dipole"), ("charge-model", "nep4_charge1")],
)
def test_001_unknown_tags_are_refused_by_name(name: str, token: str) -> None:
    path = cases.file(1, f"{name}.nep.txt")
    with pytest.raises(ModelFileError) as caught:
        nep_txt.read(path)
    assert str(caught.value).startswith(f"{path}, line 1: ")
    assert f"'{token}'" in str(caught.value)
    assert "\n" not in str(caught.value)
    still_healthy()


def test_001_charge_model_under_a_plain_tag_has_the_toy_count() -> None:
    # The toy body is that of a plain model; as nep4_charge1 it would lack H·T + 1 numbers. As nep4 it is the toy.
    text = cases.file(1, "charge-model.nep.txt").read_text()
    model = nep_txt.loads(text.replace("nep4_charge1", "nep4", 1))
    assert model.equals(nep_txt.read(cases.TOY_SI))


@pytest.mark.parametrize("dtype", cases.PER_ATOM)
def test_002_cutoff_line_without_neighbour_limits(dtype: str) -> None:
    path = cases.file(2, "cutoff-two-values.nep.txt")
    model = nep_txt.read(path)
    assert (model.mn_radial, model.mn_angular) == (None, None)
    agrees(evaluate(path, cases.file(2, "input.extxyz"), dtype), cases.expected(2), dtype)


def test_004_missing_header_line() -> None:
    path = cases.file(4, "no-basis-size.nep.txt")
    with pytest.raises(ModelFileError) as caught:
        nep_txt.read(path)
    assert str(caught.value).startswith(f"{path}, line 4: ")
    assert "'l_max'" in caught.value.reason
    assert "'basis_size'" in caught.value.reason
    still_healthy()


@pytest.mark.parametrize("dtype", cases.PER_ATOM)
def test_006_third_number_of_the_zbl_line(dtype: str) -> None:
    path = cases.file(6, "zbl-typewise.nep.txt")
    result = evaluate(path, cases.file(6, "input.extxyz"), dtype)
    agrees(result, cases.expected(6), dtype)


def test_006_without_the_third_number() -> None:
    result = evaluate(cases.TOY_NACL, cases.file(6, "input.extxyz"))
    assert result.values["energy"][0] == pytest.approx(30.94330183, abs=2e-6)


@pytest.mark.parametrize("dtype", cases.PER_ATOM)
@pytest.mark.parametrize(
    ("name", "energy"),
    [
        ("old-421", cases.SI2),
        ("new-411", cases.SI2),
        ("old-420", -3.52172956),
        ("new-410", -3.52172956),
        ("3body-only-300", -5.28442910),
    ],
)
def test_008_old_and_new_spelling_of_l_max(name: str, energy: float, dtype: str) -> None:
    result = evaluate(cases.file(8, f"lmax-{name}.nep.txt"), cases.file(8, "input.extxyz"), dtype)
    assert result.values["energy"][0] == pytest.approx(energy, abs=2 * cases.PER_ATOM[dtype][0])


def test_008_both_spellings_are_one_model() -> None:
    for old, new in (("old-421", "new-411"), ("old-420", "new-410")):
        first, second = (nep_txt.read(cases.file(8, f"lmax-{name}.nep.txt")) for name in (old, new))
        assert first.equals(second)


@pytest.mark.parametrize("dtype", cases.PER_ATOM)
@pytest.mark.parametrize("version", [3, 5])
def test_009_other_versions(version: int, dtype: str) -> None:
    third, fifth = cases.expected(9).split("\nnep5:\n")
    result = evaluate(cases.file(9, f"nep{version}.nep.txt"), cases.file(9, "input.extxyz"), dtype)
    agrees(result, third if version == 3 else fifth, dtype)


@pytest.mark.parametrize(("body", "tag"), [(3, "nep4"), (3, "nep5"), (5, "nep4"), (5, "nep3")])
def test_009_body_of_one_version_under_the_tag_of_another(body: int, tag: str) -> None:
    text = cases.file(9, f"nep{body}.nep.txt").read_text()
    with pytest.raises(ModelFileError, match=rf"expected \d+ numbers .*found \d+.*as many as nep{body} "):
        nep_txt.loads(text.replace(f"nep{body}", tag, 1))
    still_healthy()


@pytest.mark.parametrize("dtype", cases.PER_ATOM)
def test_011_flexible_zbl_at_the_end(dtype: str) -> None:
    result = evaluate(cases.file(11, "flexible-zbl.nep.txt"), cases.file(11, "input.extxyz"), dtype)
    np.testing.assert_allclose(
        result.values["energy"], [21.02450408, 31.55908991], rtol=0, atol=2 * cases.PER_ATOM[dtype][0]
    )


def test_011_flexible_zbl_without_its_numbers() -> None:
    lines = cases.file(11, "flexible-zbl.nep.txt").read_text().splitlines()
    with pytest.raises(ModelFileError, match="30 numbers of the flexible ZBL at the end are missing"):
        nep_txt.loads("\n".join(lines[:-30]))
    still_healthy()
