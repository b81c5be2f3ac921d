"""The extended-XYZ writer: nothing is lost on the way out and back, and ASE reads the same."""

from __future__ import annotations

import gzip
import io
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from locations import SHARED, needs_shared
from nepcore.elements import SYMBOLS
from nepcore.errors import StructureError
from nepcore.files import xyz, xyz_comment
from nepcore.structures import Predictions, Structures

if TYPE_CHECKING:
    from pathlib import Path

CELL = 'Lattice="4 0 0 0 5 0 0 0 6"'
FORCES = "Properties=species:S:1:pos:R:3:forces:R:3"
ATOMS = "Si 0 0 0\nGe 1.5 2.5 3.5\n"


def frame(comment: str, atoms: str = ATOMS) -> str:
    return f"{atoms.count(chr(10))}\n{comment}\n{atoms}"


# --- writing ---

FLOATS = st.floats(-1e12, 1e12, allow_subnormal=True)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Structures, Predictions]:
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    B, N = len(counts), sum(counts)
    cells = draw(hnp.arrays(np.float64, (B, 3, 3), elements=st.floats(-50, 50)))
    pbc = draw(hnp.arrays(bool, (B, 3))) & (cells != 0).any(axis=2)
    cells[~(cells != 0).any(axis=(1, 2))] = 0
    heat = draw(hnp.arrays(np.float64, B, elements=st.one_of(st.just(np.nan), st.floats(0, 1e4))))
    numbers = draw(hnp.arrays(np.uint8, N, elements=st.integers(1, 94)))
    structures = Structures.from_arrays(
        counts, numbers, draw(hnp.arrays(np.float64, (N, 3), elements=FLOATS)), cells, pbc, heat
    )
    per_atom = draw(st.sampled_from([np.float64, np.float32]))
    width = st.floats(-1e12, 1e12) if per_atom is np.float64 else st.floats(-(2.0**40), 2.0**40, width=32)
    values = {
        "energy": draw(hnp.arrays(np.float64, B, elements=FLOATS)),
        "virial": draw(hnp.arrays(np.float64, (B, 3, 3), elements=FLOATS)),
        "forces": draw(hnp.arrays(per_atom, (N, 3), elements=width)),
        "energies": draw(hnp.arrays(per_atom, N, elements=width)),
        "virials": draw(hnp.arrays(per_atom, (N, 3, 3), elements=width)),
    }
    return structures, Predictions(structures.counts, values, structures.pbc.all(axis=1))


@settings(deadline=None)
@given(blocks())
def test_what_is_written_comes_back_exactly(block: tuple[Structures, Predictions]) -> None:
    structures, predictions = block
    frames = xyz.parse(xyz.dumps(structures, predictions))
    for name in ("counts", "numbers", "positions", "cells", "pbc", "temperatures"):
        np.testing.assert_array_equal(getattr(frames.structures, name), getattr(structures, name), name)
    for name, read in (
        ("energy", frames.energy), ("forces", frames.forces), ("virial", frames.virial),
        ("energies", frames.column("energies", 1)), ("virials", frames.column("virials", 9)),
    ):  # fmt: skip
        written = predictions.values[name]
        # A number that happens to be GPUMD's mark for a missing one is not read as a label.
        marked = np.isnan(read).any(axis=tuple(range(1, read.ndim)))
        assert marked.sum() <= np.isin(written, xyz.MISSING).sum() * 5
        # In the precision in which it was written.
        back = read.astype(written.dtype).reshape(written.shape)
        np.testing.assert_array_equal(back[~marked], written[~marked], name)
    assert frames.key_numbers("free_energy", 1)[:, 0].tolist() == predictions.values["energy"].tolist()


