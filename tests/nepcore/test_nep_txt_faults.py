"""Model files that are refused: what the error says, and that it names the line."""

from __future__ import annotations

import gzip
import os
import random
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from locations import MODELS, needs_shared
from model_texts import FLEXIBLE, SI, text_of
from nepcore.errors import ModelFileError
from nepcore.files import nep_txt

if TYPE_CHECKING:
    from pathlib import Path

HEADER = SI.splitlines()[:6]


def edited(text: str, line: int, new: str | None) -> str:
    """The text with one line (from 1) replaced, or left out."""
    lines = text.splitlines()
    lines[line - 1 : line] = [] if new is None else [new]
    return "\n".join(lines) + "\n"


def refusal(text: str) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        nep_txt.loads(text, "some/nep.txt")
    assert str(caught.value).startswith("some/nep.txt")
    return caught.value


OTHER_TAGS = {
    "nep4_dipole": "dipole",
    "nep3_dipole": "dipole",
    "nep4_polarizability": "polarizability",
    "nep3_polarizability": "polarizability",
    "nep4_charge1": "charges",
    "nep4_zbl_charge1": "charges",
    "nep4_charge2": "charges",
    "nep4_zbl_charge2": "charges",
    "nep4_charge3": "charges",
    "nep4_vdw": "dispersion",
    "nep4_zbl_vdw": "dispersion",
    "nep4_charge_vdw": "dispersion",
    "nep4_zbl_charge_vdw": "dispersion",
    "nep5_temperature": "not known",
    "nep4_spin": "not known",
    "nep4_temperature_zbl": "not known",
    "nep4_zbl_zbl": "not known",
    "nep6": "version 6",
    "nep2": "version 2",
    "nep1_zbl": "version 1",
    "nep999": "version 999",
    "nep": "not that of a NEP model",
    "nep9_" + "a" * 100: "version 9",
    "NEP4": "lower case",
    "nep4_": "not that of a NEP model",
    "nep4.0": "not that of a NEP model",
    "2": "not that of a NEP model",
    "<html>": "not that of a NEP model",
}


@pytest.mark.parametrize("tag", OTHER_TAGS)
def test_other_tags_are_refused_by_name(tag: str) -> None:
    error = refusal(SI.replace("nep4", tag, 1))
    assert error.line == 1
    assert tag[:30] in error.reason
    assert len(error.reason) < 300
    assert OTHER_TAGS[tag] in error.reason


PLANNED = [t for t, what in OTHER_TAGS.items() if what in {"dipole", "polarizability", "dispersion"}]


@pytest.mark.parametrize("tag", PLANNED)
def test_planned_kinds_say_so(tag: str) -> None:
    assert "planned" in refusal(SI.replace("nep4", tag, 1)).reason


