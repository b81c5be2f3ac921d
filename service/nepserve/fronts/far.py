"""What a front has in the place of queue, sessions and engine: the same words, and the work is the lead's."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nepcore.files import nep_txt
from nepcore.structures import Predictions
from nepserve.answer import Answer, nothing
from nepserve.app.sessions import lost
from nepserve.engine.errors import unpack_structure_error
from nepserve.models import CopyElsewhere, Source, Version
from nepserve.refusals import Draining, QueueFull
from nepserve.scheduler import Load
from nepserve.sessions import Opening, Session

from .errors import SessionLost

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy as np
    from numpy.typing import NDArray

    from nepcore.structures import Structures
    from nepserve.engine.messages import Message
    from nepserve.models import Registry
    from nepserve.scheduler import Priority

    from .lead import Lead

log = logging.getLogger("nepserve")

FRESH_SECONDS = 0.05
"""How long what the lead said of its queue is good enough to refuse a request by its headers."""

# Falling item sizes: no gaps between the arrays.
_FIELDS = ("counts", "positions", "cells", "temperatures", "numbers", "pbc")


class Queue:
    """Looks to the routes like the :class:`.dispatch.Dispatcher` that it hands everything to.

    Args:
        lead: The way to it.
        max_atoms, max_queue_atoms, max_queue_requests: Its bounds.

    Attributes:
        waiting: What waits there, as was said last.
    """

    def __init__(self, lead: Lead, max_atoms: int, max_queue_atoms: int, max_queue_requests: int) -> None:
        self.max_atoms = max_atoms
        self.draining = False
        self.waiting = Load()
        self._heard = -1e9
        self._retry_after = 0.0
        self._lead = lead
        self._max_atoms = max_queue_atoms
        self._max_requests = max_queue_requests

    async def evaluate(
        self,
        model: str,
        structures: Structures,
        properties: Collection[str],
        *,
        client: str = "",
        priority: Priority = "interactive",
        timeout: float | None = None,
        work: NDArray[np.float64] | None = None,
    ) -> Answer:
        """See :meth:`.dispatch.Dispatcher.evaluate`."""
        number, answer = self.submit(
            model, structures, properties, client=client, priority=priority, timeout=timeout, work=work
        )
        try:
            return await answer
        except asyncio.CancelledError:
            self.withdraw(number)
            raise

    def submit(
        self,
        model: str,
        structures: Structures,
        properties: Collection[str],
        *,
        client: str = "",
        priority: Priority = "interactive",
        timeout: float | None = None,
        work: NDArray[np.float64] | None = None,
    ) -> tuple[int, asyncio.Future[Answer]]:
        """See :meth:`.dispatch.Dispatcher.submit`; all that it raises is the future's exception here."""
        if self.draining:
            raise Draining("the server is about to stop")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if not len(structures):
            answer.set_result(nothing(properties))
            return 0, answer
        arrays = {name: getattr(structures, name) for name in _FIELDS}
        if structures.keys is not None:
            arrays["keys"] = structures.keys
        if work is not None:
            arrays["work"] = work
        body = {
            "model": model, "properties": list(properties), "client": client, "priority": priority, "timeout": timeout,
        }  # fmt: skip
        number, reply = self._lead.ask("submit", body, arrays)
        reply.add_done_callback(partial(self._answered, answer, structures.counts, time.perf_counter()))
        return number, answer

    def withdraw(self, number: int) -> None:
        """See :meth:`.dispatch.Dispatcher.withdraw`."""
        if self._lead.forget(number):
            self._lead.tell("withdraw", {}, number)

    def refuse_if_full(self, atoms: float) -> None:
        """See :meth:`.dispatch.Dispatcher.refuse_if_full`; by what the lead said last, if that is fresh."""
        if time.perf_counter() - self._heard > FRESH_SECONDS:
            return
        waiting = self.waiting
        if waiting.requests >= self._max_requests or waiting.atoms + min(atoms, self._max_atoms) > self._max_atoms:
            raise QueueFull(self._retry_after)

    def heard(self, body: dict[str, Any]) -> None:
        """Take what is said of the queue."""
        self.waiting = Load(*body["waiting"])
        self._retry_after = body.get("retry_after", self._retry_after)
        self._heard = time.perf_counter()

    def _answered(
        self, answer: asyncio.Future[Answer], counts: NDArray[np.int64], begun: float, reply: asyncio.Future[Message]
    ) -> None:
        if answer.done() or reply.cancelled():
            return
        error = reply.exception()
        if error is not None:
            if isinstance(error, QueueFull):
                self._retry_after = error.retry_after
            answer.set_exception(lost() if isinstance(error, SessionLost) else error)
            return
        message = reply.result()
        body, values = message.body, dict(message.arrays)
        self.heard(body)
        pack, device, unpack, batch_atoms, batches = body["spent"]
        predictions = Predictions(
            counts, values, values.pop("stress_known"),
            {entry[0]: unpack_structure_error(entry[1:]) for entry in body["errors"]},
        )  # fmt: skip
        waited = max(0.0, time.perf_counter() - begun - pack - device - unpack)
        answer.set_result(Answer(predictions, waited, pack, device, unpack, batch_atoms, batches))


