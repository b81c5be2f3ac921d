from __future__ import annotations

import subprocess
import sys
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings

from nepcore.errors import StructureError
from nepcore.structures import PROPERTIES, Predictions, Structures
from nepserve import wire
from nepserve.wire.msgpack_format import pack_request, unpack_result
from wire_samples import CELL, SILICON, blocks, mixed, predict, same, silicon

TYPE = "application/msgpack"


def body(**changes: Any) -> bytes:
    """A request of two silicon atoms as the documentation has it, with keys changed; None takes a key away."""
    message: dict[str, Any] = {
        "n_atoms": np.array([2], "<i4").tobytes(),
        "numbers": bytes([14, 14]),
        "positions": np.array(SILICON["positions"], "<f8").tobytes(),
        "cell": np.array(CELL, "<f8").tobytes(),
        "pbc": bytes([1, 1, 1]),
    }
    message.update(changes)
    return msgpack.packb({k: v for k, v in message.items() if v is not None})


def refusal(data: bytes, **options: Any) -> wire.WireError:
    with pytest.raises(wire.WireError) as caught:
        wire.decode(TYPE, data, **options)
    return caught.value


@given(blocks())
@settings(max_examples=60, deadline=None)
def test_request_round_trip(block: Structures) -> None:
    request = wire.decode(TYPE, pack_request(block, ["energy"], "m"))
    assert same(request.structures, block)
    assert (request.model, request.properties, request.single, request.errors) == ("m", ("energy",), False, {})


@given(blocks(min_size=1))
@settings(max_examples=60, deadline=None)
def test_answer_round_trip(block: Structures) -> None:
    request = wire.decode(TYPE, pack_request(block, PROPERTIES))
    wanted = predict(block)
    content_type, data = wire.encode(request, wanted)
    found = unpack_result(data, block.counts)
    assert content_type == TYPE
    assert found.stress_known.tolist() == wanted.stress_known.tolist()
    assert found.errors == {}
    for name in PROPERTIES:
        assert np.array_equal(found.values[name], wanted.values[name], equal_nan=True), name


def test_single_precision_goes_both_ways() -> None:
    block = mixed()
    data = pack_request(block, ["energy", "forces"], dtype="f4")
    request = wire.decode(TYPE, data)
    assert request.structures.positions.dtype == np.float64
    assert np.array_equal(request.structures.positions, block.positions.astype(np.float32))
    assert np.array_equal(request.structures.cells, block.cells)
    answer = wire.encode(request, predict(block, ["energy", "forces"]))[1]
    found = unpack_result(answer, block.counts)
    assert found["forces"].dtype == np.float32
    assert found["energy"].dtype == np.float64
    assert len(data) < len(pack_request(block, ["energy", "forces"]))


def test_the_documented_request_is_read() -> None:
    request = wire.decode(TYPE, body(model="si", properties=["forces"], temperature=np.array([300.0]).tobytes()))
    assert np.array_equal(request.structures.positions, SILICON["positions"])
    assert np.array_equal(request.structures.cells[0], CELL)
    assert request.structures.temperatures.tolist() == [300.0]
    assert request.pbc_assumed is None


@pytest.mark.parametrize("name", ["application/x-msgpack", "application/vnd.msgpack", "Application/MsgPack; v=1"])
def test_other_names_of_the_type(name: str) -> None:
    assert same(wire.decode(name, body()).structures, silicon())


def test_arrays_are_not_copied() -> None:
    positions = wire.decode(TYPE, body()).structures.positions
    assert not positions.flags.owndata
    assert not positions.flags.writeable


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"n_atoms": None}, id="no count"),
        pytest.param({"n_atoms": 2}, id="a number"),
        pytest.param({"n_atoms": None, "cell": CELL, "pbc": [True] * 3}, id="lists"),
        pytest.param({"n_atoms": 2, "positions": SILICON["positions"], "numbers": [14, 14]}, id="more lists"),
    ],
)
def test_one_structure_as_one_structure(changes: dict[str, Any]) -> None:
    request = wire.decode(TYPE, body(**changes))
    assert request.single
    assert same(request.structures, silicon())


def test_lists_in_place_of_bytes() -> None:
    block = mixed()
    message = {
        "n_atoms": block.counts.tolist(),
        "numbers": block.numbers.tolist(),
        "positions": block.positions.tolist(),
        "cell": block.cells.tolist(),
        "pbc": block.pbc.tolist(),
        "temperature": [None, None, 300],
    }
    request = wire.decode(TYPE, msgpack.packb(message))
    assert not request.single
    assert same(request.structures, block)