HEADER_FAULTS = {
    "no-elements": (1, "nep4", "the tag alone"),
    "count-of-elements": (1, "nep4 2 Si", "number of types is 2, found 1"),
    "too-many-elements": (1, "nep4 1 Si Ge", "number of types is 1, found 2"),
    "zero-elements": (1, "nep4 0", "number of types is 0"),
    "count-not-a-number": (1, "nep4 one Si", "'one' is not an integer"),
    "count-is-a-float": (1, "nep4 1.0 Si", "'1.0' is not an integer"),
    "count-negative": (1, "nep4 -1 Si", "negative"),
    "unknown-element": (1, "nep4 1 Xx", "unknown element symbol 'Xx'"),
    "element-beyond-Pu": (1, "nep4 1 Am", "unknown element symbol 'Am'"),
    "element-in-lower-case": (1, "nep4 1 si", "case sensitive: Si"),
    "element-number": (1, "nep4 1 14", "unknown element symbol '14'"),
    "element-twice": (1, "nep4 2 Si Si", "Si appears twice"),
    "zbl-line-without-tag": (2, "zbl 1 2", "expected keyword 'cutoff', found 'zbl'"),
    "other-keyword": (2, "cut_off 5 4", "expected keyword 'cutoff', found 'cut_off'"),
    "no-cutoffs": (2, "cutoff", "found 0 numbers, expected 2 (radial, angular), 4"),
    "one-cutoff": (2, "cutoff 5", "found 1 numbers"),
    "three-cutoffs": (2, "cutoff 5 4 60", "found 3 numbers"),
    "old-typewise-cutoffs": (2, "cutoff 5 4 60 40 2.5 2.0 0.7", "factors for typewise cutoffs"),
    "six-cutoffs": (2, "cutoff 5 4 5 4 60 40", "found 6 numbers"),
    "cutoff-zero": (2, "cutoff 0 0 60 40", "must be positive"),
    "cutoff-negative": (2, "cutoff 5 -4 60 40", "must be positive"),
    "angular-beyond-radial": (2, "cutoff 4 5 60 40", "the angular cutoff, 5, is larger than the radial one, 4"),
    "cutoff-nan": (2, "cutoff nan 4 60 40", "'nan' is not a finite number"),
    "cutoff-inf": (2, "cutoff inf 4 60 40", "'inf' is not a finite number"),
    "cutoff-overflow": (2, "cutoff 1e999 4 60 40", "'1e999' is not a finite number"),
    "cutoff-word": (2, "cutoff 5.0.1 4 60 40", "'5.0.1' is not a finite number"),
    "cutoff-hexadecimal": (2, "cutoff 0x5 4 60 40", "'0x5' is not a finite number"),
    "cutoff-underscore": (2, "cutoff 1_0 4 60 40", "'1_0' is not a finite number"),
    "neighbours-negative": (2, "cutoff 5 4 -60 40", "negative"),
    "n_max-float": (3, "n_max 2.0 1", "'2.0' is not an integer"),
    "n_max-word": (3, "n_max two 1", "'two' is not an integer"),
    "n_max-negative": (3, "n_max -1 1", "-1 is negative"),
    "n_max-one": (3, "n_max 2", "expected 2 integers"),
    "n_max-three": (3, "n_max 2 1 1", "expected 2 integers"),
    "n_max-endless": (3, f"n_max {'9' * 5000} 1", "is not an integer"),
    "basis-negative": (4, "basis_size 3 -2", "-2 is negative"),
    "basis-case": (4, "Basis_size 3 2", "expected keyword 'basis_size', found 'Basis_size'"),
    "l_max-none": (5, "l_max", "found 0 numbers"),
    "l_max-zero": (5, "l_max 0 0 0", "L must be 1 to 8, found 0"),
    "l_max-nine": (5, "l_max 9 0 0", "L must be 1 to 8, found 9"),
    "l_max-too-many": (5, "l_max 4 1 1 1 1 1 1 1", "up to 6 switches"),
    "l_max-negative": (5, "l_max 4 -1 0", "-1 is negative"),
    "l_max-float": (5, "l_max 4 1.5 0", "'1.5' is not an integer"),
    "ann-case": (6, "ann 3 0", "expected keyword 'ANN', found 'ann'"),
    "ann-zero": (6, "ANN 0 0", "at least 1"),
    "ann-one-number": (6, "ANN 3", "expected 2 integers"),
    "ann-negative": (6, "ANN -3 0", "-3 is negative"),
    "blank-first-line": (1, "", "blank line; expected the tag line"),
    "blank-header-line": (4, "   ", "blank line; expected the basis_size line"),
    "other-script": (3, "n_max ٣ 1", "is not an integer"),
}


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_header_faults_name_line_and_reason(fault: str) -> None:
    line, new, reason = HEADER_FAULTS[fault]
    error = refusal(edited(SI, line, new))
    assert error.line == line
    assert reason in error.reason
    assert len(error.reason) < 400


@pytest.mark.parametrize(
    ("line", "keyword", "found"),
    [(2, "cutoff", "n_max"), (3, "n_max", "basis_size"), (4, "basis_size", "l_max"), (5, "l_max", "ANN")],
)
def test_missing_header_line(line: int, keyword: str, found: str) -> None:
    error = refusal(edited(SI, line, None))
    assert error.line == line
    assert f"expected keyword '{keyword}', found '{found}'" in error.reason


def test_missing_last_header_line() -> None:
    error = refusal(edited(SI, 6, None))
    assert error.line == 6
    assert "expected keyword 'ANN', found '" in error.reason


@pytest.mark.parametrize("kept", range(1, 6))
def test_file_that_ends_in_the_header(kept: int) -> None:
    error = refusal("\n".join(HEADER[:kept]))
    wanted = ["cutoff", "n_max", "basis_size", "l_max", "ANN"][kept - 1]
    assert f"ends after line {kept}; expected the {wanted} line" in error.reason


