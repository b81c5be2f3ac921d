"""Several engines, one a device, kept alive side by side.

The first one leads: it loads a model first, so that what it measured decides for all of them, and it announces it. The
others follow: they load what it loaded, under the same key. Each is started again by itself when it fails; one that
fails too often drops out, and the server ends only when none is left.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from .engine import EngineDown
from .supervision import EngineGaveUpError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .models import Source, Version
    from .supervision import Supervisor

log = logging.getLogger("nepserve")

LOOK_SECONDS = 0.02


class Fleet:
    """Looks to the routes like one :class:`.supervision.Supervisor`.

    Args:
        members: Supervisors, the leading one first. Its registry is that of the server; the others have their own.
        names: Of their devices.
    """

    def __init__(self, members: Sequence[Supervisor], names: Sequence[str]) -> None:
        self._lead, *self._followers = members
        self._members = list(members)
        self._names = list(names)
        self._out: dict[Supervisor, str] = {}
        self._loading = asyncio.Lock()
        self._lead.on_retire = self._forget
        self._forgetting: set[asyncio.Task[None]] = set()

    @property
    def registry(self) -> Any:
        """The models."""
        return self._lead.registry

    @property
    def starting(self) -> bool:
        """Whether none has been ready yet."""
        return self._lead.starting

    @property
    def unready(self) -> str | None:
        """Why there should be no traffic; None while one of them can compute."""
        reasons = [member.unready for member in self._members if member not in self._out]
        if not reasons:
            return "no device is left"
        return None if None in reasons else reasons[0]

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the one that was silent longest was heard of, of those that are ready."""
        ages = [member.heartbeat_age for member in self._members if member.unready is None]
        return max(ages, default=self._lead.heartbeat_age)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of memory that the engines use, by kind."""
        found: dict[str, int] = {}
        for member in self._members:
            for kind, size in member.memory.items():
                found[kind] = found.get(kind, 0) + size
        return found

    @property
    def restarts(self) -> int:
        """Engines that were started again."""
        return sum(member.restarts for member in self._members)

    @property
    def on_restart(self) -> Callable[[str], None]:
        """Called with the reason when an engine failed."""
        return self._lead.on_restart

    @on_restart.setter
    def on_restart(self, call: Callable[[str], None]) -> None:
        for member in self._members:
            member.on_restart = call

    def status(self) -> dict[str, Any]:
        """State of the leading engine with ``restarts`` of all, and under ``devices`` that of each."""
        devices = []
        for name, member in zip(self._names, self._members, strict=True):
            entry = {"name": name, **{k: v for k, v in member.status().items() if k != "name"}}
            entry["ready"] = member.unready is None and member not in self._out
            reason = self._out.get(member) or member.unready
            if reason is not None:
                entry["reason"] = reason
            devices.append(entry)
        return {**self._lead.status(), "restarts": self.restarts, "devices": devices}

    async def run(self, sources: Sequence[tuple[Source, str]]) -> None:
        """See :meth:`.supervision.Supervisor.run`.

        Raises:
            UnusableModelError: A model cannot be served here.
            EngineGaveUpError: All of them failed too often.
        """
        leading = asyncio.ensure_future(self._lead.run(sources))
        lives = {leading: self._lead}
        try:
            while self._lead.starting and not leading.done():
                await asyncio.sleep(LOOK_SECONDS)
            if not leading.done():
                for member in self._followers:
                    member.adopt([(v.source, v.dtype, v.key) for v in self.registry.versions])
                    lives[asyncio.ensure_future(member.run([]))] = member
            while lives:
                done, _ = await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
                for life in done:
                    member = lives.pop(life)
                    error = life.exception()
                    if error is None:
                        continue
                    if not isinstance(error, EngineGaveUpError) or not lives or self._lead.starting:
                        raise error
                    self._out[member] = str(error)
                    log.error("%s drops out: %s", self._names[self._members.index(member)], error)
        finally:
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)

    async def serve(self, source: Source, dtype: str) -> Version:
        """See :meth:`.supervision.Supervisor.serve`: the name moves when all that are up have loaded the model."""
        async with self._loading:
            up = [member for member in self._followers if member not in self._out]
            leads = self._lead not in self._out
            version = await self._lead.prepare(source, dtype) if leads else self._lead.intend(source, dtype)
            try:
                loaded = await asyncio.gather(*(member.follow(source, dtype, version.key) for member in up))
                if not leads:
                    first = next((each for each in loaded if each.info), None)
                    if first is None:
                        raise EngineDown("no engine is ready")
                    version.info, version.loaded_at = first.info, first.loaded_at
                await self._lead.commit(version)
            except BaseException:
                for member in (self._lead, *up):
                    await member.drop(version.key)
                raise
            for member in up:
                member.current(version.key)
            return version

    async def unserve(self, name: str) -> None:
        """See :meth:`.supervision.Supervisor.unserve`."""
        await self._lead.unserve(name)

    async def stop(self, timeout: float) -> None:
        """End all engines."""
        await asyncio.gather(*(member.stop(timeout) for member in reversed(self._members)))

    def abort(self) -> None:
        """End all engines at once."""
        for member in self._members:
            member.abort()

    def _forget(self, key: str) -> None:
        """Let the followers forget a version that nobody holds any more."""
        for member in self._followers:
            task = asyncio.get_running_loop().create_task(member.drop(key))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)
