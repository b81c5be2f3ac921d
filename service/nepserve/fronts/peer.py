"""The lead's side of one front: what it asked, what it holds, and what it is told."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.structures import Structures
from nepserve.engine.errors import pack_structure_error
from nepserve.engine.line import Line
from nepserve.refusals import QueueFull
from nepserve.sessions import Session

from . import errors, far

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from nepserve.answer import Answer
    from nepserve.engine.messages import Message
    from nepserve.models import Version

    from .hub import Hub

log = logging.getLogger("nepserve")


class Peer:
    """One front, as long as its process lives.

    Args:
        hub: What it shares with the others.
        sock: The lead's end of its socket, not blocking.
        pid: Its process id.
        arenas: Whether large arrays go through shared memory.

    Attributes:
        ready: Set once it takes connections.
        gone: Set once nothing can be said to it any more.
        open: Connections that it has, as it said last.
        given: Connections that were given to it.
        in_flight: Evaluations that it had in hand when it was asked last.
        missed: How often in a row it was asked for its counts and said nothing.
        seen: Number of the last list of models that it took.
    """

    def __init__(self, hub: Hub, sock: socket.socket, pid: int, *, arenas: bool) -> None:
        self.pid = pid
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()
        self.open = self.given = self._arrived = 0
        self.in_flight = 0
        self.missed = 0
        self.seen = 0
        self._hub = hub
        self._line = Line(sock, arenas=arenas, take=self._take, broken=self._broken)
        self._jobs: dict[int, int] = {}  # number of the job at the queue, by number of the question
        self._held: dict[str, Version] = {}
        self._met: set[str] = set()  # ids of sessions that it knows
        self._tied: dict[str, Session] = {}  # of these, those that end with it
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # -- what the lead says ----------------------------------------------------------------------------------------

    def tell(self, kind: str, body: Mapping[str, Any]) -> None:
        """Say something."""
        self._line.send(kind, 0, body)

    async def ask(self, kind: str, body: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """Ask something; None if there was no answer in time."""
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._line.send(kind, number, body)
        ended = asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait([future, ended], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return future.result().body if future.done() else None
        finally:
            ended.cancel()
            self._asked.pop(number, None)

    def give(self, sock: socket.socket, way: str, *, full: bool) -> None:
        """Give it a connection; one too many is for it to refuse."""
        self.given += 1
        self._line.send("connection", 0, {"way": way, "full": full}, give=sock)

    @property
    def connections(self) -> int:
        """Connections that it has, or is about to have."""
        return self.open + self.given - self._arrived

    def list_models(self, body: dict[str, Any], versions: list[Version]) -> None:
        """Tell it which models there are, and hold them until it lets go."""
        for version in versions:
            if version.key not in self._held:
                version.acquire()
                self._held[version.key] = version
        self.tell("models", body)

    def session_dropped(self, session: Session) -> None:
        """Tell it that a session is no more, if it knows it."""
        self._tied.pop(session.id, None)
        if session.id in self._met:
            self._met.remove(session.id)
            self.tell("dropped", {"id": session.id})

    def close(self) -> None:
        """Its process has ended, or shall be taken for it: take back what it asked, and let go of what it holds."""
        if self.gone.is_set():
            return
        self.gone.set()
        self._line.close()
        self._hub.lost(self)
        for job in self._jobs.values():
            self._hub.service.dispatcher.withdraw(job)
        self._jobs.clear()
        for task in self._tasks:
            task.cancel()
        for session in list(self._tied.values()):
            self._hub.service.sessions.drop(session)
        for version in self._held.values():
            version.release()
        self._held.clear()
        self.in_flight = 0

    def _broken(self, reason: str) -> None:
        if reason:
            log.error("a front is given up: %s", reason)
        self.close()

    # -- what it says ----------------------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        try:
            self._handle(message)
        except Exception as error:
            if message.id:
                self._line.send("failed", message.id, {"error": errors.pack(error)})
            else:
                log.exception("what a front said could not be taken")

    def _handle(self, message: Message) -> None:
        body = message.body
        match message.kind:
            case "submit":
                self._submit(message)
            case "withdraw":
                job = self._jobs.pop(message.id, None)
                if job is not None:
                    self._hub.service.dispatcher.withdraw(job)
            case "connections":
                self.open, self._arrived = body["open"], body["arrived"]
                self._hub.room()
            case "said":
                if "counted" in body:
                    # Whether somebody waits for it still or not: it is told once.
                    self.in_flight = body["in_flight"]
                    self._hub.counted(body["counted"])
                future = self._asked.pop(message.id, None)
                if future is not None and not future.done():
                    future.set_result(message)
            case "find":
                self._find(message)
            case "keep":
                self._keep(message)
            case "drop":
                session = self._hub.service.sessions.get(body["id"], body["owner"])
                self._met.discard(body["id"])
                if session is not None:
                    self._hub.service.sessions.drop(session)
            case "route":
                task = asyncio.get_running_loop().create_task(self._route(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case "seen":
                self.seen = body["number"]
                self._hub.acknowledged()
            case "release":
                version = self._held.pop(body["key"], None)
                if version is not None:
                    version.release()
            case "ready":
                self.ready.set()
                self._hub.joined(self)

    def _submit(self, message: Message) -> None:
        body, arrays = message.body, message.arrays
        work = arrays.pop("work", None)
        # The front has checked the shapes.
        structures = object.__new__(Structures)
        structures.__dict__.update(arrays)
        if "keys" in arrays:
            self._step(int(arrays["keys"][0]), body["client"])
        dispatcher = self._hub.service.dispatcher
        try:
            job, answer = dispatcher.submit(
                body["model"], structures, body["properties"], client=body["client"], priority=body["priority"],
                timeout=body["timeout"], work=work,
            )  # fmt: skip
        except QueueFull:
            self._hub.crowded()
            raise
        self._jobs[message.id] = job
        answer.add_done_callback(partial(self._answered, message.id))

    def _step(self, key: int, owner: str) -> None:
        """Note a step.

        Raises:
            SessionLost: There is no such session.
        """
        sessions = self._hub.service.sessions
        session = sessions.by_key(key)
        if session is None or session.owner != owner:
            raise errors.SessionLost
        sessions.touch(session, time.monotonic())

    def _answered(self, number: int, done: asyncio.Future[Answer]) -> None:
        if self._jobs.pop(number, None) is None or done.cancelled():
            return
        error = done.exception()
        if error is not None:
            self._line.send("failed", number, {"error": errors.pack(error)})  # type: ignore[arg-type]
            return
        answer = done.result()
        predictions = answer.predictions
        arrays: dict[str, NDArray[Any]] = {**predictions.values, "stress_known": predictions.stress_known}
        spent = answer.pack_seconds, answer.device_seconds, answer.unpack_seconds, answer.batch_atoms, answer.batches
        waiting = self._hub.service.dispatcher.waiting
        body = {
            "spent": spent, "waiting": (waiting.requests, waiting.atoms, waiting.work),
            "errors": [[i, *pack_structure_error(e)] for i, e in predictions.errors.items()],
        }  # fmt: skip
        self._line.send("answer", number, body, arrays)

    def _find(self, message: Message) -> None:
        session = self._hub.service.sessions.get(message.body["id"], message.body["owner"])
        if session is None:
            raise errors.SessionLost
        self._met.add(session.id)
        body, arrays = far.opened(session)
        self._line.send("answer", message.id, body, arrays)

    def _keep(self, message: Message) -> None:
        body = message.body
        session = Session(body["owner"], far.opening_of(message), time.monotonic(), (body["id"], body["key"]))
        self._hub.service.sessions.add(session)
        self._met.add(session.id)
        if body["tied"]:
            self._tied[session.id] = session
        self._line.send("answer", message.id, {})

    async def _route(self, message: Message) -> None:
        body = {key: value for key, value in message.body.items() if key != "scope"}
        content = message.arrays["body"].tobytes()
        try:
            told, answer = await self._hub.route(message.body["scope"], body, content)
        except Exception as error:
            self._line.send("failed", message.id, {"error": errors.pack(error)})
        else:
            self._line.send("answer", message.id, told, {"body": np.frombuffer(answer, np.uint8)})
