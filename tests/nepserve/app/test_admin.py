"""Models at run time: loading, replacing, removing, aliases; and who may do it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from nepcore.errors import ModelError
from nepcore.files import nep_txt
from nepcore.synthetic import make_model

if TYPE_CHECKING:
    from pathlib import Path


def model_text(*elements: str) -> str:
    return nep_txt.dumps(make_model(elements, n_max=(1, 1), basis_size=(2, 2), l_max=2, hidden=(3,), switches=()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    (models / "si").mkdir(parents=True)
    (models / "si" / "nep.txt").write_text(model_text("Si"))
    (models / "ge.txt").write_text(model_text("Ge"))
    (models / "bad.txt").write_text("nep9 1 Si\n")
    (tmp_path / "outside.txt").write_text(model_text("C"))
    (models / "link.txt").symlink_to(tmp_path / "outside.txt")
    return models


def test_load_by_path(make: Any, silicon: Any, folder: Path) -> None:
    server = make(model_dir=folder)
    answer = server.call("POST", "/v1/models", json={"name": "si", "path": "si", "dtype": "float64"})
    assert answer.status_code == 201
    loaded = answer.json()
    assert (loaded["name"], loaded["dtype"], loaded["elements"]) == ("si", "float64", ["Si"])
    assert server.evaluate(model="si", structure=silicon).json()["energy"] == 28.0


def test_load_replaces(make: Any, folder: Path) -> None:
    server = make(model_dir=folder)
    old = server.service.registry.get("main")
    assert server.call("POST", "/v1/models", json={"name": "main", "path": "ge.txt"}).status_code == 201
    assert server.service.registry.get("main") is not old
    assert server.call("GET", "/v1/models/main").json()["elements"] == ["Ge"]


def test_upload(server: Any) -> None:
    answer = server.call(
        "POST", "/v1/models?name=new&dtype=float64", content=model_text("Ge"), headers={"content-type": "text/plain"}
    )
    assert answer.status_code == 201
    assert (answer.json()["origin"], answer.json()["dtype"]) == ("upload", "float64")
    assert server.call("GET", "/v1/models/new").json()["elements"] == ["Ge"]


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("../outside.txt", 403, "forbidden"),
        ("/etc/passwd", 403, "forbidden"),
        ("link.txt", 403, "forbidden"),
        ("si/../../outside.txt", 403, "forbidden"),
        ("nowhere.txt", 422, "bad_model"),
        ("bad.txt", 422, "bad_model"),
        ("", 422, "bad_model"),
        ("a\0b", 422, "bad_value"),
    ],
    ids=repr,
)
def test_paths_that_are_refused(make: Any, problem: Any, folder: Path, path: str, status: int, code: str) -> None:
    server = make(model_dir=folder)
    answer = server.call("POST", "/v1/models", json={"name": "x", "path": path})
    problem(answer, status, code)
    # Where the folder is on this machine is nobody's business.
    assert str(folder) not in answer.text
    assert server.service.registry.names == ["main"]


def test_bad_files_change_nothing(make: Any, problem: Any, silicon: Any, folder: Path) -> None:
    server = make(model_dir=folder)
    document = problem(server.call("POST", "/v1/models", json={"name": "main", "path": "bad.txt"}), 422, "bad_model")
    assert document["line"] == 1
    assert "nep9" in document["detail"]
    server.engine.refuses = ModelError("no backend 'x'")
    problem(server.call("POST", "/v1/models", json={"name": "main", "path": "ge.txt"}), 422, "bad_model")
    assert server.evaluate(structure=silicon).json()["energy"] == 28.0


@pytest.mark.parametrize(
    ("body", "headers", "query", "status", "code"),
    [
        (b"{", {"content-type": "application/json"}, "", 400, "bad_json"),
        (b"[]", {"content-type": "application/json"}, "", 422, "bad_value"),
        (b'{"name": "x"}', {"content-type": "application/json"}, "", 422, "missing_field"),
        (b'{"name": "x", "path": "y", "force": 1}', {"content-type": "application/json"}, "", 422, "unknown_field"),
        (b'{"name": 1, "path": "y"}', {"content-type": "application/json"}, "", 422, "bad_value"),
        (b'{"name": "x", "path": "y", "dtype": "f16"}', {"content-type": "application/json"}, "", 422, "bad_value"),
        (b'{"name": "../x", "path": "y"}', {"content-type": "application/json"}, "", 422, "bad_name"),
        (b'{"name": "x", "path": "y"}', {"content-type": "application/json"}, "", 403, "forbidden"),
        (b"nep4 1 Si", {"content-type": "text/plain"}, "", 422, "missing_field"),
        (b"nep4 1 Si", {"content-type": "text/plain"}, "?name=a/b", 422, "bad_name"),
        (b"nep4 1 Si", {"content-type": "text/plain"}, "?name=x&dtype=int", 422, "bad_value"),
        (b"nep4 1 Si", {"content-type": "text/plain"}, "?name=x", 422, "bad_model"),
        (b"\x80\x04\x95", {"content-type": "text/plain"}, "?name=x", 422, "bad_model"),
        (b"nep4 1 Si", {"content-type": "application/x-tar"}, "?name=x", 415, "unsupported_media_type"),
    ],
    ids=str,
)
def test_bad_requests(server: Any, problem: Any, body: bytes, headers: Any, query: str, status: int, code: str) -> None:
    problem(server.call("POST", f"/v1/models{query}", content=body, headers=headers), status, code)
    assert server.service.registry.names == ["main"]


def test_remove(server: Any, problem: Any, silicon: Any) -> None:
    server.add("other", "Si")
    assert server.call("DELETE", "/v1/models/other").status_code == 204
    problem(server.evaluate(model="other", structure=silicon), 404, "unknown_model")
    problem(server.call("DELETE", "/v1/models/other"), 404, "unknown_model")


def test_aliases(server: Any, problem: Any, silicon: Any) -> None:
    server.add("other", "Si")
    assert server.call("PUT", "/v1/aliases/latest", json={"model": "main"}).json() == {"aliases": {"latest": "main"}}
    assert server.evaluate(model="latest", structure=silicon).json()["model"] == "main"
    server.call("PUT", "/v1/aliases/latest", json={"model": "other"})
    assert server.evaluate(model="latest", structure=silicon).json()["model"] == "other"
    problem(server.call("PUT", "/v1/aliases/main", json={"model": "other"}), 422, "bad_name")
    problem(server.call("PUT", "/v1/aliases/x", json={"model": "nobody"}), 404, "unknown_model")
    upload = server.call(
        "POST", "/v1/models?name=latest", content=model_text("Si"), headers={"content-type": "text/plain"}
    )
    problem(upload, 422, "bad_name")
    assert server.call("DELETE", "/v1/aliases/latest").status_code == 204
    problem(server.call("DELETE", "/v1/aliases/latest"), 404, "unknown_model")
    # An alias goes with its model.
    server.call("PUT", "/v1/aliases/latest", json={"model": "other"})
    server.call("DELETE", "/v1/models/other")
    problem(server.evaluate(model="latest", structure=silicon), 404, "unknown_model")


ADMIN = (("POST", "/v1/models"), ("DELETE", "/v1/models/main"), ("PUT", "/v1/aliases/x"), ("POST", "/v1/drain"))
KEYS = ("laptop:0123456789abcdef", "operator:fedcba9876543210:admin")


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def test_keys_are_asked_for(make: Any, problem: Any, silicon: Any) -> None:
    server = make(api_keys=KEYS)
    answer = server.evaluate(structure=silicon)
    problem(answer, 401, "unauthorized")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    for wrong in (
        "Bearer nonsense",
        "Basic 0123456789abcdef",
        "Bearer",
        "0123456789abcdef",
        "Bearer 0123456789abcdef0",
    ):
        refused = server.call("POST", "/v1/evaluate", json={"structure": silicon}, headers={"authorization": wrong})
        problem(refused, 401, "unauthorized")
    right = server.call("POST", "/v1/evaluate", json={"structure": silicon}, headers=bearer("0123456789abcdef"))
    assert right.json()["energy"] == 28.0
    # Whose work it is follows the key, wherever it comes from.
    assert server.dispatcher.asked[0]["client"] == "laptop"
    for path in ("/v1/models", "/v1/status", "/metrics", "/nothing"):
        problem(server.call("GET", path), 401, "unauthorized")
    for path in ("/healthz", "/readyz", "/v2/health/ready", "/docs", "/openapi.json", "/docs/swagger-ui.css"):
        assert server.call("GET", path).status_code == 200


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_admin_routes_want_an_admin_key(make: Any, problem: Any, method: str, path: str) -> None:
    server = make(api_keys=KEYS)
    problem(server.call(method, path), 401, "unauthorized")
    problem(server.call(method, path, headers=bearer("0123456789abcdef")), 403, "forbidden")
    assert server.service.registry.names == ["main"]
    assert not server.service.draining
    answer = server.call(method, path, headers=bearer("fedcba9876543210"))
    assert answer.status_code not in {401, 403}


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_pages_of_other_sites_change_nothing(server: Any, problem: Any, method: str, path: str) -> None:
    problem(server.call(method, path, headers={"origin": "https://elsewhere.example"}), 403, "forbidden")
    problem(server.call(method, path, headers={"origin": "null"}), 403, "forbidden")
    assert server.service.registry.names == ["main"]
    assert not server.service.draining
    assert server.call(method, path, headers={"origin": "http://127.0.0.1:8000"}).status_code != 403


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_names_that_somebody_pointed_here_change_nothing(server: Any, problem: Any, method: str, path: str) -> None:
    # A page of such a name is of the same origin as the server, as far as its browser can see.
    named = {"host": "elsewhere.example:8000", "origin": "http://elsewhere.example:8000"}
    problem(server.call(method, path, headers=named), 403, "forbidden")
    assert server.service.registry.names == ["main"]
    assert not server.service.draining


@pytest.mark.parametrize(
    ("bound", "host", "own"),
    [
        ({}, "localhost:8000", True),
        ({}, "127.0.0.1", True),
        ({}, "[::1]:8000", True),
        ({}, "192.0.2.1:8000", False),
        ({}, "localhost.elsewhere.example", False),
        ({}, "", False),
        ({}, "[::1", False),
        ({"host": "Box.example", "insecure": True}, "box.example:8000", True),
        ({"host": "0.0.0.0", "insecure": True}, "192.0.2.1:8000", True),
        ({"host": "0.0.0.0", "insecure": True}, "elsewhere.example", False),
        ({"uds": "/run/nepserve.sock"}, "anything", True),
    ],
    ids=str,
)
def test_names_of_a_server_without_keys(make: Any, bound: dict[str, Any], host: str, own: bool) -> None:
    server = make(**bound)
    answer = server.call("PUT", "/v1/aliases/x", json={"model": "main"}, headers={"host": host})
    assert answer.status_code == (200 if own else 403)


def test_held_versions_outlive_their_name(server: Any) -> None:
    version = server.service.registry.get("main")

    async def scenario() -> None:
        version.acquire()
        server.service.registry.remove("main")
        waiting = asyncio.create_task(version.retired())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        version.release()
        await asyncio.wait_for(waiting, 1)

    asyncio.run(scenario())
    version.source.copy.close()
