"""A server of this machine's devices for one program alone: on a unix socket that nobody else finds, and not for long.

``nepserve predict --devices`` computes so on several devices: it gets the engines of the server with what they know of
memory that runs out and devices that fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nepcore.errors import ModelError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

READY_SECONDS = 600.0
"""The longest that engines may take to start."""

_STOP_SECONDS = 20.0


class LocalServer:
    """A server of a model on several devices, while a ``with`` block lasts.

    Args:
        model: A ``nep.txt``.
        devices: As of ``nepserve serve``: ``all``, numbers of GPUs such as ``0,1``, or ``cpu:N``.
        dtype: ``float32`` or ``float64``.
        backend: As of :func:`nepcore.load`; ``auto`` takes what was measured before, and measures nothing itself.

    Attributes:
        url: Its address.

    Raises:
        ModelError: It does not start; the message is its own.
    """

    def __init__(self, model: str | Path, devices: str, *, dtype: str, backend: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="nepserve-"))
        place = self._folder / "socket"
        self.url = f"unix://{place}"
        self._log = self._folder / "log"
        flags = {
            "devices": devices, "uds": str(place), "dtype": dtype, "backend": backend, "tune-seconds": "0",
            "log-level": "warning",
        }  # fmt: skip
        command = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m", "nepserve.local_server"]
        command += [str(os.getpid()), "serve", f"model={Path(model).resolve()}"]
        command += [word for name, value in flags.items() for word in (f"--{name}", value)]
        # Settings of another server in the environment are not meant for this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NEPSERVE_")}
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
                )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def __enter__(self) -> Self:
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self) -> None:
        from .client import Client

        client = Client(self.url)
        ends = time.monotonic() + READY_SECONDS
        while not client.ready():
            if self._process.poll() is not None:
                raise ModelError(self._said() or f"the engines ended with code {self._process.returncode}")
            if time.monotonic() > ends:
                raise ModelError(f"the engines were not ready within {READY_SECONDS:g} s: {self._said()}")
            time.sleep(0.1)
        client.close()

    def _said(self) -> str:
        """Its last line, without the name of the program."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].removeprefix("nepserve: ") if lines else ""

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def main() -> None:
    """Serve until the process whose number is the first argument ends; the other arguments are those of nepserve."""
    from .cli import main as run
    from .parent import die_with

    die_with(int(sys.argv[1]))
    run(sys.argv[2:])


if __name__ == "__main__":
    main()
