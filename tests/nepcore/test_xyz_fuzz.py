"""Whatever the bytes, the extended-XYZ reader raises its own error or reads what can be written and read again."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nepcore.errors import InputFileError
from nepcore.files import xyz

CELL = 'Lattice="4 0 0 0 5 0 0 0 6"'
FORCES = "Properties=species:S:1:pos:R:3:forces:R:3"
ATOMS = "Si 0 0 0\nGe 1.5 2.5 3.5\n"


def frame(comment: str, atoms: str = ATOMS) -> str:
    return f"{atoms.count(chr(10))}\n{comment}\n{atoms}"


# --- whatever the bytes ---

SEED = (
    frame(
        f'{CELL} energy=-1 virial="1 0 0 0 1 0 0 0 1" pbc="T T T" {FORCES} note="a b" x=[1, 2]', "Si 0 0 0 1 2 3\n" * 2
    )
    + "\r\n"
    + frame("Properties=Z:I:1:pos:R:3:e:R:1:m:L:1 temperature=300 weight=2 config_type='q r'", "14 0 0 0 1 T\n" * 3)
    + frame("free text", "H 0.5 .5 5.\n")
).encode()


def parsed(data: bytes, skip_bad: bool) -> xyz.Frames | InputFileError:
    try:
        return xyz.parse(data, skip_bad=skip_bad)
    except InputFileError as error:
        return error


def survives(data: bytes) -> None:
    for skip_bad in (False, True):
        frames = parsed(data, skip_bad)
        if isinstance(frames, InputFileError):
            assert frames.line is not None
            assert len(str(frames)) < 1000
            continue
        assert frames.structures.n_atoms == len(frames.forces)
        assert np.isfinite(frames.structures.positions).all()
        assert np.isfinite(frames.structures.cells).all()
        # What can be read can be written, and reads the same.
        good = frames.select([i for i in range(len(frames)) if i not in frames.errors])
        again = xyz.parse(xyz.dumps(good.structures, frames=good))
        np.testing.assert_array_equal(again.structures.positions, good.structures.positions)
        np.testing.assert_array_equal(again.structures.pbc, good.structures.pbc)
        np.testing.assert_array_equal(again.forces, good.forces)
        np.testing.assert_array_equal(again.energy, good.energy)
        np.testing.assert_array_equal(again.virial, good.virial)
        for one, other in zip(good.extras, again.extras, strict=True):
            assert (one is None and other is None) or one.tolist() == other.tolist()  # type: ignore[union-attr]


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    survives(data)


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=60), st.text(max_size=20))
def test_any_comment_and_any_atom_line(comment: str, row: str) -> None:
    survives(f"1\n{comment}\nSi 0 0 0\n1\n{CELL}\n{row}\n".encode("utf-8", "surrogatepass"))


TOKENS = [
    b" ", b"\n", b"=", b'"', b"'", b"[", b"]", b"{", b"}", b"\\", b":", b"T", b"nan", b"1e999", b"-1e6", b"energy=",
    b"virial=", b"pbc=", b"Properties=", b"Lattice=", b"\x00", b"\xff", b"0", b"9" * 40, b"\r", b",", b"_", b"Si", b"",
]  # fmt: skip


@settings(deadline=None, max_examples=500)
@given(
    st.lists(st.tuples(st.integers(0, len(SEED)), st.integers(0, 3), st.sampled_from(TOKENS)), min_size=1, max_size=6)
)
def test_mutations(edits: list[tuple[int, int, bytes]]) -> None:
    data = SEED
    for at, gone, new in edits:
        data = data[:at] + new + data[at + gone :]
    survives(data)


def streamed(data: bytes, skip_bad: bool) -> xyz.Frames | InputFileError:
    try:
        blocks = list(xyz.read_blocks(io.BytesIO(data), 1, path="<request>", skip_bad=skip_bad))
    except InputFileError as error:
        return error
    return xyz.Frames.concatenate(blocks)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, len(SEED)), st.integers(0, 3), st.sampled_from(TOKENS)), max_size=3),
    st.integers(1, 200),
    st.booleans(),
)
def test_a_stream_reads_as_the_whole(edits: list[tuple[int, int, bytes]], chunk: int, skip_bad: bool) -> None:
    data = SEED
    for at, gone, new in edits:
        data = data[:at] + new + data[at + gone :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xyz, "_CHUNK", chunk)
        found = streamed(data, skip_bad)
    whole = parsed(data, skip_bad)
    if isinstance(whole, InputFileError) or isinstance(found, InputFileError):
        assert str(found) == str(whole)
        return
    np.testing.assert_array_equal(found.structures.positions, whole.structures.positions)
    np.testing.assert_array_equal(found.lines, whole.lines)
    assert found.comments == whole.comments
    assert {i: str(e) for i, e in found.errors.items()} == {i: str(e) for i, e in whole.errors.items()}


def test_truncations_and_single_bytes() -> None:
    random.seed(3)
    for cut in range(len(SEED)):
        survives(SEED[:cut])
    for _ in range(300):
        data = bytearray(SEED)
        data[random.randrange(len(data))] = random.randrange(256)
        survives(bytes(data))
