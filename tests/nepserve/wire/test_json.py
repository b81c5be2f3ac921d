from __future__ import annotations

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from nepcore.errors import StructureError
from nepcore.structures import DEFAULT_PROPERTIES, PROPERTIES, Structures
from nepserve import wire
from nepserve.wire import json_format, json_text
from wire_samples import CELL, SILICON, WATER, blocks, mixed, predict, same, silicon

TYPE = "application/json"
SI2 = '{"structure": {"numbers": [14, 14], "positions": [[0, 0, 0], [1.36, %s, 1.36]]}}'


def decode(body: Any, **options: Any) -> wire.Request:
    if not isinstance(body, (str, bytes)):
        body = json.dumps(body)
    return wire.decode(TYPE, body.encode() if isinstance(body, str) else body, **options)


def refusal(body: Any, **options: Any) -> wire.WireError:
    with pytest.raises(wire.WireError) as caught:
        decode(body, **options)
    return caught.value


def fault(structure: Any) -> StructureError:
    """The fault of a single structure, which leaves the request itself in order."""
    request = decode({"structure": structure})
    assert list(request.errors) == [0]
    assert request.single
    return request.errors[0]


def faults(request: wire.Request) -> dict[int, str]:
    """Codes of all structures that will not be evaluated, those of admission included."""
    found = {**request.structures.problems(), **request.errors}
    return {i: found[i].code for i in sorted(found)}


def answer(request: wire.Request, *options: Any, **results: Any) -> Any:
    content_type, data = wire.encode(request, predict(request.structures, request.properties, **results), *options)
    assert content_type == TYPE
    return json.loads(data, parse_constant=pytest.fail)


def as_objects(block: Structures) -> list[dict[str, Any]]:
    objects = []
    for s in block:
        item: dict[str, Any] = {
            "numbers": s.numbers.tolist(), "positions": s.positions.tolist(), "cell": s.cell.tolist(),
            "pbc": s.pbc.tolist(),
        }  # fmt: skip
        if s.temperature is not None:
            item["temperature"] = s.temperature
        objects.append(item)
    return objects


@given(blocks())
@settings(max_examples=60, deadline=None)
def test_round_trip(block: Structures) -> None:
    request = decode({"structures": as_objects(block), "properties": list(PROPERTIES)})
    assert same(request.structures, block)
    wanted = predict(block)
    results = json.loads(wire.encode(request, wanted)[1])["results"]
    assert len(results) == len(block)
    for i, result in enumerate(results):
        view = wanted.view(i)
        assert set(result) - {"unavailable"} == set(view.values)
        assert tuple(result.get("unavailable", ())) == view.unavailable
        for name, value in view.values.items():
            assert np.array_equal(result[name], value), name


def test_single_structure() -> None:
    request = decode({"model": "si", "structure": SILICON, "properties": ["energy", "stress", "energy"]})
    assert same(request.structures, silicon())
    assert (request.model, request.properties, request.single) == ("si", ("energy", "stress"), True)
    assert answer(request) == {"energy": 0.25, "stress": [0.0, 0.125, 0.25, 0.375, 0.5, 0.625]}
    assert answer(request, None, "si")["model"] == "si"


def test_several_structures() -> None:
    request = decode({"structures": [SILICON, WATER]})
    assert (request.model, request.properties, request.single) == (None, DEFAULT_PROPERTIES, False)
    first, second = answer(request)["results"]
    assert set(first) == {"energy", "forces", "stress"}
    assert set(second) == {"energy", "forces", "unavailable", "pbc"}
    assert second["unavailable"] == ["stress"]
    assert second["forces"] == (-2 * np.array(WATER["positions"])).tolist()


def test_symbols_and_numbers_are_the_same() -> None:
    symbols = {**SILICON, "symbols": ["Si", "Si"]}
    del symbols["numbers"]
    assert same(decode({"structure": symbols}).structures, silicon())
    assert same(decode({"structure": {**SILICON, "numbers": [14.0, 14]}}).structures, silicon())


def test_no_structures() -> None:
    request = decode({"structures": []})
    assert answer(request) == {"results": []}


def test_single_precision_is_written_short() -> None:
    request = decode({"structure": {"numbers": [1], "positions": [[0.1, 0.2, 0.3]]}, "properties": ["forces"]})
    assert answer(request, dtype=np.float32)["forces"] == [[-0.2, -0.4, -0.6]]


