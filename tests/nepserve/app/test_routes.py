"""The routes beside evaluation: what they say, and that every refusal is a problem document."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nepserve.app import schemas
from nepserve.app.docs import STATIC
from nepserve.wire.problem import CODES

LIVE = ("/healthz", "/v1/health/live", "/v2/health/live")
READY = ("/readyz", "/v1/health/ready", "/v2/health/ready")


@pytest.mark.parametrize("path", LIVE)
def test_alive_whatever_happens(server: Any, path: str) -> None:
    server.engine.unready = "the engine is down"
    server.service.draining = True
    answer = server.call("GET", path)
    assert (answer.status_code, answer.json()["status"]) == (200, "alive")


@pytest.mark.parametrize("path", READY)
def test_ready_only_if_all_is_well(server: Any, problem: Any, path: str) -> None:
    assert server.call("GET", path).json() == {"status": "ready", "models": ["main"]}
    server.engine.unready = "the last known answer is 90 s old"
    document = problem(server.call("GET", path), 503, "engine_down")
    assert "90 s" in document["detail"]
    server.engine.starting = True
    answer = server.call("GET", path)
    problem(answer, 503, "starting")
    assert answer.headers["retry-after"] == "1"
    server.service.draining = True
    problem(server.call("GET", path), 503, "draining")


def test_models(server: Any, problem: Any) -> None:
    server.add("other", "Si")
    server.service.registry.alias("latest", "other")
    listed = server.call("GET", "/v1/models").json()
    schemas.Models.model_validate(listed)
    assert [m["name"] for m in listed["models"]] == ["main", "other"]
    assert listed["aliases"] == {"latest": "other"}
    one = server.call("GET", "/v1/models/latest").json()
    assert one == listed["models"][1]
    assert one["aliases"] == ["latest"]
    assert one["elements"] == ["Si"]
    assert re.fullmatch("[0-9a-f]{64}", one["sha256"])
    assert one["backend"] == "toy"
    assert one["file"]["version"] == 4
    problem(server.call("GET", "/v1/models/nobody"), 404, "unknown_model")


def test_version_and_status(server: Any) -> None:
    version = server.call("GET", "/v1/version").json()
    schemas.Version.model_validate(version)
    assert version["torch"] == "2.0"
    server.engine.unready = "why not"
    server.dispatcher.waiting.atoms = 77
    status = server.call("GET", "/v1/status").json()
    schemas.Status.model_validate(status)
    assert (status["ready"], status["reason"]) == (False, "why not")
    assert status["queue"]["atoms"] == 77
    assert status["device_seconds"] == 1.25
    assert status["backends"] == {}
    choice = {"how": "measured", "backend": "loop", "choice": {"small": "loop", "large": "loop"}, "rows": []}
    server.service.registry.versions[0].info["choice"] = choice
    status = server.call("GET", "/v1/status").json()
    assert status["backends"] == {server.service.registry.versions[0].name: choice}
    assert status["limits"]["max_atoms_per_structure"] == 1000


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/models/", 404, "not_found"),
        ("GET", "/docs/../settings.py", 404, "not_found"),
        ("GET", "/docs/%2e%2e%2fdocs.py", 404, "not_found"),
        ("GET", "/docs/docs.html", 404, "not_found"),
        ("POST", "/healthz", 405, "method_not_allowed"),
        ("PATCH", "/v1/models/main", 405, "method_not_allowed"),
        ("PUT", "/v1/aliases/x", 422, "missing_field"),
    ],
)
def test_refusals_are_problems(server: Any, problem: Any, method: str, path: str, status: int, code: str) -> None:
    answer = server.call(method, path)
    document = problem(answer, status, code)
    if status == 405:
        assert set(document["allow"]) == {m.strip() for m in answer.headers["allow"].split(",")}


def test_heads_of_get(server: Any) -> None:
    for path in ("/healthz", "/readyz", "/v1/models", "/docs"):
        assert server.call("HEAD", path).status_code == 200
    assert server.call("HEAD", "/v1/evaluate").status_code == 405


def test_unforeseen_errors_of_routes(server: Any, problem: Any, caplog: pytest.LogCaptureFixture) -> None:
    del server.engine.unready
    answer = server.call("GET", "/v1/status")
    document = problem(answer, 500, "internal")
    assert "unready" not in answer.text
    assert document["request_id"] in caplog.text
    assert 'route="/v1/status",status="500"' in server.call("GET", "/metrics").text.replace(", ", ",")


def test_metrics(server: Any, silicon: Any) -> None:
    server.evaluate(structure=silicon)
    server.evaluate(structures=[silicon, {"symbols": ["U"], "positions": [[0, 0, 0]]}])
    server.call("GET", "/a/path/a/stranger/thought/of")
    text = server.call("GET", "/metrics").text
    series = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return series[f"nepserve_{name}", frozenset(labels.items())]

    assert value("requests_total", model="main", route="/v1/evaluate", status="200") == 2
    assert value("requests_total", model="", route="other", status="404") == 1
    assert value("structures_total", model="main") == 3
    assert value("atoms_total", model="main") == 5
    assert value("structure_failures_total", model="main", code="unknown_element") == 1
    assert value("request_latency_seconds_count", route="/v1/evaluate") == 2
    assert value("request_queue_time_seconds_sum", model="main") == pytest.approx(0.002)
    assert "stranger" not in text
    assert "_created" not in text


def test_api_page_asks_nobody_else(server: Any) -> None:
    page = server.call("GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    links = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert links
    for link in links:
        assert not re.match(r"[a-z]+:(?!,)|//", link), link
        if not link.startswith("data:"):
            asset = server.call("GET", f"/{link}")
            assert asset.status_code == 200
            assert len(asset.content) == (STATIC / link.removeprefix("docs/")).stat().st_size
    assert "://" not in server.call("GET", "/docs/start.js").text
    policy = page.headers["content-security-policy"]
    # What the bundle itself might fetch, a browser refuses.
    assert "default-src 'none'" in policy
    assert "://" not in policy
    assert "*" not in policy
    assert server.call("GET", "/").headers["location"] == "docs"


def test_document_says_what_the_routes_do(server: Any) -> None:
    document = server.call("GET", "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    evaluate = document["paths"]["/v1/evaluate"]["post"]
    assert set(evaluate["requestBody"]["content"]) == {
        "application/json", "application/msgpack", "chemical/x-extxyz", "application/x-npz",
    }  # fmt: skip
    names = set(document["components"]["schemas"])

    def references(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                yield value["$ref"]
            for part in value.values():
                yield from references(part)
        elif isinstance(value, list):
            for part in value:
                yield from references(part)

    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in names, reference
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if status >= "400":
                    assert list(response["content"]) == ["application/problem+json"], (path, status)
    statuses = {str(row.status) for code, row in CODES.items() if code not in {"forbidden", "method_not_allowed"}}
    unsaid = {"502", "431"}
    assert statuses - unsaid <= set(evaluate["responses"])


def test_drain_refuses_new_work_and_waits_for_the_old(server: Any, problem: Any, silicon: Any) -> None:
    async def talk(client: Any) -> None:
        server.dispatcher.hold = asyncio.Event()
        working = asyncio.create_task(client.post("/v1/evaluate", json={"structure": silicon}))
        await asyncio.sleep(0.05)
        first = await client.post("/v1/drain?timeout=0.05")
        assert first.json() == {"status": "draining", "requests": 1}
        problem(await client.post("/v1/evaluate", json={"structure": silicon}), 503, "draining")
        second = asyncio.create_task(client.post("/v1/drain"))
        await asyncio.sleep(0.05)
        assert not second.done()
        server.dispatcher.hold.set()
        assert (await working).status_code == 200
        assert (await second).json() == {"status": "drained", "requests": 0}

    server.run(talk)


def test_starting_servers_say_so(make: Any, problem: Any, silicon: Any) -> None:
    server = make(empty=True)
    server.engine.unready = "model main: warmup"
    answer = server.evaluate(structure=silicon)
    assert "warmup" in problem(answer, 503, "starting")["detail"]
    assert answer.headers["retry-after"] == "1"
    assert 'nepserve_shed_total{reason="starting"} 1.0' in server.call("GET", "/metrics").text
