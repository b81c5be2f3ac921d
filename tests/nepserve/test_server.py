"""The server as a process: start, signals, an engine that dies, clients that misbehave, and its end."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from locations import CASES, needs_shared
from nepcore.structures import Structure, Structures
from nepserve.wire import msgpack_format
from servers import ServerProcess, is_gone, running, write_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SI2 = {
    "symbols": ["Si", "Si"],
    "positions": [[0.05, -0.03, 0.02], [1.5775, 1.2575, 1.1975]],
    "cell": [[0, 2.715, 2.715], [2.715, 0, 2.715], [2.715, 2.715, 0]],
    "pbc": True,
}
ATOM = {"symbols": ["Si"], "positions": [[0, 0, 0]]}
SLOW = {"symbols": ["Ge"], "positions": [[0, 0, 0]]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "main.txt", "C", "Si", "Ge")


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[ServerProcess]:
    """One server for the tests that leave it as it was."""
    with running(models=[str(model)], max_body_mb=2, receive_timeout=1, max_connections=40) as server:
        yield server.ready()


def request_bytes(body: bytes, *more: str, length: int | None = None) -> bytes:
    lines = ["POST /v1/evaluate HTTP/1.1", "Host: x", "Content-Type: application/json"]
    if length is None or length >= 0:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, *more, "", ""]).encode() + body


def read_answer(sock: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer; empty if the connection ends without one."""
    sock.settimeout(20)
    data = b""
    try:
        while b"\r\n\r\n" not in data:
            part = sock.recv(65536)
            if not part:
                return 0, data
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        while len(body) < length:
            part = sock.recv(65536)
            if not part:
                break
            body += part
    except ConnectionError:
        return 0, data
    return int(head[9:12]), body


def ended(sock: socket.socket) -> bool:
    """Whether the other side closed the connection, within a while."""
    sock.settimeout(20)
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


# -- start and end -----------------------------------------------------------------------------------------------------


@needs_shared
def test_a_real_model_from_start_to_end(tmp_path: Path) -> None:
    report = tmp_path / "modules"
    path = CASES / "models" / "toy-si.nep.txt"
    with running(models=[f"si={path}"], loader="nepcore:load", dtype="float64", threads=1, report=report) as server:
        assert httpx.get(f"{server.url}/healthz", timeout=30).status_code == 200
        server.ready(60)
        answer = server.evaluate(structure=SI2).json()
        # expected.md of case-014, an independent implementation in double precision
        assert answer["energy"] == pytest.approx(-0.77743170, abs=1e-8)
        assert answer["model"] == "si"
        engine = server.engines()
        assert len(engine) == 1
        assert server.terminate() == 0
        assert is_gone(engine[0])
    # The front computes nothing itself: it has neither torch nor what would compile.
    modules = set(report.read_text().split())
    assert "uvicorn" in modules
    assert not modules & {"torch", "triton", "numba", "ase", "scipy", "matplotlib"}


def test_start_lines(shared: ServerProcess) -> None:
    assert "model main (C Si Ge), float32" in shared.log
    shared.wait_for("ready after")
    line = shared.wait_for("curl http://127.0.0.1:")
    # What it says can be pasted as it stands.
    done = subprocess.run(["bash", "-c", line.strip()], capture_output=True, text=True, timeout=30, check=True)
    assert "energy" in json.loads(done.stdout)


