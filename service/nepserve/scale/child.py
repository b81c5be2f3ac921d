"""The server process of a replica: ``python -m nepserve.scale.child``, started by :mod:`.host`.

The first line of its standard input is JSON with ``settings`` and ``loader``; on its standard output it says its URL as
JSON once it listens. When the standard input ends, whoever started it is gone, and it drains and ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

from nepcore.errors import NepError
from nepserve import server
from nepserve.models import ModelNameError
from nepserve.settings import FIELDS, Loaded, Settings, SettingsError

END_SECONDS = 10.0
"""What the server may take to end after the time for its drain."""


def main() -> int:
    """Serve; returns the exit code of :func:`nepserve.server.run`."""
    order = json.loads(sys.stdin.buffer.readline())
    settings = Settings(**order["settings"])
    # Whatever else may be printed is no address.
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_follow, args=(settings.shutdown_timeout,), daemon=True).start()

    def listening(url: str) -> None:
        print(json.dumps(url), file=told, flush=True)

    try:
        loaded = Loaded(settings, dict.fromkeys(FIELDS, "nepserve scale"))
        return server.run(loaded, loader=order["loader"], listening=listening)
    except (SettingsError, ModelNameError, NepError) as error:
        print(f"nepserve: {error}", file=sys.stderr)  # noqa: T201
        return server.WRONG


def _follow(shutdown_timeout: float) -> None:
    """End this process when its standard input ends."""
    # Not through Python's buffer, whose lock this thread would hold when the program ends.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(shutdown_timeout + END_SECONDS)
    os._exit(server.GAVE_UP)


if __name__ == "__main__":
    sys.exit(main())
