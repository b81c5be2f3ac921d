from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings

from locations import CASES, needs_shared
from nepcore.errors import StructureError
from nepcore.files import xyz
from nepserve import wire
from wire_samples import CELL, SILICON, blocks, mixed, predict, same

if TYPE_CHECKING:
    from nepcore.structures import Structures

TYPE = "chemical/x-extxyz"
SI2 = b"""2
Lattice="0 2.72 2.72 2.72 0 2.72 2.72 2.72 0" Properties=species:S:1:pos:R:3 config_type=bulk pbc="T T T"
Si 0 0 0
Si 1.36 1.36 1.36
"""
H = b"1\n\nH 0.5 0 -0.5\n"


def refusal(data: bytes, **options: Any) -> wire.WireError:
    with pytest.raises(wire.WireError) as caught:
        wire.decode(TYPE, data, **options)
    return caught.value


@given(blocks())
@settings(max_examples=40, deadline=None)
def test_round_trip(block: Structures) -> None:
    request = wire.decode(TYPE, xyz.dumps(block), query={"properties": "energy,forces,stress,virials"})
    assert same(request.structures, block)
    wanted = predict(block, request.properties)
    found = xyz.parse(wire.encode(request, wanted)[1])
    assert same(found.structures, block)
    assert np.array_equal(found.energy, wanted.values["energy"])
    assert np.array_equal(found.forces, wanted.values["forces"])


@pytest.mark.parametrize("name", ["chemical/x-extxyz", "chemical/x-xyz", "text/plain", "text/plain; charset=UTF-8"])
def test_names_of_the_type(name: str) -> None:
    request = wire.decode(name, SI2, query={"model": "si", "properties": "energy"})
    assert (request.model, request.properties, request.single) == ("si", ("energy",), True)
    assert np.array_equal(request.structures.cells[0], CELL)


def test_other_items_of_the_comment_line_come_back() -> None:
    request = wire.decode(TYPE, SI2 + H, query={"properties": "energy,forces"})
    content_type, data = wire.encode(request, predict(request.structures, request.properties), "text/plain")
    assert content_type == "text/plain"
    lines = data.decode().splitlines()
    assert "config_type=bulk" in lines[1]
    assert 'pbc="T T T"' in lines[1]
    assert "energy=0.25" in lines[1]
    assert 'pbc="F F F"' in lines[5]
    assert "stress" not in data.decode()


def test_a_failed_frame_has_its_error_and_no_results() -> None:
    request = wire.decode(TYPE, SI2 + H)
    results = predict(request.structures, request.properties)
    results.errors[0] = StructureError("too_dense", "far too dense", field="cell")
    lines = wire.encode(request, results)[1].decode().splitlines()
    assert 'error="far too dense"' in lines[1]
    assert "energy" not in lines[1]
    assert "forces" not in lines[1]
    assert "energy=1.25" in lines[5]


def test_one_frame_is_one_structure() -> None:
    request = wire.decode(TYPE, H, query={"properties": "energy"})
    answer = json.loads(wire.encode(request, predict(request.structures, ["energy"]), "application/json")[1])
    assert answer == {"energy": 0.25, "pbc": [False] * 3}
    results = predict(request.structures, ["energy"])
    results.errors[0] = StructureError("unknown_element", "atom 1: H", field="numbers", atoms=(0,))
    with pytest.raises(wire.WireError, match="atom 1: H"):
        wire.encode(request, results)


def test_frames_answered_as_json() -> None:
    request = wire.decode(TYPE, SI2 + H, query={"properties": "energy"})
    answer = json.loads(wire.encode(request, predict(request.structures, ["energy"]), "application/json")[1])
    assert [r["energy"] for r in answer["results"]] == [0.25, 1.25]
    assert [r["pbc"] for r in answer["results"]] == [[True] * 3, [False] * 3]


def test_json_answered_as_frames() -> None:
    body = {"structures": [SILICON, {"numbers": [1]}, {"numbers": [1], "positions": [[0, 0, 0]]}]}
    request = wire.decode("application/json", json.dumps(body).encode())
    data = wire.encode(request, predict(request.structures, request.properties), TYPE)[1]
    frames = xyz.parse(data)
    assert frames.structures.counts.tolist() == [2, 0, 1]
    assert "positions is missing" in data.decode()


@pytest.mark.parametrize(
    ("data", "frame", "words"),
    [
        pytest.param(SI2 + H.replace(b"0.5", b"nan"), 1, "nan", id="nan"),
        pytest.param(SI2 + H.replace(b"0.5", b"1.2.5"), 1, "1.2.5", id="two points"),
        pytest.param(SI2 + H.replace(b"H ", b"h "), 1, "h", id="lower case"),
        pytest.param(SI2 + b"3\n\nH 0 0 0\n", 1, "3", id="short frame"),
        pytest.param(b"x\n", 0, "x", id="no count"),
    ],
)
def test_a_file_is_taken_whole_or_not_at_all(data: bytes, frame: int, words: str) -> None:
    error = refusal(data)
    assert (error.status, error.code) == (422, "bad_xyz")
    assert error.extra["structure"] == frame
    assert error.extra["line"] >= 1
    assert f"frame {frame + 1}" in error.detail
    assert words in error.detail


def test_query_string_and_limits() -> None:
    assert refusal(H, query={"propertys": "energy"}).code == "unknown_field"
    assert refusal(H, query={"properties": "force"}).code == "unknown_property"
    assert refusal(SI2 + H, limits=wire.Limits(max_structures=1)).code == "too_many_structures"
    assert refusal(SI2 + H, limits=wire.Limits(max_atoms=2)).code == "too_large"
    # Whatever comes after is not looked at.
    assert refusal(SI2 + H.replace(b"0.5", b"x"), limits=wire.Limits(max_structures=1)).extra["max_structures"] == 1
    assert refusal(SI2, limits=wire.Limits(max_body=20)).code == "body_too_large"


def test_results_follow_the_answer_of_other_formats() -> None:
    request = wire.decode(TYPE, xyz.dumps(mixed()))
    assert request.structures.temperatures[2] == 300.0
    assert wire.encode(request, predict(mixed(), request.properties), "application/msgpack")[0] == "application/msgpack"


@needs_shared
@pytest.mark.parametrize("name", ["case-018/no-pbc-key.extxyz", "case-026/three-atoms.extxyz"])
def test_reported_files_are_read(name: str) -> None:
    request = wire.decode(TYPE, (CASES / name).read_bytes())
    assert len(request.structures) == 1
    assert request.structures.pbc.all() == ("018" in name)


@needs_shared
@pytest.mark.parametrize("name", ["nan-position.extxyz", "inf-lattice.extxyz"])
def test_reported_files_with_numbers_that_are_not_finite_are_refused(name: str) -> None:
    assert refusal((CASES / "case-025" / name).read_bytes()).code == "bad_xyz"
