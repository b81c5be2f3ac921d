"""The arguments of the clients, checked where they are given and not at the first request."""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING

from nepcore import __version__

if TYPE_CHECKING:
    from .address import Address

USER_AGENT = f"nepserve/{__version__}"


def check_timeout(seconds: float) -> float:
    """A time-out in seconds: positive and finite."""
    if not 0 < seconds < float("inf"):
        raise ValueError(f"timeout must be a positive number of seconds, not {seconds!r}")
    return float(seconds)


def check_dtype(dtype: str) -> str:
    """The type of per-atom arrays."""
    if dtype not in {"float32", "float64"}:
        raise ValueError(f"dtype must be 'float32' or 'float64', not {dtype!r}")
    return dtype


def check_priority(priority: str | None) -> str | None:
    """The priority of requests."""
    if priority not in {None, "interactive", "bulk"}:
        raise ValueError(f"priority must be 'interactive', 'bulk' or None, not {priority!r}")
    return priority


def check_key(key: str | None) -> str | None:
    """An API key that fits into a header."""
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        # The key itself stays out of the message: messages end in logs.
        raise ValueError("api_key must be printable ASCII without blanks; was a line end read with it?")
    return key


def tls_context(address: Address, verify: bool | str) -> ssl.SSLContext | None:
    """How certificates are checked: True against the system's authorities, a path against those in that file.

    Raises:
        ValueError: There are no certificates in that file.
    """
    if not address.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
    except OSError as error:
        raise ValueError(f"verify: {verify} is not a file of certificates: {error.strerror or error}") from error
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def new_request_id() -> str:
    """An id that finds the request in the server's log."""
    return os.urandom(8).hex()
