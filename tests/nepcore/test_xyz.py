"""The extended-XYZ reader: what is accepted, and what is refused, and how."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nepcore.errors import InputFileError
from nepcore.files import xyz

if TYPE_CHECKING:
    from pathlib import Path

CELL = 'Lattice="4 0 0 0 5 0 0 0 6"'
FORCES = "Properties=species:S:1:pos:R:3:forces:R:3"
ATOMS = "Si 0 0 0\nGe 1.5 2.5 3.5\n"


def frame(comment: str, atoms: str = ATOMS) -> str:
    return f"{atoms.count(chr(10))}\n{comment}\n{atoms}"


def refused(text: str | bytes) -> InputFileError:
    with pytest.raises(InputFileError) as caught:
        xyz.parse(text, "in.xyz")
    return caught.value


# --- what is read ---


def test_plain_frame() -> None:
    frames = xyz.parse(frame(f"{CELL} energy=-1.5 {FORCES}", "Si 0 0 0 .1 -2. +3e-1\nGe 1.5 2.5 3.5 0 0 0\n"))
    assert frames.structures.numbers.tolist() == [14, 32]
    assert frames.structures.positions.tolist() == [[0, 0, 0], [1.5, 2.5, 3.5]]
    assert frames.structures.cells.tolist() == [[[4, 0, 0], [0, 5, 0], [0, 0, 6]]]
    assert frames.structures.pbc.tolist() == [[True] * 3]
    assert frames.forces.tolist() == [[0.1, -2, 0.3], [0, 0, 0]]
    assert frames.energy.tolist() == [-1.5]
    assert np.isnan(frames.virial).all()
    assert np.isnan(frames.structures.temperatures).all()
    assert (frames.weight.tolist(), frames.energy_weight.tolist(), frames.config_type) == ([1.0], [1.0], ("",))
    assert frames.label_counts() == {"energies": 1, "forces": 2, "virials": 0}


def test_cell_vectors_are_rows() -> None:
    frames = xyz.parse(frame('Lattice="1 2 3 4 5 6 7 8 10"'))
    assert frames.structures.cells[0].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 10]]


@pytest.mark.parametrize(
    ("comment", "pbc"),
    [
        (CELL, "TTT"),
        (f'{CELL} pbc="T F T"', "TFT"),
        ('LATTICE="4 0 0 0 5 0 0 0 6" PBC="t f T"', "TFT"),
        (f"{CELL} pbc=[True, False, true]", "TFT"),
        (f"{CELL} pbc={{1 0 1}}", "TFT"),
        (f"{CELL} pbc='TRUE FALSE 1'", "TFT"),
        (f"{CELL} pbc=T,F,T", "TFT"),
        (f"{CELL} pbc=F", "FFF"),
        (f"{CELL} pbc", "TTT"),
        (f'pbc  =  "F F F" {CELL}', "FFF"),
        ('Lattice = "4 0 0 0 5 0 0 0 6" pbc= "F F T"', "FFT"),
        ('Lattice="  4 0 0 0 5 0 0 0 6  "', "TTT"),
        ("Lattice=[4, 0, 0, 0, 5, 0, 0, 0, 6]", "TTT"),
        ("Lattice={4 0 0 0 5 0 0 0 6}", "TTT"),
        ('Lattice="0 0 0 0 0 0 0 0 0"', "FFF"),
        ('Lattice="0 0 0 0 -0.0 0 0 0 0" pbc="F F F"', "FFF"),
        ('Lattice="4 0 0 0 5 0 0 0 0" pbc="T T F"', "TTF"),
        ("", "FFF"),
        ("water molecule, relaxed", "FFF"),
        ("i = 12, time = 6.000, E = -17.1643", "FFF"),
        ("===== frame 1 =====", "FFF"),
        ("it's 'tis", "FFF"),
    ],
)
def test_periodicity(comment: str, pbc: str) -> None:
    frames = xyz.parse(frame(comment))
    assert "".join("FT"[int(p)] for p in frames.structures.pbc[0]) == pbc


@pytest.mark.parametrize(
    ("items", "energy"),
    [
        ("energy=-1.5", -1.5),
        ("Energy=-1.5", -1.5),
        ("ENERGY = -1.5", -1.5),
        ("energy= -1.5", -1.5),
        ("energy =-1.5", -1.5),
        ('energy="-1.5"', -1.5),
        ("energy='-1.5'", -1.5),
        ("energy=[-1.5]", -1.5),
        ("energy=-1.5 energy=-1.5", -1.5),
        ("free_energy=-1.6 energy_weight=2 energy=-1.5 my_energy=3 energy-x=4", -1.5),
        ("free_energy=-1.6", np.nan),
        ("energy_weight=2.0", np.nan),
        ('note="energy=-1.5"', np.nan),
        (r'note="a \" energy=-1.5 \" b"', np.nan),
        ('data={"energy": [1, 2], "x": "}"}', np.nan),
        ("note='energy = -1.5'", np.nan),
        ("a=[[1, 2], [3, 4]] energy=-1.5", -1.5),
        (r'info="_JSON {\"a\": [1, {\"b\": 2}]}" energy=-1.5', -1.5),
        ("comment= energy=-1.5", -1.5),
        ("flag energy=-1.5 other_flag", -1.5),
        ("path=/a=b/c energy=-1.5", -1.5),
        ('"quoted key"=3 energy=-1.5', -1.5),
        ("name=Ünïcode energy=-1.5", -1.5),
        ("energy=-1.5E+00", -1.5),
        ("energy=-15.e-1", -1.5),
    ],
)
def test_energy_items(items: str, energy: float) -> None:
    assert xyz.parse(frame(items)).energy[0] == pytest.approx(energy, nan_ok=True, abs=0)


def test_other_keys() -> None:
    frames = xyz.parse(frame("weight=2 Energy_Weight=0.5 config_type='bulk Si' temperature=300 key"))
    assert (frames.weight[0], frames.energy_weight[0], frames.config_type) == (2.0, 0.5, ("bulk Si",))
    assert frames.structures.temperatures.tolist() == [300.0]
    assert frames.key_numbers("WEIGHT", 1).tolist() == [[2.0]]


@pytest.mark.parametrize("name", ["force", "forces", "Forces", "FORCE"])
def test_force_columns(name: str) -> None:
    frames = xyz.parse(frame(f"properties=Species:s:1:POS:r:3:{name}:R:3", "Si 0 0 0 1 2 3\n"))
    assert frames.forces.tolist() == [[1, 2, 3]]


def test_atomic_numbers() -> None:
    frames = xyz.parse(frame("Properties=Z:I:1:pos:R:3", "14 0 0 0\n32 1 1 1\n"))
    assert frames.structures.numbers.tolist() == [14, 32]
    both = xyz.parse(frame("Properties=species:S:1:pos:R:3:Z:I:1", "Si 0 0 0 14\n"))
    assert both.structures.numbers.tolist() == [14]


def test_columns_that_nobody_reads_are_kept() -> None:
    comment = "Properties=id:I:1:species:S:1:pos:R:3:mask:L:3:forces:R:3:energies:R:1"
    frames = xyz.parse(frame(comment, "7 Si 0 0 0 T F T 1 2 3 -0.5\n8 Ge 1 1 1 F F F 4 5 6 -0.25\n"))
    assert frames.forces.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert frames.column("ENERGIES", 1).tolist() == [[-0.5], [-0.25]]
    assert frames.column("id", 1).tolist() == [[7], [8]]
    assert np.isnan(frames.column("bec", 9)).all()
    assert frames.extras[0] is not None
    assert frames.extras[0].tolist()[0] == [b"7", b"T", b"F", b"T", b"-0.5"]
    with pytest.raises(InputFileError, match="line 3: atom 1, mask: 'T' is not a number"):
        frames.column("mask", 3)
    with pytest.raises(InputFileError, match="'energies' has 1 numbers, wanted 9"):
        frames.column("energies", 9)


def test_items_that_nobody_reads_are_numbers_on_request() -> None:
    text = frame("dipole='1 2 3' charge=-1") + frame("x=1") + frame("charge=oops")
    frames = xyz.parse(text, "in.xyz")
    assert frames.key_numbers("dipole", 3)[0].tolist() == [1, 2, 3]
    assert np.isnan(frames.key_numbers("dipole", 3)[1:]).all()
    with pytest.raises(InputFileError, match=r"in\.xyz, frame 3, line 10: key charge: 'oops' is not a number"):
        frames.key_numbers("charge", 1)


# --- virial and stress ---


def test_stress_becomes_a_virial() -> None:
    frames = xyz.parse(frame(f'{CELL} stress="1 2 3 2 5 6 3 6 9"'))
    np.testing.assert_allclose(frames.virial[0], -120.0 * np.array([[1, 2, 3], [2, 5, 6], [3, 6, 9]]), rtol=1e-14)
    assert not frames.warnings


def test_left_handed_cell_has_a_positive_volume() -> None:
    frames = xyz.parse(frame('Lattice="0 5 0 4 0 0 0 0 6" stress="1 0 0 0 1 0 0 0 1"'))
    assert frames.virial[0, 0, 0] == pytest.approx(-120.0)


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (1.0, None),
        (1.0 + 1e-5, None),
        (-1.0, "its sign turned round"),
        (160.2177, "looks like one in GPa;"),
        (-160.2177, "in GPa with its sign"),
        (1.3, "differ by"),
    ],
)
def test_virial_wins_over_a_stress_that_disagrees(factor: float, says: str | None) -> None:
    stress = " ".join(repr(-factor * w / 120.0) for w in (3, 0, 0, 0, 2, 0, 0, 0, 1))
    frames = xyz.parse(frame("") + frame(f'{CELL} virial="3 0 0 0 2 0 0 0 1" stress="{stress}"'), "in.xyz")
    assert frames.virial[1].tolist() == [[3, 0, 0], [0, 2, 0], [0, 0, 1]]
    if says is None:
        assert not frames.warnings
    else:
        assert len(frames.warnings) == 1
        assert frames.warnings[0].startswith("in.xyz, frame 2, line 6: virial and -V stress differ by ")
        assert says in frames.warnings[0]


def test_stress_of_a_molecule_is_not_used() -> None:
    frames = xyz.parse(frame('stress="1 0 0 0 1 0 0 0 1"'), "in.xyz")
    assert np.isnan(frames.virial).all()
    assert frames.warnings == ["in.xyz, frame 1, line 2: stress needs a cell with a volume; the label is not used"]


def test_placeholders_are_not_labels() -> None:
    marks = " ".join(["-1e6"] * 9)
    text = (
        frame(f'{CELL} energy=-1000000 virial="{marks}"')
        + frame(f'{CELL} stress="-1e6 0 0 0 0 0 0 0 0" virial="1 0 0 0 1 0 0 0 1"')
        + frame(FORCES, "Si 0 0 0 -1e6 -1e6 -1e6\nSi 0 0 1 1 2 3\n")
        + frame(FORCES, "Si 0 0 0 1 2 3\n")
    )
    frames = xyz.parse(text, "in.xyz")
    assert frames.label_counts() == {"energies": 0, "forces": 1, "virials": 1}
    assert [w.split(":")[0] for w in frames.warnings] == [
        "in.xyz, frame 1, line 2", "in.xyz, frame 3, line 10", "in.xyz, frame 1, line 2", "in.xyz, frame 2, line 6",
    ]  # fmt: skip


def test_huge_cells_and_stresses_do_not_overflow_into_labels() -> None:
    frames = xyz.parse(frame('Lattice="1e150 0 0 0 1e150 0 0 0 1e150" stress="1 0 0 0 1 0 0 0 1"'))
    assert np.isnan(frames.virial).all()
    assert len(frames.warnings) == 1


# --- line ends, blanks, encodings ---

TWO = frame(f"{CELL} energy=-1") + frame("energy=-2")


@pytest.mark.parametrize(
    "text",
    [
        TWO,
        TWO.rstrip("\n"),
        TWO.replace("\n", "\r\n"),
        TWO.replace("\n", "  \t\n"),
        "\ufeff" + TWO,
        "\n\n" + TWO,
        TWO + "\n   \n\r\n\t",
        frame(f"{CELL} energy=-1") + "\n \n" + frame("energy=-2"),
        TWO.replace("Si 0 0", "  Si\t0   0"),
        TWO.replace("2\nenergy", " 0002 \nenergy"),
        TWO.encode(),
    ],
    ids=[
        "plain", "no-final-newline", "crlf", "trailing", "bom", "leading", "blank-end", "between", "tabs", "count",
        "bytes",
    ],
)  # fmt: skip
def test_spelling_of_lines(text: str | bytes) -> None:
    frames = xyz.parse(text)
    assert frames.energy.tolist() == [-1, -2]
    assert frames.structures.positions.tolist() == [[0, 0, 0], [1.5, 2.5, 3.5]] * 2
    assert frames.structures.pbc.tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize("text", ["", "\n\n  \n", "\ufeff", b""])
def test_no_frames(text: str | bytes) -> None:
    assert len(xyz.parse(text)) == 0


def test_frame_without_atoms() -> None:
    frames = xyz.parse("0\nenergy=0\n" + frame("energy=1"))
    assert frames.structures.counts.tolist() == [0, 2]
    assert frames.structures.problems()[0].code == "empty"


def test_frames_of_mixed_layouts() -> None:
    text = frame(FORCES, "Si 0 0 0 1 2 3\n") + frame("", "Ge 1 1 1\n") + frame(FORCES, "C 2 2 2 4 5 6\n")
    frames = xyz.parse(text)
    assert frames.structures.numbers.tolist() == [14, 32, 6]
    np.testing.assert_array_equal(frames.forces, [[1, 2, 3], [np.nan] * 3, [4, 5, 6]])
    assert frames.indices.tolist() == [0, 1, 2]
    assert frames.lines.tolist() == [1, 4, 7]


# --- what is refused, and how ---


@pytest.mark.parametrize(
    ("comment", "says"),
    [
        ("energy=", "key energy: the value is empty (''), wanted one number"),
        ("Energy= ", "key energy: the value is empty (''), wanted one number"),
        ('energy= virial="1 0 0 0 1 0 0 0 1"', "key energy: the value is empty (''), wanted one number"),
        ('energy=""', "key energy: the value is empty (''), wanted one number"),
        ("energy", "key energy: the value is empty (''), wanted one number"),
        ("energy=nan", "key energy: 'nan' is not a finite number"),
        ("energy=-Infinity", "key energy: '-Infinity' is not a finite number"),
        ("energy=1e999", "key energy: '1e999' is too large for a number"),
        ("energy=1.2.3", "key energy: '1.2.3' is not a number"),
        ("energy=-1.5eV", "key energy: '-1.5eV' is not a number"),
        ("energy=1_000", "key energy: '1_000' is not a number"),
        ("energy=0x10", "key energy: '0x10' is not a number"),
        ("energy=\u0661", r"key energy: '\u0661' is not a number"),
        ("energy=1.0D+00", "key energy: '1.0D+00' is not a number; write the exponent with E"),
        ("energy=T", "key energy: 'T' is not a number"),
        ('energy="1 2"', "key energy: found 2 values in '1 2', wanted one number"),
        ("energy=-1 Energy=-2", "key energy is given twice, as '-1' and as '-2'"),
        ("weight=x", "key weight: 'x' is not a number"),
        ("temperature=NaN", "key temperature: 'NaN' is not a finite number"),
        ('Lattice="1 0 0 0 1 0 0 0"', "key lattice: found 8 values in '1 0 0 0 1 0 0 0', wanted 9 numbers"),
        ('Lattice="inf 0 0 0 1 0 0 0 1"', "key lattice: 'inf' is not a finite number"),
        ("Lattice=[[4,0,0],[0,5,0],[0,0,6]]", "key lattice: '[4' is not a number"),
        ('Lattice="4 0 0 0 5 0 0 0 6', "the quote that opens"),
        ('Lattice="4 0 0 0 5 0 0 0 6"pbc=T', "key 'Lattice': a blank is missing before 'pbc=T'"),
        ('Lattice == "4 0 0 0 5 0 0 0 6"', "key 'Lattice': no value after the equals sign"),
        ("pbc=[T, T, T", "the bracket that opens '[T, T, T' is not closed"),
        ("pbc=[T, T, T}", "'}' closes a bracket of another kind"),
        (f"{CELL} pbc=TTT", "key pbc: 'TTT' is not one or three of T, F"),
        (f'{CELL} pbc="T T"', "key pbc: 'T T' is not one or three of T, F"),
        (f'{CELL} pbc="T T maybe"', "key pbc: 'T T maybe' is not one or three of T, F"),
        (f"{CELL} pbc=", "key pbc: '' is not one or three of T, F"),
        ('pbc="T T F"', "key pbc: direction a is periodic but there is no Lattice"),
        ('Lattice="0 0 0 0 0 0 0 0 0" pbc=T', "key lattice: vector a is zero but pbc makes its direction periodic"),
        ('Lattice="4 0 0 0 5 0 0 0 0"', "key lattice: vector c is zero; say with pbc which directions are periodic"),
        ('virial="1 2 3 4 5 6"', "key virial: found 6 values in '1 2 3 4 5 6', wanted 9 numbers"),
        ('stress="1 2 3 4 5 6"', "key stress: found 6 values in '1 2 3 4 5 6', wanted 9 numbers"),
        ('virial="1 2 3 4 nan 6 7 8 9"', "key virial: 'nan' is not a finite number"),
        ("Properties=", "key properties: '' is not a list of name:type:count triples"),
        ("Properties=species:S:1:pos:R", "is not a list of name:type:count triples"),
        ("Properties=species:S:1:pos:R:2", "column 'pos' is R:2, wanted R:3"),
        ("Properties=species:S:1:pos:S:3", "column 'pos' is S:3, wanted R:3"),
        ("Properties=species:S:1:pos:R:3:x:Q:1", "column 'x' has type 'Q', wanted R, I, S or L"),
        ("Properties=species:S:1:pos:R:3:x:R:0", "column 'x' has count '0', wanted a whole number above 0"),
        ("Properties=species:S:1:pos:R:3:x:R:-1", "column 'x' has count '-1', wanted a whole number above 0"),
        ("Properties=species:S:1:pos:R:3:x:R:9999999999", "column 'x' has count '9999999999', wanted a whole number"),
        ("Properties=pos:R:3", "no column species:S:1 or Z:I:1"),
        ("Properties=species:S:1", "no column pos:R:3"),
        ("Properties=species:S:1:pos:R:3:force:R:3:forces:R:3", "'force' and 'forces' both give the forces"),
        ("Properties=species:S:1:pos:R:3:pos:R:3", "'pos' and 'pos' both give the positions"),
    ],
)
def test_comment_lines_refused(comment: str, says: str) -> None:
    error = refused(frame("") + frame(comment))
    assert (error.path, error.frame, error.line) == ("in.xyz", 1, 6)
    assert says in error.reason


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("Si 0 0", "atom 2: found 3 columns, wanted 4 (species 1, pos 3)"),
        ("Si 0 0 0 0", "atom 2: found 5 columns, wanted 4 (species 1, pos 3)"),
        ("", "the frame ends early: 3 atoms announced, 1 found before this blank line"),
        ("3", "the frame ends early: 3 atoms announced, 1 found before this line, '3', which looks like"),
        ("si 0 0 0", "atom 2, species: 'si' is not a chemical symbol; did you mean 'Si'?"),
        ("SI 0 0 0", "atom 2, species: 'SI' is not a chemical symbol; did you mean 'Si'?"),
        ("Si1 0 0 0", "atom 2, species: 'Si1' is not a chemical symbol; did you mean 'Si'?"),
        ("14 0 0 0", "atom 2, species: '14' is not a chemical symbol; atomic numbers stand in a column Z:I:1"),
        ("X 0 0 0", "atom 2, species: 'X' is not a chemical symbol (H to Pu, exact spelling)"),
        ("Am 0 0 0", "atom 2, species: 'Am' is not a chemical symbol (H to Pu, exact spelling)"),
        ("\u53f7 0 0 0", r"atom 2, species: '\u53f7' is not a chemical symbol"),
        ("Si 0 1.25.75 0", "atom 2, pos y: '1.25.75' is not a number"),
        ("Si 0 0 nan", "atom 2, pos z: 'nan' is not a finite number"),
        ("Si -inf 0 0", "atom 2, pos x: '-inf' is not a finite number"),
        ("Si 0 1e400 0", "atom 2, pos y: '1e400' is too large for a number"),
        ("Si 0 1_0 0", "atom 2, pos y: '1_0' is not a number"),
        ("Si 0 1.0d0 0", "atom 2, pos y: '1.0d0' is not a number; write the exponent with E"),
        ("Si 0 **** 0", "atom 2, pos y: '****' is not a number"),
        ("Si 0 0 0\x00", r"atom 2, pos z: '0\x00' is not a number"),
        ("Si 0 0 1e", "atom 2, pos z: '1e' is not a number"),
    ],
)
def test_atom_lines_refused(row: str, says: str) -> None:
    error = refused(frame("") + f"3\n\nSi 0 0 0\n{row}\nSi 1 1 1\n" + frame(""))
    assert (error.frame, error.line) == (1, 8)
    assert error.reason.startswith(says)
    assert str(error) == f"in.xyz, frame 2, line 8: {error.reason}"


@pytest.mark.parametrize(
    ("comment", "row", "says"),
    [
        (FORCES, "Si 0 0 0 0 0 NaN", "atom 1, forces z: 'NaN' is not a finite number"),
        ("Properties=Z:I:1:pos:R:3", "0 0 0 0", "atom 1, atomic number: '0' is not an atomic number from 1 to 94"),
        ("Properties=Z:I:1:pos:R:3", "95 0 0 0", "atom 1, atomic number: '95' is not an atomic number from 1 to 94"),
        ("Properties=Z:I:1:pos:R:3", "14.0 0 0 0", "atom 1, atomic number: '14.0' is not an atomic number"),
        ("Properties=Z:I:1:pos:R:3", "-3 0 0 0", "atom 1, atomic number: '-3' is not an atomic number"),
        ("Properties=Z:I:1:pos:R:3:species:S:1", "14 0 0 0 Ge", "atom 1: species 'Ge' but atomic number 14"),
    ],
)
def test_other_columns_refused(comment: str, row: str, says: str) -> None:
    error = refused(frame(comment, row + "\n"))
    assert error.line == 3
    assert error.reason.startswith(says)


@pytest.mark.parametrize("count", ["-1", "2.0", "two", "2 2", "1_0", "+2", "\u0662", "9" * 30, "9" * 5000, "0x2"])
def test_atom_counts_refused(count: str) -> None:
    error = refused(frame("") + f"{count}\n\n{ATOMS}")
    assert (error.frame, error.line) == (1, 5)
    assert "wanted the number of atoms of a frame" in error.reason
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("text", "frame_index", "line", "says"),
    [
        (
            "1000000000000\n\n" + ATOMS,
            0,
            1,
            "the frame ends early: 1000000000000 atoms announced, 2 found before the end",
        ),
        ("999999999999999999\n\n" + ATOMS, 0, 1, "the frame ends early: 999999999999999999 atoms announced"),
        ("2\n\nSi 0 0 0\n\n\n", 0, 4, "the frame ends early: 2 atoms announced, 1 found before this blank line"),
        ("3\n\nSi 0 0 0\n\n", 0, 1, "the frame ends early: 3 atoms announced, 1 found before the end"),
        ("2\n\nSi 0 0 0", 0, 1, "the frame ends early: 2 atoms announced, 1 found before the end"),
        ("2\n", 0, 1, "the file ends before the comment line"),
        ("0", 0, 1, "the file ends before the comment line"),
        ("20\n\n" + ATOMS + frame(""), 0, 5, "the frame ends early: 20 atoms announced, 2 found before this line, '2'"),
        ("1\n\n" + ATOMS, 1, 4, "found 'Ge 1.5 2.5 3.5', wanted the number of atoms of a frame"),
        ("9\nenergy=x\n" + ATOMS, 0, 2, "key energy: 'x' is not a number"),
        (b"\xff\xfe2\x00\n\x00", 0, 1, "wanted the number of atoms of a frame"),
        (b"\x93NUMPY\x01\x00v\x00{'descr'", 0, 1, "wanted the number of atoms of a frame"),
    ],
)
def test_broken_files(text: str | bytes, frame_index: int, line: int, says: str) -> None:
    error = refused(text)
    assert (error.frame, error.line) == (frame_index, line)
    assert says in error.reason


def test_the_first_fault_of_the_file_is_reported() -> None:
    text = frame("") + frame("", "Si 0 0 x\n") + frame("energy=y") + "nonsense\n"
    assert "'x'" in refused(text).reason
    assert "'y'" in refused(text.replace("0 0 x", "0 0 0")).reason
    assert "'nonsense'" in refused(text.replace("0 0 x", "0 0 0").replace("=y", "=1")).reason


def test_bad_frames_can_be_skipped() -> None:
    text = (
        frame("energy=1") + frame("energy=oops") + frame("energy=3", "Si 0 0 nan\nSi 0 0 0\n")
        + frame("energy=4") + frame(CELL + " pbc=x") + frame("energy=6")
    )  # fmt: skip
    frames = xyz.parse(text, "in.xyz", skip_bad=True)
    assert sorted(frames.errors) == [1, 2, 4]
    assert frames.errors[2].line == 11
    assert frames.structures.counts.tolist() == [2, 0, 0, 2, 0, 2]
    assert frames.announced.tolist() == [2] * 6
    np.testing.assert_array_equal(frames.energy, [1, np.nan, np.nan, 4, np.nan, 6])
    good = frames.select([0, 3, 5])
    assert (good.energy.tolist(), good.indices.tolist(), good.errors) == ([1, 4, 6], [0, 3, 5], {})
    assert sorted(frames.select([5, 4, 0]).errors) == [1]


def test_what_follows_a_frame_of_unsure_length_is_not_skipped() -> None:
    # The frame lacks a line, so the next count is no count.
    text = frame("") + "3\n\n" + ATOMS + "2\nx\n" + ATOMS
    with pytest.raises(InputFileError, match="frame 2, line 9: the frame ends early: 3 atoms announced, 2 found"):
        xyz.parse(text, skip_bad=True)


@pytest.mark.parametrize(
    "comment",
    [
        "a=" + "[" * 200_000,
        "a=" + "[" * 100_000 + "]" * 100_000,
        "energy=" + "1" * 200_000 + "x",
        "energy " + '"' * 99_999,
        "a " * 100_000,
        "=" * 100_000,
        "a=b" * 50_000,
        "\\" * 100_000,
        'energy a="' + "\\" * 100_001,
        "Properties=" + ":" * 300_000,
    ],
    ids=range(10),
)
def test_deep_brackets_and_long_tokens_take_no_time(comment: str) -> None:
    frames = xyz.parse(frame(comment), skip_bad=True)
    assert len(frames) == 1
    assert all(len(str(error)) < 500 for error in frames.errors.values())


def test_messages_are_short() -> None:
    assert len(str(refused(frame("", "Si 0 0 " + "1" * 200_000 + "x\n")))) < 300


def test_many_warnings_are_not_kept_all() -> None:
    frames = xyz.parse(frame('stress="1 0 0 0 1 0 0 0 1"', "Si 0 0 0\n") * 1200)
    assert len(frames.warnings) == 1000


# --- streams ---

MANY = "".join(frame(f"{CELL} energy={i} {FORCES}", f"Si {i} 0 0 1 2 3\n" * (1 + i % 5)) for i in range(60))


def same(one: xyz.Frames, other: xyz.Frames) -> bool:
    pairs = [(one.structures.positions, other.structures.positions), (one.forces, other.forces),
             (one.energy, other.energy), (one.virial, other.virial), (one.indices, other.indices),
             (one.lines, other.lines), (one.structures.cells, other.structures.cells)]  # fmt: skip
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs) and one.comments == other.comments


@pytest.mark.parametrize("max_atoms", [1, 10, 1000])
def test_blocks_join_to_the_whole(tmp_path: Path, max_atoms: int) -> None:
    path = tmp_path / "many.xyz"
    path.write_text(MANY)
    whole = xyz.parse(MANY, str(path))
    blocks = list(xyz.read_blocks(path, max_atoms))
    assert same(xyz.Frames.concatenate(blocks), whole)
    assert same(xyz.read(path), whole)
    assert len(blocks) in {1: range(60, 61), 10: range(20, 60), 1000: range(1, 2)}[max_atoms]


def test_select_takes_frames_with_their_atoms() -> None:
    whole = xyz.parse(MANY)
    part = whole.select([33, 7])
    assert part.energy.tolist() == [33, 7]
    assert part.structures.positions[:, 0].tolist() == [33.0] * 4 + [7.0] * 3
    assert part.forces.shape == (7, 3)
    assert part.lines.tolist() == [whole.lines[33], whole.lines[7]]
    assert len(whole.select([])) == 0


def test_frames_over_chunk_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = xyz.parse(MANY)
    for chunk in (3, 7, 101):
        monkeypatch.setattr(xyz, "_CHUNK", chunk)
        for text in (MANY, MANY.replace("\n", "\r\n"), "\ufeff" + MANY):
            assert same(xyz.Frames.concatenate(list(xyz.read_blocks(io.BytesIO(text.encode()), 30))), whole)


def test_gzip_by_content(tmp_path: Path) -> None:
    path = tmp_path / "named.anything"
    path.write_bytes(gzip.compress(MANY.encode()))
    assert same(xyz.read(path), xyz.parse(MANY))
    assert path.open("rb").read(2) == b"\x1f\x8b"


@pytest.mark.parametrize("damage", ["cut", "flipped", "tail"])
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(MANY.encode()))
    if damage == "cut":
        packed = packed[: len(packed) // 2]
    elif damage == "flipped":
        packed[len(packed) // 2] ^= 0xFF
    else:
        packed[-6] ^= 0xFF
    path = tmp_path / "x.gz"
    path.write_bytes(packed)
    with pytest.raises(InputFileError):
        xyz.read(path)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "none.xyz", "No such file"), (tmp_path, "Is a directory"), ("a\0b", "null")):
        with pytest.raises(InputFileError, match=says):
            xyz.read(path)


def test_standard_input() -> None:
    code = (
        "from nepcore.files import xyz\n"
        "for b in xyz.read_blocks('-', 1): print(b.path, b.energy.tolist(), flush=True)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert run.stdin is not None
    assert run.stdout is not None
    run.stdin.write(frame("energy=1").encode())
    run.stdin.flush()
    # The first frame comes out while the input is still open.
    assert run.stdout.readline() == b"<stdin> [1.0]\n"
    run.stdin.write(frame("energy=2").encode())
    run.stdin.close()
    assert run.stdout.read() == b"<stdin> [2.0]\n"
    assert run.wait() == 0


def test_frames_before_a_fault_are_yielded(tmp_path: Path) -> None:
    path = tmp_path / "x.xyz"
    path.write_text(frame("energy=1") + frame("energy=2") + frame("energy=oops") + frame("energy=4"))
    blocks = xyz.read_blocks(path)
    assert next(blocks).energy.tolist() == [1, 2]
    with pytest.raises(InputFileError, match="frame 3, line 10"):
        next(blocks)


def test_a_count_too_large_is_noticed_while_the_file_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xyz, "_CHUNK", 1000)
    monkeypatch.setattr(xyz, "_CHECK_LINES", 50)

    class Endless(io.RawIOBase):
        taken = 0

        def read(self, _: int = -1) -> bytes:
            text = b"1000000000000\nenergy=1\n" + ATOMS.encode() * 30 + frame("energy=2").encode()
            self.taken += 1
            return text if self.taken == 1 else ATOMS.encode() * 50

    stream = Endless()
    with pytest.raises(InputFileError, match="line 63: the frame ends early: 1000000000000 atoms announced, 60 found"):
        list(xyz.read_blocks(stream))  # type: ignore[arg-type]
    assert stream.taken < 10


def test_a_file_without_lines_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xyz, "MAX_LINE", 10_000)

    class Zeros(io.RawIOBase):
        def read(self, _: int = -1) -> bytes:
            return b"\0" * 4096

    with pytest.raises(InputFileError, match="a line is longer than 10,000 bytes"):
        list(xyz.read_blocks(Zeros()))  # type: ignore[arg-type]


def test_reading_stops_at_a_bound_before_numbers_are_read() -> None:
    text = frame(CELL) + frame(CELL, "Si 0 0 x\n") + "1\n"
    with pytest.raises(xyz.TooManyError) as caught:
        xyz.parse(text, max_frames=1)
    assert (caught.value.frames, caught.value.atoms) == (2, 3)
    with pytest.raises(xyz.TooManyError):
        xyz.parse(text, max_atoms=2)
    assert len(xyz.parse(frame(CELL) * 2, max_frames=2, max_atoms=4)) == 2
    # A count beyond the bound with nothing behind it is a mistake in the file, and told as one.
    with pytest.raises(InputFileError, match="announced"):
        xyz.parse(frame(CELL).replace("2\n", "2000\n", 1), max_atoms=4)
