"""``POST /v1/evaluate``: formats, headers, refusals, and what a batch with bad structures answers."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
from typing import Any

import msgpack
import numpy as np
import orjson
import pytest

from nepcore.errors import StructureError
from nepcore.structures import Structure, Structures
from nepserve.wire import msgpack_format
from nepserve.wire.request import WireError


def test_one_structure(server: Any, silicon: Any) -> None:
    answer = server.evaluate(structure=silicon)
    assert answer.status_code == 200
    body = answer.json()
    assert body["energy"] == 28.0
    assert body["model"] == "main"
    np.testing.assert_array_equal(body["forces"], -np.array(silicon["positions"]))
    assert body["stress"] == [28.0 * i for i in range(1, 7)]
    assert set(body) == {"model", "energy", "forces", "stress"}
    asked = server.dispatcher.asked[0]
    assert (asked["priority"], asked["timeout"], asked["client"]) == ("interactive", 600.0, "127.0.0.1")


def test_batch_answers_in_order(server: Any, silicon: Any, pair: Any) -> None:
    body = server.evaluate(structures=[pair, silicon, pair], properties=["energy", "stress"]).json()
    assert [r["energy"] for r in body["results"]] == [38.0, 28.0, 38.0]
    assert body["results"][0]["unavailable"] == ["stress"]
    assert "stress" not in body["results"][0]
    assert "unavailable" not in body["results"][1]


def test_bad_structures_do_not_touch_their_mates(server: Any, silicon: Any, pair: Any) -> None:
    unknown = {**pair, "symbols": ["C", "U"]}
    broken = {"positions": [[0, 0, 0]]}
    nan = {**silicon, "positions": [[0, 0, 0], [0, 1e300, 0]]}
    bodies = [unknown, silicon, broken, nan, pair]
    answer = server.evaluate(structures=bodies)
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert [r.get("error", {}).get("code") for r in results] == [
        "unknown_element", None, "missing_field", "out_of_range", None,
    ]  # fmt: skip
    assert results[1]["energy"] == 28.0
    assert results[4]["energy"] == 38.0
    np.testing.assert_array_equal(results[4]["forces"], -np.array(pair["positions"]))
    assert results[0]["error"]["atoms"] == [1]
    assert "C Si Ge" in results[0]["error"]["message"]
    # Only the good ones were sent to the engine.
    assert server.dispatcher.asked[0]["structures"].counts.tolist() == [2, 2]


def test_all_bad_needs_no_engine(server: Any) -> None:
    answer = server.evaluate(structures=[{"symbols": ["U"], "positions": [[0, 0, 0]]}] * 2)
    assert answer.status_code == 200
    assert [r["error"]["code"] for r in answer.json()["results"]] == ["unknown_element"] * 2
    assert server.dispatcher.asked == []
    assert "server-timing" not in answer.headers


def test_no_structures(server: Any) -> None:
    answer = server.evaluate(structures=[])
    assert (answer.status_code, answer.json()["results"]) == (200, [])
    assert server.dispatcher.asked == []


def test_failures_of_the_engine_are_entries(server: Any, silicon: Any, pair: Any) -> None:
    server.dispatcher.fails = {1: StructureError("coincident_atoms", "atoms 1 and 2 are at one place", atoms=(0, 1))}
    unknown = {**pair, "symbols": ["U", "C"]}
    results = server.evaluate(structures=[unknown, silicon, silicon]).json()["results"]
    assert [r.get("error", {}).get("code") for r in results] == ["unknown_element", None, "coincident_atoms"]


def test_single_failure_is_the_answer(server: Any, problem: Any, pair: Any) -> None:
    document = problem(server.evaluate(structure={**pair, "symbols": ["C", "U"]}), 422, "unknown_element")
    assert (document["field"], document["atoms"]) == ("numbers", [1])
    assert "C Si Ge" in document["detail"]
    server.dispatcher.fails = {0: StructureError("out_of_memory", "too large for the device")}
    document = problem(server.evaluate(structure=pair), 413, "out_of_memory")
    assert document["max_atoms"] == 1000


@pytest.mark.parametrize(
    ("text", "code", "status"),
    [
        ('{"structure": {"symbols": ["C"], "positions": [[NaN, 0, 0]]}}', "non_finite", 422),
        ('{"structure": {"symbols": ["C"], "positions": [[0, Infinity, 0]]}}', "non_finite", 422),
        ('{"structure": {"symbols": ["C"], "positions": [[0, 1e999, 0]]}}', "non_finite", 422),
        ('{"structure": {"symbols": ["C"], "positions": [[0, null, 0]]}}', "bad_value", 422),
        ('{"structure": {"symbols": [], "positions": []}}', "empty", 422),
        ('{"structure": {"symbols": ["C"], "positions": [[0, 0]]}}', "bad_shape", 422),
        ('{"structure": {"symbols": ["c"], "positions": [[0, 0, 0]]}}', "bad_value", 422),
        ('{"structure": 1}', "bad_shape", 422),
        ('{"structures": 1}', "bad_value", 422),
        ('{"structure": {"symbols": ["C"], "positions": [[0, 0, 0]]}, "x": 1}', "unknown_field", 422),
        ('{"structure": {}, "structure": {}}', "duplicate_key", 400),
        ("[1, 2]", "bad_value", 422),
        ("", "bad_json", 400),
        ("{", "bad_json", 400),
    ],
    ids=lambda value: str(value)[:60] or "nothing",
)
def test_bad_json_is_refused(server: Any, problem: Any, text: str, code: str, status: int) -> None:
    answer = server.call("POST", "/v1/evaluate", content=text, headers={"content-type": "application/json"})
    if code == "bad_shape" and answer.json()["code"] == "bad_value":
        code = "bad_value"
    problem(answer, status, code)
    assert server.dispatcher.asked == []


def test_formats_answer_alike(server: Any, silicon: Any) -> None:
    block = Structures.pack([
        Structure.make(silicon["numbers"], silicon["positions"], silicon["cell"], silicon["pbc"])
    ])  # fmt: skip
    packed = msgpack_format.pack_request(block)
    answer = server.call(
        "POST", "/v1/evaluate", content=packed, headers={"content-type": "application/msgpack", "accept": "*/*"}
    )
    assert answer.headers["content-type"] == "application/msgpack"
    predictions = msgpack_format.unpack_result(answer.content, block.counts)
    assert predictions["energy"].tolist() == [28.0]
    as_json = server.call(
        "POST", "/v1/evaluate", content=packed,
        headers={"content-type": "application/msgpack", "accept": "application/json"},
    )  # fmt: skip
    assert as_json.headers["content-type"] == "application/json"
    xyz = (
        '2\nLattice="0 2.72 2.72 2.72 0 2.72 2.72 2.72 0" Properties=species:S:1:pos:R:3\nSi 0 0 0\nSi 1.36 1.36 1.36\n'
    )
    text = server.call(
        "POST", "/v1/evaluate?properties=energy", content=xyz, headers={"content-type": "chemical/x-extxyz"}
    )
    assert text.headers["content-type"] == "chemical/x-extxyz"
    assert "energy=28" in text.text


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"content-type": "text/html"}, 415, "unsupported_media_type"),
        ({}, 415, "unsupported_media_type"),
        ({"content-type": "application/json", "accept": "text/html"}, 406, "not_acceptable"),
        ({"content-type": "application/json", "content-encoding": "br"}, 415, "unsupported_media_type"),
        ({"content-type": "application/json", "x-priority": "urgent"}, 400, "bad_header"),
        ({"content-type": "application/json", "x-request-timeout": "soon"}, 400, "bad_header"),
        ({"content-type": "application/json", "x-request-timeout": "0"}, 400, "bad_header"),
        ({"content-type": "application/json", "x-request-timeout": "-1"}, 400, "bad_header"),
        ({"content-type": "application/json", "x-request-timeout": "nan"}, 400, "bad_header"),
    ],
    ids=str,
)
def test_headers_that_cannot_be_served(server: Any, problem: Any, headers: Any, status: int, code: str) -> None:
    problem(server.call("POST", "/v1/evaluate", content=b"{}", headers=headers), status, code)


def test_headers_that_are_heeded(server: Any, silicon: Any) -> None:
    answer = server.call(
        "POST", "/v1/evaluate", json={"structure": silicon},
        headers={"x-priority": "bulk", "x-request-timeout": "2.5", "x-request-id": "run-7/step:3"},
    )  # fmt: skip
    asked = server.dispatcher.asked[0]
    assert (asked["priority"], asked["timeout"]) == ("bulk", 2.5)
    assert answer.headers["x-request-id"] == "run-7/step:3"
    assert answer.headers["x-batch-atoms"] == "2"
    assert answer.headers["server-timing"] == "queue;dur=1.000, pack;dur=0.000, device;dur=2.000, unpack;dur=0.000"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, 'q"', "é"], ids=["empty", "blank", "long", "quote", "accent"])
def test_request_ids_are_not_echoed_blindly(server: Any, given: str) -> None:
    answer = server.call("GET", "/healthz", headers={"x-request-id": given.encode("latin-1")})
    assert answer.headers["x-request-id"] != given
    assert len(answer.headers["x-request-id"]) == 16


def test_a_client_cannot_wait_longer_than_the_server_lets_it(server: Any, silicon: Any) -> None:
    server.call("POST", "/v1/evaluate", json={"structure": silicon}, headers={"x-request-timeout": "1e9"})
    assert server.dispatcher.asked[0]["timeout"] == 600.0


def test_models_are_chosen_by_name(make: Any, problem: Any, silicon: Any, pair: Any) -> None:
    server = make()
    server.add("other", "Si")
    keys = {v.name: v.key for v in server.service.registry.versions}
    for name in ("main", "other"):
        assert server.evaluate(model=name, structure=silicon).json()["model"] == name
    assert [asked["model"] for asked in server.dispatcher.asked] == [keys["main"], keys["other"]]
    document = problem(server.evaluate(structure=silicon), 422, "missing_field")
    assert (document["field"], document["models"]) == ("model", ["main", "other"])
    document = problem(server.evaluate(model="nobody", structure=silicon), 404, "unknown_model")
    assert document["models"] == ["main", "other"]
    assert "main, other" in document["detail"]
    problem(server.evaluate(model="other", structure=pair), 422, "unknown_element")
    query = server.call("POST", "/v1/evaluate?model=other", json={"structure": silicon})
    assert query.json()["model"] == "other"


def test_default_model_and_aliases(make: Any, silicon: Any) -> None:
    server = make(default="main")
    server.add("other", "Si")
    server.service.registry.alias("latest", "other")
    assert server.evaluate(structure=silicon).json()["model"] == "main"
    assert server.evaluate(model="latest", structure=silicon).json()["model"] == "other"


def test_temperature_models_ask_for_it(make: Any, problem: Any) -> None:
    server = make(empty=True)
    server.add("hot", "Si", temperature=True)
    structure = {"symbols": ["Si"], "positions": [[0, 0, 0]]}
    document = problem(server.evaluate(structure=structure), 422, "missing_temperature")
    assert document["field"] == "temperature"
    assert server.evaluate(structure={**structure, "temperature": 300}).status_code == 200
    assert server.dispatcher.asked[0]["structures"].temperatures.tolist() == [300.0]


def test_every_property_has_its_shape_in_a_mixed_batch(server: Any, silicon: Any) -> None:
    names = ["energy", "free_energy", "energies", "forces", "stress", "virial", "virials", "descriptors"]
    bad = {"symbols": ["U"], "positions": [[0, 0, 0]]}
    for batch in ([bad, silicon], [silicon]):
        result = server.evaluate(structures=batch, properties=names).json()["results"][-1]
        assert set(result) == set(names)
        assert np.shape(result["virials"]) == (2, 3, 3)
        assert np.shape(result["descriptors"]) == (2, 5)


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("model=main&model=other", 400, "duplicate_key"),
        ("properties=energy&model=main&properties=energy", 400, "duplicate_key"),
        ("&".join(f"k{i}=1" for i in range(17)), 422, "bad_value"),
        ("modle=main", 422, "unknown_field"),
    ],
    ids=["two models", "properties twice", "too many", "misspelt"],
)
def test_odd_query_strings(server: Any, problem: Any, silicon: Any, query: str, status: int, code: str) -> None:
    answer = server.call("POST", f"/v1/evaluate?{query}", json={"structure": silicon})
    problem(answer, status, code)
    assert not server.dispatcher.asked


def test_wrong_method(server: Any, problem: Any) -> None:
    answer = server.call("GET", "/v1/evaluate")
    assert problem(answer, 405, "method_not_allowed")["allow"] == ["POST"]
    assert answer.headers["allow"] == "POST"


def test_gzip_bodies(server: Any, problem: Any, silicon: Any) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    body = orjson.dumps({"structure": silicon})
    packed = gzip.compress(body[:40]) + gzip.compress(body[40:])
    assert server.call("POST", "/v1/evaluate", content=packed, headers=headers).json()["energy"] == 28.0
    problem(server.call("POST", "/v1/evaluate", content=body, headers=headers), 400, "bad_encoding")
    problem(server.call("POST", "/v1/evaluate", content=packed[:-9], headers=headers), 400, "bad_encoding")


def test_gzip_bombs_are_cut(make: Any, problem: Any) -> None:
    server = make(max_body_mb=1.0)
    bomb = gzip.compress(bytes(50_000_000))
    assert len(bomb) < 100_000
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    document = problem(server.call("POST", "/v1/evaluate", content=bomb, headers=headers), 413, "body_too_large")
    assert document["max_bytes"] == 1_000_000


def test_gzip_members_are_counted(server: Any, problem: Any, silicon: Any) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    body, nothing = orjson.dumps({"structure": silicon}), gzip.compress(b"")
    # Members that begin and end at every place of the windows in which they are read.
    packed = nothing * 3000 + b"".join(gzip.compress(body[i : i + 1]) for i in range(len(body))) + nothing * 3000
    assert server.call("POST", "/v1/evaluate", content=packed, headers=headers).json()["energy"] == 28.0
    document = problem(
        server.call("POST", "/v1/evaluate", content=nothing * 10_001, headers=headers), 400, "bad_encoding"
    )
    assert "members" in document["detail"]


def test_large_requests_take_the_other_way_and_answer_the_same(server: Any) -> None:
    n = 900
    structure = {"numbers": [14] * n, "positions": np.arange(3.0 * n).reshape(n, 3).tolist()}
    one = server.evaluate(structure=structure).json()
    many = server.evaluate(structures=[structure] * 30).json()["results"]
    assert len(orjson.dumps({"structures": [structure] * 30})) > 256 * 1024
    assert all(result["forces"] == one["forces"] for result in many)


def test_unforeseen_errors_are_problems_and_tell_nothing(
    server: Any, problem: Any, silicon: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server.dispatcher.error = ZeroDivisionError("a secret of the house")
    answer = server.evaluate(structure=silicon)
    document = problem(answer, 500, "internal")
    assert "secret" not in answer.text
    assert document["request_id"] in caplog.text
    assert "a secret of the house" in caplog.text


def test_clients_that_leave_take_their_work_with_them(server: Any, silicon: Any) -> None:
    body = orjson.dumps({"structure": silicon})
    sent: list[Any] = []

    async def scenario() -> None:
        server.dispatcher.hold = asyncio.Event()
        messages = iter([{"type": "http.request", "body": body}])
        leave = asyncio.Event()

        async def receive() -> Any:
            try:
                return next(messages)
            except StopIteration:
                await leave.wait()
                return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/evaluate", "query_string": b"", "client": None,
                 "headers": [(b"content-type", b"application/json")]}  # fmt: skip
        call = asyncio.create_task(server.app(scope, receive, send))
        await asyncio.sleep(0.1)
        assert not call.done()
        leave.set()
        await asyncio.wait_for(call, 5)

    asyncio.run(scenario())
    assert server.dispatcher.cancelled == 1
    assert sent == []
    assert server.service.in_flight == 0
    assert server.service.registry.get(None).users == 0
    text = server.call("GET", "/metrics").text
    assert "nepserve_abandoned_total 1.0" in text
    assert 'status="499"' in text


def test_a_slow_answer_is_given_to_a_client_that_waits(server: Any, silicon: Any) -> None:
    async def talk(client: Any) -> Any:
        server.dispatcher.hold = asyncio.Event()
        call = asyncio.create_task(client.post("/v1/evaluate", json={"structure": silicon}))
        await asyncio.sleep(0.15)
        assert not call.done()
        server.dispatcher.hold.set()
        return await call

    assert server.run(talk).json()["energy"] == 28.0


def test_a_cancelled_server_task_is_not_mistaken_for_a_client_that_left(server: Any, silicon: Any) -> None:
    async def talk(client: Any) -> None:
        server.dispatcher.hold = asyncio.Event()
        call = asyncio.create_task(client.post("/v1/evaluate", json={"structure": silicon}))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    server.run(talk)
    assert server.service.in_flight == 0


def test_binary_answers_carry_failures(server: Any) -> None:
    block = Structures.from_arrays([1, 1], [92, 14], np.zeros((2, 3)))
    answer = server.call(
        "POST", "/v1/evaluate", content=msgpack_format.pack_request(block),
        headers={"content-type": "application/msgpack"},
    )  # fmt: skip
    assert answer.status_code == 200
    predictions = msgpack_format.unpack_result(answer.content, block.counts)
    assert predictions.errors[0].code == "unknown_element"
    assert predictions.values["energy"][1] == 14.0
    assert np.isnan(predictions.values["energy"][0])
    assert isinstance(msgpack.unpackb(answer.content, strict_map_key=False), dict)


def test_json_has_no_bare_nan(server: Any, silicon: Any) -> None:
    far = {**silicon, "positions": [[0, 0, 0], [1e8, 1, 1]]}
    text = server.evaluate(structures=[far, {"symbols": ["U"], "positions": [[0, 0, 0]]}]).text
    json.loads(text, parse_constant=lambda word: pytest.fail(f"found {word}"))


def test_refused_bodies_are_let_go_at_once(server: Any) -> None:
    server.evaluate(structure=1)
    gc.collect()
    gc.disable()
    try:
        for body in ({"structure": 1}, {"model": "nobody", "structure": {}}, {"structures": 2}):
            assert server.evaluate(**body).status_code >= 400
        # An error that is kept, by a cycle through its own traceback, keeps the frames and the body with it.
        assert [error for error in gc.get_objects() if isinstance(error, WireError)] == []
    finally:
        gc.enable()


def test_what_a_body_holds_is_guessed_from_earlier_ones(server: Any, silicon: Any) -> None:
    """A first body of a kind is read; later ones are announced with half of what their size lets expect."""
    sizes = [1, 50, 50, 50, 50]
    for count in sizes:
        assert server.evaluate(structures=[silicon] * count).status_code == 200
    first, *others = server.dispatcher.announced
    assert first == 0.0
    atoms = 50 * len(silicon["positions"])
    assert 0.2 * atoms < others[-1] < 0.8 * atoms
    server.dispatcher.full_from = 0.25 * atoms
    before = len(server.dispatcher.asked)
    refused = server.evaluate(structures=[silicon] * 50)
    assert (refused.status_code, refused.json()["code"]) == (429, "queue_full")
    assert refused.headers["Retry-After"] == "8"
    assert server.evaluate(structures=[silicon]).status_code == 200
    assert len(server.dispatcher.asked) == before + 1
