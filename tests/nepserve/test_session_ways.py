"""Sessions of a live server by every way in: equal to one call, shared batches, errors, limits, hostile bytes."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import msgpack
import numpy as np
import pytest

import nepcore
from bridges import crystal, serving, write_model
from nepserve.client import Client, NepserveError, StructureRejected
from nepserve.client.session import Session
from nepserve.wire import frame

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nepcore.structures import Structure
    from servers import ServerProcess

ALL = ("energy", "forces", "stress", "virial", "energies", "virials")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "nep.txt")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with serving(f"si={model}", frame_socket=0, max_body_mb=2) as found:
        yield found


@pytest.fixture(scope="module")
def library(model: Path) -> nepcore.Calculator:
    return nepcore.load(model, device="cpu", dtype="float64", backend="loop")


def frames(server: ServerProcess) -> str:
    found = re.search(r"frames on (\S+)", server.log)
    assert found is not None
    return found[1]


def place(server: ServerProcess) -> tuple[str, int]:
    return "127.0.0.1", int(frames(server).rpartition(":")[2])


def steps_of(server: ServerProcess, way: str) -> str:
    return frames(server) if way == "frames" else way


WAYS = ("http", "websocket", "frames")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pbc", [True, [True, False, True], False], ids=["crystal", "slab", "molecule"])
def test_steps_have_the_bits_of_a_call(
    server: ServerProcess, library: nepcore.Calculator, way: str, pbc: object
) -> None:
    client = Client(server.url, steps=steps_of(server, way))
    one = crystal()
    session = Session(client, one.numbers, pbc)
    names = ALL if pbc is True else tuple(name for name in ALL if name != "stress")
    rng = np.random.default_rng(1)
    positions, cell = one.positions.copy(), one.cell.copy()
    for step in range(4):
        moved = nepcore.Structure.make(one.numbers, positions, cell, pbc)
        wanted = library.evaluate([moved], names)
        found = session.step(positions, cell, ALL if step == 2 else names)
        assert found.keys() == set(names)
        for name in names:
            whole = wanted[name][0] if name in {"energy", "stress", "virial"} else wanted[name]
            np.testing.assert_array_equal(found[name], whole)
        # Across the border of the cell, and another cell.
        positions += rng.normal(0, 0.1, positions.shape) + np.array([0.0, 6.0 * (step == 1), 0.0])
        cell = cell * (1.0 + 0.01 * step)
    session.close()


@pytest.mark.parametrize("way", WAYS)
def test_single_precision_on_the_way(server: ServerProcess, way: str) -> None:
    one = crystal()
    found = Session(Client(server.url, dtype="float32", steps=steps_of(server, way)), one.numbers).step(
        one.positions, one.cell, ALL
    )
    wanted = Session(Client(server.url), one.numbers).step(one.positions.astype(np.float32), one.cell, ALL)
    assert found["energy"] == wanted["energy"]
    np.testing.assert_array_equal(found["forces"], wanted["forces"].astype(np.float32))


@pytest.mark.parametrize("way", WAYS)
def test_errors_name_field_and_atom(server: ServerProcess, way: str) -> None:
    one = crystal()
    client = Client(server.url, steps=steps_of(server, way))
    session = Session(client, one.numbers)
    good = session.step(one.positions, one.cell, ALL)
    for change, code, atoms in ((np.nan, "non_finite", (3,)), (None, "coincident_atoms", (3, 4))):
        bad = one.positions.copy()
        bad[3] = bad[4] if change is None else change
        with pytest.raises(StructureRejected) as raised:
            session.step(bad, one.cell, ALL)
        assert (raised.value.code, raised.value.field, raised.value.atoms) == (code, "positions", atoms)
    with pytest.raises(StructureRejected, match="cell") as raised:
        session.step(one.positions, 0.0 * one.cell, ALL)
    assert raised.value.code == "singular_cell"
    again = session.step(one.positions, one.cell, ALL)
    assert again["energy"] == good["energy"]
    with pytest.raises(StructureRejected, match="element") as raised:
        Session(client, [14, 79]).step(np.array([[0.0, 0, 0], [0, 0, 2]]), 9 * np.eye(3), ALL)
    assert (raised.value.code, raised.value.atoms) == ("unknown_element", (1,))
    with pytest.raises(NepserveError, match=r"unknown_model"):
        Session(client, [14], model="other").step(np.zeros((1, 3)), 9 * np.eye(3), ALL)


def test_people_and_programs_can_use_it_by_hand(server: ServerProcess, library: nepcore.Calculator) -> None:
    one = crystal()
    energy = library.evaluate([one], ["energy"])["energy"][0]
    opening = {"symbols": one.symbols, "cell": one.cell.tolist(), "properties": ["energy", "forces"]}
    opened = httpx.post(f"{server.url}/v1/sessions", json=opening).json()
    assert (opened["n_atoms"], opened["model"], opened["pbc"]) == (len(one), "si", [True] * 3)
    path = f"{server.url}/v1/sessions/{opened['id']}"
    answer = httpx.put(f"{path}/positions", json={"positions": one.positions.tolist()})
    assert answer.json()["energy"] == energy
    assert set(answer.json()) >= {"energy", "forces"}
    assert "stress" not in answer.json()
    body = msgpack.packb({"positions": one.positions.tobytes(), "cell": one.cell.tobytes(), "properties": ["energy"]})
    packed = httpx.put(f"{path}/positions", content=body, headers={"Content-Type": "application/msgpack"})
    assert np.frombuffer(msgpack.unpackb(packed.content)["energy"])[0] == energy
    assert httpx.delete(path).status_code == 204
    for gone in (httpx.delete(path), httpx.put(f"{path}/positions", json={"positions": one.positions.tolist()})):
        assert (gone.status_code, gone.json()["code"]) == (404, "session_lost")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/sessions", None, 405, "method_not_allowed"),
        ("POST", "/v1/sessions/x/positions", {}, 405, "method_not_allowed"),
        ("PUT", "/v1/sessions/x/elsewhere", {}, 404, "not_found"),
        ("PUT", "/v1/sessions/x/positions", {"positions": []}, 404, "session_lost"),
        ("GET", "/v1/sessions/x/stream", None, 400, "bad_request"),
        ("POST", "/v1/sessions", {"numbers": [14], "sorts": 1}, 422, "unknown_field"),
        ("POST", "/v1/sessions", {"numbers": []}, 422, "empty"),
        ("POST", "/v1/sessions", {}, 422, "missing_field"),
        ("POST", "/v1/sessions", {"numbers": [14], "symbols": ["Si"]}, 422, "ambiguous"),
        ("POST", "/v1/sessions", {"numbers": [14], "pbc": True}, 422, "singular_cell"),
        ("POST", "/v1/sessions", {"numbers": [14], "model": "none"}, 404, "unknown_model"),
        ("POST", "/v1/sessions", {"numbers": [14, 300]}, 422, "bad_value"),
        ("POST", "/v1/sessions", [1], 422, "bad_value"),
    ],
)
def test_what_is_refused(server: ServerProcess, method: str, path: str, body: Any, status: int, code: str) -> None:
    answer = httpx.request(method, server.url + path, **({} if body is None else {"json": body}))
    assert (answer.status_code, answer.json()["code"]) == (status, code)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ({"positions": [[0, 0, 0]]}, "bad_shape", "the session has 2 atoms"),
        ({"positions": [[0, 0, 0], [0, 0, "x"]]}, "bad_value", "z of atom 2"),
        ({}, "missing_field", "positions"),
        ({"positions": [[0, 0, 0], [0, 0, 2]], "numbers": [14, 14]}, "unknown_field", "numbers"),
        ({"positions": [[0, 0, 0], [0, 0, 2]], "properties": ["mass"]}, "unknown_property", "mass"),
        ({"positions": [[0, 0, 0], [0, 0, 2]], "cell": [1, 2]}, "bad_shape", "cell"),
    ],
)
def test_steps_that_are_refused(server: ServerProcess, body: dict[str, Any], code: str, said: str) -> None:
    opened = httpx.post(f"{server.url}/v1/sessions", json={"numbers": [14, 14]}).json()
    answer = httpx.put(f"{server.url}/v1/sessions/{opened['id']}/positions", json=body)
    assert answer.json()["code"] == code
    assert said in answer.json()["detail"]


def test_sessions_that_coincide_share_batches(server: ServerProcess) -> None:
    """Sixteen clients at once: fewer batches than steps, and every step its own result."""
    structures = [crystal(seed=seed) for seed in range(16)]
    wanted = [Client(server.url).evaluate(one, ["energy"])["energy"] for one in structures]
    before = batches(server)
    wrong: list[int] = []
    barrier = threading.Barrier(16)

    def run(index: int, one: Structure) -> None:
        session = Session(Client(server.url, steps=frames(server)), one.numbers)
        session.step(one.positions, one.cell, ("energy",))
        barrier.wait()
        found = [session.step(one.positions, one.cell, ("energy",))["energy"] for _ in range(10)]
        wrong.extend(index for energy in found if energy != wanted[index])
        session.close()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(structures)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert batches(server) - before < 16 * 11 / 2


def batches(server: ServerProcess) -> float:
    found = re.search(r'^nepserve_batches_total\{model="si"\} (\S+)', server.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def count(server: ServerProcess) -> float:
    found = re.search(r"^nepserve_sessions (\S+)", server.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def read_frame(sock: socket.socket) -> tuple[frame.Head, bytes]:
    data = b""
    while len(data) < 24 or len(data) < 24 + frame.read_head(data, 1 << 30).size:
        piece = sock.recv(65536)
        if not piece:
            raise ConnectionError("closed")
        data += piece
    return frame.read_head(data, 1 << 30), data[24:]


def test_a_frame_socket_by_hand(server: ServerProcess) -> None:
    """Bytes one by one, frames all at once, a second opening, and a session that ends with its connection."""
    before = count(server)
    with socket.create_connection(place(server), timeout=30) as sock:
        step = frame.pack_request(np.array([[0.0, 0, 0], [0, 0, 2.2]]), None, 0, 9)
        sock.sendall(step)
        head, payload = read_frame(sock)
        assert (head.kind, head.sequence, json.loads(payload)["code"]) == (frame.ERROR, 9, "session_lost")
        opening = frame.pack(frame.OPEN, json.dumps({"numbers": [14, 14]}).encode(), sequence=4)
        for k in range(len(opening)):
            sock.sendall(opening[k : k + 1])
        head, payload = read_frame(sock)
        assert (head.kind, head.sequence, head.atoms) == (frame.OPENED, 4, 2)
        assert count(server) == before + 1
        sock.sendall(b"".join(frame.pack_request(np.array([[0.0, 0, 0], [0, 0, 2.2]]), None, 0, k) for k in range(50)))
        data = b""
        while len(data) < 50 * (24 + 8 + 48):
            data += sock.recv(65536)
        sequences = [struct.unpack_from("<Q", data, 80 * k + 16)[0] for k in range(50)]
        assert sequences == list(range(50))
        sock.sendall(opening)
        read_frame(sock)
        assert count(server) == before + 1
    end = time.monotonic() + 10
    while count(server) != before and time.monotonic() < end:
        time.sleep(0.05)
    assert count(server) == before


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"X", b"NEPF\x02" + bytes(19), b"NEPF\x01\x00" + b"\xff" * 18],
    ids=["http", "a letter", "version", "length"],
)
def test_bytes_that_are_no_frames_are_told_and_cut_off(server: ServerProcess, data: bytes) -> None:
    with socket.create_connection(place(server), timeout=30) as sock:
        sock.sendall(data)
        head, payload = read_frame(sock)
        assert head.kind == frame.ERROR
        assert json.loads(payload)["code"] in {"bad_frame", "body_too_large"}
        assert sock.recv(10) == b""
    assert server.get("/readyz").status_code == 200


def test_a_client_that_goes_away_in_the_middle(server: ServerProcess) -> None:
    one = crystal(4)
    for _ in range(5):
        with socket.create_connection(place(server), timeout=30) as sock:
            opening = {"numbers": one.numbers.tolist(), "cell": one.cell.tolist()}
            sock.sendall(frame.pack(frame.OPEN, json.dumps(opening).encode()))
            read_frame(sock)
            sock.sendall(frame.pack_request(one.positions, None, 0, 1))
    small = crystal(1)
    found = Session(Client(server.url, steps=frames(server)), small.numbers).step(small.positions, small.cell, ALL)
    assert np.isfinite(found["forces"]).all()


def test_an_opening_that_fails_takes_no_place(model: Path) -> None:
    with (
        serving(f"si={model}", frame_socket=0, max_sessions_per_key=1) as server,
        socket.create_connection(place(server), timeout=30) as sock,
    ):
        one = crystal(1)
        opening = {"numbers": one.numbers.tolist(), "cell": one.cell.tolist()}
        sock.sendall(frame.pack(frame.OPEN, json.dumps(opening).encode()))
        assert read_frame(sock)[0].kind == frame.OPENED
        for wrong in ({"numbers": [92]}, {"numbers": []}, {"numbers": [14], "model": "none"}):
            assert httpx.post(f"{server.url}/v1/sessions", json=wrong).status_code in {404, 422, 400}
            sock.sendall(frame.pack(frame.OPEN, json.dumps(wrong).encode()))
            assert read_frame(sock)[0].kind == frame.ERROR
        sock.sendall(frame.pack_request(one.positions, None, 0, 1))
        assert read_frame(sock)[0].kind == frame.RESULT
        assert count(server) == 1


# HTTP by hand -----------------------------------------------------------------------------------------------------


def put(id_: str, body: bytes, *more: str) -> bytes:
    lines = [
        f"PUT /v1/sessions/{id_}/positions HTTP/1.1", "Host: here", f"Content-Type: {frame.CONTENT_TYPE}",
        f"Content-Length: {len(body)}", *more, "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + body


def http_answer(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(1)
    head = data.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    size = int(headers["content-length"])
    body = b""
    while len(body) < size:
        body += sock.recv(size - len(body))
    return int(head[0].split()[1]), headers, body


STEP = frame.pack_request(np.array([[0.0, 0, 0], [0, 0, 2.2]]), None, 0, 5)


def test_a_step_is_the_same_however_its_request_arrives(server: ServerProcess) -> None:
    id_ = opened(server)
    with socket.create_connection(server.address, timeout=30) as sock:
        whole = put(id_, STEP)
        sock.sendall(whole)
        status, headers, first = http_answer(sock)
        assert (status, headers["content-type"]) == (200, frame.CONTENT_TYPE)
        for cut_at in (20, len(whole) - len(STEP), len(whole) - 10):
            sock.sendall(whole[:cut_at])
            time.sleep(0.05)
            sock.sendall(whole[cut_at:])
            assert http_answer(sock)[::2] == (200, first)
        # One behind the other, among others of another kind and with a name of its own.
        sock.sendall(whole * 3 + b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n" + put(id_, STEP, "X-Request-Id: mine"))
        for _ in range(3):
            assert http_answer(sock)[::2] == (200, first)
        assert http_answer(sock)[0] == 200
        status, headers, body = http_answer(sock)
        assert (status, headers["x-request-id"], body) == (200, "mine", first)
        chunked = put(id_, b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
        sock.sendall(chunked + b"%x\r\n%b\r\n0\r\n\r\n" % (len(STEP), STEP))
        assert http_answer(sock)[::2] == (200, first)
        sock.sendall(put(id_, STEP, "Connection: close"))
        assert http_answer(sock)[::2] == (200, first)
        assert sock.recv(1) == b""


def test_steps_by_hand_that_fail(server: ServerProcess) -> None:
    id_ = opened(server)
    with socket.create_connection(server.address, timeout=30) as sock:
        for request, status, code in (
            (put("nothing", STEP), 404, "session_lost"), (put(id_, STEP[:-8]), 400, "bad_frame"),
            (put(id_, b""), 400, "bad_frame"), (put(id_, STEP, "X-Priority: high"), 400, "bad_header"),
            (put(id_, STEP, "X-Request-Timeout: soon"), 400, "bad_header"),
            (put(id_, frame.pack_request(np.zeros((2, 3)), None, 0, 1)), 422, "coincident_atoms"),
        ):  # fmt: skip
            sock.sendall(request)
            found, headers, body = http_answer(sock)
            document = json.loads(body)
            assert (found, document["code"]) == (status, code)
            assert headers["content-type"] == "application/problem+json"
            assert document["request_id"] == headers["x-request-id"]
        sock.sendall(put(id_, STEP))
        assert http_answer(sock)[0] == 200
        # What comes after a request that cannot be read is not answered.
        sock.sendall(put(id_, STEP) + b"\0\0\0\r\n\r\n")
        answers = b""
        while piece := sock.recv(65536):
            answers += piece
        assert b"400 Bad Request" in answers


def test_a_step_whose_client_goes_away_is_taken_back(server: ServerProcess) -> None:
    one = crystal(4)
    client = Client(server.url)
    for _ in range(5):
        described = {"numbers": one.numbers.tolist(), "cell": one.cell.tolist()}
        id_ = httpx.post(f"{server.url}/v1/sessions", json=described).json()["id"]
        with socket.create_connection(server.address, timeout=30) as sock:
            sock.sendall(put(id_, frame.pack_request(one.positions, None, 0, 1)))
    found = Session(client, one.numbers).step(one.positions, one.cell, ALL)
    assert np.isfinite(found["forces"]).all()
    text = httpx.get(f"{server.url}/metrics").text
    assert re.search(r"^nepserve_requests_in_flight 0\.0$", text, re.MULTILINE)


# The websocket ----------------------------------------------------------------------------------------------------


def upgrade(server: ServerProcess, id_: str, **headers: str) -> tuple[socket.socket, bytes]:
    sock = socket.create_connection(server.address, timeout=30)
    told = {
        "Host": server.url[7:], "Upgrade": "websocket", "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }  # fmt: skip
    told.update({name.replace("_", "-"): value for name, value in headers.items()})
    lines = [f"GET /v1/sessions/{id_}/stream HTTP/1.1", *(f"{name}: {value}" for name, value in told.items()), "", ""]
    sock.sendall("\r\n".join(lines).encode())
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            break
        data += piece
    return sock, data


def opened(server: ServerProcess) -> str:
    return httpx.post(f"{server.url}/v1/sessions", json={"numbers": [14, 14]}).json()["id"]


def masked(first: int, payload: bytes) -> bytes:
    mask = b"\x01\x82\x33\x40"
    size = bytes([128 | len(payload)]) if len(payload) < 126 else bytes([254]) + struct.pack(">H", len(payload))
    return bytes([first]) + size + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(payload))


def message(sock: socket.socket) -> tuple[int, bytes]:
    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = sock.recv(size - len(data))
            if not piece:
                raise ConnectionError("closed")
            data += piece
        return data

    first, size = exactly(2)
    if size == 126:
        size = struct.unpack(">H", exactly(2))[0]
    return first, exactly(size)


def test_the_handshake_is_that_of_the_standard(server: ServerProcess) -> None:
    """Key and proof of RFC 6455, section 1.3."""
    sock, head = upgrade(server, opened(server))
    with sock:
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec_WebSocket_Version": "8"}, b"400"),
        ({"Sec_WebSocket_Key": "short"}, b"400"),
        ({"Origin": "http://elsewhere.example"}, b"403"),
    ],
)
def test_handshakes_that_are_refused(server: ServerProcess, headers: dict[str, str], status: bytes) -> None:
    sock, head = upgrade(server, opened(server), **headers)
    with sock:
        assert head.startswith(b"HTTP/1.1 " + status)


def test_a_stream_of_no_session(server: ServerProcess) -> None:
    sock, head = upgrade(server, "unknown")
    with sock:
        assert head.startswith(b"HTTP/1.1 404")
        assert b"session_lost" in head + sock.recv(65536)


def test_messages_in_pieces_pings_and_the_end(server: ServerProcess) -> None:
    sock, _ = upgrade(server, opened(server))
    with sock:
        step = frame.pack_request(np.array([[0.0, 0, 0], [0, 0, 2.2]]), None, 0, 5)
        sock.sendall(masked(0x02, step[:10]) + masked(0x89, b"hello") + masked(0x00, step[10:30]))
        assert message(sock) == (0x8A, b"hello")
        sock.sendall(masked(0x80, step[30:]))
        first, payload = message(sock)
        assert first == 0x82
        assert frame.read_result(frame.read_head(payload, 1 << 20), payload[24:], 2, 0, 5)["forces"].shape == (2, 3)
        sock.sendall(masked(0x88, b"\x03\xe8"))
        assert message(sock) == (0x88, b"\x03\xe8")
        assert sock.recv(1) == b""


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x82\x05hello", 1002),
        (masked(0xC2, b"hello"), 1002),
        (masked(0x81, b"hello"), 1003),
        (masked(0x80, b"hello"), 1002),
        (masked(0x09, b"hello"), 1002),
        (masked(0x82, b"hello"), 1002),
        (b"\x82\xff" + struct.pack(">Q", 1 << 40) + bytes(4), 1009),
    ],
    ids=["unmasked", "reserved", "text", "nothing to go on with", "ping in pieces", "no frame", "too long"],
)
def test_messages_that_break_the_rules_end_the_stream(server: ServerProcess, data: bytes, code: int) -> None:
    sock, _ = upgrade(server, opened(server))
    with sock:
        sock.sendall(data)
        first, payload = message(sock)
        while first != 0x88:
            first, payload = message(sock)
        assert struct.unpack(">H", payload[:2])[0] == code
        assert sock.recv(1) == b""


# Keys, limits, the end --------------------------------------------------------------------------------------------


def test_keys_are_asked_for_and_sessions_are_the_keys_own(model: Path, tmp_path: Path) -> None:
    keys = ["one:0123456789abcdef", "two:fedcba9876543210"]
    place_ = tmp_path / "frames.sock"
    one = crystal(1)
    with serving(f"si={model}", api_keys=keys, frame_socket=str(place_), max_sessions_per_key=2) as server:
        for way in ("http", "websocket", f"frames://{place_}"):
            for key in (None, "x" * 20):
                with pytest.raises(NepserveError, match="unauthorized"):
                    Session(Client(server.url, api_key=key, steps=way), one.numbers).step(one.positions, one.cell, ALL)
            client = Client(server.url, api_key="0123456789abcdef", steps=way)
            # More than may be kept: they are opened again and again, unseen.
            many = [Session(client, one.numbers) for _ in range(4)]
            energies = {s.step(one.positions, one.cell, ALL)["energy"] for _ in range(3) for s in many}
            assert len(energies) == 1
            for session in many:
                session.close()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30)
            sock.connect(str(place_))
            # A stranger may not send much.
            sock.sendall(frame.HEAD.pack(frame.MAGIC, frame.VERSION, frame.OPEN, 0, 0, frame.MAX_OPENING + 1, 0))
            assert b"body_too_large" in read_frame(sock)[1]
            assert sock.recv(1) == b""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30)
            sock.connect(str(place_))
            sock.sendall(frame.pack(frame.OPEN, json.dumps({"api_key": "0123456789abcdef"}).encode()))
            head, payload = read_frame(sock)
            assert (head.kind, payload) == (frame.OPENED, b"{}")
            opening = json.dumps({"api_key": "0123456789abcdef", "numbers": [14]}).encode()
            sock.sendall(frame.pack(frame.OPEN, opening.ljust(frame.MAX_OPENING + 1)))
            head, payload = read_frame(sock)
            assert head.kind == frame.OPENED, payload
        many_atoms = np.full(300_000, 14)
        stranger = Session(Client(server.url, api_key="x" * 20, steps=f"frames://{place_}"), many_atoms)
        with pytest.raises(NepserveError, match="unauthorized"):
            stranger.step(np.zeros((len(many_atoms), 3)), one.cell, ("energy", "forces"))
        told = {"Authorization": "Bearer 0123456789abcdef"}
        id_ = httpx.post(f"{server.url}/v1/sessions", json={"numbers": [14]}, headers=told).json()["id"]
        other = {"Authorization": "Bearer fedcba9876543210"}
        assert httpx.delete(f"{server.url}/v1/sessions/{id_}", headers=other).status_code == 404
        assert httpx.delete(f"{server.url}/v1/sessions/{id_}", headers=told).status_code == 204
        assert server.terminate() == 0
    assert not place_.exists()


@pytest.mark.parametrize("way", WAYS)
def test_an_idle_session_is_opened_again(model: Path, way: str) -> None:
    one = crystal(1)
    with serving(f"si={model}", frame_socket=0, session_idle=1.0) as server:
        session = Session(Client(server.url, steps=steps_of(server, way)), one.numbers)
        first = session.step(one.positions, one.cell, ALL)
        end = time.monotonic() + 10
        while count(server) and time.monotonic() < end:
            time.sleep(0.1)
        assert not count(server)
        second = session.step(one.positions, one.cell, ALL)
        assert first["energy"] == second["energy"]
        assert count(server) == 1


def test_the_end_of_a_server_closes_its_streams(model: Path) -> None:
    with serving(f"si={model}", frame_socket=0) as server:
        one = crystal(1)
        sessions = [Session(Client(server.url, steps=steps_of(server, way)), one.numbers) for way in WAYS]
        for session in sessions:
            session.step(one.positions, one.cell, ALL)
        assert server.terminate() == 0
