"""A small server with a toy potential, in threads of the test's own process, that misbehaves as it is told."""

from __future__ import annotations

import itertools
import json
import shutil
import socketserver
import subprocess
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest

from nepcore.errors import StructureError
from nepcore.structures import Predictions
from nepserve import wire

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nepcore.structures import Structure, Structures

ELEMENTS = {1, 8, 13, 14}
"""What the toy knows: H, O, Al, Si."""


def toy(structure: Structure) -> dict[str, Any]:
    """Energies, forces, virials of φ(r) = √(Z Z') exp(−r²) over all images: smooth, short-ranged, differentiable."""
    weight = np.sqrt(structure.numbers[:, None].astype(float) * structure.numbers)
    spans = [range(-4, 5) if periodic else range(1) for periodic in structure.pbc]
    shifts = np.array([*itertools.product(*spans)], float) @ structure.cell
    # (image, i, j, xyz): from atom i to that image of atom j
    vector = structure.positions[None] - structure.positions[:, None] + shifts[:, None, None]
    phi = weight * np.exp(-(vector**2).sum(axis=3))
    np.fill_diagonal(phi[len(shifts) // 2], 0.0)
    energies = 0.5 * phi.sum(axis=(0, 2))
    slope = -phi[..., None] * vector  # of half of φ with the vector
    forces = 2 * slope.sum(axis=(0, 2))
    virials = -np.einsum("sija,sijb->jab", vector, slope)
    energies += 0.01 * structure.numbers + 1e-3 * (structure.temperature or 0.0)
    volume = structure.volume
    virial = virials.sum(axis=0)
    stress = -virial / volume if structure.pbc.all() and volume else np.full((3, 3), np.nan)
    return {
        "energy": energies.sum(), "energies": energies, "forces": forces, "virial": virial, "virials": virials,
        "stress": stress[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]], "descriptors": np.outer(energies, [1.0, 2.0, 3.0]),
    }  # fmt: skip


def evaluate(structures: Structures, properties: tuple[str, ...]) -> Predictions:
    """The toy on a block, with the faults a server finds."""
    errors = structures.problems()
    found = []
    for i, structure in enumerate(structures):
        unknown = [k for k, z in enumerate(structure.numbers.tolist()) if z not in ELEMENTS]
        if unknown and i not in errors:
            reason = f"atom {unknown[0] + 1}: element Z={structure.numbers[unknown[0]]} is not in the model"
            errors[i] = StructureError("unknown_element", reason, field="numbers", atoms=tuple(unknown))
        nothing = {"energy": np.nan, "stress": np.full(6, np.nan), "virial": np.full((3, 3), np.nan)}
        shapes = {"energies": (), "forces": (3,), "virials": (3, 3), "descriptors": (3,)}
        nothing |= {name: np.full((len(structure), *shape), np.nan) for name, shape in shapes.items()}
        found.append(nothing if i in errors else toy(structure))
    values = {}
    for name in properties:
        key = "energy" if name == "free_energy" else name
        parts = [f[key] for f in found]
        whole = np.concatenate if name in {"energies", "forces", "virials", "descriptors"} else np.stack
        values[name] = np.asarray(whole(parts), float)
    return Predictions(structures.counts, values, structures.pbc.all(axis=1), errors)


@dataclass
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def message(self) -> dict[str, Any]:
        """The msgpack body."""
        return msgpack.unpackb(self.body)

    @property
    def counts(self) -> list[int]:
        """Atoms of each structure."""
        message = self.message
        return np.frombuffer(message["n_atoms"], "<i4").tolist() if "n_atoms" in message else [len(message["numbers"])]


@dataclass
class Reply:
    """What the server does with one request, instead of or with its right answer."""

    status: int | None = None
    body: bytes | None = None
    kind: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    change: Callable[[dict[str, Any]], Any] | None = None
    """What to do to the msgpack map of the right answer."""
    form: str = "length"
    """``length``, ``chunked``, ``close`` (no length: the end of the connection is the end), ``raw`` (only ``body``)."""
    keep: int | None = None
    """Bytes of the body that are sent before the connection is cut; None sends all."""
    cut: bool = False
    """Close after the answer, without a word."""
    mute: bool = False
    """Close instead of an answer."""
    unread: bool = False
    """Answer when the headers are there, without reading the body, and close."""
    wait: threading.Event | None = None
    """Answer only once this is set."""


def problem(
    status: int, code: str, detail: str = "so it is", headers: dict[str, str] | None = None, **extra: Any
) -> Reply:
    """An error as nepserve writes it."""
    document = {"type": "about:blank", "title": code, "status": status, "code": code, "detail": detail, **extra}
    return Reply(status, json.dumps(document).encode(), "application/problem+json", headers or {})


class ToyServer:
    """The server: ``plan`` holds replies for the next evaluations (then all is well), ``seen`` the requests."""

    def __init__(self, socket_path: Path | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.seen: list[Seen] = []
        self.plan: deque[Reply] = deque()
        self.always: Reply | None = None
        self.stay: threading.Event | None = None
        """Keeps connections open whose request is not read."""
        self.ready: deque[Reply] = deque()
        self.connections = 0
        self.open: set[Any] = set()
        self.stopped = threading.Event()
        toy_server = self

        class Connection(socketserver.StreamRequestHandler):
            disable_nagle_algorithm = socket_path is None

            def handle(self) -> None:
                toy_server.serve(self)

        if socket_path is not None:
            base: Any = type("Unix", (socketserver.ThreadingMixIn, socketserver.UnixStreamServer), {})
            self.url = f"unix://{socket_path}"
            address: Any = str(socket_path)
        else:
            base = type("Tcp", (socketserver.ThreadingMixIn, socketserver.TCPServer), {"allow_reuse_address": True})
            address = ("127.0.0.1", 0)
        base.daemon_threads = True
        base.request_queue_size = 64
        base.handle_error = lambda *_: None
        self.server = base(address, Connection)
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        if socket_path is None:
            self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def evaluations(self) -> list[Seen]:
        """The requests that asked for results."""
        return [s for s in self.seen if s.path.endswith("/v1/evaluate")]

    def stop(self) -> None:
        """Stop listening and close every connection."""
        self.stopped.set()
        self.server.shutdown()
        self.server.server_close()
        self.drop()
        self.thread.join(10)

    def drop(self) -> None:
        """Close every connection, as a server does with those that idle too long."""
        for connection in list(self.open):
            connection.shut()

    def serve(self, handler: socketserver.StreamRequestHandler) -> None:
        self.connections += 1
        number = self.connections
        sock = handler.request
        lock = threading.Lock()

        class Open:
            def shut(self) -> None:
                with lock:
                    try:
                        # On a TLS socket unwrap() would wait for the peer.
                        sock.shutdown(2)
                    except OSError:
                        return

        entry = Open()
        self.open.add(entry)
        try:
            while self.exchange(handler, number):
                pass
        except OSError:
            return
        finally:
            self.open.discard(entry)

    def exchange(self, handler: socketserver.StreamRequestHandler, number: int) -> bool:
        first = handler.rfile.readline()
        if not first:
            return False
        method, path, _ = first.decode().split(" ")
        headers: dict[str, str] = {}
        while (line := handler.rfile.readline().strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        reply = self.reply_to(path)
        if reply.unread:
            self.seen.append(Seen(method, path, headers, b"", number))
            self.write(handler, reply, reply.status or 413, reply.kind or "text/plain", reply.body or b"")
            if self.stay is not None:
                self.stay.wait(60)
            return False
        body = handler.rfile.read(int(headers.get("content-length", 0)))
        seen = Seen(method, path, headers, body, number)
        self.seen.append(seen)
        if reply.mute:
            return False
        status, kind, right = self.right(seen) if reply.body is None else (200, "application/msgpack", b"")
        if reply.wait is not None and not reply.wait.wait(60):
            return False
        if reply.body is not None:
            right = reply.body
        if reply.change is not None:
            message = msgpack.unpackb(right)
            changed = reply.change(message)
            right = msgpack.packb(message if changed is None else changed)
        return self.write(handler, reply, reply.status or status, reply.kind or kind, right)

    def reply_to(self, path: str) -> Reply:
        if path.endswith("/v1/evaluate"):
            return self.plan.popleft() if self.plan else self.always or Reply()
        if path.endswith("/readyz"):
            return self.ready.popleft() if self.ready else Reply(200, b"{}", "application/json")
        return Reply()

    def right(self, seen: Seen) -> tuple[int, str, bytes]:
        documents: dict[str, Any] = {
            "/v1/models": {"models": [{"name": "toy", "elements": ["H", "O", "Al", "Si"]}]},
            "/v1/models/toy": {"name": "toy", "elements": ["H", "O", "Al", "Si"]},
            "/v1/models/a%2Fb": {"name": "a/b"},
            "/v1/status": {"queue": {"atoms": 0}},
            "/v1/version": {"nepserve": "0"},
        }
        for path, document in documents.items():
            if seen.path.endswith(path):
                return 200, "application/json", json.dumps(document).encode()
        if not seen.path.endswith("/v1/evaluate"):
            return problem_answer(wire.WireError(None, "not_found", f"nothing at {seen.path}"))
        try:
            request = wire.decode(seen.headers.get("content-type"), seen.body)
            if request.model not in {None, "toy"}:
                return problem_answer(
                    wire.WireError(None, "unknown_model", f"no model {request.model!r}", models=["toy"])
                )
            kind, body = wire.encode(request, evaluate(request.structures, request.properties))
        except wire.WireError as error:
            return problem_answer(error)
        return 200, kind, body

    def write(
        self, handler: socketserver.StreamRequestHandler, reply: Reply, status: int, kind: str, body: bytes
    ) -> bool:
        out = handler.wfile
        if reply.form == "raw":
            out.write(body)
            return False
        lines = [f"HTTP/1.1 {status} Toy", f"Content-Type: {kind}", *(f"{k}: {v}" for k, v in reply.headers.items())]
        if reply.form == "chunked":
            lines.append("Transfer-Encoding: chunked")
            pieces = [body[k : k + 1000] for k in range(0, len(body), 1000)]
            sent = (
                b"".join(b"%x;note=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nX-End: yes\r\n\r\n"
            )
        else:
            if reply.form == "length":
                lines.append(f"Content-Length: {len(body)}")
            sent = body
        head = ("\r\n".join(lines) + "\r\n\r\n").encode()
        # One write would arrive as one piece; real answers do not always.
        out.write(head)
        out.write(sent if reply.keep is None else sent[: reply.keep])
        out.flush()
        return reply.form != "close" and reply.keep is None and not reply.cut and not reply.unread


def problem_answer(error: wire.WireError) -> tuple[int, str, bytes]:
    return error.status, "application/problem+json", json.dumps(error.problem("the-id")).encode()


@pytest.fixture
def server() -> Iterator[ToyServer]:
    found = ToyServer()
    yield found
    found.stop()


@pytest.fixture
def make_server() -> Iterator[Callable[..., ToyServer]]:
    """Make any number of servers; they are stopped after the test."""
    made: list[ToyServer] = []

    def make(**options: Any) -> ToyServer:
        made.append(ToyServer(**options))
        return made[-1]

    yield make
    for found in made:
        if not found.stopped.is_set():
            found.stop()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that nobody signed, and its key."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@pytest.fixture
def reply() -> type[Reply]:
    return Reply


@pytest.fixture
def fault() -> Callable[..., Reply]:
    return problem


@pytest.fixture
def toy_results() -> Callable[[Structure], dict[str, Any]]:
    return toy
