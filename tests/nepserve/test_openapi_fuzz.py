"""The whole OpenAPI document, fuzzed: no 500, no crash, and answers that are what the document says."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from servers import running, write_model

schemathesis = pytest.importorskip("schemathesis")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers import ServerProcess

EXAMPLES = int(os.environ.get("NEPSERVE_TEST_FUZZ_EXAMPLES", "12"))
"""Requests for each operation; a run over night may have thousands."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("fuzzed")
    write_model(folder / "main.txt", "C", "Si", "Ge")
    with running(models=[str(folder / "main.txt")], model_dir=str(folder), receive_timeout=2) as made:
        yield made.ready()


@pytest.fixture(scope="module")
def document(server: ServerProcess) -> dict[str, Any]:
    found = server.get("/openapi.json")
    assert found.status_code == 200
    content: dict[str, Any] = found.json()
    return content


def test_every_operation(server: ServerProcess, document: dict[str, Any]) -> None:
    operations = [each.ok() for each in schemathesis.openapi.from_dict(document).get_all_operations()]
    # A server that was told to drain has no other answers any more; see the test below.
    operations = [each for each in operations if each.path != "/v1/drain"]
    assert {each.path for each in operations} == set(document["paths"]) - {"/v1/drain"}
    excluded = _excluded()
    for operation in operations:

        @settings(
            max_examples=EXAMPLES,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
            deadline=None,
        )
        @given(case=operation.as_strategy())
        def run(case: Any) -> None:
            answer = case.call(base_url=server.url, timeout=60)
            if answer.status_code >= 500:
                assert answer.json()["code"] == "starting", answer.text
            case.validate_response(answer, excluded_checks=excluded)
            assert server.process.poll() is None

        run()


def _excluded() -> list[Any]:
    """Checks about the generator's guess of what ought to be refused, and about keys that this server lacks."""
    from schemathesis import checks

    checks.load_all_checks()
    names = ("negative_data_rejection", "positive_data_acceptance", "ignored_auth", "unsupported_method")
    return checks.CHECKS.get_by_names([name for name in names if name in checks.CHECKS.get_all_names()])


def test_draining_is_as_documented(tmp_path: Any, document: dict[str, Any]) -> None:
    model = write_model(tmp_path / "main.txt", "Si")
    with running(models=[str(model)]) as alone:
        alone.ready()
        for timeout, status in (("-1", 422), ("nan", 422), ("x", 422), ("1e9", 422), ("0", 200), ("2", 200)):
            found = httpx.post(f"{alone.url}/v1/drain", params={"timeout": timeout}, timeout=30)
            assert found.status_code == status, found.text
        assert "/v1/drain" in document["paths"]
        assert alone.terminate() == 0


def test_the_server_is_sound_after_all_that(server: ServerProcess) -> None:
    assert server.get("/healthz").status_code == 200
    status = server.get("/v1/status").json()
    assert status["engine"]["restarts"] == 0
    assert status["queue"]["requests"] == 0
    if "main" in status["models"]:
        assert server.evaluate(model="main", structure={"symbols": ["Si"], "positions": [[0, 0, 0]]}).status_code == 200
    assert "Traceback" not in server.log
