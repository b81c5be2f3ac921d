"""The address of a server: ``http://``, ``https://`` with an optional path in front, or ``unix:///path``."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit


@dataclass(frozen=True)
class Address:
    """A parsed server address.

    Attributes:
        text: As it was given, without a slash at the end.
        host: Name or number to connect to; empty for a unix socket.
        port: TCP port; 0 for a unix socket.
        tls: Whether the connection is encrypted.
        prefix: Path in front of every route (a server behind a proxy), without a slash at the end.
        socket: Path of the unix socket; None for TCP.
    """

    text: str
    host: str
    port: int
    tls: bool
    prefix: str
    socket: str | None

    @property
    def authority(self) -> str:
        """Value of the ``Host`` header."""
        if self.socket is not None:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def base(self) -> str:
        """Scheme, authority and prefix, as an HTTP library wants them (``http://localhost`` for a unix socket)."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"


def parse_address(url: str) -> Address:
    """Take an address apart.

    Raises:
        ValueError: Not an address a client can use; the message says what one looks like.
    """
    text = url.strip().rstrip("/")
    parts = urlsplit(text)
    if parts.scheme == "unix":
        if parts.netloc or not parts.path:
            raise ValueError(f"{url!r}: a unix socket needs three slashes and a whole path: unix:///run/nepserve.sock")
        return Address(text, "", 0, False, "", unquote(parts.path))
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} is not a server address; wanted http://host:port, https://host or unix:///path")
    if parts.username is not None or parts.password is not None:
        # Shown nowhere: the address may hold a password.
        raise ValueError("the address must not hold a user or a password; give the key as api_key")
    if parts.query or parts.fragment:
        raise ValueError(f"{url!r}: an address has no '?' or '#' part")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"{url!r}: the port must be a number from 0 to 65535") from None
    try:
        parts.hostname.encode("idna")
    except UnicodeError:
        raise ValueError(f"{url!r}: {parts.hostname!r} is not the name of a host") from None
    tls = parts.scheme == "https"
    if port is None:
        port = 443 if tls else 80
    prefix = quote(unquote(parts.path.rstrip("/")), safe="/")
    return Address(text, parts.hostname, port, tls, prefix, None)
