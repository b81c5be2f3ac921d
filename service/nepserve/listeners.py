"""The sockets that a server listens on, and TLS for what comes there."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from .settings import SettingsError

if TYPE_CHECKING:
    from .settings import Settings

log = logging.getLogger("nepserve")


def listen(settings: Settings) -> socket.socket:
    """The bound socket.

    Raises:
        SettingsError: The address is in use, or is not ours.
    """
    if settings.uds is not None:
        return _listen_unix(settings.uds)
    return _listen_tcp(settings.host, settings.port, "--port")


def listen_for_frames(settings: Settings) -> socket.socket | None:
    """The bound socket for frames; None if there is to be none.

    Raises:
        SettingsError: The address is in use, or is not ours.
    """
    where = settings.frame_address
    if where is None:
        return None
    return _listen_unix(where) if isinstance(where, Path) else _listen_tcp(settings.host, where, "--frame-socket")


def _listen_tcp(host: str, port: int, flag: str) -> socket.socket:
    where = f"{host}, port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingsError(f"cannot listen on {where}: {error.strerror or error}") from None
    try:
        # The port of a server that ended a moment ago is still remembered by the kernel.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        hint = f"; choose another with {flag} (0 takes a free one)" if in_use and port else ""
        raise SettingsError(f"cannot listen on {where}: {(error.strerror or str(error)).lower()}{hint}") from None
    return listener


def _listen_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise SettingsError(f"cannot listen on {path}: another server answers there")
            path.unlink()
        # Whoever may connect is decided by the folder; the socket itself is for its owner and group.
        mask = os.umask(0o117)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise SettingsError(f"cannot listen on {path}: {error.strerror or error}") from None
    except SettingsError:
        listener.close()
        raise
    return listener


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """TLS as the settings want it; None without a certificate.

    Raises:
        SettingsError: Certificate and key cannot be used.
    """
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        raise SettingsError(f"certificate {settings.ssl_certfile}, key {settings.ssl_keyfile}: {reason}") from None
    return context


def reload_certificate(context: ssl.SSLContext, settings: Settings) -> None:
    """Take a renewed certificate for the connections to come."""
    assert settings.ssl_certfile is not None
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        log.error("the certificate stays as it was: %s", error)
    else:
        log.info("certificate read again")
