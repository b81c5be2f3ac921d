"""Where i-PI listens, and how to get there although it may not listen yet."""

from __future__ import annotations

import re
import socket
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

PREFIX = "/tmp/ipi_"
"""What i-PI puts in front of the name of a unix socket."""

WAIT_SECONDS = 60.0
"""How long a driver waits for i-PI's socket, s, where nothing else is said."""

PROBE_SECONDS = 5
"""A quiet TCP connection is probed this often, s."""


class NoServerError(ConnectionError):
    """Nobody listened at i-PI's address within the time to wait."""


@dataclass(frozen=True)
class Address:
    """Where i-PI listens: ``path`` of a unix socket, or ``host`` and ``port``."""

    path: str | None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        return f"unix socket {self.path}" if self.path is not None else f"{self.host}:{self.port}"

    def connect(self, timeout: float) -> socket.socket:
        """One attempt to connect."""
        if self.path is None:
            found = socket.create_connection((self.host, self.port), timeout=timeout)
            # A step is a few short messages to and fro: none may wait for company.
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A listener whose queue is full drops connections without a word, and a node may vanish: find out.
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if sys.platform == "linux":
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        else:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                found.settimeout(timeout)
                found.connect(self.path)
            except BaseException:
                found.close()
                raise
        found.settimeout(None)
        return found


def parse_address(text: str) -> Address:
    """Take ``host:port``, ``unix:name`` (the ``<address>`` of i-PI's input) or ``unix:/whole/path`` apart.

    Raises:
        ValueError: Neither of them.
    """
    kind, _, rest = text.partition(":")
    if kind == "unix":
        name = rest.removeprefix("//") if rest.startswith("///") else rest
        if not name:
            raise ValueError(
                f"{text!r}: a unix socket needs a name, as in unix:water, or a path, as in unix:/run/water"
            )
        path = name if name.startswith("/") else PREFIX + name
        if len(path.encode()) > 107:
            raise ValueError(f"{path!r} is too long for a unix socket: at most 107 bytes")
        return Address(path)
    host, colon, port = text.rpartition(":")
    if not colon or not host or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address of i-PI; wanted host:port or unix:name")
    return Address(None, host.removeprefix("[").removesuffix("]"), int(port))


def connect(
    address: Address,
    seconds: float = WAIT_SECONDS,
    report: Callable[[str], None] | None = None,
    over: threading.Event | None = None,
) -> socket.socket:
    """Connect to i-PI, waiting for it if it is not there yet, or has no room in its queue.

    Args:
        address: Where it listens, or will.
        seconds: How long to wait for it.
        report: Told once if there is something to wait for.
        over: Set when there is nothing to wait for any more.

    Raises:
        NoServerError: It was not there within ``seconds``, or until ``over``.
        OSError: The address can never work (an unknown host, a socket of somebody else).
    """
    ends = time.monotonic() + seconds
    pause = 0.01
    while True:
        try:
            return address.connect(max(ends - time.monotonic(), 0.05))
        except (socket.gaierror, PermissionError) as error:
            raise type(error)(error.errno, f"cannot connect to i-PI at {address}: {error.strerror}") from error
        except OSError as error:
            # Not there yet, or too many came at once: a full queue refuses, resets or is "temporarily unavailable".
            if time.monotonic() + pause >= ends or (over is not None and over.is_set()):
                raise NoServerError(
                    f"i-PI was not at {address} within {seconds:g} s: {error.strerror or error}. "
                    "Is it running, and is that the <address> (and <port>) of its <ffsocket>?"
                ) from error
            if report is not None:
                report(f"waiting up to {seconds:g} s for i-PI at {address}")
                report = None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)