def test_without_a_model_the_demonstration_says_what_it_is() -> None:
    with running() as server:
        line = server.wait_for("DEMONSTRATION")
        assert "EMT" in line
        server.ready()
        model = server.get("/v1/models").json()["models"][0]
        assert model["origin"] == "bundled"
        assert set(model["about"]["errors"]) == {"energy", "force", "virial"}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"models": ["nowhere.txt"]}, "nowhere.txt: cannot be read: No such file or directory"),
        ({"models": ["a=x", "a=y"]}, "two models are called 'a'"),
        ({"models": ["a b=x"]}, "'a b' is no name for a model"),
        ({"default_model": "x"}, "default model 'x' is not among"),
        ({"model_dir": "/nowhere"}, "/nowhere: no such folder"),
        ({"host": "192.0.2.1"}, "cannot listen on 192.0.2.1, port 8000: cannot assign requested address\n"),
        ({"api_keys": "me:short"}, "nepserve: --api-keys: the key called 'me'"),
        ({"host": "no.such.host.invalid"}, "cannot listen on no.such.host.invalid"),
        ({"ssl_certfile": "/nowhere.pem", "ssl_keyfile": "/nowhere.key"}, "certificate /nowhere.pem"),
        ({"uds": "/nowhere/socket"}, "cannot listen on /nowhere/socket"),
        ({"api_key_file": "/nowhere"}, "/nowhere"),
        ({"port": "99999"}, "--port"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_start_says_why_in_one_line(flags: dict[str, Any], told: str) -> None:
    done = _command(flags)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("nepserve: ")


def _command(flags: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    words = []
    for name, value in flags.items():
        words += [str(v) for v in value] if name == "models" else [f"--{name.replace('_', '-')}", str(value)]
    return subprocess.run(
        [sys.executable, "-m", "nepserve", "serve", *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_bad_model_files_are_refused_at_start(tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_text("nep4_dipole 1 Si\n")
    done = _command({"models": [str(bad)]})
    assert done.returncode == 2
    assert f"{bad}, line 1" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_port_in_use(shared: ServerProcess) -> None:
    host, port = shared.address
    done = _command({"host": host, "port": port})
    assert done.returncode == 2
    assert f"port {port}: address already in use" in done.stderr
    assert "--port" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_model_that_does_not_load_ends_the_server(model: Path) -> None:
    with running(models=[str(model)], stand_in={"load_error": "model"}) as server:
        assert server.wait(30) == 2
        errors = [line for line in server.lines if "error" in line or "warning" in line]
        assert len(errors) == 1, server.log
        assert "no such backend" in errors[0]
        assert "Traceback" not in server.log


def test_unix_sockets(model: Path, tmp_path: Path) -> None:
    place = tmp_path / "socket"
    with running(models=[str(model)], uds=str(place)) as server:
        server.wait_for("ready after")
        transport = httpx.HTTPTransport(uds=str(place))
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            assert client.post("/v1/evaluate", json={"structure": ATOM}).status_code == 200
        assert place.stat().st_mode & 0o007 == 0
        # A second server must not take the place of one that lives; one that is dead leaves its socket behind.
        assert "another server answers there" in _command({"uds": place}).stderr
        server.process.kill()
        server.wait()
    assert place.exists()
    with running(models=[str(model)], uds=str(place)) as server:
        server.wait_for("ready after")
        assert server.terminate() == 0
    assert not place.exists()


def test_others_need_the_key_that_was_made(model: Path) -> None:
    with running(models=[str(model)], host="0.0.0.0") as server:
        secret = server.wait_for("API key made for this run: ").rpartition(" ")[2]
        server.wait_for("ready after")
        server.wait_for("curl http://127.0.0.1:")
        url = f"http://127.0.0.1:{server.address[1]}"
        assert httpx.post(f"{url}/v1/evaluate", json={"structure": ATOM}).status_code == 401
        headers = {"authorization": f"Bearer {secret}"}
        assert httpx.post(f"{url}/v1/evaluate", json={"structure": ATOM}, headers=headers).status_code == 200
        assert httpx.get(f"{url}/healthz").status_code == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
def test_tls(model: Path, tmp_path: Path) -> None:
    def certificate(name: str) -> None:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
             "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"],
            check=True, capture_output=True,
        )  # fmt: skip

    def name() -> str:
        trust = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        with (
            socket.create_connection(server.address) as raw,
            trust.wrap_socket(raw, server_hostname="127.0.0.1") as end,
        ):
            subject: Any = end.getpeercert()
            return str(dict(entry[0] for entry in subject["subject"])["commonName"])

    certificate("first")
    with running(
        models=[str(model)], ssl_certfile=str(tmp_path / "cert.pem"), ssl_keyfile=str(tmp_path / "key.pem")
    ) as server:
        server.wait_for("ready after")
        assert "https://127.0.0.1" in server.log
        trust = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        url = f"https://127.0.0.1:{server.address[1]}"
        answer = httpx.post(f"{url}/v1/evaluate", json={"structure": ATOM}, verify=trust, timeout=30)
        assert answer.status_code == 200
        assert name() == "first"
        # A renewed certificate is taken without a restart.
        certificate("second")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("certificate read again")
        assert name() == "second"
        (tmp_path / "key.pem").write_text("nonsense")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("stays as it was")
        assert name() == "second"
        assert server.terminate() == 0


def test_json_logs(model: Path) -> None:
    with running(models=[str(model)], log_format="json", access_log=True) as server:
        server.ready()
        server.evaluate(structure=ATOM, headers={"x-request-id": "step-1"})
        server.evaluate(structure={"symbols": ["U"], "positions": [[0, 0, 0]]})
        assert server.terminate() == 0
    entries = [json.loads(line) for line in server.lines]
    assert all({"time", "level", "message"} <= entry.keys() for entry in entries)
    first = next(e for e in entries if e.get("request_id") == "step-1")
    assert (first["path"], first["status"], first["model"]) == ("/v1/evaluate", 200, "main")
    assert any(e.get("status") == 422 for e in entries)


def test_sigterm_finishes_what_is_in_flight(model: Path) -> None:
    with (
        running(models=[str(model)], stand_in={"seconds": 1.0}, shutdown_timeout=10) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        server.ready()
        idle = httpx.Client(base_url=server.url)
        idle.get("/healthz")
        working = [pool.submit(server.evaluate, structure=ATOM) for _ in range(3)]
        with server.connect() as half:
            half.sendall(request_bytes(b'{"structure"', length=1000))
            time.sleep(0.4)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("SIGTERM")
            late = server.evaluate(structure=ATOM)
            assert (late.status_code, late.json()["code"]) == (503, "draining")
            assert server.get("/readyz").json()["code"] == "draining"
            assert server.get("/healthz").status_code == 200
            status, body = read_answer(half)
            assert (status, json.loads(body)["code"]) == (503, "draining")
        assert [answer.result().status_code for answer in working] == [200, 200, 200]
        assert server.wait() == 0
        idle.close()


def test_sigterm_does_not_wait_for_ever(model: Path) -> None:
    with (
        running(models=[str(model)], stand_in={"faults": {"Ge": "hang"}}, shutdown_timeout=0.5) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        server.ready()
        engine = server.engines()[0]
        stuck = pool.submit(server.evaluate, structure=SLOW)
        time.sleep(0.3)
        started = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - started < 10
        with pytest.raises((httpx.HTTPError, AssertionError)):
            assert stuck.result().status_code == 200
        assert is_gone(engine)


def test_a_second_sigint_ends_it_at_once(model: Path) -> None:
    with running(models=[str(model)], stand_in={"faults": {"Ge": "hang"}}) as server, ThreadPoolExecutor(1) as pool:
        server.ready()
        engine = server.engines()[0]
        stuck = pool.submit(server.evaluate, structure=SLOW)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        server.wait_for("SIGINT")
        time.sleep(0.2)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 130
        assert is_gone(engine)
        assert isinstance(stuck.exception(), httpx.HTTPError)


def test_sigterm_while_it_starts(model: Path) -> None:
    with running(models=[str(model)], stand_in={"load_seconds": 30}) as server:
        server.wait_for(" on http")
        assert server.get("/readyz").status_code == 503
        answer = server.evaluate(structure=ATOM)
        assert (answer.status_code, answer.json()["code"]) == (503, "starting")
        assert "retry-after" in answer.headers
        assert server.terminate() == 0


def test_kill_leaves_no_engine_behind(model: Path) -> None:
    with running(models=[str(model)]) as server:
        server.ready()
        engine = server.engines()[0]
        server.process.kill()
        server.wait()
        assert is_gone(engine)


# -- the engine dies ---------------------------------------------------------------------------------------------------


def test_an_engine_that_dies_is_replaced(model: Path) -> None:
    with running(models=[str(model)], stand_in={"faults": {"Ge": "kill"}}) as server:
        server.ready()
        before = server.evaluate(structure=SI2).json()
        engine = server.engines()[0]
        answer = server.evaluate(structure=SLOW)
        document = answer.json()
        assert (answer.status_code, document["code"]) == (503, "engine_down")
        assert "SIGKILL" in document["detail"]
        assert int(answer.headers["retry-after"]) >= 1
        server.ready()
        assert server.evaluate(structure=SI2).json() == before
        assert server.engines() != [engine]
        assert is_gone(engine)
        status = server.get("/v1/status").json()
        assert status["engine"]["restarts"] == 1
        assert "nepserve_engine_restarts_total 1.0" in server.get("/metrics").text


def test_a_hang_is_noticed(model: Path) -> None:
    with running(models=[str(model)], stand_in={"faults": {"Ge": "hang"}}, engine_timeout=1) as server:
        server.ready()
        answer = server.evaluate(structure=SLOW)
        assert (answer.status_code, answer.json()["code"]) == (503, "engine_down")
        assert "hung" in answer.json()["detail"]
        server.ready()
        assert server.evaluate(structure=ATOM).status_code == 200


def test_an_engine_that_keeps_dying_ends_the_server(model: Path) -> None:
    with running(models=[str(model)], stand_in={"faults": {"Ge": "exit"}}, engine_restarts=1) as server:
        server.ready()
        assert server.evaluate(structure=SLOW).status_code == 503
        server.ready()
        assert server.evaluate(structure=SLOW).status_code == 503
        assert server.wait(30) == 1
        assert "failed 2 times" in server.log


def test_wrong_answers_make_it_unready_and_new(model: Path) -> None:
    with running(models=[str(model)], stand_in={"drift": 1.0}, probe_interval=0.1) as server:
        server.ready()
        engine = server.engines()[0]
        for _ in range(25):
            server.evaluate(structure=ATOM)
        server.wait_for("off by")
        assert is_gone(engine, 10)


def test_the_file_on_disk_may_change(tmp_path: Path) -> None:
    path = write_model(tmp_path / "nep.txt", "Si", "Ge")
    with running(models=[f"si={path}"], stand_in={"faults": {"Ge": "kill"}}) as server:
        server.ready()
        digest = server.get("/v1/models/si").json()["sha256"]
        path.write_text("half a file of a training run")
        server.evaluate(structure=SLOW)
        server.ready()
        assert server.get("/v1/models/si").json()["sha256"] == digest
        assert server.evaluate(structure=ATOM).status_code == 200


# -- clients -----------------------------------------------------------------------------------------------------------


def test_requests_at_once_get_their_own_answers(shared: ServerProcess) -> None:
    rng = np.random.default_rng(5)
    blocks = [
        Structures.pack([
            Structure.make(["Si"] * n, rng.random((n, 3)) * 8) for n in rng.integers(1, 6, rng.integers(1, 4))
        ])
        for _ in range(24)
    ]  # fmt: skip

    def ask(block: Structures) -> Any:
        answer = httpx.post(
            f"{shared.url}/v1/evaluate", content=msgpack_format.pack_request(block), timeout=30,
            headers={"content-type": "application/msgpack"},
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        return msgpack_format.unpack_result(answer.content, block.counts)

    alone = [ask(block) for block in blocks]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, blocks))
    for one, other in zip(alone, together, strict=True):
        for name in one.values:
            np.testing.assert_array_equal(one.values[name], other.values[name])


def test_bodies_over_the_limit_are_refused_before_they_are_sent(shared: ServerProcess) -> None:
    with shared.connect() as sock:
        sock.sendall(request_bytes(b"", length=10**12))
        status, body = read_answer(sock)
        assert (status, json.loads(body)["code"]) == (413, "body_too_large")
        assert json.loads(body)["max_bytes"] == 2_000_000


def test_a_large_body_with_a_length_is_thrown_away_until_its_sender_reads(shared: ServerProcess) -> None:
    """Most clients send all before they read: they are to see the answer, not a connection that was reset."""
    answer = httpx.post(
        f"{shared.url}/v1/evaluate",
        content=b" " * 100_000_000,
        headers={"Content-Type": "application/json"},
        timeout=30,
    )
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


def test_a_client_that_waits_for_leave_does_not_get_it(shared: ServerProcess) -> None:
    with shared.connect() as sock:
        sock.sendall(request_bytes(b"", "Expect: 100-continue", length=10**9))
        assert read_answer(sock)[0] == 413


def test_chunked_bodies_are_cut_at_the_limit(shared: ServerProcess) -> None:
    sent = 0
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with shared.connect() as sock:
        sock.sendall(request_bytes(b"", "Transfer-Encoding: chunked", length=-1))
        sock.settimeout(20)
        try:
            while sent < 200_000_000:
                sock.sendall(chunk)
                sent += len(chunk)
        except ConnectionError:
            pass
        # It was told early, and cut off when it went on nevertheless.
        assert sent < 60_000_000
        status, body = read_answer(sock)
        if status:
            assert (status, json.loads(body)["code"]) == (413, "body_too_large")
    assert shared.evaluate(structure=ATOM).status_code == 200


def test_a_chunked_body_that_ends_in_time_is_told_the_limit(shared: ServerProcess) -> None:
    def blanks() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 0x10000

    answer = httpx.post(
        f"{shared.url}/v1/evaluate", content=blanks(), headers={"content-type": "application/json"}, timeout=20
    )
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


def test_slow_senders_are_cut_off(shared: ServerProcess) -> None:
    slow = [shared.connect() for _ in range(10)]
    for sock in slow:
        sock.sendall(request_bytes(b"{", length=100))
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.2):
            for sock in slow:
                with contextlib.suppress(OSError):
                    sock.sendall(b" ")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        assert shared.evaluate(structure=ATOM).status_code == 200
        for sock in slow:
            status, body = read_answer(sock)
            assert (status, json.loads(body)["code"]) == (408, "request_timeout")
    finally:
        stop.set()
        dripping.join()
        for sock in slow:
            sock.close()


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /" + b"y" * 300_000, 431, "headers_too_large"),
        (b"".join([b"GET / HTTP/1.1\r\n", *[b"X%d: y\r\n" % i for i in range(20_000)]]), 431, "headers_too_large"),
        (b"CONNECT a.example:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400, "bad_request"),
    ],
    ids=["nonsense", "one long header", "endless path", "many headers", "proxy"],
)
def test_heads_that_are_no_heads(shared: ServerProcess, head: bytes, status: int, code: str) -> None:
    with shared.connect() as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(head)
        found, body = read_answer(sock)
        assert found == status
        assert json.loads(body)["code"] == code
        assert ended(sock)


def test_a_request_for_another_protocol_is_answered_all_the_same(shared: ServerProcess) -> None:
    # Java's client offers HTTP/2 in this way.
    body = json.dumps({"structure": ATOM}).encode()
    with shared.connect() as sock:
        sock.sendall(
            request_bytes(body, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
        )
        assert read_answer(sock)[0] == 200


def test_connections_over_the_limit_are_told(shared: ServerProcess) -> None:
    held = [shared.connect() for _ in range(60)]
    try:
        time.sleep(0.2)
        with shared.connect() as sock:
            status, body = read_answer(sock)
            assert (status, json.loads(body)["code"]) == (503, "too_many_connections")
    finally:
        for sock in held:
            sock.close()
    shared.ready()


def test_keep_alive_and_pipelines(shared: ServerProcess) -> None:
    body = json.dumps({"structure": ATOM}).encode()
    with shared.connect() as sock:
        sock.sendall(request_bytes(body) * 3)
        for _ in range(3):
            assert read_one(sock) == 200
        sock.sendall(request_bytes(body))
        assert read_one(sock) == 200


def read_one(sock: socket.socket) -> int:
    """Status of one answer, byte by byte, so that nothing of the next one is taken."""
    sock.settimeout(20)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += sock.recv(1)
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    while length:
        length -= len(sock.recv(length))
    return int(head[9:12])


def test_clients_that_leave_are_forgotten(model: Path) -> None:
    with running(models=[str(model)], stand_in={"seconds": 0.2}) as server:
        server.ready()
        body = json.dumps({"structure": ATOM}).encode()
        for _ in range(60):
            with server.connect() as sock:
                sock.sendall(request_bytes(body))
        started = time.monotonic()
        assert server.evaluate(structure=ATOM).status_code == 200
        # Had they all been computed, this one would have waited for twelve seconds.
        assert time.monotonic() - started < 6
        end = time.monotonic() + 10
        while time.monotonic() < end and server.get("/v1/status").json()["queue"]["requests"]:
            time.sleep(0.05)
        assert server.get("/v1/status").json()["queue"] == {
            "requests": 0, "atoms": 0, "max_requests": 4096, "max_atoms": 20_000_000,
        }  # fmt: skip


def test_deadlines(model: Path) -> None:
    with running(models=[str(model)], stand_in={"seconds": 0.5}) as server, ThreadPoolExecutor(8) as pool:
        server.ready()
        busy = [pool.submit(server.evaluate, structure=ATOM) for _ in range(2)]
        time.sleep(0.1)
        answer = server.evaluate(structure=ATOM, headers={"x-request-timeout": "0.05"})
        assert (answer.status_code, answer.json()["code"]) == (504, "deadline_passed")
        assert all(b.result().status_code == 200 for b in busy)


def test_the_largest_structure_is_told_and_kept_to(model: Path) -> None:
    with running(models=[str(model)], max_atoms=5) as server:
        server.ready()
        assert server.get("/v1/models/main").json()["max_atoms"] == 5
        assert server.get("/v1/status").json()["limits"]["max_atoms_per_structure"] == 5
        row = {n: {"symbols": ["Si"] * n, "positions": [[2.4 * i, 0, 0] for i in range(n)]} for n in (5, 6)}
        assert server.evaluate(structure=row[5]).status_code == 200
        answer = server.evaluate(structure=row[6])
        assert (answer.status_code, answer.json()["code"], answer.json()["max_atoms"]) == (413, "too_large", 5)


def test_a_full_queue_refuses_quickly(model: Path) -> None:
    with (
        running(models=[str(model)], stand_in={"seconds": 0.3, "tile": 4}, max_queue_requests=4) as server,
        ThreadPoolExecutor(24) as pool,
    ):
        server.ready()
        answers = [f.result() for f in [pool.submit(server.evaluate, structure=ATOM) for _ in range(24)]]
        refused = [a for a in answers if a.status_code != 200]
        assert refused
        for answer in refused:
            assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
        assert len(refused) < len(answers)
        assert f'nepserve_shed_total{{reason="queue_full"}} {len(refused)}.0' in server.get("/metrics").text


def test_models_come_and_go_under_load(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    write_model(folder / "a.txt", "Si", seed=1)
    write_model(folder / "b.txt", "Si", "Ge", seed=2)
    (folder / "bad.txt").write_text("nep9 1 Si\n")
    with running(models=[f"si={folder / 'a.txt'}"], model_dir=str(folder)) as server:
        server.ready()
        stop = threading.Event()
        statuses: list[int] = []

        def ask() -> None:
            with httpx.Client(base_url=server.url, timeout=30) as client:
                while not stop.is_set():
                    statuses.append(client.post("/v1/evaluate", json={"model": "si", "structure": ATOM}).status_code)

        asking = [threading.Thread(target=ask) for _ in range(4)]
        for thread in asking:
            thread.start()
        try:
            for name, code in (("b.txt", 201), ("bad.txt", 422), ("a.txt", 201), ("b.txt", 201)):
                answer = httpx.post(f"{server.url}/v1/models", json={"name": "si", "path": name}, timeout=30)
                assert answer.status_code == code, answer.text
        finally:
            stop.set()
            for thread in asking:
                thread.join()
        assert set(statuses) == {200}
        assert server.get("/v1/models/si").json()["elements"] == ["Si", "Ge"]
        # Only the version that is served is left in the engine.
        end = time.monotonic() + 10
        while time.monotonic() < end and len(server.get("/v1/status").json()["engine"].get("models", ())) != 1:
            time.sleep(0.1)
        assert len(server.get("/v1/status").json()["engine"]["models"]) == 1
        descriptors = os.listdir(f"/proc/{server.process.pid}/fd")
        copies = [d for d in descriptors if _points_to(server.process.pid, d, "memfd:nep.txt")]
        assert len(copies) == 1


def _points_to(pid: int, descriptor: str, text: str) -> bool:
    try:
        return text in os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except FileNotFoundError:
        return False


def test_an_empty_server_takes_its_first_model(tmp_path: Path) -> None:
    with running(model_dir=str(tmp_path)) as server:
        server.wait_for("ready after")
        assert server.get("/readyz").json()["detail"] == "no model is served"
        assert server.evaluate(structure=ATOM).status_code == 503
        write_model(tmp_path / "si.txt", "Si")
        answer = httpx.post(f"{server.url}/v1/models", json={"name": "si", "path": "si.txt"}, timeout=30)
        assert answer.status_code == 201
        assert server.get("/readyz").status_code == 200
        assert server.evaluate(structure=ATOM).status_code == 200


def test_large_gzip_bodies(shared: ServerProcess) -> None:
    body = gzip.compress(json.dumps({"structures": [ATOM] * 5000}).encode())
    answer = httpx.post(
        f"{shared.url}/v1/evaluate", content=body, timeout=30,
        headers={"content-type": "application/json", "content-encoding": "gzip"},
    )  # fmt: skip
    assert answer.status_code == 200
    assert len(answer.json()["results"]) == 5000
