"""One queue in front of several devices: each request goes to the device that will be done with its work first.

Every device has a dispatcher of its own, with its own batches. A request whose device fails is asked again of another
one: evaluating twice does no harm, and its client sees nothing of it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .engine.errors import EngineDown
from .refusals import DeadlinePassed, Draining, QueueFull, Refused
from .scheduler import Batch, Load

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from nepcore.structures import Structures

    from .answer import Answer
    from .dispatch import Dispatcher
    from .engine import Evaluated
    from .scheduler import Priority

MOVES = 2
"""How often a request may lose its device: what ends one after the other may be the request."""


@dataclass(eq=False)
class _Ask:
    """A request, and where it is.

    Attributes:
        arguments: Of :meth:`Dispatcher.submit`.
        answer: Done with the one answer.
        ends: When it is of no use any more.
        place, job: The dispatcher that has it, and what that calls it.
        lost: Devices that failed under it.
    """

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    answer: asyncio.Future[Answer]
    timeout: float | None
    ends: float | None
    place: Dispatcher | None = None
    job: int = 0
    lost: int = 0


class Spread:
    """Looks to the routes like one :class:`.dispatch.Dispatcher`. For one event loop.

    Args:
        parts: One of each device, all with the bounds of the whole queue.
        max_atoms: Atoms that may wait, of all together.
        max_requests: The same for requests.
    """

    def __init__(self, parts: Sequence[Dispatcher], max_atoms: int, max_requests: int) -> None:
        self.parts = tuple(parts)
        self.draining = False
        self._max_atoms = max_atoms
        self._max_requests = max_requests
        self._asks: dict[int, _Ask] = {}
        self._numbers = itertools.count(1)
        self._turn = 0

    @property
    def on_batch(self) -> Callable[[Batch, Evaluated], None] | None:
        """Called with each batch that was evaluated, for metrics."""
        return self.parts[0].on_batch

    @on_batch.setter
    def on_batch(self, call: Callable[[Batch, Evaluated], None] | None) -> None:
        for part in self.parts:
            part.on_batch = call

    async def evaluate(
        self,
        model: str,
        structures: Structures,
        properties: Collection[str],
        *,
        client: str = "",
        priority: Priority = "interactive",
        timeout: float | None = None,
        work: NDArray[Any] | None = None,
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
        work: NDArray[Any] | None = None,
    ) -> tuple[int, asyncio.Future[Answer]]:
        """See :meth:`.dispatch.Dispatcher.submit`."""
        if self.draining:
            raise Draining("the server is about to stop")
        self.refuse_if_full(structures.n_atoms)
        ends = None if timeout is None else time.monotonic() + timeout
        future = asyncio.get_running_loop().create_future()
        more = {"client": client, "priority": priority, "work": work}
        ask = _Ask(((model, structures, properties), more), future, timeout, ends)
        self._send(ask, timeout)
        number = next(self._numbers)
        self._asks[number] = ask
        future.add_done_callback(lambda done: self._ended(number, done))
        return number, future

    def withdraw(self, number: int) -> None:
        """Take back a request that nobody waits for; nothing if it was answered."""
        ask = self._asks.pop(number, None)
        if ask is not None and ask.place is not None:
            ask.place.withdraw(ask.job)

    def _ended(self, number: int, done: asyncio.Future[Answer]) -> None:
        if done.cancelled():
            # This comes before whoever waited for it can say so, and its device has the work still.
            self.withdraw(number)
        else:
            self._asks.pop(number, None)

    def refuse_if_full(self, atoms: float) -> None:
        """See :meth:`.dispatch.Dispatcher.refuse_if_full`."""
        if self._full(atoms):
            for part in self.parts:
                part.expire()
            if self._full(atoms):
                refusal = QueueFull(self.retry_after)
                self.parts[0].totals.count_error(refusal)
                raise refusal

    def _full(self, atoms: float) -> bool:
        """Whether there is no room at present."""
        waiting = self.waiting
        # One that alone is more than may wait is refused for good, by the device it comes to.
        return waiting.requests >= self._max_requests or waiting.atoms + min(atoms, self._max_atoms) > self._max_atoms

    def _send(self, ask: _Ask, timeout: float | None) -> None:
        """Hand a request to the device that has least to do.

        Raises:
            Refused, EngineDown, ...: As the last of the devices said.
        """
        arguments, more = ask.arguments
        # One that has just failed may not know it yet.
        awake = [part for part in self.parts if part.attached and part is not ask.place] or list(self.parts[:1])
        self._turn += 1
        # Those with equally little to do take turns.
        turn = self._turn % len(awake)
        order = awake[turn:] + awake[:turn]
        order.sort(key=lambda part: part.scheduler.retry_after())
        for part in order[:-1]:
            try:
                ask.job, answer = part.submit(*arguments, timeout=timeout, **more)
            except (QueueFull, EngineDown):
                continue
            break
        else:
            part = order[-1]
            ask.job, answer = part.submit(*arguments, timeout=timeout, **more)
        ask.place = part
        answer.add_done_callback(lambda done: self._answered(ask, done))

    def _answered(self, ask: _Ask, done: asyncio.Future[Answer]) -> None:
        if done.cancelled():
            ask.answer.cancel()
            return
        error = done.exception()
        if ask.answer.done():
            return
        if error is None:
            ask.answer.set_result(done.result())
            return
        if isinstance(error, EngineDown) and not self.draining and ask.lost < MOVES:
            ask.lost += 1
            try:
                left = None if ask.ends is None else ask.ends - time.monotonic()
                if left is not None and left <= 0:
                    raise DeadlinePassed(ask.timeout or 0.0)
                self._send(ask, left)
            except (Refused, EngineDown) as refusal:
                ask.answer.set_exception(refusal)
            except Exception as fault:
                ask.answer.set_exception(fault)
            return
        ask.answer.set_exception(error)

    @property
    def retry_after(self) -> float:
        """Seconds until the device that has least to do will be done with it."""
        return min(part.scheduler.retry_after() for part in self.parts)

    async def drain(self, timeout: float) -> int:
        """See :meth:`.dispatch.Dispatcher.drain`."""
        self.draining = True
        return sum(await asyncio.gather(*(part.drain(timeout) for part in self.parts)))

    async def close(self) -> None:
        """See :meth:`.dispatch.Dispatcher.close`."""
        self.draining = True
        for part in self.parts:
            await part.close()

    @property
    def healthy(self) -> bool:
        """Whether requests have their turn, wherever they are."""
        return all(part.healthy for part in self.parts)

    @property
    def waiting(self) -> Load:
        """What is in no engine yet."""
        whole = Load()
        for part in self.parts:
            load = part.waiting
            whole.add(load.requests, load.atoms, load.work)
        return whole

    @property
    def device_seconds(self) -> float:
        """Time that batches took on all devices so far."""
        return sum(part.device_seconds for part in self.parts)

    @property
    def running(self) -> int:
        """Requests of which all is in an engine."""
        return sum(part.running for part in self.parts)

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        """The batches that are in the engines."""
        return tuple(batch for part in self.parts for batch in part.in_flight)

    @property
    def max_atoms(self) -> int:
        """Atoms of the largest structure that is taken."""
        return self.parts[0].max_atoms

    @property
    def speeds(self) -> dict[str, float]:
        """Measured work per second of all devices together, by model."""
        found: dict[str, float] = {}
        for part in self.parts:
            for model, speed in part.speeds.items():
                found[model] = found.get(model, 0.0) + speed
        return found
