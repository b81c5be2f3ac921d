"""``nepserve scale`` as a real process, and clients that go where its file of addresses says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import psutil

from nepserve.client import Client
from servers import STAND_IN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from nepcore.structures import Structure

# What the command does, with a loader of our own.
_PROGRAM = """
import json, sys
from pathlib import Path
from nepserve import settings
from nepserve.scale.run import Wanted, run
wanted, flags, loader = json.loads(sys.argv[1])
wanted["address_file"] = Path(wanted["address_file"])
sys.exit(run(Wanted(**wanted), settings.load(flags), loader=loader))
"""


class Scaling:
    """The program, its log, its file of addresses, and what tests do to it."""

    def __init__(
        self,
        address_file: Path,
        wanted: dict[str, Any],
        *,
        loader: str = STAND_IN,
        stand_in: dict[str, Any] | None = None,
        **flags: Any,
    ) -> None:
        self.address_file = address_file
        self.lines: list[str] = []
        words = json.dumps([{"address_file": str(address_file), **wanted}, flags, loader])
        environment = {**os.environ, "STAND_IN": json.dumps(stand_in or {}), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, words], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
            # Its own group, as a command in a terminal has it: Ctrl-C goes to all of that.
            env=environment, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def addresses(self) -> list[str]:
        """What the file says."""
        return self.address_file.read_text().split() if self.address_file.exists() else []

    def wait_for(self, what: Callable[[], Any], seconds: float = 90.0) -> Any:
        """Wait until something is so."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := what():
                return found
            assert self.process.poll() is None, self.log
            time.sleep(0.05)
        raise AssertionError(f"it did not come to that:\n{self.log}")

    def wait_for_addresses(self, count: int, without: Sequence[str] = (), seconds: float = 90.0) -> list[str]:
        """Wait until so many are listed, none of them among ``without``."""

        def look() -> list[str]:
            found = self.addresses
            return found if len(found) == count and not set(found) & set(without) else []

        return self.wait_for(look, seconds)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def interrupt(self, seconds: float = 60.0) -> int:
        """Ctrl-C, and the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code


def server_at(url: str) -> psutil.Process:
    """The server process that listens there."""
    port = int(url.rpartition(":")[2])
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            for link in process.net_connections("tcp"):
                if link.status == psutil.CONN_LISTEN and link.laddr.port == port:
                    return process
    raise AssertionError(f"nobody listens at {url}")


def status(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/v1/status", timeout=10).raise_for_status().json()


class Load:
    """Clients that ask one thing after the other until they are told to stop; every answer is looked at."""

    def __init__(self, address_file: Path, structures: Sequence[Structure], clients: int = 4) -> None:
        self.answered = 0
        self.errors: list[str] = []
        self._file = address_file
        self._structures = structures
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._wanted = Client(address_file, timeout=60).evaluate_many(structures, ["energy", "forces"])
        self._threads = [threading.Thread(target=self._work, args=(k,), daemon=True) for k in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, seconds: float = 90.0) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(seconds)
        assert not any(thread.is_alive() for thread in self._threads), "a request has no answer"

    def wait_for_more(self, count: int, seconds: float = 60.0) -> None:
        goal, end = self.answered + count, time.monotonic() + seconds
        while self.answered < goal:
            assert not self.errors, self.errors[:3]
            assert time.monotonic() < end, "clients got no answers"
            time.sleep(0.02)

    def _work(self, number: int) -> None:
        client = Client(self._file, timeout=60)
        while not self._done.is_set():
            number = (number + 1) % len(self._structures)
            wrong = ""
            try:
                found = client.evaluate(self._structures[number], ["energy", "forces"])
            except Exception as error:
                wrong = repr(error)
            else:
                wanted = self._wanted.view(number)
                for name in ("energy", "forces"):
                    if np.asarray(found[name]).tobytes() != np.asarray(wanted[name]).tobytes():
                        wrong = f"the bits of {name} differ"
            with self._lock:
                self.answered += 1
                if wrong:
                    self.errors.append(wrong)
        client.close()
