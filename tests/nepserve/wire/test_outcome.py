from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest

from nepcore.errors import StructureError
from nepcore.structures import PER_ATOM, PROPERTIES, Predictions
from nepserve import wire
from nepserve.wire.msgpack_format import pack_request, unpack_result
from wire_samples import SILICON, mixed, predict

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMATS = ["application/json", "application/msgpack", "application/x-npz", "chemical/x-extxyz"]


def request(properties: Sequence[str] = PROPERTIES) -> wire.Request:
    return wire.decode("application/msgpack", pack_request(mixed(), properties))


def as_json(asked: wire.Request, results: Predictions) -> list[dict[str, Any]]:
    data = wire.encode(asked, results, "application/json")[1]
    return json.loads(data, parse_constant=pytest.fail)["results"]


def spoil(name: str, row: int, value: float) -> Predictions:
    results = predict(mixed())
    array = results.values[name].copy()
    array.reshape(len(array), -1)[row, -1] = value
    results.values[name] = array
    return results


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", sorted(PER_ATOM))
def test_an_atom_without_a_finite_result_fails_its_structure(name: str, value: float) -> None:
    results = as_json(request(), spoil(name, 3, value))
    error = results[1]["error"]
    assert (error["code"], error["field"], error["atoms"]) == ("non_finite_result", name, [1])
    assert "atom 2" in error["message"]
    assert results[0]["energy"] == 0.25
    assert results[2]["forces"] == [[-1.0, 0.5, -2000.0]]


@pytest.mark.parametrize("name", ["energy", "stress", "virial"])
def test_a_structure_without_a_finite_result_fails(name: str) -> None:
    results = as_json(request(), spoil(name, 0, np.nan))
    assert results[0]["error"]["code"] == "non_finite_result"
    assert name in results[0]["error"]["message"]
    assert "error" not in results[1]


def test_atoms_are_named_before_sums() -> None:
    results = spoil("forces", 5, np.inf)
    results.values["energy"] = np.array([0.0, 0.0, np.nan])
    assert as_json(request(), results)[2]["error"]["atoms"] == [0]


def test_a_sum_that_overflows_is_no_fault() -> None:
    results = predict(mixed())
    results.values["forces"] = np.full((6, 3), 1e308)
    assert all("error" not in result for result in as_json(request(), results))


def test_many_bad_atoms_are_counted() -> None:
    results = predict(mixed(), ["forces"])
    results.values["forces"] = np.full((6, 3), np.nan)
    errors = [result["error"] for result in as_json(request(["forces"]), results)]
    assert "of atom 1 and of 2 more" in errors[1]["message"]
    assert [error["atoms"] for error in errors] == [[0, 1], [0, 1, 2], [0]]


@pytest.mark.parametrize("accept", FORMATS)
def test_no_answer_holds_a_number_that_is_not_finite_without_saying_so(accept: str) -> None:
    data = wire.encode(request(), spoil("forces", 3, np.nan), accept)[1]
    if accept == "application/msgpack":
        found = unpack_result(data, mixed().counts)
        assert found.errors[1].atoms == (1,)
        assert np.isnan(found.values["energy"][1])
        assert msgpack.unpackb(data)["status"] == b"\0\x0b\0"
    elif accept == "application/x-npz":
        assert b"non_finite_result".decode().encode("utf-32-le") in data
    else:
        assert b"nan" not in data.lower()
        assert b"not finite" in data


@pytest.mark.parametrize("accept", FORMATS)
def test_a_single_structure_without_a_finite_result(accept: str) -> None:
    asked = wire.decode("application/json", json.dumps({"structure": SILICON}).encode())
    results = predict(asked.structures, asked.properties)
    results.values["forces"] = np.full((2, 3), np.nan)
    with pytest.raises(wire.WireError) as caught:
        wire.encode(asked, results, accept)
    assert (caught.value.status, caught.value.code) == (422, "non_finite_result")
    assert caught.value.extra["atoms"] == [0, 1]


def test_what_no_backend_gave_is_unavailable() -> None:
    asked = request(["energy", "descriptors"])
    results = as_json(asked, predict(mixed(), ["energy"]))
    assert [result["unavailable"] for result in results] == [["descriptors"]] * 3
    raw = msgpack.unpackb(wire.encode(asked, predict(mixed(), ["energy"]))[1])
    assert np.frombuffer(raw["unavailable"]["descriptors"], "<i4").tolist() == [0, 1, 2]
    assert "descriptors" not in raw


def test_properties_come_in_the_order_asked_and_no_others() -> None:
    for result in as_json(request(["forces", "energy"]), predict(mixed())):
        assert list(result) == ["forces", "energy"]


def test_free_energy_is_the_energy() -> None:
    results = as_json(request(["free_energy"]), predict(mixed(), ["energy"]))
    assert [result["free_energy"] for result in results] == [0.25, 1.25, 2.25]


def test_results_are_not_written_to() -> None:
    results = spoil("forces", 3, np.nan)
    results.errors[0] = StructureError("too_dense", "x")
    before = {name: array.copy() for name, array in results.values.items()}
    for accept in FORMATS:
        wire.encode(request(), results, accept)
    assert list(results.errors) == [0]
    assert all(np.array_equal(array, before[name], equal_nan=True) for name, array in results.values.items())


def test_the_requests_own_faults_count_most() -> None:
    asked = wire.decode("application/json", json.dumps({"structures": [SILICON, {"numbers": [1]}]}).encode())
    results = predict(asked.structures, asked.properties)
    results.errors[1] = StructureError("empty", "a structure needs at least one atom")
    assert as_json(asked, results)[1]["error"]["code"] == "missing_field"


def test_results_of_other_structures_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="do not belong"):
        wire.encode(request(), predict(mixed().slice(0, 2)))


@pytest.mark.parametrize("accept", FORMATS)
def test_codes_without_a_number_of_their_own(accept: str) -> None:
    results = predict(mixed())
    results.errors[2] = StructureError("something_new", 'odd "words"\nin lines')
    data = wire.encode(request(), results, accept)[1]
    if accept == "application/msgpack":
        assert msgpack.unpackb(data)["status"] == b"\0\0\xff"


def test_errors_survive_pickling() -> None:
    error = wire.WireError.from_structure(StructureError("non_finite", "x", field="cell", atoms=(3,)), 2)
    copy = pickle.loads(pickle.dumps(error))
    assert copy.problem("r") == error.problem("r")
    assert copy.problem("r")["structure"] == 2
    assert "structure 3: x" in copy.detail
