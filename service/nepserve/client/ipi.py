"""A force client for i-PI, and for everything else that hosts i-PI's socket protocol (ASE's ``SocketIOCalculator``).

The other side listens, this side connects. Messages begin with twelve letters; numbers are in the machine's own byte
order, as the protocol has it: int32 and float64, bohr and hartree. Cell vectors come as columns and leave us as rows;
the virial goes out as i-PI adds it to the kinetic part, W = −∂E/∂ε. Positions come unwrapped, and need no wrapping.

i-PI evaluates the beads of a path integral together where its ``<ffsocket>`` has a ``<batch_size>``: they arrive as one
message and leave as one request. Without it, several connections keep several beads under way, and the server puts
them into its batches.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .forcefield import as_client, check_elements, evaluator
from .units import BOHR, HARTREE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from .forcefield import Evaluator, Forces
    from .http import Client

PREFIX = "/tmp/ipi_"
"""What i-PI puts in front of the name of a unix socket."""

WAIT_SECONDS = 60.0
"""How long a driver waits for i-PI's socket, s, where nothing else is said."""

PROBE_SECONDS = 5
"""A quiet TCP connection is probed this often, s."""

_HEAD = 12
_MAX_BATCH = 1 << 16


class ProtocolError(Exception):
    """What arrived is not i-PI's protocol, or not of the structure that was given."""


class NoServerError(ConnectionError):
    """Nobody listened at i-PI's address within the time to wait."""


@dataclass(frozen=True)
class Address:
    """Where i-PI listens: ``path`` of a unix socket, or ``host`` and ``port``."""

    path: str | None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        return f"unix socket {self.path}" if self.path is not None else f"{self.host}:{self.port}"

    def connect(self, timeout: float) -> socket.socket:
        """One attempt to connect."""
        if self.path is None:
            found = socket.create_connection((self.host, self.port), timeout=timeout)
            # A step is a few short messages to and fro: none may wait for company.
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A listener whose queue is full drops connections without a word, and a node may vanish: find out.
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if sys.platform == "linux":
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        else:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                found.settimeout(timeout)
                found.connect(self.path)
            except BaseException:
                found.close()
                raise
        found.settimeout(None)
        return found


def parse_address(text: str) -> Address:
    """Take ``host:port``, ``unix:name`` (the ``<address>`` of i-PI's input) or ``unix:/whole/path`` apart.

    Raises:
        ValueError: Neither of them.
    """
    kind, _, rest = text.partition(":")
    if kind == "unix":
        name = rest.removeprefix("//") if rest.startswith("///") else rest
        if not name:
            raise ValueError(
                f"{text!r}: a unix socket needs a name, as in unix:water, or a path, as in unix:/run/water"
            )
        path = name if name.startswith("/") else PREFIX + name
        if len(path.encode()) > 107:
            raise ValueError(f"{path!r} is too long for a unix socket: at most 107 bytes")
        return Address(path)
    host, colon, port = text.rpartition(":")
    if not colon or not host or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address of i-PI; wanted host:port or unix:name")
    return Address(None, host.removeprefix("[").removesuffix("]"), int(port))


def connect(
    address: Address, seconds: float = WAIT_SECONDS, report: Callable[[str], None] | None = None
) -> socket.socket:
    """Connect to i-PI, waiting for it if it is not there yet, or has no room in its queue.

    Args:
        address: Where it listens, or will.
        seconds: How long to wait for it.
        report: Told once if there is something to wait for.

    Raises:
        NoServerError: It was not there within ``seconds``.
        OSError: The address can never work (an unknown host, a socket of somebody else).
    """
    ends = time.monotonic() + seconds
    pause = 0.01
    while True:
        try:
            return address.connect(max(ends - time.monotonic(), 0.05))
        except (socket.gaierror, PermissionError) as error:
            raise type(error)(error.errno, f"cannot connect to i-PI at {address}: {error.strerror}") from error
        except OSError as error:
            # Not there yet, or too many came at once: a full queue refuses, resets or is "temporarily unavailable".
            if time.monotonic() + pause >= ends:
                raise NoServerError(
                    f"i-PI was not at {address} within {seconds:g} s: {error.strerror or error}. "
                    "Is it running, and is that the <address> (and <port>) of its <ffsocket>?"
                ) from error
            if report is not None:
                report(f"waiting up to {seconds:g} s for i-PI at {address}")
                report = None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)