def test_header_alone() -> None:
    count = nep_txt.loads(SI).layout.n_values
    assert f"expected {count} numbers after the header" in refusal("\n".join(HEADER)).reason


def test_tag_with_zbl_needs_the_line() -> None:
    error = refusal(SI.replace("nep4", "nep4_zbl", 1))
    assert (error.line, "expected keyword 'zbl', found 'cutoff'" in error.reason) == (2, True)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("zbl", "expected 2 numbers"),
        ("zbl 1", "expected 2 numbers"),
        ("zbl 1 2 0.7 1", "found 4"),
        ("zbl 2 1", "inner cutoff 2 is larger than the outer one 1"),
        ("zbl -1 2", "must be positive"),
        ("zbl 1 0", "must be positive"),
        ("zbl 0 0 0.7", "must be positive"),
        ("zbl 1 2 0", "factor must be positive"),
        ("zbl 1 nan", "'nan' is not a finite number"),
        ("zbl 0 0", "expected 140 numbers"),
    ],
)
def test_zbl_faults(line: str, reason: str) -> None:
    text = text_of("Te", "Pb", zbl="universal")
    count = nep_txt.loads(text).layout.n_values
    error = refusal(edited(text, 2, line))
    assert reason.replace("140", str(count + 30)) in error.reason


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        ("1.25.75", "'1.25.75'"),
        ("1e-", "'1e-'"),
        ("1e", "'1e'"),
        (".", "'.'"),
        ("-", "'-'"),
        ("nan", "'nan'"),
        ("-inf", "'-inf'"),
        ("Infinity", "'Infinity'"),
        ("1e999", "'1e999'"),
        ("1d-3", "'1d-3'"),
        ("0x1p3", "'0x1p3'"),
        ("1_0", "'1_0'"),
        ("1,5", "'1,5'"),
        ("abc", "'abc'"),
        ("1.0 # comment", "expected one number, found 3 words"),
        ("1.0 2.0", "expected one number, found 2 words"),
        ("1.0f", "'1.0f'"),
        ("٣", r"'\u0663'"),
        ("1.0\u00a0", r"'1.0\xa0'"),
        ("", "blank line"),
        ("  \t ", "blank line"),
    ],
)
@pytest.mark.parametrize("line", [7, 20])
def test_faulty_numbers_name_line_and_token(line: int, number: str, shown: str) -> None:
    text = edited(SI, line, number)
    error = refusal(text)
    assert error.line == line
    assert shown in error.reason


def test_faulty_last_number() -> None:
    count = len(SI.splitlines())
    error = refusal(edited(SI, count, "none"))
    assert (error.line, "'none'" in error.reason) == (count, True)


def test_faulty_number_comes_before_the_count() -> None:
    assert refusal(edited(edited(SI, 30, None), 10, "x")).line == 10


def test_missing_number() -> None:
    count = nep_txt.loads(SI).layout.n_values
    error = refusal(edited(SI, 10, None))
    assert f"expected {count} numbers" in error.reason
    assert f"found {count - 1}" in error.reason


def test_surplus_number() -> None:
    count = nep_txt.loads(SI).layout.n_values
    error = refusal(SI + "1.0\n")
    assert error.line == 6 + count + 1
    assert f"found {count + 1}" in error.reason


def test_words_behind_the_numbers() -> None:
    count = nep_txt.loads(SI).layout.n_values
    error = refusal(SI + "the end\n")
    assert error.line == 6 + count + 1
    assert "'the end'" in error.reason


@pytest.mark.parametrize(
    ("text", "tag", "explanation"),
    [
        (text_of("Te", "Pb", version=3), "nep4", "as many as nep3 "),
        (text_of("Te", "Pb", version=4), "nep3", "as many as nep4 "),
        (text_of("Te", "Pb", version=5), "nep4", "as many as nep5 "),
        (text_of("Te", "Pb", version=5), "nep3", "as many as nep5 "),
        (text_of("Te", "Pb", version=4), "nep5", "as many as nep4 "),
        (text_of("Te", "Pb", temperature=True), "nep4", "as many as nep4_temperature "),
        (text_of("Te", "Pb"), "nep4_temperature", "as many as nep4 "),
        (text_of("Te", "Pb", version=3, zbl="universal"), "nep4_zbl", "as many as nep3_zbl "),
    ],
    ids=["3-as-4", "4-as-3", "5-as-4", "5-as-3", "4-as-5", "temperature-as-4", "4-as-temperature", "3-as-4-zbl"],
)
def test_count_tells_the_other_version(text: str, tag: str, explanation: str) -> None:
    error = refusal(re.sub(r"^\S+", tag, text))
    assert "expected" in error.reason
    assert "found" in error.reason
    assert explanation in error.reason


