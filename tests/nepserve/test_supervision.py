"""Models that come and go beside a running engine, in orders that a real one seldom meets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from nepserve import models
from nepserve.models import ModelNameError, Registry
from nepserve.settings import Settings
from nepserve.supervision import Supervisor
from servers import write_model

if TYPE_CHECKING:
    from pathlib import Path


def test_a_name_that_becomes_an_alias_while_its_model_is_loaded(tmp_path: Path) -> None:
    first, second = (models.read_model(name, write_model(tmp_path / f"{name}.txt", "Si")) for name in ("a", "b"))
    registry = Registry()
    loaded: list[str] = []

    async def load(key: str, path: str, **_: Any) -> dict[str, Any]:
        loaded.append(key)
        if key.startswith("b"):
            registry.alias("b", "a")
        return {}

    async def unload(key: str) -> None:
        loaded.remove(key)

    async def scenario() -> None:
        supervisor = Supervisor(Settings(), registry, SimpleNamespace())  # type: ignore[arg-type]
        supervisor._link = SimpleNamespace(load=load, unload=unload)  # type: ignore[assignment]
        supervisor._reason = None
        version = await supervisor.serve(first, "float32")
        with pytest.raises(ModelNameError, match="alias"):
            await supervisor.serve(second, "float32")
        # An engine that is started again must not be asked for what nobody serves.
        assert list(supervisor._versions) == loaded == [version.key]
        assert registry.get("b") is version

    asyncio.run(scenario())
    for source in (first, second):
        source.copy.close()
