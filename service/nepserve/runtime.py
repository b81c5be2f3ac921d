"""What the processes that serve ask of interpreter, C library and kernel."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import resource
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

SWITCH_SECONDS = 0.0005
"""How long a thread that decodes a large body may keep the interpreter from the event loop."""

# mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def prepare(connections: int) -> None:
    """Make this process fit to serve so many connections."""
    _allow_files(connections + 256)
    sys.setswitchinterval(SWITCH_SECONDS)
    _keep_freed_memory()


def run(work: Coroutine[Any, Any, int]) -> int:
    """Run an event loop for ``work``."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def _allow_files(needed: int) -> None:
    """Raise the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))


def _keep_freed_memory() -> None:
    """Tell glibc to keep the memory of large bodies: given back to the kernel it would be mapped anew each time."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_TRIM_THRESHOLD, 256 << 20)
    # The largest that glibc takes.
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)