def test_periodicity_left_out_is_told() -> None:
    request = wire.decode(TYPE, body(pbc=None))
    assert request.structures.pbc.all()
    answer = msgpack.unpackb(wire.encode(request, predict(request.structures, ["energy"]))[1])
    assert answer["pbc"] == b"\1\1\1"
    request = wire.decode(TYPE, body(pbc=None, cell=None))
    assert not request.structures.pbc.any()
    assert "pbc" not in msgpack.unpackb(wire.encode(wire.decode(TYPE, body()), predict(silicon(), ["energy"]))[1])


def test_no_structures() -> None:
    request = wire.decode(TYPE, pack_request(Structures.empty(), ["energy", "stress"]))
    assert len(request.structures) == 0
    answer = wire.encode(request, predict(request.structures, ["energy", "stress"]))[1]
    assert len(unpack_result(answer, np.zeros(0, int))) == 0


TRUNCATED = np.array(SILICON["positions"], "<f8").tobytes()[:-1]


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        pytest.param({"positions": TRUNCATED}, "bad_shape", "47 bytes", id="torn array"),
        pytest.param({"positions": bytes(24)}, "bad_shape", "positions has 3 entries; wanted 6", id="one atom short"),
        pytest.param({"numbers": bytes([14])}, "bad_shape", "numbers has 1 entries; wanted 2", id="one number short"),
        pytest.param({"n_atoms": 3}, "bad_shape", "announces 3 atoms", id="single count"),
        pytest.param({"dtype": "f4"}, "bad_shape", "positions has 12 entries", id="other type than said"),
        pytest.param({"dtype": "f2"}, "bad_value", "'f8' or 'f4'", id="unknown type"),
        pytest.param({"dtype": 0}, "bad_value", "'f8' or 'f4'", id="type of another kind"),
        pytest.param({"cell": bytes(64)}, "bad_shape", "cell has 8 entries; wanted 9", id="cell"),
        pytest.param({"pbc": bytes(2)}, "bad_shape", "pbc has 2 entries; wanted 3", id="pbc"),
        pytest.param({"pbc": b"\0\1\2"}, "bad_value", "pbc of structure 1 has the entry 2", id="pbc value"),
        pytest.param({"temperature": bytes(16)}, "bad_shape", "temperature has 2 entries", id="temperature"),
        pytest.param({"n_atoms": np.array([-1], "<i4").tobytes()}, "bad_value", "must not be negative", id="negative"),
        pytest.param({"n_atoms": np.array([3, -1], "<i4").tobytes()}, "bad_value", "structure 2 is -1", id="balance"),
        pytest.param({"n_atoms": [2.5]}, "bad_value", "whole numbers", id="half an atom"),
        pytest.param({"n_atoms": "2"}, "bad_value", "n_atoms is the string '2'", id="count as text"),
        pytest.param({"n_atoms": [None]}, "bad_value", "not null", id="count null"),
        pytest.param({"numbers": None}, "missing_field", "numbers is missing", id="no numbers"),
        pytest.param({"positions": "x"}, "bad_value", "positions is the string", id="text"),
        pytest.param({"positions": [[0, 0, 0], [0, None, 0]]}, "bad_value", "y of atom 2 is null", id="null"),
        pytest.param({"positions": [0] * 6}, "bad_shape", "(2, 3)", id="flat list"),
        pytest.param({"numbers": [14, 300]}, "bad_value", "atom 2 is the number 300", id="big number"),
        pytest.param({"numbers": ["Si", "Si"]}, "bad_value", "atom 1 is the string 'Si'", id="symbols"),
        pytest.param({"coords": b""}, "unknown_field", "did you mean 'positions'", id="unknown key"),
        pytest.param({"properties": ["force"]}, "unknown_property", "did you mean 'forces'", id="unknown property"),
        pytest.param({"properties": b"forces"}, "bad_value", "list of names", id="properties as bytes"),
        pytest.param({"model": b"si"}, "bad_value", "model must be a string", id="model as bytes"),
        pytest.param({"pbc": msgpack.ExtType(3, b"\1\1\1")}, "bad_msgpack", "", id="extension"),
        pytest.param({"pbc": msgpack.Timestamp(0)}, "bad_msgpack", "", id="timestamp"),
        pytest.param({"model": {str(i): i for i in range(65)}}, "bad_msgpack", "", id="large map"),
    ],
)  # fmt: skip
def test_bad_requests(changes: dict[str, Any], code: str, words: str) -> None:
    error = refusal(body(**changes))
    assert error.code == code, error.detail
    assert words in error.detail


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc0", id="nil"),
        pytest.param(b"\x90", id="list"),
        pytest.param(b"{}", id="json"),
        pytest.param(body()[:-1], id="cut short"),
        pytest.param(body() + b"\0", id="trailing byte"),
        pytest.param(b"\xc1", id="reserved byte"),
        pytest.param(b"\x81\x01\x02", id="number as key"),
        pytest.param(b"\x81\xa1\xff\x02", id="key not UTF-8"),
        pytest.param(b"\x91" * 5000 + b"\x90", id="nesting"),
        pytest.param(b"\x81\xa9positions" + b"\x91" * 5000 + b"\x90", id="nesting inside"),
        pytest.param(b"\x81\xa9positions" + b"\x91" * 900 + b"\x90", id="nesting below the parser's limit"),
        pytest.param(b"\xdd\xff\xff\xff\xff" * 400, id="nested announcements of huge lists"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="announcement of huge bytes"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="announcement of a huge map"),
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(data: bytes) -> None:
    assert refusal(data).status in {400, 422}