@pytest.mark.parametrize(
    ("changes", "pbc"),
    [
        pytest.param({"cell": CELL}, True, id="cell"),
        pytest.param({"cell": CELL, "pbc": None}, True, id="cell and null"),
        pytest.param({}, False, id="no cell"),
        pytest.param({"cell": [[0] * 3] * 3}, False, id="zero cell"),
        pytest.param({"cell": None}, False, id="cell null"),
    ],
)
def test_periodicity_left_out_is_told(changes: dict[str, Any], pbc: bool) -> None:
    request = decode({"structure": {"numbers": [14], "positions": [[0, 0, 0]], **changes}})
    assert request.structures.pbc.tolist() == [[pbc] * 3]
    assert answer(request)["pbc"] == [pbc] * 3


@pytest.mark.parametrize("pbc", [True, [True] * 3, [1, 1, 1], 1])
def test_periodicity_given_is_not_repeated(pbc: Any) -> None:
    request = decode({"structure": {**SILICON, "pbc": pbc}})
    assert same(request.structures, silicon())
    assert "pbc" not in answer(request)


def test_three_edges_make_an_orthorhombic_cell() -> None:
    request = decode({"structure": {**SILICON, "cell": [3, 4, 5.5]}})
    assert request.structures.cells[0].tolist() == np.diag([3, 4, 5.5]).tolist()


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_not_finite_are_the_fault_of_their_structure(token: str) -> None:
    request = decode(SI2 % token)
    error = request.structures.problems()[0]
    assert (error.code, error.field, error.atoms) == ("non_finite", "positions", (1,))
    assert "y of atom 2" in error.reason
    good = json.dumps(SILICON)
    bad = SI2 % token
    several = decode(f'{{"structures": [{good}, {bad[14:-1]}, {good}]}}')
    assert faults(several) == {1: "non_finite"}


@pytest.mark.parametrize(
    ("token", "code", "words"),
    [
        pytest.param("null", "bad_value", "positions: y of atom 2 is null", id="null"),
        pytest.param('"1.5"', "bad_value", "positions: y of atom 2 is the string '1.5'", id="string"),
        pytest.param("true", "bad_value", "positions: y of atom 2 is true", id="true"),
        pytest.param("{}", "bad_value", "positions: y of atom 2 is an object", id="object"),
        pytest.param("[1]", "bad_value", "positions: y of atom 2 is a list", id="list"),
        pytest.param("7" * 400, "out_of_range", "positions: y of atom 2", id="400 digits"),
    ],
)
def test_coordinates_that_are_no_numbers(token: str, code: str, words: str) -> None:
    request = decode(SI2 % token)
    assert (request.errors[0].code, request.errors[0].field, request.errors[0].atoms) == (code, "positions", (1,))
    assert words in request.errors[0].reason
    with pytest.raises(wire.WireError) as caught:
        request.refuse_single()
    assert caught.value.status == 422
    assert caught.value.extra["atoms"] == [1]


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        pytest.param([0.0] * 9, "flat list of 9 numbers; wanted shape (3, 3)", id="flat"),
        pytest.param([[0, 1]] * 3, "shape (3, 2); wanted shape (n, 3)", id="3x2"),
        pytest.param([[0, 1, 2]] * 2, "shape (2, 3); wanted (3, 3)", id="two rows for three atoms"),
        pytest.param([[0, 1, 2, 3]] * 3, "shape (3, 4); wanted shape (n, 3)", id="3x4"),
        pytest.param([[0, 1, 2], [0, 1], [0, 1, 2]], "row 2 has 2 entries; wanted shape (n, 3)", id="ragged"),
        pytest.param([[0, 1, 2], 3, [0, 1, 2]], "row 2 is the number 3; wanted shape (n, 3)", id="number for a row"),
        pytest.param([[[0, 1, 2]]] * 3, "wanted shape (n, 3)", id="three deep"),
        pytest.param([], "shape (0, 3); wanted (3, 3)", id="none"),
        pytest.param({}, "an object of 0 keys; wanted shape (n, 3)", id="object"),
        pytest.param("0 0 0", "wanted shape (n, 3)", id="text"),
    ],
)
def test_wrong_shapes_name_the_one_wanted(positions: Any, words: str) -> None:
    error = fault({"numbers": [14, 14, 14], "positions": positions})
    assert (error.code, error.field) == ("bad_shape", "positions")
    assert words in error.reason


