"""Servers as real processes on the loopback interface, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from nepcore.files import nep_txt
from nepcore.synthetic import make_model

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
STAND_IN = f"{HERE / 'stand_in.py'}:load"

# What the command does, with a loader of our own, and a word at the end about what was imported.
_PROGRAM = """
import atexit, json, sys
from nepserve import server, settings
from nepserve.models import ModelNameError
from nepcore.errors import ModelFileError
flags, loader, report = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
if report:
    atexit.register(lambda: open(report, "w").write("\\n".join(sys.modules)))
sys.exit(server.run(settings.load(flags), loader=loader))
"""


def write_model(path: Path, *elements: str, seed: int = 0) -> Path:
    """A small model file."""
    model = make_model(elements, n_max=(1, 1), basis_size=(2, 2), l_max=2, hidden=(3,), switches=(), seed=seed)
    path.write_text(nep_txt.dumps(model), encoding="utf-8")
    return path


class ServerProcess:
    """A server, its log, and what tests do to it."""

    def __init__(
        self,
        *,
        loader: str = STAND_IN,
        stand_in: dict[str, Any] | None = None,
        report: Path | None = None,
        **flags: Any,
    ) -> None:
        self.lines: list[str] = []
        environment = {key: value for key, value in os.environ.items() if not key.startswith("NEPSERVE_")}
        environment |= {"STAND_IN": json.dumps(stand_in or {}), "OMP_NUM_THREADS": "1"}
        arguments = [json.dumps({"port": 0, **flags}), loader, str(report or "")]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments], stderr=subprocess.PIPE, text=True, env=environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return "\n".join(self.lines)

    def wait_for(self, text: str, seconds: float = 30.0) -> str:
        """The first line with this text."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in list(self.lines):
                if text in line:
                    return line
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.02)
        raise AssertionError(f"{text!r} was not said:\n{self.log}")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        line = self.wait_for(" on http")
        place = line.partition("://")[2].partition(",")[0]
        host, _, port = place.rpartition(":")
        return host, int(port)

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self.address
        return f"http://{host}:{port}"

    def ready(self, seconds: float = 30.0) -> ServerProcess:
        """Wait until it says that it is ready."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                if self.get("/readyz").status_code == 200:
                    return self
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"not ready:\n{self.log}")

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **more)

    def evaluate(self, timeout: float = 30, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/evaluate", json=body, timeout=timeout, headers=headers)

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(self.address, timeout=30)

    def engines(self) -> list[int]:
        """Process ids of its children."""
        return [child.pid for child in psutil.Process(self.process.pid).children()]

    def terminate(self, seconds: float = 20.0) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(seconds)

    def wait(self, seconds: float = 20.0) -> int:
        """The exit code."""
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextlib.contextmanager
def running(**options: Any) -> Iterator[ServerProcess]:
    """A server for the time of a ``with`` block."""
    server = ServerProcess(**options)
    try:
        yield server
    finally:
        server.close()


def is_gone(pid: int, seconds: float = 5.0) -> bool:
    """Whether a process ends within some time and leaves no zombie."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not psutil.pid_exists(pid):
            return True
        time.sleep(0.02)
    return False