def test_cell_and_flags_of_deep_lists_are_refused() -> None:
    for name in ("cell", "pbc", "numbers", "n_atoms", "temperature"):
        nested: Any = []
        for _ in range(900):
            nested = [nested]
        assert refusal(body(**{name: nested})).code in {"bad_shape", "bad_value"}


def test_lists_up_to_the_limits_are_taken() -> None:
    B, N = 3, 6
    lists = {
        "n_atoms": [2] * B, "numbers": [14] * N, "positions": [[0.0, 0.0, 1.5 * i] for i in range(N)],
        "cell": [[[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 9.0]]] * B, "pbc": [[True] * 3] * B,
        "temperature": [300.0] * B, "properties": list(PROPERTIES),
    }  # fmt: skip
    request = wire.decode(TYPE, msgpack.packb(lists), limits=wire.Limits(max_atoms=N, max_structures=B))
    assert request.structures.n_atoms == N


@pytest.mark.parametrize("inner", [b"\x90", b"\x91\x90", b"\x01"], ids=["empty", "nested", "numbers"])
def test_small_entries_in_great_number_are_refused(inner: bytes) -> None:
    many = 100_000 * 64
    row = b"\xdd" + (100_000).to_bytes(4, "big") + inner * 100_000
    data = b"\x81\xa9positions\xdc" + (64).to_bytes(2, "big") + row * 64
    assert len(data) >= many
    tracemalloc.start()
    try:
        error = refusal(data, limits=wire.Limits(max_atoms=100_000, max_structures=1000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (error.code, "entries" in error.detail) == ("bad_msgpack", True)
    assert peak < 30 * many


def test_duplicate_keys_are_refused() -> None:
    error = refusal(b"\x82\xa5model\xa1a\xa5model\xa1b")
    assert (error.status, error.code, error.extra["field"]) == (400, "duplicate_key", "model")


def test_announced_size_counts_before_arrays_do() -> None:
    huge = np.array([2**31 - 1] * 3, "<i4").tobytes()
    error = refusal(body(n_atoms=huge))
    assert (error.status, error.code) == (413, "too_large")
    assert error.extra["max_atoms"] == wire.Limits().max_atoms


def test_limits() -> None:
    block = mixed()
    small = wire.Limits(max_structures=2)
    assert refusal(pack_request(block), limits=small).code == "too_many_structures"
    assert refusal(pack_request(block), limits=wire.Limits(max_atoms=5)).code == "too_large"
    assert refusal(body(n_atoms=None), limits=wire.Limits(max_atoms=1)).code == "too_large"
    error = refusal(pack_request(block), limits=wire.Limits(max_body=10))
    assert (error.status, error.code, error.extra["max_bytes"]) == (413, "body_too_large", 10)


def test_failures_leave_the_others_alone() -> None:
    block = mixed()
    request = wire.decode(TYPE, pack_request(block, ["energy", "forces", "stress"]))
    results = predict(block, ["energy", "forces", "stress"])
    results.errors[1] = StructureError("too_dense", "cell: far too small", field="cell", atoms=(0, 2))
    answer = wire.encode(request, results, None, "m")[1]
    raw = msgpack.unpackb(answer)
    assert raw["model"] == "m"
    assert list(raw["status"]) == [0, 8, 0]
    assert raw["errors"] == [
        {"index": 1, "code": "too_dense", "message": "cell: far too small", "field": "cell", "atoms": [0, 2]}
    ]
    assert np.frombuffer(raw["unavailable"]["stress"], "<i4").tolist() == [2]
    found = unpack_result(answer, block.counts)
    assert (found.errors[1].code, found.errors[1].atoms) == ("too_dense", (0, 2))
    assert np.isnan(found.values["forces"][2:5]).all()
    assert np.isnan(found.values["energy"][1])
    assert found.view(0)["energy"] == 0.25
    assert np.array_equal(found.view(2)["forces"], results.values["forces"][5:])
    assert found.view(2).unavailable == ("stress",)


def test_stress_that_nobody_has_is_left_out() -> None:
    block = mixed().slice(1, 3)
    request = wire.decode(TYPE, pack_request(block, ["stress"]))
    answer = wire.encode(request, predict(block, ["stress"]))[1]
    assert "stress" not in msgpack.unpackb(answer)
    found = unpack_result(answer, block.counts)
    assert not found.stress_known.any()
    assert np.isnan(found.values["stress"]).all()


def answer() -> dict[str, Any]:
    request = wire.decode(TYPE, pack_request(mixed(), ["energy", "forces", "descriptors"]))
    return msgpack.unpackb(wire.encode(request, predict(mixed(), ["energy", "forces", "descriptors"]))[1])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"forces": bytes(8)}, id="short forces"),
        pytest.param({"energy": bytes(8)}, id="short energy"),
        pytest.param({"energy": "x"}, id="text for energy"),
        pytest.param({"n_atoms": np.array([2, 3, 2], "<i4").tobytes()}, id="other structures"),
        pytest.param({"n_atoms": None}, id="no counts"),
        pytest.param({"status": b"\0\1\0"}, id="failure without a reason"),
        pytest.param({"status": b"\0"}, id="short status"),
        pytest.param({"errors": [{"index": 0, "code": "x", "message": "y"}]}, id="reason without a failure"),
        pytest.param({"errors": [3]}, id="a reason that is a number"),
        pytest.param({"errors": [{"index": 7}]}, id="a reason without words"),
        pytest.param({"dtype": "f2"}, id="unknown type"),
        pytest.param({"dtype": []}, id="a list as type"),
        pytest.param({"descriptor_length": None}, id="descriptors of unknown length"),
        pytest.param({"descriptor_length": 0}, id="descriptors of no length"),
        pytest.param({"unavailable": {"stress": np.array([9], "<i4").tobytes()}}, id="index out of range"),
        pytest.param({"unavailable": {"stress": np.array([-1], "<i4").tobytes()}}, id="negative index"),
        pytest.param({"unavailable": {"forces": np.array([3], "<i4").tobytes()}}, id="index of another property"),
        pytest.param({"unavailable": 3}, id="unavailable as a number"),
    ],
)
def test_a_client_takes_no_partial_answer(changes: dict[str, Any]) -> None:
    message = {k: v for k, v in {**answer(), **changes}.items() if v is not None}
    with pytest.raises(wire.WireError) as caught:
        unpack_result(msgpack.packb(message), mixed().counts)
    assert caught.value.code == "bad_answer"


@pytest.mark.parametrize("data", [b"", b"{}", b"\x90", b"\xc0", b"\x80", b"<html>", b"\x81\x01\x02"])
def test_a_client_takes_no_other_answer(data: bytes) -> None:
    with pytest.raises(wire.WireError) as caught:
        unpack_result(data, mixed().counts)
    assert caught.value.code == "bad_answer"


def test_results_belong_to_the_caller() -> None:
    found = unpack_result(msgpack.packb(answer()), mixed().counts)
    found.values["forces"][:] = 1.0
    assert isinstance(found, Predictions)


def test_packing_a_batch_as_single_is_an_error() -> None:
    with pytest.raises(ValueError, match="one structure"):
        pack_request(mixed(), single=True)
    assert wire.decode(TYPE, pack_request(silicon(), single=True)).single


def test_a_client_needs_neither_pydantic_nor_orjson() -> None:
    script = (
        "import sys\n"
        "from nepserve.wire.msgpack_format import pack_request, unpack_result\n"
        "from nepcore.structures import Structures\n"
        "from nepserve import wire\n"
        "wire.decode('application/msgpack', pack_request(Structures.empty()))\n"
        "print([m for m in ('pydantic', 'orjson', 'fastapi', 'torch', 'ase') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