@pytest.mark.parametrize(
    ("species", "words"),
    [
        pytest.param({"symbols": ["si", "si"]}, "atom 1 is the string 'si'", id="lower case"),
        pytest.param({"symbols": ["SI", "SI"]}, "did you mean 'Si'?", id="upper case"),
        pytest.param({"symbols": ["Si1", "Si2"]}, "did you mean 'Si'?", id="labels"),
        pytest.param({"symbols": ["14", "14"]}, 'atomic numbers go under "numbers", without quotes', id="quoted"),
        pytest.param({"symbols": [" Si", "Si "]}, "did you mean 'Si'?", id="blanks"),
        pytest.param({"symbols": ["", "Si"]}, "atom 1 is the string ''", id="empty"),
        pytest.param({"symbols": ["X", "Si"]}, "atom 1 is the string 'X'", id="placeholder"),
        pytest.param({"symbols": ["Si", "Am"]}, "atom 2 is the string 'Am'", id="beyond plutonium"),
        pytest.param({"symbols": [14, 14]}, 'atomic numbers go under "numbers"', id="numbers as symbols"),
        pytest.param({"symbols": [["Si"], "Si"]}, "atom 1 is a list of 1", id="nested symbols"),
        pytest.param({"symbols": [None, "Si"]}, "atom 1 is null", id="null symbol"),
        pytest.param({"symbols": "SiSi"}, "list of chemical symbols", id="formula"),
        pytest.param({"numbers": [0, 1]}, "atom 1 is the number 0", id="type indices"),
        pytest.param({"numbers": ["14", "14"]}, "without quotes", id="quoted numbers"),
        pytest.param({"numbers": ["Si", "Si"]}, 'symbols go under "symbols"', id="symbols as numbers"),
        pytest.param({"numbers": [14, 95]}, "atom 2 is the number 95", id="95"),
        pytest.param({"numbers": [14, 256]}, "atom 2 is the number 256", id="256"),
        pytest.param({"numbers": [14, -1]}, "atom 2 is the number -1", id="negative"),
        pytest.param({"numbers": [14, 14.5]}, "atom 2 is the number 14.5", id="half"),
        pytest.param({"numbers": [14, True]}, "atom 2 is true", id="true"),
        pytest.param({"numbers": [14, None]}, "atom 2 is null", id="null"),
        pytest.param({"numbers": [14, 10**30]}, "atom 2 is the number 1e+30", id="huge"),
        pytest.param({"numbers": [[14], [14]]}, "flat list", id="nested"),
        pytest.param({"numbers": 14}, "list of atomic numbers", id="one number"),
    ],
)
def test_species_are_exact(species: dict[str, Any], words: str) -> None:
    error = fault({"positions": SILICON["positions"], **species})
    assert error.field == next(iter(species))
    assert words in error.reason
    assert error.code in {"bad_value", "bad_shape"}


def test_species_that_do_not_exist_come_with_those_the_model_has() -> None:
    request = decode({"structures": [{**WATER, "symbols": ["X", "H", "H"]}, SILICON, {"numbers": [1]}]})
    told = request.with_elements(("Si", "Ge"))
    assert told.errors[0].reason.endswith("the model knows: Si Ge")
    assert told.errors[2].reason == request.errors[2].reason
    clean = decode({"structure": SILICON})
    assert clean.with_elements(("Si",)) is clean


