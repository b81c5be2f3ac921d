"""``nep.in``: what is read, what is refused, and what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nepcore.errors import InputFileError
from nepcore.files import nep_in
from nepcore.files.nep_keywords import KEYWORDS
from nepcore.training import Settings

if TYPE_CHECKING:
    from pathlib import Path

GPUMD = """
# a run of GPUMD
type 2 Te Pb   # order of the model
version 4
cutoff 8 4
n_max 4 4
basis_size 8 8
l_max 4 2 0
neuron 30
lambda_1 0.05
lambda_e 1
lambda_f 1
lambda_v 0.1
type_weight 1 2
force_delta 0.5
batch 1000
population 50
generation 300000
zbl 2 # Å
"""


def test_a_file_of_gpumd() -> None:
    found = nep_in.loads(GPUMD)
    assert found.elements == ("Te", "Pb")
    assert found.l_max == (
        4,
        {"q222": True, "q1111": False, "q112": False, "q123": False, "q233": False, "q134": False},
    )
    assert found.values("type_weight") == (1.0, 2.0)
    assert found.number("zbl") == 2.0
    assert found.integer("generation") == 300_000
    assert not found.gradient
    (warning,) = found.warnings
    assert "population (line 17), generation (line 18)" in warning
    assert "1800 epochs" in warning


def test_what_is_not_given_is_that_of_gpumd() -> None:
    found = nep_in.loads("type 1 Si")
    radial, angular = found.cutoffs
    assert (radial.tolist(), angular.tolist()) == ([8.0], [4.0])
    assert found.l_max[0] == 4
    assert found.l_max[1]["q222"]
    assert found.hidden == (30,)
    assert found.warnings == ()


def test_cutoffs_of_each_type() -> None:
    radial, angular = nep_in.loads("type 2 H O\ncutoff 6 4 8 5").cutoffs
    assert (radial.tolist(), angular.tolist()) == ([6.0, 8.0], [4.0, 5.0])


def test_the_mean_length_of_a_run_is_that_of_the_settings() -> None:
    assert Settings(("Si",)).epochs == nep_in.FULL_EPOCHS == nep_in.epochs_of(nep_in.FULL_GENERATIONS)
    assert nep_in.epochs_of(0) == 1


def test_the_later_of_two_counts_and_is_reported() -> None:
    found = nep_in.loads("type 1 Si\nlambda_e 1\nlambda_e 2")
    assert found.number("lambda_e") == 2.0
    assert found.warnings == ("nep.in, line 3: lambda_e was given already on line 2; the later one counts",)


FAULTS = {
    "unknown": ("type 1 Si\nlamda_e 1", 2, "unknown keyword 'lamda_e'; did you mean lambda_e?"),
    "far from all": ("type 1 Si\nxyzzy", 2, "unknown keyword 'xyzzy'"),
    "no type": ("cutoff 8 4", None, "no keyword type"),
    "empty file": ("", None, "no keyword type"),
    "type of another count": ("type 3 Si C", 1, "3 types announced, 2 symbols found"),
    "letter case": ("type 1 si", 1, "symbols are case sensitive: Si"),
    "twice": ("type 2 Si Si", 1, "Si stands twice"),
    "type without a count": ("type Si", 1, "wanted the number of types"),
    "weights before type": ("type_weight 1\ntype 1 Si", 1, "type_weight stands before type"),
    "cutoffs before type": ("cutoff 8 4 6 4\ntype 2 H O", 1, "before the keyword type"),
    "cutoffs of another count": ("type 2 H O\ncutoff 8 4 6", 2, "wanted 2 (radial angular), or 4"),
    "angular beyond radial": ("type 1 Si\ncutoff 4 5", 2, "angular cutoff 5 is larger than the radial one 4"),
    "small cutoff": ("type 1 Si\ncutoff 2 2", 2, "a number from 3 to 100"),
    "no number": ("type 1 Si\nlambda_e many", 2, "lambda_e: weight is 'many', wanted a number of at least 0"),
    "negative": ("type 1 Si\nlambda_f -1", 2, "wanted a number of at least 0"),
    "nan": ("type 1 Si\nlambda_f nan", 2, "wanted a number"),
    "fraction": ("type 1 Si\nneuron 3.5", 2, "a whole number from 1 to 120"),
    "too few values": ("type 1 Si\nn_max 4", 2, "n_max: found 1 values, wanted 2 (radial angular)"),
    "too many values": ("type 1 Si\nepoch 4 5", 2, "epoch: found 2 values, wanted 1"),
    "word": ("type 1 Si\nlr_scheduler plato", 2, "wanted one of plateau, step, cosine; did you mean plateau?"),
    "rate of zero": ("type 1 Si\nlr 0", 2, "lr: rate is '0'"),
    "two rates": ("type 1 Si\nlearning_rate 1e-2 1e-4", 2, "lr 1e-2 and stop_lr 1e-4"),
    "angular descriptor": ("type 1 Si\nn_max 4 8\nl_max 8 1 1 1", 3, "wanted 90 at most"),
    "invariant beyond l_max": ("type 1 Si\nl_max 2 0 0 0 1", 2, "q123 needs l_max 3"),
    "typewise without zbl": ("type 1 Si\nuse_typewise_cutoff_zbl 0.7", 2, "needs the keyword zbl"),
    "charges": ("type 1 Si\ncharge_mode 1", 2, "charges (qNEP) cannot be trained here"),
    "dipoles": ("type 1 Si\nmode 1", 2, "dipoles (TNEP) cannot be trained here"),
    "prediction": ("type 1 Si\nprediction 1", 2, "nepserve predict"),
    "version 3": ("type 1 Si\nversion 3", 2, "only versions 4 and 5"),
    "scaler of a file": ("type 1 Si\nimport_q_scaler 1", 2, "fine-tune"),
}


@pytest.mark.parametrize(("text", "line", "reason"), FAULTS.values(), ids=FAULTS)
def test_faults_name_file_line_and_what_was_wanted(text: str, line: int | None, reason: str) -> None:
    with pytest.raises(InputFileError) as caught:
        nep_in.loads(text, "here/nep.in")
    assert caught.value.line == line
    assert reason in caught.value.reason
    assert str(caught.value).startswith("here/nep.in")


def test_harmless_keywords_of_other_models_are_named_and_taken() -> None:
    found = nep_in.loads("type 1 Si\nlambda_q 1\ncharge_mode 0\nprediction 0\nbatch 10 1\nfine_tune a.txt b.restart")
    assert [w for w in found.warnings if "lambda_q (line 2)" in w]
    assert [w for w in found.warnings if "full batches" in w]
    assert [w for w in found.warnings if "only the model is used" in w]


def test_aliases_and_the_scaler_of_torchnep() -> None:
    found = nep_in.loads("type 1 Si\npatience 3\nfactor 0.5\nuse_gpumd_qscaler 1\nlr_scheduler STEP")
    assert found.word("lr_scheduler") == "step"
    assert found.integer("scheduler_patience") == 3
    assert found.word("q_scaler") == "gpumd"
    assert found.gradient


def test_what_is_written_says_the_same(tmp_path: Path) -> None:
    found = nep_in.loads(GPUMD + "lr 3e-3\nlr_scheduler cosine\n")
    nep_in.write(found, tmp_path / "nep.in")
    again = nep_in.read(tmp_path / "nep.in")
    assert {n: e.values for n, e in again.entries.items()} == {n: e.values for n, e in found.entries.items()}
    commented = nep_in.loads(nep_in.dumps(found, comments=True))
    assert {n: e.values for n, e in commented.entries.items()} == {n: e.values for n, e in found.entries.items()}
    assert nep_in.dumps(found).startswith("type 2 Te Pb\n")


def test_windows_text_and_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "nep.in").write_bytes(b"\xef\xbb\xbftype 1 Si\r\n\r\nneuron 5 # few\r\n")
    assert nep_in.read(tmp_path / "nep.in").hidden == (5,)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="No such file"):
        nep_in.read(tmp_path / "nep.in")
    (tmp_path / "nep.in").write_bytes(b"#" * (nep_in.MAX_BYTES + 1))
    with pytest.raises(InputFileError, match=r"no nep\.in"):
        nep_in.read(tmp_path / "nep.in")


@pytest.mark.parametrize("name", KEYWORDS)
def test_defaults_in_the_table_can_be_read(name: str) -> None:
    default = KEYWORDS[name].default
    if default is not None:
        nep_in.loads(f"type 1 Si\nzbl 2\n{name} {default}")


def test_flexible_zbl(tmp_path: Path) -> None:
    path = tmp_path / "zbl.in"
    path.write_text("\n".join("0.5 2.0 " + " ".join(map(str, range(8))) for _ in range(3)) + "\n")
    table = nep_in.read_zbl(path, 2)
    assert table.shape == (3, 10)
    np.testing.assert_array_equal(table[2, :3], [0.5, 2.0, 0.0])
    with pytest.raises(InputFileError, match="30 numbers, wanted 60: 10 for each of the 6 pairs of 3 types"):
        nep_in.read_zbl(path, 3)
    path.write_text("0.5 2.0 1 2 3 4 5 6 7\nx")
    with pytest.raises(InputFileError, match=r"line 2: 'x' is not a finite number"):
        nep_in.read_zbl(path, 1)
    path.write_text("2.5 2.0 1 2 3 4 5 6 7 8")
    with pytest.raises(InputFileError, match=r"the outer cutoff 2 must be above the inner one 2\.5"):
        nep_in.read_zbl(path, 1)


WORDS = st.sampled_from(
    [*KEYWORDS, "Si", "C", "#", "\n", "\n", "0", "1", "2", "4", "8", "-1", "1e400", "nan", "x", "é", "\0"]
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(WORDS).map(" ".join), st.lists(WORDS).map(lambda w: "type 1 Si\n" + " ".join(w))))
def test_whatever_the_text_only_the_documented_error_comes(text: str) -> None:
    try:
        found = nep_in.loads(text)
    except InputFileError:
        return
    again = nep_in.loads(nep_in.dumps(found))
    assert {n: e.values for n, e in again.entries.items()} == {n: e.values for n, e in found.entries.items()}
