"""Kernels that need not wait for one another: streams beside the current one, the branches of a captured graph."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Generator


class Branches:
    """Streams of one device; on a CPU one thing comes after the other.

    Args:
        device: Where kernels run.
        count: Branches beside the main one.
    """

    def __init__(self, device: torch.device, count: int = 2) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []

    @contextmanager
    def aside(self, branch: int, *, again: bool = False) -> Generator[None, None, None]:
        """What is launched in it waits for what was launched before it, and is waited for by :meth:`join` alone.

        With ``again`` it waits for nothing but what is on the branch already.
        """
        if not self._streams:
            yield
            return
        stream = self._streams[branch]
        if not again:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self, *branches: int) -> None:
        """What is launched from here on waits for the branches."""
        for branch in branches if self._streams else ():
            torch.cuda.current_stream().wait_stream(self._streams[branch])