@pytest.mark.parametrize(
    ("structure", "code", "field"),
    [
        pytest.param({}, "missing_field", "numbers", id="nothing"),
        pytest.param({"numbers": [1]}, "missing_field", "positions", id="no positions"),
        pytest.param({"numbers": [1], "positions": None}, "missing_field", "positions", id="positions null"),
        pytest.param({"numbers": None, "positions": [[0, 0, 0]]}, "missing_field", "numbers", id="numbers null"),
        pytest.param({**WATER, "numbers": [8, 1, 1]}, "ambiguous", "symbols", id="both species"),
        pytest.param({"numbers": [], "positions": []}, "empty", "positions", id="no atoms"),
        pytest.param({**WATER, "pbc": True}, "singular_cell", "cell", id="pbc without a cell"),
        pytest.param({**WATER, "pbc": [False, True, False]}, "singular_cell", "cell", id="one pbc without a cell"),
        pytest.param({**SILICON, "pbc": [True, True]}, "bad_shape", "pbc", id="two flags"),
        pytest.param({**SILICON, "pbc": "T T T"}, "bad_value", "pbc", id="flags as text"),
        pytest.param({**SILICON, "pbc": [1, 0, 2]}, "bad_value", "pbc", id="flag 2"),
        pytest.param({**SILICON, "pbc": [1.0, 0, 1]}, "bad_value", "pbc", id="flag 1.0"),
        pytest.param({**SILICON, "cell": list(range(9))}, "bad_shape", "cell", id="flat cell"),
        pytest.param({**SILICON, "cell": [3, 3, 3, 90, 90, 90]}, "bad_shape", "cell", id="cell parameters"),
        pytest.param({**SILICON, "cell": CELL[:2]}, "bad_shape", "cell", id="two vectors"),
        pytest.param({**SILICON, "cell": [[0, 0, None], *CELL[:2]]}, "bad_value", "cell", id="null in the cell"),
        pytest.param({**SILICON, "temperature": "300"}, "bad_value", "temperature", id="temperature as text"),
        pytest.param({**SILICON, "temperature": True}, "bad_value", "temperature", id="temperature true"),
        pytest.param({**SILICON, "temperature": [300]}, "bad_value", "temperature", id="temperature list"),
        pytest.param({**SILICON, "temperature": float("nan")}, "non_finite", "temperature", id="temperature NaN"),
        pytest.param({**SILICON, "coords": 1}, "unknown_field", "coords", id="unknown key"),
        pytest.param([], "bad_value", None, id="a list"),
        pytest.param(3, "bad_value", None, id="a number"),
        pytest.param(False, "bad_value", None, id="false"),
    ],
)
def test_faults_of_a_structure(structure: Any, code: str, field: str | None) -> None:
    error = fault(structure)
    assert (error.code, error.field) == (code, field)
    good = {"structures": [SILICON, structure, WATER]}
    request = decode(good)
    assert list(request.errors) == [1]
    assert request.structures.counts.tolist() == [2, 0, 3]
    results = answer(request)["results"]
    assert results[1].keys() == {"error"}
    assert results[1]["error"]["code"] == code
    assert results[0]["energy"] == 0.25
    assert results[2]["energy"] == 2.25