class Driver:
    """One connection to i-PI: receives positions, has them evaluated, sends forces.

    Attributes:
        steps: Messages with positions that were answered.
        heard: Whether i-PI ever said anything.
    """

    def __init__(self, stream: socket.socket, field: Evaluator, n_atoms: int) -> None:
        """Prepare; :meth:`serve` does the work.

        Args:
            stream: A connected socket; the caller closes it.
            field: Forces of the atoms.
            n_atoms: How many they are.
        """
        self.steps = 0
        self.heard = False
        self._stream = stream
        self._field = field
        self._n_atoms = n_atoms
        self._batch = 0
        self._results: list[Forces] | None = None

    def serve(self) -> None:
        """Answer until i-PI says that it is done, or closes the connection between two steps.

        Raises:
            NepserveError: The server gave no forces; nothing was sent to i-PI for that step.
            ProtocolError: What came is not the protocol.
            ConnectionError: The connection broke in the middle of a step.
        """
        while True:
            head = self._message()
            if head == "STATUS":
                self._send(_name("NEEDINIT" if not self._batch else "READY" if self._results is None else "HAVEDATA"))
            elif head == "INIT":
                self._initialize()
            elif head == "POSDATA":
                # Whatever happens below, forces of earlier positions are never sent again.
                self._results = None
                self._results = self._evaluate(*self._positions())
            elif head == "GETFORCE":
                if self._results is None:
                    raise ProtocolError("i-PI asked for forces (GETFORCE) before it sent positions (POSDATA)")
                self._answer(self._results)
                self._results = None
                self.steps += 1
            elif head in {"EXIT", ""}:
                return
            else:
                raise ProtocolError(f"i-PI sent {head!r}, which is none of its protocol's messages")

    def _initialize(self) -> None:
        """INIT: the replica's number, and a string that may announce batches."""
        self._receive(4)
        length = self._integer("INIT", 1 << 24)
        text = self._receive(length).decode("utf-8", "replace")
        found = re.search(r"(?:^|[,\s{])\s*\"?batch_size\"?\s*:\s*(\d+)", text)
        self._batch = int(found[1]) if found else 1
        if not 1 <= self._batch <= _MAX_BATCH:
            raise ProtocolError(f"i-PI announced batches of {self._batch}; there can be 1 to {_MAX_BATCH}")

    def _positions(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """POSDATA: positions (B, n, 3) and cells (B, 3, 3) of rows, Å."""
        if not self._batch:
            raise ProtocolError("i-PI sent positions (POSDATA) before INIT")
        B = self._batch
        if B > 1:
            # Batches say first how many atoms their structures have, single structures last.
            self._check_count(self._integer("POSDATA", 1 << 30))
        boxes = np.frombuffer(self._receive(144 * B)).reshape(B, 2, 3, 3)
        if B == 1:
            self._check_count(self._integer("POSDATA", 1 << 30))
        positions = np.frombuffer(self._receive(24 * B * self._n_atoms)).reshape(B, self._n_atoms, 3)
        for box, inverse in boxes:
            # Says early, and at no cost, that the two sides disagree about what comes where.
            if np.isfinite(box).all() and np.linalg.det(box) and not np.allclose(box @ inverse, np.eye(3), atol=1e-5):
                raise ProtocolError("i-PI sent a cell and an inverse that do not belong together")
        return positions * BOHR, boxes[:, 0].transpose(0, 2, 1) * BOHR

    def _check_count(self, n: int) -> None:
        if n != self._n_atoms:
            raise ProtocolError(
                f"i-PI has {n} atoms and the structure that was given has {self._n_atoms}: is it the right file?"
            )

    def _evaluate(self, positions: NDArray[np.float64], cells: NDArray[np.float64]) -> list[Forces]:
        # i-PI fills the last batch of a step up by repeating its last structure.
        B = len(positions)
        real = B
        while (
            real > 1
            and np.array_equal(positions[real - 1], positions[real - 2])
            and np.array_equal(cells[real - 1], cells[real - 2])
        ):
            real -= 1
        found = self._field.many(positions[:real], cells[:real])
        return found + [found[-1]] * (B - real)

    def _answer(self, results: Sequence[Forces]) -> None:
        """FORCEREADY, in one piece: energies, count, forces, virials, and an empty string each."""
        count = np.int32(self._n_atoms).tobytes()
        parts = [
            _name("FORCEREADY"),
            np.array([one.energy / HARTREE for one in results]).tobytes(),
            count,
            *((one.forces * (BOHR / HARTREE)).tobytes() for one in results),
            *((one.virial.T / HARTREE).tobytes() for one in results),
            np.zeros(len(results), np.int32).tobytes(),
        ]
        self._send(b"".join(parts))

    def _message(self) -> str:
        """The name of the next message; empty if the connection was closed before one began."""
        first = self._stream.recv(_HEAD)
        if not first:
            if self._results is not None:
                raise ConnectionError("i-PI closed the connection in the middle of a step")
            return ""
        self.heard = True
        rest = self._receive(_HEAD - len(first)) if len(first) < _HEAD else b""
        return (first + rest).decode("ascii", "replace").strip().upper()

    def _integer(self, what: str, most: int) -> int:
        value = int(np.frombuffer(self._receive(4), np.int32)[0])
        if not 0 <= value <= most:
            raise ProtocolError(f"i-PI sent a length of {value} in {what}")
        return value

    def _receive(self, size: int) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            read = self._stream.recv_into(view[done:])
            if not read:
                raise ConnectionError("i-PI closed the connection in the middle of a message")
            done += read
        return data

    def _send(self, data: bytes) -> None:
        self._stream.sendall(data)


def _name(word: str) -> bytes:
    return word.ljust(_HEAD).encode()


def run(
    address: str,
    url: str | Client,
    numbers: ArrayLike,
    *,
    model: str | None = None,
    pbc: bool | Sequence[bool] = True,
    temperature: float | None = None,
    connections: int = 1,
    wait_seconds: float = WAIT_SECONDS,
    report: Callable[[str], None] | None = None,
    **options: Any,
) -> int:
    """Serve i-PI until it is done.

    Args:
        address: ``host:port`` or ``unix:name``; see :func:`parse_address`.
        url: Address of the nepserve server, or a client.
        numbers: Atomic numbers in i-PI's order of atoms, (n,): the protocol does not tell them.
        model: Name of the model; None for the client's, or the server's only one.
        pbc: Periodic directions; the protocol does not tell them either, and i-PI always has a cell.
        temperature: K, for temperature models.
        connections: How many to open, for so many structures under way at a time.
        wait_seconds: How long to wait for i-PI, and for the server, to be there.
        report: Told, in a sentence, what happens.
        options: ``api_key``, ``timeout``, ``retries``, ``dtype``, ``priority``, ``verify``: of the client.

    Returns:
        How many force messages were sent.

    Raises:
        ValueError: An argument that cannot be used, or an element that the model lacks.
        NoServerError: i-PI was not there in time.
        NepserveError: The server gave no forces. All connections are closed; i-PI gets nothing rather than old forces.
        ProtocolError: See :meth:`Driver.serve`.
    """
    place = parse_address(address)
    if connections < 1:
        raise ValueError(f"connections must be at least 1, not {connections}")
    z = np.array(numbers, np.uint8)
    if not len(z):
        raise ValueError("the structure has no atoms")
    say = report or (lambda _: None)
    client = as_client(url, options)
    client.wait_until_ready(wait_seconds)
    check_elements(client, model, z.tolist())
    lines = [_Line(place, wait_seconds) for _ in range(connections)]
    try:
        for k, line in enumerate(lines):
            line.connect(None if k else say)
        many = "" if connections == 1 else f" {connections} times"
        say(f"connected to i-PI at {place}{many}; {len(z)} atoms")
        fields = [evaluator(client, z, pbc, model=model, temperature=temperature) for _ in lines]
        if connections == 1:
            return lines[0].serve(fields[0], len(z))
        return _serve_all(lines, fields, len(z))
    finally:
        for line in lines:
            line.close()


class _Line:
    """A connection that is made anew if it breaks before i-PI has said anything: then nobody had accepted it."""

    def __init__(self, place: Address, seconds: float) -> None:
        self._place = place
        self._seconds = seconds
        self._stream: socket.socket | None = None

    def connect(self, report: Callable[[str], None] | None = None) -> None:
        self.close()
        self._stream = connect(self._place, self._seconds, report)

    def serve(self, field: Evaluator, n_atoms: int) -> int:
        """Serve to the end; how many messages with positions were answered."""
        ends = time.monotonic() + self._seconds
        while True:
            assert self._stream is not None
            driver = Driver(self._stream, field, n_atoms)
            try:
                driver.serve()
            except OSError:
                if driver.heard or time.monotonic() > ends:
                    raise
                self.connect()
            else:
                return driver.steps

    def hang_up(self) -> None:
        """Wake a thread that reads: for it, the stream ends."""
        if self._stream is not None:
            with suppress(OSError):
                self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def _serve_all(lines: Sequence[_Line], fields: Sequence[Evaluator], n_atoms: int) -> int:
    """Serve several connections; the first failure ends them all."""
    with ThreadPoolExecutor(len(lines)) as pool:
        jobs = [pool.submit(line.serve, field, n_atoms) for line, field in zip(lines, fields, strict=True)]
        try:
            done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            for line in lines:
                line.hang_up()
    return sum(job.result() for job in done)
