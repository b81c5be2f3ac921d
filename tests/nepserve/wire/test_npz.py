from __future__ import annotations

import io
import tracemalloc
import warnings
import zipfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from nepcore.errors import StructureError
from nepcore.structures import PROPERTIES, Structures
from nepserve import wire
from wire_samples import CELL, SILICON, blocks, mixed, predict, same, silicon

TYPE = "application/x-npz"
ARRAYS: dict[str, Any] = {
    "n_atoms": np.array([2], np.int32),
    "numbers": np.array([14, 14], np.uint8),
    "positions": np.array(SILICON["positions"]),
    "cell": np.array([CELL]),
    "pbc": np.ones((1, 3), np.uint8),
}


def archive(compress: bool = False, **changes: Any) -> bytes:
    file = io.BytesIO()
    kept = {k: v for k, v in {**ARRAYS, **changes}.items() if v is not None}
    (np.savez_compressed if compress else np.savez)(file, **kept)
    return file.getvalue()


def zipped(*members: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", compression) as target:
        warnings.filterwarnings("ignore", "Duplicate name")
        for name, content in members:
            target.writestr(name, content)
    return file.getvalue()


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), **options)
    return file.getvalue()


def header(text: str, data: bytes = b"") -> bytes:
    """A member with a header of our own words."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data


def refusal(data: bytes, **options: Any) -> wire.WireError:
    with pytest.raises(wire.WireError) as caught:
        wire.decode(TYPE, data, **options)
    return caught.value


def load(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as found:
        return dict(found)


@given(blocks())
@settings(max_examples=40, deadline=None)
def test_round_trip(block: Structures) -> None:
    data = archive(
        n_atoms=block.counts, numbers=block.numbers, positions=block.positions, cell=block.cells, pbc=block.pbc,
        temperature=block.temperatures, model="m", properties=np.array(PROPERTIES),
    )  # fmt: skip
    request = wire.decode(TYPE, data)
    assert same(request.structures, block)
    assert (request.model, request.properties) == ("m", PROPERTIES)
    wanted = predict(block)
    found = load(wire.encode(request, wanted)[1])
    assert np.array_equal(found["n_atoms"], block.counts)
    assert not found["status"].any()
    for name in found.keys() & set(PROPERTIES):
        assert np.array_equal(found[name], wanted.values[name], equal_nan=True), name
    missing = np.flatnonzero(~wanted.stress_known).tolist()
    assert found.get("unavailable_stress", np.zeros(0)).tolist() == missing
    assert ("stress" in found) == (len(missing) < len(block) or not len(block))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"n_atoms": None}, id="no count"),
        pytest.param({"n_atoms": np.array(2)}, id="a number"),
        pytest.param({"n_atoms": None, "cell": np.array(CELL), "pbc": np.ones(3, bool)}, id="without the first axis"),
    ],
)
def test_one_structure_as_one_structure(changes: dict[str, Any]) -> None:
    request = wire.decode(TYPE, archive(**changes))
    assert request.single
    assert same(request.structures, silicon())


@pytest.mark.parametrize("compress", [False, True], ids=["stored", "deflated"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"positions": np.asfortranarray(SILICON["positions"])}, id="columns first"),
        pytest.param({"positions": np.array(SILICON["positions"], ">f8")}, id="big-endian"),
        pytest.param({"numbers": np.array([14, 14], np.int64), "n_atoms": np.array([2], np.uint16)}, id="wide"),
        pytest.param({"pbc": np.ones((1, 3), bool)}, id="bool"),
        pytest.param({"pbc": np.ones((1, 3), np.int64)}, id="long flags"),
        pytest.param({"cell": np.array([CELL], np.float64, order="F")}, id="cell columns first"),
    ],
)
def test_other_layouts_of_the_same_numbers(changes: dict[str, Any], compress: bool) -> None:
    request = wire.decode("application/zip", archive(compress, **changes))
    assert same(request.structures, silicon())
    assert not request.single


def test_single_precision_goes_both_ways() -> None:
    request = wire.decode(TYPE, archive(positions=np.array(SILICON["positions"], np.float32)))
    assert request.structures.positions.dtype == np.float64
    found = load(wire.encode(request, predict(request.structures))[1])
    assert found["forces"].dtype == np.float32
    assert found["energy"].dtype == np.float64


def test_names_as_text() -> None:
    for names in (np.array(["energy", "forces"]), np.array("energy, forces"), np.array([b"energy", b"forces"])):
        assert wire.decode(TYPE, archive(properties=names)).properties == ("energy", "forces")
    assert wire.decode(TYPE, archive(model=np.array(["si"]))).model == "si"
    assert wire.decode(TYPE, archive(), query={"properties": "virial"}).properties == ("virial",)


def test_failures_leave_the_others_alone() -> None:
    block = mixed()
    data = archive(n_atoms=block.counts, numbers=block.numbers, positions=block.positions, cell=None, pbc=None)
    request = wire.decode(TYPE, data)
    results = predict(request.structures, ["energy", "forces"])
    results.errors[1] = StructureError("too_dense", "far too dense", field="cell")
    found = load(wire.encode(request, results)[1])
    assert found["status"].tolist() == [0, 8, 0]
    assert found["error_index"].tolist() == [1]
    assert found["error_code"].tolist() == ["too_dense"]
    assert found["error_message"].tolist() == ["far too dense"]
    assert np.isnan(found["energy"]).tolist() == [False, True, False]
    assert found["pbc"].shape == (3, 3)


BOMB = b"\0" * 50_000_000


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        pytest.param(b"", "bad_npz", "not an npz", id="nothing"),
        pytest.param(b"PK\x03\x04", "bad_npz", "not an npz", id="four bytes"),
        pytest.param(archive()[:-30], "bad_npz", "not an npz", id="cut short"),
        pytest.param(zipped(), "missing_field", "'numbers'", id="empty archive"),
        pytest.param(archive(numbers=None), "missing_field", "'numbers'", id="no numbers"),
        pytest.param(archive(positions=None), "missing_field", "'positions'", id="no positions"),
        pytest.param(archive(coords=np.zeros(3)), "unknown_field", "did you mean 'positions'", id="unknown"),
        pytest.param(zipped(("../numbers.npy", b"")), "unknown_field", "numbers", id="a path"),
        pytest.param(zipped(*[("numbers.npy", b"")] * 50), "bad_npz", "50 members", id="many members"),
        pytest.param(zipped(*[("pbc.npy", npy(True))] * 2), "duplicate_key", "'pbc'", id="twice"),
        pytest.param(zipped(("pbc.npy", npy(True)), ("pbc", npy(True))), "duplicate_key", "'pbc'", id="two spellings"),
        pytest.param(zipped(("pbc.npy", b"abc")), "bad_npz", "pbc is not an array", id="no array"),
        pytest.param(
            zipped(("pbc.npy", npy(np.array([{}]), allow_pickle=True))), "bad_npz", "numbers or text", id="pickle"
        ),
        pytest.param(archive(pbc=np.zeros(1, "f4,f4")), "bad_npz", "numbers or text", id="records"),
        pytest.param(archive(positions=np.zeros((2, 3), complex)), "bad_npz", "numbers or text", id="complex"),
        pytest.param(archive(positions=np.zeros((2, 3), "M8[s]")), "bad_npz", "numbers or text", id="dates"),
        pytest.param(
            zipped(("pbc.npy", b"\x93NUMPY\x01\x00\xff\xff{}")), "bad_npz", "header of pbc", id="header too long"
        ),
        pytest.param(zipped(("pbc.npy", header("__import__('os')"))), "bad_npz", "pbc", id="code for a header"),
        pytest.param(zipped(("pbc.npy", header("(" * 3000))), "bad_npz", "pbc", id="brackets for a header"),
        pytest.param(zipped(("pbc.npy", header("-" * 4000 + "1"))), "bad_npz", "pbc", id="signs for a header"),
        pytest.param(
            zipped(("pbc.npy", header("{'descr': '|b1', 'fortran_order': False, 'shape': (9999999999,)}"))), "bad_npz",
            "0 bytes of data", id="announcement",
        ),
        pytest.param(
            zipped(("pbc.npy", header("{'descr': '|b1', 'fortran_order': False, 'shape': (-1,)}"))), "bad_npz", "pbc",
            id="negative shape",
        ),
        pytest.param(
            zipped(("pbc.npy", header("{'descr': '<f8', 'fortran_order': False, 'shape': (0, 9, 9, 9)}"))), "bad_npz",
            "pbc", id="four dimensions",
        ),
        pytest.param(archive(positions=np.zeros(6)), "bad_shape", "(6,); wanted (n, 3)", id="flat"),
        pytest.param(archive(positions=np.zeros((3, 2))), "bad_shape", "(3, 2); wanted (2, 3)", id="3x2"),
        pytest.param(archive(positions=np.zeros((3, 3))), "bad_shape", "9 entries; wanted 6", id="three rows"),
        pytest.param(archive(positions=np.zeros((2, 3), bool)), "bad_value", "bool", id="bool positions"),
        pytest.param(archive(positions=np.zeros((2, 3), "U1")), "bad_value", "wanted numbers", id="text positions"),
        pytest.param(archive(numbers=np.array([14.0, 14.0])), "bad_value", "whole numbers", id="real numbers"),
        pytest.param(archive(numbers=np.array([14, 300])), "bad_value", "entry 2 is 300", id="big number"),
        pytest.param(archive(numbers=np.array([14, -1])), "bad_value", "entry 2 is -1", id="negative number"),
        pytest.param(archive(numbers=np.array(["Si", "Si"])), "bad_value", "whole numbers", id="symbols"),
        pytest.param(archive(numbers=np.array([[14, 14]])), "bad_shape", "one dimension", id="numbers in a row"),
        pytest.param(archive(n_atoms=np.array([-2])), "bad_value", "entry 1 is -2", id="negative count"),
        pytest.param(archive(n_atoms=np.array([2, 1])), "bad_shape", "announces 3", id="count"),
        pytest.param(archive(n_atoms=np.array([2**31 - 1] * 2)), "too_large", "atoms", id="huge count"),
        pytest.param(archive(n_atoms=np.array([2.0])), "bad_value", "whole", id="real count"),
        pytest.param(archive(pbc=np.full((1, 3), 2)), "bad_value", "wanted 0 to 1", id="flag 2"),
        pytest.param(archive(pbc=np.ones((2, 3), bool)), "bad_shape", "pbc has 6", id="flags"),
        pytest.param(archive(cell=np.ones((3, 2))), "bad_shape", "cell has 6", id="cell"),
        pytest.param(archive(temperature=np.ones(2)), "bad_shape", "temperature has 2", id="temperature"),
        pytest.param(archive(model=np.array([1])), "bad_value", "wanted text", id="model a number"),
        pytest.param(archive(model=np.array(["a", "b"])), "bad_value", "wanted one", id="two models"),
        pytest.param(archive(model=np.array([b"\xff"])), "bad_value", "UTF-8", id="model not UTF-8"),
        pytest.param(archive(properties=np.array(["force"])), "unknown_property", "'forces'", id="property"),
        pytest.param(
            zipped(("pbc.npy", npy(True)), compression=zipfile.ZIP_BZIP2), "bad_npz", "unusual", id="bzip2"
        ),
    ],
)  # fmt: skip
def test_bad_archives(data: bytes, code: str, words: str) -> None:
    error = refusal(data)
    assert error.code == code, error.detail
    assert words in error.detail


def test_bombs_are_not_unpacked() -> None:
    data = zipped(("positions.npy", BOMB), compression=zipfile.ZIP_DEFLATED)
    assert len(data) < 100_000
    error = refusal(data, limits=wire.Limits(max_body=1_000_000))
    assert (error.status, error.code) == (413, "body_too_large")


def test_a_huge_directory_is_not_read() -> None:
    # Entries of a directory that all mean the one member before it.
    entry = b"PK\x01\x02" + bytes(24) + (7).to_bytes(2, "little") + bytes(16) + b"pbc.npy"
    end = b"PK\x05\x06" + bytes(8) + (len(entry) * 50_000).to_bytes(4, "little") + bytes(6)
    data = entry * 50_000 + end
    with zipfile.ZipFile(io.BytesIO(data)) as readable:
        assert len(readable.infolist()) == 50_000
    tracemalloc.start()
    try:
        error = refusal(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (error.code, "50000 members" in error.detail) == ("bad_npz", True)
    assert peak < 1_000_000


def test_a_directory_that_lies_about_sizes() -> None:
    data = bytearray(zipped(("positions.npy", BOMB), compression=zipfile.ZIP_DEFLATED))
    size = len(BOMB).to_bytes(4, "little")
    while (at := data.find(size)) >= 0:
        data[at : at + 4] = (100).to_bytes(4, "little")
    assert refusal(bytes(data), limits=wire.Limits(max_body=1_000_000)).code == "bad_npz"


def test_limits() -> None:
    assert refusal(archive(), limits=wire.Limits(max_atoms=1)).code == "too_large"
    assert refusal(archive(), limits=wire.Limits(max_structures=0)).code == "too_many_structures"
