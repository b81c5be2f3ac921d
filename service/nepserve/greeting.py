"""What a server says of itself at its start: where it is, what it serves, and how to ask it."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from nepcore import __version__

if TYPE_CHECKING:
    from .app.auth import Keys
    from .app.service import Service
    from .fleet import Fleet
    from .models import Source
    from .settings import Settings
    from .supervision import Supervisor

log = logging.getLogger("nepserve")


class Greeting:
    """Says it.

    Args:
        settings: Of the server.
        sources: The models that it was started with.
        listener, frames: Its sockets.
        keys: Who may ask.
        secret: Of the key that was made for this run, if one was.

    Attributes:
        hints: Whether people are told how to ask it.
    """

    def __init__(
        self,
        settings: Settings,
        sources: list[Source],
        listener: socket.socket,
        frames: socket.socket | None,
        keys: Keys,
        secret: str | None,
    ) -> None:
        self.settings = settings
        self.sources = sources
        self.listener = listener
        self.frames = frames
        self.keys = keys
        self.secret = secret
        self.hints = settings.log_format == "text"
        self.started = time.perf_counter()

    @property
    def url(self) -> str:
        """Where the server listens."""
        if self.settings.uds is not None:
            return f"unix:{self.settings.uds}"
        return self._url(*self.listener.getsockname()[:2])

    @property
    def own_url(self) -> str:
        """Where this machine finds it: an address that stands for all is none that can be asked everywhere."""
        if self.settings.uds is not None:
            return "http://localhost"
        host, port = self.listener.getsockname()[:2]
        return self._url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)

    @property
    def frames_address(self) -> str:
        """Where frames are spoken."""
        assert self.frames is not None
        if self.frames.family == socket.AF_UNIX:
            return f"frames://{Path(self.frames.getsockname()).absolute()}"
        host, port = self.frames.getsockname()[:2]
        return f"frames://[{host}]:{port}" if ":" in host else f"frames://{host}:{port}"

    def _url(self, host: str, port: int) -> str:
        scheme = "http" if self.settings.ssl_certfile is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def greet(self) -> None:
        """Say where it is and what it serves."""
        if self.frames is not None:
            log.info("frames on %s", self.frames_address)
        log.info("nepserve %s on %s, API page %s/docs", __version__, self.url, self.url)
        for source in self.sources:
            elements = " ".join(source.file.elements)
            if source.origin == "bundled":
                log.info(
                    "model %s (%s): a DEMONSTRATION. No model was given, so this one, of seven metals after the EMT "
                    "potential, shows how the server answers. Serve your own with: nepserve serve nep.txt",
                    source.name, elements,
                )  # fmt: skip
            else:
                log.info(
                    "model %s (%s), %s, from %s",
                    source.name, elements, self.settings.dtype_of(source.name), source.origin,
                )  # fmt: skip
        if self.secret is not None:
            # On its own line and not in the log's format: it is for whoever started the server.
            print(f"API key made for this run: {self.secret}", file=sys.stderr)  # noqa: T201
        elif not self.settings.is_local and self.settings.insecure:
            log.warning("everybody who can reach %s may use this server (--insecure)", self.url)

    async def announce(self, service: Service, supervisor: Supervisor | Fleet) -> None:
        """Say when the server is ready, and how to ask it."""
        while supervisor.unready is not None or (service.fronts is not None and not service.fronts.ready):
            if not self.sources and not supervisor.starting:
                break
            await asyncio.sleep(0.02)
        engine = supervisor.status()
        served = ", ".join(
            f"{v.name} ({v.dtype}, backend {v.info.get('backend', 'unknown')})" for v in supervisor.registry.versions
        )
        log.info(
            "ready after %.1f s on %s: %s",
            time.perf_counter() - self.started,
            engine.get("name") or engine.get("device"),
            served or "no model yet",
        )
        if self.sources and self.hints:
            print(f"\nTry:\n  {self._example()}\n", file=sys.stderr)  # noqa: T201

    def _example(self) -> str:
        element = self.sources[0].file.elements[0]
        structure = f'{{"symbols": ["{element}", "{element}"], "positions": [[0, 0, 0], [0, 0, 2.4]]}}'
        if self.sources[0].file.temperature:
            structure = structure[:-1] + ', "temperature": 300}'
        model = f'"model": "{self.sources[0].name}", ' if len(self.sources) > 1 else ""
        key = "" if not len(self.keys) else " -H 'Authorization: Bearer KEY'"
        place = f"--unix-socket {self.settings.uds} {self.own_url}" if self.settings.uds else self.own_url
        return (
            f"curl {place}/v1/evaluate{key} -H 'Content-Type: application/json' "
            f"-d '{{{model}\"structure\": {structure}}}'"
        )