def test_null_stands_for_left_out() -> None:
    body = {
        "model": None, "properties": None, "structures": None,
        "structure": {**WATER, "numbers": None, "cell": None, "pbc": None, "temperature": None},
    }  # fmt: skip
    request = decode(body)
    assert request.single
    assert not request.errors
    assert np.isnan(request.structures.temperatures).all()


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        pytest.param({}, "missing_field", "neither structure nor structures", id="nothing"),
        pytest.param({"structure": None}, "missing_field", "structure is null", id="null"),
        pytest.param({"structures": None}, "missing_field", "structures is null", id="nulls"),
        pytest.param({"structures": {}}, "bad_value", "list of structures", id="object for a list"),
        pytest.param({"structures": "x"}, "bad_value", "list of structures", id="text for a list"),
        pytest.param({"structure": SILICON, "structures": []}, "ambiguous", "both given", id="both"),
        pytest.param({"structure": SILICON, "propertys": []}, "unknown_field", "'properties'", id="misspelt"),
        pytest.param({"atoms": SILICON}, "unknown_field", "did you mean 'structure'", id="synonym"),
        pytest.param(SILICON, "unknown_field", 'belongs into "structure"', id="bare structure"),
        pytest.param({"structure": SILICON, "properties": []}, "bad_value", "empty", id="no properties"),
        pytest.param({"structure": SILICON, "properties": ["Energy"]}, "unknown_property", "'energy'", id="case"),
        pytest.param({"structure": SILICON, "properties": ["dipole"]}, "unknown_property", "virials", id="dipole"),
        pytest.param({"structure": SILICON, "properties": "energy"}, "bad_value", "a list of names", id="text"),
        pytest.param({"structure": SILICON, "properties": [1]}, "bad_value", "names", id="number"),
        pytest.param({"structure": SILICON, "properties": ["energy"] * 1000}, "bad_value", "1000", id="too many"),
        pytest.param({"structure": SILICON, "model": 3}, "bad_value", "model must be a string", id="model number"),
        pytest.param({"structure": SILICON, "model": ""}, "bad_value", "1 to 256", id="model empty"),
        pytest.param({"structure": SILICON, "model": "m" * 257}, "bad_value", "1 to 256", id="model long"),
        pytest.param("null", "bad_value", "null", id="top-level null"),
        pytest.param("[]", "bad_value", "a list of 0", id="top-level list"),
        pytest.param("3", "bad_value", "the number 3", id="top-level number"),
        pytest.param('"x"', "bad_value", "the string", id="top-level string"),
        pytest.param("NaN", "bad_value", "the number nan", id="top-level NaN"),
    ],
)
def test_faults_of_the_envelope(body: Any, code: str, words: str) -> None:
    error = refusal(body)
    assert (error.status, error.code) == (422, code)
    assert words in error.detail


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(b"", "empty", id="nothing"),
        pytest.param(b" \n ", "empty", id="blanks"),
        pytest.param(b"\xef\xbb\xbf{}", "byte order mark", id="byte order mark"),
        pytest.param(b'{"model": "\xff"}', "byte 0xff at offset 11", id="not UTF-8"),
        pytest.param(b"\xff\xfe{\x00}\x00", "UTF-8", id="UTF-16"),
        pytest.param(b'{"model": "\\ud800"}', "line 1, column", id="lone surrogate"),
        pytest.param(b"[" * 100_000, "depth", id="nested lists"),
        pytest.param(b'{"a":' * 100_000, "depth", id="nested objects"),
        pytest.param(SI2 % "nan", "NaN is not JSON", id="nan"),
        pytest.param(SI2 % "inf", "infinity is not JSON", id="inf"),
        pytest.param(SI2 % "None", "JSON writes null", id="None"),
        pytest.param(SI2 % "True", "JSON writes true", id="True"),
        pytest.param(SI2 % "01", "leading zero", id="leading zero"),
        pytest.param(SI2 % "+1", f"column {SI2.index('%') + 1}", id="plus"),
        pytest.param(SI2 % ".5", "no digit", id="no digit before the point"),
        pytest.param("{'structure': 1}", "double quotes", id="single quotes"),
        pytest.param('{"structure": 1} x', "column 18", id="something behind"),
        pytest.param('{"structures": [1,]}', "trailing comma", id="trailing comma"),
        pytest.param('{"structure":\n // no\n 1}', "line 2, column 2", id="comment"),
        pytest.param((SI2 % "NaN") + ",", "NaN is not JSON", id="NaN and another fault"),
        pytest.param('{"structure": NaN, "model": "\\ud800"}', "NaN is not JSON", id="NaN and a surrogate"),
        pytest.param('{"structure": NaN, "model": %s}' % ("[" * 5000), "NaN is not JSON", id="NaN, then nesting"),
        pytest.param('{"structure": NaN, "model": %s}' % ("7" * 5000), "NaN is not JSON", id="NaN, then digits"),
    ],
)
def test_what_is_not_json(body: Any, words: str) -> None:
    error = refusal(body)
    assert (error.status, error.code) == (400, "bad_json")
    assert words in error.detail


@pytest.mark.parametrize("name", ["numbers", "symbols", "positions", "cell", "pbc", "temperature", "sites"])
def test_values_nested_as_deep_as_the_parser_goes(name: str) -> None:
    deep = "[" * 1000 + "]" * 1000
    whole = {"numbers": [1], "positions": [[0, 0, 0]]}
    whole.pop("numbers" if name == "symbols" else name, None)
    body = f'{{"structure": {{"{name}": {deep}, {json.dumps(whole)[1:-1]}}}}}'
    assert decode(body).errors[0].code in {"bad_shape", "bad_value", "unknown_field"}


