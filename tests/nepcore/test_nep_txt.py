"""Model files: what is read, what is refused and how, and that writing gives back what was read."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from locations import CASES, MODELS, needs_shared
from model_texts import FLEXIBLE, SI, SMALL, TWO, text_of
from nepcore.errors import ModelFileError
from nepcore.files import nep_layout, nep_txt
from nepcore.synthetic import make_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def edited(text: str, line: int, new: str | None) -> str:
    """The text with one line (from 1) replaced, or left out."""
    lines = text.splitlines()
    lines[line - 1 : line] = [] if new is None else [new]
    return "\n".join(lines) + "\n"


# Written by hand, line by line from the format's description: H = 2, D = 2 radial + 2 angular = 4, T = 2.
HAND = """\
nep5 2 Te Pb
cutoff 6 5 4 3 20 10
n_max 1 0
basis_size 1 0
l_max 1 0 3
ANN 2 0
"""


def test_order_of_the_numbers() -> None:
    per_type = 2 * 4 + 2 + 2 + 1
    count = 2 * per_type + 1 + 2 * 2 * 4 + 1 * 1 * 4 + 4
    model = nep_txt.loads(HAND + "\n".join(map(str, range(count))))
    assert (model.dim, model.dim_radial, model.dim_angular, model.n_blocks) == (4, 2, 2, 2)
    assert model.switches == {n: n == "q1111" for n in ("q222", "q1111", "q112", "q123", "q233", "q134")}
    assert model.w0[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]  # neuron slow, descriptor fast
    assert model.b0[0].tolist() == [8, 9]
    assert model.w1[0].tolist() == [10, 11]
    assert model.type_bias is not None
    assert model.type_bias.tolist() == [12, 25]
    assert model.w0[1, 0].tolist() == [13, 14, 15, 16]
    assert model.bias == 26
    # index = (n (K + 1) + k) T² + t1 T + t2
    expected = [27 + (n * 2 + k) * 4 + a * 2 + b for n, k, a, b in itertools.product(range(2), repeat=4)]
    assert model.c_radial.reshape(-1).tolist() == expected
    assert model.c_radial[1, 0, 0, 1] == 27 + 8 + 1
    assert model.c_angular.tolist() == [[[[43, 44], [45, 46]]]]
    assert model.q_scaler.tolist() == [47, 48, 49, 50]
    assert model.cutoff_radial.tolist() == [6, 4]
    assert model.cutoff_angular.tolist() == [5, 3]
    assert (model.mn_radial, model.mn_angular) == (20, 10)
    assert model.cutoff == 6
    assert model.admission.elements == ("Te", "Pb")


def test_order_of_two_layers() -> None:
    header = "nep4 1 Si\ncutoff 5 4 9 9\nn_max 0 0\nbasis_size 0 0\nl_max 1 0 0\nANN 2 3\n"
    count = 2 * 2 + 2 + 3 * 2 + 3 + 3 + 1 + 1 + 1 + 2
    model = nep_txt.loads(header + "\n".join(map(str, range(count))))
    assert model.hidden == (2, 3)
    assert model.w0.tolist() == [[[0, 1], [2, 3]]]
    assert model.b0.tolist() == [[4, 5]]
    assert model.w1.tolist() == [[[6, 7], [8, 9], [10, 11]]]
    assert model.b1 is not None
    assert model.w2 is not None
    assert model.b1.tolist() == [[12, 13, 14]]
    assert model.w2.tolist() == [[15, 16, 17]]
    assert model.bias == 18


def test_one_network_for_version_3() -> None:
    model = make_model(["Te", "Pb"], version=3, **SMALL)
    assert model.w0.shape == (1, 3, model.dim)
    assert model.c_radial.shape == (3, 4, 2, 2)


def test_flexible_zbl_stands_at_the_end() -> None:
    model = nep_txt.loads(FLEXIBLE)
    assert (model.zbl, model.zbl_inner, model.zbl_outer) == ("flexible", None, None)
    assert model.zbl_pairs is not None
    assert model.zbl_pairs.shape == (6, 10)
    assert model.zbl_pairs[-1].tolist() == [float(x) for x in FLEXIBLE.split()[-10:]]


@pytest.mark.parametrize(
    ("line", "kind", "numbers"),
    [
        ("zbl 1 2", "universal", (1, 2, None)),
        ("zbl 0 2", "universal", (0, 2, None)),
        ("zbl 1 2 0.65", "typewise", (1, 2, 0.65)),
        ("zbl 9 2 0.65", "typewise", (9, 2, 0.65)),  # the first number is ignored there
    ],
)
def test_zbl_line(line: str, kind: str, numbers: tuple[float | None, ...]) -> None:
    model = nep_txt.loads(edited(text_of("Si", zbl="universal"), 2, line))
    assert (model.zbl, (model.zbl_inner, model.zbl_outer, model.zbl_factor)) == (kind, numbers)


@pytest.mark.parametrize(
    ("elements", "numbers", "radial", "angular", "mn"),
    [
        (("Si",), "5 4", [5], [4], None),
        (("Si",), "5 4 60.0 40", [5], [4], (60, 40)),
        (("Te", "Pb"), "5 4", [5, 5], [4, 4], None),
        (("Te", "Pb"), "5 4 60 40", [5, 5], [4, 4], (60, 40)),
        (("Te", "Pb"), "5 4 6 3 60 40", [5, 6], [4, 3], (60, 40)),
        (("Al", "Cu", "O"), "5 4 6 3 4 4", [5, 6, 4], [4, 3, 4], None),
        (("Al", "Cu", "O"), "5 4 6 3 4 4 60 40", [5, 6, 4], [4, 3, 4], (60, 40)),
        (("Al", "Cu", "O"), "5e0 +4. 60 40", [5, 5, 5], [4, 4, 4], (60, 40)),
    ],
)
def test_cutoff_line(
    elements: tuple[str, ...], numbers: str, radial: list[float], angular: list[float], mn: tuple[float, float] | None
) -> None:
    model = nep_txt.loads(edited(text_of(*elements), 2, f"cutoff {numbers}"))
    assert model.cutoff_radial.tolist() == radial
    assert model.cutoff_angular.tolist() == angular
    assert (model.mn_radial, model.mn_angular) == (mn or (None, None))


@pytest.mark.parametrize(
    ("old", "new"),
    [("2 2 1", "2 1 1"), ("2 2 0", "2 1 0"), ("2 0 0", "2 0"), ("2 0 0", "2"), ("2 2 0", "2 1 0 0 0 0 0")],
)
def test_spellings_of_l_max(old: str, new: str) -> None:
    text = text_of("Si", switches=("q222", "q1111")[: sum(d != "0" for d in old.split()[1:])])
    assert f"\nl_max {old}\n" in text
    other = nep_txt.loads(text.replace(f"l_max {old}", f"l_max {new}"))
    assert other.equals(nep_txt.loads(text))


def test_every_switch_and_l() -> None:
    for l_max in range(1, 9):
        for on in itertools.product((False, True), repeat=6):
            switches = dict(zip(nep_layout.SWITCHES, on, strict=True))
            text = nep_txt.dumps(
                make_model(
                    ["Si"], cutoff=(5, 4), n_max=(0, 0), basis_size=(0, 0), l_max=l_max, hidden=(1,), switches=switches
                )
            )
            model = nep_txt.loads(text)
            assert model.switches == switches
            assert model.dim == 1 + l_max + sum(on)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda text: text.replace("\n", "\r\n"), id="crlf"),
        pytest.param(lambda text: text.replace("\n", "\r"), id="cr"),
        pytest.param(lambda text: "\ufeff" + text, id="bom"),
        pytest.param(lambda text: text.replace("\n", "  \t \n"), id="trailing-blanks"),
        pytest.param(lambda text: text.replace("\n", "\n  "), id="leading-blanks"),
        pytest.param(lambda text: text + "\n", id="empty-last-line"),
        pytest.param(lambda text: text + " \n\n\n", id="empty-last-lines"),
        pytest.param(lambda text: text.rstrip("\n"), id="no-last-newline"),
        pytest.param(lambda text: re.sub(r"e([+-]\d+)", r"E\1", text), id="capital-E"),
        pytest.param(lambda text: re.sub(r" {2}(\d)", r" +\1", text), id="plus-signs"),
        pytest.param(lambda text: re.sub(r"(?<=\d) (?=\S)", "\t", text), id="tabs"),
    ],
)
def test_fine_print(change: Callable[[str], str], tmp_path: Path) -> None:
    changed = change(TWO)
    assert changed != TWO
    path = tmp_path / "nep.txt"
    path.write_bytes(changed.encode())
    model = nep_txt.read(path)
    assert model.equals(nep_txt.loads(TWO))
    once = nep_txt.dumps(model)
    assert nep_txt.dumps(nep_txt.loads(once)) == once


def test_any_float_syntax() -> None:
    lines = TWO.splitlines()
    spellings = ["1", "-1", "+1.", ".5", "1e3", "1E-3", "-0", "0.1000000000000000055511151231257827", "1e-320", "3e38"]
    lines[6 : 6 + len(spellings)] = spellings
    model = nep_txt.loads("\n".join(lines))
    assert model.w0.reshape(-1)[: len(spellings)].tolist() == [float(s) for s in spellings]


SUPPORTED = re.compile(r"nep[345](_zbl)?|nep[34](_zbl)?_temperature")


def shared_models() -> list[object]:
    if not MODELS.is_dir():
        return []
    return [
        pytest.param(path, id=path.stem)
        for path in [*sorted(MODELS.glob("*.txt")), *sorted(CASES.rglob("*.nep.txt"))]
        if path.parent.name not in {"case-001", "case-004"}
    ]


@needs_shared
@pytest.mark.parametrize("path", shared_models())
def test_files_come_back_byte_for_byte(path: Path) -> None:
    content = path.read_bytes()
    if SUPPORTED.fullmatch(content.split()[0].decode()):
        assert nep_txt.dumps(nep_txt.read(path)).encode() == content
    else:
        with pytest.raises(ModelFileError) as caught:
            nep_txt.read(path)
        assert caught.value.line == 1


GPUMD_HEADERS = {
    "trailing-blank": "nep4 1 Si \ncutoff 4.2 3.7 80 47\nn_max 0 0\nbasis_size 0 0\nl_max 1 0 0 \nANN 1 0\n",
    "no-blank": "nep4 1 Si\ncutoff 6.0 4.0 251 80\nn_max 0 0\nbasis_size 0 0\nl_max 1 0 0\nANN 1 0\n",
    "no-mn": "nep4 1 Si \ncutoff 4.2 3.7\nn_max 0 0\nbasis_size 0 0\nl_max 1 0 0\nANN 1 0\n",
    "switches": "nep4 1 Si \ncutoff 5 4 9 9\nn_max 0 0\nbasis_size 0 0\nl_max 1 0 0 0 0 0 0\nANN 1 0\n",
}


@pytest.mark.parametrize("kind", GPUMD_HEADERS)
def test_spelling_of_the_header_is_kept(kind: str) -> None:
    numbers = [0.0, -0.0, 1.0, -1.2345678e-5, 9.9999999e37, -1e-38, 1.7500000e-1, 3.4028235e38, 5e-324]
    text = GPUMD_HEADERS[kind] + "".join(f"{v:15.7e}\n" for v in numbers)
    assert nep_txt.dumps(nep_txt.loads(text)) == text


def test_numbers_with_more_digits_survive() -> None:
    model = make_model(["Te", "Pb"], **SMALL)
    rng = np.random.default_rng(3)
    changed = dataclasses.replace(
        model, w0=rng.normal(size=model.w0.shape), bias=1 / 3, q_scaler=np.full(model.dim, np.nextafter(1.0, 2.0))
    )
    text = nep_txt.dumps(changed)
    again = nep_txt.loads(text)
    assert again.equals(changed)
    assert not again.equals(model)
    assert nep_txt.dumps(again) == text
    # numbers that eight digits carry keep the usual form
    assert f"{model.c_radial[0, 0, 0, 0]:15.7e}\n" in text


def test_changed_fields_win_over_the_old_header() -> None:
    model = nep_txt.loads(TWO)
    changed = dataclasses.replace(
        model, cutoff_radial=np.array([6.0, 5.5]), mn_radial=77.0, elements=("Pb", "Te"), switches={"q1111": True}
    )
    lines = nep_txt.dumps(changed).splitlines()
    assert lines[0] == "nep4 2 Pb Te "
    assert lines[1] == f"cutoff 6 4 5.5 4 77 {model.mn_angular:g}"
    assert lines[4] == "l_max 2 0 1"
    assert nep_txt.loads("\n".join(lines)).equals(changed)


def test_header_lines_that_are_not_a_header_are_not_written() -> None:
    model = nep_txt.loads(SI)
    for header in ((*model.header, "1.0"), model.header[:-1], ("nonsense",), ("a\nb",) * 6):
        assert nep_txt.dumps(dataclasses.replace(model, header=header)) == SI


WRONG_MODELS = {
    "shape": ({"w0": np.zeros((1, 2, 2))}, "w0 has shape"),
    "nan": ({"bias": float("nan")}, "bias has numbers that are not finite"),
    "infinite": ({"q_scaler": np.full(9, np.inf)}, "q_scaler"),
    "element": ({"elements": ("Xx",)}, "unknown element"),
    "tag": ({"tag": "nep5"}, "contradict"),
    "tag-of-another-kind": ({"tag": "nep4_dipole"}, "dipole"),
    "zbl-without-tag": ({"zbl": "universal", "zbl_inner": 1.0, "zbl_outer": 2.0}, "no model file can say this"),
    "l_max": ({"l_max": 9}, "L must be 1 to 8"),
    "cutoffs": ({"cutoff_angular": np.array([9.0])}, "larger than the radial one"),
    "cutoff-nan": ({"cutoff_radial": np.array([np.nan])}, "not a finite number"),
}


@pytest.mark.parametrize("kind", WRONG_MODELS)
def test_models_that_no_file_can_hold(kind: str, tmp_path: Path) -> None:
    changes, reason = WRONG_MODELS[kind]
    path = tmp_path / "nep.txt"
    path.write_text("before")
    with pytest.raises(ValueError, match=reason):
        nep_txt.write(dataclasses.replace(nep_txt.loads(SI), **changes), path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_two_types_with_cutoffs_of_their_own_need_mn() -> None:
    model = make_model(["Te", "Pb"], **{**SMALL, "cutoff": ((5, 4), (6, 4))})
    with pytest.raises(ValueError, match="MN"):
        nep_txt.dumps(dataclasses.replace(model, mn_radial=None, mn_angular=None))
    three = make_model(["Te", "Pb", "O"], **{**SMALL, "cutoff": ((5, 4), (6, 4), (4, 4))})
    bare = dataclasses.replace(three, mn_radial=None, mn_angular=None)
    assert nep_txt.loads(nep_txt.dumps(bare)).equals(bare)


def test_write_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "nep.txt"
    nep_txt.write(nep_txt.loads(SI), path)
    assert path.read_bytes() == SI.encode()
    nep_txt.write(nep_txt.loads(TWO), str(path))
    assert path.read_bytes() == TWO.encode()
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="absent"):
        nep_txt.write(nep_txt.loads(SI), tmp_path / "absent" / "nep.txt")


@pytest.mark.skipif(not hasattr(os, "symlink") or sys.platform == "win32", reason="needs symbolic links")
def test_write_follows_links(tmp_path: Path) -> None:
    target, link = tmp_path / "real.txt", tmp_path / "nep.txt"
    target.write_text("before")
    link.symlink_to(target)
    nep_txt.write(nep_txt.loads(SI), link)
    assert link.is_symlink()
    assert target.read_text() == SI


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_write_and_read_through_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = "import sys; from nepcore.files import nep_txt; sys.stdout.write(nep_txt.dumps(nep_txt.read(sys.argv[1])))"
    with subprocess.Popen([sys.executable, "-c", code, str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        nep_txt.write(nep_txt.loads(SI), pipe)
        assert reader.communicate(timeout=60)[0] == SI


def test_describe_is_plain() -> None:
    description = make_model(["Te", "Pb"], zbl="typewise", temperature=True, **SMALL).describe()
    assert json.loads(json.dumps(description)) == description
    assert description["elements"] == ["Te", "Pb"]
    assert description["temperature"] is True
    assert description["zbl"] == "typewise"
    assert description["cutoff_radial"] == [5.0, 5.0]
    without = nep_txt.loads(edited(SI, 2, "cutoff 5 4")).describe()
    assert "max_neighbors" not in without


@pytest.mark.parametrize(
    ("changes", "values", "parameters"),
    [
        # D = 3 + 2·3 = 9, H = 3, T = 2: networks (D + 2) H T, coefficients T² (3·4 + 2·3)
        ({"version": 3}, 11 * 3 + 1 + 4 * 18 + 9, 11 * 3 + 1 + 4 * 18),
        ({"version": 4}, 11 * 3 * 2 + 1 + 4 * 18 + 9, 11 * 3 * 2 + 1 + 4 * 18),
        ({"version": 5}, (11 * 3 + 1) * 2 + 1 + 4 * 18 + 9, (11 * 3 + 1) * 2 + 1 + 4 * 18),
        ({"hidden": (3, 4)}, (10 * 3 + 5 * 4) * 2 + 1 + 4 * 18 + 9, (10 * 3 + 5 * 4) * 2 + 1 + 4 * 18),
        ({"zbl": "flexible"}, 11 * 3 * 2 + 1 + 4 * 18 + 9 + 30, 11 * 3 * 2 + 1 + 4 * 18),
        ({"temperature": True}, 12 * 3 * 2 + 1 + 4 * 18 + 10, 12 * 3 * 2 + 1 + 4 * 18),
    ],
    ids=["3", "4", "5", "two-layers", "flexible", "temperature"],
)
def test_counts(changes: dict[str, object], values: int, parameters: int) -> None:
    model = make_model(["Te", "Pb"], **{**SMALL, **changes})
    assert (model.layout.n_values, model.describe()["parameters"]) == (values, parameters)


def test_pickles_and_compares() -> None:
    model = nep_txt.loads(TWO)
    assert pickle.loads(pickle.dumps(model)).equals(model)
    assert not model.equals(nep_txt.loads(SI))
    assert not model.equals(dataclasses.replace(model, bias=model.bias + 1e-12))
