"""Traces: what a collector receives of requests, and that a server needs none."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from servers import running, write_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

collector_of = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans() -> Iterator[tuple[str, list[Any]]]:
    """A collector on loopback: its address, and what it received."""
    received: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            batch = collector_of.ExportTraceServiceRequest.FromString(body)
            for resource in batch.resource_spans:
                name = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
                received.extend((name, span) for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "si.txt", "Si")


def test_requests_become_spans(model: Path, spans: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    address, received = spans
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    structure = {"symbols": ["Si", "Si"], "positions": [[0, 0, 0], [2.3, 0, 0]]}
    with running(models=[str(model)], stand_in={"seconds": 0.01}, tracing=True) as server:
        server.ready()
        traced = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        good = server.evaluate(headers=traced, structure=structure)
        assert good.status_code == 200
        assert server.evaluate(structure={"symbols": ["Si"], "positions": [[0, 0, "x"]]}).status_code == 422
        assert server.terminate() == 0
    found = [(span, {a.key: a.value for a in span.attributes}) for name, span in received if name == "nepserve"]
    evaluations = [both for both in found if both[0].name == "POST /v1/evaluate"]
    assert len(evaluations) == 2
    span, attributes = next(both for both in evaluations if both[1]["nepserve.request_id"].string_value == "mine")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert attributes["http.response.status_code"].int_value == 200
    assert attributes["nepserve.model"].string_value == "si"
    assert attributes["nepserve.device_ms"].double_value >= 10.0
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6 >= attributes["nepserve.device_ms"].double_value
    other, _ = next(both for both in evaluations if both[0] is not span)
    assert other.trace_id.hex() != TRACE


def test_a_collector_that_is_away_changes_no_answer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    structure = {"symbols": ["Si", "Si"], "positions": [[0, 0, 0], [2.3, 0, 0]]}
    with running(models=[str(model)], stand_in={}, tracing=True) as server:
        server.ready()
        assert [server.evaluate(structure=structure).status_code for _ in range(5)] == [200] * 5
        assert server.terminate() == 0


def test_without_its_packages_the_flag_says_what_to_install(model: Path) -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None; sys.argv[0] = 'nepserve'\n"
        "from nepserve.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", str(model), "--tracing", "--port", "0", "--device", "cpu"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "pip install 'nepserve[otel]'" in done.stderr
