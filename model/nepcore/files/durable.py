"""Files that a run which was cut off can go on with: what the disk holds for sure, and what was written behind it."""

from __future__ import annotations

import os
from typing import IO, Any


def settle(file: IO[Any]) -> int:
    """Have the disk hold what was written to a file; its size in bytes.

    Raises:
        OSError: It cannot.
    """
    file.flush()
    os.fsync(file.fileno())
    return os.fstat(file.fileno()).st_size


def cut(file: IO[Any], size: int) -> None:
    """Cut a file that is open for reading and writing to ``size`` bytes, and go on behind them.

    Raises:
        OSError: It is shorter.
    """
    found = file.seek(0, os.SEEK_END)
    if found < size:
        raise OSError(f"it has {found:,} bytes, where {size:,} had been written")
    file.seek(size)
    file.truncate()
