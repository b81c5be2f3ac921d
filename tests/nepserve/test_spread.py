"""One queue over several devices, as far as the tests of live servers cannot see it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nepcore.structures import Structure, Structures
from nepserve.dispatch import Dispatcher
from nepserve.scheduler import Scheduler
from nepserve.spread import Spread

if TYPE_CHECKING:
    from collections.abc import Callable

ONE = Structures.pack([Structure.make([14], [[0.0, 0, 0]], 9 * np.eye(3), True)])


class Never:
    """An engine that is never done."""

    def __init__(self) -> None:
        self.running = 0

    async def evaluate(self, *_: Any, **__: Any) -> Any:
        self.running += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.running -= 1


async def _task_is_cancelled(spread: Spread) -> Callable[[], None]:
    task = asyncio.create_task(spread.evaluate("model", ONE, ["energy"]))
    await asyncio.sleep(0)
    return lambda: task.cancel() and None


async def _future_is_cancelled(spread: Spread) -> Callable[[], None]:
    number, answer = spread.submit("model", ONE, ["energy"])

    def give_up() -> None:
        answer.cancel()
        asyncio.get_running_loop().call_soon(spread.withdraw, number)

    return give_up


async def _is_withdrawn(spread: Spread) -> Callable[[], None]:
    number, _ = spread.submit("model", ONE, ["energy"])
    return lambda: spread.withdraw(number)


@pytest.mark.parametrize("begin", [_task_is_cancelled, _future_is_cancelled, _is_withdrawn])
def test_what_nobody_waits_for_leaves_its_device(begin: Callable[[Spread], Any]) -> None:
    async def main() -> None:
        engines = [Never(), Never()]
        spread = Spread([Dispatcher(Scheduler(), engine) for engine in engines], 1000, 100)
        ends = [await begin(spread) for _ in range(8)]
        await asyncio.sleep(0.01)
        assert all(engine.running for engine in engines)
        assert spread.running + spread.waiting.requests == 8
        for end in ends:
            end()
        await asyncio.sleep(0.01)
        assert spread.running + spread.waiting.requests == 0
        assert [engine.running for engine in engines] == [0, 0]
        await spread.close()

    asyncio.run(main())