@needs_shared
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("qnep_mode1_water", "nep4_charge1"),
        ("synth_nep4_vdw", "nep4_vdw"),
        ("tnep-BaZrO3-susceptibility", "nep4_polarizability"),
        ("BaZrO3_NEP3_polarizability", "nep3_polarizability"),
        ("synth_nep4_zbl_charge1", "nep4_zbl_charge1"),
    ],
)
def test_count_tells_the_other_kind(name: str, hint: str) -> None:
    text = (MODELS / f"{name}.txt").read_text()
    plain = re.sub(r"^(nep\d(?:_zbl)?)\S*", r"\1", text)
    assert hint in refusal(plain).reason


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (text_of("Si", switches=("q222",)).replace("l_max 2 2 0", "l_max 2 2 1"), "fits 3 angular blocks"),
        ("\n".join(FLEXIBLE.splitlines()[:-60]), "numbers of the flexible ZBL at the end are missing"),
        (FLEXIBLE.replace("zbl 0 0", "zbl 1 2"), "flexible ZBL (zbl 0 0) has at the end"),
        ("\n".join(SI.splitlines()[:50]), "cut short"),
    ],
    ids=["l_max", "no-flexible-zbl", "flexible-zbl-as-universal", "cut-short"],
)
def test_count_tells_what_may_be_wrong(text: str, hint: str) -> None:
    assert hint in refusal(text).reason


@pytest.mark.parametrize(
    ("line", "new"),
    [
        (6, "ANN 1000000000 0"),
        (6, "ANN 999999999999999999 999999999999999999"),
        (3, "n_max 999999999999999999 999999999999999999"),
        (4, "basis_size 999999999999999999 0"),
    ],
)
def test_huge_sizes_are_counted_not_allocated(line: int, new: str) -> None:
    error = refusal(edited(SI, line, new))
    assert "expected" in error.reason
    assert "found" in error.reason


NOT_TEXT = {
    "empty": (b"", "empty"),
    "blanks": (b" \n\n", "empty"),
    "bom-alone": (b"\xef\xbb\xbf", "empty"),
    "zeros": (bytes(1000), "zero byte"),
    "zero-inside": (SI[:60].encode() + b"\0" + SI[60:].encode(), "zero byte"),
    "gzip": (gzip.compress(SI.encode()), "gzip"),
    "zip": (b"PK\x03\x04" + bytes(range(256)), "zip archive"),
    "utf-16": (SI.encode("utf-16"), "UTF-16"),
    "elf": (b"\x7fELF\x02\x01\x01" + b"\0" * 40, "zero byte"),
    "latin-1": ("nep4 1 Sí\n".encode("latin-1"), "unknown element"),
    "random": (random.Random(1).randbytes(5000), "nep.txt"),
}


@pytest.mark.parametrize("kind", NOT_TEXT)
def test_files_that_are_no_text(kind: str, tmp_path: Path) -> None:
    content, reason = NOT_TEXT[kind]
    path = tmp_path / "nep.txt"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=reason) as caught:
        nep_txt.read(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="directory"):
        nep_txt.read(tmp_path)
    with pytest.raises(ModelFileError, match="No such file"):
        nep_txt.read(tmp_path / "absent.txt")
    with pytest.raises(ModelFileError, match="null"):
        nep_txt.read("nep\0.txt")


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no /dev/zero here")
def test_endless_file() -> None:
    with pytest.raises(ModelFileError, match="zero byte"):
        nep_txt.read("/dev/zero")


def test_file_beyond_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nep_txt, "MAX_BYTES", 2000)
    path = tmp_path / "nep.txt"
    path.write_text(SI + " " * 2000)
    with pytest.raises(ModelFileError, match="larger than"):
        nep_txt.read(path)


def test_reading_needs_no_torch() -> None:
    code = "import sys, nepcore.files.nep_txt, nepcore.synthetic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
