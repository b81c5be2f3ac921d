"""Clients of a nepserve server. They need numpy, msgpack and, for the asynchronous one, httpx: no torch, no ASE.

    >>> from nepserve.client import Client
    >>> client = Client("http://127.0.0.1:8000")
    >>> client.evaluate({"symbols": ["Si", "Si"], "positions": [[0, 0, 0], [0, 0, 2.3]]})["energy"]

The ASE calculator is :class:`nepserve.client.ase.NEPCalculator`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    ConnectionFailed,
    InvalidAnswer,
    NepserveError,
    Overloaded,
    ServerError,
    StructureRejected,
    Timeout,
)
from .http import Client
from .retry import Retry

if TYPE_CHECKING:
    from .aio import AsyncClient


def __getattr__(name: str) -> Any:
    # httpx takes longer to import than everything else here, and most scripts never need it.
    if name == "AsyncClient":
        from .aio import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AsyncClient",
    "Client",
    "ConnectionFailed",
    "InvalidAnswer",
    "NepserveError",
    "Overloaded",
    "Retry",
    "ServerError",
    "StructureRejected",
    "Timeout",
]
