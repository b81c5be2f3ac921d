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
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from .forcefield import as_client, check_elements, evaluator
from .ipi_address import WAIT_SECONDS, Address, NoServerError, connect, parse_address
from .units import BOHR, HARTREE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from .forcefield import Evaluator, Forces
    from .http import Client

_HEAD = 12
_MAX_BATCH = 1 << 16


class ProtocolError(Exception):
    """What arrived is not i-PI's protocol, or not of the structure that was given."""


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
            # Says early, and at no cost, that the two sides disagree about what comes where. ASE sends the transposed.
            if np.isfinite(box).all() and np.linalg.det(box):
                products = box @ inverse, box @ inverse.T
                if not any(np.abs(product - np.eye(3)).max() < 1e-5 for product in products):
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
        options: ``api_key``, ``timeout``, ``retries``, ``dtype``, ``priority``, ``verify``, ``steps``: of the client.

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
    over = threading.Event()
    lines = [_Line(place, wait_seconds, over) for _ in range(connections)]
    fields = [evaluator(client, z, pbc, model=model, temperature=temperature) for _ in lines]
    try:
        # The first alone, so that what there is to wait for is told once.
        lines[0].connect(say)
        say(f"connected to i-PI at {place}; {len(z)} atoms")
        if connections == 1:
            return lines[0].serve(fields[0], len(z))
        return _serve_all(lines, fields, len(z))
    finally:
        for line in lines:
            line.close()


class _Line:
    """One of the connections to i-PI, until that is done, which it tells to any of them (``over``).

    A connection that breaks before i-PI has said anything is made anew: nobody had accepted it.
    """

    def __init__(self, place: Address, seconds: float, over: threading.Event) -> None:
        self._place = place
        self._seconds = seconds
        self._over = over
        self._stream: socket.socket | None = None

    def connect(self, report: Callable[[str], None] | None = None) -> None:
        self._stream = connect(self._place, self._seconds, report, self._over)

    def serve(self, field: Evaluator, n_atoms: int) -> int:
        """Connect if need be, and serve to the end; how many messages with positions were answered."""
        ends = time.monotonic() + self._seconds
        while True:
            if self._over.is_set():
                return 0
            try:
                if self._stream is None:
                    self.connect()
                assert self._stream is not None
                driver = Driver(self._stream, field, n_atoms)
                driver.serve()
            except NoServerError:
                if not self._over.is_set():
                    raise
            except OSError:
                if driver.heard or time.monotonic() > ends:
                    raise
                self.close()
            else:
                self._over.set()
                return driver.steps

    def hang_up(self) -> None:
        """Wake a thread that reads: for it, the stream ends."""
        if self._stream is not None:
            with suppress(OSError):
                self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _serve_all(lines: Sequence[_Line], fields: Sequence[Evaluator], n_atoms: int) -> int:
    """Serve several connections; the first failure ends them all.

    Each is answered for as soon as it stands: i-PI lets the next one in when the last has told its status.
    """
    with ThreadPoolExecutor(len(lines)) as pool:
        jobs = [pool.submit(line.serve, field, n_atoms) for line, field in zip(lines, fields, strict=True)]
        try:
            done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            for line in lines:
                line.hang_up()
    return sum(job.result() for job in done)


__all__ = ["Address", "Driver", "NoServerError", "ProtocolError", "connect", "parse_address", "run"]