class Sessions:
    """The sessions that this front has met; the table that counts is the lead's.

    A step is examined here, and queued there by the key of its session, if the session is still one.
    """

    def __init__(self, lead: Lead, idle: float) -> None:
        self.idle = idle
        self.elsewhere = True
        self._lead = lead
        self._met: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._met)

    def get(self, id_: str, owner: str) -> Session | None:
        """The session of that id, if it was met here and is the owner's."""
        session = self._met.get(id_)
        return session if session is not None and session.owner == owner else None

    def met(self, id_: str) -> bool:
        """Whether the session of that id was met here, whoever's it is."""
        return id_ in self._met

    async def find(self, id_: str, owner: str) -> Session | None:
        """The session of that id, if there is one and it is the owner's."""
        session = self.get(id_, owner)
        if session is not None:
            return session
        try:
            message = await self._lead.ask("find", {"id": id_, "owner": owner})[1]
        except SessionLost:
            return None
        # Another request may have asked for it meanwhile, and the lead may have dropped it.
        session = self.get(id_, owner)
        if session is None:
            session = Session(owner, opening_of(message), time.monotonic(), (id_, message.body["key"]))
            self._met[id_] = session
        return session

    async def keep(self, session: Session, *, tied: bool = False) -> None:
        """Have a new session kept; a ``tied`` one only as long as this front lives."""
        body, arrays = opened(session)
        self._met[session.id] = session
        try:
            await self._lead.ask("keep", {**body, "tied": tied}, arrays)[1]
        except BaseException:
            self.drop(session)
            raise

    def touch(self, session: Session, now: float) -> None:
        """Note a step; the lead does so, too, when it comes there."""
        session.used = now
        session.steps += 1

    def drop(self, session: Session) -> None:
        """Forget a session, here and there."""
        if not session.lost:
            self.dropped(session.id)
            self._lead.tell("drop", {"id": session.id, "owner": session.owner})

    def dropped(self, id_: str) -> None:
        """The lead has forgotten a session."""
        session = self._met.pop(id_, None)
        if session is not None:
            session.lost = True

    def sweep(self, now: float) -> int:  # noqa: ARG002 (the lead does, and says which)
        """Leave it to the lead."""
        return 0


def opened(session: Session) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """A session as a message; :func:`opening_of` and the names in it make one of that again."""
    opening = session.opening
    body = {
        "id": session.id, "key": session.key, "owner": session.owner, "model": opening.model,
        "properties": list(opening.properties), "temperature": opening.temperature,
    }  # fmt: skip
    return body, {"cell": opening.cell, "numbers": opening.numbers, "pbc": opening.pbc}


def opening_of(message: Message) -> Opening:
    """What the session of a message was opened with."""
    body, arrays = message.body, message.arrays
    # Copies: what lies in shared memory is lent for a moment, and a session may last for days.
    return Opening(
        body["model"], tuple(body["properties"]), arrays["numbers"].copy(), arrays["cell"].copy(),
        arrays["pbc"].copy(), body["temperature"],
    )  # fmt: skip


class Engine:
    """What a front knows of the engine: why there is nothing to evaluate with."""

    def __init__(self) -> None:
        self.unready: str | None = "the server is starting"
        self.starting = True


class Models:
    """Keeps a registry what the lead says it is.

    The lead holds each version that it names until it is told that this front does not need it any more.
    """

    def __init__(self, lead: Lead, registry: Registry) -> None:
        self._lead = lead
        self._registry = registry
        self._known: dict[str, Version] = {}
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._leaving: set[asyncio.Task[None]] = set()

    def hear(self, body: dict[str, Any]) -> None:
        """Take what the lead says."""
        self._said.put_nowait(body)

    async def follow(self) -> None:
        """Do as was said, one after the other."""
        while True:
            body = await self._said.get()
            for entry in body["versions"]:
                if entry["key"] not in self._known:
                    file = await asyncio.to_thread(nep_txt.read, Path(entry["path"]))
                    source = Source(
                        entry["name"], entry["origin"], file, entry["sha256"], CopyElsewhere(Path(entry["path"]))
                    )
                    self._known[entry["key"]] = Version(source, entry["dtype"], entry["key"])
            wanted = [entry["key"] for entry in body["versions"]]
            self._registry.follow([self._known[key] for key in wanted], body["aliases"])
            self._lead.tell("seen", {"number": body["number"]})
            for key in [key for key in self._known if key not in wanted]:
                task = asyncio.get_running_loop().create_task(self._let_go(self._known.pop(key)))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    async def _let_go(self, version: Version) -> None:
        await version.retired()
        self._lead.tell("release", {"key": version.key})
