"""The front's way to one engine process: starts it, sends it work, and notices when it dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nepcore.errors import ModelError
from nepcore.structures import PROPERTIES, Predictions, Structures

from . import arenas as shared
from .errors import EngineDown, unpack_error, unpack_structure_error
from .journal import Journal
from .messages import Channel, Closed, Message, Outgoing
from .spawn import Exit, spawn

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping, Sequence
    from typing import Literal

    from numpy.typing import NDArray

logger = logging.getLogger("nepserve.engine")

_TICKS = 8  # how often within the bound on silence one looks
_GRACE_SECONDS = 3.0  # from the closed socket to the end of the process
_REAP_SECONDS = 30.0


class Evaluated(NamedTuple):
    """What came of :meth:`EngineLink.evaluate`.

    Attributes:
        predictions: Results of the blocks' structures, end to end.
        pack_seconds: Packing in the front and unpacking in the engine.
        device_seconds: Evaluation in the engine, urgent work that it let pass between tiles included.
        unpack_seconds: Making predictions of the engine's answer.
        batch_atoms: Atoms in the batch.
        splits: How often the batch was cut because memory ran out.
    """

    predictions: Predictions
    pack_seconds: float
    device_seconds: float
    unpack_seconds: float
    batch_atoms: int
    splits: int = 0


class EngineLink:
    """One engine process. For one event loop, not thread-safe; it lives once: start another after its end.

    :meth:`start` must be called in a thread that lives as long as the engine shall, as the kernel kills the engine
    when that thread ends.

    Args:
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1`` ...
        loader: Function that loads a model, ``module:function`` or ``/path/to/file.py:function``.
        threads: CPU threads of the engine; None leaves it to the libraries.
        log_level: Level of the engine's log; its lines go to the logger ``nepserve.engine``.
        hang_seconds: Silence while there is work after which the engine counts as hung. It speaks after each tile.
        load_seconds: The same while a model is loaded, which may import and compile for minutes.
        start_seconds: Time for the process to come up.
        arenas: Send large arrays through shared memory (memfd); None asks the kernel whether it has any.
        environment: Variables for the engine, on top of those of this process.

    Attributes:
        state: ``starting``, ``ready`` or ``down``.
        exited: Set after the process has ended and ``exit`` says how.
        hello: What the engine said of itself at its start: ``pid``, ``python``, ``device``.
        hardware: Device name, torch version and the like; known after the first model is loaded.
    """

    def __init__(
        self,
        *,
        device: str,
        loader: str = "nepcore:load",
        threads: int | None = None,
        log_level: str = "INFO",
        hang_seconds: float = 60.0,
        load_seconds: float = 900.0,
        start_seconds: float = 60.0,
        arenas: bool | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.device = device
        self.state: Literal["starting", "ready", "down"] = "starting"
        self.exited = asyncio.Event()
        self.exit: Exit | None = None
        self.hello: dict[str, Any] = {}
        self.hardware: dict[str, Any] = {}
        self._arenas = shared.available() if arenas is None else arenas
        self._spawn = partial(
            spawn,
            device=device,
            loader=loader,
            threads=threads,
            log_level=log_level,
            arenas=self._arenas,
            environment=dict(environment or {}),
        )
        self._hang_seconds = hang_seconds
        self._load_seconds = load_seconds
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0
        self._unsent: deque[Outgoing] = deque()
        self._cause = ""
        self._heard = False
        self._silent = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._stopping = False
        self._reaper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None before :meth:`start`."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process; returns as soon as it answers, before it has imported what models need.

        Raises:
            EngineDown: It did not come up.
        """
        if self._process is not None or self.state == "down":
            raise RuntimeError("an engine link starts once; make a new one")
        self._loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[None] = self._loop.create_future()
        try:
            self._process, self._sock, stderr = self._spawn()
        except OSError as error:
            self.state = "down"
            raise EngineDown(f"the engine cannot be started: {error}") from error
        self._channel = Channel(self._sock, arenas=self._arenas)
        self._journal = Journal(stderr)
        self._journal.pid = self._process.pid
        self._pidfd = _pidfd(self._process.pid)
        self._loop.add_reader(self._sock.fileno(), self._readable)
        self._loop.add_reader(stderr, self._log_readable)
        if self._pidfd >= 0:
            self._loop.add_reader(self._pidfd, self._ended)
        try:
            await asyncio.wait_for(asyncio.shield(self._hello), self._start_seconds)
        except asyncio.TimeoutError:
            self.kill(f"it said nothing within {self._start_seconds:g} s of its start")
            await self.exited.wait()
            raise EngineDown(str(self.exit)) from None
        except asyncio.CancelledError:
            self.kill("its start was cancelled")
            raise

    async def load(
        self,
        name: str,
        path: str,
        *,
        dtype: str,
        backend: str,
        progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Load a model, warm it up and compute its known answer; a model of that name is replaced when that is done.

        Evaluations asked for meanwhile are run between the steps of the warm-up. ``progress`` is called with
        dictionaries that have ``stage`` (``import``, ``load``, ``warmup``, ``known_answer``).

        Returns:
            What it is (JSON-able): name, path, device, dtype, backend, hardware, model, load_seconds, warmup (a list
            of what, atoms, seconds), known_answer (atoms, energy, seconds), limit_atoms (None: nothing learned yet).

        Raises:
            ModelFileError, ModelError: As the engine raised them.
            EngineDown: The engine ended.
        """
        body = {"name": name, "path": str(path), "dtype": dtype, "backend": backend}
        reply = await self._answer(self._submit("load", body, bound=self._load_seconds, progress=progress))
        self.hardware = reply.body["hardware"]
        return reply.body

    async def unload(self, name: str) -> None:
        """Forget a model.

        Raises:
            ModelError: There is none of that name.
            EngineDown: The engine ended.
        """
        await self._ask("unload", {"name": name})

    async def evaluate(
        self, model: str, blocks: Sequence[Structures], properties: frozenset[str], *, urgent: bool = False
    ) -> Evaluated:
        """Evaluate blocks as one batch. Several may be under way; they are worked on in the order of the calls.

        Structures that fail are entries of ``predictions.errors``. With ``urgent`` the batch is run between two
        tiles of what is running. A cancelled call takes its batch back, running or not.

        Raises:
            ModelError: No such model or property.
            EngineError: The batch as a whole failed in a way that nobody foresaw.
            EngineDown: The engine ended, or was given up because it hung.
        """
        started = time.perf_counter()
        structures = Structures.concatenate(blocks)
        arrays = {name: getattr(structures, name) for name in _FIELDS}
        if structures.keys is not None:
            arrays["keys"] = structures.keys
        names = [name for name in PROPERTIES if name in properties]
        if len(names) != len(properties):
            raise ModelError(f"unknown properties: {', '.join(sorted(properties - set(names)))}")
        body = {"model": model, "properties": names, "urgent": urgent}
        number = self._submit("evaluate", body, arrays)
        packed = time.perf_counter()
        reply = await self._answer(number)
        arrived = time.perf_counter()
        values = dict(reply.arrays)
        known = values.pop("stress_known")
        errors = {entry[0]: unpack_structure_error(entry[1:]) for entry in reply.body["errors"]}
        predictions = Predictions(structures.counts, values, known, errors)
        return Evaluated(
            predictions,
            pack_seconds=packed - started + reply.body["pack"],
            device_seconds=reply.body["device"],
            unpack_seconds=time.perf_counter() - arrived,
            batch_atoms=structures.n_atoms,
            splits=reply.body["splits"],
        )

    async def probe(self, model: str) -> float:
        """Compute the known answer of a model again, between two tiles of what is running; seconds that took.

        Raises:
            ProbeError: The answer is off, or none came.
            ModelError: No such model.
            EngineDown: The engine ended.
        """
        reply = await self._ask("probe", {"model": model})
        seconds: float = reply.body["seconds"]
        return seconds

    async def ping(self) -> dict[str, Any]:
        """State of the engine, answered between two tiles: ``memory`` (bytes, see :func:`.memory.usage`), ``waiting``
        (requests), ``running`` (kinds of request), ``models`` (``limit_atoms`` and ``oom_splits`` by name), and
        ``seconds``, what the answer took.

        Raises:
            EngineDown: The engine ended.
        """
        started = time.perf_counter()
        reply = await self._ask("ping", {})
        return {**reply.body, "seconds": time.perf_counter() - started}

    async def stop(self, timeout: float) -> int:
        """Let the engine finish what it was asked and end; after ``timeout`` seconds it is killed.

        Returns:
            Its exit code, −n for signal n; 0 if it was never started.
        """
        if self._process is None:
            self.state = "down"
            return 0
        self._stopping = True
        if self.state != "down":
            self._post(self._channel.message("stop", 0, {}))
        try:
            await asyncio.wait_for(self.exited.wait(), timeout)
        except asyncio.TimeoutError:
            self.kill(f"it did not end within {timeout:g} s")
            await self.exited.wait()
        assert self.exit is not None
        return self.exit.code if self.exit.code is not None else -int(signal.SIGKILL)

    def kill(self, cause: str = "killed by the front") -> None:
        """End the process at once; work in flight fails with :class:`EngineDown`."""
        if self._process is not None and self.exit is None:
            self._process.kill()
            self._lost(cause)

    async def _ask(self, kind: str, body: dict[str, Any]) -> Message:
        return await self._answer(self._submit(kind, body))

    def _submit(
        self,
        kind: str,
        body: dict[str, Any],
        arrays: Mapping[str, NDArray[Any]] | None = None,
        *,
        bound: float | None = None,
        progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> int:
        """Send a request; the number to ask :meth:`_answer` for its answer with."""
        if self.state != "ready" or self._stopping:
            raise EngineDown("the engine is stopping" if self._stopping else f"the engine is {self.state}")
        self._last_id += 1
        number = self._last_id
        outgoing = self._channel.message(kind, number, body, arrays)
        self._pending[number] = _Pending(self._loop.create_future(), bound or self._hang_seconds, progress)
        self._post(outgoing)
        if self._watch is None and self.state == "ready":
            self._silent = 0.0
            self._look_again()
        return number

    async def _answer(self, number: int) -> Message:
        try:
            return await self._pending[number].future
        except asyncio.CancelledError:
            if self._pending.pop(number, None) is not None and self.state == "ready":
                self._post(self._channel.message("cancel", 0, {"id": number}))
            raise

    def _post(self, outgoing: Outgoing) -> None:
        """Send now what the socket takes now, and the rest when it takes more."""
        if self.state == "down":
            return
        if not self._unsent and self._sent(outgoing):
            return
        if not self._unsent:
            self._loop.add_writer(self._sock.fileno(), self._writable)
        self._unsent.append(outgoing)

    def _writable(self) -> None:
        while self._unsent:
            if not self._sent(self._unsent[0]) or self.state == "down":
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._sock.fileno())

    def _sent(self, outgoing: Outgoing) -> bool:
        try:
            return outgoing.send(self._sock)
        except Closed:
            # What it said before its end is still to be read, and after that the end: then all requests fail.
            return True
        except OSError as error:
            self.kill(f"nothing can be sent to it: {error}")
            return True

    def _ended(self) -> None:
        """Take what the process said last, if it has ended.

        The end of its socket is not enough to go by: uvloop stops to look at a socket on which an error is noted, as
        it is when the process leaves messages unread, and says nothing.
        """
        if self.state == "down" or self._process is None or self._process.poll() is None:
            return
        # From now on there is an end to what can be read, even if a process of the engine's own holds the other side.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)
        while self.state != "down":
            self._readable()

    def _readable(self) -> None:
        try:
            messages = self._channel.read()
        except Closed:
            self._lost("")
            return
        except Exception as error:  # whatever it is, nothing that comes after it can be read
            self.kill(f"its answer could not be read: {error}")
            return
        self._heard = True
        for message in messages:
            self._take(message)

    def _take(self, message: Message) -> None:
        match message.kind:
            case "hello":
                self.hello = message.body
                self.state = "ready"
                if not self._hello.done():
                    self._hello.set_result(None)
            case "fatal":
                self._cause = f"the device is lost: {message.body['reason']}"
            case "beat":
                pending = self._pending.get(message.id)
                if pending is not None and pending.progress is not None:
                    try:
                        pending.progress(message.body["progress"])
                    except Exception:
                        # The engine's other messages have to be taken all the same.
                        logger.exception("a listener to the progress of a model failed")
            case "result" | "failed":
                pending = self._pending.pop(message.id, None)
                if pending is None or pending.future.done():
                    return
                if message.kind == "result":
                    pending.future.set_result(message)
                else:
                    pending.future.set_exception(unpack_error(message.body["error"]))

    def _look_again(self) -> None:
        self._watch = self._loop.call_later(self._hang_seconds / _TICKS, self._look)

    def _look(self) -> None:
        """Count silence in ticks of this loop: a front that was stopped itself must not blame the engine."""
        self._watch = None
        self._ended()
        if not self._pending or self.state == "down":
            return
        self._silent = 0.0 if self._heard else self._silent + self._hang_seconds / _TICKS
        self._heard = False
        bound = max(pending.bound for pending in self._pending.values())
        if self._silent < bound:
            self._look_again()
            return
        assert self._process is not None
        self._process.send_signal(signal.SIGUSR1)  # its stacks go to the log
        self._loop.call_later(0.2, self._process.kill)
        self._lost(f"it hung: no sign of life for {bound:g} s while it had work")

    def _log_readable(self) -> None:
        if not self._journal.read() and self._journal.ended:
            self._loop.remove_reader(self._journal.fd)
            # Files are closed a little before the process counts as ended.
            self._loop.call_later(0.1, self._ended)

    def _lost(self, cause: str) -> None:
        """The engine is gone or given up: nothing is sent or read any more, and it is waited for."""
        if self.state == "down":
            return
        self.state = "down"
        self._cause = self._cause or cause
        for remove in (self._loop.remove_reader, self._loop.remove_writer):
            # uvloop minds if it has stopped to look by itself; the second call has it forget the socket all the same.
            with contextlib.suppress(RuntimeError):
                remove(self._sock.fileno())
        self._channel.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._unsent.clear()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._reaper = self._loop.create_task(self._reap())

    async def _reap(self) -> None:
        process = self._process
        assert process is not None
        started = time.monotonic()
        pause = 0.001
        while process.poll() is None:
            waited = time.monotonic() - started
            if waited > _GRACE_SECONDS:
                process.kill()
            if waited > _GRACE_SECONDS / 2:
                self._fail_pending(f"the engine is being ended: {self._cause or 'it closed its socket'}")
            if waited > _REAP_SECONDS:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)
        # What it wrote last is in the pipe. A process of its own that outlives it may hold the other end, and write on.
        for _ in range(100):
            if not self._journal.read():
                break
        self._loop.remove_reader(self._journal.fd)
        self._journal.close()
        self.exit = Exit(process.returncode, self._cause, tuple(self._journal.tail))
        expected = self._stopping and process.returncode == 0
        logger.log(logging.INFO if expected else logging.ERROR, "%s", self.exit)
        self._fail_pending(str(self.exit))
        self.exited.set()

    def _fail_pending(self, reason: str) -> None:
        if not self._hello.done():
            self._hello.set_exception(EngineDown(reason))
            self._hello.exception()  # nobody may be waiting any more
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(EngineDown(reason))
        self._pending.clear()


def _pidfd(pid: int) -> int:
    """A descriptor that can be read from when the process has ended; −1 where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


class _Pending(NamedTuple):
    """A request that was sent: where its answer goes, and how long the engine may be silent over it."""

    future: asyncio.Future[Message]
    bound: float
    progress: Callable[[dict[str, Any]], None] | None


# Falling item sizes: no gaps between the arrays.
_FIELDS = ("counts", "positions", "cells", "temperatures", "numbers", "pbc")
