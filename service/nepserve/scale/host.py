"""One replica on its node: starts the server process, says how it is, and ends it. Ray makes an actor of it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import httpx

from nepcore import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOOK_SECONDS = 5.0
"""What the server may take to say how it is."""

_KEPT_LINES = 20
_SHOWN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_KEPT_VARIABLES = {"NEPSERVE_CACHE_DIR"}
_SECRET_VARIABLES = {"RAY_AUTH_TOKEN"}


class Look(NamedTuple):
    """How a server is.

    Attributes:
        url: Where clients find it.
        node: Name of its machine, and which GPUs it was given.
        ready: Whether it can compute.
        reason: Why not; empty if it can.
        atoms: That wait there.
        device_seconds: Time that its devices computed since its start.
        devices: How many it has.
        uptime: Seconds since its start.
        version: Of nepserve, on that node.
    """

    url: str
    node: str
    ready: bool
    reason: str = ""
    atoms: int = 0
    device_seconds: float = 0.0
    devices: int = 1
    uptime: float = 0.0
    version: str = __version__


class Ended(NamedTuple):
    """How a replica ended.

    Attributes:
        code: Exit code of its server, −n for signal n; None if the actor or the node was lost.
        words: The server's last lines, or what is known instead.
    """

    code: int | None
    words: Sequence[str] = ()

    def __str__(self) -> str:
        last = f": {self.words[-1]}" if self.words else ""
        if self.code is None:
            return f"was lost{last}"
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}"
        return f"ended with code {self.code}{last}"


class Host:
    """A server process and what is asked of it; each method may be called from a thread of its own.

    Args:
        number: Of the replica.
        settings: Fields of :class:`nepserve.settings.Settings`, plain values.
        loader: See :func:`nepserve.server.run`.
        address: The node's address, for clients of a server that listens on all.
    """

    def __init__(self, number: int, settings: Mapping[str, Any], loader: str, address: str | None = None) -> None:
        self._number = number
        self._address = address
        self._all = settings.get("host") in {"0.0.0.0", "::"}
        self._url: str | None = None
        self._words: deque[str] = deque(maxlen=_KEPT_LINES)
        settings, headers = _with_own_key(settings)
        # It asks the server of its own machine, whose certificate is for another name.
        self._http = httpx.Client(headers=headers, timeout=LOOK_SECONDS, verify=False, trust_env=False)
        self._process = subprocess.Popen(
            # Without -P a file of the user's directory could stand in for a module of ours.
            [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m", "nepserve.scale.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_variables(os.environ),
            # Ctrl-C in the terminal of a cluster on this machine is for the program there.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        # This pipe stays open: the server ends when it breaks, whatever becomes of this process.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"settings": settings, "loader": loader}).encode() + b"\n")
            self._process.stdin.flush()
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_url, self._read_log)]
        for reader in self._readers:
            reader.start()

    def __repr__(self) -> str:
        # What Ray puts before each line of its log.
        return f"replica {self._number}"

    def look(self) -> Look | None:
        """How the server is; None while it does not answer."""
        if self._url is None:
            return None
        try:
            answer = self._http.get(f"{self._url}/v1/status")
            state = answer.raise_for_status().json()
            return Look(
                self.public_url,
                _node(),
                bool(state["ready"]),
                str(state.get("reason", "")),
                int(state["queue"]["atoms"]),
                float(state["device_seconds"]),
                len(state["engine"].get("devices", [None])),
                float(state["uptime"]),
            )
        except (httpx.HTTPError, ValueError, KeyError):
            return None

    def live(self) -> Ended:
        """Wait until the server has ended."""
        code = self._process.wait()
        for reader in self._readers:
            reader.join(2.0)
        return Ended(code, list(self._words))

    def drain(self) -> None:
        """Let the server finish what it has, and end."""
        self._process.terminate()

    @property
    def public_url(self) -> str:
        """Where clients find the server."""
        assert self._url is not None
        if not self._all:
            return self._url
        address = self._address or socket.gethostname()
        parts = urlsplit(self._url)
        host = f"[{address}]" if ":" in address else address
        return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))

    def _read_url(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            url = json.loads(line)
            # Addresses that stand for all are none that can be asked everywhere.
            self._url = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode(errors="replace").rstrip("\n")
            if text:
                self._words.append(text)
                print(text, file=sys.stderr, flush=True)  # noqa: T201


def _with_own_key(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings with a key that nobody else has, if the server asks for keys, and the header to send."""
    if not settings.get("api_keys") and settings.get("api_key_file") is None:
        return dict(settings), {}
    secret = secrets.token_urlsafe(32)
    keys = [*settings.get("api_keys", ()), f"scale-{secrets.token_hex(4)}:{secret}"]
    return {**settings, "api_keys": keys}, {"Authorization": f"Bearer {secret}"}


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the server: those of the node, without settings and secrets that are not for it."""
    return {
        name: value
        for name, value in environment.items()
        if (not name.startswith("NEPSERVE_") or name in _KEPT_VARIABLES) and name not in _SECRET_VARIABLES
    }


def _node() -> str:
    shown = next((os.environ[name] for name in _SHOWN if os.environ.get(name)), None)
    return socket.gethostname() + ("" if shown is None else f", GPU {shown}")
