"""What an engine writes on stderr: line by line into the log of the front, and its last lines to explain its end."""

from __future__ import annotations

import logging
import os
import re
from collections import deque

logger = logging.getLogger("nepserve.engine")

TAIL_LINES = 40
"""Lines that are kept."""

_MAX_LINE = 16 * 1024
_READ_BYTES = 64 * 1024
_LEVEL = re.compile(r"<(\d{1,2})>")


class LevelFormatter(logging.Formatter):
    """For the engine: each line begins with its level, ``<30>``, for the front to log it again as it was meant."""

    def format(self, record: logging.LogRecord) -> str:
        """Format all lines of a record, tracebacks included."""
        prefix = f"<{record.levelno}>"
        source = "" if record.name == logger.name else f"{record.name}: "
        return prefix + source + super().format(record).replace("\n", f"\n{prefix}")


class Journal:
    """For the front: reads the pipe ``fd`` (made non-blocking) and logs what comes; lines without a level, as
    libraries and the interpreter write them, count as warnings."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.pid: int | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.ended = False
        self._partial = b""

    def read(self) -> bool:
        """Log some of what is there; false if there was nothing more. Sets ``ended`` at the end of the pipe."""
        if self.ended:
            return False
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.ended = True
            return False
        *lines, rest = (self._partial + data).split(b"\n")
        if len(rest) > _MAX_LINE:
            lines.append(rest)
            rest = b""
        self._partial = rest
        for line in lines:
            self._log(line)
        return True

    def close(self) -> None:
        """Close the pipe and log what stands after its last end of line."""
        os.close(self.fd)
        self.ended = True
        self._log(self._partial)
        self._partial = b""

    def _log(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        level = logging.WARNING
        if found := _LEVEL.match(text):
            level, text = int(found[1]), text[found.end() :]
        if text:
            self.tail.append(text)
            logger.log(level, "%s", text, extra={"engine_pid": self.pid})
