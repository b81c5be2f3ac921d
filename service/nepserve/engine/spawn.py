"""Starting the process of an engine: its command, its environment, its socket and its stderr."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENVIRONMENT = {
    # Threads of OpenMP sleep between two parallel regions: the front needs the cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # glibc would give every large buffer back to the kernel and take new, unmapped pages for the next one.
    "MALLOC_TRIM_THRESHOLD_": "268435456",
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Exit:
    """How an engine ended.

    Attributes:
        code: Exit code; −n for signal n; None if the process could not be reaped (it hangs in the kernel).
        cause: What the front knows beyond the code (it hung, the device was lost); empty if nothing.
        stderr: Its last lines.
    """

    code: int | None
    cause: str
    stderr: tuple[str, ...]

    @property
    def signal(self) -> str | None:
        """Name of the signal that ended it (``SIGKILL``), or None."""
        if self.code is None or self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"

    def __str__(self) -> str:
        if self.code is None:
            how = "cannot be ended (it hangs in a system call)"
        else:
            how = f"ended by {self.signal}" if self.signal else f"ended with code {self.code}"
        return f"the engine {how}" + (f": {self.cause}" if self.cause else "")


def spawn(
    *, device: str, loader: str, threads: int | None, log_level: str, arenas: bool, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Start an engine; the calling thread must outlive it.

    Returns:
        The process, the front's end of its socket (non-blocking), and the end to read of its stderr and stdout.

    Raises:
        OSError: It cannot be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stderr, stderr_end = os.pipe()
    except OSError:
        ours.close()
        theirs.close()
        raise
    command = module_command("nepserve.engine")
    command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
    command += ["--device", device, "--loader", loader, "--log-level", log_level]
    if threads is not None:
        command += ["--threads", str(threads)]
    if not arenas:
        command += ["--no-arenas"]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stderr_end,
            stderr=stderr_end,
            pass_fds=[theirs.fileno()],
            env=_variables(threads, environment),
            # Not in the terminal's group: Ctrl-C is for the front, which ends the engine when its work is done.
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        os.close(stderr)
        raise
    finally:
        theirs.close()
        os.close(stderr_end)
    ours.setblocking(False)
    return process, ours, stderr


def module_command(name: str) -> list[str]:
    """What runs a module of this package in a process of its own."""
    # Without -P a file of the user's directory could stand in for a module of ours.
    return [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m", name]


def _variables(threads: int | None, environment: Mapping[str, str]) -> dict[str, str]:
    variables = {**_ENVIRONMENT, **os.environ}
    if threads is not None:
        # Libraries look at these when they are imported, before anybody could tell them otherwise.
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            variables[name] = str(threads)
    return {**variables, **environment}
