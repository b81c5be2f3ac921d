"""Keeping an engine alive: start, models, readiness, restart with back-off.

The engine process owns the device and may be lost at any time. This module starts it, loads the models into it,
evaluates a known answer every so often, and starts another one when it crashed, hung or gave a wrong answer. Who asks
for work meanwhile is told to ask again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from nepcore.errors import ModelError, ModelFileError

from .devices import Device
from .engine import EngineDown, EngineError, EngineLink
from .models import ModelNameError, Version

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from .dispatch import Dispatcher
    from .models import Registry, Source
    from .settings import Settings

log = logging.getLogger("nepserve")

FAILURE_WINDOW = 600.0
"""Seconds in which engine failures are counted."""

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 20.0
"""Seconds before an engine is started again: doubled with each failure in the window."""

CPU_BATCH, GPU_BATCH = 0.1, 0.02
"""Seconds that a batch may take where the settings do not say."""

_TUNE_SECONDS = "NEPSERVE_TUNE_SECONDS"

STOP_SECONDS = 10.0
"""What an engine without work may take to end."""

HEARTBEAT = 2.0
"""Seconds between two looks at the engine."""


class EngineGaveUpError(RuntimeError):
    """The engine failed too often, or cannot serve what it was asked to; the server ends."""


class UnusableModelError(EngineGaveUpError):
    """A model cannot be loaded with the settings of this server: file, device, dtype or backend is wrong."""


class Supervisor:
    """Keeps one engine alive.

    Args:
        settings: Device, backend, threads, bounds.
        registry: Where loaded models are announced.
        dispatcher: Who sends work to the engine.
        loader: Function that loads a model in the engine; see :class:`.engine.EngineLink`.
        device: What it is to own, if not what the settings say.
        leads: Whether the models are its own, or those of another one that it follows.

    Attributes:
        restarts: Engines that were started again.
        pulse: What the engine last said of itself.
        on_restart: Called with the reason when an engine failed.
        on_retire: Called with the key of a version that nobody holds any more.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        dispatcher: Dispatcher,
        *,
        loader: str = "nepcore:load",
        device: Device | None = None,
        leads: bool = True,
    ) -> None:
        self._device = device or Device(settings.device, settings.device, settings.threads, {})
        self._leads = leads
        self.on_retire: Callable[[str], None] = lambda key: None  # noqa: ARG005
        self.settings = settings
        self.registry = registry
        self.dispatcher = dispatcher
        self.restarts = 0
        self.pulse: dict[str, Any] = {}
        self.on_restart: Callable[[str], None] = lambda reason: None  # noqa: ARG005
        self._loader = loader
        self._link: EngineLink | None = None
        self._reason: str | None = "the engine is starting"
        self._first = True
        self._progress: dict[str, Any] = {}
        self._probed = self._heard = -1e9
        self._failures: deque[float] = deque()
        self._versions: dict[str, Version] = {}
        self._waiting: list[Version] = []
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def _where(self) -> str:
        """Which of several devices, at the end of a message."""
        return "" if self._device.name == self.settings.device else f" on {self._device.name}"

    @property
    def starting(self) -> bool:
        """Whether no engine has been ready yet."""
        return self._first

    @property
    def unready(self) -> str | None:
        """Why there should be no traffic, in a sentence; None if all is well."""
        if self._reason is not None:
            return self._reason
        if not len(self.registry):
            return "no model is served"
        age = time.monotonic() - self._probed
        if age > self._stale:
            return f"the last known answer is {age:.0f} s old"
        return None

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the engine was last heard of."""
        return time.monotonic() - self._heard

    @property
    def _stale(self) -> float:
        return 3.0 * self.settings.probe_interval + 5.0

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of memory that the engine uses, by kind."""
        memory: dict[str, int] = self.pulse.get("memory", {})
        return memory

    def status(self) -> dict[str, Any]:
        """State of the engine for people, JSON-able; what is not known is left out."""
        link = self._link
        state: dict[str, Any] = {"state": "down" if link is None else link.state, "restarts": self.restarts}
        if link is not None:
            state["pid"] = link.pid
            state.update(link.hardware)
        if self._progress:
            state["progress"] = self._progress
        if self._reason is None:
            state["heartbeat_age"] = round(self.heartbeat_age, 3)
            state["known_answer_age"] = round(time.monotonic() - self._probed, 3)
        state.update({key: self.pulse[key] for key in ("memory", "models") if key in self.pulse})
        return state

    async def run(self, sources: Sequence[tuple[Source, str]]) -> None:
        """Serve models, each with its dtype, for as long as the server lives.

        Raises:
            UnusableModelError: A model cannot be served here.
            EngineGaveUpError: The engine failed too often.
        """
        self._waiting += [self.registry.new_version(source, dtype) for source, dtype in sources]
        self._versions.update({version.key: version for version in self._waiting})
        while not self._stopping:
            cause = await self._live_once()
            if self._stopping:
                return
            self._note_failure(cause)
            pause = min(FIRST_PAUSE * 2 ** (len(self._failures) - 1), LONGEST_PAUSE)
            log.warning("%s%s; it is started again in %.1f s", cause, self._where, pause)
            await asyncio.sleep(pause)
            self.restarts += 1

    async def serve(self, source: Source, dtype: str) -> Version:
        """Load a model and, once it is warm, point its name to it; the version it replaces serves until then.

        Raises:
            ModelFileError, ModelError: The model cannot be served; nothing has changed.
            ModelNameError: Its name has become an alias meanwhile; nothing has changed.
            EngineDown: There is no engine at present.
        """
        version = await self.prepare(source, dtype)
        await self.commit(version)
        return version

    async def prepare(self, source: Source, dtype: str) -> Version:
        """The first half of :meth:`serve`: the model is loaded, and no name points to it."""
        async with self._loading:
            version = self.registry.new_version(source, dtype)
            link = self._link
            if link is None or self._reason is not None:
                raise EngineDown(self._reason or "the engine is starting")
            await self._load(link, version)
            # From now on an engine that is started again has it, too.
            self._versions[version.key] = version
            return version

    def intend(self, source: Source, dtype: str) -> Version:
        """As :meth:`prepare`, with an engine that will not come back: others load it."""
        version = self.registry.new_version(source, dtype)
        self._versions[version.key] = version
        return version

    async def commit(self, version: Version) -> None:
        """The second half of :meth:`serve`."""
        try:
            self._announce(version)
        except ModelNameError:
            del self._versions[version.key]
            await self._unload(version.key)
            raise

    def adopt(self, versions: Sequence[tuple[Source, str, str]]) -> None:
        """Have these versions, with their keys, from the start."""
        self._waiting = [Version(*each) for each in versions]
        self._versions = {version.key: version for version in self._waiting}

    async def follow(self, source: Source, dtype: str, key: str) -> Version:
        """Load what another one loaded; an engine that is away does so when it is back, and has no ``info`` till then.

        Raises:
            ModelFileError, ModelError: It cannot.
        """
        async with self._loading:
            version = Version(source, dtype, key)
            link = self._link
            if link is not None and self._reason is None:
                with contextlib.suppress(EngineDown):
                    await self._load(link, version)
            self._versions[key] = version
            return version

    def current(self, key: str) -> None:
        """Names point to this version now."""
        version = self._versions.get(key)
        if version is not None:
            self.registry.put(version)

    async def drop(self, key: str) -> None:
        """Forget a version that nobody holds."""
        version = self._versions.pop(key, None)
        if version is not None and not self._leads and version in self.registry.versions:
            self.registry.remove(version.name)
        self.dispatcher.forget(key)
        await self._unload(key)

    async def _unload(self, key: str) -> None:
        if self._link is not None:
            # An engine that is down has forgotten it already.
            with contextlib.suppress(EngineDown, ModelError):
                await self._link.unload(key)

    async def unserve(self, name: str) -> None:
        """Take a model away; requests that hold it are answered first.

        Raises:
            UnknownModelError: There is no such model.
        """
        self._spawn(self._retire(self.registry.remove(name)))

    async def stop(self, timeout: float) -> None:
        """End the engine, which may finish within ``timeout`` seconds what it was asked."""
        self._stopping = True
        self._reason = "the server is stopping"
        for task in list(self._tasks):
            task.cancel()
        if self._link is not None:
            await self._link.stop(timeout)
        if self._leads:
            for version in self._versions.values():
                version.source.copy.close()

    def abort(self) -> None:
        """End the engine at once."""
        self._stopping = True
        if self._link is not None:
            self._link.kill("the server was aborted")

    async def _live_once(self) -> str:
        """One life of an engine, from its start to its end; returns what ended it."""
        settings = self.settings
        link = self._link = EngineLink(
            device=self._device.device,
            loader=self._loader,
            threads=self._device.threads,
            log_level=settings.log_level.upper(),
            hang_seconds=settings.engine_timeout,
            environment={
                **({} if settings.tune_seconds is None else {_TUNE_SECONDS: f"{settings.tune_seconds:g}"}),
                **self._device.environment,
            },
        )
        try:
            await link.start()
            async with self._loading:
                for version in list(self._versions.values()):
                    await self._load(link, version)
            if settings.max_batch_ms is None:
                on_gpu = str(link.hardware.get("device", "")).startswith("cuda")
                self.dispatcher.scheduler.max_batch_seconds = GPU_BATCH if on_gpu else CPU_BATCH
            self.dispatcher.attach(link)
            self._heard = self._probed = time.monotonic()
            self._reason = None
            self._progress = {}
            for version in self._waiting:
                self._announce(version)
            self._waiting = []
            self._first = False
            log.info("ready: %s%s", ", ".join(v.name for v in self.registry.versions), self._where)
            await self._watch(link)
        except EngineDown as error:
            cause = error.reason
        except EngineError as error:
            cause = str(error)
        except (ModelFileError, ModelError) as error:
            # At the first start nothing is served yet, and the same model would fail again.
            if self._first:
                # Nothing is wrong with the engine: it ends as it does when the server stops.
                await link.stop(STOP_SECONDS)
                raise UnusableModelError(str(error)) from error
            cause = str(error)
        else:
            cause = "the engine ended"
        self._reason = f"the engine failed and is being started again: {cause}"
        self.dispatcher.detach(self._reason)
        link.kill(cause)
        if link.pid is not None:
            await link.exited.wait()
        return cause

    async def _watch(self, link: EngineLink) -> None:
        """Look after the engine until it ends.

        Raises:
            EngineDown: It ended or hangs.
            EngineError: It gives wrong answers.
        """
        exited = asyncio.ensure_future(link.exited.wait())
        try:
            while True:
                self.pulse = await link.ping()
                self._heard = time.monotonic()
                await asyncio.wait([exited], timeout=HEARTBEAT)
                if exited.done():
                    raise EngineDown(str(link.exit))
                if self._heard - self._probed >= self.settings.probe_interval:
                    for version in self.registry.versions:
                        # Held, or it might be unloaded before its turn.
                        version.acquire()
                        try:
                            await link.probe(version.key)
                        finally:
                            version.release()
                    self._probed = time.monotonic()
        finally:
            exited.cancel()

    async def _load(self, link: EngineLink, version: Version) -> None:
        def note(progress: dict[str, Any]) -> None:
            self._progress = {"model": version.name, **progress}
            if self._first:
                self._reason = f"model {version.name}: {progress.get('stage', 'loading')}"

        info = await link.load(
            version.key,
            str(version.source.copy.path),
            dtype=version.dtype,
            backend=self.settings.backend,
            progress=note,
        )
        self._progress = {}
        # The engine speaks of its own names and of the private copy.
        version.info = {key: value for key, value in info.items() if key not in {"name", "path", "model", "hardware"}}
        version.loaded_at = time.time()
        if info.get("limit_atoms"):
            self.dispatcher.scheduler.recall(version.key, int(info["limit_atoms"]), time.monotonic())

    def _announce(self, version: Version) -> None:
        old = self.registry.put(version)
        if old is not None:
            self._spawn(self._retire(old))

    async def _retire(self, version: Version) -> None:
        """Let the engine forget a version once nobody holds it."""
        await version.retired()
        self.on_retire(version.key)
        await self.drop(version.key)
        version.source.copy.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _note_failure(self, cause: str) -> None:
        now = time.monotonic()
        self._failures.append(now)
        while self._failures[0] < now - FAILURE_WINDOW:
            self._failures.popleft()
        self.on_restart(cause)
        if len(self._failures) > self.settings.engine_restarts:
            raise EngineGaveUpError(
                f"the engine failed {len(self._failures)} times in {FAILURE_WINDOW / 60:.0f} minutes, last: {cause}"
            )
