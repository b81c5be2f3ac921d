"""The engine process: one thread that reads messages, evaluates, and looks for urgent work between tiles.

It belongs to its front. It ignores the signals that a terminal or a service manager sends to the whole group, since
only the front decides when to end; it ends when the socket closes, and the kernel kills it when the front dies.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import platform
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from nepcore.errors import ModelError, NepError
from nepcore.structures import Structures
from nepserve.parent import die_with

from . import memory, served
from .errors import DeviceLost, EngineError, ProbeError, pack_error, pack_structure_error
from .evaluation import evaluate
from .journal import LevelFormatter
from .messages import Channel, Closed, Message, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from numpy.typing import NDArray

    from .served import Served

logger = logging.getLogger("nepserve.engine")

EXIT_DEVICE_LOST = 71
"""The device fails every further call; a new process may find it sound."""

EXIT_PROTOCOL = 76
"""What came over the socket was no message."""

LINGER_SECONDS = (0.0006, 0.003)
"""The engine looks for the next step of a simulation as long as the last one took, within these bounds, before it goes
to sleep: to be woken, on a core that fell asleep, too, takes as long as a small evaluation."""

LINGER_AFTER = 0.01
"""Evaluations longer than this are not waited after, s: beside them, being woken costs nothing."""

BEAT_SECONDS = 0.1
"""Signs of life during an evaluation are at least this far apart."""

Reply = tuple["dict[str, Any]", "Mapping[str, NDArray[Any]]"]


class Engine:
    """Answers the messages of one front over ``sock`` (blocking)."""

    def __init__(
        self, sock: socket.socket, *, device: str, loader: str, threads: int | None = None, arenas: bool = True
    ) -> None:
        self._sock = sock
        self._channel = Channel(sock, arenas=arenas)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._device = device
        self._loader = loader
        self._threads = threads
        self._models: dict[str, Served] = {}
        self._queue: deque[Message] = deque()
        self._urgent: deque[Message] = deque()
        self._cancelled: set[int] = set()
        self._running: list[Message] = []
        self._stopping = False
        self._beat = 0.0
        self._awake_until = 0.0

    def serve(self) -> None:
        """Work until told to stop.

        Raises:
            Closed: The front closed the socket.
            DeviceLost: The device failed for good; the front knows.
        """
        self._send("hello", 0, {"pid": os.getpid(), "python": platform.python_version(), "device": self._device})
        while True:
            self._receive(wait=not (self._urgent or self._queue or self._stopping))
            if self._urgent:
                self._work(self._urgent.popleft())
            elif self._queue:
                self._work(self._queue.popleft())
            elif self._stopping:
                return

    def _receive(self, *, wait: bool = False) -> None:
        """Sort what has arrived into the queues; answer at once what needs no computing."""
        if wait:
            self._linger()
            # What waits behind the first message is met between the tiles.
            self._sort(self._channel.read())
            return
        while self._poll.poll(0):
            self._sort(self._channel.read())

    def _linger(self) -> None:
        """Look for the next message for a moment without sleeping, once after each short evaluation."""
        until, self._awake_until = self._awake_until, 0.0
        while until and not self._poll.poll(0):
            if time.perf_counter() > until:
                return
            # Whoever is to send that message may be waiting for this very core.
            os.sched_yield()

    def _sort(self, messages: list[Message]) -> None:
        for message in messages:
            match message.kind:
                case "ping":
                    self._send("result", message.id, self._state())
                case "cancel":
                    self._cancel(message.body["id"])
                case "stop":
                    self._stopping = True
                case "probe":
                    # Small, and what readiness hangs on: it must not wait behind a long evaluation.
                    self._urgent.append(message)
                case _:
                    (self._urgent if message.body.get("urgent") else self._queue).append(message)

    def _cancel(self, wanted: int) -> None:
        if any(message.id == wanted for message in self._running):
            self._cancelled.add(wanted)
        else:
            for queue in (self._queue, self._urgent):
                for message in list(queue):
                    if message.id == wanted:
                        queue.remove(message)

    def _work(self, message: Message) -> None:
        """Do one thing that was asked, with urgent work between its steps."""
        steps = self._steps(message)
        self._running.append(message)
        try:
            while True:
                try:
                    progress = next(steps)
                except StopIteration as end:
                    self._send("result", message.id, *end.value)
                    if message.kind == "evaluate" and (took := end.value[0]["device"]) < LINGER_AFTER:
                        least, most = LINGER_SECONDS
                        self._awake_until = time.perf_counter() + min(max(took, least), most)
                    return
                self._between(message, progress)
                if message.id in self._cancelled:
                    steps.close()
                    return
        except (DeviceLost, Closed, ProtocolError):
            raise
        except Exception as error:  # one failed request must not end the engine
            if not isinstance(error, (NepError, EngineError)):
                logger.exception("%s failed", message.kind)
            self._send("failed", message.id, {"error": pack_error(error)})
        finally:
            self._running.pop()
            self._cancelled.discard(message.id)

    def _between(self, message: Message, progress: int | dict[str, Any]) -> None:
        """Show life, read the socket, let urgent work pass; a load lets everything pass that waits."""
        loading = message.kind == "load"
        now = time.monotonic()
        if progress and (loading or now - self._beat >= BEAT_SECONDS):
            self._beat = now
            self._send("beat", message.id, {"progress": progress})
        self._receive()
        # Only the outermost work gives way, so that urgent work is not cut into by more of its kind.
        if message.body.get("urgent") or message.kind == "probe":
            return
        while self._urgent:
            self._work(self._urgent.popleft())
        if loading:
            for waiting in [m for m in self._queue if m.kind == "evaluate"]:
                if waiting in self._queue:
                    self._queue.remove(waiting)
                    self._work(waiting)

    def _steps(self, message: Message) -> Generator[Any, None, Reply]:
        match message.kind:
            case "evaluate":
                return self._evaluate(message)
            case "load":
                return self._load(message)
            case "unload":
                return self._unload(message)
            case "probe":
                return self._probe(message)
        raise ProtocolError(f"no such request: {message.kind}")

    def _model(self, name: str) -> Served:
        try:
            return self._models[name]
        except KeyError:
            raise ModelError(f"model {name!r} is not loaded") from None

    def _evaluate(self, message: Message) -> Generator[int, None, Reply]:
        started = time.perf_counter()
        model = self._model(message.body["model"])
        # The front has checked the shapes; to check them again costs a tenth of the way.
        structures = object.__new__(Structures)
        structures.__dict__.update(message.arrays)
        splits = model.limit.splits
        packed = time.perf_counter()
        found = yield from evaluate(
            model.calculator, structures, tuple(message.body["properties"]), model.limit
        )  # fmt: skip
        computed = time.perf_counter()
        errors = [[i, *pack_structure_error(e)] for i, e in found.errors.items()]
        return {
            "errors": errors,
            "pack": packed - started,
            "device": computed - packed,
            "splits": model.limit.splits - splits,
        }, {"stress_known": found.stress_known, **found.values}  # fmt: skip

    def _load(self, message: Message) -> Generator[dict[str, Any], None, Reply]:
        body = message.body
        model = yield from served.load(
            self._loader, body["name"], body["path"], device=self._device, dtype=body["dtype"],
            backend=body["backend"], threads=self._threads,
        )  # fmt: skip
        replaced = self._models.pop(model.name, None)
        self._models[model.name] = model
        del replaced
        memory.settle()
        return model.info, {}

    def _unload(self, message: Message) -> Generator[int, None, Reply]:
        self._model(message.body["name"])
        del self._models[message.body["name"]]
        memory.settle()
        yield from ()
        return {}, {}

    def _probe(self, message: Message) -> Generator[int, None, Reply]:
        model = self._model(message.body["model"])
        started = time.perf_counter()
        try:
            found = yield from evaluate(
                model.calculator, model.known.structures, ("energy", "forces"), model.limit
            )  # fmt: skip
        except ModelError as error:
            raise ProbeError(f"the known answer could not be computed again: {error}") from error
        model.known.compare(found, model.calculator.dtype)
        return {"seconds": time.perf_counter() - started}, {}

    def _state(self) -> dict[str, Any]:
        return {
            "memory": memory.usage(),
            "waiting": len(self._queue) + len(self._urgent),
            "running": [message.kind for message in self._running],
            "models": {
                name: {"limit_atoms": model.limit.atoms, "oom_splits": model.limit.splits}
                for name, model in self._models.items()
            },
        }

    def _send(
        self, kind: str, id_: int, body: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        self._channel.message(kind, id_, body, arrays).send(self._sock)

    def report_lost(self, error: DeviceLost) -> None:
        """Tell the front why this process is about to end."""
        self._send("fatal", 0, {"reason": str(error)})


def main(arguments: list[str] | None = None) -> int:
    """Run an engine on an inherited socket; started by :class:`nepserve.engine.EngineLink` only."""
    parser = argparse.ArgumentParser(prog="python -m nepserve.engine", description=main.__doc__)
    parser.add_argument("--fd", type=int, required=True, help="number of the inherited socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the front")
    parser.add_argument("--device", required=True)
    parser.add_argument("--loader", required=True, help="module:function or file.py:function")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--no-arenas", action="store_true")
    options = parser.parse_args(arguments)
    die_with(options.parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    # The front asks for the stacks of an engine that hangs before it ends it.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LevelFormatter("%(message)s"))
    logging.basicConfig(level=options.log_level.upper(), handlers=[handler])
    # Before anything imports torch: idle OpenMP threads must sleep, the front needs the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sock = socket.socket(fileno=options.fd)
    sock.set_inheritable(False)
    engine = Engine(
        sock, device=options.device, loader=options.loader, threads=options.threads, arenas=not options.no_arenas
    )
    code = 0
    try:
        engine.serve()
    except Closed:
        logger.debug("the front closed the socket")
    except ProtocolError:
        logger.exception("the front sent something that is no message")
        code = EXIT_PROTOCOL
    except DeviceLost as error:
        logger.error("the device is lost: %s", error)
        engine.report_lost(error)
        code = EXIT_DEVICE_LOST
    return code


def run() -> None:
    """:func:`main` as a process: leaves without the clean-up of runtimes, which may hang on a sick device."""
    try:
        code = main()
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        logger.exception("the engine failed")
        code = 1
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
