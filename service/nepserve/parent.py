"""A process that ends with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

EXIT_ORPHANED = 72
"""The parent died before this process could ask to die with it."""

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends.

    Args:
        parent: Process id of whoever started it; if that is gone already, this process exits here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # It died first, and the wish came too late.
        sys.exit(EXIT_ORPHANED)