@pytest.mark.parametrize(
    ("body", "key"),
    [
        pytest.param('{"model": "a", "structure": {}, "model": "b"}', "model", id="envelope"),
        pytest.param('{"structure": {"numbers": [1], "positions": [[0,0,0]], "numbers": [2]}}', "numbers", id="inside"),
        pytest.param('{"structure": {"pbc": true, "pbc" :\n true}}', "pbc", id="blank before the colon"),
        pytest.param('{"structure": {"pbc": 1, "p\\u0062c": 1}}', "pbc", id="escaped spelling"),
        pytest.param('{"structures": [{}, {"cell": 1, "cell": 1}]}', "cell", id="second structure"),
        pytest.param('{"structures": [1, {"cell": 1, "cell": 1}]}', "cell", id="behind a number"),
        pytest.param('{"structure": {"positions": [[{"a": 1, "a": 2}]]}}', "a", id="where no object belongs"),
        pytest.param('{"model": "a:b", "structure": {"pbc": 1, "pbc": 1}}', "pbc", id="a colon in a string"),
        pytest.param('{"structure": {"temperature": NaN, "temperature": 3}}', "temperature", id="beside NaN"),
        pytest.param('[{"a": 1, "a": 1}]', "a", id="in a list"),
    ],
)
def test_duplicate_keys_are_refused(body: str, key: str) -> None:
    error = refusal(body)
    assert (error.status, error.code, error.extra["field"]) == (400, "duplicate_key", key)


@pytest.mark.parametrize("name", ["a:b", ":", '":', '"a":1,"a":', "\\", '\\":"', "{'x': 1}", "ü:ö", '": "'])
def test_strings_that_look_like_keys_are_no_duplicates(name: str) -> None:
    assert decode({"model": name, "structure": SILICON}).model == name


def test_query_string() -> None:
    request = decode({"structure": SILICON}, query={"model": "m", "properties": "energy, forces"})
    assert (request.model, request.properties) == ("m", ("energy", "forces"))
    assert decode({"structure": SILICON, "model": "m"}, query={"model": "m"}).model == "m"
    for body, query, code in (
        ({"structure": SILICON, "model": "a"}, {"model": "b"}, "ambiguous"),
        ({"structure": SILICON, "properties": ["energy"]}, {"properties": "forces"}, "ambiguous"),
        ({"structure": SILICON}, {"propertys": "forces"}, "unknown_field"),
        ({"structure": SILICON}, {"properties": "energy,,"}, "unknown_property"),
        ({"structure": SILICON}, {"model": ""}, "bad_value"),
    ):
        assert refusal(body, query=query).code == code


def test_limits() -> None:
    body = {"structures": [SILICON] * 3}
    assert refusal(body, limits=wire.Limits(max_structures=2)).extra["max_structures"] == 2
    error = refusal(body, limits=wire.Limits(max_atoms=5))
    assert (error.status, error.code, error.extra["max_atoms"]) == (413, "too_large", 5)


def test_a_single_failure_is_the_answers_failure() -> None:
    request = decode({"structure": SILICON})
    results = predict(request.structures, request.properties)
    results.errors[0] = StructureError("coincident_atoms", "atoms 1 and 2", field="positions", atoms=(0, 1))
    with pytest.raises(wire.WireError) as caught:
        wire.encode(request, results)
    problem = caught.value.problem("r-1")
    assert (problem["status"], problem["code"], problem["atoms"]) == (422, "coincident_atoms", [0, 1])
    assert problem["request_id"] == "r-1"
    assert "structure" not in problem


def test_the_same_request_in_other_answers() -> None:
    request = decode({"structures": as_objects(mixed())})
    for accept in ("application/msgpack", "application/x-npz", "chemical/x-extxyz"):
        content_type, data = wire.encode(request, predict(mixed(), request.properties), accept)
        assert content_type == accept
        assert data


def test_the_collector_rests_while_large_bodies_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    inside, real = threading.Barrier(2), json_text.parse

    def parse(body: bytes) -> Any:
        seen.append(gc.isenabled())
        if len(body) > json_format.LARGE_TEXT:
            inside.wait(20)
        return real(body)

    monkeypatch.setattr(json_text, "parse", parse)
    text = json.dumps({"structure": SILICON}).encode()
    decode(text)
    assert seen == [True]
    padding = b" " * json_format.LARGE_TEXT
    with ThreadPoolExecutor(2) as pool:
        # Both at a time, one of them refused: whoever is last lets the collector go on.
        good, bad = pool.submit(decode, text + padding), pool.submit(decode, padding + b" ")
        assert good.result(20).single
        assert isinstance(bad.exception(20), wire.WireError)
    assert seen[1:] == [False, False]
    assert gc.isenabled()