def example(n: int = 3) -> tuple[Structures, Predictions]:
    rng = np.random.default_rng(5)
    counts = rng.integers(1, 6, n)
    N = int(counts.sum())
    cells = np.eye(3) * 5 + rng.normal(size=(n, 3, 3)) * 0.3
    structures = Structures.from_arrays(counts, rng.integers(1, 95, N), rng.normal(size=(N, 3)) * 3, cells)
    symmetric = rng.normal(size=(n, 3, 3))
    virial = symmetric + symmetric.transpose(0, 2, 1)
    sigma = -virial / structures.volumes[:, None, None]
    voigt = sigma[:, [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
    values = {"energy": rng.normal(size=n) * 1e3, "forces": rng.normal(size=(N, 3)), "energies": rng.normal(size=N),
              "virial": virial, "stress": voigt, "virials": rng.normal(size=(N, 3, 3))}  # fmt: skip
    return structures, Predictions(structures.counts, values, np.ones(n, bool))


def test_stress_alone_comes_back_as_a_virial() -> None:
    structures, predictions = example()
    only = Predictions(predictions.counts, {"stress": predictions.values["stress"]}, predictions.stress_known)
    frames = xyz.parse(xyz.dumps(structures, only))
    np.testing.assert_allclose(frames.virial, predictions.values["virial"], rtol=1e-14)


def test_a_molecule_has_no_stress_and_no_lattice() -> None:
    structures = Structures.from_arrays([1], [14], [[0, 0, 0]])
    values = {"energy": np.array([-1.0]), "stress": np.full((1, 6), np.nan), "forces": np.zeros((1, 3))}
    text = xyz.dumps(structures, Predictions(structures.counts, values, np.array([False]))).decode()
    assert text.splitlines()[1] == 'Properties=species:S:1:pos:R:3:forces:R:3 energy=-1.0 free_energy=-1.0 pbc="F F F"'


def test_failed_structures_are_written_without_results() -> None:
    structures, predictions = example()
    source = xyz.parse(xyz.dumps(structures, predictions))
    failed = Predictions(
        predictions.counts, predictions.values, predictions.stress_known,
        {1: StructureError("too_dense", 'cell "x" is\ttoo small')},
    )  # fmt: skip
    text = xyz.dumps(structures, failed, source)
    frames = xyz.parse(text)
    assert frames.label_counts()["energies"] == 2
    assert np.isnan(frames.virial[1]).all()
    assert np.isnan(frames.forces[structures.offsets[1] : structures.offsets[2]]).all()
    assert [i.value for i in xyz_comment.items(frames.comments[1]) if i.key == "error"] == ['cell "x" is\ttoo small']
    # Written again with results, the error is gone.
    assert b"error=" not in xyz.dumps(structures, predictions, frames)


def test_labels_do_not_pass_for_results() -> None:
    comment = (
        f'{CELL} energy=-7 free_energy=-8 virial="7 0 0 0 7 0 0 0 7" stress="7 0 0 0 7 0 0 0 7" tag=kept '
        "Properties=species:S:1:pos:R:3:force:R:3:energies:R:1:charge:R:1"
    )
    source = xyz.parse(frame(comment, "Si 0 0 0 77 77 77 -7.5 0.25\n"))
    values = {"energy": np.array([-1.0])}
    text = xyz.dumps(source.structures, Predictions(np.array([1]), values, np.array([True])), source).decode()
    assert "7" not in text.replace('pbc="', "")
    assert "tag=kept" in text
    assert "Properties=species:S:1:pos:R:3:charge:R:1 energy=-1.0 free_energy=-1.0" in text
    assert text.splitlines()[2] == "Si 0.0 0.0 0.0 0.25"


def test_a_frame_is_written_again_with_its_other_items_and_columns() -> None:
    comment = (
        f'{CELL} pbc=[T,F,T] note="two words" \'odd key\'={{1 2}} flag=T data="_JSON [1, {{\\"a\\": 2}}]" '
        "Config_Type=bulk weight=2 energy=-1.25 free_energy=-1.5 temperature=300 "
        'virial="1 2 3 2 4 5 3 5 6" Properties="id:I:1:species:S:1:pos:R:3:forces:R:3:move mask:L:1"'
    )
    source = xyz.parse(frame(comment, "07 Si 0.1 0 0 1 2 3 T\n8 Ge 1 1 1 4 5 6 F\n"))
    again = xyz.parse(xyz.dumps(source.structures, frames=source))
    assert (again.weight[0], again.config_type, again.energy[0]) == (2.0, ("bulk",), -1.25)
    assert again.structures.pbc.tolist() == [[True, False, True]]
    assert again.structures.temperatures[0] == 300
    np.testing.assert_array_equal(again.forces, source.forces)
    np.testing.assert_array_equal(again.virial, source.virial)
    assert again.key_numbers("free_energy", 1)[0, 0] == -1.5
    assert again.extras[0] is not None
    assert again.extras[0].tolist() == [[b"07", b"T"], [b"8", b"F"]]
    kept = {i.key: i.value for i in xyz_comment.items(again.comments[0])}
    assert (kept["note"], kept["odd key"], kept["flag"]) == ("two words", "{1 2}", "T")
    assert kept["data"] == '_JSON [1, {"a": 2}]'
    # Writing is idempotent.
    assert xyz.dumps(again.structures, frames=again) == xyz.dumps(source.structures, frames=source)


@pytest.mark.parametrize("comment", ["water, relaxed", "==== x ====", 'it\'s \\ "quoted"', ""])
def test_free_text_is_kept_as_a_comment(comment: str) -> None:
    source = xyz.parse(frame(comment))
    again = xyz.parse(xyz.dumps(source.structures, frames=source))
    found = [i.value for i in xyz_comment.items(again.comments[0]) if i.key == "comment"]
    assert found == ([comment] if comment else [])


def test_bytes_that_are_no_text_come_back() -> None:
    raw = b'1\nname=\xff\xfe "k\xc3"=1 Properties=species:S:1:pos:R:3:tag:S:1\nSi 0 0 0 \xe9\x00\n'
    source = xyz.parse(raw)
    out = xyz.dumps(source.structures, frames=source)
    assert b"name=\xff\xfe" in out
    assert out.endswith(b"Si 0.0 0.0 0.0 \xe9\x00\n")
    assert xyz.parse(out).extras[0].tolist() == [[b"\xe9\x00"]]  # type: ignore[union-attr]


def test_write_to_paths_and_open_files(tmp_path: Path) -> None:
    structures, predictions = example()
    content = xyz.dumps(structures, predictions)
    xyz.write(tmp_path / "a.xyz", structures, predictions)
    xyz.write(str(tmp_path / "a.xyz.gz"), structures, predictions)
    assert (tmp_path / "a.xyz").read_bytes() == content
    assert gzip.decompress((tmp_path / "a.xyz.gz").read_bytes()) == content
    binary, text = io.BytesIO(), io.StringIO()
    xyz.write(binary, structures, predictions)
    xyz.write(text, structures, predictions)
    assert binary.getvalue() == text.getvalue().encode() == content


def test_arguments_of_other_structures_are_refused() -> None:
    structures, predictions = example(3)
    with pytest.raises(ValueError, match="of the same structures"):
        xyz.dumps(structures.slice(0, 2), predictions)


# --- ASE ---


def read_by_ase(text: bytes) -> list:
    return pytest.importorskip("ase.io").read(io.StringIO(text.decode()), index=":", format="extxyz")


def test_ase_reads_what_is_written() -> None:
    structures, predictions = example()
    for i, atoms in enumerate(read_by_ase(xyz.dumps(structures, predictions))):
        view, result = structures.view(i), predictions.view(i)
        assert atoms.numbers.tolist() == view.numbers.tolist()
        np.testing.assert_array_equal(atoms.positions, view.positions)
        np.testing.assert_array_equal(atoms.cell.array, view.cell)
        assert atoms.pbc.tolist() == view.pbc.tolist()
        assert atoms.calc is not None
        assert atoms.get_potential_energy() == result["energy"]
        assert atoms.get_potential_energy(force_consistent=True) == result["energy"]
        np.testing.assert_array_equal(atoms.get_forces(), result["forces"])
        np.testing.assert_array_equal(atoms.get_stress(), result["stress"])
        np.testing.assert_array_equal(atoms.get_potential_energies(), result["energies"])
        np.testing.assert_array_equal(atoms.info["virial"], result["virial"])
        np.testing.assert_array_equal(atoms.arrays["virials"], result["virials"].reshape(-1, 9))


def test_ase_reads_molecules_and_slabs() -> None:
    structures = Structures.from_arrays(
        [2, 1], [14, 14, 8], np.arange(9).reshape(3, 3) / 7, [np.zeros((3, 3)), np.diag([3, 4, 0])],
        [[False] * 3, [True, True, False]],
    )  # fmt: skip
    molecule, slab = read_by_ase(xyz.dumps(structures))
    assert not molecule.cell.any()
    assert molecule.pbc.tolist() == [False] * 3
    assert slab.pbc.tolist() == [True, True, False]
    assert slab.cell.array.tolist() == np.diag([3.0, 4.0, 0.0]).tolist()


def test_reads_what_ase_writes() -> None:
    ase = pytest.importorskip("ase")
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.constraints import FixAtoms
    from ase.io import write

    rng = np.random.default_rng(1)
    images = []
    for n in (1, 3):
        atoms = ase.Atoms(
            "Si" * n, rng.normal(size=(n, 3)), cell=np.eye(3) * 6 + rng.normal(size=(3, 3)) * 0.2, pbc=True
        )
        atoms.info = {"config_type": "a b", "d": {"x": [1, 2]}, "s": 'it"s', "flag": True, "v": np.arange(3.0)}
        atoms.arrays["tags2"] = np.arange(n)
        atoms.set_constraint(FixAtoms([0]))
        results = {
            "energy": -1.25,
            "free_energy": -1.5,
            "forces": rng.normal(size=(n, 3)),
            "stress": rng.normal(size=6),
        }
        atoms.calc = SinglePointCalculator(atoms, **results)
        images.append(atoms)
    text = io.StringIO()
    write(text, images, format="extxyz")
    frames = xyz.parse(text.getvalue())
    assert frames.label_counts() == {"energies": 2, "forces": 4, "virials": 2}
    assert frames.config_type == ("a b", "a b")
    for i, atoms in enumerate(images):
        part = slice(*frames.structures.offsets[i : i + 2])
        np.testing.assert_allclose(frames.structures.positions[part], atoms.positions, atol=1e-8)
        np.testing.assert_allclose(frames.structures.cells[i], atoms.cell.array, rtol=1e-15)
        np.testing.assert_allclose(frames.forces[part], atoms.get_forces(apply_constraint=False), atol=1e-8)
        np.testing.assert_allclose(frames.virial[i], -atoms.get_volume() * atoms.get_stress(voigt=False), rtol=1e-12)
    # And ASE takes back what is written of it.
    again = read_by_ase(xyz.dumps(frames.structures, frames=frames))
    assert again[1].info["d"] == {"x": [1, 2]}
    assert again[1].arrays["tags2"].tolist() == [0, 1, 2]
    assert again[1].constraints[0].index.tolist() == [0]


ASE_SYMBOLS = st.sampled_from(SYMBOLS[1:])


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(ASE_SYMBOLS, FLOATS, FLOATS, FLOATS), min_size=1, max_size=5),
    st.sampled_from(["", CELL, f'{CELL} pbc="T F F"', 'Lattice="1 2 3 0 5 6 0 0 9" pbc=F']),
    st.sampled_from(["", "energy=-1.5", "note=[1, 2] b", 'stress="1 2 3 2 4 5 3 5 6"', "e = {a b}", "x='y z'"]),
)
def test_ase_and_we_read_the_same(atoms: list, cell: str, items: str) -> None:
    rows = "".join(f"{s} {x!r} {y:.8f} {z:e}\n" for s, x, y, z in atoms)
    text = f"{len(atoms)}\n{cell} {items}\n{rows}"
    frames, (image,) = xyz.parse(text), read_by_ase(text.encode())
    assert frames.structures.numbers.tolist() == image.numbers.tolist()
    np.testing.assert_array_equal(frames.structures.positions, image.positions)
    np.testing.assert_array_equal(frames.structures.cells[0], image.cell.array)
    assert frames.structures.pbc[0].tolist() == image.pbc.tolist()
    results = image.calc.results if image.calc else {}
    assert frames.energy[0] == pytest.approx(results.get("energy", np.nan), nan_ok=True)


# --- data of others ---


@needs_shared
@pytest.mark.parametrize("name", ["PbTe", "MoS2", "MoSi2N4"])
def test_training_sets(name: str) -> None:
    path = SHARED / "data" / name / "train.xyz"
    frames = xyz.read(path)
    images = read_by_ase(path.read_bytes())
    assert len(frames) == len(images) == {"PbTe": 25, "MoS2": 104, "MoSi2N4": 308}[name]
    assert not frames.warnings
    for i, atoms in enumerate(images):
        part = slice(*frames.structures.offsets[i : i + 2])
        assert frames.structures.numbers[part].tolist() == atoms.numbers.tolist()
        np.testing.assert_array_equal(frames.structures.positions[part], atoms.positions)
        np.testing.assert_array_equal(frames.structures.cells[i], atoms.cell.array)
        np.testing.assert_array_equal(frames.forces[part], atoms.arrays["force"])
    again = xyz.parse(xyz.dumps(frames.structures, frames=frames))
    np.testing.assert_array_equal(again.forces, frames.forces)
    np.testing.assert_array_equal(again.virial, frames.virial)
    np.testing.assert_array_equal(again.energy, frames.energy)
    assert (again.config_type, again.weight.tolist()) == (frames.config_type, frames.weight.tolist())
