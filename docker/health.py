"""Exit with 0 if the server of this container is ready; what a container engine asks every few seconds.

Where the server listens is taken from the variables it takes it from itself: NEPSERVE_PORT, NEPSERVE_UDS and
NEPSERVE_SSL_CERTFILE. Given as flags they are not seen here.
"""

import http.client
import os
import socket
import ssl
import sys

TIMEOUT = 4.0


def connect() -> http.client.HTTPConnection:
    """A connection to the server, not opened yet."""
    given = os.environ.get("NEPSERVE_PORT", "")
    # Kubernetes sets this variable to an address, beside a Service called nepserve; the server ignores that too.
    port = int(given) if given.isdigit() else 8000
    if path := os.environ.get("NEPSERVE_UDS"):
        connection = http.client.HTTPConnection("localhost", timeout=TIMEOUT)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(TIMEOUT)
        connection.sock.connect(path)
        return connection
    if os.environ.get("NEPSERVE_SSL_CERTFILE"):
        # The certificate is for the name that clients know, not for this address.
        context = ssl._create_unverified_context()  # noqa: SLF001
        return http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT, context=context)
    return http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)


def main() -> str | int:
    """What to exit with: 0, or a line that says why not."""
    try:
        connection = connect()
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        body = answer.read(2000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return f"no answer: {error}"
    return 0 if answer.status == 200 else f"{answer.status}: {body}"


if __name__ == "__main__":
    sys.exit(main())
