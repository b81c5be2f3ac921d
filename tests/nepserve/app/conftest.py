"""The application without an engine: a dispatcher that computes in place, and misbehaves as it is told."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from nepcore.files import nep_txt
from nepcore.structures import PER_ATOM, PER_STRUCTURE, Predictions, Structures
from nepcore.synthetic import make_model
from nepserve.app.auth import Keys, keys_of
from nepserve.app.factory import create_app
from nepserve.app.service import Service
from nepserve.models import Registry, Source, Version
from nepserve.refusals import QueueFull
from nepserve.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from nepcore.errors import ModelError, StructureError

SILICON = {
    "numbers": [14, 14],
    "positions": [[0.0, 0.0, 0.0], [1.36, 1.36, 1.36]],
    "cell": [[0.0, 2.72, 2.72], [2.72, 0.0, 2.72], [2.72, 2.72, 0.0]],
    "pbc": [True, True, True],
}
PAIR = {"symbols": ["C", "Ge"], "positions": [[0.0, 0.0, 0.0], [0.0, 0.0, 2.0]]}


@dataclass
class Answer:
    predictions: Predictions
    queue_seconds: float = 0.001
    pack_seconds: float = 0.0
    device_seconds: float = 0.002
    unpack_seconds: float = 0.0
    batch_atoms: int = 0


@dataclass
class Waiting:
    requests: int = 0
    atoms: int = 0
    work: int = 0


class Dispatcher:
    """Energy: the sum of the atomic numbers; forces: the negative positions; stress: 1 to 6 × the energy."""

    def __init__(self) -> None:
        self.max_atoms = 1000
        self.waiting = Waiting()
        self.error: Exception | None = None
        self.fails: dict[int, StructureError] = {}
        self.hold: asyncio.Event | None = None
        self.asked: list[dict[str, Any]] = []
        self.cancelled = 0
        self.running = 0
        self.healthy = True
        self.speeds = {"main@1": 1e6}
        self.device_seconds = 1.25
        self.on_batch: Callable[..., None] | None = None
        self.full_from = float("inf")  # atoms
        self.announced: list[float] = []

    def refuse_if_full(self, atoms: float) -> None:
        self.announced.append(atoms)
        if atoms >= self.full_from:
            raise QueueFull(7.2)

    async def evaluate(
        self,
        model: str,
        structures: Structures,
        properties: Sequence[str],
        *,
        client: str,
        priority: str,
        timeout: float,
        work: Any,
    ) -> Answer:
        self.asked.append({"model": model, "structures": structures, "properties": tuple(properties), "client": client,
                           "priority": priority, "timeout": timeout, "work": work})  # fmt: skip
        if self.error is not None:
            raise self.error
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        energies = structures.numbers.astype(float)
        energy = np.add.reduceat(energies, structures.offsets[:-1])
        known = structures.pbc.all(axis=1)
        values: dict[str, Any] = {}
        for name in properties:
            if name in PER_ATOM:
                shape = tuple(5 if n is None else n for n in PER_ATOM[name])
                values[name] = np.broadcast_to(
                    energies.reshape(-1, *[1] * len(shape)), (len(energies), *shape)
                ).copy() if name != "forces" else -structures.positions  # fmt: skip
            elif name == "stress":
                values[name] = np.where(known[:, None], energy[:, None] * np.arange(1, 7), np.nan)
            else:
                shape = PER_STRUCTURE[name]
                values[name] = np.broadcast_to(energy.reshape(-1, *[1] * len(shape)), (len(energy), *shape)).copy()
        return Answer(Predictions(structures.counts, values, known, dict(self.fails)), batch_atoms=structures.n_atoms)


class Engine:
    """Serves at once what it is given."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.unready: str | None = None
        self.heartbeat_age = 0.5
        self.memory = {"resident": 1000}
        self.starting = False
        self.refuses: ModelError | None = None

    def status(self) -> dict[str, Any]:
        return {"state": "ready", "torch": "2.0"}

    async def serve(self, source: Source, dtype: str) -> Version:
        if self.refuses is not None:
            raise self.refuses
        version = self.registry.new_version(source, dtype)
        version.info = {"backend": "toy", "device": "cpu"}
        self.registry.put(version)
        return version

    async def unserve(self, name: str) -> None:
        self.registry.remove(name)


def model_text(*elements: str, temperature: bool = False, seed: int = 0) -> str:
    """A small model file."""
    return nep_txt.dumps(make_model(elements, n_max=(1, 1), basis_size=(2, 2), l_max=2, hidden=(3,), switches=(),
                                    temperature=temperature, seed=seed))  # fmt: skip


@dataclass
class Server:
    """An application in this process, and calls to it."""

    service: Service
    dispatcher: Dispatcher
    engine: Engine
    app: Any = field(init=False)

    def __post_init__(self) -> None:
        self.app = create_app(self.service)

    def add(self, name: str, *elements: str, temperature: bool = False) -> Version:
        source = Source.from_bytes(name, f"{name}.txt", model_text(*elements, temperature=temperature).encode())
        return asyncio.run(self.engine.serve(source, "float32"))

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        """Let ``work`` talk to the application."""

        async def talk() -> Any:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                return await work(client)

        return asyncio.run(talk())

    def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self.run(lambda client: client.request(method, path, **more))  # type: ignore[no-any-return]

    def evaluate(self, **body: Any) -> httpx.Response:
        return self.call("POST", "/v1/evaluate", json=body)


@pytest.fixture
def make() -> Iterator[Callable[..., Server]]:
    """A server with the settings given, serving the model ``main`` (C Si Ge)."""
    made: list[Server] = []

    def build(*, default: str | None = None, empty: bool = False, **settings: Any) -> Server:
        given = Settings(**settings)
        registry = Registry(default)
        dispatcher, engine = Dispatcher(), Engine(registry)
        keys = keys_of(given)[0] if settings else Keys()
        server = Server(Service(given, registry, dispatcher, engine, keys), dispatcher, engine)  # type: ignore[arg-type]
        if not empty:
            server.add("main", "C", "Si", "Ge")
        made.append(server)
        return server

    yield build
    for server in made:
        for version in server.service.registry.versions:
            version.source.copy.close()


@pytest.fixture
def server(make: Callable[..., Server]) -> Server:
    return make()


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The problem document of an answer, checked for its form."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    document: dict[str, Any] = json.loads(response.content)
    assert (response.status_code, document["code"]) == (status, code), document
    assert document["status"] == status
    assert document["type"] == f"urn:nepserve:problem:{code}"
    assert document["request_id"] == response.headers["x-request-id"]
    assert document["title"]
    assert document["detail"]
    return document


@pytest.fixture(name="problem")
def _problem() -> Callable[[httpx.Response, int, str], dict[str, Any]]:
    return problem


@pytest.fixture
def silicon() -> dict[str, Any]:
    return dict(SILICON)


@pytest.fixture
def pair() -> dict[str, Any]:
    return dict(PAIR)
