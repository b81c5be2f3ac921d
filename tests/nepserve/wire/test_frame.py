"""The compact frame: there and back, byte by byte, and everything that is no frame."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nepserve.wire import frame
from nepserve.wire.request import WireError

MOST = 1 << 20


def split(data: bytes) -> tuple[frame.Head, memoryview]:
    return frame.read_head(data, MOST), memoryview(data)[24:]


def read(data: bytes) -> None:
    head, payload = split(data)
    frame.read_request(head, payload, 2)


def test_a_request_byte_by_byte() -> None:
    positions = np.arange(6, dtype=float).reshape(2, 3)
    data = frame.pack_request(positions, 5.0 * np.eye(3), frame.STRESS, 77)
    assert data[:24] == b"NEPF" + bytes([1, 0]) + struct.pack("<HIIQ", 2 | 4, 2, 72 + 48, 77)
    assert data[24:96] == struct.pack("<9d", 5, 0, 0, 0, 5, 0, 0, 0, 5)
    assert data[96:] == struct.pack("<6d", *range(6))


@pytest.mark.parametrize("single", [0, frame.SINGLE], ids=["f8", "f4"])
@pytest.mark.parametrize("cell", [None, np.diag([4.0, 5.0, 6.0])], ids=["no cell", "cell"])
def test_a_request_there_and_back(single: int, cell: np.ndarray | None) -> None:
    positions = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32 if single else np.float64)
    head, payload = split(frame.pack_request(positions, cell, single | frame.VIRIALS, 2**63))
    found, box = frame.read_request(head, payload, 5)
    np.testing.assert_array_equal(found, positions)
    assert (box is None) == (cell is None)
    if cell is not None:
        np.testing.assert_array_equal(box, cell)
    assert (found.dtype, head.sequence) == (np.float64, 2**63)
    assert frame.properties_of(head.flags) == ("energy", "forces", "virials")


@given(flags=st.integers(0, 63).map(lambda k: sum(f for i, f in enumerate((1, 4, 8, 64, 128)) if k >> i & 1)),
       atoms=st.integers(1, 9), without=st.booleans())  # fmt: skip
def test_a_result_there_and_back(flags: int, atoms: int, without: bool) -> None:
    rng = np.random.default_rng(atoms)
    real = np.float32 if flags & 1 else np.float64
    values = {
        "energy": rng.normal(size=1), "stress": rng.normal(size=(1, 6)), "virial": rng.normal(size=(1, 3, 3)),
        "forces": rng.normal(size=(atoms, 3)).astype(real), "energies": rng.normal(size=atoms).astype(real),
        "virials": rng.normal(size=(atoms, 3, 3)).astype(real),
    }  # fmt: skip
    given_flags = flags & ~frame.STRESS if without else flags
    head, payload = split(frame.pack_result(values, atoms, given_flags, 3))
    found = frame.read_result(head, payload, atoms, flags | frame.CELL, 3)
    assert found.keys() == set(frame.properties_of(given_flags))
    for name, array in found.items():
        np.testing.assert_array_equal(
            array, values[name][0] if name in {"energy", "stress", "virial"} else values[name]
        )
        if name != "energy":
            array[...] = 0.0  # the caller's own


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: b"XEPF" + d[4:], "begins with NEPF"),
        (lambda d: d[:4] + b"\2" + d[5:], "version 2"),
        (lambda d: d[:12] + b"\xff\xff\xff\xff" + d[16:], "at most"),
        (lambda d: d[:5] + b"\1" + d[6:], "kind 1"),
        (lambda d: d[:6] + b"\x10\0" + d[8:], "flags 16"),
        (lambda d: d[:8] + b"\3" + d[9:], "the session 2"),
        (lambda d: d[:-8], "bytes behind its head"),
        (lambda d: d + bytes(8), "bytes behind its head"),
    ],
)
def test_what_is_no_request(change: object, said: str) -> None:
    data = change(frame.pack_request(np.zeros((2, 3)), None, 0, 1))  # type: ignore[operator]
    with pytest.raises(WireError, match=said):
        read(data)


@given(st.binary(min_size=24, max_size=200))
def test_any_bytes_are_refused_in_words(data: bytes) -> None:
    for body in (data, b"NEPF\1\0" + data[6:]):
        sound = False
        with contextlib.suppress(WireError):
            read(body)
            sound = True
        assert not sound or len(body) in {24 + 48, 24 + 24, 24 + 72 + 24, 24 + 72 + 48}


@pytest.mark.parametrize(
    "wrong",
    [{"kind": 0}, {"sequence": 2}, {"atoms": 3}, {"flags": 64}, {"flags": 0, "cut": 1}],
    ids=["kind", "number", "atoms", "flags", "short"],
)
def test_the_answer_to_something_else_is_refused(wrong: dict[str, int]) -> None:
    values = {"energy": np.zeros(1), "forces": np.zeros((2, 3)), "virial": np.zeros((1, 3, 3))}
    head, payload = split(frame.pack_result(values, 2, 0, 1))
    cut = wrong.pop("cut", 0)
    with pytest.raises(WireError) as raised:
        frame.read_result(head._replace(**wrong), payload[: len(payload) - cut], 2, 0, 1)
    assert raised.value.code == "bad_answer"
